"""What a run costs in privacy, what a plan would cost, and how to say so.

Float64 NumPy, SciPy and dp_accounting only: no TensorFlow.
"""

DEFAULT_DELTA = 1e-10
"""δ where a command or a config is given none: that of Gboard's models (Xu et al. 2023).

It must be far below 1 over the number of users.
"""
