"""A server of the wire for tests, which does what a script says, and its certificate."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import ipaddress

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2

ISSUER_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


def certificate(*names):
    """A key and a certificate of its own, both PEM; names may be addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([*map(_general_name, names)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, made.public_bytes(serialization.Encoding.PEM)


def _general_name(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Session:
    """The server's side of one session."""

    def __init__(self, server, requests, context):
        self.server, self.context = server, context
        self._requests = requests

    def next_message(self):
        return next(self._requests)

    def receive(self, kind):
        """The next message, which must be of a kind."""
        message = self.next_message()
        assert message.WhichOneof("message") == kind
        return getattr(message, kind)

    def check_in(self):
        """Challenges and receives; yields what to send, and returns the check-in."""
        challenge = attestation.new_challenge()
        yield challenge_of(challenge)
        check_in = self.receive("check_in")
        nonce = session_stream.attested_nonce(challenge, "127.0.0.1", check_in.population)
        verdict = self.server.tokens.verify(check_in.token, nonce)
        if verdict is not attestation.Verdict.GENUINE:
            self.context.abort(grpc.StatusCode.UNAUTHENTICATED, verdict.value)
        return check_in


def challenge_of(challenge=b"c" * 32, versions=session_stream.VERSIONS, **opening):
    return wire_pb2.FromServer(
        challenge=wire_pb2.Challenge(challenge=challenge, protocol_versions=versions, **opening)
    )


def come_back(*turns, reason="enough devices", finished=False):
    answer = wire_pb2.ComeBack(turns=turns, reason=reason, finished=finished)
    return wire_pb2.FromServer(come_back=answer)


def configuration(**fields):
    return wire_pb2.FromServer(configuration=wire_pb2.Configuration(**fields))


def answer(accepted=True, *turns, reason=""):
    return wire_pb2.FromServer(
        report_answer=wire_pb2.ReportAnswer(accepted=accepted, turns=turns, reason=reason)
    )


class WireServer:
    """Runs `script`, a generator of messages for a `Session`, for every session."""

    def __init__(self, clock, names=("127.0.0.1",), identity=None):
        self.script = None
        self.told = []
        self.tokens = attestation.SignedTokens([ISSUER_KEY.public_key()], clock=clock)
        private, self.root_certificates = identity or certificate(*names)
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        handlers = {
            session_stream.SESSION_METHOD: grpc.stream_stream_rpc_method_handler(
                self._session, wire_pb2.FromDevice.FromString, wire_pb2.FromServer.SerializeToString
            ),
            session_stream.TELL_METHOD: grpc.unary_unary_rpc_method_handler(
                self._tell, wire_pb2.SessionSummary.FromString, wire_pb2.Told.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers([_Handlers(handlers)])
        credentials = grpc.ssl_server_credentials([(private, self.root_certificates)])
        self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self):
        """Ends at once, sessions included."""
        self._server.stop(grace=0).wait()

    def _session(self, requests, context):
        with contextlib.suppress(StopIteration):  # The device has gone.
            yield from self.script(Session(self, requests, context))

    def _tell(self, summary, context):
        del context
        self.told.append(summary)
        return wire_pb2.Told()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers):
        self._handlers = handlers

    def service(self, handler_call_details):
        return self._handlers.get(handler_call_details.method)
