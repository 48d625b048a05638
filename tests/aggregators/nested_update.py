"""Update of 14 numbers in three tensors, and its type."""

import collections

import numpy as np
import tensorflow_federated as tff

DIM = 14
TYPE = tff.to_type(
    collections.OrderedDict(
        a=tff.TensorType(np.float32, [7]),
        b=(np.float32, [tff.TensorType(np.float32, [3, 2])]),
    )
)


def update(seed):
    rng = np.random.default_rng(seed)
    return collections.OrderedDict(
        a=rng.normal(size=7).astype(np.float32),
        b=(np.float32(rng.normal()), [rng.normal(size=(3, 2)).astype(np.float32)]),
    )
