"""Writes and reads strategies as JSON files, with a format name and a version.

A file holds the parameters of a strategy and, where it was optimised for one
schema, the certificate of what it achieves there:

    {"format": "tff_dpftrl.strategy", "version": 1,
     "strategy": {"mechanism": "blt", "buf_decay": [...], "output_scale": [...]},
     "certificate": {"num_rounds": 2000, ...}}

Floats are written with all their digits: what is read equals what was written.
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


def strategy_to_json(
    strategy: strategy_lib.Strategy, certificate: certificate_lib.Certificate | None = None
) -> str:
    """Writes one strategy as JSON text, ending in a newline.

    Args:
      strategy: Strategy of a class of this package.
      certificate: Certificate of the strategy, kept in the same text; left out if None.

    Returns:
      The text that `strategy_from_json` and `certificate_from_json` read.

    Raises:
      ValueError: If a parameter is not finite, or the strategy is of a class of the caller's own,
        which `strategy_from_json` could not make again.
    """
    strategy_lib.check_strategy(strategy)
    base = strategy.base if isinstance(strategy, restarts.Restarted) else strategy
    if type(base) is not _CLASSES.get(base.mechanism):
        raise validation.UsageError(
            f"strategy is a {type(base).__name__}, which nobody could read again: only strategies "
            f"of this package can be written ({', '.join(sorted(_CLASSES))}). Keep the code that "
            "makes it instead."
        )
    document = {"format": FORMAT, "version": VERSION, "strategy": strategy.to_dict()}
    if certificate is not None:
        document["certificate"] = certificate.to_dict()
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def strategy_from_json(text: str) -> strategy_lib.Strategy:
    """Reads what `strategy_to_json` wrote.

    Raises:
      ValueError: If the text is no strategy, of a later version, of an unknown
        mechanism, or if its parameters are invalid.
    """
    return strategy_from_dict(_document(text)["strategy"])


def certificate_from_json(text: str) -> certificate_lib.Certificate | None:
    """Reads the certificate in a strategy's text; None if there is none.

    Raises:
      ValueError: If the text is no strategy, or of a later version.
    """
    values = _document(text).get("certificate")
    return None if values is None else certificate_lib.Certificate.from_dict(values)


def strategy_from_dict(values: Mapping[str, Any]) -> strategy_lib.Strategy:
    """Builds a strategy of this package from what its `to_dict` returned.

    Raises:
      ValueError: If the mechanism is unknown or its parameters are invalid.
    """
    mechanism = values.get("mechanism") if isinstance(values, dict) else None
    try:
        if mechanism == restarts.Restarted.mechanism:
            return restarts.Restarted.from_dict(values, strategy_from_dict)
        if mechanism in _CLASSES:
            return _CLASSES[mechanism].from_dict(values)
    except KeyError as error:
        raise validation.UsageError(
            f"The mechanism {mechanism!r} needs the parameter {error}."
        ) from None
    except (TypeError, OverflowError) as error:
        raise validation.UsageError(
            f"A parameter of the mechanism {mechanism!r} is wrong: {error}."
        ) from None
    known = sorted([*_CLASSES, restarts.Restarted.mechanism])
    raise validation.UsageError(
        f"Unknown mechanism {mechanism!r}; this version of the package knows {', '.join(known)}."
    )


def save(
    path: str | os.PathLike,
    strategy: strategy_lib.Strategy,
    certificate: certificate_lib.Certificate | None = None,
) -> None:
    """Writes a strategy to a file, completely or not at all.

    Args:
      path: Path of the file; an existing file is replaced in one step.
      strategy: Strategy of a class of this package.
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
    """Reads the certificate in a strategy's file; None if there is none.

    Raises:
      ValueError: If the file can't be read, or `certificate_from_json` refuses its text.
    """
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
