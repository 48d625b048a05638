"""The one frozen description of a training run.

Flags of `tff-dpftrl train`, keys of a TOML file and the resolved `config.json` of a run are the
options of `TrainingConfig`, by flat names: what is claimed and what is run cannot drift apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary
from tff_dpftrl.runs import metrics_share
from tff_dpftrl.training import composed, language_config, learning_options, noise_options
from tff_dpftrl.training.composed import option

if TYPE_CHECKING:
    from typing_extensions import Self

    from tff_dpftrl.accounting import parts, statement
    from tff_dpftrl.runs import privacy as privacy_lib
    from tff_dpftrl.runs import simulated_run


@dataclasses.dataclass(frozen=True)
class NamedLanguage(language_config.LanguageConfig):
    """Text, model, and a vocabulary that costs no privacy, or that no statement covers."""

    chosen_by = "a vocabulary other than 'dp'"


@dataclasses.dataclass(frozen=True)
class CountedLanguage(language_config.LanguageConfig):
    """Text, model, and a vocabulary of the training users' words, counted with noise."""

    chosen_by = "vocabulary 'dp', which adds words to it"

    base_vocabulary: str | None = option(
        None,
        "--vocabulary dp: public vocabulary to start from, 'docs', 'english' or a file. Words of "
        "the training users, counted with noise, replace its rarer half. 'none': their words "
        "alone. Default: the one that a run without --vocabulary takes.",
        "data",
    )

    def __post_init__(self):
        super().__post_init__()
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

    @override
    def with_defaults(self) -> Self:
        options = {**self.to_dict(), "vocabulary": self.base_vocabulary}
        del options["base_vocabulary"]
        public = language_config.LanguageConfig.of(**options).with_defaults()
        base = {"base_vocabulary": public.vocabulary, "vocabulary": vocabulary.DP}
        return type(self).of(**public.to_dict() | base)


def _language(options: Mapping[str, Any]) -> type[language_config.LanguageConfig]:
    return CountedLanguage if options.get("vocabulary") == vocabulary.DP else NamedLanguage


@dataclasses.dataclass(frozen=True)
class ReleaseOptions(composed.Options):
    """Releases of a run besides its weights, and their cost."""

    budget_shares: str | None = option(
        None,
        "Shares of the budget for what is released besides the weights, like vocabulary=0.05. "
        "Default: the default shares.",
        "privacy",
    )
    metrics_epsilon: float | None = option(
        None,
        "Largest ε of the loss and accuracy on the training cohorts, if nothing else were "
        "released: they are then released with noise. target_epsilon is for the whole. Or give a "
        "share, like budget_shares metrics=0.05. Default: they stay in private/.",
        "privacy",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.metrics_epsilon is not None:
            validation.positive("metrics_epsilon", self.metrics_epsilon)

    @property
    def metrics_share(self) -> float | None:
        """Share of the budget for training metrics; None for none, or with `metrics_epsilon`."""
        return metrics_share.of(self.budget_shares)

    @property
    def has_metrics(self) -> bool:
        """Whether training metrics are released with noise."""
        return self.metrics_epsilon is not None or self.metrics_share is not None


@dataclasses.dataclass(frozen=True)
class SimulationOptions(composed.Options):
    """A larger run whose noise is simulated."""

    simulate_report_goal: int | None = option(
        None,
        "Number of clients a round of a larger run to simulate. The noise on the average of "
        "clients_per_round is then what that run would have. Noise, target_epsilon, min_sep and "
        "max_participations are then those of the larger run. The statement says what it and what "
        "the simulation promise.",
        "privacy",
        1,
    )
    simulate_population: int | None = option(
        None,
        "Number of clients in the population of the larger run (simulate_report_goal).",
        "privacy",
        1,
    )

    def __post_init__(self):
        super().__post_init__()
        goal, population = self.simulate_report_goal, self.simulate_population
        if (goal is None) != (population is None):
            raise validation.UsageError(
                "simulate_report_goal and simulate_population go together, got "
                f"{goal} and {population}: give both, or none."
            )
        if goal is not None and population is not None and population < goal:
            raise validation.UsageError(
                f"simulate_population={population} is below simulate_report_goal={goal}: a round "
                "cannot have more clients than there are."
            )

    @property
    def deployment(self) -> simulated_run.Deployment | None:
        """The larger run; None if the run stands for itself."""
        if self.simulate_report_goal is None or self.simulate_population is None:
            return None
        from tff_dpftrl.runs import simulated_run

        return simulated_run.Deployment(self.simulate_report_goal, self.simulate_population)


@dataclasses.dataclass(frozen=True)
class EvaluationOptions(composed.Options):
    """Evaluations on held-out users."""

    eval_every: int = option(
        10, "Number of rounds between evaluations on held-out users.", "run", 1
    )
    eval_sequences: int = option(
        4000, "Largest number of held-out sequences in an evaluation.", "run", 1
    )


@dataclasses.dataclass(frozen=True)
class HeldOutOptions(EvaluationOptions):
    """The same, what the held-out users decide, and what of them may be published."""

    stop_at_accuracy: float | None = option(
        None,
        "Held-out top-1 accuracy at which the run stops, as a share, not in %. Default: the "
        "run does not stop for accuracy.",
        "run",
    )
    held_out_users: Literal["public", "protected"] = option(
        "public",
        "Whether figures of the held-out users, who never train, may be published. 'protected': "
        "all that is measured on them stays in private/, the best model too. With "
        "metrics_epsilon, evaluations on them are then released with noise, for the same ε.",
        "run",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.stop_at_accuracy is not None:
            remedy = "It is a share: 0.3 for 30 %."
            validation.probability("stop_at_accuracy", self.stop_at_accuracy, remedy=remedy)

    @property
    def protects_held_out(self) -> bool:
        """Whether no exact figure of the held-out users may be published."""
        return self.held_out_users == "protected"


@dataclasses.dataclass(frozen=True)
class TrainingConfig(learning_options.Seeded):
    """Everything that decides what a training run does, in parts; `of` takes flat names.

    Options carry their meaning, unit and group in their field metadata, which is what
    `tff-dpftrl train --help` prints.
    """

    language: language_config.LanguageConfig = composed.part(
        NamedLanguage, CountedLanguage, choose=_language
    )
    batches: learning_options.BatchOptions = composed.part(learning_options.BatchOptions)
    learning: learning_options.LearningOptions = composed.part(learning_options.LearningOptions)
    privacy: noise_options.Noise = composed.part(
        *noise_options.KINDS, choose=noise_options.kind_of_run
    )
    releases: ReleaseOptions = composed.part(ReleaseOptions)
    simulation: SimulationOptions = composed.part(SimulationOptions)
    evaluation: HeldOutOptions = composed.part(HeldOutOptions)

    noise: learning_options.NoiseGenerator = option(
        "philox",
        "Generator of the updates' noise; metrics and a vocabulary have another one. 'philox'. "
        "'secure': AES-256 in counter mode, with Gaussians that are rounded without error and "
        "added on a grid, safe from attacks on floating point.",
        "privacy",
    )
    deterministic_noise_seed: int | None = option(
        None,
        "Seed of the noise, for debugging only. Whoever knows it can subtract the noise: the run "
        "is NOT private. Default: the operating system's generator.",
        "run",
    )

    def __post_init__(self):
        super().__post_init__()
        self.privacy.check(self.learning)
        self._check_noise()
        self._check_releases()

    def _check_noise(self):
        """Refuses what contradicts the kind of noise, and no type excludes."""
        simulates = self.simulation.deployment is not None
        if simulates:
            # It refuses a cohort that is larger.
            self.simulation.deployment.scale(self.learning.clients_per_round)
        none, has_none = "mechanism 'none'", isinstance(self.privacy, noise_options.NoNoise)
        simulation, has_limit = "simulate_report_goal", self.max_epsilon is not None
        is_known = self.deterministic_noise_seed is not None
        for is_given, name, other, why in (
            (has_none and self.noise == "secure", "noise 'secure'", none, "nothing is drawn"),
            (has_none and simulates, none, simulation, "it has no noise to scale"),
            (
                has_limit and simulates,
                "max_epsilon",
                simulation,
                "it is about the simulation's own ε",
            ),
            (
                simulates and getattr(self.privacy, "secagg_bits", None) is not None,
                "secagg_bits",
                simulation,
                "rounding does not scale with cohorts",
            ),
            (
                has_limit and is_known,
                "max_epsilon",
                "deterministic_noise_seed",
                "the seed makes the run not private",
            ),
        ):
            if is_given:
                raise validation.UsageError(
                    f"{name} has no meaning with {other}, because {why}: leave one of them out."
                )

    def _check_releases(self):
        """Refuses releases that nothing pays for."""
        shares, target = self.releases.budget_shares, self.target_epsilon
        if self.is_counted and target is None:
            raise validation.UsageError(
                "vocabulary 'dp' takes a share of the budget: give target_epsilon, or take a "
                "public vocabulary."
            )
        if self.is_counted and self.simulation.deployment is not None:
            raise validation.UsageError(
                "vocabulary 'dp' has no meaning with simulate_report_goal, because its count is of "
                "the simulation's own users: leave one of them out."
            )
        metrics_share.check(shares, self.releases.metrics_epsilon, target)
        stop = self.evaluation.stop_at_accuracy
        if self.evaluation.protects_held_out and stop is not None and not self.num_evaluations:
            raise validation.UsageError(
                f"stop_at_accuracy={stop:g} would end the run by exact figures of "
                "held-out users, and held_out_users are 'protected': leave one of them out, or "
                "give metrics_epsilon, which releases evaluations with noise."
            )
        if shares is not None:
            from tff_dpftrl.accounting import budget_shares  # It takes long to import.

            released = (
                *(("vocabulary",) if self.is_counted else ()),
                *(("metrics",) if self.releases.metrics_share is not None else ()),
            )
            budget_shares.of_run(shares, released, target)

    @override
    def with_defaults(self) -> Self:
        """Returns a config that names its vocabulary and all sizes, so that no default changes."""
        return dataclasses.replace(self, language=self.language.with_defaults())

    @property
    def text(self) -> language_config.TextConfig:
        """The options of the text alone."""
        return self.language.text

    @property
    def is_counted(self) -> bool:
        """Whether the vocabulary is counted on the training users, with noise."""
        return isinstance(self.language, CountedLanguage)

    @property
    def target_epsilon(self) -> float | None:
        """Largest ε that the whole run may spend; None if the noise is given, or there is none."""
        return getattr(self.privacy, "target_epsilon", None)

    @property
    def max_epsilon(self) -> float | None:
        """Largest ε, at which the run stops; None for no limit."""
        return getattr(self.privacy, "max_epsilon", None)

    @property
    def rules(self) -> noise_options.RoundRules:
        """Options that a round needs besides its plan."""
        return noise_options.RoundRules(self.learning, self.privacy, self.noise == "secure")

    @property
    def model_sizes(self) -> dict[str, Any]:
        """Sizes of the model that are given, by the names that `model_table.build` takes."""
        return self.language.model_sizes

    @property
    def statement_parameters(self) -> dict[str, statement.Scalar]:
        """Parameters of the privacy statement that the options give, besides what the plan says."""
        return {
            "server_optimizer": self.learning.server_optimizer,
            **self.privacy.statement_parameters,
        }

    def _other_parts(self) -> tuple[parts.Part, ...]:
        """Returns what the run releases of its users besides the weights."""
        if not self.is_counted:
            return ()
        from tff_dpftrl.training import vocabulary_share

        assert self.target_epsilon is not None  # `_check_releases` asks for it.
        shares = self.releases.budget_shares
        return (vocabulary_share.part(self.target_epsilon, self.privacy.delta, shares),)

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations on protected held-out users that are released with noise."""
        if not self.evaluation.protects_held_out or not self.releases.has_metrics:
            return 0
        return -(-self.learning.num_rounds // self.evaluation.eval_every)

    def plan(self, num_clients: int, num_parameters: int) -> privacy_lib.FederatedPlan:
        """Chooses mechanism and noise for a new run, also for the metrics that it releases."""
        from tff_dpftrl.runs import released_metrics
        from tff_dpftrl.training import metrics_columns

        return released_metrics.planned(
            self.request(),
            num_clients,
            num_parameters,
            target_epsilon=self.releases.metrics_epsilon,
            share=self.releases.metrics_share,
            what=metrics_columns.WHAT_IS_RELEASED,
            evaluations=self.num_evaluations,
        )

    def request(self) -> privacy_lib.Privacy:
        """Returns what the run asks of privacy; the plan for a population is made of it."""
        return self.privacy.request(
            self.learning,
            deterministic_seed=self.deterministic_noise_seed,
            deployment=self.simulation.deployment,
            others=self._other_parts(),
        )
