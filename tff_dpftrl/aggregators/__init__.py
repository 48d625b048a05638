"""Aggregation factories for TensorFlow Federated, and the types their arguments have.

The names below are imported when first used, so that importing one of the modules
does not load them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tff_dpftrl.aggregators.adaptive_clipping import (
        AdaptiveDPFTRLFactory,
        ExpensiveClippingWarning,
        build_adaptive_dp_ftrl_aggregator,
    )
    from tff_dpftrl.aggregators.dp_ftrl import DPFTRLFactory, build_dp_ftrl_aggregator
    from tff_dpftrl.aggregators.sampled_gaussian import SampledGaussianFactory
    from tff_dpftrl.aggregators.secagg import (
        SecAggFactory,
        build_secagg_dp_ftrl_aggregator,
    )
    from tff_dpftrl.aggregators.weighted import WeightedFactory
    from tff_dpftrl.private_round.adaptive_clipping import AdaptiveClipping
    from tff_dpftrl.private_round.clipping import FlatClipping, PerLayerClipping
    from tff_dpftrl.private_round.estimators import ClippedDenominator, FixedDenominator

__all__ = [
    "AdaptiveClipping",
    "ClippedDenominator",
    "FixedDenominator",
    "FlatClipping",
    "PerLayerClipping",
    "AdaptiveDPFTRLFactory",
    "DPFTRLFactory",
    "SecAggFactory",
    "ExpensiveClippingWarning",
    "SampledGaussianFactory",
    "WeightedFactory",
    "build_adaptive_dp_ftrl_aggregator",
    "build_dp_ftrl_aggregator",
    "build_secagg_dp_ftrl_aggregator",
]

# Module that defines a name.
_MODULE_OF = {
    "AdaptiveClipping": "private_round.adaptive_clipping",
    "ClippedDenominator": "private_round.estimators",
    "FixedDenominator": "private_round.estimators",
    "FlatClipping": "private_round.clipping",
    "PerLayerClipping": "private_round.clipping",
    "AdaptiveDPFTRLFactory": "aggregators.adaptive_clipping",
    "DPFTRLFactory": "aggregators.dp_ftrl",
    "ExpensiveClippingWarning": "aggregators.adaptive_clipping",
    "SampledGaussianFactory": "aggregators.sampled_gaussian",
    "WeightedFactory": "aggregators.weighted",
    "build_adaptive_dp_ftrl_aggregator": "aggregators.adaptive_clipping",
    "build_dp_ftrl_aggregator": "aggregators.dp_ftrl",
    "build_secagg_dp_ftrl_aggregator": "aggregators.secagg",
    "SecAggFactory": "aggregators.secagg",
}


if not TYPE_CHECKING:  # A checker that sees it takes every misspelt name for a good one.

    def __getattr__(name: str):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"tff_dpftrl.{_MODULE_OF[name]}"), name)
