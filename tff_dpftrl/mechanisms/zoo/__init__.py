"""Ready-made strategies of the package, each with a certificate that a test verifies.

A name says what the strategy was optimised for: "blt-n2000-b400-k5" is the BLT
of four buffers with the least MaxLoss for 2,000 rounds, a stride of 400 and five
participations, "-rms" with the least RmsLoss, "-bounded" with the least MaxLoss
among those whose decays stay below 1 - 1 / n, so that they may run longer than n.
"blt-gboard-b100", "-b400" and "-b1000" hold the published parameters of production
models (McMahan, Xu & Zhang 2024, appendix A), made for 2,000 rounds and those strides.

A strategy is valid for any schema: compute its sensitivity for the actual one.
"""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

from tff_dpftrl import validation

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib

_FOLDER = pathlib.Path(__file__).parent


def names() -> list[str]:
    """Lists the names of all entries, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load(name: str) -> strategy_lib.Strategy:
    """Loads the strategy called `name`, such as "blt-n2000-b400-k5"."""
    from tff_dpftrl.mechanisms import serialization  # Names alone are all that --help needs.

    return serialization.load(_path(name))


def find(name: str) -> strategy_lib.Strategy:
    """Loads the strategy of a file or, if there is none of this name, of an entry.

    Args:
      name: Path of a file that `serialization.save` wrote, or a name of `names`.

    Returns:
      The strategy.

    Raises:
      ValueError: If there is neither, or the file is no strategy.
    """
    if os.path.exists(name):
        from tff_dpftrl.mechanisms import serialization

        return serialization.load(name)
    if name not in names():
        raise validation.UsageError(
            f"Cannot read a strategy from {name}: there is no such file, and no entry of the zoo "
            f"with this name; there are {', '.join(names())}."
        )
    return load(name)


def _path(name: str) -> pathlib.Path:
    if name not in names():
        raise validation.UsageError(
            f"No zoo entry is called {name!r}; there are {', '.join(names())}."
        )
    return _FOLDER / f"{name}.json"
