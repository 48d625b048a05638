"""The noise itself as NumPy arrays, for training loops in PyTorch, JAX or NumPy.

`stream.NoiseStream` is the public class, `philox` its generator and `kernels` its
mechanisms. With a given seed it draws the noise that `private_round` draws in TensorFlow.
`secure_draws` has the Gaussians of a cryptographic generator, which `private_round` uses,
and `discrete_gaussian` exact noise for integers.
"""
