"""A device: all that its sessions share, for one population after the other."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import sys
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import eligibility as eligibility_lib
from tff_dpftrl.runtime.device import (
    example_store,
    loaded_plans,
    participation_timer,
    server_connection,
    session,
    wire_session,
)


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
    told: concurrent.futures.Future[None]


@dataclasses.dataclass(frozen=True)
class DeviceRuntime:
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
      generator: Source of randomness for its schedule, and its choice among addresses.
      rules: What tasks ask of the timer, by population and task, as far as known.
      issuers: Whose tokens prove that other devices are genuine, for plans that do not trust
        the server; such plans are refused without.
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
    rules: dict[tuple[str, str], participation_timer.ParticipationRule] = dataclasses.field(
        default_factory=dict
    )
    issuers: tuple[ed25519.Ed25519PublicKey, ...] = ()

    def steps(self, population: str) -> wire_session.WireSession:
        """What a session with the server does."""
        return wire_session.WireSession(
            self.connection,
            population,
            attester=self.attester,
            plans=self.plans,
            examples=self.examples,
            clock=self.clock,
            check_rest=self.check_rest,
            issuers=self.issuers,
            generator=self.generator,
        )

    def check_rest(self, population: str, task: str, round_index: int) -> None:
        """Refuses a round that the device knows to be too early for it.

        Args:
          population: Name of the population.
          task: The task that devices are chosen for.
          round_index: Its round.

        Raises:
          participation_timer.TimerRefusal: If it has to rest.
        """
        rule = self.rules.get((population, task))
        if rule is not None:  # What the task asks is known from an earlier session.
            self.timer.check(population, task, round_index, rule)

    def run_session(self, population: str) -> EndedSession:
        """Runs one session to its end, and tells the server how it went.

        Args:
          population: Name of the population.

        Returns:
          The session.
        """
        # It may be missing, or just being imported by another thread.
        tensorflow = getattr(sys.modules.get("tensorflow"), "__version__", None)
        steps = self.steps(population)
        result = session.run(
            population,
            steps,
            self.timer,
            self.eligibility,
            clock=self.steady_clock,
            versions={} if tensorflow is None else {"tensorflow": tensorflow},
        )
        told = self.connection.tell(population, result.report, steps.address)
        if steps.work is not None and steps.work.rule is not None:
            self.rules[population, steps.work.task] = steps.work.rule
        return EndedSession(result, steps.work, told)
