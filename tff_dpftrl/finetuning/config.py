"""The one frozen description of a fine-tuning run: flags, TOML keys and `config.json`."""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from typing import TYPE_CHECKING, Literal, TypeAlias

from tff_dpftrl import validation
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.mechanisms import table
from tff_dpftrl.runs import metrics_share
from tff_dpftrl.training import composed, language_config

if TYPE_CHECKING:
    from tff_dpftrl.accounting import statement
    from tff_dpftrl.mechanisms import workload as workload_lib

    Mechanism: TypeAlias = str
else:
    Mechanism = Literal[tuple(table.runnable())]

Sampling = Literal["auto", "example", "user", "passes", "cyclic", "bins"]
SampledUnit = Literal["user", "example"]
Bands = int | Literal["auto"]
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "adafactor"]
Decay = Literal["none", "linear", "cosine"]
ComputeDtype = Literal["float32", "bfloat16"]
NoiseGenerator = Literal["philox", "secure"]

_AMPLIFIED = ("cyclic", "bins")

_option = composed.option

_POSITIVE = ("group_size_epsilon", "max_epsilon", "metrics_epsilon", "target_epsilon")


@dataclasses.dataclass(frozen=True)
class FinetuningConfig(language_config.TextConfig):
    """Everything that decides what a fine-tuning run does.

    Attributes carry their meaning, unit and group in their field metadata, which is what
    `tff-dpftrl finetune --help` prints. Model and vocabulary are those of `initial_weights`.
    """

    initial_weights: str | None = _option(
        None,
        "Folder of the model to fine-tune: of `tff-dpftrl pretrain`, of a run, whose users this "
        "run's statement then does not cover, or a checkpoint of GPT-2's or Llama's family in "
        "Hugging Face's layout. The run takes vocabulary, sequence length and sizes from it.",
        "model",
    )
    trained_on: str | None = _option(
        None,
        "Text that the weights of a checkpoint were trained on, in a few words. You thereby "
        "declare it to be public, and the statement names it. Default: the statement has a caveat.",
        "model",
    )
    sequence_length: int | None = _option(
        None,
        "Number of tokens in a sequence where initial_weights is a checkpoint in Hugging Face's "
        "layout; longer texts are cut off there. Default: 64, or as many as the model can read.",
        "model",
        1,
    )

    adapter_rank: int | None = _option(
        None,
        "Rank R of low-rank adapters (LoRA) of the kernels of a transformer's blocks; no other "
        "weight is trained. Default: all weights are trained.",
        "model",
        1,
    )

    sampling: Sampling = _option(
        "auto",
        "Unit that is sampled in secret, or turns that users take. With independent noise: example "
        "(ELS: examples of a pool), user (ULS: users, some examples of each), or auto, whichever "
        "promises less noise for the gradients' size. With correlated noise (DP-FTRL): passes, "
        "where nothing is sampled and users take turns. With both, for the least noise: cyclic "
        "(groups of users take turns, and are sampled at their group's), or bins (each user has a "
        "place in all passes).",
        "fine-tuning",
    )
    sampled_unit: SampledUnit = _option(
        "user",
        "Unit that cyclic sampling draws and clips. user: the mean gradient of some examples. "
        "example: examples of a pool, of the users whose turn it is.",
        "fine-tuning",
    )
    bands: Bands = _option(
        "auto",
        "Number of bands of the correlated noise of cyclic, and so of the groups that take turns. "
        "1 is independent noise. auto is the number with the least noise at target_epsilon, which "
        "finetune-plan shows.",
        "privacy",
    )
    min_sep: int | None = _option(
        None,
        "Least number of steps from one of a user to the next: the groups of cyclic. Bins have as "
        "many as there are users for. Default: as many as bands.",
        "fine-tuning",
        1,
    )
    compute_budget: int | None = _option(
        None,
        "B, the expected number of gradients in a step, of one example each. If the private "
        "median leaves fewer examples than B, B is the number of users. Default: cohort_size "
        f"times group_size, or {group_sizes.COMPUTE_BUDGET}.",
        "fine-tuning",
        1,
    )
    group_size: int | None = _option(
        None,
        "G, the largest number of examples of one user in the pool (example), or in a step (all "
        "others). Default: chosen, by a private median of the users' sizes (example), by "
        "Estimate-and-Double (user), or together with the bands (cyclic, bins).",
        "fine-tuning",
        1,
    )
    rows_per_owner: int | None = _option(
        None,
        "Largest number of rows that one owner has in the training data, where the column of "
        "users has a list of users in a row, who all own it. The run trains on a selection of "
        "rows that keeps this limit, and guarantees privacy for each owner. For example-level "
        "sampling, whose group_size it is. Default: a row has one user.",
        "fine-tuning",
        1,
    )
    group_size_looked_at_users: bool = _option(
        False,
        "Declare that group_size was chosen by looking at the training users: a table of "
        "finetune-plan, their median, an earlier run. The statement then names the choice among "
        "what is not covered.",
        "fine-tuning",
    )
    cohort_size: int | None = _option(
        None,
        "M, the expected number of users in a step; with passes, the number in every step. "
        "Default: compute_budget / group_size.",
        "fine-tuning",
        1,
    )
    num_steps: int = _option(500, "T, the number of steps of the optimizer.", "fine-tuning", 1)
    optimizer: Optimizer = _option(
        "adam",
        "Optimizer of the noised gradient: sgd, momentum, adam, adamw or adafactor.",
        "fine-tuning",
    )
    learning_rate: float = _option(1e-3, "Learning rate of the optimizer.", "fine-tuning", 0.0)
    momentum: float = _option(0.9, "Momentum of 'momentum', β₁ of adam.", "fine-tuning", 0.0)
    second_moment_decay: float = _option(0.99, "β₂ of adam and adamw.", "fine-tuning", 0.0)
    weight_decay: float = _option(0.0, "Weight decay of adamw.", "fine-tuning", 0.0)
    warmup_steps: int | None = _option(
        None,
        "Number of steps over which the learning rate grows to its full value. Default: a tenth "
        "of all, at most 10.",
        "fine-tuning",
        0,
    )
    decay: Decay = _option(
        "none",
        "How the learning rate falls to zero over the steps: none, linear or cosine.",
        "fine-tuning",
    )
    normalised_clipping: bool = _option(
        True,
        "Divide the clipped gradients by the clip norm. The clip norm is then no part of the "
        "learning rate (De et al. 2022).",
        "fine-tuning",
    )
    iterate_averaging: float | None = _option(
        None,
        "Decay of the exponential moving average of the steps' models, which is evaluated and "
        "kept in place of the last model. It costs no privacy. Default: no average.",
        "fine-tuning",
        0.0,
    )
    examples_at_once: int = _option(
        64,
        "Number of examples whose gradients are computed together, or those of one user if there "
        "are more. It trades memory for speed. A larger batch is added up from such pieces; "
        "nothing else depends on it but last bits.",
        "fine-tuning",
        1,
    )
    compute_dtype: ComputeDtype = _option(
        "float32",
        "Dtype of the forward and backward passes of a step: float32, or bfloat16 for "
        "transformers. Weights stay float32; gradients are clipped and added up as always.",
        "fine-tuning",
    )
    gradient_checkpointing: bool = _option(
        False,
        "Keep only the states between a transformer's blocks for the backward pass, and compute "
        "the rest again. It takes less memory and more time. For examples or users of more than "
        "128 tokens, whose gradients are taken one after the other.",
        "fine-tuning",
    )
    proxy_data: str = _option(
        "standard-library",
        "Public text by user: 'standard-library', or a .jsonl or .jsonl.gz file. Gradients are "
        "measured on it where clip_norm, group_size or sampling are to be chosen.",
        "fine-tuning",
    )

    target_epsilon: float | None = _option(
        None, "Largest ε that the whole run may spend; or give noise_multiplier.", "privacy"
    )
    noise_multiplier: float | None = _option(
        None, "σ: standard deviation of the noise per unit of clip norm.", "privacy", 0.0
    )
    delta: float | None = _option(
        None,
        "δ of the (ε, δ) statement. Default: n^-1.1 for n examples; passes, which need no number "
        "of users or examples otherwise, have no default.",
        "privacy",
    )
    metrics_epsilon: float | None = _option(
        None,
        "Largest ε of the loss on each step's users or examples, if nothing else were released: "
        "it is then released with noise. target_epsilon is for the whole. Or give a share, like "
        "budget_shares metrics=0.05. Default: it stays in private/.",
        "privacy",
    )
    budget_shares: str | None = _option(
        None,
        "Share of target_epsilon for what is released besides the weights, like metrics=0.05.",
        "privacy",
    )
    clip_norm: float | None = _option(
        None,
        "L2 norm that the gradient of an example (example) or of a user (all others) is clipped "
        "to. Default: half the median norm on proxy_data.",
        "privacy",
    )
    group_size_epsilon: float = _option(
        0.05, "Part of ε that is spent on choosing the private median.", "privacy"
    )
    declared_units: int | None = _option(
        None,
        "Number of users (user) or of examples in the pool (example) from which the sampling "
        "probability is computed, declared without a look at the data. Default: counted on the "
        "data.",
        "privacy",
        1,
    )
    mechanism: Mechanism | None = _option(
        None, "Mechanism of passes and bins, as for `tff-dpftrl train`. Default: blt.", "privacy"
    )
    workload: Literal["prefix", "auto"] = _option(
        "prefix",
        "Sums whose correlated noise is minimised. prefix: prefix sums of the gradients. auto: "
        "the sums from which optimizer, schedule and iterate_averaging make models. For adam, "
        "auto takes its preconditioner as constant. Bands are chosen by prefix sums in any case.",
        "privacy",
    )
    noise: NoiseGenerator = _option(
        "philox",
        "Generator of the weights' noise. 'philox'. 'secure': AES-256 in counter mode, with "
        "Gaussians that are rounded without error and added on a grid, safe from attacks on "
        "floating point. It takes more memory: several float64 copies of the trained weights.",
        "privacy",
    )

    max_epsilon: float | None = _option(
        None,
        "Largest ε: the run stops before the step that would bring the ε spent above this. "
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
        "all that is measured on them stays in private/, the best model too.",
        "run",
    )
    eval_every: int = _option(
        25, "Number of steps between evaluations on held-out users.", "run", 1
    )
    eval_sequences: int = _option(
        4000,
        "Largest number of held-out examples in an evaluation. Users come in random order, each "
        "with all examples, until there are twice as many; where users have many examples, few "
        "users are behind the figure.",
        "run",
        1,
    )
    seed: int = _option(
        0,
        "Public seed of the turns of 'passes', of the choice of proxies and of the first "
        "adapters. It is not the seed of noise or samples: those seeds are secret.",
        "run",
        0,
    )
    deterministic_noise_seed: int | None = _option(
        None,
        "Seed of noise and samples, for debugging only: the run is then NOT private. Default: the "
        "operating system's generator.",
        "run",
        0,
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_owners()
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                validation.positive(name, getattr(self, name))
        if self.stop_at_accuracy is not None:
            remedy = "It is a share: 0.3 for 30 %."
            validation.probability("stop_at_accuracy", self.stop_at_accuracy, remedy=remedy)
        validation.learning_rate("learning_rate", self.learning_rate)
        if self.clip_norm is not None:
            validation.clip_norm("clip_norm", self.clip_norm)
        metrics_share.check(self.budget_shares, self.metrics_epsilon, self.target_epsilon)
        if self.held_out_users == "protected" and self.stop_at_accuracy is not None:
            raise validation.UsageError(
                f"stop_at_accuracy={self.stop_at_accuracy:g} would end the run by exact figures of "
                "held-out users, and held_out_users are 'protected': leave one of them out."
            )
        if self.budget_shares is not None:
            from tff_dpftrl.accounting import budget_shares  # It takes long to import.

            budget_shares.of_run(self.budget_shares, ("metrics",), self.target_epsilon)
        if self.delta is not None:
            validation.delta(self.delta)
        for name in ("momentum", "second_moment_decay"):
            validation.number(name, getattr(self, name), below=1)
        if self.iterate_averaging is not None:
            validation.number("iterate_averaging", self.iterate_averaging, above=0, below=1)
        if self.trained_on is not None and len(self.trained_on.strip().splitlines()) != 1:
            raise validation.UsageError(
                "trained_on must name a text in one line: leave it out if it is not known."
            )
        missing = []
        if self.initial_weights is None:
            missing.append(
                "initial_weights must name the folder of the model to fine-tune: make one with "
                "tff-dpftrl pretrain."
            )
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "neither" if self.target_epsilon is None else "both"
            missing.append(f"Give either target_epsilon or noise_multiplier, got {given}.")
        missing += self._missing_for_sampling()
        if missing:
            raise validation.UsageError(" ".join(missing))
        if self.warmup_steps is not None and self.warmup_steps >= self.num_steps:
            raise validation.UsageError(
                f"warmup_steps must be below num_steps={self.num_steps}, got {self.warmup_steps}."
            )
        self._check_budget_of_epsilon()
        self._check_without_effect()
        self._check_sampling()

    @property
    def chooses_median(self) -> bool:
        """Whether a private median of the users' sizes is drawn."""
        return self.sampling in ("auto", "example") and self.group_size is None

    @property
    def is_amplified(self) -> bool:
        """Whether samples are secret and noise is correlated."""
        return self.sampling in _AMPLIFIED

    @property
    def splits_budget(self) -> bool:
        """Whether the compute budget is split by the noise, like Estimate-and-Double."""
        given = self.group_size is not None or self.cohort_size is not None
        of_users = self.sampling == "user" or (self.is_amplified and self.sampled_unit == "user")
        return self.sampling == "auto" or (of_users and not given)

    def _check_owners(self):
        if self.rows_per_owner is None:
            return
        if self.sampling != "example":
            raise validation.UsageError(
                "rows_per_owner needs sampling 'example', which draws each row by itself, not "
                f"{self.sampling!r}: a row of two users would come with either."
            )
        if self.group_size not in (None, self.rows_per_owner):
            raise validation.UsageError(
                f"group_size={self.group_size} is not rows_per_owner={self.rows_per_owner}, which "
                "bounds the rows of each owner: leave group_size out."
            )
        object.__setattr__(self, "group_size", self.rows_per_owner)

    def _missing_for_sampling(self) -> list[str]:
        """Returns what the sampling needs and was not given, a sentence each."""
        missing = []
        if self.sampling == "passes" and self.group_size is None:
            missing.append(
                "sampling 'passes' needs group_size, which Estimate-and-Double chooses for "
                "sampled users only: give it."
            )
        elif self.sampling == "cyclic" and self.sampled_unit == "example" and not self.group_size:
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
        return missing

    def _check_budget_of_epsilon(self):
        if self.max_epsilon is not None:
            for name, is_given in (
                ("noise_multiplier 0", self.noise_multiplier == 0.0),
                ("deterministic_noise_seed", self.deterministic_noise_seed is not None),
            ):
                if is_given:
                    raise validation.UsageError(
                        f"max_epsilon has no meaning with {name}, which makes the run not private: "
                        "leave one of them out."
                    )
        if self.chooses_median and self.target_epsilon is not None:
            if self.target_epsilon <= self.group_size_epsilon:
                raise validation.UsageError(
                    f"target_epsilon={self.target_epsilon:g} is not above group_size_epsilon="
                    f"{self.group_size_epsilon:g}, which the private median costs: raise it, or "
                    "give group_size."
                )

    def _check_without_effect(self):
        adam = ("adam", "adamw")
        for name, has_effect, where in (
            ("weight_decay", self.optimizer == "adamw", "the optimizer adamw"),
            ("second_moment_decay", self.optimizer in adam, "the optimizers adam and adamw"),
            ("momentum", self.optimizer in ("momentum", *adam), "momentum, adam and adamw"),
            ("group_size_epsilon", self.chooses_median, "a group size that is chosen privately"),
            (
                "group_size_looked_at_users",
                self.group_size is not None,
                "a group_size that is given",
            ),
        ):
            if getattr(self, name) != getattr(type(self), name) and not has_effect:
                raise validation.UsageError(f"{name} is for {where}: leave it out.")

    def _check_sampling(self):
        if "example" in (self.sampling, self.sampled_unit) and self.cohort_size is not None:
            raise validation.UsageError(
                "cohort_size is a number of users, and examples are sampled: give compute_budget, "
                "the examples of a step."
            )
        if None not in (self.compute_budget, self.cohort_size, self.group_size):
            product = typing.cast(int, self.group_size) * typing.cast(int, self.cohort_size)
            if product != self.compute_budget:
                raise validation.UsageError(
                    f"group_size={self.group_size} and cohort_size={self.cohort_size} make "
                    f"{product} gradients in a step, not compute_budget={self.compute_budget}: "
                    "leave one of the three out."
                )
        if self.sampling == "auto":
            for name in ("group_size", "cohort_size", "declared_units"):
                if getattr(self, name) is not None:
                    raise validation.UsageError(
                        f"{name} has no meaning before it is known what is sampled: leave it out, "
                        "or name sampling."
                    )
        if self.cohort_size is not None and self.compute_budget is not None:
            if self.compute_budget < self.cohort_size:
                raise validation.UsageError(
                    f"compute_budget={self.compute_budget} is smaller than cohort_size="
                    f"{self.cohort_size}, with one example of each user: raise it or lower that."
                )
        budget = self.compute_budget or group_sizes.COMPUTE_BUDGET
        if self.splits_budget and budget < group_sizes.SMALLEST_COHORT:
            raise validation.UsageError(
                f"compute_budget={budget} is below {group_sizes.SMALLEST_COHORT}, the "
                "cohort that Estimate-and-Double begins with: raise it, or give sampling 'user', "
                "group_size and cohort_size."
            )
        if self.splits_budget and self.target_epsilon is None:
            raise validation.UsageError(
                "Group size and sampling are chosen by their noise at one ε: give target_epsilon, "
                "or group_size and sampling."
            )
        if self.declared_units is not None and self.sampling not in ("example", "user"):
            raise validation.UsageError(
                f"declared_units has no meaning with sampling {self.sampling!r}, which takes all "
                "users that there are: leave it out."
            )
        self._check_noise()

    def _check_noise(self):
        """Refuses what the kind of noise cannot have."""
        takes = table.takers("workload")
        if self.workload != "prefix" and not (self.sampling == "passes" or self.is_amplified):
            raise validation.UsageError(
                f"workload {self.workload!r} is for correlated noise, not for sampling "
                f"{self.sampling!r}, whose noise is independent: leave it out."
            )
        if self.workload != "prefix" and self.mechanism not in (None, *takes):
            raise validation.UsageError(
                f"workload {self.workload!r} is for the mechanism {' or '.join(takes)}, not for "
                f"{self.mechanism}: leave it out."
            )
        bands = () if self.bands == "auto" else (self.bands,)
        is_cyclic = self.sampling == "cyclic"
        for given, name in (
            (self.sampled_unit != "user", "sampled_unit"),
            (bool(bands), "bands"),
            (self.min_sep is not None, "min_sep"),
        ):
            if given and not is_cyclic:
                raise validation.UsageError(
                    f"{name} is for sampling 'cyclic', not for {self.sampling!r}: leave it out."
                )
        # Runs of earlier versions have "blt" on record where it had no meaning.
        fitting = (None, "bandtoep" if is_cyclic else "blt")
        if self.sampling not in ("passes", "bins") and self.mechanism not in fitting:
            noise = "has bands, chosen by bands" if is_cyclic else "is independent"
            raise validation.UsageError(
                f"mechanism {self.mechanism!r} is for sampling 'passes' or 'bins', not for "
                f"{self.sampling!r}, whose noise {noise}: leave it out."
            )
        for number in bands:
            validation.integer("bands", number, minimum=1)
            if self.min_sep is not None and self.min_sep < number:
                raise validation.UsageError(
                    f"min_sep={self.min_sep} is less than the {number} bands, so that two steps of "
                    f"a user would share noise: raise min_sep to {number}, or lower bands."
                )
        if is_cyclic and not bands and self.target_epsilon is None:
            raise validation.UsageError(
                "bands are chosen by their noise at one ε: give target_epsilon, or bands."
            )

    @property
    def initial_folder(self) -> pathlib.Path:
        """Folder of the model to fine-tune."""
        return pathlib.Path(typing.cast(str, self.initial_weights))  # Checked at the beginning.

    @property
    def model_workload(self) -> workload_lib.Workload | None:
        """Workload that correlated noise is optimised for; None for the prefix sums."""
        if self.workload == "prefix":
            return None
        from tff_dpftrl.finetuning import optimizers

        rule = optimizers.update_rule(
            self.part(optimizers.OptimizerOptions), self.iterate_averaging
        )
        return rule.workload(self.num_steps)

    @property
    def statement_parameters(self) -> dict[str, statement.Scalar]:
        """Parameters of the privacy statement that the options give, besides what the plan says."""
        return {
            "optimizer": self.optimizer,
            "normalised_clipping": self.normalised_clipping,
        }
