"""Tools of the package's tests: schedules, fault campaigns, conformance checks, a store in memory.

It is not installed with the package. Run from the repository's root, with PYTHONPATH=. if needed.
"""
