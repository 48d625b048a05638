"""One session of a device: check in, fetch the plan, train, upload; given up at any moment.

What the steps do is handed in (`SessionSteps`: a client of the server's protocol, and what
executes plans). The session keeps their order, which privacy rests on:

- the device's own participation timer is asked before it trains, and
- the participation is durable before the upload begins (`participation_timer`).

It stops as soon as the device is no longer eligible: between steps, and inside them wherever
they call `keep_going`. Whatever goes wrong inside a step ends this session and no more than
it; what of it leaves the device is a shape and health counters (`SessionReport`), never a
message of an error, which may quote an example.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import logging
import math
import platform
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tff_dpftrl import validation, version
from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import eligibility as eligibility_lib
from tff_dpftrl.runtime.device import participation_timer
from tff_dpftrl.runtime.device.session_shape import Event, SessionShape

_logger = logging.getLogger(__name__)
_LEAST_REST_S = 1.0  # Of a device that came back so soon that it cannot tell how fast rounds are.


class Interrupted(Exception):
    """The device may not work any more; the message says which conditions ended."""


class AttestationFailed(Exception):
    """The server does not believe that the device is genuine."""


class StepFailed(Exception):
    """A step came to no result for a known reason; the message is for the device's own log."""


@dataclasses.dataclass(frozen=True)
class ComeBack:
    """The server has no work for this device now.

    Attributes:
      turns: When to check in again, seconds from now, growing: the device takes the first
        one at which it may work. Empty if the server did not say.
      reason: A few words, for the device's own log.
    """

    turns: tuple[float, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device was asked to do.

    Attributes:
      task: Name of the task.
      round_index: The round, from 0.
      rule: How often the plan lets a device take part; None for what needs no timer, such
        as an evaluation without a statement.
      buckets: The buckets of the participation histograms; None without `rule`.
      plan: What `SessionSteps.train` needs, already verified.
    """

    task: str
    round_index: int
    rule: participation_timer.ParticipationRule | None
    buckets: histograms.ParticipationBuckets | None
    plan: Any = dataclasses.field(repr=False)

    def __post_init__(self):
        if (self.rule is None) != (self.buckets is None):
            raise validation.UsageError("rule and buckets must both be given, or neither.")


@dataclasses.dataclass(frozen=True)
class UploadAnswer:
    """What the server said to a report.

    Attributes:
      is_accepted: Whether it counts; it does not if it came too late.
      turns: When to check in again, as in `ComeBack`.
      reason: A few words, for the device's own log.
    """

    is_accepted: bool
    turns: tuple[float, ...] = ()
    reason: str = ""


KeepGoing = Callable[[], None]
"""Raises `Interrupted` if the device may not work any more; cheap enough to call often."""


class SessionSteps(abc.ABC):
    """What a session does, once each and in this order; any exception ends the session.

    Steps that take long call `keep_going` now and then and let what it raises pass.
    """

    @abc.abstractmethod
    def check_in(self, keep_going: KeepGoing) -> ComeBack | None:
        """Connects and waits to be selected.

        Returns:
          None if the device was selected, or when to come back.

        Raises:
          AttestationFailed: If the server does not take the device for genuine.
        """

    @abc.abstractmethod
    def fetch(self, keep_going: KeepGoing) -> Work:
        """Downloads plan and model, and verifies them."""

    @abc.abstractmethod
    def train(self, work: Work, keep_going: KeepGoing) -> Any:
        """Computes what to report from the device's examples."""

    @abc.abstractmethod
    def upload(
        self,
        update: Any,
        participation: tuple[np.ndarray, np.ndarray] | None,
        keep_going: KeepGoing,
    ) -> UploadAnswer:
        """Sends the report.

        Args:
          update: What `train` returned.
          participation: The vectors of the participation histograms, if the plan has them.
          keep_going: See `KeepGoing`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what the session holds; called at its end, whatever the end is."""


class Outcome(enum.Enum):
    """How a session ended, for the device's own schedule."""

    COMPLETED = "completed"
    NOT_SELECTED = "not selected"
    REPORT_REFUSED = "report refused"
    RESTING = "the participation timer runs"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    ATTESTATION_FAILED = "attestation failed"


@dataclasses.dataclass(frozen=True)
class SessionReport:
    """What may be told of a session: one of few shapes, and coarse numbers.

    Attributes:
      shape: The events, one of `session_shape.SHAPES`.
      seconds: How long it took, rounded up to two digits.
      peak_memory_bytes: Most memory of this process since it began, rounded up likewise.
      versions: Names and versions of this package, Python, the operating system and whatever
        the caller adds; nothing that differs from device to device of one kind.
    """

    shape: str
    seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class SessionResult:
    """How a session ended, for the device itself.

    Attributes:
      outcome: How.
      turns: When the server wants the device again, seconds from the end, as in `ComeBack`;
        of one that rests, when it will have rested.
      reason: A sentence for the device's own log; it must not leave the device.
      report: What may leave it.
    """

    outcome: Outcome
    turns: tuple[float, ...]
    reason: str
    report: SessionReport


def run(
    population: str,
    steps: SessionSteps,
    timer: participation_timer.Timer,
    eligibility: eligibility_lib.Eligibility,
    *,
    clock: Callable[[], float],
    versions: dict[str, str] | None = None,
) -> SessionResult:
    """Runs one session to its end, whatever that is.

    Args:
      population: Name of the population.
      steps: What to do; closed at the end.
      timer: The device's participation timer.
      eligibility: Whether the device may work.
      clock: Seconds, never going back.
      versions: Versions to report besides, like that of TensorFlow.

    Returns:
      The result; exceptions of steps are in it, and logged on the device.
    """
    shape, begin = SessionShape(), clock()
    try:
        outcome, turns, reason = _run_steps(population, steps, timer, eligibility, shape)
    except Interrupted as error:
        shape.add(Event.INTERRUPTED)
        outcome, turns, reason = Outcome.INTERRUPTED, (), str(error)
    except participation_timer.TimerRefusal as error:
        shape.add(Event.INTERRUPTED)
        outcome, reason = Outcome.RESTING, str(error)
        turns = () if error.wait_s is None else (max(error.wait_s, _LEAST_REST_S),)
    except AttestationFailed as error:
        # Who was believed at check-in and not later has met another fault.
        failed_at_once = str(shape) == Event.CHECKED_IN.value
        shape.add(Event.ATTESTATION_FAILED if failed_at_once else Event.ERROR)
        outcome, turns, reason = Outcome.ATTESTATION_FAILED, (), str(error)
    except StepFailed as error:
        shape.add(Event.ERROR)
        _logger.info("session %s of %s failed: %s", shape, population, error)
        outcome, turns, reason = Outcome.FAILED, (), str(error)
    except Exception as error:  # Of a server, of a plan, of an example: this session's only.
        shape.add(Event.ERROR)
        _logger.warning("session %s of %s failed", shape, population, exc_info=True)
        outcome, turns, reason = Outcome.FAILED, (), f"{type(error).__name__}: {error}"
    finally:
        _close(steps)
    report = SessionReport(
        shape=str(shape),
        seconds=_coarse(clock() - begin),
        peak_memory_bytes=int(_coarse(_peak_memory_bytes())),
        versions={**_versions(), **(versions or {})},
    )
    return SessionResult(outcome, turns, reason, report)


def _close(steps: SessionSteps) -> None:
    try:
        steps.close()
    except Exception:  # Of a connection that is broken anyway.
        _logger.warning("a session was not closed cleanly", exc_info=True)


def _run_steps(
    population: str,
    steps: SessionSteps,
    timer: participation_timer.Timer,
    eligibility: eligibility_lib.Eligibility,
    shape: SessionShape,
) -> tuple[Outcome, tuple[float, ...], str]:
    def keep_going() -> None:
        unmet = eligibility.unmet()
        if unmet:
            raise Interrupted(f"The device is no longer {' and '.join(unmet)}.")

    keep_going()
    shape.add(Event.CHECKED_IN)
    come_back = steps.check_in(keep_going)
    if come_back is not None:
        shape.add(Event.REFUSED)
        return Outcome.NOT_SELECTED, come_back.turns, come_back.reason
    keep_going()
    work = steps.fetch(keep_going)
    shape.add(Event.PLAN_DOWNLOADED)
    which = (population, work.task, work.round_index)
    if work.rule is not None:
        timer.check(*which, work.rule)
    keep_going()
    shape.add(Event.TRAINING_STARTED)
    update = steps.train(work, keep_going)
    shape.add(Event.TRAINING_ENDED)
    keep_going()
    participation = None
    if work.rule is not None:
        participation = timer.record(*which, work.rule, work.buckets)
    shape.add(Event.UPLOAD_STARTED)
    answer = steps.upload(update, participation, keep_going)
    if not answer.is_accepted:
        shape.add(Event.REFUSED)
        return Outcome.REPORT_REFUSED, answer.turns, answer.reason
    shape.add(Event.UPLOAD_COMPLETED)
    return Outcome.COMPLETED, answer.turns, answer.reason


def _coarse(value: float) -> float:
    """Rounded up to two significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _versions() -> dict[str, str]:
    return {
        "tff_dpftrl": version.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "system": platform.system(),
    }
