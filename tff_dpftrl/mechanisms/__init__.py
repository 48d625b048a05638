"""Strategies of the matrix mechanism: C, its sensitivity, its losses, its noise.

NumPy and SciPy only. `table` builds a strategy from a name; `strategy` is the
interface, `blt`, `tree`, `banded` and the like are its implementations,
`blt_optimize` and the like find the best of a kind, `serialization` keeps them in
files and `zoo` has some ready-made. `numerics` is machinery. See README.md.
"""
