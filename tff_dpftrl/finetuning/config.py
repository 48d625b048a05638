"""The one frozen description of a fine-tuning run: flags, TOML keys and `config.json`."""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.mechanisms import table
from tff_dpftrl.runs import metrics_share
from tff_dpftrl.training import composed, language_config, learning_options
from tff_dpftrl.training import config as training_config
from tff_dpftrl.training.composed import option

if TYPE_CHECKING:
    from typing_extensions import Self

    from tff_dpftrl.accounting import statement
    from tff_dpftrl.mechanisms import workload as workload_lib
    from tff_dpftrl.training import trained_model

    Mechanism: TypeAlias = str
else:
    Mechanism = Literal[tuple(table.runnable())]

Sampling = Literal["auto", "example", "user", "passes", "cyclic", "bins"]
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "adafactor"]

_TURNS, _ADAM = ("passes", "cyclic", "bins"), ("adam", "adamw")
# Options that only some kinds of sampling, or some optimizers, have.
_ONLY = {
    "sampling": {
        "group_size": ("example", "user", *_TURNS),
        "rows_per_owner": ("example",),
        "group_size_epsilon": ("auto", "example"),
        "cohort_size": ("user", *_TURNS),
        "declared_units": ("example", "user"),
        "workload": _TURNS,
        "mechanism": ("passes", "bins"),
        "sampled_unit": ("cyclic",),
        "bands": ("cyclic",),
        "min_sep": ("cyclic",),
    },
    "optimizer": {
        "momentum": ("momentum", *_ADAM),
        "second_moment_decay": _ADAM,
        "weight_decay": ("adamw",),
    },
}


@dataclasses.dataclass(frozen=True)
class InitialModel(composed.Options):
    """The model to fine-tune, which has the vocabulary, and what of it is trained."""

    initial_weights: str | None = option(
        None,
        "Folder of the model to fine-tune: of `tff-dpftrl pretrain`, of a run, whose users this "
        "run's statement then does not cover, or a checkpoint of GPT-2's or Llama's family in "
        "Hugging Face's layout. The run takes vocabulary, sequence length and sizes from it.",
        "model",
    )
    trained_on: str | None = option(
        None,
        "Text that the weights of a checkpoint were trained on, in a few words. You thereby "
        "declare it to be public, and the statement names it. Default: the statement has a caveat.",
        "model",
    )
    sequence_length: int | None = option(
        None,
        "Number of tokens in a sequence where initial_weights is a checkpoint in Hugging Face's "
        "layout; longer texts are cut off there. Default: 64, or as many as the model can read.",
        "model",
        1,
    )
    adapter_rank: int | None = option(
        None,
        "Rank R of low-rank adapters (LoRA) of the kernels of a transformer's blocks; no other "
        "weight is trained. Default: all weights are trained.",
        "model",
        1,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.trained_on is not None and len(self.trained_on.strip().splitlines()) != 1:
            raise validation.UsageError(
                "trained_on must name a text in one line: leave it out if it is not known."
            )

    @property
    def initial_folder(self) -> pathlib.Path:
        """Folder of the model to fine-tune."""
        return pathlib.Path(typing.cast(str, self.initial_weights))  # The config has checked it.

    def load(self) -> trained_model.TrainedModel:
        """Reads the model to fine-tune."""
        from tff_dpftrl.training import warm_start

        return warm_start.find(self.initial_folder).load(sequence_length=self.sequence_length)


@dataclasses.dataclass(frozen=True)
class StepOptions(composed.Options):
    """How steps are taken: optimizer, learning rate, and how gradients are computed."""

    num_steps: int = option(500, "T, the number of steps of the optimizer.", "fine-tuning", 1)
    optimizer: Optimizer = option(
        "adam",
        "Optimizer of the noised gradient: sgd, momentum, adam, adamw or adafactor.",
        "fine-tuning",
    )
    learning_rate: float = option(1e-3, "Learning rate of the optimizer.", "fine-tuning", 0.0)
    momentum: float = option(0.9, "Momentum of 'momentum', β₁ of adam.", "fine-tuning", 0.0)
    second_moment_decay: float = option(0.99, "β₂ of adam and adamw.", "fine-tuning", 0.0)
    weight_decay: float = option(0.0, "Weight decay of adamw.", "fine-tuning", 0.0)
    warmup_steps: int | None = option(
        None,
        "Number of steps over which the learning rate grows to its full value. Default: a tenth "
        "of all, at most 10.",
        "fine-tuning",
        0,
    )
    decay: learning_options.Decay = option(
        "none",
        "How the learning rate falls to zero over the steps: none, linear or cosine.",
        "fine-tuning",
    )
    normalised_clipping: bool = option(
        True,
        "Divide the clipped gradients by the clip norm. The clip norm is then no part of the "
        "learning rate (De et al. 2022).",
        "fine-tuning",
    )
    iterate_averaging: float | None = option(
        None,
        "Decay of the exponential moving average of the steps' models, which is evaluated and "
        "kept in place of the last model. It costs no privacy. Default: no average.",
        "fine-tuning",
        0.0,
    )
    examples_at_once: int = option(
        64,
        "Number of examples whose gradients are computed together, or those of one user if there "
        "are more. It trades memory for speed. A larger batch is added up from such pieces; "
        "nothing else depends on it but last bits.",
        "fine-tuning",
        1,
    )
    compute_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Dtype of the forward and backward passes of a step: float32, or bfloat16 for "
        "transformers. Weights stay float32; gradients are clipped and added up as always.",
        "fine-tuning",
    )
    gradient_checkpointing: bool = option(
        False,
        "Keep only the states between a transformer's blocks for the backward pass, and compute "
        "the rest again. It takes less memory and more time. For examples or users of more than "
        "128 tokens, whose gradients are taken one after the other.",
        "fine-tuning",
    )
    noise: learning_options.NoiseGenerator = option(
        "philox",
        "Generator of the weights' noise. 'philox'. 'secure': AES-256 in counter mode, with "
        "Gaussians that are rounded without error and added on a grid, safe from attacks on "
        "floating point. It takes more memory: several float64 copies of the trained weights.",
        "privacy",
    )

    def __post_init__(self):
        super().__post_init__()
        validation.learning_rate("learning_rate", self.learning_rate)
        for name in ("momentum", "second_moment_decay"):
            validation.number(name, getattr(self, name), below=1)
        if self.iterate_averaging is not None:
            validation.number("iterate_averaging", self.iterate_averaging, above=0, below=1)
        if self.warmup_steps is not None and self.warmup_steps >= self.num_steps:
            raise validation.UsageError(
                f"warmup_steps must be below num_steps={self.num_steps}, got {self.warmup_steps}."
            )


@dataclasses.dataclass(frozen=True)
class Evaluation(training_config.HeldOutOptions):
    """Evaluations on held-out users, by steps."""

    eval_every: int = option(25, "Number of steps between evaluations on held-out users.", "run", 1)


@dataclasses.dataclass(frozen=True)
class FinetuningConfig(
    training_config.ReleaseOptions,
    Evaluation,
    StepOptions,
    InitialModel,
    language_config.TextConfig,
):
    """Everything that decides what a fine-tuning run does.

    Attributes carry their meaning, unit and group in their field metadata, which is what
    `tff-dpftrl finetune --help` prints. Model and vocabulary are those of `initial_weights`.
    """

    sampling: Sampling = option(
        "auto",
        "Unit that is sampled in secret, or turns that users take. With independent noise: example "
        "(ELS: examples of a pool), user (ULS: users, some examples of each), or auto, whichever "
        "promises less noise for the gradients' size. With correlated noise (DP-FTRL): passes, "
        "where nothing is sampled and users take turns. With both, for the least noise: cyclic "
        "(groups of users take turns, and are sampled at their group's), or bins (each user has a "
        "place in all passes).",
        "fine-tuning",
    )
    sampled_unit: Literal["user", "example"] = option(
        "user",
        "Unit that cyclic sampling draws and clips. user: the mean gradient of some examples. "
        "example: examples of a pool, of the users whose turn it is.",
        "fine-tuning",
    )
    bands: int | Literal["auto"] = option(
        "auto",
        "Number of bands of the correlated noise of cyclic, and so of the groups that take turns. "
        "1 is independent noise. auto is the number with the least noise at target_epsilon, which "
        "finetune-plan shows.",
        "privacy",
    )
    min_sep: int | None = option(
        None,
        "Least number of steps from one of a user to the next: the groups of cyclic. Bins have as "
        "many as there are users for. Default: as many as bands.",
        "fine-tuning",
        1,
    )
    compute_budget: int | None = option(
        None,
        "B, the expected number of gradients in a step, of one example each. If the private "
        "median leaves fewer examples than B, B is the number of users. Default: cohort_size "
        f"times group_size, or {group_sizes.COMPUTE_BUDGET}.",
        "fine-tuning",
        1,
    )
    group_size: int | None = option(
        None,
        "G, the largest number of examples of one user in the pool (example), or in a step (all "
        "others). Default: chosen, by a private median of the users' sizes (example), by "
        "Estimate-and-Double (user), or together with the bands (cyclic, bins).",
        "fine-tuning",
        1,
    )
    rows_per_owner: int | None = option(
        None,
        "Largest number of rows that one owner has in the training data, where the column of "
        "users has a list of users in a row, who all own it. The run trains on a selection of "
        "rows that keeps this limit, and guarantees privacy for each owner. For example-level "
        "sampling, whose group_size it is. Default: a row has one user.",
        "fine-tuning",
        1,
    )
    group_size_looked_at_users: bool = option(
        False,
        "Declare that group_size was chosen by looking at the training users: a table of "
        "finetune-plan, their median, an earlier run. The statement then names the choice among "
        "what is not covered.",
        "fine-tuning",
    )
    cohort_size: int | None = option(
        None,
        "M, the expected number of users in a step; with passes, the number in every step. "
        "Default: compute_budget / group_size.",
        "fine-tuning",
        1,
    )
    proxy_data: str = option(
        "standard-library",
        "Public text by user: 'standard-library', or a .jsonl or .jsonl.gz file. Gradients are "
        "measured on it where clip_norm, group_size or sampling are to be chosen.",
        "fine-tuning",
    )
    target_epsilon: float | None = option(
        None, "Largest ε that the whole run may spend; or give noise_multiplier.", "privacy"
    )
    noise_multiplier: float | None = option(
        None, "σ: standard deviation of the noise per unit of clip norm.", "privacy", 0.0
    )
    delta: float | None = option(
        None,
        "δ of the (ε, δ) statement. Default: n^-1.1 for n examples; passes, which need no number "
        "of users or examples otherwise, have no default.",
        "privacy",
    )
    clip_norm: float | None = option(
        None,
        "L2 norm that the gradient of an example (example) or of a user (all others) is clipped "
        "to. Default: half the median norm on proxy_data.",
        "privacy",
    )
    group_size_epsilon: float = option(
        0.05, "Part of ε that is spent on choosing the private median.", "privacy"
    )
    declared_units: int | None = option(
        None,
        "Number of users (user) or of examples in the pool (example) from which the sampling "
        "probability is computed, declared without a look at the data. Default: counted on the "
        "data.",
        "privacy",
        1,
    )
    mechanism: Mechanism | None = option(
        None, "Mechanism of passes and bins, as for `tff-dpftrl train`. Default: blt.", "privacy"
    )
    workload: Literal["prefix", "auto"] = option(
        "prefix",
        "Sums whose correlated noise is minimised. prefix: prefix sums of the gradients. auto: "
        "the sums from which optimizer, schedule and iterate_averaging make models. For adam, "
        "auto takes its preconditioner as constant. Bands are chosen by prefix sums in any case.",
        "privacy",
    )
    max_epsilon: float | None = option(
        None,
        "Largest ε: the run stops before the step that would bring the ε spent above this. "
        "Default: no limit.",
        "run",
    )
    seed: int = option(
        0,
        "Public seed of the turns of 'passes', of the choice of proxies and of the first "
        "adapters. It is not the seed of noise or samples: those seeds are secret.",
        "run",
        0,
    )
    deterministic_noise_seed: int | None = option(
        None,
        "Seed of noise and samples, for debugging only: the run is then NOT private. Default: the "
        "operating system's generator.",
        "run",
        0,
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("group_size_epsilon", "max_epsilon", "target_epsilon"):
            if getattr(self, name) is not None:
                validation.positive(name, getattr(self, name))
        if self.clip_norm is not None:
            validation.clip_norm("clip_norm", self.clip_norm)
        if self.delta is not None:
            validation.delta(self.delta)
        for chooser, chosen, name, takers in self._without_kind(vars(self)):
            raise validation.UsageError(
                f"{name} has no meaning with {chooser} {chosen!r}, but with "
                f"{' or '.join(map(repr, takers))}: leave one of them out."
            )
        if self.rows_per_owner is not None:
            if self.group_size not in (None, self.rows_per_owner):
                raise validation.UsageError(
                    f"group_size={self.group_size} is not rows_per_owner={self.rows_per_owner}, "
                    "which bounds the rows of each owner: leave group_size out."
                )
            object.__setattr__(self, "group_size", self.rows_per_owner)
        self._check_missing()
        self._check_sizes()
        self._check_noise()
        self._check_releases()

    @classmethod
    def _without_kind(
        cls, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
        """Finds given options that a kind of sampling, or an optimizer, does not have."""
        for chooser, only in _ONLY.items():
            chosen = options.get(chooser, getattr(cls, chooser))
            for name, takers in only.items():
                default = getattr(cls, name)
                if chosen not in takers and options.get(name, default) != default:
                    yield chooser, chosen, name, takers

    @classmethod
    @override
    def of_begun(cls, **options: Any) -> Self:
        without = {name for _, _, name, _ in cls._without_kind(options)}
        return cls(**{name: options[name] for name in options if name not in without})

    @property
    def chooses_median(self) -> bool:
        """Whether a private median of the users' sizes is drawn."""
        return self.sampling in ("auto", "example") and self.group_size is None

    @property
    def is_amplified(self) -> bool:
        """Whether samples are secret and noise is correlated."""
        return self.sampling in ("cyclic", "bins")

    @property
    def splits_budget(self) -> bool:
        """Whether the compute budget is split by the noise, like Estimate-and-Double."""
        given = self.group_size is not None or self.cohort_size is not None
        of_users = self.sampling == "user" or (self.is_amplified and self.sampled_unit == "user")
        return self.sampling == "auto" or (of_users and not given)

    def _check_missing(self):
        """Refuses a config without what it needs, all of which is named at once."""
        missing = []
        if self.initial_weights is None:
            missing.append(
                "initial_weights must name the folder of the model to fine-tune: make one with "
                "tff-dpftrl pretrain."
            )
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "neither" if self.target_epsilon is None else "both"
            missing.append(f"Give either target_epsilon or noise_multiplier, got {given}.")
        if self.sampling == "passes" and self.group_size is None:
            missing.append(
                "sampling 'passes' needs group_size, which Estimate-and-Double chooses for "
                "sampled users only: give it."
            )
        elif self.sampled_unit == "example" and not self.group_size:
            missing.append(
                "sampled_unit 'example' needs group_size, the most examples of a user in the pool: "
                "give it."
            )
        elif self.cohort_size is not None and self.group_size is self.compute_budget is None:
            missing.append("cohort_size needs group_size or compute_budget beside it: give one.")
        if self.sampling == "passes" and self.delta is None:
            missing.append(
                "sampling 'passes' needs delta, far below one over the number of users: give it."
            )
        if missing:
            raise validation.UsageError(" ".join(missing))

    def _check_sizes(self):
        """Refuses sizes of a step that contradict each other, or that nothing chooses."""
        budget, group, cohort = self.compute_budget, self.group_size, self.cohort_size
        if self.sampled_unit == "example" and cohort is not None:
            raise validation.UsageError(
                "cohort_size is a number of users, and examples are sampled: give compute_budget, "
                "the examples of a step."
            )
        if budget is not None and cohort is not None and group is not None:
            if group * cohort != budget:
                raise validation.UsageError(
                    f"group_size={group} and cohort_size={cohort} make {group * cohort} gradients "
                    f"in a step, not compute_budget={budget}: leave one of the three out."
                )
        if budget is not None and cohort is not None and budget < cohort:
            raise validation.UsageError(
                f"compute_budget={budget} is smaller than cohort_size={cohort}, with one example "
                "of each user: raise it or lower that."
            )
        budget = budget or group_sizes.COMPUTE_BUDGET
        if self.splits_budget and budget < group_sizes.SMALLEST_COHORT:
            raise validation.UsageError(
                f"compute_budget={budget} is below {group_sizes.SMALLEST_COHORT}, the "
                "cohort that Estimate-and-Double begins with: raise it, or give sampling 'user', "
                "group_size and cohort_size."
            )
        for name, is_given, where in (
            (
                "group_size_epsilon",
                not self.chooses_median,
                "a group size that is chosen privately",
            ),
            ("group_size_looked_at_users", group is None, "a group_size that is given"),
        ):
            if is_given and getattr(self, name) != getattr(type(self), name):
                raise validation.UsageError(f"{name} is for {where}: leave it out.")

    def _check_noise(self):
        """Refuses noise by which nothing can be chosen, or that pays for nothing."""
        if self.target_epsilon is None:
            for is_chosen, what, names in (
                (self.splits_budget, "Group size and sampling", "group_size and sampling"),
                (self.sampling == "cyclic" and self.bands == "auto", "bands", "bands"),
            ):
                if is_chosen:
                    raise validation.UsageError(
                        f"{what} are chosen by their noise at one ε: give target_epsilon, or "
                        f"{names}."
                    )
        elif self.chooses_median and self.target_epsilon <= self.group_size_epsilon:
            raise validation.UsageError(
                f"target_epsilon={self.target_epsilon:g} is not above group_size_epsilon="
                f"{self.group_size_epsilon:g}, which the private median costs: raise it, or give "
                "group_size."
            )
        for name, is_given in (
            ("noise_multiplier 0", self.noise_multiplier == 0.0),
            ("deterministic_noise_seed", self.deterministic_noise_seed is not None),
        ):
            if self.max_epsilon is not None and is_given:
                raise validation.UsageError(
                    f"max_epsilon has no meaning with {name}, which makes the run not private: "
                    "leave one of them out."
                )
        takes = table.takers("workload")
        if self.workload != "prefix" and self.mechanism not in (None, *takes):
            raise validation.UsageError(
                f"workload {self.workload!r} is for the mechanism {' or '.join(takes)}, not for "
                f"{self.mechanism}: leave it out."
            )
        if self.bands != "auto":
            validation.integer("bands", self.bands, minimum=1)
            if self.min_sep is not None and self.min_sep < self.bands:
                raise validation.UsageError(
                    f"min_sep={self.min_sep} is less than the {self.bands} bands, so that two "
                    f"steps of a user would share noise: raise min_sep to {self.bands}, or lower "
                    "bands."
                )

    def _check_releases(self):
        """Refuses releases that nothing pays for, and exact figures that decide of the run."""
        metrics_share.check(self.budget_shares, self.metrics_epsilon, self.target_epsilon)
        if self.budget_shares is not None:
            from tff_dpftrl.accounting import budget_shares  # It takes long to import.

            budget_shares.of_run(self.budget_shares, ("metrics",), self.target_epsilon)
        if self.protects_held_out and self.stop_at_accuracy is not None:
            raise validation.UsageError(
                f"stop_at_accuracy={self.stop_at_accuracy:g} would end the run by exact figures of "
                "held-out users, and held_out_users are 'protected': leave one of them out."
            )

    @property
    def model_workload(self) -> workload_lib.Workload | None:
        """Workload that correlated noise is optimised for; None for the prefix sums."""
        if self.workload == "prefix":
            return None
        from tff_dpftrl.finetuning import optimizers

        return optimizers.update_rule(self).workload(self.num_steps)

    @property
    def statement_parameters(self) -> dict[str, statement.Scalar]:
        """Parameters of the privacy statement that the options give, besides what the plan says."""
        return {
            "optimizer": self.optimizer,
            "normalised_clipping": self.normalised_clipping,
        }
