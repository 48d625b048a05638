"""What goes wrong with simulated devices, drawn from a seed."""

from __future__ import annotations

import dataclasses
import enum
import random

from tff_dpftrl import validation


class DropOut(enum.Enum):
    """When a device goes away."""

    BEFORE_TRAINING = "before training"
    TRAINING = "while it trains"
    UPLOAD = "while it uploads"


class Attack(str, enum.Enum):
    """What a malicious device sends; the value is what the command line calls it."""

    NAN = "nan"  # An update of NaNs; of a secure sum, keys that are none.
    SHAPE = "shape"  # A tensor of another shape; a masked vector that is longer.
    ATTEMPT = "attempt"  # A report for an attempt that it was not asked for.
    TOKEN = "token"  # An attestation token that was used before.
    GARBAGE = "garbage"  # Bytes that are no update, or no message of a secure sum.


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What happens in one session.

    Attributes:
      drop_out: When the device goes away; None if it does not.
      drop_out_at: Of one that goes away while it sums securely: the share of its messages, in
        [0, 1), that it has sent by then.
      delay_s: Seconds that its training takes longer.
      attack: What it does to the server; None if it is honest.
    """

    drop_out: DropOut | None = None
    drop_out_at: float = 0.0
    delay_s: float = 0.0
    attack: Attack | None = None


@dataclasses.dataclass(frozen=True)
class Rates:
    """How often what happens.

    Attributes:
      drop_outs: Share of sessions whose device goes away.
      stragglers: Share of sessions whose training takes longer.
      straggler_s: By how many seconds, on average; between half and one and a half of it.
      malicious: Share of devices that attack in every session.
      attacks: What they do, one of these in each session.
    """

    drop_outs: float = 0.08
    stragglers: float = 0.22
    straggler_s: float = 5.0
    malicious: float = 0.0
    attacks: tuple[Attack, ...] = tuple(Attack)

    def __post_init__(self):
        for name in ("drop_outs", "stragglers", "malicious"):
            validation.number(name, getattr(self, name), at_least=0, at_most=1)
        validation.number("straggler_s", self.straggler_s, at_least=0)
        if self.malicious and not self.attacks:
            raise validation.UsageError("attacks must name at least one if devices are malicious.")

    def draw_malicious(self, generator: random.Random) -> bool:
        """Whether a device is malicious."""
        return generator.random() < self.malicious

    def draw(self, generator: random.Random, *, is_malicious: bool) -> Behaviour:
        """What happens in a session.

        Args:
          generator: Source of randomness; every call takes the same number of draws.
          is_malicious: Whether the device is malicious.

        Returns:
          The behaviour.
        """
        drops, straggles, share = (generator.random() for _ in range(3))
        drop_out, attack = generator.choice(list(DropOut)), generator.random()
        return Behaviour(
            drop_out=drop_out if drops < self.drop_outs else None,
            drop_out_at=share,
            delay_s=(0.5 + share) * self.straggler_s if straggles < self.stragglers else 0.0,
            attack=self.attacks[int(attack * len(self.attacks))] if is_malicious else None,
        )
