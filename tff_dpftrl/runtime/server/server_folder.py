"""A server's folder: all files that it needs besides its store, made where they are missing.

    certificate.pem        the server's certificate, which devices trust
    private_key.pem        its private key
    attestation_issuer     the private key that makes devices' attestation tokens
    attestation_issuer.pub the public key that the server verifies them with
    plan_keys/*.pub        the public keys with which tasks were signed
    device_bundle.json     what devices have to know of the server, all of it public
    endpoint.json          while a server runs: addresses of its service and its status page
    sessions.json          counts of devices' sessions by shape, of no single device; of further
                           populations in sessions-*.json
    day_curve-*.json       counts of a population's check-ins by hour of the day
    rounds.json            how many rounds of each task were committed when last looked at

`tff-dpftrl serve` makes all of them, so that devices on the same machine can be tried out with
`--server-folder`. In production, the certificate comes from the domain's operator, and the issuer
is a service that checks a device before it vouches for it. Devices get the certificate's authority
and the public keys of plans with their software.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime import addresses, private_files, signing_keys, tls
from tff_dpftrl.runtime.plans import signing


@dataclasses.dataclass(frozen=True)
class ServerFolder:
    """Folder of a server, and the paths of its files."""

    path: pathlib.Path

    @property
    def certificate(self) -> pathlib.Path:
        """Path of the server's certificate."""
        return self.path / "certificate.pem"

    @property
    def private_key(self) -> pathlib.Path:
        """Path of the certificate's private key."""
        return self.path / "private_key.pem"

    @property
    def issuer(self) -> pathlib.Path:
        """Path of the private key that makes attestation tokens."""
        return self.path / "attestation_issuer"

    @property
    def issuer_public(self) -> pathlib.Path:
        """Path of the public key that verifies attestation tokens."""
        return signing_keys.public_path(self.issuer)

    @property
    def sessions(self) -> pathlib.Path:
        """Path of the counts of sessions by shape, of a server of one population."""
        return self.path / "sessions.json"

    def sessions_of(self, population: str) -> pathlib.Path:
        """Returns the path of these counts of one of a server's populations."""
        return self.path / f"sessions-{population.encode().hex()}.json"

    def day_curve_of(self, population: str) -> pathlib.Path:
        """Returns the path of the learned curve of the day of a population."""
        return self.path / f"day_curve-{population.encode().hex()}.json"

    @property
    def rounds(self) -> pathlib.Path:
        """Path of the numbers of committed rounds."""
        return self.path / "rounds.json"

    @property
    def bundle(self) -> pathlib.Path:
        """Path of the file that devices on other machines need."""
        return self.path / "device_bundle.json"

    @property
    def endpoint(self) -> pathlib.Path:
        """Path of the addresses of a running server."""
        return self.path / "endpoint.json"

    @property
    def plan_keys(self) -> tuple[pathlib.Path, ...]:
        """Paths of the public keys with which tasks were signed."""
        return tuple(sorted((self.path / "plan_keys").glob("*.pub")))

    def make(
        self, names: Sequence[str] | None, *, certificate: bool = True, issuer: bool = True
    ) -> None:
        """Makes the missing files, for this user only.

        `names` are the names and addresses that devices connect to, all of them in the certificate.
        None: those of a certificate that is there, or loopback in a new one. It raises ValueError
        if a certificate that is there lacks a name, or other users may use the private key that
        makes tokens.
        """
        if certificate and self.certificate.exists():
            self._check_names(names or ())
        private_files.make_folder(self.path)
        if certificate and not self.certificate.exists():
            self.private_key.unlink(missing_ok=True)  # Left by an interrupted start.
            names = addresses.LOOPBACK_NAMES if names is None else names
            tls.create_self_signed(self.certificate, self.private_key, names)
        if issuer and self.issuer.exists():
            private_files.check_owner_only(self.issuer)
        elif issuer:
            self.issuer_public.unlink(missing_ok=True)
            signing_keys.create(self.issuer)

    def _check_names(self, names: Sequence[str]) -> None:
        """Refuses names that the certificate lacks: devices that use them could not connect."""
        made = tls.load(self.certificate, self.private_key)
        if missing := made.lacks(names):
            raise validation.UsageError(
                f"names has {missing}, and {self.certificate} was made for {list(made.names)}: "
                "leave these names out, or remove that file for a new certificate, which devices "
                "on other machines have to be given."
            )

    def keep_plan_keys(self, keys: Iterable[ed25519.Ed25519PublicKey]) -> None:
        """Writes the public keys of tasks for devices, named by their hashes."""
        folder = self.path / "plan_keys"
        folder.mkdir(exist_ok=True)
        for key in keys:
            path = folder / f"{signing.key_name(key).hex()}.pub"
            if not path.exists():
                durable_files.write(path, signing_keys.public_pem(key))

    def keep_rounds(self, done: Mapping[str, tuple[str, int]]) -> None:
        """Records how many rounds are committed, for `check_rounds`.

        `done` has the hash of the server's plan and the number, by "population/task".
        """
        kept = {**self._known_rounds(), **{task: list(values) for task, values in done.items()}}
        durable_files.write(self.rounds, (json.dumps(kept) + "\n").encode())

    def check_rounds(self, population: str, task: str, plan: str, rounds_done: int) -> None:
        """Refuses a store that was set back: its rounds would be released a second time.

        What both times show together costs more privacy than the task's statement says. It raises
        ValueError if more rounds of the plan (a hash) are recorded than the store has.
        """
        recorded = self._known_rounds()  # Before there were populations, by task only.
        known_plan, known = recorded.get(f"{population}/{task}", recorded.get(task, ["", 0]))
        if known_plan == plan and rounds_done < known:
            raise validation.UsageError(
                f"The store has {rounds_done} rounds of the task {task!r}, and {known} were "
                "committed and released: it was set back, by a backup for instance. Rounds that "
                "are made twice cost privacy that no statement counts; those of a task of version "
                "0.4 have the same noise, and reveal sums. Bring the newer store back, "
                f"or make the task anew; {self.rounds} holds the number."
            )

    def _known_rounds(self) -> dict[str, list]:
        try:
            known = json_text.parse(self.rounds.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            known = None
        if not isinstance(known, dict) or not all(
            isinstance(one, list) and list(map(type, one)) == [str, int] for one in known.values()
        ):
            raise validation.UsageError(
                f"{self.rounds} is damaged: it held how many rounds were released. Remove it if "
                "the store was not set back."
            )
        return known

    def write_endpoint(self, devices: str, status_page: str) -> None:
        """Writes the addresses of the running server; `remove_endpoint` removes them.

        Several HOST:PORT of the devices' service are separated by commas.
        """
        written = {"devices": devices, "status_page": status_page}
        durable_files.write(self.endpoint, (json.dumps(written) + "\n").encode())

    def remove_endpoint(self) -> None:
        """Removes the file that `write_endpoint` wrote."""
        self.endpoint.unlink(missing_ok=True)

    def address(self) -> str:
        """Reads host and port of a running server's service; several are separated by commas.

        It raises ValueError if no server runs with the folder.
        """
        try:
            return str(json_text.parse(self.endpoint.read_text(encoding="utf-8"))["devices"])
        except FileNotFoundError:
            raise validation.UsageError(
                f"No server runs with the folder {self.path}: start one with tff-dpftrl serve, or "
                "name another folder or --server."
            ) from None
        except (ValueError, TypeError, KeyError):
            raise validation.UsageError(
                f"{self.endpoint} holds no address of a server: start the server again."
            ) from None


def of(path: str | os.PathLike[str]) -> ServerFolder:
    """Returns the server's folder at a path, which need not exist yet."""
    return ServerFolder(pathlib.Path(path))
