"""The noise itself as NumPy arrays, for training loops in PyTorch, JAX or NumPy.

`stream.NoiseStream` is the public class, `philox` its generator and `kernels` its
mechanisms. It draws the noise that `private_round` draws in TensorFlow for the same seed.
"""
