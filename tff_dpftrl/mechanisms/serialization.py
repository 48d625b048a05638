"""Writes and reads strategies as JSON files, with a format name and a version.

A file holds the parameters of a strategy and, where it was optimised for one
schema, the certificate of what it achieves there:

    {"format": "tff_dpftrl.strategy", "version": 1,
     "strategy": {"mechanism": "blt", "buf_decay": [...], "output_scale": [...]},
     "certificate": {"num_rounds": 2000, ...}}

Floats are written with all their digits: what is read equals what was written.

**Classes of your own.** A file names a mechanism, and never a module: a file that could name
code would run it in whoever opens it. Which classes there are is decided by what is installed,
as entry points of the group `tff_dpftrl.strategies`, so that every process of an environment
knows the same: commands, the children of a sweep, resumed runs. In `pyproject.toml`:

    [project.entry-points."tff_dpftrl.strategies"]
    my-mechanism = "my_package.my_module:MyStrategy"

`MyStrategy.mechanism` is "my-mechanism"; `from_dict` reads what its `to_dict` returns.
`docs/how_to/custom_mechanisms.md` has an example. Nothing here vouches for its sensitivity: test
it with `tff_dpftrl.check_strategy`.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    restarts,
    tree,
)
from tff_dpftrl.mechanisms import certificate as certificate_lib
from tff_dpftrl.mechanisms import strategy as strategy_lib

FORMAT = "tff_dpftrl.strategy"
VERSION = 1
ENTRY_POINTS = "tff_dpftrl.strategies"

_CLASSES = {
    known.mechanism: known
    for known in (
        identity.Identity,
        blt.Blt,
        tree.Tree,
        tree.FullTree,
        banded.Banded,
        banded_toeplitz.BandedToeplitz,
        inverse_banded.InverseBanded,
        dense.Dense,
    )
}


def is_built_in(strategy: strategy_lib.Strategy) -> bool:
    """Returns whether a strategy, under its restarts, is of a class of this package itself."""
    base = strategy.base if type(strategy) is restarts.Restarted else strategy
    return type(base) in _CLASSES.values()


def strategy_to_json(
    strategy: strategy_lib.Strategy, certificate: certificate_lib.Certificate | None = None
) -> str:
    """Writes a strategy, and a certificate if given, as JSON text that ends in a newline.

    The strategy's class is of this package, or of one that is installed as an entry point:
    `strategy_from_json` could not make another again.
    """
    strategy_lib.check_strategy(strategy)
    base = strategy.base if isinstance(strategy, restarts.Restarted) else strategy
    known = _class_of(base.mechanism)
    if type(base) is not known:
        raise validation.UsageError(
            f"strategy is a {type(base).__name__}, which nobody could read again: it is neither of "
            f"this package ({', '.join(sorted(_CLASSES))}) nor installed as the entry point "
            f"{base.mechanism!r} of the group {ENTRY_POINTS}. Install it so, or keep the code that "
            "makes it."
        )
    if base.mechanism not in _CLASSES:
        written = base.to_dict()
        if written.get("mechanism") != base.mechanism or _made(known, written) != written:
            raise validation.UsageError(
                f"strategy is a {type(base).__name__}, whose from_dict does not make again what "
                'to_dict returned, with the key "mechanism".'
            )
    document = {"format": FORMAT, "version": VERSION, "strategy": strategy.to_dict()}
    if certificate is not None:
        document["certificate"] = certificate.to_dict()
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def strategy_from_json(text: str) -> strategy_lib.Strategy:
    """Reads what `strategy_to_json` wrote; refuses later versions and unknown mechanisms."""
    return strategy_from_dict(_document(text)["strategy"])


def certificate_from_json(text: str) -> certificate_lib.Certificate | None:
    """Reads the certificate in a strategy's text; None if there is none."""
    values = _document(text).get("certificate")
    return None if values is None else certificate_lib.Certificate.from_dict(values)


def strategy_from_dict(values: Mapping[str, Any]) -> strategy_lib.Strategy:
    """Builds a strategy from what its `to_dict` returned."""
    mechanism = values.get("mechanism") if isinstance(values, dict) else None
    try:
        if mechanism == restarts.Restarted.mechanism:
            return restarts.Restarted.from_dict(values, strategy_from_dict)
        known = _class_of(mechanism)
        if known is not None:
            return _read_by(known, values)
    except KeyError as error:
        raise validation.UsageError(
            f"The mechanism {mechanism!r} needs the parameter {error}."
        ) from None
    except (TypeError, OverflowError) as error:
        raise validation.UsageError(
            f"A parameter of the mechanism {mechanism!r} is wrong: {error}."
        ) from None
    names = sorted([*_CLASSES, restarts.Restarted.mechanism])
    raise validation.UsageError(
        f"Unknown mechanism {mechanism!r}; this version of the package knows {', '.join(names)}. "
        f"Others must be installed as entry points of the group {ENTRY_POINTS}."
    )


def _class_of(mechanism: Any) -> Any:
    """Finds the class of a mechanism, of this package or installed; None if there is none."""
    if mechanism in _CLASSES or not isinstance(mechanism, str):
        return _CLASSES.get(mechanism)
    from importlib import metadata  # Only classes of other packages need it.

    points = metadata.entry_points(group=ENTRY_POINTS, name=mechanism)
    if len(points) > 1 and len({point.value for point in points}) > 1:
        raise validation.UsageError(
            f"Several installed packages have an entry point {mechanism!r} of the group "
            f"{ENTRY_POINTS}: {', '.join(point.value for point in points)}."
        )
    for point in points:
        try:
            loaded = point.load()
        except Exception as error:  # Whatever a module of others raises where it is imported.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise validation.UsageError(
                f"The entry point {mechanism!r} = {point.value!r} cannot be loaded: {reason}."
            ) from error
        is_class = isinstance(loaded, type) and issubclass(loaded, strategy_lib.Strategy)
        if not is_class or loaded.mechanism != mechanism or not hasattr(loaded, "from_dict"):
            raise validation.UsageError(
                f"The entry point {mechanism!r} = {point.value!r} must be a subclass of Strategy "
                f"with mechanism = {mechanism!r} and a classmethod from_dict."
            )
        return loaded
    return None


def _read_by(known: Any, values: Mapping[str, Any]) -> strategy_lib.Strategy:
    """Makes a strategy by the `from_dict` of a class, and checks that it is one."""
    strategy = known.from_dict(values)
    if not isinstance(strategy, strategy_lib.Strategy):
        raise validation.UsageError(
            f"from_dict of {known.__name__}, the class of the mechanism {known.mechanism!r}, must "
            f"return a Strategy, got a {type(strategy).__name__}."
        )
    return strategy


def _made(known: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a strategy of what is read from a file, and returns its parameters."""
    return _read_by(known, json.loads(json.dumps(written, allow_nan=False))).to_dict()


def save(
    path: str | os.PathLike,
    strategy: strategy_lib.Strategy,
    certificate: certificate_lib.Certificate | None = None,
) -> None:
    """Writes a strategy to a file, completely or not at all.

    Args:
      path: Path of the file; an existing file is replaced in one step.
      strategy: Strategy of a class of this package, or of one that is installed as an entry
        point.
      certificate: Certificate of the strategy, kept in the same file; left out if None.

    Raises:
      ValueError: If the file can't be written.
    """
    text = strategy_to_json(strategy, certificate)
    try:
        durable_files.write(path, text.encode())
    except OSError as error:
        raise validation.UsageError(
            f"Cannot write the strategy to {path}: {error.strerror}."
        ) from error


def load(path: str | os.PathLike) -> strategy_lib.Strategy:
    """Reads a strategy from a file.

    Raises:
      ValueError: If the file can't be read, or `strategy_from_json` refuses its text.
    """
    text = _read(path)
    try:
        return strategy_from_json(text)
    except ValueError as error:
        raise validation.UsageError(f"{os.fspath(path)}: {error}") from error


def load_certificate(path: str | os.PathLike) -> certificate_lib.Certificate | None:
    """Reads the certificate in a strategy's file; None if there is none."""
    return certificate_from_json(_read(path))


def _read(path: str | os.PathLike) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise validation.UsageError(
            f"Cannot read a strategy from {os.fspath(path)}: {error}."
        ) from error


def _document(text: str) -> dict:
    try:
        document = json_text.parse(text)
    except ValueError as error:
        raise validation.UsageError(f"A strategy must be JSON text: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise validation.UsageError(f'This JSON is not a strategy: it has no "format": "{FORMAT}".')
    version = document.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise validation.UsageError(
            f"This strategy has format version {version!r}, and this package reads versions up to "
            f"{VERSION}; install a newer tff_dpftrl or write the file anew."
        )
    if "strategy" not in document:
        raise validation.UsageError(
            'This file has no "strategy"; write it anew with tff-dpftrl optimize.'
        )
    return document
