"""A device's connection to its server: gRPC over TLS, and never for ever.

Every wait has an end: for an answer that the server owes, for selection, which may take long,
and for what is sent. A connection that has died in silence is noticed by HTTP/2 pings. What
goes wrong is one line in the device's words; the server's are shortened and put in quotes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import ipaddress
import queue
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from cryptography import x509

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import background_loop, session, watcher
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2

_LARGEST_MESSAGE_BYTES = 128_000_000  # A plan and a model, or an update; see `plans.Ceiling`.
# Challenge, configuration, up to four of a secure sum, answer; more would only fill the memory.
_MOST_MESSAGES = 7
_LONGEST_TEXT = 200
_LAST_S = 5.0
# What gRPC says, in place of the server's words, where the server ends while it is written to.
_ENDED_IN_WRITING = "Internal error from Core"


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a device waits for its server, in seconds.

    Attributes:
      answer_s: For an answer that needs no waiting for others.
      selection_s: To be selected, and for plan and model to arrive.
      upload_s: For the report to arrive and be answered.
      group_s: For the others of its group, in each step of a secure sum.
      tell_s: For the summary of a session, which is given up then.
    """

    answer_s: float = 60.0
    selection_s: float = 3600.0
    upload_s: float = 600.0
    group_s: float = 3600.0
    tell_s: float = 10.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            validation.positive(field.name, getattr(self, field.name))


class ServerConnection:
    """A channel to one server, for one session after another, or many at a time.

    Attributes:
      server_name: The host that the server's certificate has to prove.
      patience: How long to wait.
      watcher: What ends the waiting.
    """

    def __init__(
        self,
        address: str,
        root_certificates: bytes,
        *,
        server_name: str | None = None,
        patience: Patience | None = None,
        watcher_: watcher.Watcher | None = None,
        loop: background_loop.BackgroundLoop | None = None,
    ):
        """Connects to nobody yet: that comes with the first session.

        Args:
          address: HOST:PORT.
          root_certificates: PEM of who may prove the server's name, or of the server's own
            certificate.
          server_name: The name to be proven if it is not HOST, as through a tunnel.
          patience: How long to wait.
          watcher_: A watcher to share.
          loop: A loop to share, which is left open; one of its own if None.

        Raises:
          ValueError: If the address is none, or there is no certificate.
        """
        host = _host(address)
        try:
            x509.load_pem_x509_certificates(root_certificates)
        except ValueError:
            raise ValueError(
                "root_certificates holds no certificate in PEM: give the server's certificate, or "
                "that of who signed it."
            ) from None
        self.server_name = server_name or host
        self.patience = Patience() if patience is None else patience
        self.watcher = watcher.Watcher() if watcher_ is None else watcher_
        self._address = address
        self._owns_loop = loop is None
        self._loop = background_loop.BackgroundLoop() if loop is None else loop
        options = [
            ("grpc.max_receive_message_length", _LARGEST_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _LARGEST_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", int(1000 * session_stream.KEEPALIVE_S)),
            ("grpc.http2.max_pings_without_data", 0),
            # A session is not repeated behind its back, and connections are not shared.
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 10_000),
            ("grpc.client_idle_timeout_ms", 60_000),
        ]
        if server_name is not None:
            options.append(("grpc.ssl_target_name_override", server_name))
        if _is_loopback(host):
            options.append(("grpc.enable_http_proxy", 0))
        self._channel = self._loop.submit(
            _channel(address, grpc.ssl_channel_credentials(root_certificates), options)
        ).result()
        self._open = self._channel.stream_stream(
            session_stream.SESSION_METHOD,
            wire_pb2.FromDevice.SerializeToString,
            wire_pb2.FromServer.FromString,
        )
        self._tell = self._channel.unary_unary(
            session_stream.TELL_METHOD,
            wire_pb2.SessionSummary.SerializeToString,
            wire_pb2.Told.FromString,
        )

    def open_stream(self) -> Stream:
        """Begins a session."""
        return Stream(self, self._loop, self._open)

    def tell(
        self, population: str, report: session.SessionReport
    ) -> concurrent.futures.Future[None]:
        """Tells the server how a session went, without waiting for it and whatever comes of it.

        It is a call of its own, but soon after the session and on the same connection: a
        server that wants to can tell which device it is from.

        Args:
          population: Name of the population.
          report: What may be told.

        Returns:
          What can be waited for, for up to `patience.tell_s` seconds.
        """
        summary = wire_pb2.SessionSummary(
            population=population,
            shape=report.shape,
            seconds=report.seconds,
            peak_memory_bytes=report.peak_memory_bytes,
            versions=report.versions,
        )
        return self._loop.submit(self._told(summary))

    def close(self) -> None:
        """Ends the connection, and all sessions that it still has."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._loop.submit(self._channel.close()).result(_LAST_S)
        if self._owns_loop:
            self._loop.close()

    async def _told(self, summary: wire_pb2.SessionSummary) -> None:
        with contextlib.suppress(grpc.RpcError):  # It matters to nobody here.
            await self._tell(summary, timeout=self.patience.tell_s)

    def explain(self, error: grpc.RpcError) -> _End:
        """What to raise in place of gRPC's error.

        Args:
          error: What a call raised.

        Returns:
          What makes an `AttestationFailed` if the server says so, an `EOFError` if it has
          ended the session, or a `StepFailed`.
        """
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == _ENDED_IN_WRITING:
            return EOFError
        kind, text = self._explained(error)
        return functools.partial(kind, text)

    def _explained(self, error: grpc.RpcError) -> tuple[type[Exception], str]:
        code, details = error.code(), one_line(error.details() or "")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            text = f"{self._address} does not accept the token: {details}"
            return session.AttestationFailed, text
        if code is grpc.StatusCode.UNAVAILABLE:
            if "handshake" in (error.details() or "").lower() or "peer name" in details.lower():
                return session.StepFailed, (
                    f"{self._address} does not prove that it is {self.server_name}: {details}. "
                    "Compare its certificate with the one that this device trusts."
                )
            return session.StepFailed, f"{self._address} cannot be reached: {details}"
        name = code.name.lower().replace("_", " ")
        return session.StepFailed, f"{self._address} ended the session ({name}): {details}"


_End: TypeAlias = Callable[[], Exception]


def _ended() -> Exception:
    return session.StepFailed("The session was ended.")


def _sent_too_much() -> Exception:
    return session.StepFailed("The server has sent more messages than a session has.")


class Stream:
    """One session's messages; for one thread."""

    def __init__(
        self,
        connection: ServerConnection,
        loop: background_loop.BackgroundLoop,
        open_: grpc.aio.StreamStreamMultiCallable,
    ):
        """Internal; use `ServerConnection.open_stream`."""
        self._connection, self._loop, self._open = connection, loop, open_
        # Messages, and at last what makes the error that says why there are no more. The error
        # itself would hold, by its traceback, all of the session that holds the stream.
        self._received: queue.SimpleQueue[wire_pb2.FromServer | _End] = queue.SimpleQueue()
        self._call: grpc.aio.StreamStreamCall | None = None
        self._writing = asyncio.Lock()  # Messages go one at a time, in order.
        loop.submit(self._receive_all())

    def send(self, message: wire_pb2.FromDevice) -> None:
        """Sends a message, without waiting for it to arrive."""
        self._loop.submit(self._write(message))

    def receive(
        self, keep_going: session.KeepGoing, *, seconds: float, wanted: str
    ) -> wire_pb2.FromServer:
        """Waits for a message.

        Args:
          keep_going: Asked meanwhile.
          seconds: How long to wait.
          wanted: What is waited for, for messages.

        Returns:
          The message.

        Raises:
          session.StepFailed: If none comes.
          session.AttestationFailed: If the server does not take the device for genuine.
          Exception: What `keep_going` raises.
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
        """Says that there is no more to come, and lets the server end the session in a moment."""
        self._loop.submit(self._write(None))
        with (
            contextlib.suppress(EOFError, session.StepFailed, session.AttestationFailed),
            self._connection.watcher.watching(
                lambda: None, self._cancel, seconds=_LAST_S, too_long="It is over."
            ),
        ):
            self._next()

    def close(self) -> None:
        """Ends the session, if the server has not."""
        self._loop.call(self._cancel_call)

    def _next(self) -> wire_pb2.FromServer:
        received = self._received.get()
        if isinstance(received, wire_pb2.FromServer):
            return received
        self._received.put(received)  # Whoever asks again is told the same.
        raise received()

    def _cancel(self) -> None:
        self._loop.call(self._cancel_call)
        # The loop may be closed, with the connection.
        self._received.put(_ended)

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _receive_all(self) -> None:
        end: _End = EOFError
        try:
            self._call = self._open()
            num_messages = 0
            while (message := await self._call.read()) is not grpc.aio.EOF:
                num_messages += 1
                if num_messages > _MOST_MESSAGES:
                    self._call.cancel()
                    end = _sent_too_much
                    break
                self._received.put(message)
        except grpc.RpcError as error:
            end = self._connection.explain(error)
        except asyncio.CancelledError:
            end = _ended
        except Exception as error:
            text = f"The connection failed: {type(error).__name__}: {error}"
            end = functools.partial(session.StepFailed, text)
        finally:
            self._received.put(end)

    async def _write(self, message: wire_pb2.FromDevice | None) -> None:
        # Who reads learns why the stream has ended.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            async with self._writing:
                await (self._call.done_writing() if message is None else self._call.write(message))


async def _channel(
    address: str, credentials: grpc.ChannelCredentials, options: list[tuple[str, Any]]
) -> grpc.aio.Channel:
    """A channel belongs to the loop that it is made in."""
    return grpc.aio.secure_channel(address, credentials, options)


def one_line(text: str) -> str:
    """What a server says, short and harmless on a terminal."""
    words = " ".join(text.split())
    printable = "".join(c if c.isprintable() else "?" for c in words[: _LONGEST_TEXT + 1])
    return printable if len(printable) <= _LONGEST_TEXT else printable[: _LONGEST_TEXT - 1] + "…"


def _host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16) or "/" in host:
        raise ValueError(f"address must be HOST:PORT, like example.org:443, got {address!r}.")
    return host.removeprefix("[").removesuffix("]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
