"""The frozen options of a task: those of `train`, and those of rounds with devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.plans import expectations
from tff_dpftrl.runtime.tasks import secure_groups as secure_groups_lib
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import language_config, learning_options

_option = language_config.option
_GROUP = "rounds with devices"
_SECURE = "secure aggregation of the devices' reports"
_DEFINITION = "model and data of your own"
_TESTS = "tests of the task"

_SHARE_THAT_MAY_REST = 0.7
"""Share of the devices that may rest by the default `min_sep`; the others can fill a round."""

_ONLY_SECURE = (
    *("secure_threshold", "secure_neighbours", "secure_corrupt_fraction", "least_group"),
    "noise_party",
)

IN_MEMORY = "(given in Python)"
"""Value of the option `build` where a definition was given in Python."""

_OF_DEFINITION = ("client_epochs", "shuffle", "text_feature", "proxy_data", "proxy_devices")

_NOT_COUNTED = ("build", "client_epochs", "shuffle", "batch_size", "max_sequences_per_client")

_OF_ALGORITHM = tuple(
    field.name
    for field in dataclasses.fields(config_lib.TrainingConfig)
    if field.name.startswith("server_")
    or field.name in ("client_learning_rate", "iterate_averaging", "restart_optimizer")
)

ROUNDED_BITS = 16
"""Value of `update_bits` with which devices round their updates (`plans.rounded_updates`)."""

MEANINGLESS = {
    "base_vocabulary": "its words are public",
    "simulate_report_goal": "devices take part themselves",
    "simulate_population": "devices take part themselves",
    "stop_at_accuracy": "the server has no held-out text",
    "held_out_users": "the server has no held-out text",
    **dict.fromkeys(
        ("budget_shares", "metrics_epsilon"),
        "it releases no metrics, which stay exact in the operator's private/",
    ),
    "deterministic_noise_seed": "whoever knows the seed of the noise can subtract it",
}
"""Options of `train` that a task does not have, and why."""


@dataclasses.dataclass(frozen=True)
class TaskConfig(config_lib.TrainingConfig):
    """The options of a task; `clients_per_round` is the goal of a round's reports."""

    noise: learning_options.NoiseGenerator = _option(
        "secure",
        "Generator of the noise, for the server and for noise parties. 'secure': AES-256 in "
        "counter mode. Its Gaussians are rounded without error and added on a grid, safe from "
        "attacks on floating point. 'philox': faster.",
        "privacy",
    )
    population: str = _option("", "Name of the population of devices. Required.", _GROUP)
    task: str = _option("", "Name of the task. Default: the name of its folder.", _GROUP)
    num_devices: int | None = _option(
        None,
        "Least number of devices in the population. Required. How seldom each device takes part, "
        "and what δ means, follow from it.",
        _GROUP,
        1,
    )
    over_selection: float = _option(
        1.3,
        "Number of devices that are chosen for each report of the goal. Above 1, because some "
        "devices will not report.",
        _GROUP,
        1.0,
    )
    least_fraction: float = _option(
        0.8,
        "Share of the goal with which a round still succeeds when its time is over.",
        _GROUP,
        0.0,
    )
    selection_timeout: float = _option(
        600.0, "Seconds after which a round begins with fewer devices.", _GROUP, 0.0
    )
    reporting_timeout: float = _option(
        600.0, "Seconds that the devices of a round have to report.", _GROUP, 0.0
    )
    exchange_timeout: float = _option(
        10.0, "Seconds that the parts of the server wait for each other.", _GROUP, 0.0
    )
    devices_per_aggregator: int = _option(
        500, "Number of devices whose reports one Aggregator sums.", _GROUP, 1
    )
    pipelined: bool = _option(
        False,
        "Choose the devices of the next round while one round reports. This is quicker if there "
        "are many times more devices than a round takes.",
        _GROUP,
    )
    weight: float = _option(
        1.0, "Weight of the task in the share of rounds among the population's tasks.", _GROUP, 0.0
    )
    min_sep_hours: float = _option(
        0.0,
        "Hours that a device rests after it took part, in addition to min_sep rounds.",
        _GROUP,
        0.0,
    )
    update_bits: int = _option(
        ROUNDED_BITS,
        "Number of bits of each weight in a report in the clear. 16: the device rounds such that "
        "no update gets longer, so the guarantee stays. 64: values as computed; counts always have "
        "64. Secure sums have secagg_bits instead.",
        _GROUP,
    )
    order_statistics: bool = _option(
        False,
        "Record median, p10 and p90 of the devices' loss, accuracy, number of sequences and "
        "seconds of work in each round. These figures are exact, and ε does not cover them. "
        "Devices report the bucket of each figure, and only sums of buckets are used.",
        _GROUP,
    )
    collection: str = _option(
        "text", "Name of the collection in the devices' example stores.", _GROUP
    )
    text_feature: str = _option(
        "tokens", "Name of the feature of a stored example that holds its text.", _GROUP
    )
    max_examples: int = _option(
        200, "Largest number of texts of a device: the newest ones.", _GROUP, 1
    )
    max_age_hours: float = _option(
        0.0, "Largest age of a text, in hours; 0 for any age.", _GROUP, 0.0
    )
    shuffle: bool = _option(
        True,
        "Shuffle a device's texts anew in each pass, with a seed that the device draws.",
        _GROUP,
    )
    memory_bytes: int = _option(
        500_000_000, "Largest memory of a device's work, in bytes.", _GROUP, 1
    )
    work_seconds: float = _option(60.0, "Longest time of a device's work, in seconds.", _GROUP, 0.0)

    secure_aggregation: secure_groups_lib.ThreatModel | None = _option(
        None,
        "Threat model of secure sums, by which the server sees sums over groups of devices only, "
        "metrics included. 'active-server', also without a value: the server may do anything, if "
        "fewer than a third of a group is in league with it and somebody else attests its devices. "
        "'honest-but-curious': the server must follow the protocol; one that lies about who "
        "dropped out can learn single reports. Needs secagg_bits. Default: the server sees every "
        "report.",
        _SECURE,
    )
    least_group: int | None = _option(
        None,
        "Least number of devices in the sum of a group; a group with fewer is lost. Groups are of "
        "devices_per_aggregator. Default: the group's share of the fewest reports of a round.",
        _SECURE,
        2,
    )
    secure_threshold: float | None = _option(
        None,
        "Share of a group's devices of which more must stay to the end. Least value and default: "
        "1/2 (honest-but-curious) or 2/3 (active-server).",
        _SECURE,
        0.0,
    )
    secure_neighbours: int | None = _option(
        None,
        "Number of devices with which each one shares its secrets, for large groups. An "
        "honest-but-curious server draws them at random. Default: all devices of the group.",
        _SECURE,
        2,
    )
    secure_corrupt_fraction: float | None = _option(
        None,
        "Share of the devices that may be in league with the server: secure_neighbours must be "
        "enough for it. Default: 0.05.",
        _SECURE,
        0.0,
    )
    secure_step_timeout: float = _option(
        30.0, "Seconds that the devices have for each step of a secure sum.", _SECURE, 0.0
    )
    noise_party: str | None = _option(
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

    analytics: Literal["words"] | None = _option(
        None,
        "Counts over the devices' data instead of a model's training. 'words': the words of the "
        "vocabulary, all other words, and lengths of texts. For counts of your own, give build.",
        _DEFINITION,
    )
    build: str | None = _option(
        None,
        "File and function that define a model and data of your own instead of a language model, "
        "like my_task.py:build. The function returns a TaskDefinition "
        "(docs/how_to/add_a_task.md), which has the options of text, model and a device's passes.",
        _DEFINITION,
    )

    proxy_data: str = _option(
        "standard-library",
        "Public text by user on which the task is tested before it is signed: 'standard-library', "
        "or a file as for --data.",
        _TESTS,
    )
    proxy_devices: int = _option(
        5, "Number of users of proxy_data that stand for devices.", _TESTS, 1
    )
    proxy_rounds: int = _option(
        4, "Number of test rounds. The loss must fall from the first to the last.", _TESTS, 2
    )
    expect: str | None = _option(
        None,
        "Further expectations on the test, separated by commas: 'loss < 6.5, top1_in_vocab > 0.1, "
        "update < 10'. A name is the label of a metric of the last round, or the end of the label; "
        "or 'update', the L2 norm by which any round changes the model. Then come < or > and a "
        "number. The task is refused unless all are met. Default: only the loss must fall.",
        _TESTS,
    )
    test_python: str | None = _option(
        None,
        "Python interpreters of environments with other versions of TensorFlow that devices may "
        "have, separated by commas. The devices' part is tested there, too, and must give the same "
        "updates.",
        _TESTS,
    )

    def __post_init__(self):
        problems = []
        if not self.population:
            problems.append("population must be given: the name of the devices that take part.")
        try:
            super().__post_init__()
        except validation.UsageError as error:
            problems.insert(0, str(error))
        if problems:
            raise validation.UsageError(" ".join(problems))
        for name, why in MEANINGLESS.items():
            if self._is_given(name):
                raise validation.UsageError(
                    f"{name} has no meaning for a task, because {why}: leave it out."
                )
        if self.algorithm != "dp-ftrl" or self.sampling is not None:
            which = "algorithm" if self.sampling is None else "sampling"
            raise validation.UsageError(
                f"{which} {getattr(self, which)!r} rests on cohorts that are sampled in secret, "
                "and devices come when they can: take algorithm 'dp-ftrl' without sampling; with "
                "mechanism 'identity' its noise is independent, too."
            )
        if self.vocabulary in ("private", vocabulary.DP):
            raise validation.UsageError(
                f"vocabulary {self.vocabulary!r} is counted on the texts in one place, and the "
                "server never sees those of devices: take 'docs', 'english' or a file of public "
                "text, or count words with noise by a task with analytics 'words', and name the "
                "counts.csv of its report."
            )
        if self.model == "own":
            raise validation.UsageError(
                "model 'own' cannot be named in a task's config: give build, the function that "
                "returns a TaskDefinition, instead."
            )
        if self.build is not None:
            self._check_own()
        if self.analytics is not None:
            self._check_analytics()
        for name in ("population", "task", "collection", "text_feature"):
            if getattr(self, name) or name != "task":
                population_lib.check_name(name, getattr(self, name))
        if self.update_bits not in (ROUNDED_BITS, 64):
            raise validation.UsageError(
                f"update_bits must be {ROUNDED_BITS} or 64, got {self.update_bits}."
            )
        for name in ("weight", "work_seconds"):
            validation.positive(name, getattr(self, name))
        if self.expect is not None:
            expectations.from_text(self.expect)
        self._check_rounds()
        self._check_secure_aggregation()

    def _check_own(self) -> None:
        """Refuses options that a definition has itself."""
        for field in dataclasses.fields(self):
            is_of_language = field.metadata["group"] in ("data", "model")
            if (is_of_language or field.name in _OF_DEFINITION) and self._is_given(field.name):
                raise validation.UsageError(
                    f"{field.name} has no meaning with build, whose TaskDefinition says what "
                    "devices store and how they train on it: leave it out."
                )

    def _check_analytics(self) -> None:
        """Refuses options of a model."""
        for field in dataclasses.fields(self):
            is_of_model = field.metadata["group"] == "model" and field.name != "pretokenized"
            if (is_of_model or field.name in _NOT_COUNTED) and self._is_given(field.name):
                raise validation.UsageError(
                    f"{field.name} has no meaning with analytics, which counts and trains no "
                    "model: leave one of them out."
                )

    def check_own_algorithm(self) -> None:
        """Refuses options of learning that an algorithm of a definition's own has itself."""
        for name in filter(self._is_given, _OF_ALGORITHM):
            raise validation.UsageError(
                f"{name} has no meaning with the algorithm of a TaskDefinition, which has its own "
                "optimizers: leave it out."
            )

    @override
    def with_defaults(self) -> TaskConfig:
        """Returns options that name what follows from others; a definition needs no vocabulary."""
        return super().with_defaults() if self.build is None else self

    @override
    def _all_model_sizes(self) -> dict[str, Any]:
        return super()._all_model_sizes() if self.analytics is None else {}

    def _check_rounds(self) -> None:
        if self.num_devices is None:
            raise validation.UsageError(
                "num_devices must be given: how many devices there are, at least."
            )
        wanted = self.rounds.wanted
        if self.rounds.least < 2:
            raise validation.UsageError(
                f"clients_per_round={self.clients_per_round} with least_fraction="
                f"{self.least_fraction:g} lets a round end with {self.rounds.least} reports, and "
                "its metrics would be the exact figures of one device: raise one of these."
            )
        if self.num_devices < wanted:
            raise validation.UsageError(
                f"num_devices={self.num_devices} is below the {wanted} devices that a round "
                f"chooses (clients_per_round={self.clients_per_round} times "
                f"over_selection={self.over_selection:g}): lower one of these."
            )
        if self.min_sep is not None and self.min_sep * wanted > self.num_devices:
            raise validation.UsageError(
                f"min_sep={self.min_sep} with {wanted} devices a round needs "
                f"{self.min_sep * wanted} of them, and num_devices={self.num_devices}: rounds "
                "would be skipped while devices rest. Lower min_sep, clients_per_round or "
                "over_selection."
            )
        if self.max_participations is not None:
            turns = self.max_participations * self.num_devices
            if turns < self.num_rounds * wanted:
                raise validation.UsageError(
                    f"max_participations={self.max_participations} of {self.num_devices} devices "
                    f"are {turns} turns, and num_rounds={self.num_rounds} with {wanted} devices "
                    f"need {self.num_rounds * wanted}: raise it, or lower one of these."
                )

    def _check_secure_aggregation(self) -> None:
        if self.secure_groups is not None:  # Made, and so checked.
            if self.noise_party is not None and self.mechanism == "none":
                raise validation.UsageError(
                    "noise_party adds the noise of a mechanism, and mechanism 'none' has none: "
                    "give a mechanism, or leave noise_party out."
                )
            return
        for name in _ONLY_SECURE:
            if getattr(self, name) is not None:
                raise validation.UsageError(
                    f"{name}={getattr(self, name)!r} has no meaning without secure_aggregation: "
                    "give it ('honest-but-curious' or 'active-server'), or leave this out."
                )

    @property
    def secure_groups(self) -> secure_groups_lib.SecureGroups | None:
        """Groups of devices that sum their reports securely; None if the server sees reports."""
        if self.secure_aggregation is None:
            return None
        return secure_groups_lib.of_rounds(
            self.rounds,
            self.secure_aggregation,
            secagg_bits=self.secagg_bits,
            least_group=self.least_group,
            neighbours=self.secure_neighbours,
            corrupt_fraction=self.secure_corrupt_fraction,
            noise_parties=self.noise_parties,
        )

    @property
    def noise_parties(self) -> tuple[str, ...]:
        """Raw public keys, hexadecimal, of the noise parties; empty without them."""
        if self.noise_party is None:
            return ()
        return tuple(map(_party_key, self.noise_party.split(",")))

    @property
    def rounds(self) -> population_lib.RoundSettings:
        """Sizes and time-outs of the rounds."""
        return population_lib.RoundSettings(
            goal_count=self.clients_per_round,
            over_selection=self.over_selection,
            least_fraction=self.least_fraction,
            selection_timeout=self.selection_timeout,
            reporting_timeout=self.reporting_timeout,
            devices_per_aggregator=self.devices_per_aggregator,
            exchange_timeout=self.exchange_timeout,
            secure_threshold=self.secure_threshold,
            secure_step_timeout=self.secure_step_timeout,
        )

    def resolved(self, name: str) -> TaskConfig:
        """Fills in all options that follow from others, so that no later default changes the task.

        `name` is that of the task if the options give none.
        """
        config = self.with_absolute_paths().with_defaults()
        changes: dict[str, Any] = {"task": self.task or name}
        if self.min_sep is None:
            fits = math.floor(_SHARE_THAT_MAY_REST * self.num_devices / self.rounds.wanted)
            changes["min_sep"] = min(max(1, fits), self.num_rounds)
        if self.secure_groups is not None:
            changes["least_group"] = self.secure_groups.least_group
        if self.noise_party is not None:
            changes["noise_party"] = ",".join(self.noise_parties)
        return dataclasses.replace(config, **changes)


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
    known = {field.name for field in dataclasses.fields(config)}
    if name not in known:
        raise validation.UsageError(
            f"grid names the unknown option {name!r}; known are: {sorted(known)}."
        )
    if len(set(map(str, values))) != len(values):
        raise validation.UsageError(f"grid gives {name} a value twice: {values}.")
    made = []
    for value in values:
        suffix = f"-{name}={value}"
        changes = {name: value, "task": config.task + suffix if config.task else ""}
        made.append((suffix, dataclasses.replace(config, **changes)))
    return made
