"""Sweeps: many runs of `tff-dpftrl train`, and their results together. Imports no TensorFlow."""
