"""The axes of a sweep: options of a run and the values that each of them takes."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping

from tff_dpftrl import validation
from tff_dpftrl.sweeps import kinds
from tff_dpftrl.training import composed

Value = str | int | float | bool | None
"""Value of one option in one cell; None if it is not given."""

Axes = Mapping[str, tuple[Value, ...]]
"""Options of a run and their values, in the order in which they vary."""

SEED = "seed"
"""Name of the option over which results are averaged."""

_NONE = "none"
_BOOLS = {"true": True, "yes": True, "false": False, "no": False}
_RANGE = re.compile(r"(-?\d+):(-?\d+)")
_NAMED = re.compile(r"([A-Za-z][\w-]*)=(.*)", re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")


def parse(
    texts: Iterable[str],
    synonyms: Mapping[str, str] | None = None,
    kind: kinds.RunKind = kinds.TRAINING,
) -> Axes:
    """Parses the values of `--over`.

    Examples are "seed=0:3" and "mechanism=blt,tree,noise_multiplier=0.5,1". Commas separate values,
    and NAME= after a comma begins the next axis. Where semicolons are, they separate the values of
    one axis, which may have commas in them: "clip_norm_schedule=none;40:0.3,60:0.1".
    """
    axes: dict[str, list[Value]] = {}
    for text in texts:
        name, separator = None, ";" if ";" in text else ","
        for part in text.split(separator):
            match = _NAMED.fullmatch(part.strip())
            if match and (name is None or separator == ","):
                name, part = _field(match[1], synonyms or {}, kind), match[2]
                if name in axes:
                    raise validation.UsageError(
                        f"--over names {name} twice: give all its values in one list, as in "
                        f"--over {name}=…,…."
                    )
                axes[name] = []
            if name is None:
                raise validation.UsageError(
                    f"--over must look like NAME=VALUE,VALUE or, for integers, NAME=0:3, got "
                    f"{text!r}."
                )
            for value in _values(name, part.strip(), kind):
                if any(_same(value, other) for other in axes[name]):
                    raise validation.UsageError(
                        f"--over gives {name} the value {shown(value)} twice: leave one of them "
                        "out."
                    )
                axes[name].append(value)
    return {name: tuple(values) for name, values in axes.items()}


def _field(name: str, synonyms: Mapping[str, str], kind: kinds.RunKind) -> str:
    known = composed.options_of(kind.config_class)
    wanted = name.replace("-", "_")
    wanted = synonyms.get(wanted, wanted)
    if wanted in known:
        return wanted
    kind.refuse_others([wanted], "--over")
    near = difflib.get_close_matches(wanted, known, n=1)
    meant = f": did you mean {near[0]}?" if near else f"; those are: {', '.join(sorted(known))}."
    raise validation.UsageError(f"--over {name}=… is no option of {kind.command}{meant}")


def _values(name: str, text: str, kind: kinds.RunKind) -> list[Value]:
    field, hint = composed.options_of(kind.config_class)[name]
    types_of_value = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        types_of_value = [each for each in typing.get_args(hint) if each is not type(None)]
    (type_of_value,) = types_of_value
    if text.lower() == _NONE and field.default is None:
        return [None]
    if type_of_value is int and (match := _RANGE.fullmatch(text)):
        values = list(range(int(match[1]), int(match[2])))
        if not values:
            raise validation.UsageError(
                f"--over {name}={text} is empty: the end of a range is left out, as in 0:3 for "
                "0, 1 and 2."
            )
        return values
    return [_value(name, text, type_of_value, kind)]


def _value(name: str, text: str, type_of_value: typing.Any, kind: kinds.RunKind) -> Value:
    wanted = "a value"
    try:
        if type_of_value is bool:
            wanted = "true or false"
            return _BOOLS[text.lower()]
        if type_of_value is int:
            wanted = "an integer, or a range like 0:3"
            return int(text)
        if type_of_value is float:
            wanted = "a number"
            return float(text)
        if not text:
            raise ValueError
    except (KeyError, ValueError):
        remedy = " (ranges are for integers: list the values)" if _RANGE.fullmatch(text) else ""
        raise validation.UsageError(
            f"--over {name} needs {wanted}, got {text!r}{remedy}."
        ) from None
    choices = typing.get_args(type_of_value)
    if typing.get_origin(type_of_value) is typing.Literal and text not in choices:
        takes_files = name == "mechanism" and kind is kinds.TRAINING
        remedy = " For a custom mechanism: --over strategy=FILE." if takes_files else ""
        raise validation.UsageError(
            f"--over {name} must be among {', '.join(choices)}; got {text!r}.{remedy}"
        )
    return composed.absolute_path(name, text)


def _same(one: Value, other: Value) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def shown(value: Value) -> str:
    """Returns a value as it is typed: "0.5", "1", "true", "none"."""
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def in_name(value: Value) -> str:
    """Returns a value as a part of a folder's name; for a path its end and a digest of all."""
    text = shown(value)
    safe = _UNSAFE.sub("_", text.rstrip("/").rpartition("/")[2])[-40:]
    if safe == text:
        return text
    digest = hashlib.blake2b(json.dumps(text).encode("utf-8"), digest_size=4).hexdigest()
    return f"{safe}-{digest}"


def short(name: str, value: Value) -> str:
    """Returns a value for people: for a file only the last part of its path."""
    text = shown(value)
    files = composed.FILES
    is_path = value is not None and name in files and text not in files[name]
    return text.rpartition("/")[2] if is_path else text


def label(values: Mapping[str, Value]) -> str:
    """Returns the values of options for people: "mechanism=blt, noise_multiplier=0.5"."""
    return ", ".join(f"{name}={short(name, value)}" for name, value in values.items())
