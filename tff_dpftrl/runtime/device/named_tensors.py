"""Examples of named tensors: numbers, texts and small images, as devices store them.

An example maps names to arrays. What arrays a task takes is in `examples.json` of its folder.
Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from tff_dpftrl import array_files, json_text, validation
from tff_dpftrl.data import user_ids
from tff_dpftrl.runtime.device import text_examples

Kind = Literal["int", "float", "text"]

_DTYPES = {"int": "iub", "float": "fiub"}


@dataclasses.dataclass(frozen=True)
class Feature:
    """Values that an example holds under a name."""

    kind: Kind  # Kind of the entries: int (64 bits), float (32 bits) or text (in NFC, or bytes).
    shape: tuple[int, ...] | None  # Shape; None for any number of entries in a row.
    is_optional: bool = False  # Whether an example may leave it out.

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise validation.UsageError(
                f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}."
            )
        for size in self.shape or ():
            validation.integer("shape", size, minimum=1)


def encode(example: Mapping[str, Any], features: Mapping[str, Feature]) -> bytes:
    """Serializes an example, arrays by name, as the `tf.train.Example` that plans parse.

    It raises UsageError for a missing or unknown name, and for a value of another kind or shape.
    """
    unknown = sorted(set(example) - set(features))
    if unknown:
        raise validation.UsageError(
            f"it has {unknown[0]!r}, and the task's features are {sorted(features)}."
        )
    flat = {}
    for name, feature in features.items():
        if name in example:
            flat[name] = _flat(name, example[name], feature)
        elif not feature.is_optional:
            raise validation.UsageError(f"it has no {name!r}: the task needs it.")
    return text_examples.encode(flat)


def encode_all(
    examples: Iterable[Mapping[str, Any]], features: Mapping[str, Feature]
) -> list[bytes]:
    """Serializes examples, the oldest first, and says which one has other features."""
    encoded = []
    if isinstance(examples, Mapping | str | bytes) or not isinstance(examples, Iterable):
        raise validation.UsageError(
            f"examples must be a list of objects, got a {type(examples).__name__}."
        )
    for index, example in enumerate(examples):
        try:
            if not isinstance(example, Mapping):
                raise validation.UsageError(
                    f"it is a {type(example).__name__}, and must map names to values."
                )
            encoded.append(encode(example, features))
        except validation.UsageError as error:
            raise validation.UsageError(f"example {index + 1}: {error}") from None
    return encoded


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads examples from JSON lines, or an .npz archive of arrays whose first axis counts them."""
    path = pathlib.Path(path)
    if path.suffix != ".npz":
        return _json_lines(path)
    try:
        arrays = array_files.read(path)
    except (OSError, ValueError) as error:
        raise validation.UsageError(f"{path} cannot be read: {error}") from None
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise validation.UsageError(
            f"{path}: the first axis of each array counts examples, and they have {counts}."
        )
    return [
        {name: array[index] for name, array in arrays.items()}
        for index in range(max(counts.values(), default=0))
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class UserExamples:
    """Serialized examples by user, the oldest first, for devices that are simulated."""

    by_user: Mapping[str, Sequence[bytes]]

    @property
    def user_ids(self) -> tuple[str, ...]:
        """Ids of the users, in order."""
        return tuple(self.by_user)

    def __len__(self) -> int:
        return len(self.by_user)

    def examples(self, user_id: str) -> Sequence[bytes]:
        """Returns the serialized examples of a user, the oldest first."""
        return self.by_user[user_id]


def read_users(path: str | os.PathLike[str], features: Mapping[str, Feature]) -> UserExamples:
    """Reads and serializes the examples of many users.

    Each JSON line has a "user_id" and "examples": a list of objects of names and values, the oldest
    first.
    """
    by_user: dict[str, Sequence[bytes]] = {}
    for number, line in enumerate(_json_lines(pathlib.Path(path))):
        try:
            user, examples = line["user_id"], line["examples"]
        except (TypeError, KeyError):
            raise validation.UsageError(
                f'{path}: object {number + 1} is no {{"user_id": ..., "examples": [...]}}.'
            ) from None
        try:
            name = user_ids.at(f"{path}: object ", number + 1, user)
        except user_ids.NoId as error:
            raise validation.UsageError(f"{path}: object {number + 1} is {error}.") from None
        if name in by_user:
            raise validation.UsageError(f"{path} has the user {user!r} twice: merge the examples.")
        try:
            by_user[name] = encode_all(examples, features)
        except validation.UsageError as error:
            raise validation.UsageError(f"{path}: user {user!r}: {error}") from None
    if not by_user:
        raise validation.UsageError(f"{path} has no users.")
    user_ids.check(by_user, str(path))
    return UserExamples(by_user)


def describe(features: Mapping[str, Feature]) -> str:
    """Describes what an example holds, as in "'label' (int) and 'window' (float, 32 × 3)"."""
    described = []
    for name, feature in sorted(features.items()):
        shape = "any number" if feature.shape is None else " × ".join(map(str, feature.shape))
        described.append(f"{name!r} ({', '.join(filter(None, [feature.kind, shape]))})")
    return " and ".join(filter(None, [", ".join(described[:-1]), described[-1]]))


def to_json(features: Mapping[str, Feature]) -> bytes:
    """Serializes a description of examples."""
    values = {name: dataclasses.asdict(feature) for name, feature in sorted(features.items())}
    return (json.dumps(values, indent=2) + "\n").encode()


def read_features(path: str | os.PathLike[str]) -> dict[str, Feature]:
    """Reads a description of examples, such as `examples.json` of a task's folder."""
    try:
        values = json_text.parse(pathlib.Path(path).read_text(encoding="utf-8"))
        return {
            name: Feature(
                kind=one["kind"],
                shape=None if one["shape"] is None else tuple(one["shape"]),
                is_optional=one.get("is_optional", False),
            )
            for name, one in values.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise validation.UsageError(
            f"{path} does not describe examples, as the examples.json of a task does: {error!r}."
        ) from None


def _json_lines(path: pathlib.Path) -> list[Any]:
    try:
        # Texts may have other ends of lines.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        return [json_text.parse(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise validation.UsageError(f"{path} cannot be read: {error}") from None


def _flat(name: str, value: Any, feature: Feature) -> list[Any]:
    """Checks one value of an example, and returns its entries in a row."""
    try:
        # NumPy's own texts end before their last null characters.
        array = np.array(value, dtype=object if feature.kind == "text" else None)
    except ValueError:
        raise validation.UsageError(f"{name!r} is a list of lists of different lengths.") from None
    if feature.shape is not None and array.shape != feature.shape:
        raise validation.UsageError(
            f"{name!r} has the shape {list(array.shape)}, and the task takes {list(feature.shape)}."
        )
    entries = array.ravel().tolist()
    if feature.kind == "text":
        if not all(isinstance(entry, str | bytes) for entry in entries):
            raise validation.UsageError(f"{name!r} must hold texts or bytes.")
        return [str(e) if isinstance(e, str) else bytes(e) for e in entries]
    if array.size and array.dtype.kind not in _DTYPES[feature.kind]:
        raise validation.UsageError(
            f"{name!r} is of {array.dtype}, and the task takes {feature.kind}."
        )
    if not all(map(math.isfinite, entries)):
        raise validation.UsageError(f"{name!r} has entries that are not finite.")
    return [(float if feature.kind == "float" else int)(entry) for entry in entries]
