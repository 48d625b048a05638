"""The interface through which a host reaches the other hosts."""

from __future__ import annotations

import abc


class Transport(abc.ABC):
    """Connection of a host to the others; methods raise `mail.Unreachable`."""

    @abc.abstractmethod
    async def call(self, host: str, sealed: bytes) -> str:
        """Sends a batch to a host.

        Args:
          host: Name of the host.
          sealed: Encrypted batch.

        Returns:
          Id of the process that answered, which has taken the batch if it is for this process.
        """

    @abc.abstractmethod
    async def watch(self, host: str, life: str) -> None:
        """Returns or raises when the process of a host with this id has ended."""

    @abc.abstractmethod
    async def start_coordinator(self) -> None:
        """Starts the Coordinator's host, unless it runs."""

    @abc.abstractmethod
    async def restart(self, host: str) -> None:
        """Ends a process that does not answer; all hosts but the Coordinator's are restarted."""

    @abc.abstractmethod
    async def leave(self) -> None:
        """Ends this process for good."""

    @abc.abstractmethod
    def node_address(self) -> str:
        """Returns the address of this node for other machines."""

    @abc.abstractmethod
    def remember(self, name: str, value: str) -> None:
        """Stores a text for the next process of this host."""

    @abc.abstractmethod
    def remembered(self, name: str) -> str:
        """Returns the stored text; empty if there is none."""
