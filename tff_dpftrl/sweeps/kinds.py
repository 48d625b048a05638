"""The kinds of runs that a sweep can be of: those of `train`, and those of `finetune`."""

from __future__ import annotations

import abc
import functools
import pathlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.finetuning import config as finetuning_config
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import composed, custom_models, metrics_columns, warm_start
from tff_dpftrl.training import config as training_config
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import placement as placement_lib

if TYPE_CHECKING:
    from tff_dpftrl.runs import privacy, released_metrics


class RunKind(abc.ABC):
    """A kind of runs.

    Attributes:
      name: Name of the kind, as manifests of its runs have it.
      command: Subcommand of `tff-dpftrl` that begins and resumes such a run.
      config_class: Class of the options of such a run.
      unit: Name of what such a run commits: "round" or "step".
      flag: What to do with the flag of `sweep` that chooses fine-tuning, for such runs.
    """

    name: ClassVar[str]
    command: ClassVar[str]
    config_class: ClassVar[type[composed.Options]]
    unit: ClassVar[str]
    flag: ClassVar[str]

    def refuse_others(self, names: Iterable[str], source: str) -> None:
        """Refuses options that only another kind of runs has."""
        for name in names:
            for kind in KINDS.values() if name not in _options(self) else ():
                if name in _options(kind):
                    raise validation.UsageError(
                        f"{source} names {name}, an option of {kind.command}, but these are runs "
                        f"of {self.command}: {kind.flag} --finetune, or leave {name} out."
                    )

    def config(self, options: Mapping[str, Any], source: str) -> Any:
        """Builds the config of a run."""
        self.refuse_others(options, source)
        return options_lib.config_from_mapping(options, source, self.config_class)

    def begun_config(self, options: Mapping[str, Any], source: str) -> Any:
        """Builds the config of a run from the options in its manifest, perhaps an earlier one."""
        self.refuse_others(options, source)
        return options_lib.begun_from_mapping(options, source, self.config_class)

    def length(self, config: Any) -> int:
        """Returns the number of rounds or steps of a run."""
        return config.to_dict()[f"num_{self.unit}s"]

    def check(self, config: Any, placement: placement_lib.Placement) -> None:
        """Refuses, without reading the text, options that the command would refuse."""
        from tff_dpftrl.training import corpus

        options = config.to_dict()
        corpus.require_packages(options)
        if options["initial_weights"] is not None:
            warm_start.find(options["initial_weights"])

    @abc.abstractmethod
    def figures(self, known: manifest.Manifest) -> released_metrics.Figures:
        """Returns the figures that a run may release with noise, from its manifest."""

    @abc.abstractmethod
    def text_check(self) -> Callable[[Any], None]:
        """Returns a function that refuses a config whose text cannot be used.

        The function raises a ValueError. It keeps what it has read for the next config.
        """

    @abc.abstractmethod
    def planner(self) -> Callable[[Any], privacy.PrivacyPlan]:
        """Returns a function from a config to the privacy that its run will have.

        The function raises a ValueError if the text or the options cannot have it. It keeps the
        text for the next config. Options that leave the privacy open have been refused before.
        """

    @abc.abstractmethod
    def begun_plan(self, known: manifest.Manifest, output: pathlib.Path) -> privacy.PrivacyPlan:
        """Returns the privacy of the run in a folder, from its manifest."""

    @abc.abstractmethod
    def process_group(self, config: Any) -> Hashable | None:
        """Returns the key of the runs that one process may run one after another.

        None if such a run needs a process of its own.
        """


class _Training(RunKind):
    name, command, unit = manifest.TRAINING, "train", "round"
    flag = "leave out"
    config_class = training_config.TrainingConfig

    @override
    def begun_config(self, options, source):
        return options_lib.of_begun_run(options, source)

    @override
    def check(self, config, placement):
        custom_models.refuse_missing(config.language.model, None)
        placement.check()
        super().check(config, placement)

    @override
    def figures(self, known):
        return metrics_columns.figures_of_rounds(
            known.facts["vocabulary_size"], known.config["sequence_length"]
        )

    @override
    def text_check(self):
        from tff_dpftrl.training import corpus

        num_users = functools.cache(lambda options: len(corpus.read(options).train))
        # Cells that differ in their noise alone have the same text.
        return lambda config: config.request().check(
            num_users(config.part(corpus.TextOptions).without_noise())
        )

    @override
    def planner(self):
        from tff_dpftrl.training import corpus

        num_users = functools.cache(lambda options: len(corpus.read_users(options).train))
        plans = {}

        def planned(config):
            users = num_users(config.text)
            key = repr((config.request(), config.releases, config.num_evaluations, users))
            if key not in plans:
                plans[key] = config.plan(users, num_parameters=1)  # ε does not depend on them.
            return plans[key]

        return planned

    @override
    def begun_plan(self, known, output):
        config, facts = options_lib.of_manifest(known, output), known.facts
        users, size = facts["training_users"], facts["num_parameters"]
        return config.request().resumed(users, size, known.derived)

    @override
    def process_group(self, config):
        # TensorFlow's threads, whose number is set once, depend on the clients of a round.
        return config.learning.clients_per_round


class _Finetuning(RunKind):
    name, command, unit = manifest.FINETUNING, "finetune", "step"
    flag = "add"
    config_class = finetuning_config.FinetuningConfig

    @override
    def check(self, config, placement):
        if placement != placement_lib.Placement():
            raise validation.UsageError(
                "ray_workers and ray_address are for the clients of train, and finetune has none: "
                "leave them out."
            )
        super().check(config, placement)
        warm_start.source(config.initial_folder, config.trained_on)

    @override
    def figures(self, known):
        from tff_dpftrl.finetuning import run_privacy

        return run_privacy.figures_of_steps(known.facts["vocabulary_size"])

    @override
    def text_check(self):
        from tff_dpftrl.training import corpus

        read = functools.lru_cache(maxsize=1)(corpus.read_users)
        compared = set()

        def check(config):
            options, folder = config.text, config.initial_folder
            text = read(options)
            if (config.cohort_size or 0) > len(text.train):
                raise validation.UsageError(
                    f"cohort_size={config.cohort_size} exceeds the {len(text.train)} users who "
                    "train: lower it."
                )
            if (options, folder) not in compared:
                users = (text.train, text.validation, text.test)
                warm_start.refuse_protected(folder, config.data, config.table, users)
                compared.add((options, folder))

        return check

    @override
    def planner(self):
        from tff_dpftrl.finetuning import choosing, run
        from tff_dpftrl.training import corpus

        read = functools.lru_cache(maxsize=1)(corpus.read_users)
        plans = {}

        def planned(config):
            users = config.text
            released = config.metrics_epsilon, config.budget_shares
            sampling = config.part(choosing.SamplingOptions)
            key = repr((users, sampling, config.initial_folder, released))
            if key not in plans:
                plans[key] = run.planned(config, read(users))
            return plans[key]

        return planned

    @override
    def begun_plan(self, known, output):
        from tff_dpftrl.finetuning import opening, resuming

        return resuming.plan_of(known, opening.config_of(known, output).model_workload)

    @override
    def process_group(self, config):
        return self.name


def _options(kind: RunKind) -> Mapping[str, Any]:
    return composed.options_of(kind.config_class)


TRAINING, FINETUNING = _Training(), _Finetuning()
KINDS: Mapping[str, RunKind] = {kind.name: kind for kind in (TRAINING, FINETUNING)}
"""All kinds, by name."""


def of(config: composed.Options) -> RunKind:
    """Returns the kind of the runs that have a config."""
    return next(kind for kind in KINDS.values() if isinstance(config, kind.config_class))
