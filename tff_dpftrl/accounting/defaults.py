"""What is assumed where nothing is said, in commands, configs and functions alike."""

DELTA = 1e-10
"""δ, that of Gboard's models (Xu et al. 2023); it must be far below 1 over the number of users."""

LARGE_DELTA = 1e-3
"""δ above which a warning is due where the number of users is not known."""
