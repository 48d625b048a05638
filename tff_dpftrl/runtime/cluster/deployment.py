"""What a server on many machines is built from: data that every host gets, without a secret."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import factory, selector
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.addresses import DEFAULT_ADDRESS
from tff_dpftrl.runtime.cluster import placement as placement_lib
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import served_task
from tff_dpftrl.runtime.store import database


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a host runs; see `server.Server` for what each is.

    Attributes:
      population: The population.
      tasks: Its tasks by name, which the store has.
      pace: When devices are to check in again.
      attestation: Verifies devices' tokens; with None, whoever connects is a device.
      limits: How much devices of one Selector may use.
      server_names: Names that devices may know the server by; those in the certificate if
        empty.
      actor_factory: Builds the actors.
    """

    population: population_lib.Population
    tasks: Mapping[str, served_task.ServedTask]
    pace: selector.Pace
    attestation: attestation_lib.Attestation | None = None
    limits: limits_lib.Limits = dataclasses.field(default_factory=limits_lib.Limits)
    server_names: tuple[str, ...] = ()
    actor_factory: type[factory.ActorFactory] = factory.ActorFactory


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A population's server on many machines. It is sent in the clear: no secret may be in it.

    Attributes:
      population: Name of the population.
      builder: Called on every host with the deployment, returns its `Parts`; or the name of such
        a function, like "package.module:function".
      store: Where leases and commits are: a database URL without a password, or a folder, if
        all nodes are one machine. It must have the tasks.
      certificate: File of the server's certificate; like all files, there on every node.
      private_key: File of its key.
      addresses: Host and port for devices, one for each Selector. A port of 0 is any that is
        free, and a host of 0.0.0.0 the node's own address.
      num_workers: How many processes sum reports.
      files: Further files and folders that the builder needs.
      options: What the builder takes besides; small, and can be pickled.
      answer_seconds: After which a host that does not answer is ended and started anew.
    """

    population: str
    builder: Callable[[Deployment], Parts] | str
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
    def placement(self) -> placement_lib.Placement:
        """The hosts."""
        return placement_lib.Placement(len(self.addresses), self.num_workers)

    @property
    def store_is_folder(self) -> bool:
        """Whether the store is a folder, and no database elsewhere."""
        return "://" not in self.store

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """Files and folders that every node must have."""
        paths = (self.certificate, self.private_key, *self.files)
        return (*paths, self.store) if self.store_is_folder else paths

    def build(self) -> Parts:
        """Calls the builder.

        Raises:
          ValueError: If it cannot be imported.
        """
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
        """Tells this deployment from others."""
        builder = self.builder
        if not isinstance(builder, str):
            builder = f"{builder.__module__}:{builder.__qualname__}"
        plain = dataclasses.replace(
            self, builder=builder, options=tuple(sorted(self.options.items()))
        )
        return hashlib.sha256(repr(plain).encode()).hexdigest()


def absolute(path: str | os.PathLike[str]) -> str:
    """A path as hosts in other folders have it."""
    return os.path.abspath(path)
