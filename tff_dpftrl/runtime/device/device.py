"""A device: all that its sessions share, for one population after the other."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable

import grpc

from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import eligibility as eligibility_lib
from tff_dpftrl.runtime.device import (
    example_store,
    loaded_plans,
    participation_timer,
    round_pace,
    server_connection,
    session,
    wire_session,
)

_TAKEN_PART = (session.Outcome.COMPLETED, session.Outcome.REPORT_REFUSED)
_SPREAD = 0.5


@dataclasses.dataclass(frozen=True)
class EndedSession:
    """A session and what became of it.

    Attributes:
      result: How it ended.
      work: What was asked; None if nothing was.
      told: The telling of the server, which nobody needs to wait for.
    """

    result: session.SessionResult
    work: session.Work | None
    told: grpc.Future


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device has.

    Attributes:
      connection: To its server.
      plans: The plans that it has loaded, by the keys that it trusts.
      examples: Its examples.
      timer: Its participation timer.
      attester: Who vouches for it.
      eligibility: Whether it may work.
      clock: Seconds since 1970.
      steady_clock: Seconds, never going back.
      generator: Source of randomness for its schedule.
      pace: What it has seen of rounds.
    """

    connection: server_connection.ServerConnection
    plans: loaded_plans.LoadedPlans
    examples: example_store.ExampleStore
    timer: participation_timer.Timer
    attester: attester_lib.Attester
    eligibility: eligibility_lib.Eligibility
    clock: Callable[[], float] = time.time
    steady_clock: Callable[[], float] = time.monotonic
    generator: random.Random = dataclasses.field(default_factory=random.SystemRandom)
    pace: round_pace.RoundPace = dataclasses.field(default_factory=round_pace.RoundPace)

    def steps(self, population: str) -> wire_session.WireSession:
        """What a session with the server does."""
        return wire_session.WireSession(
            self.connection,
            population,
            attester=self.attester,
            plans=self.plans,
            examples=self.examples,
            clock=self.clock,
        )

    def run_session(self, population: str) -> EndedSession:
        """Runs one session to its end, and tells the server how it went.

        Args:
          population: Name of the population.

        Returns:
          The session, with the turns that are left for one that has to rest.
        """
        # It may be missing, or just being imported by another thread.
        tensorflow = getattr(sys.modules.get("tensorflow"), "__version__", None)
        versions = {} if tensorflow is None else {"tensorflow": tensorflow}
        steps, began = self.steps(population), self.steady_clock()
        result = session.run(
            population,
            steps,
            self.timer,
            self.eligibility,
            clock=self.steady_clock,
            versions=versions,
        )
        told = self.connection.tell(population, result.report)
        if steps.work is not None:
            result = self._rested(population, steps.work, result, began)
        return EndedSession(result, steps.work, told)

    def _rested(
        self, population: str, work: session.Work, result: session.SessionResult, began: float
    ) -> session.SessionResult:
        """Without the turns at which the device could only say that it rests."""
        now = self.steady_clock()
        self.pace.see(population, work.task, work.round_index, now)
        if work.rule is None or result.outcome not in _TAKEN_PART or not result.turns:
            return result
        rest_s = self.pace.rest_s(population, work.task, work.rule, session_s=now - began)
        # As many others took part as it did: they should not come back together.
        own = rest_s * (1.0 + _SPREAD * self.generator.random())
        turns = tuple(turn for turn in result.turns if turn >= rest_s)
        return dataclasses.replace(result, turns=turns or (own,))
