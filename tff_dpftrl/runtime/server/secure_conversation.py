"""The conversation that takes the place of a report where a task is summed securely.

The device sends the first message, then each side in turn (`wire.proto`). A device that sends
more, or something else, ends its session. The group's Aggregator reads the messages' contents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from tff_dpftrl.runtime.actors import messages
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import received, served_task
from tff_dpftrl.runtime.server.session import Session

_KEYS, _VECTOR = 0, 2  # Steps in which a device sends its keys, and its masked vector.
_NOISE = 1  # Step in which a noise party sends its masked vector.

Answer: TypeAlias = messages.ReportAccepted | messages.ReportRefused


def most_bytes(task: served_task.ServedTask) -> int:
    """Computes the largest size in bytes of a message with a share for each other device.

    It is 0 if the task's reports are in the clear.
    """
    secure_sum = task.task.secure_sum
    if secure_sum is None:
        return 0
    return limits_lib.PEER_BYTES * (secure_sum.least_neighbours or task.task.rounds.wanted)


class SecureConversation:
    """Conversation with one device, up to the answer to its report; it counts the bytes."""

    def __init__(
        self,
        session: Session,
        context: grpc.aio.ServicerContext,
        task: served_task.ServedTask,
        attempt: str,
        *,
        deliver: Callable[[str, Any], None],
        receiving: limits_lib.Room,
        transfer_ends: Callable[[], float],
        first: Any,
    ):
        """Begins with an untrusted message that was read already.

        `deliver` puts a message into the mailbox of an actor's address. `transfer_ends` returns the
        deadline of a transfer that begins now, in seconds of the event loop's clock.
        """
        self.num_bytes = self.num_bytes_sent = 0
        self._first: Any = first
        self._session, self._context, self._attempt = session, context, attempt
        self._deliver, self._receiving = deliver, receiving
        self._transfer_ends = transfer_ends
        self._vector_step = _NOISE if session.is_noise_party else _VECTOR
        self._of_peers = limits_lib.MESSAGE_MARGIN_BYTES + most_bytes(task)
        self._of_vector = limits_lib.MESSAGE_MARGIN_BYTES + task.largest_report_bytes

    async def take(self) -> Answer:
        """Passes messages on, in both directions, and returns the answer to the report.

        It raises `Refused` if the device sends something else.
        """
        for step in itertools.count():
            answer = await self._step(step)
            if not isinstance(answer, messages.SecureSumAnswer):
                return answer
            sent = wire_pb2.FromServer(secure_sum=answer.content).SerializeToString()
            self.num_bytes_sent += len(sent)
            await self._session.write(self._context, sent)
        raise AssertionError  # Steps do not end.

    async def _step(self, step: int) -> messages.SecureSumAnswer | Answer:
        raw, self._first = self._first, b""
        if step:
            raw = await self._context.read()
        if self._session.has_mail:  # The group went on without this message.
            return await self._session.next_message()
        kinds = ("secure_sum", "report", *(("update_part",) if step == self._vector_step else ()))
        message = received.parse(raw, kinds, self._limit(step))
        self.num_bytes += len(raw)
        match message.WhichOneof("message"):
            case "secure_sum":
                self._pass_on(step, message.secure_sum)
            case "update_part":
                await self._take_parts(step, message.update_part)
            case _:  # A report in the clear, which is refused unread.
                report = messages.Report(self._session.address, self._attempt, None)
                self._deliver(self._session.report_to, report)
        del raw, message
        return await self._answer(step)

    def _limit(self, step: int) -> int:
        if step == _KEYS:
            return limits_lib.MESSAGE_MARGIN_BYTES
        return self._of_vector if step == self._vector_step else self._of_peers

    def _pass_on(self, step: int, content: bytes, vector: bytes | bytearray = b"") -> None:
        address = self._session.address
        self._deliver(
            self._session.report_to,
            messages.SecureSumMessage(address, self._attempt, step, content, vector),
        )

    async def _take_parts(self, step: int, first: bytes) -> None:
        """Reads a vector in parts, and gives its room back when it is in the sum."""
        if len(first) > session_stream.FIRST_PART_BYTES:
            raise received.too_large("first part", session_stream.FIRST_PART_BYTES)
        session, ends = self._session, self._session.deadline
        await self._receiving.take(self._of_vector)
        try:
            session.deadline = min(ends, self._transfer_ends())
            last, vector = await received.read_parts(
                self._context, first, self._of_vector, "secure_sum"
            )
            self.num_bytes += len(vector)
            self._pass_on(step, last.secure_sum, vector)
            del last, vector
            await session.until_mail()
        finally:
            session.deadline = ends
            self._receiving.give_back(self._of_vector)

    async def _answer(self, step: int) -> messages.SecureSumAnswer | Answer:
        while True:
            answer = await self._session.next_message()
            is_old = type(answer) is messages.SecureSumAnswer and answer.step != step
            if not is_old and type(answer) is not messages.VectorAdded:
                return answer
