"""Default values shared by commands, configs and functions."""

DELTA = 1e-10
"""Default δ, that of Gboard's models (Xu et al. 2023); δ must be far below 1 / number of users."""

LARGE_DELTA = 1e-3
"""Largest δ without a caveat where the number of users is not known."""
