"""Binding of the gRPC service to a port, over TLS."""

from __future__ import annotations

import grpc

from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.protocol import session_stream
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import service

_SENT_AHEAD = 1 << 16  # Bytes of a stream that are buffered before the server reads them.


class ServerError(RuntimeError):
    """The server cannot start; the message is one line and says what to do."""


def another_leads(population: str) -> ServerError:
    """Makes the error for a population whose lease another server holds."""
    return ServerError(
        f"Another server leads the population {population!r}: two servers for one population are "
        "not possible. Stop that one, or name another store."
    )


def bind(
    devices: service.Service,
    certificate: tls.ServerCertificate,
    address: str,
    limits: limits_lib.Limits,
) -> tuple[grpc.aio.Server, int]:
    """Binds a service to host and port (0: any free one); serves once the gRPC server is started.

    Returns that server and the port; raises `ServerError` if the address cannot be bound.
    """
    keepalive = int(limits.keepalive_seconds * 1000)
    server = grpc.aio.server(
        handlers=[devices.handler()],
        options=[
            ("grpc.so_reuseport", 0),  # Otherwise two servers could share a port by accident.
            ("grpc.max_receive_message_length", devices.largest_message),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 8192),
            # Devices may send a fixed size ahead, not as much as the network can carry.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _SENT_AHEAD),
            ("grpc.keepalive_time_ms", keepalive),
            ("grpc.keepalive_timeout_ms", keepalive),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            (
                "grpc.http2.min_recv_ping_interval_without_data_ms",
                int(session_stream.KEEPALIVE_S * 500),
            ),
        ],
    )
    try:
        credentials = grpc.ssl_server_credentials([(certificate.key, certificate.certificate)])
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise ServerError(
            f"Cannot listen on {address}: another program does, or this is no "
            "address of this machine. Choose another port, or 0 for any."
        )
    return server, port
