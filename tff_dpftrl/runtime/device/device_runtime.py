"""The runtime of a device: the parts that its sessions share, for all its populations."""

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
    """The end of a session.

    Attributes:
      result: Result of the session.
      work: Work that the server assigned; None if it assigned none.
      summary_sent: Future of the session summary's delivery, which need not be waited for.
    """

    result: session.SessionResult
    work: session.Work | None
    summary_sent: concurrent.futures.Future[None]


@dataclasses.dataclass(frozen=True)
class DeviceRuntime:
    """The parts that all sessions of a device share.

    Attributes:
      connection: Connection to the server.
      plans: Cache of verified plans, with the trusted keys.
      examples: Example store.
      timer: Participation timer.
      attester: Source of attestation tokens.
      eligibility: Conditions under which the device may work.
      clock: Clock that returns seconds since 1970.
      steady_clock: Monotonic clock in seconds.
      generator: Source of randomness for the schedule and for the choice among addresses.
      rules: Participation rules of the tasks seen so far, by population and task.
      issuers: Public keys of the issuers whose tokens prove that other devices are genuine.
        Without them, the device refuses plans that do not trust the server.
      turn: Turn to train, which sessions that run side by side take one at a time.
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
    turn: session.Turn = dataclasses.field(default_factory=session.Turn)

    def steps(self, population: str) -> wire_session.WireSession:
        """Creates the steps of a session."""
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
        """Refuses a round that a rule of an earlier session forbids.

        Args:
          population: Name of the population.
          task: Name of the task for which devices are selected.
          round_index: Index of its round.

        Raises:
          participation_timer.TimerRefusal: If the device must not take part.
        """
        rule = self.rules.get((population, task))
        if rule is not None:
            self.timer.check(population, task, round_index, rule)

    def run_session(self, population: str) -> EndedSession:
        """Runs one session to its end and sends the server a summary of it; thread-safe.

        Args:
          population: Name of the population.

        Returns:
          The end of the session.
        """
        # TensorFlow may be missing, or another thread may be importing it.
        tensorflow = getattr(sys.modules.get("tensorflow"), "__version__", None)
        steps = self.steps(population)
        result = session.run(
            population,
            steps,
            self.timer,
            self.eligibility,
            clock=self.steady_clock,
            versions={} if tensorflow is None else {"tensorflow": tensorflow},
            turn=self.turn,
        )
        summary_sent = self.connection.send_summary(population, result.report, steps.address)
        if steps.work is not None and steps.work.rule is not None:
            self.rules[population, steps.work.task] = steps.work.rule
        return EndedSession(result, steps.work, summary_sent)
