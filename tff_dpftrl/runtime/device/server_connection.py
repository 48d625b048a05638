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
import random
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import grpc
from cryptography import x509
from google.protobuf import message as protobuf_message

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import background_loop, session, watcher
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2

_LARGEST_MESSAGE_BYTES = 128_000_000  # A plan and a model, or an update; see `plans.Ceiling`.
# Challenge, configuration, up to four of a secure sum, answer; more would only fill the memory.
_MOST_MESSAGES = 7
_LONGEST_TEXT = 200
_LAST_S = 5.0
_START_S = 60.0  # For a channel; it connects to nobody yet.
_AVOIDED_S = 60.0
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
    """Channels to one server, for one session after another, or many at a time.

    A server on several machines has several addresses, and any of them will do: each session
    takes one at random, and another one if that does not answer.

    Attributes:
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
        look: Callable[[], str] | None = None,
    ):
        """Connects to nobody yet: that comes with the first session.

        Args:
          address: HOST:PORT, or several of them with commas in between.
          root_certificates: PEM of who may prove the server's name, or of the server's own
            certificate.
          server_name: The name to be proven if it is not HOST, as through a tunnel.
          patience: How long to wait.
          watcher_: A watcher to share.
          loop: A loop to share, which is left open; one of its own if None.
          look: Asked before each session for the address as it is now; the last one is kept
            when it raises a ValueError or OSError, as while no server runs. None if the
            address stays.

        Raises:
          ValueError: If the address is none, or there is no certificate.
        """
        self._addresses = _addresses(address)
        try:
            x509.load_pem_x509_certificates(root_certificates)
        except (ValueError, x509.InvalidVersion):
            raise validation.UsageError(
                "root_certificates holds no certificate in PEM: give the server's certificate, or "
                "that of who signed it."
            ) from None
        self.patience = Patience() if patience is None else patience
        self.watcher = watcher.Watcher() if watcher_ is None else watcher_
        self._roots, self._server_name, self._look = root_certificates, server_name, look
        self._owns_loop = loop is None
        self._loop = background_loop.BackgroundLoop() if loop is None else loop
        self._channels: dict[str, _Channel] = {}
        self._opening = threading.Lock()
        self._avoided: dict[str, float] = {}  # Until when, of those that have not answered.
        for one in self._addresses:
            self._channel(one)

    def addresses(self, generator: random.Random) -> list[str]:
        """The server's addresses, in the order in which a session is to try them.

        Args:
          generator: Source of the order; not used where there is one address.

        Returns:
          HOST:PORT of each; those that have not answered lately are the last ones.
        """
        if self._look is not None:
            with contextlib.suppress(ValueError, OSError):
                self._addresses = _addresses(self._look())
        found = list(self._addresses)
        if len(found) > 1:
            generator.shuffle(found)
            now = time.monotonic()
            found.sort(key=lambda address: self._avoided.get(address, now) > now)
        return found

    def avoid(self, address: str) -> None:
        """Has sessions try others before this address, for a minute."""
        self._avoided[address] = time.monotonic() + _AVOIDED_S

    def open_stream(self, address: str | None = None) -> Stream:
        """Begins a session.

        Args:
          address: With which of `addresses`; the first one that was given, if None.
        """
        return Stream(self, self._loop, self._channel(address or self._addresses[0]))

    def tell(
        self, population: str, report: session.SessionReport, address: str | None = None
    ) -> concurrent.futures.Future[None]:
        """Tells the server how a session went, without waiting for it and whatever comes of it.

        It is a call of its own, but soon after the session and on the same connection: a
        server that wants to can tell which device it is from.

        Args:
          population: Name of the population.
          report: What may be told.
          address: Where the session was, which is tried first.

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
        first = address or self._addresses[0]
        others = [other for other in self._addresses if other != first]
        channels = [self._channel(one) for one in [first, *others]]
        return self._loop.submit(self._told(summary, channels))

    def close(self) -> None:
        """Ends the connections, and all sessions that they still have."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._loop.submit(self._close_channels()).result(_LAST_S)
        if self._owns_loop:
            self._loop.close()

    def _channel(self, address: str) -> _Channel:
        with self._opening:
            if address not in self._channels:
                self._channels[address] = self._loop.submit(
                    _new_channel(address, self._roots, self._server_name)
                ).result(_START_S)
            return self._channels[address]

    async def _close_channels(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _told(self, summary: wire_pb2.SessionSummary, channels: list[_Channel]) -> None:
        deadline = asyncio.get_running_loop().time() + self.patience.tell_s
        for channel in channels:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                await channel.tell(summary, timeout=left)
            except grpc.RpcError as error:  # It matters to nobody here.
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    continue
            return


class _Channel:
    """A channel to one address; belongs to the loop that it is made in."""

    def __init__(self, address: str, root_certificates: bytes, server_name: str | None):
        host = _host(address)
        self.address = address
        self.server_name = server_name or host
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
        credentials = grpc.ssl_channel_credentials(root_certificates)
        self._channel = grpc.aio.secure_channel(address, credentials, options)
        self.open = self._channel.stream_stream(
            session_stream.SESSION_METHOD,
            wire_pb2.FromDevice.SerializeToString,
        )  # What comes is read below: of what cannot be read, gRPC would log all it knows.
        self.tell = self._channel.unary_unary(
            session_stream.TELL_METHOD,
            wire_pb2.SessionSummary.SerializeToString,
        )

    async def close(self) -> None:
        await self._channel.close()

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
            text = f"{self.address} does not accept the token: {details}"
            return session.AttestationFailed, text
        if code is grpc.StatusCode.UNAVAILABLE:
            if "handshake" in (error.details() or "").lower() or "peer name" in details.lower():
                return session.StepFailed, (
                    f"{self.address} does not prove that it is {self.server_name}: {details}. "
                    "Compare its certificate with the one that this device trusts."
                )
            return session.StepFailed, f"{self.address} cannot be reached: {details}"
        name = code.name.lower().replace("_", " ")
        return session.StepFailed, f"{self.address} ended the session ({name}): {details}"


async def _new_channel(address: str, root_certificates: bytes, server_name: str | None) -> _Channel:
    return _Channel(address, root_certificates, server_name)


_End: TypeAlias = Callable[[], Exception]


def _ended() -> Exception:
    return session.StepFailed("The session was ended.")


def _unreadable() -> Exception:
    return session.StepFailed("The server has sent a message that cannot be read.")


def _sent_too_much() -> Exception:
    return session.StepFailed("The server has sent more messages than a session has.")


class Stream:
    """One session's messages; for one thread.

    Attributes:
      address: Who it is with.
      server_name: The host that the server's certificate has to prove.
    """

    def __init__(
        self,
        connection: ServerConnection,
        loop: background_loop.BackgroundLoop,
        channel: _Channel,
    ):
        """Internal; use `ServerConnection.open_stream`."""
        self._connection, self._loop, self._channel = connection, loop, channel
        self.address = channel.address
        self.server_name = channel.server_name
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
            self._call = self._channel.open()
            num_messages = 0
            while (content := await self._call.read()) is not grpc.aio.EOF:
                num_messages += 1
                if num_messages > _MOST_MESSAGES:
                    self._call.cancel()
                    end = _sent_too_much
                    break
                self._received.put(wire_pb2.FromServer.FromString(content))
                del content  # Or a model would be held while the next message is waited for.
        except protobuf_message.DecodeError:
            self._call.cancel()
            end = _unreadable
        except grpc.RpcError as error:
            end = self._channel.explain(error)
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


def one_line(text: str) -> str:
    """What a server says, short and harmless on a terminal."""
    words = " ".join(text.split())
    printable = "".join(c if c.isprintable() else "?" for c in words[: _LONGEST_TEXT + 1])
    return printable if len(printable) <= _LONGEST_TEXT else printable[: _LONGEST_TEXT - 1] + "…"


def _addresses(address: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(one.strip() for one in address.split(",")))
    for one in found:
        _host(one)
    return found


def _host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16) or "/" in host:
        raise validation.UsageError(
            f"address must be HOST:PORT, like example.org:443, got {address!r}."
        )
    return host.removeprefix("[").removesuffix("]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
