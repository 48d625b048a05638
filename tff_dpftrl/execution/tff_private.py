"""All private names of TensorFlow Federated that this package uses.

TFF gives no guarantee for these names. `TESTED_VERSION` is the release that they were
tried with; `tests/execution/tff_private_test.py` fails with a clear message on another.
"""

from __future__ import annotations

import tensorflow_federated as tff
from tensorflow_federated.proto.v0 import executor_pb2
from tensorflow_federated.python.core.impl.compiler import array
from tensorflow_federated.python.core.impl.executors import remote_executor, value_serialization
from tensorflow_federated.python.core.impl.types import type_serialization

__all__ = [
    "TESTED_VERSION",
    "array",
    "executor_pb2",
    "is_tested_version",
    "remote_executor",
    "type_serialization",
    "value_serialization",
]

TESTED_VERSION = "0.87.0"


def is_tested_version() -> bool:
    """Checks whether the installed TFF is the release that this file was tried with."""
    return tff.__version__ == TESTED_VERSION
