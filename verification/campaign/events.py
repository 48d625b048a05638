"""What observers of servers hear, a line an event."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

from typing_extensions import override

from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.server import observer


class Events(observer.Observer):
    """Writes what it hears, at once."""

    def __init__(self, path: pathlib.Path):
        """Appends to a file."""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, kind: str, **values: Any) -> None:
        """Writes one event."""
        line = {"kind": kind, "at": time.time(), **values}
        self._file.write(json.dumps(line).encode() + b"\n")

    @override
    def on_event(self, now: float, event: Any) -> None:
        match event:
            case events.Leading():
                self.write("leading", epoch=event.epoch, population=event.population)
            case events.RoundReleased():
                self.write(
                    "released",
                    task=event.task,
                    round_index=event.round_index,
                    model=event.metrics["model"],
                )
            case events.RoundLost():
                self.write(
                    "lost", task=event.task, round_index=event.round_index, reason=event.reason
                )
            case events.StoreFailed():
                self.write("store failed", reason=event.reason)
