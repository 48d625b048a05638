"""The cells of a sweep: one run for each combination of the axes' values."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Hashable, Mapping
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import kinds
from tff_dpftrl.training import options as options_lib

_LONGEST_NAME = 180  # File systems allow 255 bytes.


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep, with the values of the axes by option.

    With the mechanism 'none', the options of the noise are left out. `config` is of the class that
    the kind of runs has; its files have absolute paths.
    """

    values: Mapping[str, axes_lib.Value]
    config: Any

    @property
    def kind(self) -> kinds.RunKind:
        """The kind of the run."""
        return kinds.of(self.config)

    @property
    def process_group(self) -> Hashable | None:
        """The group of cells that one process may run; None if the cell needs its own process."""
        return self.kind.process_group(self.config)

    @property
    def name(self) -> str:
        """The name of its folder, made of the axes' values."""
        text = ",".join(f"{k}={axes_lib.in_name(value)}" for k, value in self.values.items())
        if len(text) <= _LONGEST_NAME:
            return text
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).hexdigest()
        return f"{text[:_LONGEST_NAME]}-{digest}"

    @property
    def setting(self) -> dict[str, axes_lib.Value]:
        """The values without the seed: cells that share them are averaged."""
        return {name: value for name, value in self.values.items() if name != axes_lib.SEED}


def grid(
    options: Mapping[str, Any], axes: axes_lib.Axes, kind: kinds.RunKind = kinds.TRAINING
) -> list[Cell]:
    """Returns all cells of a sweep, the last axis varying fastest; axes overrule `options`.

    Those of the mechanism 'none' that differ in options of the noise only are one cell.
    """
    cells: dict[Any, Cell] = {}
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        if values.get("mechanism") == "none":
            values = {k: value for k, value in values.items() if k not in options_lib.NOISY}
        merged = options_lib.overrule(options, values)
        try:
            config = kind.config(merged, "the sweep").with_absolute_paths()
        except ValueError as error:
            raise validation.UsageError(f"The cell {axes_lib.label(values)}: {error}") from error
        same = cells.setdefault(config.with_defaults(), Cell(values, config))
        if same.values != values:
            raise validation.UsageError(
                f"The cells {axes_lib.label(same.values)} and {axes_lib.label(values)} are the "
                "same run: leave one of them out."
            )
    return list(cells.values())
