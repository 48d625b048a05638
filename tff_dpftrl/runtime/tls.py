"""TLS: certificates of a server, and the gRPC credentials of server and device.

A self-signed certificate, for tests and demonstrations, is its own authority: devices get the
file and trust nothing else. In production, certificate and key come from the domain's operator.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import pathlib
from collections.abc import Sequence

import grpc
from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tff_dpftrl import durable_files, validation
from tff_dpftrl.runtime import addresses, private_files

_VALID_DAYS = 365


@dataclasses.dataclass(frozen=True)
class ServerCertificate:
    """A server's certificate and its private key."""

    certificate: bytes  # Certificate in PEM, followed by those of its authorities, if any.
    key: bytes = dataclasses.field(repr=False)  # Private key in PEM.
    names: tuple[str, ...] = ()  # DNS names and IP addresses; the first names the server.

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Returns those of some names that the certificate does not have."""
        known = set(map(_plain, self.names))
        return [name for name in names if _plain(name) not in known]


def create_self_signed(
    certificate: str | os.PathLike[str],
    key: str | os.PathLike[str],
    names: Sequence[str] = addresses.LOOPBACK_NAMES,
) -> None:
    """Writes a new certificate, valid for a year, and its private key with mode 0600.

    `names` are DNS names and IP addresses to which devices connect.
    """
    for path in (certificate, key):
        if pathlib.Path(path).exists():
            raise validation.UsageError(
                f"{os.fspath(path)} exists already, and devices may trust it: name another "
                "file, or remove this one."
            )
    if not names:
        raise validation.UsageError("names is empty: give the names that devices connect to.")
    private = ec.generate_private_key(ec.SECP256R1())
    try:
        # Devices look at the alternative names; a common name has at most 64 characters.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
    except ValueError as error:
        raise validation.UsageError(
            f"names={list(names)!r} cannot be in a certificate ({error}): give DNS names in ASCII, "
            "or IP addresses."
        ) from error
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # Clocks of devices differ.
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(alternatives, False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(private, hashes.SHA256())
    )
    durable_files.write(
        pathlib.Path(key),
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        private=True,
    )
    durable_files.write(pathlib.Path(certificate), signed.public_bytes(serialization.Encoding.PEM))


def _plain(name: str) -> str:
    """Returns the one way of several to write a name."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def load(certificate: str | os.PathLike[str], key: str | os.PathLike[str]) -> ServerCertificate:
    """Reads a certificate and its private key, and checks that they belong together.

    Both are in PEM; certificates of authorities may follow the first. Only its owner may read the
    key, which is unencrypted. It raises ValueError if a file has other content, or the certificate
    has expired.
    """
    try:
        certificate_pem = pathlib.Path(certificate).read_bytes()
    except FileNotFoundError:
        raise validation.UsageError(
            f"There is no certificate at {certificate}: correct the path."
        ) from None
    key_pem = private_files.read(key)
    try:
        parsed = x509.load_pem_x509_certificates(certificate_pem)[0]
        public, valid_until = parsed.public_key(), parsed.not_valid_after_utc
    except (ValueError, x509.InvalidVersion, exceptions.UnsupportedAlgorithm):
        raise validation.UsageError(f"{certificate} holds no certificate in PEM.") from None
    try:
        private = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
        raise validation.UsageError(f"{key} holds no private key in unencrypted PEM.") from None
    if private.public_key() != public:
        raise validation.UsageError(
            f"{key} is not the key of {certificate}: name the files of one pair."
        )
    if valid_until < datetime.datetime.now(datetime.timezone.utc):
        raise validation.UsageError(
            f"{certificate} was valid until {valid_until:%Y-%m-%d}: devices will not "
            "connect. Renew it."
        )
    return ServerCertificate(certificate_pem, key_pem, _names(parsed, certificate))


def channel_credentials(root_certificates: bytes) -> grpc.ChannelCredentials:
    """Creates the credentials of a device's channels.

    The certificates in PEM are trusted: authorities that may sign the server's certificate, or that
    certificate itself. It raises ValueError if there is none.
    """
    try:
        x509.load_pem_x509_certificates(root_certificates)
    except (ValueError, x509.InvalidVersion):
        raise validation.UsageError(
            "root_certificates holds no certificate in PEM: give the server's certificate, or "
            "that of who signed it."
        ) from None
    return grpc.ssl_channel_credentials(root_certificates)


def _names(certificate: x509.Certificate, path: str | os.PathLike[str]) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        raise validation.UsageError(
            f"{path} names no server (subject alternative name): devices could not check it."
        ) from None
    ip_addresses = (str(address) for address in names.get_values_for_type(x509.IPAddress))
    return (*names.get_values_for_type(x509.DNSName), *ip_addresses)
