"""One private round as TensorFlow functions: noise, seeds, clipping, discretisation.

No TFF here: a server, a fine-tuning loop or an auditor calls exactly what the
aggregators call.
"""

NOISE_VERSION = 3
"""Version of the noise; every change after which the same seed gives other noise raises it.

A run in progress is bound to `STATE_VERSION`: its later rounds draw earlier noise again, to cancel
it. Version 2 scales and adds the noise in float64. From version 3 on, each execution of a round
draws its own. Raise `numpy_noise.stream`'s with it.
"""

STATE_VERSION = 2
"""Oldest version of the noise whose states go on, where their form is still the same."""
