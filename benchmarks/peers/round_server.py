"""The protocol between `benchmarks/rounds.py` and a process that runs rounds for it.

Nothing but the standard library and NumPy is imported here, because the processes are of
different environments. The parent writes one command a line to the child's standard input:

    round 3          run the round with the fourth cohort; the answer is {"seconds": …}
    weights PATH     save the model's weights there, as `numpy.savez` does; the answer is {}

and the child answers each with one line of JSON after `PREFIX` on its standard output; so
does it, once, when it is ready. While one process runs a round, the others wait for a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

PREFIX = "@round "


def rounds(get_weights: Callable[[], Sequence[np.ndarray]], **facts) -> Iterator[int]:
    """Yields the rounds that the parent asks for, until it closes standard input.

    A round is timed until the next one is fetched from the iterator, so its model has to be
    there by then.

    Args:
      get_weights: Returns the model's weights in the order of `WordLstm.weight_shapes`.
      **facts: What the parent is told when the process is ready.

    Yields:
      Index of the cohort to run a round with.
    """
    _answer(facts)
    for line in sys.stdin:
        command, argument = line.split(maxsplit=1)
        if command == "round":
            start = time.perf_counter()
            yield int(argument)
            _answer({"seconds": time.perf_counter() - start})
        elif command == "weights":
            np.savez(argument.strip(), *(np.asarray(w) for w in get_weights()))
            _answer({})
        else:
            raise ValueError(f"Unknown command {command!r}: send round or weights.")


def serve_ways(ways: Mapping[str, Callable[[], Iterable[np.ndarray]]], **facts) -> None:
    """Serves computations: a round is one of them, by its place, and "weights" are its results.

    Args:
      ways: By name; each returns its results in the same order.
      **facts: What the parent is told, beside the names of the ways.
    """
    results: list[np.ndarray] = []
    for index in rounds(lambda: results, ways=list(ways), **facts):
        results[:] = list(ways.values())[index]()


def _answer(facts: dict) -> None:
    print(PREFIX + json.dumps(facts), flush=True)
