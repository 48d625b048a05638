"""What goes wrong in a schedule, and how often."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probabilities of a schedule; each is of one message or one step.

    Attributes:
      lost: A message never arrives.
      doubled: It arrives a second time, later.
      late: It takes up to `longest_delay` seconds instead of some milliseconds.
      longest_delay: Longer than a lease.
      killed: An actor dies at a message.
      killed_together: Share of the deaths in which all of the server dies.
      noticed: Share of the deaths that the engine tells others of.
      stopped: An actor stops at a message, for up to `longest_stop` seconds.
      longest_stop: Longer than a lease.
      skew: Clocks differ by up to so many seconds.
      dropped: A device drops out instead of reporting.
      malformed: Its report cannot be read.
      repeated: It sends its report twice.
    """

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    longest_delay: float = 20.0
    killed: float = 0.0
    killed_together: float = 0.1
    noticed: float = 0.5
    stopped: float = 0.0
    longest_stop: float = 20.0
    skew: float = 0.0
    dropped: float = 0.0
    malformed: float = 0.0
    repeated: float = 0.0


NONE = Faults()


def draw(randomness: random.Random) -> Faults:
    """Draws the faults of a schedule: each kind is absent, rare or frequent."""

    def of(*choices: float) -> float:
        return randomness.choice(choices)

    return Faults(
        lost=of(0.0, 0.01, 0.05),
        doubled=of(0.0, 0.02, 0.1),
        late=of(0.0, 0.02, 0.1),
        killed=of(0.0, 0.003, 0.01),
        stopped=of(0.0, 0.003, 0.01),
        skew=of(0.0, 0.0, 3.0),
        dropped=of(0.0, 0.1, 0.3),
        malformed=of(0.0, 0.1),
        repeated=of(0.0, 0.2),
    )
