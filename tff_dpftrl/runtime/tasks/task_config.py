"""The frozen options of a task: what devices compute, its learning and noise, rounds and sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.plans import expectations
from tff_dpftrl.runtime.tasks import secure_groups as secure_groups_lib
from tff_dpftrl.training import composed, language_config, learning_options, noise_options
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training.composed import option

if TYPE_CHECKING:
    from typing_extensions import Self

    from tff_dpftrl.runs import dp_ftrl_privacy

_GROUP = "rounds with devices"
_SECURE = "secure aggregation of the devices' reports"
_DEFINITION = "model and data of your own"
_TESTS = "tests of the task"

_SHARE_THAT_MAY_REST = 0.7
"""Share of the devices that may rest by the default `min_sep`; the others can fill a round."""

IN_MEMORY = "(given in Python)"
"""Value of the option `build` where a definition was given in Python."""

ROUNDED_BITS = 16
"""Value of `update_bits` with which devices round their updates (`plans.rounded_updates`)."""


@dataclasses.dataclass(frozen=True)
class OnPublicText(language_config.VocabularyConfig):
    """Text of the devices, its public vocabulary, and public text that stands for it in tests."""

    text_feature: str = option(
        "tokens", "Name of the feature of a stored example that holds its text.", _GROUP
    )
    proxy_data: str = option(
        "standard-library",
        "Public text by user on which the task is tested before it is signed: 'standard-library', "
        "or a file as for --data.",
        _TESTS,
    )
    proxy_devices: int = option(
        5, "Number of users of proxy_data that stand for devices.", _TESTS, 1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.vocabulary in ("private", vocabulary.DP):
            raise validation.UsageError(
                f"vocabulary {self.vocabulary!r} is counted on the texts in one place, and the "
                "server never sees those of devices: take 'docs', 'english' or a file of public "
                "text, or count words with noise by a task with analytics 'words', and name the "
                "counts.csv of its report."
            )
        population_lib.check_name("text_feature", self.text_feature)


@dataclasses.dataclass(frozen=True)
class LanguageTask(learning_options.BatchOptions, language_config.LanguageConfig, OnPublicText):
    """A language model of this package, and a device's passes."""

    chosen_by = "a language model"

    shuffle: bool = option(
        True,
        "Shuffle a device's texts anew in each pass, with a seed that the device draws.",
        _GROUP,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.model == "own":
            raise validation.UsageError(
                "model 'own' cannot be named in a task's config: give build, the function that "
                "returns a TaskDefinition, instead."
            )


@dataclasses.dataclass(frozen=True)
class WordCounts(OnPublicText):
    """Counts of words, which train no model."""

    chosen_by = "analytics"

    analytics: Literal["words"] | None = option(
        None,
        "Counts over the devices' data instead of a model's training. 'words': the words of the "
        "vocabulary, all other words, and lengths of texts. For counts of your own, give build.",
        _DEFINITION,
    )


@dataclasses.dataclass(frozen=True)
class OwnDefinition(composed.Options):
    """A `TaskDefinition`, which says what devices store and how they train on it."""

    chosen_by = "build, whose TaskDefinition says what devices store and compute"

    build: str | None = option(
        None,
        "File and function that define a model and data of your own instead of a language model, "
        "like my_task.py:build. The function returns a TaskDefinition "
        "(docs/how_to/add_a_task.md), which has the options of text, model and a device's passes.",
        _DEFINITION,
    )


Definition = LanguageTask | WordCounts | OwnDefinition


def _definition(options: Mapping[str, Any]) -> type[composed.Options]:
    if options.get("build") is not None:
        return OwnDefinition
    return LanguageTask if options.get("analytics") is None else WordCounts


@dataclasses.dataclass(frozen=True)
class ServingOptions(composed.Options):
    """Options of rounds with the devices of a population."""

    population: str = option("", "Name of the population of devices. Required.", _GROUP)
    task: str = option("", "Name of the task. Default: the name of its folder.", _GROUP)
    num_devices: int | None = option(
        None,
        "Least number of devices in the population. Required. How seldom each device takes part, "
        "and what δ means, follow from it.",
        _GROUP,
        1,
    )
    over_selection: float = option(
        1.3,
        "Number of devices that are chosen for each report of the goal. Above 1, because some "
        "devices will not report.",
        _GROUP,
        1.0,
    )
    least_fraction: float = option(
        0.8,
        "Share of the goal with which a round still succeeds when its time is over.",
        _GROUP,
        0.0,
    )
    selection_timeout: float = option(
        600.0, "Seconds after which a round begins with fewer devices.", _GROUP, 0.0
    )
    reporting_timeout: float = option(
        600.0, "Seconds that the devices of a round have to report.", _GROUP, 0.0
    )
    exchange_timeout: float = option(
        10.0, "Seconds that the parts of the server wait for each other.", _GROUP, 0.0
    )
    devices_per_aggregator: int = option(
        500, "Number of devices whose reports one Aggregator sums.", _GROUP, 1
    )
    pipelined: bool = option(
        False,
        "Choose the devices of the next round while one round reports. This is quicker if there "
        "are many times more devices than a round takes.",
        _GROUP,
    )
    weight: float = option(
        1.0, "Weight of the task in the share of rounds among the population's tasks.", _GROUP, 0.0
    )
    min_sep_hours: float = option(
        0.0,
        "Hours that a device rests after it took part, in addition to min_sep rounds.",
        _GROUP,
        0.0,
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.population:
            raise validation.UsageError(
                "population must be given: the name of the devices that take part."
            )
        population_lib.check_name("population", self.population)
        if self.task:
            population_lib.check_name("task", self.task)
        validation.positive("weight", self.weight)
        if self.num_devices is None:
            raise validation.UsageError(
                "num_devices must be given: how many devices there are, at least."
            )

    def check_rounds(
        self, rounds: learning_options.RoundOptions, noise: noise_options.Scheduled, wanted: int
    ) -> None:
        """Refuses a population that cannot fill the rounds."""
        num_devices = self.num_devices or 0
        if num_devices < wanted:
            raise validation.UsageError(
                f"num_devices={num_devices} is below the {wanted} devices that a round "
                f"chooses (clients_per_round={rounds.clients_per_round} times "
                f"over_selection={self.over_selection:g}): lower one of these."
            )
        if noise.min_sep is not None and noise.min_sep * wanted > num_devices:
            raise validation.UsageError(
                f"min_sep={noise.min_sep} with {wanted} devices a round needs "
                f"{noise.min_sep * wanted} of them, and num_devices={num_devices}: rounds "
                "would be skipped while devices rest. Lower min_sep, clients_per_round or "
                "over_selection."
            )
        if noise.max_participations is not None:
            turns = noise.max_participations * num_devices
            if turns < rounds.num_rounds * wanted:
                raise validation.UsageError(
                    f"max_participations={noise.max_participations} of {num_devices} devices "
                    f"are {turns} turns, and num_rounds={rounds.num_rounds} with {wanted} devices "
                    f"need {rounds.num_rounds * wanted}: raise it, or lower one of these."
                )


@dataclasses.dataclass(frozen=True)
class DeviceOptions(composed.Options):
    """Options of a device in a round: examples, memory, time, and the form of its report."""

    update_bits: int = option(
        ROUNDED_BITS,
        "Number of bits of each weight in a report in the clear. 16: the device rounds such that "
        "no update gets longer, so the guarantee stays. 64: values as computed; counts always have "
        "64. Secure sums have secagg_bits instead.",
        _GROUP,
    )
    order_statistics: bool = option(
        False,
        "Record median, p10 and p90 of the devices' loss, accuracy, number of sequences and "
        "seconds of work in each round. These figures are exact, and ε does not cover them. "
        "Devices report the bucket of each figure, and only sums of buckets are used.",
        _GROUP,
    )
    collection: str = option(
        "text", "Name of the collection in the devices' example stores.", _GROUP
    )
    max_examples: int = option(
        200, "Largest number of texts of a device: the newest ones.", _GROUP, 1
    )
    max_age_hours: float = option(
        0.0, "Largest age of a text, in hours; 0 for any age.", _GROUP, 0.0
    )
    memory_bytes: int = option(
        500_000_000, "Largest memory of a device's work, in bytes.", _GROUP, 1
    )
    work_seconds: float = option(60.0, "Longest time of a device's work, in seconds.", _GROUP, 0.0)

    def __post_init__(self):
        super().__post_init__()
        population_lib.check_name("collection", self.collection)
        validation.positive("work_seconds", self.work_seconds)
        if self.update_bits not in (ROUNDED_BITS, 64):
            raise validation.UsageError(
                f"update_bits must be {ROUNDED_BITS} or 64, got {self.update_bits}."
            )


@dataclasses.dataclass(frozen=True)
class ClearReports(composed.Options):
    """The server sees every report."""

    chosen_by = "reports in the clear"

    secure_step_timeout: float = option(
        30.0, "Seconds that the devices have for each step of a secure sum.", _SECURE, 0.0
    )


@dataclasses.dataclass(frozen=True)
class SecureSums(ClearReports):
    """The server sees sums over groups of devices only."""

    chosen_by = "secure_aggregation ('honest-but-curious' or 'active-server')"

    secure_aggregation: secure_groups_lib.ThreatModel | None = option(
        None,
        "Threat model of secure sums, by which the server sees sums over groups of devices only, "
        "metrics included. 'active-server', also without a value: the server may do anything, if "
        "fewer than a third of a group is in league with it and somebody else attests its devices. "
        "'honest-but-curious': the server must follow the protocol; one that lies about who "
        "dropped out can learn single reports. Needs secagg_bits. Default: the server sees every "
        "report.",
        _SECURE,
    )
    least_group: int | None = option(
        None,
        "Least number of devices in the sum of a group; a group with fewer is lost. Groups are of "
        "devices_per_aggregator. Default: the group's share of the fewest reports of a round.",
        _SECURE,
        2,
    )
    secure_threshold: float | None = option(
        None,
        "Share of a group's devices of which more must stay to the end. Least value and default: "
        "1/2 (honest-but-curious) or 2/3 (active-server).",
        _SECURE,
        0.0,
    )
    secure_neighbours: int | None = option(
        None,
        "Number of devices with which each one shares its secrets, for large groups. An "
        "honest-but-curious server draws them at random. Default: all devices of the group.",
        _SECURE,
        2,
    )
    secure_corrupt_fraction: float | None = option(
        None,
        "Share of the devices that may be in league with the server: secure_neighbours must be "
        "enough for it. Default: 0.05.",
        _SECURE,
        0.0,
    )
    noise_party: str | None = option(
        None,
        "Public keys of noise parties (KEY.pub, or 64 hexadecimal digits), separated by commas. "
        "These are other operators. They add the noise of each round within the secure sum, so "
        "that the server sees no sum of updates without it; sums of metrics stay exact. One party "
        "alone can subtract its noise from what is released. Each party adds the whole noise. With "
        "two, the noise has twice the variance, and protects from either of them, and from a "
        "server that colludes with one. A round is one group, and waits for all parties. Default: "
        "the server adds the noise.",
        _SECURE,
    )

    @property
    def noise_parties(self) -> tuple[str, ...]:
        """Raw public keys, hexadecimal, of the noise parties; empty without them."""
        if self.noise_party is None:
            return ()
        return tuple(map(_party_key, self.noise_party.split(",")))

    def groups(
        self, rounds: population_lib.RoundSettings, secagg_bits: int | None
    ) -> secure_groups_lib.SecureGroups:
        """Returns the groups of devices that sum their reports securely."""
        assert self.secure_aggregation is not None  # It has chosen this class.
        return secure_groups_lib.of_rounds(
            rounds,
            self.secure_aggregation,
            secagg_bits=secagg_bits,
            least_group=self.least_group,
            neighbours=self.secure_neighbours,
            corrupt_fraction=self.secure_corrupt_fraction,
            noise_parties=self.noise_parties,
        )


def _sums(options: Mapping[str, Any]) -> type[composed.Options]:
    return ClearReports if options.get("secure_aggregation") is None else SecureSums


@dataclasses.dataclass(frozen=True)
class ProxyTestOptions(composed.Options):
    """Tests that a task must pass before it is signed."""

    proxy_rounds: int = option(
        4, "Number of test rounds. The loss must fall from the first to the last.", _TESTS, 2
    )
    expect: str | None = option(
        None,
        "Further expectations on the test, separated by commas: 'loss < 6.5, top1_in_vocab > 0.1, "
        "update < 10'. A name is the label of a metric of the last round, or the end of the label; "
        "or 'update', the L2 norm by which any round changes the model. Then come < or > and a "
        "number. The task is refused unless all are met. Default: only the loss must fall.",
        _TESTS,
    )
    test_python: str | None = option(
        None,
        "Python interpreters of environments with other versions of TensorFlow that devices may "
        "have, separated by commas. The devices' part is tested there, too, and must give the same "
        "updates.",
        _TESTS,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.expect is not None:
            expectations.from_text(self.expect)


@dataclasses.dataclass(frozen=True)
class TaskConfig(learning_options.Seeded):
    """The options of a task, in parts; `clients_per_round` is the goal of a round's reports."""

    definition: Definition = composed.part(
        LanguageTask, WordCounts, OwnDefinition, choose=_definition
    )
    learning: learning_options.LearningOptions = composed.part(learning_options.LearningOptions)
    privacy: noise_options.Scheduled = composed.part(
        noise_options.DpFtrl,
        noise_options.AdaptiveDpFtrl,
        noise_options.NoNoise,
        choose=noise_options.kind_of_run,
    )
    serving: ServingOptions = composed.part(ServingOptions)
    devices: DeviceOptions = composed.part(DeviceOptions)
    sums: ClearReports = composed.part(ClearReports, SecureSums, choose=_sums)
    evaluation: config_lib.EvaluationOptions = composed.part(config_lib.EvaluationOptions)
    tests: ProxyTestOptions = composed.part(ProxyTestOptions)

    noise: learning_options.NoiseGenerator = option(
        "secure",
        "Generator of the noise, for the server and for noise parties. 'secure': AES-256 in "
        "counter mode. Its Gaussians are rounded without error and added on a grid, safe from "
        "attacks on floating point. 'philox': faster.",
        "privacy",
    )

    def __post_init__(self):
        super().__post_init__()
        self.privacy.check(self.learning)
        settings = self.round_settings
        if settings.least < 2:
            raise validation.UsageError(
                f"clients_per_round={self.learning.clients_per_round} with least_fraction="
                f"{self.serving.least_fraction:g} lets a round end with {settings.least} reports, "
                "and its metrics would be the exact figures of one device: raise one of these."
            )
        self.serving.check_rounds(self.learning, self.privacy, settings.wanted)
        has_none = isinstance(self.privacy, noise_options.NoNoise)
        if self.secure_groups is not None and self.noise_parties and has_none:
            raise validation.UsageError(
                "noise_party adds the noise of a mechanism, and mechanism 'none' has none: "
                "give a mechanism, or leave noise_party out."
            )

    @classmethod
    @override
    def known(cls) -> frozenset[str]:
        return super().known() | config_lib.TrainingConfig.known()

    @classmethod
    @override
    def of(cls, **options: Any) -> Self:
        return super().of(**_of_task(options))

    @classmethod
    @override
    def of_begun(cls, **options: Any) -> Self:
        return super().of_begun(**_of_task(options))

    def check_own_algorithm(self) -> None:
        """Refuses options of learning that an algorithm of a definition's own has itself."""
        restarts = bool(self.privacy.server_restarts(self.learning.num_rounds))
        of_rounds = composed.options_of(learning_options.RoundOptions)
        given = [name for name in self.learning.given() if name not in of_rounds]
        for name in (*given, *(["restart_optimizer"] if restarts else [])):
            raise validation.UsageError(
                f"{name} has no meaning with the algorithm of a TaskDefinition, which has its own "
                "optimizers: leave it out."
            )

    @override
    def with_defaults(self) -> Self:
        """Returns options that name what follows from others; a definition needs no vocabulary."""
        return dataclasses.replace(self, definition=self.definition.with_defaults())

    @property
    def language(self) -> language_config.LanguageConfig:
        """Text and language model; the defaults if the task has none of them."""
        found, default = self.definition, language_config.LanguageConfig()
        return found if isinstance(found, language_config.LanguageConfig) else default

    @property
    def build(self) -> str | None:
        """File and function of a definition; None for a task of this package."""
        return self.definition.build if isinstance(self.definition, OwnDefinition) else None

    @property
    def max_epsilon(self) -> float | None:
        """Largest ε, at which the task stops; None for no limit."""
        return getattr(self.privacy, "max_epsilon", None)

    @property
    def secagg_bits(self) -> int | None:
        """Bits a parameter of secure aggregation; None without it."""
        return getattr(self.privacy, "secagg_bits", None)

    @property
    def secure_groups(self) -> secure_groups_lib.SecureGroups | None:
        """Groups of devices that sum their reports securely; None if the server sees reports."""
        if not isinstance(self.sums, SecureSums):
            return None
        return self.sums.groups(self.round_settings, self.secagg_bits)

    @property
    def noise_parties(self) -> tuple[str, ...]:
        """Raw public keys, hexadecimal, of the noise parties; empty without them."""
        return self.sums.noise_parties if isinstance(self.sums, SecureSums) else ()

    @property
    def rules(self) -> noise_options.RoundRules:
        """Options that a round needs besides its plan."""
        return noise_options.RoundRules(self.learning, self.privacy, self.noise == "secure")

    def request(self) -> dp_ftrl_privacy.DpFtrlPrivacy:
        """Returns what the task asks of privacy; the plan for a population is made of it."""
        return self.privacy.request(self.learning)

    @property
    def round_settings(self) -> population_lib.RoundSettings:
        """Sizes and time-outs of the rounds."""
        secure = self.sums
        return population_lib.RoundSettings(
            goal_count=self.learning.clients_per_round,
            over_selection=self.serving.over_selection,
            least_fraction=self.serving.least_fraction,
            selection_timeout=self.serving.selection_timeout,
            reporting_timeout=self.serving.reporting_timeout,
            devices_per_aggregator=self.serving.devices_per_aggregator,
            exchange_timeout=self.serving.exchange_timeout,
            secure_threshold=secure.secure_threshold if isinstance(secure, SecureSums) else None,
            secure_step_timeout=secure.secure_step_timeout,
        )

    def resolved(self, name: str) -> TaskConfig:
        """Fills in all options that follow from others, so that no later default changes the task.

        `name` is that of the task if the options give none.
        """
        changes: dict[str, Any] = {"task": self.serving.task or name}
        if self.privacy.min_sep is None:
            devices = self.serving.num_devices or 0
            fits = math.floor(_SHARE_THAT_MAY_REST * devices / self.round_settings.wanted)
            changes["min_sep"] = min(max(1, fits), self.learning.num_rounds)
        if (groups := self.secure_groups) is not None:
            changes["least_group"] = groups.least_group
        if self.noise_parties:
            changes["noise_party"] = ",".join(self.noise_parties)
        return self.with_absolute_paths().with_defaults().changed(**changes)


def _of_task(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a task has; those that only `train` has must have their defaults."""
    if options.get("algorithm", "dp-ftrl") != "dp-ftrl" or options.get("sampling") is not None:
        which = "algorithm" if options.get("sampling") is None else "sampling"
        raise validation.UsageError(
            f"{which} {options[which]!r} rests on cohorts that are sampled in secret, "
            "and devices come when they can: take algorithm 'dp-ftrl' without sampling; with "
            "mechanism 'identity' its noise is independent, too."
        )
    of_train = composed.options_of(config_lib.TrainingConfig)
    others = of_train.keys() - composed.options_of(TaskConfig)
    for name in others & options.keys():
        if options[name] != of_train[name].field.default:
            raise validation.UsageError(
                f"{name} has no meaning for a task; it is an option of train: leave it out."
            )
    return {name: value for name, value in options.items() if name not in others}


def _party_key(text: str) -> str:
    """Returns a public key, hexadecimal, that a file or the text itself holds."""
    text = text.strip()
    if len(text) == 64 and set(text.lower()) <= set("0123456789abcdef"):
        return text.lower()
    from tff_dpftrl.runtime import signing_keys

    try:
        return signing_keys.raw(signing_keys.load_public(text)).hex()
    except (OSError, validation.UsageError) as error:
        raise validation.UsageError(f"noise_party={text!r} names no key: {error}") from None


def grid(config: TaskConfig, name: str, values: Sequence[Any]) -> list[tuple[str, TaskConfig]]:
    """Makes the options of a group of tasks that differ in one option.

    Returns a suffix for each task's name, like "-client_learning_rate=0.3", and its options.
    """
    known = composed.options_of(TaskConfig)
    if name not in known:
        raise validation.UsageError(
            f"grid names the unknown option {name!r}; known are: {sorted(known)}."
        )
    if len(set(map(str, values))) != len(values):
        raise validation.UsageError(f"grid gives {name} a value twice: {values}.")
    made = []
    for value in values:
        suffix = f"-{name}={value}"
        task = config.serving.task
        changes = {name: value, "task": task + suffix if task else ""}
        made.append((suffix, config.changed(**changes)))
    return made
