"""The noise itself as NumPy arrays, for training loops in PyTorch, JAX or NumPy.

`stream.NoiseStream` is the public class, `philox` its generator and `kernels` its
mechanisms. It draws the noise that `private_round` draws in TensorFlow for the same seed.
`secure_draws` has the Gaussians of a cryptographic generator, which `private_round` uses,
and `discrete_gaussian` exact noise for integers.
"""
