"""TFF's decorators of computations, without TFF's annotations.

By these annotations a decorated function may still be a function, and a type checker knows
nothing of its type signature.
"""

from __future__ import annotations

from typing import Any

from tff_dpftrl.execution import tff_names

tensorflow: Any = tff_names.tensorflow_computation
federated: Any = tff_names.federated_computation
