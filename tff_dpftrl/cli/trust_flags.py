"""Flags of devices: the server's address, the keys that they trust, and their attestation."""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tff_dpftrl import validation

if TYPE_CHECKING:
    from tff_dpftrl.runtime.device import attester, server_connection
    from tff_dpftrl.runtime.fleet import fleet
    from tff_dpftrl.runtime.plans import approvals


def add_arguments(group: argparse._ArgumentGroup, *, attests: bool = True) -> None:
    """Adds the flags that `Trust` reads; `attests` adds attestation tokens, as of devices."""
    group.add_argument(
        "--server-folder",
        metavar="DIR",
        help="Folder of a server on this machine, as `tff-dpftrl serve` prints it. The server's "
        "address, its certificate and all keys are taken from it, in place of the following flags.",
    )
    group.add_argument(
        "--server-bundle",
        metavar="FILE",
        help="File device_bundle.json of the server's folder, in place of --server, --population, "
        "--server-certificate, --plan-keys and --issuers, which overrule it. It holds no secret.",
    )
    group.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="Address of the server, or several addresses of one server, separated by commas. A "
        "device tries a random one, and another one if it does not answer.",
    )
    group.add_argument(
        "--server-certificate",
        metavar="FILE",
        help="Certificate of the server, or of the authority that signed it, in PEM.",
    )
    group.add_argument(
        "--server-name",
        metavar="HOST",
        help="Host name in the server's certificate. Default: HOST.",
    )
    group.add_argument(
        "--plan-keys",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Public keys of trusted signers of plans: signing_key.pub of a task.",
    )
    if not attests:
        group.set_defaults(attestation_key=None, attestation_chain=None, issuers=[])
        return
    group.add_argument(
        "--attestation-key",
        metavar="FILE",
        help="Private key of the issuer of attestation tokens (attestation_issuer of the server's "
        "folder), for demonstrations only: its owner can pose as any number of devices. With "
        "--attestation-chain, the device's own private key. Default: no token is sent.",
    )
    group.add_argument(
        "--attestation-chain",
        metavar="FILE",
        help="Certificates (PEM) of a platform, for a server with --attestation-roots: the "
        "certificate of --attestation-key, then those of the authorities above it, without the "
        "root. The server sees them: they must be of a large batch of devices, not of this one.",
    )
    group.add_argument(
        "--issuers",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Public keys of issuers of attestation tokens that other devices are checked against, "
        "in tasks that do not trust the server. Default: that of --attestation-key.",
    )


def add_reviewers(parser: argparse._ActionsContainer, what: str) -> None:
    """Adds the flags that `reviewers` reads; `what` is the beginning of the help text."""
    parser.add_argument(
        "--reviewers",
        metavar="FILE",
        help=f"{what} reviewers of this list: public keys in PEM, each after a line with the "
        "reviewer's name. Default: approvals are not asked for.",
    )
    parser.add_argument(
        "--approvals",
        type=int,
        metavar="K",
        help="Number of --reviewers that must have approved. Default: 1.",
    )


def reviewers(args: argparse.Namespace) -> approvals.Reviewers | None:
    """Reads the list of reviewers, at least as many as must approve; None if none are required."""
    from tff_dpftrl.runtime.plans import approvals

    if args.reviewers is None:
        if args.approvals is not None:
            raise validation.UsageError(
                f"--approvals {args.approvals}: name the list of --reviewers, too."
            )
        return None
    return approvals.read_reviewers(args.reviewers, 1 if args.approvals is None else args.approvals)


class Trust:
    """Keys and certificates that devices trust, and the issuer that attests them."""

    def __init__(self, args: argparse.Namespace):
        """Reads all files, so that damaged ones are reported at once."""
        from tff_dpftrl.runtime import server_bundle, signing_keys
        from tff_dpftrl.runtime.protocol import certificate_attestation

        # The address may change, for example when one of a server's machines is lost.
        self._folder = None if args.server else args.server_folder
        bundle = server_bundle.ServerBundle("", "", "", ())
        if args.server_bundle:
            if args.server_folder:
                raise validation.UsageError(
                    "--server-bundle and --server-folder exclude each other."
                )
            bundle = server_bundle.read(args.server_bundle)
        if args.server_folder:
            args = _with_folder(args)
        self._server, self._server_name = args.server or bundle.server, args.server_name
        given = {
            "server": self._server,
            "server_certificate": args.server_certificate or bundle.certificate,
            "plan_keys": args.plan_keys or bundle.plan_keys,
        }
        missing = [f"--{flag.replace('_', '-')}" for flag, value in given.items() if not value]
        problems = []
        if missing:
            problems.append(
                f"{', '.join(missing)} must be given, or --server-folder for a server on this "
                "machine, or --server-bundle."
            )
        if not (args.population or bundle.population):
            problems.append("--population must be given: the population to take part in.")
        if problems:
            raise validation.UsageError(" ".join(problems))
        self._population = bundle.population
        self._roots = bundle.certificate.encode()
        if args.server_certificate:
            self._roots = _read_certificate(args.server_certificate)

        def public_keys(paths, pems):
            if paths:
                return [signing_keys.load_public(path) for path in paths]
            return [signing_keys.parse_public(pem.encode(), args.server_bundle) for pem in pems]

        self.plan_keys = public_keys(args.plan_keys, bundle.plan_keys)
        key = args.attestation_key
        self._certified: tuple[str, str] | None = None
        if args.attestation_chain is not None:
            if key is None:
                raise validation.UsageError(
                    "--attestation-chain: name the private key of its first certificate, too, by "
                    "--attestation-key."
                )
            certificate_attestation.read_device(args.attestation_chain, key)
            self._certified, key = (args.attestation_chain, key), None
        self._issuer_key = None if key is None else signing_keys.load_private(key)
        self.issuers = tuple(public_keys(args.issuers, bundle.issuers))
        if not self.issuers and self._issuer_key is not None:
            self.issuers = (self._issuer_key.public_key(),)

    def populations(self, given: Sequence[str]) -> tuple[str, ...]:
        """Returns the given populations, or that of the bundle."""
        return tuple(given) or (self._population,)

    def connect(self) -> server_connection.ServerConnection:
        """Returns a new connection to the server."""
        from tff_dpftrl.runtime.device import server_connection
        from tff_dpftrl.runtime.server import server_folder

        return server_connection.ServerConnection(
            self._server,
            self._roots,
            server_name=self._server_name,
            current_address=self._folder and server_folder.of(self._folder).address,
        )

    def for_fleet(self) -> fleet.ConnectionSettings:
        """Returns the description of a connection for a fleet, which may have several processes."""
        from tff_dpftrl.runtime import signing_keys
        from tff_dpftrl.runtime.fleet import fleet

        return fleet.ConnectionSettings(
            self._server,
            self._roots,
            tuple(map(signing_keys.raw, self.plan_keys)),
            None if self._issuer_key is None else self._issuer_key.private_bytes_raw(),
            self._server_name,
            tuple(map(signing_keys.raw, self.issuers)),
            self._folder,
            self._certified,
        )

    def attester(self) -> attester.Attester:
        """Returns the issuer of a device's attestation tokens."""
        from tff_dpftrl.runtime.device import attester
        from tff_dpftrl.runtime.protocol import attestation

        if self._certified is not None:
            return attester.CertificateAttester(*self._certified)
        if self._issuer_key is None:
            return attester.NoAttester()
        return attester.IssuingAttester(attestation.TokenIssuer(self._issuer_key, clock=time.time))


def _read_certificate(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise validation.UsageError(
            f"--server-certificate {path} cannot be read: {error.strerror}."
        ) from None


def _with_folder(args: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments, with values from the server's folder where a flag is not given."""
    from tff_dpftrl.runtime.server import server_folder

    folder = server_folder.of(args.server_folder)
    filled = argparse.Namespace(**vars(args))
    filled.server = args.server or folder.address()
    filled.server_certificate = args.server_certificate or folder.certificate
    filled.plan_keys = args.plan_keys or folder.plan_keys
    is_issuer = args.attestation_key is None and args.attestation_chain is None
    if is_issuer and folder.issuer.exists():
        filled.attestation_key = folder.issuer
    return filled
