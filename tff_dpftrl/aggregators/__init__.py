"""Aggregation factories for TensorFlow Federated, and the types their arguments have.

The names below are imported when first used, so that importing one of the modules
does not load them all.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "AdaptiveClipping": "private_round.adaptive_clipping",
    "ClippedDenominator": "private_round.estimators",
    "FixedDenominator": "private_round.estimators",
    "FlatClipping": "private_round.clipping",
    "PerLayerClipping": "private_round.clipping",
    "AdaptiveDPFTRLFactory": "aggregators.adaptive_clipping",
    "DPFTRLFactory": "aggregators.dp_ftrl",
    "ExpensiveClippingWarning": "aggregators.adaptive_clipping",
    "SampledGaussianFactory": "aggregators.sampled_gaussian",
    "build_adaptive_dp_ftrl_aggregator": "aggregators.adaptive_clipping",
    "build_dp_ftrl_aggregator": "aggregators.dp_ftrl",
    "build_secagg_adaptive_dp_ftrl_aggregator": "aggregators.secagg",
    "build_secagg_dp_ftrl_aggregator": "aggregators.secagg",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tff_dpftrl.{_HOME_OF[name]}"), name)
