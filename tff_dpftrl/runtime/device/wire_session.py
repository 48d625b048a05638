"""The steps of a session in the server's protocol (`wire.proto`)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message
from typing_extensions import override

from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import (
    example_store,
    known_plans,
    loaded_plans,
    participation_timer,
    secure_upload,
    server_connection,
    session,
)
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    plan_pb2,
    rounded_updates,
    secure_report,
    signing,
    tensor_values,
)
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.store import contents

_HOUR_S = 3600.0


class WireSession(session.SessionSteps):
    """The steps of one session with a server."""

    def __init__(
        self,
        connection: server_connection.ServerConnection,
        population: str,
        *,
        attester: attester_lib.Attester,
        plans: loaded_plans.LoadedPlans,
        examples: example_store.ExampleStore,
        clock: Callable[[], float],
        check_rest: Callable[[str, str, int], None],
        seed_for: Callable[[str, int], tuple[int, int]] | None = None,
        issuers: Iterable[ed25519.Ed25519PublicKey] = (),
        generator: random.Random | None = None,
        known: known_plans.KnownPlans | None = None,
    ):
        """Prepares a session; `session.run` runs it.

        `clock` is that of the example store, in seconds since 1970. `check_rest` takes population,
        task and round; it raises `TimerRefusal` if a known rule forbids the round. `seed_for` maps
        task and round to the seed of the examples' order, in simulations only; by default the
        operating system draws it. A token from one of `issuers` proves that another device is
        genuine, for plans that do not trust the server. `generator` decides the order of the
        server's addresses.
        """
        self._connection, self._population = connection, population
        self._attester, self._plans = attester, plans
        self._examples, self._clock, self._seed_for = examples, clock, seed_for
        self._check_rest = check_rest
        self._issuers = tuple(issuers)
        self._generator = random.SystemRandom() if generator is None else generator
        self._known = known_plans.MemoryPlans() if known is None else known
        self._sends_less = False
        self._scales: list[float] = []
        self._secure_upload: secure_upload.SecureUpload | None = None
        self._stream: server_connection.Stream | None = None
        self._configuration = wire_pb2.Configuration()
        self._attempt = ""
        self.work: session.Work | None = None
        """Work that the server assigned; None before it is known."""

    @override
    def check_in(self, keep_going: session.KeepGoing) -> session.ComeBack | None:
        """Connects, waits to be selected, and waits for plan and model to arrive."""
        patience = self._connection.patience
        challenge = self._open(keep_going)
        versions = set(challenge.protocol_versions) & set(session_stream.VERSIONS)
        if not versions:
            offered = sorted(challenge.protocol_versions)[:10]
            raise session.StepFailed(
                f"The server has the protocol versions {offered} and this device "
                f"{list(session_stream.VERSIONS)}: update the older one."
            )
        _check_round(challenge.round_index)
        if challenge.task:  # A device that must rest would take the place of one that need not.
            try:
                self._check_rest(self._population, challenge.task, challenge.round_index)
            except participation_timer.TimerRefusal:
                self._stream.finish()
                raise
        nonce = session_stream.attested_nonce(
            challenge.challenge, self._stream.server_name, self._population
        )
        self._sends_less = session_stream.sends_less(max(versions))
        check_in = wire_pb2.CheckIn(
            population=self._population,
            protocol_version=max(versions),
            runtime_version=allowed_ops.RUNTIME_VERSION,
            token=self._attester.token(nonce) or b"",
        )
        self._stream.send(wire_pb2.FromDevice(check_in=check_in))
        self._plans.warm_up()
        answer = self._receive(
            ("configuration", "come_back"), keep_going, seconds=patience.selection_s
        )
        if isinstance(answer, wire_pb2.ComeBack):
            self._stream.finish()
            reason = server_connection.one_line(answer.reason)
            return session.ComeBack(tuple(answer.turns), reason, answer.finished)
        _check_round(answer.round_index)
        self._configuration = answer
        return None

    def _open(self, keep_going: session.KeepGoing) -> wire_pb2.Challenge:
        """Opens a session with the first of the server's addresses that answers."""
        seconds = self._connection.patience.answer_s
        addresses = self._connection.addresses(self._generator)
        for address in addresses:
            self._stream = self._connection.open_stream(address, self._population)
            try:
                return self._receive("challenge", keep_going, seconds=seconds)
            except session.StepFailed as error:
                if len(addresses) == 1:
                    raise
                reason = str(error)
            self._stream.close()
            self._connection.avoid(address)
        raise session.StepFailed(f"None of {len(addresses)} addresses answers; the last: {reason}")

    @property
    def address(self) -> str | None:
        """Address of the server in this session; None before it begins."""
        return None if self._stream is None else self._stream.address

    @override
    def fetch(self, keep_going: session.KeepGoing) -> session.Work:
        """Verifies and loads the model, which has arrived at check-in, and the plan.

        The plan has arrived too, or the device keeps it from an earlier session, or asks for it.
        """
        configuration, self._configuration = self._configuration, wire_pb2.Configuration()
        self._attempt = configuration.attempt
        try:
            loaded = self._load_plan(configuration, keep_going)
            plan = loaded.plan
            self._check_names(plan, configuration.task)
            rule, buckets = _participation(plan)
            self._secure_upload = self._secure_upload_for(plan, configuration)
            broadcast = tensor_values.from_bytes(
                configuration.broadcast, loaded.broadcast, "The model"
            )
            _check_finite(broadcast, loaded.broadcast)
        except signing.PlanRefusedError as error:
            raise session.StepFailed(f"Refused: {error}") from None
        except tensor_values.ValuesError as error:
            raise session.StepFailed(f"The server's model does not fit its plan: {error}") from None
        self.work = session.Work(
            plan.task, configuration.round_index, rule, buckets, (loaded, broadcast)
        )
        return self.work

    def _load_plan(
        self, configuration: wire_pb2.Configuration, keep_going: session.KeepGoing
    ) -> loaded_plans.LoadedPlan:
        """Verifies and loads the plan of a configuration, and keeps one that was asked for."""
        # Loading takes a second or two, and TensorFlow cannot be interrupted.
        if configuration.plan or not self._sends_less:
            return self._plans.load(configuration.plan)
        name = (self._population, configuration.plan_sha256)
        content = self._known.get(*name)
        if content is not None and _hash_in(content) == configuration.plan_sha256:
            with contextlib.suppress(signing.PlanRefusedError):  # A kept plan may be damaged.
                return self._plans.load(content)
        content = self._fetch_plan(configuration.plan_sha256, keep_going)
        loaded = self._plans.load(content)
        self._known.add(*name, content)
        return loaded

    def _fetch_plan(self, sha256: bytes, keep_going: session.KeepGoing) -> bytes:
        from tff_dpftrl.runtime.plans import verification

        self._stream.send(wire_pb2.FromDevice(plan_wanted=wire_pb2.PlanWanted()))
        sent = self._receive("plan", keep_going, seconds=self._connection.patience.upload_s)
        try:
            content = session_stream.inflated_plan(
                sent.deflated, verification.DEFAULT_CEILING.plan_bytes
            )
        except ValueError as error:
            raise signing.PlanRefusedError(str(error)) from None
        if _hash_in(content) != sha256:
            raise signing.PlanRefusedError(
                "The server has sent another plan than the one whose hash it named."
            )
        return content

    def _secure_upload_for(
        self, plan: plan_pb2.DevicePlan, configuration: wire_pb2.Configuration
    ) -> secure_upload.SecureUpload | None:
        """Creates the secure upload that the plan asks for; None if it asks for none."""
        session_name = configuration.secure_sum_session
        if not secure_report.is_asked_for(plan):
            if session_name:
                raise signing.PlanRefusedError(
                    "The server has named the session of a secure sum, and the plan asks for none."
                )
            return None
        if not session_name:
            raise signing.PlanRefusedError(
                "The plan asks for secure aggregation, and the server has named no session for it."
            )
        return self.secure_upload(
            plan,
            session_name,
            context=session_stream.secure_sum_context(
                configuration.task, configuration.round_index, configuration.broadcast
            ),
            attester=self._attester,
            issuers=self._issuers,
            clock=self._clock,
            packs_bits=self._sends_less,
        )

    def secure_upload(self, *args: Any, **options: Any) -> secure_upload.SecureUpload:
        """Creates a `SecureUpload` from its arguments."""
        return secure_upload.SecureUpload(*args, **options)

    @override
    def train(
        self, work: session.Work, keep_going: session.KeepGoing
    ) -> contents.Content | list[np.ndarray]:
        """Computes the update, once; it is serialized unless it is summed securely."""
        from tff_dpftrl.runtime.plans import device_work

        loaded, broadcast = work.plan
        examples = self._select(loaded.plan.selection)
        seed = self._seed_for and self._seed_for(work.task, work.round_index)
        with (
            loaded.borrow(keep_going) as runnable,
            self._connection.watcher.watching(keep_going, runnable.interrupt),
        ):
            try:
                update = runnable.run(examples, broadcast, seed=seed, keeps_broadcast=False)
            except device_work.WorkFailedError as error:
                raise session.StepFailed(str(error)) from None
        if self._secure_upload is not None:
            return update
        if self._sends_less:
            update, self._scales = rounded_updates.rounded(update, loaded.plan.rounded)
        return contents.InMemory(tensor_values.to_parts(update))

    @override
    def upload(
        self,
        update: contents.Content | list[np.ndarray],
        participation: tuple[np.ndarray, np.ndarray] | None,
        keep_going: session.KeepGoing,
    ) -> session.UploadAnswer:
        patience = self._connection.patience
        if self._secure_upload is not None:
            answer = self._secure_upload.run(
                self._stream, update, participation, keep_going, seconds=patience.group_s
            )
        else:
            self._send_report(update, participation)
            answer = self._receive("report_answer", keep_going, seconds=patience.upload_s)
        self._stream.finish()
        return session.UploadAnswer(
            answer.accepted, tuple(answer.turns), server_connection.one_line(answer.reason)
        )

    def _send_report(
        self, update: contents.Content, participation: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        report = wire_pb2.Report(attempt=self._attempt, scales=self._scales)
        if participation is not None:
            strides, times = participation
            report.strides.extend(strides.tolist())
            report.times.extend(times.tolist())
        self._stream.send_each(session_stream.report_messages(report, update.parts()))

    @override
    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _receive(
        self, kinds: str | tuple[str, ...], keep_going: session.KeepGoing, *, seconds: float
    ) -> Any:
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        wanted = kinds[0].replace("_", " ")
        message = self._stream.receive(keep_going, seconds=seconds, wanted=wanted)
        kind = message.WhichOneof("message")
        if kind not in kinds:
            raise session.StepFailed(f"The server has sent a {kind} in place of a {wanted}.")
        return getattr(message, kind)

    def _check_names(self, plan: plan_pb2.DevicePlan, task: str) -> None:
        for name, planned, wanted in (
            ("population", plan.population, self._population),
            ("task", plan.task, task),
        ):
            if planned != wanted:
                raise signing.PlanRefusedError(
                    f"The plan is for the {name} {server_connection.one_line(planned)!r}, and the "
                    f"server sent it for {server_connection.one_line(wanted)!r}."
                )

    def _select(self, selection: plan_pb2.Selection) -> list[bytes]:
        since = None
        if selection.max_age_hours:
            since = self._clock() - selection.max_age_hours * _HOUR_S
        return self._examples.select(
            selection.collection, max_examples=selection.max_examples, recorded_since=since
        )


def _hash_in(content: bytes) -> bytes:
    """Returns the hash in a serialised `SignedPlan`; loading the plan verifies it."""
    try:
        return plan_pb2.SignedPlan.FromString(content).sha256
    except message.DecodeError:
        return b""


def _check_finite(model: Sequence[np.ndarray], tensors: Sequence[plan_pb2.Tensor]) -> None:
    """Refuses a model with NaN or infinite numbers, before it costs a participation."""
    for array, tensor in zip(model, tensors, strict=True):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise tensor_values.ValuesError(
                f"The model, {tensor.label or 'one of its tensors'}, has NaN or infinite numbers."
            )


def _check_round(round_index: int) -> None:
    if round_index > participation_timer.LARGEST_ROUND:
        raise session.StepFailed(
            f"The server has named round {round_index}; none is above "
            f"{participation_timer.LARGEST_ROUND}."
        )


def _participation(
    plan: plan_pb2.DevicePlan,
) -> tuple[participation_timer.ParticipationRule | None, histograms.ParticipationBuckets | None]:
    """Reads the participation limits and histogram buckets of a plan."""
    limits = plan.participation
    if not plan.HasField("participation"):
        if plan.kind == plan_pb2.EVALUATION:
            return None, None
        raise signing.PlanRefusedError("The plan trains and has no participation limits.")
    try:
        buckets = histograms.ParticipationBuckets(
            tuple(limits.stride_edges), tuple(limits.times_edges)
        )
        rule = participation_timer.ParticipationRule(
            limits.min_sep_rounds, buckets.times_edges[-1], limits.min_sep_hours
        )
    except ValueError as error:
        raise signing.PlanRefusedError(
            f"The plan's participation limits are unusable: {error}"
        ) from None
    return rule, buckets
