"""Many runs of `tff-dpftrl train`, and what they say together. Imports no TensorFlow."""
