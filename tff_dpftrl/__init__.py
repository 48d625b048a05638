"""Differentially private federated learning without sampling assumptions.

The names below are loaded when they are first used, so that the maths
(participation, mechanisms, accounting) does not pull TensorFlow in.
"""

import importlib

from tff_dpftrl.version import __version__

# Where a name is defined; after a colon, what it is called there if not the same.
_MODULE_OF = {
    "MinSep": "participation.schema",
    "Strategy": "mechanisms.strategy",
    "Banded": "mechanisms.banded",
    "BandedToeplitz": "mechanisms.banded_toeplitz",
    "Blt": "mechanisms.blt",
    "Dense": "mechanisms.dense",
    "FullTree": "mechanisms.tree",
    "Identity": "mechanisms.identity",
    "InverseBanded": "mechanisms.inverse_banded",
    "Restarted": "mechanisms.restarts",
    "Tree": "mechanisms.tree",
    "MechanismOptions": "mechanisms.table:Options",
    "build_strategy": "mechanisms.table:build",
    "load_strategy": "mechanisms.serialization:load",
    "save_strategy": "mechanisms.serialization:save",
    "optimize_banded": "mechanisms.banded_optimize",
    "optimize_banded_toeplitz": "mechanisms.banded_toeplitz_optimize",
    "optimize_bifr": "mechanisms.inverse_banded_optimize",
    "optimize_blt": "mechanisms.blt_optimize",
    "calibrate_noise_multiplier": "accounting.calibrate",
    "Sensitivity": "mechanisms.strategy",
    "Guarantee": "accounting.guarantee",
    "dp_ftrl_guarantee": "accounting.guarantee",
    "epsilon_so_far": "accounting.guarantee",
    "DpFedAvg": "accounting.dp_fedavg",
    "calibrate_dp_fedavg": "accounting.dp_fedavg:calibrate_noise_multiplier",
    "AmplifiedBanded": "accounting.amplified_banded",
    "Facts": "accounting.facts",
    "PrivacyStatement": "accounting.statement",
    "AuditReport": "auditing.audit_report",
    "audit_aggregator": "auditing.aggregator",
    "audit_training": "auditing.training",
    "dp_ftrl_statement": "accounting.statement",
    "sampled_statement": "accounting.statement",
    "CohortSampler": "participation.cohorts",
    "MinSepSampler": "participation.cohorts",
    "PoissonSampler": "participation.cohorts",
    "ShuffledEpochs": "participation.cohorts",
    "TimerModel": "participation.timer",
    "TimerSampler": "participation.timer",
    "Participation": "participation.observed",
    "ObservedParticipation": "participation.observed",
    "ParticipationCounter": "participation.observed",
    "Ledger": "participation.ledger",
    "build_dp_ftrl_aggregator": "aggregators.dp_ftrl",
    "build_adaptive_dp_ftrl_aggregator": "aggregators.adaptive_clipping",
    "build_secagg_dp_ftrl_aggregator": "aggregators.secagg",
    "build_secagg_adaptive_dp_ftrl_aggregator": "aggregators.secagg",
    "SampledGaussianFactory": "aggregators.sampled_gaussian",
    "DPFTRLFactory": "aggregators.dp_ftrl",
    "AdaptiveDPFTRLFactory": "aggregators.adaptive_clipping",
    "AdaptiveClipping": "private_round.adaptive_clipping",
    "FlatClipping": "private_round.clipping",
    "PerLayerClipping": "private_round.clipping",
    "FixedDenominator": "private_round.estimators",
    "ClippedDenominator": "private_round.estimators",
    "check_process": "aggregators.check_process",
    "compile_process": "execution.compiled_process",
    "build_dp_fedavg": "learning.dp_fedavg",
    "build_dp_fedsgd": "learning.dp_fedavg",
    "train": "training.run",
    "TrainingConfig": "training.config",
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
    module, _, original = _MODULE_OF[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), original or name)


def __dir__():
    return sorted(__all__)
