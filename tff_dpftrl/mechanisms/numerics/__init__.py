"""Numerical methods of the strategies and their optimisers; internal."""
