"""TFF's decorators of computations, without TFF's annotations.

By these annotations a decorated function may still be a function, and a type checker knows
nothing of its type signature.
"""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

tensorflow: Any = tff.tensorflow.computation
federated: Any = tff.federated_computation
