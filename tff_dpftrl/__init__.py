"""Differentially private federated learning without sampling assumptions.

The names below are loaded when they are first used, so that the maths
(participation, mechanisms, accounting) does not pull TensorFlow in.
"""

import importlib

from tff_dpftrl.version import __version__

_MODULE_OF = {
    "MinSep": "participation.schema",
    "Blt": "mechanisms.blt",
    "Identity": "mechanisms.identity",
    "Tree": "mechanisms.tree",
    "optimize_blt": "mechanisms.blt_optimize",
    "calibrate_noise_multiplier": "accounting.calibrate",
    "dp_ftrl_guarantee": "accounting.guarantee",
    "PrivacyStatement": "accounting.statement",
    "dp_ftrl_statement": "accounting.statement",
    "MinSepSampler": "participation.cohorts",
    "ParticipationCounter": "participation.observed",
    "Ledger": "participation.ledger",
    "build_dp_ftrl_aggregator": "aggregators.dp_ftrl",
    "build_adaptive_dp_ftrl_aggregator": "aggregators.adaptive_clipping",
    "build_secagg_dp_ftrl_aggregator": "aggregators.secagg",
    "build_dp_fedavg": "learning.dp_fedavg",
    "build_dp_fedsgd": "learning.dp_fedavg",
}

_SUBPACKAGES = (
    "accounting",
    "aggregators",
    "cli",
    "data",
    "discretization",
    "execution",
    "learning",
    "mechanisms",
    "models",
    "participation",
    "private_round",
    "runs",
    "training",
)

__all__ = ["__version__", *_MODULE_OF, *_SUBPACKAGES]


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return getattr(module, name)


def __dir__():
    return sorted(__all__)
