"""A check, in another process, that the cells of a sweep can be run with their text.

Reading text takes memory, and SQLite files need TensorFlow; a sweep that waits for its
cells for hours should keep neither.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence

from tff_dpftrl import validation
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import child, kinds
from tff_dpftrl.training import composed


def check(cells: Sequence[cells_lib.Cell]) -> dict[str, str]:
    """Checks that each cell's text can be used and has enough users; returns its digests."""
    if not cells:
        return {}
    done = subprocess.run(
        child.command([sys.executable, "-m", __name__]),
        input=json.dumps([(cell.kind.name, cell.config.to_dict()) for cell in cells]),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process; the other one ends with it.
    )
    if done.returncode:
        raise OSError(f"the process that reads the text ended with status {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise validation.UsageError(
            f"The cell {axes_lib.label(cells[answer['cell']].values)}: {answer['error']}"
        )
    return answer


def first_error(configs: Sequence[composed.Options]) -> dict[str, int | str] | None:
    """Returns index ("cell") and message ("error") of the first config that cannot run, or None."""
    check_text = kinds.of(configs[0]).text_check()
    for index, config in enumerate(configs):
        try:
            check_text(config)
        except ValueError as error:
            return {"cell": index, "error": str(error)}
    return None


def digests(configs: Sequence[composed.Options]) -> dict[str, str]:
    """Returns the digests of what configs read, as `corpus.planned` returns them."""
    from tff_dpftrl.training import corpus

    read = functools.lru_cache(maxsize=1)(corpus.read_users)
    found: dict[str, str] = {}
    seen = set()
    for config in configs:
        options, flat = config.text, config.to_dict()
        key = options, *(flat.get(name) for name in composed.FILES)
        if key not in seen:
            seen.add(key)
            text = read(options)
            found |= corpus.planned(config, text.train, text.validation)
    return found


def _main() -> None:
    configs = [kinds.KINDS[kind].config_class.of(**values) for kind, values in json.load(sys.stdin)]
    print(json.dumps(first_error(configs) or digests(configs)))


if __name__ == "__main__":
    _main()
