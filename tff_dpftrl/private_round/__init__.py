"""One private round as TensorFlow functions: noise, seeds, clipping, discretisation.

No TFF here: a server, a fine-tuning loop or an auditor calls exactly what the
aggregators call.
"""

NOISE_VERSION = 2
"""Version of the noise; every change after which the same seed gives other noise raises it.

A run in progress is bound to its version: another one would release two noises on one
cohort. Version 2 scales and adds the noise in float64. Raise `numpy_noise.stream`'s with it.
"""
