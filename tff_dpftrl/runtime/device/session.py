"""One session of a device: check in, fetch the plan, train, upload; it can end at any moment.

The steps are an argument (`SessionSteps`: a client of the server's protocol, and an executor of
plans). The session enforces their order, on which privacy rests:

- the device's participation timer is checked before the device trains,
- the participation is durable before the upload begins (`participation_timer`), and
- one session of the device trains at a time (`Turn`), while others wait to be selected.

It stops as soon as the device is no longer eligible: between steps, and inside of steps that
call `keep_going`. An error in a step ends this session only. Only a shape and health counters
leave the device (`SessionReport`), never an error message, which may quote an example.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import logging
import math
import platform
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tff_dpftrl import validation, version
from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import eligibility as eligibility_lib
from tff_dpftrl.runtime.device import participation_timer
from tff_dpftrl.runtime.device.session_shape import Event, SessionShape

_logger = logging.getLogger(__name__)
_MIN_REST_S = 1.0  # For a device that came back too soon to measure the rate of rounds.
_LOOK_S = 0.2  # Seconds between two checks of a session that waits for its turn.


class Interrupted(Exception):
    """The device is no longer eligible; the message names the conditions that do not hold."""


class AttestationFailed(Exception):
    """The server does not accept the device as genuine."""


class StepFailed(Exception):
    """A step failed for a known reason; the message is for the device's log only."""


@dataclasses.dataclass(frozen=True)
class ComeBack:
    """The server's answer that it has no work for this device now."""

    # Times at which to check in again, in seconds from now, growing. The device takes the first one
    # at which it is eligible. Empty if the server names none.
    turns: tuple[float, ...] = ()
    reason: str = ""  # Short reason, for the device's log.
    is_finished: bool = False  # Whether no task of the population has a further round.


@dataclasses.dataclass(frozen=True)
class Work:
    """The work that the server assigned to a device."""

    task: str
    round_index: int
    # Participation limits of the plan; None for work that needs no timer, such as an evaluation
    # without a statement.
    rule: participation_timer.ParticipationRule | None
    buckets: histograms.ParticipationBuckets | None  # None without `rule`.
    plan: Any = dataclasses.field(repr=False)  # Verified plan and model, for `SessionSteps.train`.

    def __post_init__(self):
        if (self.rule is None) != (self.buckets is None):
            raise validation.UsageError("rule and buckets must both be given, or neither.")


@dataclasses.dataclass(frozen=True)
class UploadAnswer:
    """The server's answer to a report."""

    is_accepted: bool  # Whether the report counts. A late report does not.
    turns: tuple[float, ...] = ()  # Times at which to check in again, in seconds from now, growing.
    reason: str = ""  # Short reason, for the device's log.


KeepGoing = Callable[[], None]
"""Check that raises `Interrupted` if the device is no longer eligible; cheap to call often."""


class Turn:
    """The turn to train, which the sessions of a device's populations take one at a time.

    They wait to be selected side by side. Otherwise a session that its server holds for an hour
    would keep the device from all other populations. A session that is selected while another
    trains goes on after that training. Reports may overlap: in a secure sum a device waits for
    others, and two devices that each held the turn for another sum would wait for each other.
    """

    def __init__(self):
        """Begins with the turn free."""
        self._lock = threading.Lock()
        self.is_over = False
        """Whether all sessions must end, because the device's runtime ends."""

    @property
    def is_taken(self) -> bool:
        """Whether a session trains now."""
        return self._lock.locked()

    @contextlib.contextmanager
    def taken(self, keep_going: KeepGoing) -> Iterator[None]:
        """Waits for the turn, and holds it for the block.

        `keep_going` is called while waiting; it raises to end the waiting.
        """
        while not self._lock.acquire(timeout=_LOOK_S):
            keep_going()
        try:
            yield
        finally:
            self._lock.release()


class SessionSteps(abc.ABC):
    """The steps of a session, which run once each in this order; any exception ends the session.

    A step that takes long calls `keep_going` now and then and does not catch its exceptions.
    """

    @abc.abstractmethod
    def check_in(self, keep_going: KeepGoing) -> ComeBack | None:
        """Connects and waits to be selected.

        Returns:
          None if the device was selected, otherwise the server's answer.

        Raises:
          AttestationFailed: If the server does not accept the device as genuine.
        """

    @abc.abstractmethod
    def fetch(self, keep_going: KeepGoing) -> Work:
        """Downloads plan and model, and verifies them."""

    @abc.abstractmethod
    def train(self, work: Work, keep_going: KeepGoing) -> Any:
        """Computes the update from the device's examples."""

    @abc.abstractmethod
    def upload(
        self,
        update: Any,
        participation: tuple[np.ndarray, np.ndarray] | None,
        keep_going: KeepGoing,
    ) -> UploadAnswer:
        """Sends the report.

        Args:
          update: Result of `train`.
          participation: Vectors of the participation histograms; None if the plan has none.
          keep_going: Check that raises to interrupt the upload.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the resources of the session; called at its end in any case."""


class SessionOutcome(enum.Enum):
    """The kind of a session's end, for the device's schedule."""

    COMPLETED = "completed"
    NOT_SELECTED = "not selected"
    FINISHED = "finished"
    REPORT_REFUSED = "report refused"
    RESTING = "the participation timer runs"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    ATTESTATION_FAILED = "attestation failed"


@dataclasses.dataclass(frozen=True)
class SessionReport:
    """The part of a session's result that may leave the device: a shape and coarse numbers."""

    shape: str  # Events of the session, one of `session_shape.SHAPES`.
    seconds: float  # Duration in seconds, rounded up to two significant digits.
    peak_memory_bytes: int  # Peak of this process, rounded up to two significant digits.
    # Versions of this package, Python, the operating system and the caller's further components, by
    # name. They must not differ between devices of one kind.
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class SessionResult:
    """The result of a session, for the device itself."""

    outcome: SessionOutcome  # Kind of the end.
    # Times at which the server wants the device again, in seconds from the end, growing. If the
    # participation timer refused the round, the time at which it may be asked again.
    turns: tuple[float, ...]
    reason: str  # Sentence for the device's log; it must not leave the device.
    report: SessionReport  # Part of the result that may leave the device.


def run(
    population: str,
    steps: SessionSteps,
    timer: participation_timer.Timer,
    eligibility: eligibility_lib.Eligibility,
    *,
    clock: Callable[[], float],
    versions: dict[str, str] | None = None,
    turn: Turn | None = None,
) -> SessionResult:
    """Runs one session to its end and never raises for an error in a step.

    The steps are closed at the end. Their exceptions are in the result, and logged on the device.
    `clock` is monotonic, in seconds. `versions` are further ones to report, such as TensorFlow's.
    `turn` is None if the device has one session at a time.
    """
    shape, begin = SessionShape(), clock()
    try:
        outcome, turns, reason = _run_steps(
            population, steps, timer, eligibility, shape, Turn() if turn is None else turn
        )
    except Interrupted as error:
        shape.add(Event.INTERRUPTED)
        outcome, turns, reason = SessionOutcome.INTERRUPTED, (), str(error)
    except participation_timer.TimerRefusal as error:
        shape.add(Event.INTERRUPTED)
        outcome, reason = SessionOutcome.RESTING, str(error)
        turns = () if error.wait_s is None else (max(error.wait_s, _MIN_REST_S),)
    except AttestationFailed as error:
        # A device that the server accepted at check-in has another fault.
        failed_at_once = str(shape) == Event.CHECKED_IN.value
        shape.add(Event.ATTESTATION_FAILED if failed_at_once else Event.ERROR)
        outcome, turns, reason = SessionOutcome.ATTESTATION_FAILED, (), str(error)
    except StepFailed as error:
        shape.add(Event.ERROR)
        _logger.info("session %s of %s failed: %s", shape, population, error)
        outcome, turns, reason = SessionOutcome.FAILED, (), str(error)
    except Exception as error:  # A fault of a server, plan or example ends this session only.
        shape.add(Event.ERROR)
        _logger.warning("session %s of %s failed", shape, population, exc_info=True)
        outcome, turns, reason = SessionOutcome.FAILED, (), f"{type(error).__name__}: {error}"
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
    except Exception:  # The connection may be broken.
        _logger.warning("a session was not closed cleanly", exc_info=True)


def _run_steps(
    population: str,
    steps: SessionSteps,
    timer: participation_timer.Timer,
    eligibility: eligibility_lib.Eligibility,
    shape: SessionShape,
    turn: Turn,
) -> tuple[SessionOutcome, tuple[float, ...], str]:
    def keep_going() -> None:
        if turn.is_over:
            raise Interrupted("The device's runtime ends.")
        unmet = eligibility.unmet()
        if unmet:
            raise Interrupted(f"The device is no longer {' and '.join(unmet)}.")

    keep_going()
    shape.add(Event.CHECKED_IN)
    come_back = steps.check_in(keep_going)
    if come_back is not None:
        shape.add(Event.REFUSED)
        finished = come_back.is_finished
        outcome = SessionOutcome.FINISHED if finished else SessionOutcome.NOT_SELECTED
        return outcome, come_back.turns, come_back.reason
    keep_going()
    with turn.taken(keep_going):
        work = steps.fetch(keep_going)
        shape.add(Event.PLAN_DOWNLOADED)
        key = (population, work.task, work.round_index)
        if work.rule is not None:
            timer.check(*key, work.rule)
        keep_going()
        shape.add(Event.TRAINING_STARTED)
        update = steps.train(work, keep_going)
        shape.add(Event.TRAINING_ENDED)
    keep_going()
    participation = None
    if work.rule is not None:
        participation = timer.record(*key, work.rule, work.buckets)
    shape.add(Event.UPLOAD_STARTED)
    answer = steps.upload(update, participation, keep_going)
    if not answer.is_accepted:
        shape.add(Event.REFUSED)
        return SessionOutcome.REPORT_REFUSED, answer.turns, answer.reason
    shape.add(Event.UPLOAD_COMPLETED)
    return SessionOutcome.COMPLETED, answer.turns, answer.reason


def _coarse(value: float) -> float:
    """Rounds up to two significant digits."""
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
