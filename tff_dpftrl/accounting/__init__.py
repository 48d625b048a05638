"""What a run costs in privacy, what a plan would cost, and how to say so.

Float64 NumPy, SciPy and dp_accounting only: no TensorFlow.
"""
