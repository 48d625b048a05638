"""The one frozen description of a training run.

Flags of `tff-dpftrl train`, keys of a TOML file and the resolved `config.json` of a run are all the
fields of `TrainingConfig`: what is claimed and what is run cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import defaults
from tff_dpftrl.data import vocabulary
from tff_dpftrl.mechanisms import defaults as mechanism_defaults
from tff_dpftrl.mechanisms import table
from tff_dpftrl.runs import metrics_share
from tff_dpftrl.training import language_config, learning_options

if TYPE_CHECKING:
    from typing_extensions import Self

    from tff_dpftrl.accounting import parts, statement
    from tff_dpftrl.runs import privacy as privacy_lib
    from tff_dpftrl.runs import simulated_run

Algorithm = Literal["dp-ftrl", "dp-fedavg", "dp-fedsgd"]
Mechanism = Literal[(*table.runnable(), "none")]
Sampling = Literal["cyclic", "bins", "b-min-sep"]
Estimator = Literal["fixed-denominator", "clipped-denominator"]

_option = language_config.option

_POSITIVE = ("max_epsilon", "metrics_epsilon", "target_epsilon")

_RATES = ("client_learning_rate", "server_adam_epsilon", "server_learning_rate")

_MECHANISM_OPTIONS = ("error", "buffers", "max_decay", "bands", "correlation")

_SAMPLED_ONLY = ("clip_norm_schedule", "estimator", "per_layer_clipping")

_CORRELATED_ONLY = (*_MECHANISM_OPTIONS, "mechanism", "min_sep", "strategy", "workload")

_NOT_AMPLIFIED = {
    "adaptive_clipping": "its noise restarts, which the accounting of samples does not know",
    "max_participations": "the sampling decides how often a client comes",
    "secagg_bits": "its sums have room for a fixed number of clients",
    **dict.fromkeys(_SAMPLED_ONLY, "sums have a fixed denominator, and updates are clipped whole"),
    "clip_norm_schedule": "noise of different rounds cancels only at one clip norm",
}

_DP_FTRL_ONLY = (*_CORRELATED_ONLY, "adaptive_clipping", "max_participations", "secagg_bits")


@dataclasses.dataclass(frozen=True)
class TrainingConfig(language_config.LanguageConfig):
    """Everything that decides what a training run does.

    Attributes carry their meaning, unit and group in their field metadata, which
    is what `tff-dpftrl train --help` prints.
    """

    base_vocabulary: str | None = _option(
        None,
        "--vocabulary dp: public vocabulary to start from, 'docs', 'english' or a file. Words of "
        "the training users, counted with noise, replace its rarer half. 'none': their words "
        "alone. Default: the one that a run without --vocabulary takes.",
        "data",
    )
    batch_size: int = _option(8, "Sequences in a client's batch.", "data", 1)
    max_sequences_per_client: int = _option(
        64, "Largest number of sequences of one client that are used in a round.", "data", 1
    )

    num_rounds: int = _option(100, "Number of rounds of training.", "federated learning", 1)
    clients_per_round: int = _option(
        20, "Number of clients in a round's cohort (the report goal).", "federated learning", 1
    )
    client_epochs: int = _option(
        1, "Number of passes of a client over its sequences in a round.", "federated learning", 1
    )
    client_learning_rate: float = _option(
        1.0, "Learning rate of the clients' SGD.", "federated learning", 0.0
    )
    server_optimizer: learning_options.ServerOptimizer = _option(
        "momentum", "Optimizer of the server: sgd, momentum or adam.", "federated learning"
    )
    server_learning_rate: float = _option(
        1.0, "Learning rate of the server's optimizer.", "federated learning", 0.0
    )
    server_momentum: float = _option(
        0.9, "Momentum of the server's optimizer 'momentum'.", "federated learning", 0.0
    )
    server_adam_epsilon: float = _option(
        1e-7,
        "Term that the server's optimizer 'adam' adds to the root of its second moment. Steps are "
        "normalised where updates are larger than this term.",
        "federated learning",
        0.0,
    )
    server_warmup_rounds: int = _option(
        0,
        "Rounds over which the server's learning rate grows to its full value.",
        "federated learning",
        0,
    )
    server_decay: learning_options.Decay = _option(
        "none",
        "How the server's learning rate falls to zero over the rounds: none, linear or cosine.",
        "federated learning",
    )
    iterate_averaging: float | None = _option(
        None,
        "Decay of the exponential moving average of the rounds' models, which is evaluated and "
        "kept in place of the last model; 0.95 averages some 20 rounds. It costs no privacy. "
        "Default: no average.",
        "federated learning",
        0.0,
    )

    algorithm: Algorithm = _option(
        "dp-ftrl",
        "Algorithm. dp-ftrl: federated averaging with correlated noise, without a sampling "
        "assumption. dp-fedavg and dp-fedsgd: independent noise, amplified by secret Poisson "
        "sampling of users.",
        "privacy",
    )
    sampling: Sampling | None = _option(
        None,
        "Secret sampling of users beside correlated noise, for data that one party holds whole. "
        "cyclic: groups take turns, and a round is a Poisson sample of the group; needs a banded "
        "mechanism. bins: each user is in every round of a bin. b-min-sep: Poisson samples of the "
        "users who were not in the last rounds. min_sep is the number of groups, or the b. For "
        "dp-ftrl and dp-fedavg.",
        "privacy",
    )
    mechanism: Mechanism = _option(
        "blt",
        f"Noise: {', '.join(table.runnable())} (see `tff-dpftrl optimize --help`), or none (no "
        "clipping, no noise, no privacy). For dp-ftrl, or with a sampling.",
        "privacy",
    )
    strategy: str | None = _option(
        None,
        "Strategy in place of a mechanism that is optimised for the run: a file that `tff-dpftrl "
        "optimize --output` wrote, or an entry of the zoo of production models, like "
        "blt-gboard-b400.",
        "privacy",
    )
    noise_multiplier: float | None = _option(
        None, "Standard deviation of the noise draws per unit of clip norm.", "privacy", 0.0
    )
    target_epsilon: float | None = _option(
        None, "Largest ε that the whole run may spend, in place of a noise multiplier.", "privacy"
    )
    delta: float = _option(defaults.DELTA, "δ of the (ε, δ) statement.", "privacy")
    budget_shares: str | None = _option(
        None,
        "Shares of the budget for what is released besides the weights, like vocabulary=0.05. "
        "Default: the default shares.",
        "privacy",
    )
    metrics_epsilon: float | None = _option(
        None,
        "Largest ε of the loss and accuracy on the training cohorts, if nothing else were "
        "released: they are then released with noise. target_epsilon is for the whole. Or give a "
        "share, like budget_shares metrics=0.05. Default: they stay in private/.",
        "privacy",
    )
    clip_norm: float = _option(
        0.5, "L2 norm that a client's update is clipped to (the first one if adaptive).", "privacy"
    )
    estimator: Estimator = _option(
        "fixed-denominator",
        "dp-fedavg and dp-fedsgd: denominator of a cohort's sum. fixed-denominator: the expected "
        "number of clients. clipped-denominator: the number of clients that came, but not less "
        "than the expected one; it takes twice the noise.",
        "privacy",
    )
    per_layer_clipping: bool = _option(
        False,
        "dp-fedavg and dp-fedsgd: clip each of the m tensors of an update by itself, to clip_norm "
        "/ √m, instead of all of them together.",
        "privacy",
    )
    clip_norm_schedule: str | None = _option(
        None,
        "dp-fedavg and dp-fedsgd: later clip norms, each behind the number of rounds after which "
        "it begins, like 2000:7.9,4000:5. The noise changes with the clip norm, so that noise "
        "multiplier and ε stay the same (McMahan et al. 2018, section 3).",
        "privacy",
    )
    simulate_report_goal: int | None = _option(
        None,
        "Number of clients a round of a larger run to simulate. The noise on the average of "
        "clients_per_round is then what that run would have. Noise, target_epsilon, min_sep and "
        "max_participations are then those of the larger run. The statement says what it and what "
        "the simulation promise.",
        "privacy",
        1,
    )
    simulate_population: int | None = _option(
        None,
        "Number of clients in the population of the larger run (simulate_report_goal).",
        "privacy",
        1,
    )
    min_sep: int | None = _option(
        None,
        "Smallest difference between the indices of two rounds of one client: a stride, not the "
        "gap in between. Default: the largest that the population allows.",
        "privacy",
        1,
    )
    max_participations: int | None = _option(
        None,
        "Largest number of rounds of one client. Default: as many as min_sep allows, or, without "
        "min_sep, as few as equal shares of the rounds need.",
        "privacy",
        1,
    )
    error: Literal["max", "rms"] | None = _option(
        None,
        "Noise that an optimised mechanism minimises, over the prefix sums: the largest (max) or "
        "the root mean square (rms). Default: max for blt and rms for the others.",
        "privacy",
    )
    workload: Literal["prefix", "auto"] = _option(
        "prefix",
        "Sums whose noise an optimised mechanism minimises. prefix: prefix sums of the updates. "
        "auto: the sums from which server_optimizer, its schedule and iterate_averaging make "
        "models. For adam, auto takes its momentum and schedule, and takes its preconditioner as "
        "constant.",
        "privacy",
    )
    buffers: int | None = _option(
        None, "Number of buffers of the BLT mechanism. Default: chosen automatically.", "privacy", 1
    )
    max_decay: float | None = _option(
        None,
        "Largest buffer decay of the BLT mechanism; 1 for no bound. Default: 1 - 1 / rounds.",
        "privacy",
        0.0,
    )
    bands: int | None = _option(
        None,
        "Number of bands of bandmf, bandtoep and bandfhu, or of the inverse for bisr, bifr and "
        f"bandinv. Default: min_sep, or {mechanism_defaults.INVERSE_BANDS} for the inverse. For "
        "bandtoep with a sampling and a target_epsilon, but without min_sep, the number with the "
        "least noise. Memory of bandmf, bandtoep and bandfhu: bands - 1 copies of the model.",
        "privacy",
        1,
    )
    correlation: float | None = _option(
        None, "Share λ of the mechanism lambda-cgd. Default: tuned.", "privacy", 0.0
    )
    adaptive_clipping: bool = _option(
        False,
        "Estimate the clip norm privately while training, from clip_norm on. The noise restarts "
        "whenever the estimate is taken over.",
        "privacy",
    )
    target_unclipped_quantile: float = _option(
        0.5, "Adaptive clipping: share of users to leave unclipped.", "privacy", 0.0
    )
    clip_learning_rate: float = _option(
        0.2, "Adaptive clipping: step of the estimate's logarithm.", "privacy", 0.0
    )
    clipped_count_stddev: float | None = _option(
        None,
        "Adaptive clipping: standard deviation of the noise on a round's number of unclipped "
        "users. In a simulation it is that of its own cohorts. Default: clients_per_round / 20.",
        "privacy",
        0.0,
    )
    restart_warmup: int = _option(
        128, "Adaptive clipping: round of the first restart.", "privacy", 1
    )
    restart_every: int = _option(
        1024, "Adaptive clipping: rounds between later restarts.", "privacy", 1
    )
    restart_optimizer: bool = _option(
        False,
        "Adaptive clipping: restart the server's optimizer with the noise, with zero momentum.",
        "privacy",
    )
    secagg_bits: int | None = _option(
        None,
        "Number of bits a parameter of the integers that clients encode their updates as, which "
        "secure aggregation sums. The noise is scaled up for what rounding may add. Default: no "
        "encoding.",
        "privacy",
        1,
    )

    noise: learning_options.NoiseGenerator = _option(
        "philox",
        "Generator of the updates' noise; metrics and a vocabulary have another one. 'philox'. "
        "'secure': AES-256 in counter mode, with Gaussians that are rounded without error and "
        "added on a grid, safe from attacks on floating point.",
        "privacy",
    )

    max_epsilon: float | None = _option(
        None,
        "Largest ε: the run stops before the round that would bring the ε spent above this. "
        "Default: no limit.",
        "run",
    )
    stop_at_accuracy: float | None = _option(
        None,
        "Held-out top-1 accuracy at which the run stops, as a share, not in %. Default: the "
        "run does not stop for accuracy.",
        "run",
    )
    held_out_users: Literal["public", "protected"] = _option(
        "public",
        "Whether figures of the held-out users, who never train, may be published. 'protected': "
        "all that is measured on them stays in private/, the best model too. With "
        "metrics_epsilon, evaluations on them are then released with noise, for the same ε.",
        "run",
    )
    eval_every: int = _option(
        10, "Number of rounds between evaluations on held-out users.", "run", 1
    )
    eval_sequences: int = _option(
        4000, "Largest number of held-out sequences in an evaluation.", "run", 1
    )
    seed: int = _option(
        0,
        "Public seed of the shuffling, the initial model and dp-ftrl's cohorts. It is not the "
        "seed of noise or of sampled cohorts: those seeds are secret.",
        "run",
    )
    deterministic_noise_seed: int | None = _option(
        None,
        "Seed of the noise, for debugging only. Whoever knows it can subtract the noise: the run "
        "is NOT private. Default: the operating system's generator.",
        "run",
    )

    def __post_init__(self):
        super().__post_init__()
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                validation.positive(name, getattr(self, name))
        if self.stop_at_accuracy is not None:
            remedy = "It is a share: 0.3 for 30 %."
            validation.probability("stop_at_accuracy", self.stop_at_accuracy, remedy=remedy)
        for name in _RATES:
            validation.learning_rate(name, getattr(self, name))
        validation.clip_norm("clip_norm", self.clip_norm)
        validation.number("clip_learning_rate", self.clip_learning_rate, at_most=1e38)
        validation.number("target_unclipped_quantile", self.target_unclipped_quantile, at_most=1)
        if self.noise_multiplier is not None:
            validation.number("noise_multiplier", self.noise_multiplier, at_most=1e18)
        if self.max_decay is not None:
            validation.probability("max_decay", self.max_decay)
        validation.delta(self.delta)
        validation.number("server_momentum", self.server_momentum, below=1)
        self._check_server_optimizer()
        self._check_algorithm()
        self._check_noise()
        self._check_simulation()
        self.later_clip_norms()  # It refuses what is no schedule.
        self._check_vocabulary()
        metrics_share.check(self)
        protected = self.held_out_users == "protected"
        if protected and self.stop_at_accuracy is not None and not self.num_evaluations:
            raise validation.UsageError(
                f"stop_at_accuracy={self.stop_at_accuracy:g} would end the run by exact figures of "
                "held-out users, and held_out_users are 'protected': leave one of them out, or "
                "give metrics_epsilon, which releases evaluations with noise."
            )
        if self.budget_shares is not None:
            from tff_dpftrl.accounting import budget_shares  # It takes long to import.

            budget_shares.of_run(self.budget_shares, self.released_parts, self.target_epsilon)

    def _check_server_optimizer(self):
        if self.server_warmup_rounds >= self.num_rounds:
            raise validation.UsageError(
                f"server_warmup_rounds must be below num_rounds={self.num_rounds}, got "
                f"{self.server_warmup_rounds}."
            )
        if self.iterate_averaging is not None:
            validation.number("iterate_averaging", self.iterate_averaging, above=0, below=1)

    def _is_given(self, name: str) -> bool:
        """Returns whether an option is not the default."""
        return getattr(self, name) != type(self).__dataclass_fields__[name].default

    def _check_sampling(self):
        """Refuses what no run with correlated noise and secret samples can have."""
        if self.algorithm == "dp-fedsgd":
            raise validation.UsageError(
                f"sampling {self.sampling!r} is for algorithm 'dp-ftrl' or 'dp-fedavg', not for "
                "'dp-fedsgd': leave one of them out."
            )
        if self.mechanism == "none":
            raise validation.UsageError(
                f"sampling {self.sampling!r} has no meaning with mechanism 'none': take a "
                "mechanism, like 'bandtoep', or leave it out."
            )
        for name, why in _NOT_AMPLIFIED.items():
            if self._is_given(name):
                raise validation.UsageError(
                    f"{name} does not go with sampling {self.sampling!r}, because {why}: leave one "
                    "of them out."
                )

    def _check_algorithm(self):
        is_sampled = self.algorithm != "dp-ftrl"
        others = "'dp-ftrl'" if is_sampled else "'dp-fedavg' or 'dp-fedsgd'"
        if self.sampling is not None:
            self._check_sampling()
        else:
            for name in filter(self._is_given, _DP_FTRL_ONLY if is_sampled else _SAMPLED_ONLY):
                beside = self.algorithm == "dp-fedavg" and name in _CORRELATED_ONLY
                raise validation.UsageError(
                    f"{name} applies to algorithm {others} only, not {self.algorithm!r}: leave it "
                    f"out{', or give sampling cyclic, bins or b-min-sep' if beside else ''}."
                )
        if self.restart_optimizer and not self.adaptive_clipping:
            raise validation.UsageError(
                "restart_optimizer is for runs whose noise restarts, with adaptive_clipping: leave "
                "it out."
            )
        if self.mechanism == "none" and (self.adaptive_clipping or self.secagg_bits is not None):
            name = "adaptive_clipping" if self.adaptive_clipping else "secagg_bits"
            raise validation.UsageError(
                f"{name} has no meaning with mechanism 'none': leave it out."
            )
        options = self.mechanism_options
        for source, meaningless in (
            ("a strategy file", self.strategy is not None),
            ("mechanism 'none'", self.mechanism == "none"),
        ):
            if meaningless and options.given():
                raise validation.UsageError(
                    f"{options.given()[0]} has no meaning with {source}: leave it out."
                )
        if self.mechanism != "none":
            table.check(self.mechanism, options)

    def _check_noise(self):
        given = [n for n in ("noise_multiplier", "target_epsilon") if getattr(self, n) is not None]
        if self.mechanism == "none":
            given += ["max_epsilon"] if self.max_epsilon is not None else []
            if given:
                raise validation.UsageError(
                    f"{given[0]} has no meaning with mechanism 'none': leave it out."
                )
        elif len(given) != 1:
            raise validation.UsageError(
                f"mechanism {self.mechanism!r} needs either noise_multiplier or target_epsilon, "
                f"got {'both' if given else 'neither'}."
            )
        if self.max_epsilon is not None and self.noise_multiplier == 0.0:
            raise validation.UsageError(
                "max_epsilon cannot be kept without noise: raise noise_multiplier."
            )
        if self.max_epsilon is not None and self.deterministic_noise_seed is not None:
            raise validation.UsageError(
                "max_epsilon has no meaning with deterministic_noise_seed, which makes the run not "
                "private: leave one of them out."
            )

        # Tasks have it by default; with mechanism 'none' they draw nothing.
        if self.noise == "secure" and self._is_given("noise") and self.mechanism == "none":
            raise validation.UsageError(
                "noise 'secure' has no meaning with mechanism 'none': leave it out."
            )

    def _check_vocabulary(self):
        if self.vocabulary != vocabulary.DP:
            if self.base_vocabulary is not None:
                raise validation.UsageError(
                    "base_vocabulary is for vocabulary 'dp', which adds words to it: leave it out, "
                    "or name it as vocabulary."
                )
            return
        for name, why in (
            ("private", "is counted on the training users without noise"),
            (vocabulary.DP, "is counted on the training users"),
        ):
            if self.base_vocabulary == name:
                raise validation.UsageError(
                    f"base_vocabulary must be public, and {name!r} {why}: name 'docs', 'english', "
                    "a file of public text, or 'none'."
                )
        if self.tokenizer not in (None, "words"):
            raise validation.UsageError(
                f"vocabulary 'dp' counts words, and tokenizer {self.tokenizer!r} learns sub-words: "
                "take tokenizer 'words', or a public vocabulary."
            )
        if self.target_epsilon is None:
            raise validation.UsageError(
                "vocabulary 'dp' takes a share of the budget: give target_epsilon, or take a "
                "public vocabulary."
            )
        if self.simulate_report_goal is not None:
            raise validation.UsageError(
                "vocabulary 'dp' has no meaning with simulate_report_goal, because its count is of "
                "the simulation's own users: leave one of them out."
            )

    def _check_simulation(self):
        goal, population = self.simulate_report_goal, self.simulate_population
        if (goal is None) != (population is None):
            raise validation.UsageError(
                "simulate_report_goal and simulate_population go together, got "
                f"{goal} and {population}: give both, or none."
            )
        if goal is None:
            return
        if population < goal:
            raise validation.UsageError(
                f"simulate_population={population} is below simulate_report_goal={goal}: a round "
                "cannot have more clients than there are."
            )
        self.deployment.scale(self.clients_per_round)  # Refuses a cohort that is larger.
        for name, is_given, why in (
            ("mechanism 'none'", self.mechanism == "none", "it has no noise to scale"),
            ("max_epsilon", self.max_epsilon is not None, "it is about the simulation's own ε"),
            ("secagg_bits", self.secagg_bits is not None, "rounding does not scale with cohorts"),
        ):
            if is_given:
                raise validation.UsageError(
                    f"{name} has no meaning with simulate_report_goal, because {why}: leave one "
                    "of them out."
                )

    @override
    def with_defaults(self) -> Self:
        """Returns a config that names its vocabulary and all sizes, so that no default changes."""
        if self.vocabulary != vocabulary.DP:
            return super().with_defaults()
        counted = {name: getattr(self, name) for name in ("vocabulary", "budget_shares")}
        # Without the shares, since a public vocabulary has none.
        unnamed = dataclasses.replace(
            self, vocabulary=None, base_vocabulary=None, budget_shares=None
        )
        base = self.base_vocabulary or unnamed._vocabulary_source()
        public = dataclasses.replace(unnamed, vocabulary=base).with_defaults()
        return dataclasses.replace(public, base_vocabulary=base, **counted)

    @property
    def deployment(self) -> simulated_run.Deployment | None:
        """The larger run that is simulated; None if the run stands for itself."""
        if self.simulate_report_goal is None:
            return None
        from tff_dpftrl.runs import simulated_run

        return simulated_run.Deployment(self.simulate_report_goal, self.simulate_population)

    @property
    def starts(self) -> tuple[int, ...]:
        """First rounds of the blocks between restarts of the noise, the first one 0."""
        if not self.adaptive_clipping:
            return (0,)
        from tff_dpftrl.mechanisms import restarts

        return restarts.starts(self.num_rounds, every=self.restart_every, first=self.restart_warmup)

    def later_clip_norms(self) -> tuple[tuple[int, float], ...]:
        """Returns the clip norms of `clip_norm_schedule`, each behind the rounds before it."""
        if self.clip_norm_schedule is None:
            return ()
        name, text = "clip_norm_schedule", self.clip_norm_schedule
        try:
            pairs = [entry.split(":") for entry in text.split(",")]
            later = tuple((int(after), float(norm)) for after, norm in pairs)
        except ValueError:
            raise validation.UsageError(
                f"{name} must be rounds and clip norms like 2000:7.9,4000:5, got {text!r}."
            ) from None
        starts = [0, *(after for after, _ in later), self.num_rounds]
        if any(one >= other for one, other in itertools.pairwise(starts)):
            raise validation.UsageError(
                f"{name} must have growing numbers of rounds between 0 and "
                f"num_rounds={self.num_rounds}, got {text!r}."
            )
        for _, norm in later:
            validation.clip_norm(name, norm)
        return later

    @property
    def learning(self) -> learning_options.LearningOptions:
        """Optimizers, their schedule, and the adaptation of a learned clip norm."""
        return self.part(learning_options.LearningOptions)

    @property
    def server_restarts(self) -> tuple[int, ...]:
        """Rounds in which the state of the server's optimizer restarts."""
        return self.starts[1:] if self.restart_optimizer else ()

    @property
    def mechanism_options(self) -> table.Options:
        """Options of the mechanism."""
        workload = None
        if self.workload == "auto":
            # Defaults of the model, which `learning` fills in, are not included.
            learning = language_config.TextConfig.part(self, learning_options.LearningOptions)
            workload = learning.update_rule.workload(self.num_rounds)
        given = {name: getattr(self, name) for name in _MECHANISM_OPTIONS}
        return table.Options(**given, workload=workload)

    @property
    def statement_parameters(self) -> dict[str, statement.Scalar]:
        """Parameters of the privacy statement that the options give, besides what the plan says."""
        parameters: dict[str, statement.Scalar] = {"server_optimizer": self.server_optimizer}
        if self.adaptive_clipping:
            parameters |= {
                "restart_warmup": self.restart_warmup,
                "restart_every": self.restart_every,
            }
        return parameters

    @property
    def released_parts(self) -> tuple[str, ...]:
        """Parts that the run releases besides the weights, by names of `budget_shares.PARTS`."""
        is_counted = self.vocabulary == vocabulary.DP
        return (
            *(("vocabulary",) if is_counted else ()),
            *(("metrics",) if self.metrics_share is not None else ()),
        )

    def _other_parts(self) -> tuple[parts.Part, ...]:
        """Returns what the run releases of its users besides the weights."""
        if self.vocabulary != vocabulary.DP:
            return ()
        from tff_dpftrl.training import vocabulary_share

        assert self.target_epsilon is not None  # `_check_vocabulary` asks for it.
        return (vocabulary_share.part(self.target_epsilon, self.delta, self.budget_shares),)

    @property
    def metrics_share(self) -> float | None:
        """Share of the budget for training metrics; None for none, or with `metrics_epsilon`."""
        return metrics_share.of(self.budget_shares)

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations on protected held-out users that are released with noise."""
        releases = self.metrics_epsilon is not None or self.metrics_share is not None
        if self.held_out_users != "protected" or not releases:
            return 0
        return -(-self.num_rounds // self.eval_every)

    def plan(self, num_clients: int, num_parameters: int) -> privacy_lib.FederatedPlan:
        """Chooses mechanism and noise for a new run, also for the metrics that it releases."""
        from tff_dpftrl.runs import released_metrics
        from tff_dpftrl.training import metrics_columns

        return released_metrics.planned(
            self.privacy(),
            num_clients,
            num_parameters,
            target_epsilon=self.metrics_epsilon,
            share=self.metrics_share,
            what=metrics_columns.WHAT_IS_RELEASED,
            evaluations=self.num_evaluations,
        )

    def privacy(self) -> privacy_lib.Privacy:
        """Returns what the run asks of privacy; the plan for a population is made of it."""
        # This imports dp_accounting, which `--help` does not need.
        from tff_dpftrl.runs import amplified_privacy, dp_ftrl_privacy, sampled_privacy

        common = {
            "num_rounds": self.num_rounds,
            "clients_per_round": self.clients_per_round,
            "clip_norm": self.clip_norm,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "target_epsilon": self.target_epsilon,
            "deterministic_seed": self.deterministic_noise_seed,
            "deployment": self.deployment,
        }
        if others := self._other_parts():
            common["others"] = others
        correlated = {
            "options": self.mechanism_options,
            "strategy_file": self.strategy,
            "min_sep": self.min_sep,
        }
        if self.sampling is not None:
            return amplified_privacy.AmplifiedPrivacy(
                sampling=self.sampling, mechanism=self.mechanism, **correlated, **common
            )
        if self.algorithm != "dp-ftrl":
            return sampled_privacy.SampledPrivacy(
                algorithm=self.algorithm,
                estimator=self.estimator,
                per_layer_clipping=self.per_layer_clipping,
                later_clip_norms=self.later_clip_norms(),
                **common,
            )
        return dp_ftrl_privacy.DpFtrlPrivacy(
            mechanism=None if self.mechanism == "none" else self.mechanism,
            starts=self.starts,
            max_participations=self.max_participations,
            adaptive_clipping=self.adaptive_clipping,
            secagg_bits=self.secagg_bits,
            **correlated,
            **common,
        )
