"""What a server needs besides its store, in one folder: made where it is missing, kept if not.

    certificate.pem        the server's certificate, which devices trust
    private_key.pem        its private key
    attestation_issuer     the private key that makes devices' attestation tokens
    attestation_issuer.pub the public key that the server verifies them with
    plan_keys/*.pub        the public keys of who signed the tasks
    endpoint.json          while a server runs: where devices and the status page find it
    sessions.json          counts of devices' sessions by shape, of no single device
    rounds.json            how many rounds of each task were committed when last looked at

`tff-dpftrl serve` makes all of it, so that devices on the same machine can be tried out
with `--server-folder`. In production the certificate comes from whoever runs the domain,
the issuer is a service that looks at the device before it vouches for it, and devices get
the certificate's authority and the public keys of plans with their software.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime import private_files, signing_keys, tls
from tff_dpftrl.runtime.plans import signing


@dataclasses.dataclass(frozen=True)
class ServerFolder:
    """Paths in the folder.

    Attributes:
      path: The folder.
    """

    path: pathlib.Path

    @property
    def certificate(self) -> pathlib.Path:
        """The server's certificate."""
        return self.path / "certificate.pem"

    @property
    def private_key(self) -> pathlib.Path:
        """Its private key."""
        return self.path / "private_key.pem"

    @property
    def issuer(self) -> pathlib.Path:
        """The private key that makes attestation tokens."""
        return self.path / "attestation_issuer"

    @property
    def issuer_public(self) -> pathlib.Path:
        """The public key that verifies them."""
        return signing_keys.public_path(self.issuer)

    @property
    def sessions(self) -> pathlib.Path:
        """Counts of sessions by shape."""
        return self.path / "sessions.json"

    @property
    def rounds(self) -> pathlib.Path:
        """Numbers of committed rounds."""
        return self.path / "rounds.json"

    @property
    def endpoint(self) -> pathlib.Path:
        """Where a server that runs is found."""
        return self.path / "endpoint.json"

    @property
    def plan_keys(self) -> tuple[pathlib.Path, ...]:
        """The public keys of who signed the tasks."""
        return tuple(sorted((self.path / "plan_keys").glob("*.pub")))

    def make(self, names: Sequence[str], *, certificate: bool = True, issuer: bool = True) -> None:
        """Makes what is missing, for this user only.

        Args:
          names: Names and addresses that devices connect to, for the certificate.
          certificate: Whether a certificate is needed.
          issuer: Whether a key that makes tokens is.

        Raises:
          ValueError: If other users may use the private key that makes tokens.
          OSError: If the folder cannot be written.
        """
        private_files.make_folder(self.path)
        if certificate and not self.certificate.exists():
            self.private_key.unlink(missing_ok=True)  # Of a start that ended in between.
            tls.create_self_signed(self.certificate, self.private_key, names)
        if issuer and self.issuer.exists():
            private_files.check_owner_only(self.issuer)
        elif issuer:
            self.issuer_public.unlink(missing_ok=True)
            signing_keys.create(self.issuer)

    def keep_plan_keys(self, keys: Iterable[ed25519.Ed25519PublicKey]) -> None:
        """Keeps the public keys of tasks, by their names, for devices.

        Args:
          keys: The keys.

        Raises:
          OSError: If the folder cannot be written.
        """
        folder = self.path / "plan_keys"
        folder.mkdir(exist_ok=True)
        for key in keys:
            path = folder / f"{signing.key_name(key).hex()}.pub"
            if not path.exists():
                durable_files.write(path, signing_keys.public_pem(key))

    def keep_rounds(self, done: Mapping[str, tuple[str, int]]) -> None:
        """Keeps how many rounds are committed, for `check_rounds`.

        Args:
          done: The hash of the server's plan and the number of rounds, by task.

        Raises:
          OSError: If the folder cannot be written.
        """
        kept = {**self._known_rounds(), **{task: list(values) for task, values in done.items()}}
        durable_files.write(self.rounds, (json.dumps(kept) + "\n").encode())

    def check_rounds(self, task: str, plan: str, rounds_done: int) -> None:
        """Refuses a store that was set back: its rounds would be released a second time.

        They would have the same noise and other cohorts, so that the difference of the two
        models would have no noise at all.

        Args:
          task: Name of the task.
          plan: Hash of its server's plan.
          rounds_done: The number of committed rounds in the store.

        Raises:
          ValueError: If there were more.
          OSError: If the folder cannot be read.
        """
        known_plan, known = self._known_rounds().get(task, ["", 0])
        if known_plan == plan and rounds_done < known:
            raise validation.UsageError(
                f"The store has {rounds_done} rounds of the task {task!r}, and {known} were "
                "committed and released: it was set back, by a backup for instance. Repeated, its "
                "rounds would have the same noise for other devices, which reveals them. Bring "
                f"the newer store back, or make the task anew; {self.rounds} holds the number."
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
        """Says where the server is found; `remove_endpoint` takes it back.

        Args:
          devices: Host and port of the devices' service; several with commas in between.
          status_page: URL of the status page.

        Raises:
          OSError: If the folder cannot be written.
        """
        found = {"devices": devices, "status_page": status_page}
        durable_files.write(self.endpoint, (json.dumps(found) + "\n").encode())

    def remove_endpoint(self) -> None:
        """Takes `write_endpoint` back."""
        self.endpoint.unlink(missing_ok=True)

    def address(self) -> str:
        """Host and port of the devices' service of a server that runs, or several with commas.

        Raises:
          ValueError: If no server says that it runs, or what it says is damaged.
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
                f"{self.endpoint} does not say where a server is: start the server again."
            ) from None


def of(path: str | os.PathLike[str]) -> ServerFolder:
    """The folder at a path, which need not be there yet."""
    return ServerFolder(pathlib.Path(path))
