"""What tests run against the package: schedules, fault campaigns, checks of conformance.

It is not installed with the package. Run from the repository's root, with PYTHONPATH=. if needed.
"""
