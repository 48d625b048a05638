"""One private round as TensorFlow functions: noise, seeds, clipping, discretisation.

No TFF here: a server, a fine-tuning loop or an auditor calls exactly what the
aggregators call.
"""

NOISE_VERSION = 2
"""Raise it with every change after which the same seed gives other noise.

A run in progress is bound to it: going on with another one would release two noises on
one cohort. 2: noise is scaled and added in float64.
"""
