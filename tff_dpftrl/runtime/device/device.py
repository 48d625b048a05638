"""A device: all that its sessions share, for one population after the other."""

from __future__ import annotations

import dataclasses
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
    server_connection,
    session,
    wire_session,
)


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
    """

    connection: server_connection.ServerConnection
    plans: loaded_plans.LoadedPlans
    examples: example_store.ExampleStore
    timer: participation_timer.Timer
    attester: attester_lib.Attester
    eligibility: eligibility_lib.Eligibility
    clock: Callable[[], float] = time.time
    steady_clock: Callable[[], float] = time.monotonic

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

    def run_session(self, population: str) -> tuple[session.SessionResult, grpc.Future]:
        """Runs one session to its end, and tells the server how it went.

        Args:
          population: Name of the population.

        Returns:
          The result, and the telling, which nobody needs to wait for.
        """
        tensorflow = sys.modules.get("tensorflow")
        versions = {} if tensorflow is None else {"tensorflow": tensorflow.__version__}
        result = session.run(
            population,
            self.steps(population),
            self.timer,
            self.eligibility,
            clock=self.steady_clock,
            versions=versions,
        )
        return result, self.connection.tell(population, result.report)
