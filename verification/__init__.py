"""What tests and benchmarks run against the package: simulated schedules and fault campaigns.

It is not installed with the package. Run from the repository's root, with PYTHONPATH=. if needed.
"""
