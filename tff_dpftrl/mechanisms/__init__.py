"""Strategies of the matrix mechanism: matrix C, sensitivity, losses and noise.

NumPy and SciPy only. `table` builds a strategy from a name; `strategy` is the
interface, `blt`, `tree`, `banded` and the like are its implementations,
`blt_optimize` and the like optimise them, `serialization` writes and reads files, and
`zoo` has some ready-made strategies. `numerics` has their computations. See README.md.
"""
