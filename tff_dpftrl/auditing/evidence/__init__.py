"""Statistics of releases that prove something about privacy, in NumPy and SciPy only."""
