"""TFF's decorators of computations, without annotations that mislead type checkers."""

from __future__ import annotations

from typing import Any

from tff_dpftrl.execution import tff_names

tensorflow: Any = tff_names.tensorflow_computation
federated: Any = tff_names.federated_computation
