"""Privacy accounting of runs and plans, and the statements about them.

Float64 NumPy, SciPy and dp_accounting only: no TensorFlow.
"""
