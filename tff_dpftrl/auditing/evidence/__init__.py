"""What numbers that were released prove about privacy: statistics, in NumPy and SciPy only."""
