"""Fault injection for simulated devices: drop-outs, stragglers and attacks, drawn from a seed."""

from __future__ import annotations

import dataclasses
import enum
import random

from tff_dpftrl import validation


class DropOut(enum.Enum):
    """The moment at which a device drops out."""

    BEFORE_TRAINING = "before training"
    TRAINING = "while it trains"
    UPLOAD = "while it uploads"


class Attack(str, enum.Enum):
    """An attack of a malicious device; the value is its name on the command line."""

    NAN = "nan"  # An update of NaNs; in a secure sum, invalid keys.
    SHAPE = "shape"  # A tensor of another shape; in a secure sum, a masked vector that is longer.
    ATTEMPT = "attempt"  # A report for another attempt.
    TOKEN = "token"  # A replayed attestation token.
    GARBAGE = "garbage"  # Bytes that cannot be parsed.


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """The injected faults of one session.

    Attributes:
      drop_out: Moment at which the device drops out; None if it does not.
      drop_out_at: Share of the messages of a secure sum, in [0, 1), that a device sends before
        it drops out of the upload.
      delay_s: Extra seconds that training takes.
      attack: Attack of the device; None if it is honest.
    """

    drop_out: DropOut | None = None
    drop_out_at: float = 0.0
    delay_s: float = 0.0
    attack: Attack | None = None


@dataclasses.dataclass(frozen=True)
class Rates:
    """Probabilities of faults.

    Attributes:
      drop_outs: Probability that a session's device drops out.
      stragglers: Probability that a session's training is delayed.
      straggler_s: Mean delay in seconds; delays are between half and one and a half times it.
      malicious: Probability that a device is malicious. It then attacks in every session.
      attacks: Attacks of malicious devices, of which each session draws one.
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
        """Draws whether a device is malicious."""
        return generator.random() < self.malicious

    def draw(self, generator: random.Random, *, is_malicious: bool) -> Behaviour:
        """Draws the faults of a session; every call takes the same number of draws."""
        drops, straggles, share = (generator.random() for _ in range(3))
        drop_out, attack = generator.choice(list(DropOut)), generator.random()
        return Behaviour(
            drop_out=drop_out if drops < self.drop_outs else None,
            drop_out_at=share,
            delay_s=(0.5 + share) * self.straggler_s if straggles < self.stragglers else 0.0,
            attack=self.attacks[int(attack * len(self.attacks))] if is_malicious else None,
        )
