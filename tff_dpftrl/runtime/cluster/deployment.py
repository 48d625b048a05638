"""The description of a server on many machines, which every host gets; it has no secrets."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import factory
from tff_dpftrl.runtime.addresses import DEFAULT_ADDRESS
from tff_dpftrl.runtime.cluster import placement as placement_lib
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import served_population
from tff_dpftrl.runtime.store import database


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the server that a host needs.

    Attributes:
      populations: Populations that are served; the store must have their tasks.
      attestation: Verifier of devices' tokens; None to accept every client as a device.
      limits: Resource limits for the devices of one Selector.
      server_names: Names by which devices may know the server; those in the certificate if
        empty.
      actor_factory: Class that builds the actors.
    """

    populations: Sequence[served_population.ServedPopulation]
    attestation: attestation_lib.Attestation | None = None
    limits: limits_lib.Limits = dataclasses.field(default_factory=limits_lib.Limits)
    server_names: tuple[str, ...] = ()
    actor_factory: type[factory.ActorFactory] = factory.ActorFactory


@dataclasses.dataclass(frozen=True)
class ClusterDeployment:
    """A server on many machines. It is sent unencrypted and must have no secrets.

    Attributes:
      populations: Names of the populations.
      builder: Function from the deployment to its `Parts`, which every host calls; or the name
        of such a function, like "package.module:function".
      store: Store of leases and commits: a database URL without a password, or a folder if all
        nodes are one machine. It must have the tasks.
      certificate: Path of the server's certificate. Like all files, it must be on every node.
      private_key: Path of the certificate's private key.
      addresses: HOST:PORT for devices, one for each Selector. Port 0 is any free port, and the
        host 0.0.0.0 stands for the node's address.
      num_workers: Number of processes that sum reports.
      files: Further files and folders that the builder needs.
      options: Further arguments of the builder, small and picklable.
      answer_seconds: Seconds after which a host that does not answer is restarted.
    """

    populations: tuple[str, ...]
    builder: Callable[[ClusterDeployment], Parts] | str
    store: str
    certificate: str
    private_key: str
    addresses: tuple[str, ...] = (DEFAULT_ADDRESS, DEFAULT_ADDRESS)
    num_workers: int = 2
    files: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    answer_seconds: float = 30.0

    def __post_init__(self):
        validation.positive("answer_seconds", self.answer_seconds)
        if isinstance(self.populations, str) or not self.populations:
            raise validation.UsageError(
                f"populations={self.populations!r} must be a list of at least one name."
            )
        if isinstance(self.addresses, str) or not self.addresses:
            raise validation.UsageError(
                f"addresses={self.addresses!r} must be a list of at least one 'host:port'."
            )
        fixed = [address for address in self.addresses if not address.endswith(":0")]
        if len(set(fixed)) != len(fixed):
            raise validation.UsageError(
                f"addresses has one twice: {fixed}. Give each Selector its own."
            )
        if not self.store_is_folder and database.has_password(self.store):
            raise validation.UsageError(
                "store has a password in its URL, which would travel in the clear: put it into a "
                "password file on every node, such as ~/.pgpass."
            )
        self.placement  # noqa: B018 (It checks the numbers.)

    @property
    def name(self) -> str:
        """Name of the server, which its hosts have in common."""
        return "+".join(self.populations)

    @property
    def placement(self) -> placement_lib.Placement:
        """Placement of actors on the hosts."""
        return placement_lib.Placement(len(self.addresses), self.num_workers)

    @property
    def store_is_folder(self) -> bool:
        """Whether the store is a folder rather than a database."""
        return "://" not in self.store

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """Files and folders that every node must have."""
        paths = (self.certificate, self.private_key, *self.files)
        return (*paths, self.store) if self.store_is_folder else paths

    def build(self) -> Parts:
        """Calls the builder."""
        builder = self.builder
        if isinstance(builder, str):
            module, _, name = builder.partition(":")
            try:
                builder = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise validation.UsageError(
                    f"builder={self.builder!r} cannot be imported here ({error}): write it like "
                    "package.module:function, of a package that every node has."
                ) from None
        return builder(self)

    def fingerprint(self) -> str:
        """Returns a digest that differs between deployments."""
        builder = self.builder
        if not isinstance(builder, str):
            builder = f"{builder.__module__}:{builder.__qualname__}"
        plain = dataclasses.replace(
            self, builder=builder, options=tuple(sorted(self.options.items()))
        )
        return hashlib.sha256(repr(plain).encode()).hexdigest()


def absolute(path: str | os.PathLike[str]) -> str:
    """Makes a path absolute, for hosts that run in other folders."""
    return os.path.abspath(path)
