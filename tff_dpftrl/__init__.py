"""Differentially private federated learning without sampling assumptions.

Every name below, the folders of this package included, is imported when it is first used.
So `import tff_dpftrl` is quick, and the maths (participation, mechanisms, accounting) does not
import TensorFlow.
"""

import importlib
import os

from tff_dpftrl.version import __version__

# Type checkers and editors read this constant as true; importing it from `typing` takes time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from tff_dpftrl import (
        accounting,
        aggregators,
        auditing,
        cli,
        data,
        discretization,
        execution,
        finetuning,
        learning,
        mechanisms,
        models,
        numpy_noise,
        participation,
        private_round,
        reports,
        runs,
        runtime,
        secure_sums,
        sweeps,
        training,
    )
    from tff_dpftrl.accounting.amplified_banded import AmplifiedBanded
    from tff_dpftrl.accounting.calibrate import calibrate_noise_multiplier
    from tff_dpftrl.accounting.dp_fedavg import DpFedAvg
    from tff_dpftrl.accounting.dp_fedavg import calibrate_noise_multiplier as calibrate_dp_fedavg
    from tff_dpftrl.accounting.facts import Facts
    from tff_dpftrl.accounting.guarantee import Guarantee, dp_ftrl_guarantee, epsilon_so_far
    from tff_dpftrl.accounting.parts import Cost, Part
    from tff_dpftrl.accounting.statement import (
        PrivacyStatement,
        SampledClaim,
        dp_ftrl_statement,
        sampled_statement,
    )
    from tff_dpftrl.aggregators.adaptive_clipping import (
        AdaptiveDPFTRLFactory,
        build_adaptive_dp_ftrl_aggregator,
    )
    from tff_dpftrl.aggregators.check_process import check_process
    from tff_dpftrl.aggregators.dp_ftrl import DPFTRLFactory, build_dp_ftrl_aggregator
    from tff_dpftrl.aggregators.dp_query import DPFTRLAverageQuery, DPFTRLSumQuery
    from tff_dpftrl.aggregators.sampled_gaussian import SampledGaussianFactory
    from tff_dpftrl.aggregators.secagg import (
        SecAggFactory,
        build_secagg_dp_ftrl_aggregator,
    )
    from tff_dpftrl.aggregators.weighted import WeightedFactory
    from tff_dpftrl.auditing.aggregator import audit_aggregator
    from tff_dpftrl.auditing.audit_report import AuditReport
    from tff_dpftrl.auditing.strategy import check_strategy
    from tff_dpftrl.auditing.training import audit_training
    from tff_dpftrl.execution.compiled_process import compile_process
    from tff_dpftrl.finetuning.keras_fit import FitPrivacy, private_fit
    from tff_dpftrl.learning.dp_fedavg import build_dp_fedavg, build_dp_fedsgd
    from tff_dpftrl.mechanisms.banded import Banded
    from tff_dpftrl.mechanisms.banded_optimize import optimize_banded
    from tff_dpftrl.mechanisms.banded_toeplitz import BandedToeplitz
    from tff_dpftrl.mechanisms.banded_toeplitz_optimize import optimize_banded_toeplitz
    from tff_dpftrl.mechanisms.blt import Blt
    from tff_dpftrl.mechanisms.blt_optimize import optimize_blt
    from tff_dpftrl.mechanisms.dense import Dense
    from tff_dpftrl.mechanisms.identity import Identity
    from tff_dpftrl.mechanisms.inverse_banded import InverseBanded
    from tff_dpftrl.mechanisms.inverse_banded_optimize import (
        optimize_bifr,
        optimize_inverse_banded,
    )
    from tff_dpftrl.mechanisms.restarts import Restarted
    from tff_dpftrl.mechanisms.serialization import load as load_strategy
    from tff_dpftrl.mechanisms.serialization import save as save_strategy
    from tff_dpftrl.mechanisms.strategy import Sensitivity, Strategy
    from tff_dpftrl.mechanisms.table import Options as MechanismOptions
    from tff_dpftrl.mechanisms.table import build as build_strategy
    from tff_dpftrl.mechanisms.tree import FullTree, Tree
    from tff_dpftrl.numpy_noise.stream import NoiseStream
    from tff_dpftrl.participation.cohorts import (
        CohortSampler,
        MinSepSampler,
        PoissonSampler,
        ShuffledEpochs,
    )
    from tff_dpftrl.participation.ledger import Ledger
    from tff_dpftrl.participation.observed import (
        ObservedParticipation,
        Participation,
        ParticipationCounter,
    )
    from tff_dpftrl.participation.schema import MinSep
    from tff_dpftrl.participation.timer import TimerModel, TimerSampler
    from tff_dpftrl.private_round.adaptive_clipping import AdaptiveClipping
    from tff_dpftrl.private_round.clipping import FlatClipping, PerLayerClipping
    from tff_dpftrl.private_round.estimators import ClippedDenominator, FixedDenominator
    from tff_dpftrl.runs.committed_rounds import CommittedRounds, begin_or_resume
    from tff_dpftrl.training.config import TrainingConfig
    from tff_dpftrl.training.run import train

__all__ = [
    "__version__",
    # Who takes part, and how often.
    "MinSep",
    "CohortSampler",
    "MinSepSampler",
    "PoissonSampler",
    "ShuffledEpochs",
    "TimerModel",
    "TimerSampler",
    "Participation",
    "ObservedParticipation",
    "ParticipationCounter",
    "Ledger",
    "CommittedRounds",
    "begin_or_resume",
    # Mechanisms: the matrices that correlate the noise of the rounds.
    "Strategy",
    "Banded",
    "BandedToeplitz",
    "Blt",
    "Dense",
    "FullTree",
    "Identity",
    "InverseBanded",
    "Restarted",
    "Tree",
    "Sensitivity",
    "MechanismOptions",
    "build_strategy",
    "load_strategy",
    "save_strategy",
    "optimize_banded",
    "optimize_banded_toeplitz",
    "optimize_bifr",
    "optimize_inverse_banded",
    "optimize_blt",
    "NoiseStream",
    # Accounting and privacy statements.
    "Guarantee",
    "dp_ftrl_guarantee",
    "epsilon_so_far",
    "calibrate_noise_multiplier",
    "DpFedAvg",
    "calibrate_dp_fedavg",
    "AmplifiedBanded",
    "Facts",
    "Part",
    "Cost",
    "PrivacyStatement",
    "SampledClaim",
    "dp_ftrl_statement",
    "sampled_statement",
    # Aggregators for TensorFlow Federated, and their arguments.
    "build_dp_ftrl_aggregator",
    "build_adaptive_dp_ftrl_aggregator",
    "build_secagg_dp_ftrl_aggregator",
    "DPFTRLFactory",
    "SecAggFactory",
    "AdaptiveDPFTRLFactory",
    "SampledGaussianFactory",
    "WeightedFactory",
    "DPFTRLAverageQuery",
    "DPFTRLSumQuery",
    "AdaptiveClipping",
    "FlatClipping",
    "PerLayerClipping",
    "ClippedDenominator",
    "FixedDenominator",
    "check_process",
    # Learning processes and training runs.
    "build_dp_fedavg",
    "build_dp_fedsgd",
    "compile_process",
    "train",
    "TrainingConfig",
    "FitPrivacy",
    "private_fit",
    # Audits of the promise itself.
    "AuditReport",
    "audit_aggregator",
    "audit_training",
    "check_strategy",
    # Folders of this package.
    "accounting",
    "aggregators",
    "auditing",
    "cli",
    "data",
    "discretization",
    "execution",
    "finetuning",
    "learning",
    "mechanisms",
    "models",
    "numpy_noise",
    "participation",
    "private_round",
    "reports",
    "runs",
    "runtime",
    "secure_sums",
    "sweeps",
    "training",
]

# Module that defines a name; after a colon, the name there where it differs.
_MODULE_OF = {
    "MinSep": "participation.schema",
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
    "CommittedRounds": "runs.committed_rounds",
    "begin_or_resume": "runs.committed_rounds",
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
    "Sensitivity": "mechanisms.strategy",
    "MechanismOptions": "mechanisms.table:Options",
    "build_strategy": "mechanisms.table:build",
    "load_strategy": "mechanisms.serialization:load",
    "save_strategy": "mechanisms.serialization:save",
    "optimize_banded": "mechanisms.banded_optimize",
    "optimize_banded_toeplitz": "mechanisms.banded_toeplitz_optimize",
    "optimize_bifr": "mechanisms.inverse_banded_optimize",
    "optimize_inverse_banded": "mechanisms.inverse_banded_optimize",
    "optimize_blt": "mechanisms.blt_optimize",
    "NoiseStream": "numpy_noise.stream",
    "Guarantee": "accounting.guarantee",
    "dp_ftrl_guarantee": "accounting.guarantee",
    "epsilon_so_far": "accounting.guarantee",
    "calibrate_noise_multiplier": "accounting.calibrate",
    "DpFedAvg": "accounting.dp_fedavg",
    "calibrate_dp_fedavg": "accounting.dp_fedavg:calibrate_noise_multiplier",
    "AmplifiedBanded": "accounting.amplified_banded",
    "Facts": "accounting.facts",
    "Part": "accounting.parts",
    "Cost": "accounting.parts",
    "PrivacyStatement": "accounting.statement",
    "SampledClaim": "accounting.statement",
    "dp_ftrl_statement": "accounting.statement",
    "sampled_statement": "accounting.statement",
    "build_dp_ftrl_aggregator": "aggregators.dp_ftrl",
    "build_adaptive_dp_ftrl_aggregator": "aggregators.adaptive_clipping",
    "build_secagg_dp_ftrl_aggregator": "aggregators.secagg",
    "SecAggFactory": "aggregators.secagg",
    "DPFTRLFactory": "aggregators.dp_ftrl",
    "AdaptiveDPFTRLFactory": "aggregators.adaptive_clipping",
    "SampledGaussianFactory": "aggregators.sampled_gaussian",
    "WeightedFactory": "aggregators.weighted",
    "DPFTRLAverageQuery": "aggregators.dp_query",
    "DPFTRLSumQuery": "aggregators.dp_query",
    "AdaptiveClipping": "private_round.adaptive_clipping",
    "FlatClipping": "private_round.clipping",
    "PerLayerClipping": "private_round.clipping",
    "ClippedDenominator": "private_round.estimators",
    "FixedDenominator": "private_round.estimators",
    "check_process": "aggregators.check_process",
    "build_dp_fedavg": "learning.dp_fedavg",
    "build_dp_fedsgd": "learning.dp_fedavg",
    "compile_process": "execution.compiled_process",
    "train": "training.run",
    "TrainingConfig": "training.config",
    "FitPrivacy": "finetuning.keras_fit",
    "private_fit": "finetuning.keras_fit",
    "AuditReport": "auditing.audit_report",
    "audit_aggregator": "auditing.aggregator",
    "audit_training": "auditing.training",
    "check_strategy": "auditing.strategy",
}


if not TYPE_CHECKING:  # A checker that sees it takes every misspelt name for a good one.

    def __getattr__(name: str):
        if name in _MODULE_OF:
            module, _, original = _MODULE_OF[name].partition(":")
            return getattr(importlib.import_module(f"{__name__}.{module}"), original or name)
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)


if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "3":  # As in the processes that a command starts.
    importlib.import_module(f"{__name__}.quiet_tensorflow").install()
