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
    known_plans,
    loaded_plans,
    participation_timer,
    server_connection,
    session,
    wire_session,
)


@dataclasses.dataclass(frozen=True)
class EndedSession:
    """The end of a session."""

    result: session.SessionResult
    work: session.Work | None  # Work that the server assigned; None if it assigned none.
    summary_sent: concurrent.futures.Future[None]  # Delivery, which need not be awaited.


@dataclasses.dataclass(frozen=True)
class DeviceRuntime:
    """The parts that all sessions of a device share."""

    connection: server_connection.ServerConnection
    plans: loaded_plans.LoadedPlans  # Cache of verified plans, with the trusted keys.
    examples: example_store.ExampleStore
    timer: participation_timer.Timer
    attester: attester_lib.Attester  # Source of attestation tokens.
    eligibility: eligibility_lib.Eligibility  # Conditions under which the device may work.
    clock: Callable[[], float] = time.time  # Clock that returns seconds since 1970.
    steady_clock: Callable[[], float] = time.monotonic  # Monotonic clock in seconds.
    # Source of randomness for the schedule and for the choice among addresses.
    generator: random.Random = dataclasses.field(default_factory=random.SystemRandom)
    # Participation rules of the tasks seen so far, by population and task.
    rules: dict[tuple[str, str], participation_timer.ParticipationRule] = dataclasses.field(
        default_factory=dict
    )
    # Public keys of the issuers whose tokens prove that other devices are genuine. Without them,
    # the device refuses plans that do not trust the server.
    issuers: tuple[ed25519.Ed25519PublicKey, ...] = ()
    known_plans: known_plans.KnownPlans = dataclasses.field(default_factory=known_plans.MemoryPlans)
    # Turn to train, which sessions that run side by side take one at a time.
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
            known=self.known_plans,
        )

    def check_rest(self, population: str, task: str, round_index: int) -> None:
        """Raises `TimerRefusal` for a round that a rule of an earlier session forbids."""
        rule = self.rules.get((population, task))
        if rule is not None:
            self.timer.check(population, task, round_index, rule)

    def run_session(self, population: str) -> EndedSession:
        """Runs one session to its end and sends the server a summary of it; thread-safe."""
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
