"""The privacy terms of a task: signed with the key of its plans, and bound to them.

The terms name the hash of the server's plan, which names the hashes of the devices' plans, and the
hashes of the task's other files. So no statement can be made with other
terms than those of the noise that was drawn. Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import composition
from tff_dpftrl.mechanisms import serialization
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import signing
from tff_dpftrl.runtime.tasks import secure_groups

Kind = Literal["training", "evaluation"]

COUNTS = "counts"
"""Name of the parameter that lists the histograms of a task that counts."""
METRICS = "metrics"
"""Name of the parameter that lists the metrics of a model of the engineer's own."""
ORDER_STATISTICS = "order_statistics"
"""Name of the parameter that lists the metrics of which rounds record order statistics."""

_FORMAT = 1
_PLAIN = {"str": str, "bool": bool, "str | None": str | None}
_DOMAIN = b"tff_dpftrl.runtime.tasks.Terms 1:"


class TermsRefusedError(validation.UsageError):
    """Raised for terms that are not those of a task; the message says why."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """The privacy terms of one task."""

    server_plan: str  # SHA-256 of the server's plan, hexadecimal.
    files: Mapping[str, str]  # SHA-256, hexadecimal, of the task's other files, by their names.
    kind: Kind  # "training", or "evaluation", which only releases metrics, without noise.
    population: str  # Name of the population of devices.
    task: str
    num_devices: int  # Smallest number of devices in the population.
    schema: schema_lib.MinSep  # How often, and how closely, one device takes part.
    delta: float  # δ of the statement.
    strategy: strategy_lib.Strategy | None  # Restarts included; None without clipping and noise.
    noise_multiplier: float  # z, standard deviation of the noise per unit of clip norm.
    clip_norm: float  # L2 norm that an update is clipped to, the first one if adaptive.
    adaptive_clipping: bool  # Whether the clip norm is learned under the same z.
    max_epsilon: float | None  # Budget: no round begins beyond it. None: ε of the declared rounds.
    data: str  # Name of the devices' data in statements.
    vocabulary_source: str | None  # Source of the vocabulary; None if the model reads no words.
    vocabulary_is_public: bool  # Whether the maker of the task declared this source public.
    initial_weights_source: str | None  # None if they are drawn at random.
    initial_weights_are_public: bool  # Whether they are recorded to be from public text alone.
    parameters: Mapping[str, str | int | float | bool | None]  # Further entries of the statement.
    model_of: str | None = None  # Name of the task whose model is evaluated; None for training.
    # Groups in which reports are summed; None if the server sees reports.
    secure_aggregation: secure_groups.SecureGroups | None = None
    earlier_runs: tuple[composition.Spent, ...] = ()  # Runs behind the initial weights, last first.
    vocabulary_is_noised: bool = False  # Whether a private source was counted with noise.

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in _PLAIN and not isinstance(value, _PLAIN[field.type]):
                raise validation.UsageError(f"{field.name} must be {field.type}, got {value!r}.")
        for name, kinds in (("files", str), ("parameters", str | int | float | None)):
            values = getattr(self, name)
            if not isinstance(values, Mapping) or not all(
                isinstance(key, str) and isinstance(value, kinds) for key, value in values.items()
            ):
                raise validation.UsageError(
                    f"{name} must map names to plain values, got {values!r}."
                )
        for name in ("population", "task"):
            population.check_name(name, getattr(self, name))
        validation.integer("num_devices", self.num_devices, minimum=1)
        validation.number("clip_norm", self.clip_norm, at_least=0)
        if self.max_epsilon is not None:
            validation.positive("max_epsilon", self.max_epsilon)
        validation.delta(self.delta)
        validation.noise_multiplier(self.noise_multiplier)
        if self.kind not in ("training", "evaluation"):
            raise validation.UsageError(
                f"kind must be 'training' or 'evaluation', got {self.kind!r}."
            )
        if (self.kind == "evaluation") != (self.model_of is not None):
            raise validation.UsageError(
                f"model_of={self.model_of!r} does not go with kind={self.kind!r}."
            )

    def to_bytes(self) -> bytes:
        """Serialises the terms as JSON; equal terms give equal bytes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {
            "format": _FORMAT,
            "schema": dataclasses.asdict(self.schema),
            "strategy": None if self.strategy is None else self.strategy.to_dict(),
        }
        if self.secure_aggregation is None:  # Terms of earlier versions lack the key.
            del values["secure_aggregation"]
        else:
            values["secure_aggregation"] = self.secure_aggregation.to_dict()
        if not self.vocabulary_is_noised:
            del values["vocabulary_is_noised"]
        if not self.earlier_runs:
            del values["earlier_runs"]
        else:
            values["earlier_runs"] = [run.to_json() for run in self.earlier_runs]
        return (json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    def digest(self) -> str:
        """Returns the SHA-256 of the terms, hexadecimal, to which a store is bound."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def signed(self, key: ed25519.Ed25519PrivateKey) -> tuple[bytes, bytes]:
        """Returns the bytes of `to_bytes()`, and their signature: the key's name and 64 bytes."""
        content = self.to_bytes()
        return content, signing.key_name(key.public_key()) + key.sign(_signed(content))


def verified(content: bytes, signature: bytes, keys: Iterable[ed25519.Ed25519PublicKey]) -> Terms:
    """Reads terms from an untrusted source after their signature was verified."""
    trusted = {signing.key_name(key): key for key in keys}
    name, signature = signature[:8], signature[8:]
    if name not in trusted:
        raise TermsRefusedError(
            f"The privacy terms are signed with the key {name.hex()}, which is not trusted; "
            f"trusted are {sorted(known.hex() for known in trusted)}."
        )
    try:
        trusted[name].verify(signature, _signed(content))
    except exceptions.InvalidSignature:
        raise TermsRefusedError(
            "The privacy terms were changed: their signature is not valid."
        ) from None
    try:
        return _from_dict(json_text.parse(content))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise TermsRefusedError(f"The privacy terms cannot be read: {error!r}.") from None


def _from_dict(values: dict[str, Any]) -> Terms:
    if values.pop("format") != _FORMAT:
        raise validation.UsageError("they are of another version of this package")
    strategy, secure = values.pop("strategy"), values.pop("secure_aggregation", None)
    runs = values.pop("earlier_runs", ())
    return Terms(
        **values
        | {
            "schema": schema_lib.MinSep(**values["schema"]),
            "strategy": None if strategy is None else serialization.strategy_from_dict(strategy),
            "secure_aggregation": None if secure is None else secure_groups.SecureGroups(**secure),
            "earlier_runs": tuple(composition.Spent(**run) for run in runs),
        }
    )


def _signed(content: bytes) -> bytes:
    """Returns the bytes to sign; no signature of terms is valid for a plan, or vice versa."""
    return _DOMAIN + hashlib.sha256(content).digest()
