"""Defaults that all audits share, and that `tff-dpftrl audit` shows in its help."""

ERROR_RATE = 0.05
"""Largest chance that an audit calls code VIOLATED that keeps its claim: 1 − confidence."""

TRIALS = 8000
"""Smallest number of distinguishing games in an audit of an aggregator."""
