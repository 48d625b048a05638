"""A device's connection to its server: gRPC over TLS, with a timeout for every wait.

There are timeouts for an answer of the server, for selection, which may take long, and for
sending. HTTP/2 pings detect a connection that has died silently. An error is one line; text of
the server in it is shortened and made printable.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import grpc
from google.protobuf import message as protobuf_message

from tff_dpftrl import validation
from tff_dpftrl.runtime import addresses, tls
from tff_dpftrl.runtime.device import background_loop, session, watcher
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2

_MAX_MESSAGE_BYTES = 128_000_000  # A plan and a model, or an update; see `plans.Ceiling`.
# Challenge, configuration, plan, up to four of a secure sum, answer; more would fill the memory.
_MAX_MESSAGES = 8
_MAX_TEXT = 200
_CLOSE_S = 5.0
_CHANNEL_S = 60.0  # Time to create a channel, which does not connect yet.
_AVOIDED_S = 60.0
# gRPC's error details if the server ends the stream while the device writes to it.
_ENDED_IN_WRITING = "Internal error from Core"
# Parts of gRPC's messages, in lower case, where a server does not prove its name.
_UNPROVEN = ("handshake", "peer name", "hostname verification")


@dataclasses.dataclass(frozen=True)
class Patience:
    """Timeouts of a device, in seconds."""

    answer_s: float = 60.0  # Timeout of an answer for which the server waits for no other device.
    selection_s: float = 3600.0  # Selection, including the transfer of plan and model.
    upload_s: float = 600.0  # Timeout of the report's transfer and its answer.
    group_s: float = 3600.0  # Each step of a secure sum, in which the server waits for a group.
    summary_s: float = 10.0  # Timeout of the delivery of a session summary.

    def __post_init__(self):
        for field in dataclasses.fields(self):
            validation.positive(field.name, getattr(self, field.name))


class ServerConnection:
    """Channels to one server, which any number of sessions share.

    A server on several machines has several equivalent addresses: each session takes one at random,
    and another one if that does not answer.
    """

    def __init__(
        self,
        address: str,
        root_certificates: bytes,
        *,
        server_name: str | None = None,
        patience: Patience | None = None,
        shared_watcher: watcher.Watcher | None = None,
        loop: background_loop.BackgroundLoop | None = None,
        current_address: Callable[[], str] | None = None,
    ):
        """Creates the channels, which connect with their first session.

        `address` is HOST:PORT, or several of them separated by commas. `root_certificates` are
        trusted: authorities that may sign the server's certificate, or that certificate itself, in
        PEM. `server_name` is the name in the certificate if it is not HOST, such as through a
        tunnel. Watcher and event loop may be shared; a shared loop is left open. `current_address`
        returns the server's address before each session; if it raises ValueError or OSError, the
        last address is kept.
        """
        self._addresses = _split(address)
        self._credentials = tls.channel_credentials(root_certificates)
        self.patience = Patience() if patience is None else patience
        self.watcher = watcher.Watcher() if shared_watcher is None else shared_watcher
        self._server_name, self._current_address = server_name, current_address
        self._owns_loop = loop is None
        self._loop = background_loop.BackgroundLoop() if loop is None else loop
        self._channels: dict[str, _Channel] = {}
        self._opening = threading.Lock()
        self._avoided: dict[str, float] = {}  # End of the time in which an address is avoided.
        for one in self._addresses:
            self._channel(one)

    def addresses(self, generator: random.Random) -> list[str]:
        """Returns the addresses in the order to try them; those that did not answer come last."""
        if self._current_address is not None:
            with contextlib.suppress(ValueError, OSError):
                self._addresses = _split(self._current_address())
        ordered = list(self._addresses)
        if len(ordered) > 1:
            generator.shuffle(ordered)
            now = time.monotonic()
            ordered.sort(key=lambda address: self._avoided.get(address, now) > now)
        return ordered

    def avoid(self, address: str) -> None:
        """Makes sessions try other addresses before this one, for a minute."""
        self._avoided[address] = time.monotonic() + _AVOIDED_S

    def open_stream(self, address: str | None = None, population: str = "") -> Stream:
        """Opens the stream of a session, to the first configured address if `address` is None."""
        channel = self._channel(address or self._addresses[0])
        return Stream(self, self._loop, channel, population)

    def send_summary(
        self, population: str, report: session.SessionReport, address: str | None = None
    ) -> concurrent.futures.Future[None]:
        """Sends the summary of a session in the background; errors are ignored.

        It is a separate call, but soon after the session and on the same connection: a server that
        wants to can link it to the device. The report has nothing that must stay on the device. The
        future is done after at most `patience.summary_s` seconds.
        """
        summary = wire_pb2.SessionSummary(
            population=population,
            shape=report.shape,
            seconds=report.seconds,
            peak_memory_bytes=report.peak_memory_bytes,
            versions=report.versions,
        )
        first = address or self._addresses[0]
        others = [other for other in self._addresses if other != first]
        channels = [self._channel(one) for one in [first, *others]]
        return self._loop.submit(self._send_summary(summary, channels))

    def close(self) -> None:
        """Closes the channels and ends their sessions."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._loop.submit(self._close_channels()).result(_CLOSE_S)
        if self._owns_loop:
            self._loop.close()

    def _channel(self, address: str) -> _Channel:
        with self._opening:
            if address not in self._channels:
                self._channels[address] = self._loop.submit(
                    _new_channel(address, self._credentials, self._server_name)
                ).result(_CHANNEL_S)
            return self._channels[address]

    async def _close_channels(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _send_summary(
        self, summary: wire_pb2.SessionSummary, channels: list[_Channel]
    ) -> None:
        deadline = asyncio.get_running_loop().time() + self.patience.summary_s
        for channel in channels:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                await channel.send_summary(summary, timeout=left)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    continue
            return


class _Channel:
    """Channel to one address; to be used on the loop on which it is created."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials, server_name: str | None):
        host, _ = addresses.split(address)
        self.address = address
        self.server_name = server_name or host
        options = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", int(1000 * session_stream.KEEPALIVE_S)),
            ("grpc.http2.max_pings_without_data", 0),
            # gRPC must not retry a session, nor share connections between channels.
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 10_000),
            ("grpc.client_idle_timeout_ms", 60_000),
        ]
        if server_name is not None:
            options.append(("grpc.ssl_target_name_override", server_name))
        if addresses.is_loopback(host):
            options.append(("grpc.enable_http_proxy", 0))
        self._channel = grpc.aio.secure_channel(address, credentials, options)
        self.open = self._channel.stream_stream(
            session_stream.SESSION_METHOD,
            wire_pb2.FromDevice.SerializeToString,
        )  # Answers are parsed below: gRPC would log the content of an answer it cannot parse.
        self.send_summary = self._channel.unary_unary(
            session_stream.TELL_METHOD,
            wire_pb2.SessionSummary.SerializeToString,
        )

    async def close(self) -> None:
        await self._channel.close()

    def explain(self, error: grpc.RpcError) -> _End:
        """Translates an error of gRPC into a factory of the exception to raise.

        That is `AttestationFailed` if the server refused the token, `EOFError` if it ended the
        session, otherwise `StepFailed`.
        """
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == _ENDED_IN_WRITING:
            return EOFError
        kind, text = self._explained(error)
        return functools.partial(kind, text)

    def _explained(self, error: grpc.RpcError) -> tuple[type[Exception], str]:
        code, details = error.code(), one_line(error.details() or "")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            text = f"{self.address} does not accept the token: {details}"
            return session.AttestationFailed, text
        if code is grpc.StatusCode.UNAVAILABLE:
            if any(sign in (error.details() or "").lower() for sign in _UNPROVEN):
                return session.StepFailed, (
                    f"{self.address} does not prove that it is {self.server_name}: {details}. "
                    "Compare its certificate with the one that this device trusts."
                )
            return session.StepFailed, f"{self.address} cannot be reached: {details}"
        name = code.name.lower().replace("_", " ")
        return session.StepFailed, f"{self.address} ended the session ({name}): {details}"


async def _new_channel(
    address: str, credentials: grpc.ChannelCredentials, server_name: str | None
) -> _Channel:
    return _Channel(address, credentials, server_name)


_End: TypeAlias = Callable[[], Exception]


def _ended() -> Exception:
    return session.StepFailed("The session was ended.")


class Stream:
    """The message stream of one session, for one thread.

    The server's certificate has to prove the host name `server_name`.
    """

    def __init__(
        self,
        connection: ServerConnection,
        loop: background_loop.BackgroundLoop,
        channel: _Channel,
        population: str,
    ):
        """Internal; use `ServerConnection.open_stream`."""
        self._metadata = ((session_stream.POPULATION_KEY, population.encode()),)
        self._connection, self._loop, self._channel = connection, loop, channel
        self.address = channel.address
        self.server_name = channel.server_name
        # Messages, and at last the factory of the error that ended the stream. The error itself
        # would reference, by its traceback, the session and so this stream.
        self._received: queue.SimpleQueue[wire_pb2.FromServer | _End] = queue.SimpleQueue()
        self._call: grpc.aio.StreamStreamCall | None = None
        self._writing = asyncio.Lock()  # Messages go one at a time, in order.
        loop.submit(self._receive_all())

    def send(self, message: wire_pb2.FromDevice) -> None:
        """Sends a message without waiting for its delivery."""
        self._loop.submit(self._write(message))

    def send_each(self, messages: Iterable[wire_pb2.FromDevice]) -> None:
        """Sends messages without waiting; each is made when the connection has taken the last."""
        self._loop.submit(self._write_each(messages))

    def receive(
        self, keep_going: session.KeepGoing, *, seconds: float, wanted: str
    ) -> wire_pb2.FromServer:
        """Waits for an untrusted message; error messages call it `wanted`.

        `keep_going` is called while waiting; it raises to end the waiting. It raises `StepFailed`
        if no message comes in `seconds`, and `AttestationFailed` if the server does not accept the
        device as genuine.
        """
        too_long = f"The server has not sent the {wanted} in {seconds:g} s."
        with self._connection.watcher.watching(
            keep_going, self._cancel, seconds=seconds, too_long=too_long
        ):
            try:
                return self._next()
            except EOFError:
                raise session.StepFailed(
                    f"The server ended the session without sending the {wanted}."
                ) from None

    def finish(self) -> None:
        """Half-closes the stream, and waits briefly for the server to end the session."""
        self._loop.submit(self._write(None))
        with (
            contextlib.suppress(EOFError, session.StepFailed, session.AttestationFailed),
            self._connection.watcher.watching(
                lambda: None, self._cancel, seconds=_CLOSE_S, too_long="The server did not end it."
            ),
        ):
            self._next()

    def close(self) -> None:
        """Cancels the session, unless the server has ended it."""
        self._loop.call(self._cancel_call)

    def _next(self) -> wire_pb2.FromServer:
        received = self._received.get()
        if isinstance(received, wire_pb2.FromServer):
            return received
        self._received.put(received)  # A further call raises the same error.
        raise received()

    def _cancel(self) -> None:
        self._loop.call(self._cancel_call)
        # Wakes the reader even if the loop is closed.
        self._received.put(_ended)

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _receive_all(self) -> None:
        end: _End = EOFError
        try:
            self._call = self._channel.open(metadata=self._metadata)
            num_messages = 0
            while (content := await self._call.read()) is not grpc.aio.EOF:
                num_messages += 1
                if num_messages > _MAX_MESSAGES:
                    self._call.cancel()
                    text = "The server has sent more messages than a session has."
                    end = functools.partial(session.StepFailed, text)
                    break
                self._received.put(wire_pb2.FromServer.FromString(content))
                del content  # Frees a model while the next message is awaited.
        except protobuf_message.DecodeError:
            self._call.cancel()
            text = "The server has sent a message that cannot be read."
            end = functools.partial(session.StepFailed, text)
        except grpc.RpcError as error:
            end = self._channel.explain(error)
        except asyncio.CancelledError:
            end = _ended
        except Exception as error:
            text = f"The connection failed: {type(error).__name__}: {error}"
            end = functools.partial(session.StepFailed, text)
        finally:
            self._received.put(end)

    async def _write_each(self, messages: Iterable[wire_pb2.FromDevice]) -> None:
        for message in messages:
            if not await self._write(message):
                return

    async def _write(self, message: wire_pb2.FromDevice | None) -> bool:
        """Writes a message, or half-closes the stream; returns whether the stream took it."""
        # The reader gets the error that ended the stream.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            async with self._writing:
                await (self._call.done_writing() if message is None else self._call.write(message))
                return True
        return False


def one_line(text: str) -> str:
    """Shortens a text of the server and makes it printable on a terminal."""
    words = " ".join(text.split())
    printable = "".join(c if c.isprintable() else "?" for c in words[: _MAX_TEXT + 1])
    return printable if len(printable) <= _MAX_TEXT else printable[: _MAX_TEXT - 1] + "…"


def _split(address: str) -> tuple[str, ...]:
    """Splits a list of addresses, and checks each of them."""
    each = tuple(dict.fromkeys(one.strip() for one in address.split(",")))
    for one in each:
        addresses.split(one)
    return each
