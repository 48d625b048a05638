"""Aggregation factories for TensorFlow Federated, and the TensorFlow ops they are made of.

The names below are imported when first used, so that importing one of the modules
without TFF does not load it.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "build_adaptive_dp_ftrl_aggregator": "adaptive_clipping",
    "build_dp_ftrl_aggregator": "dp_ftrl",
    "build_secagg_adaptive_dp_ftrl_aggregator": "secagg",
    "build_secagg_dp_ftrl_aggregator": "secagg",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
