"""How a host reaches the others."""

from __future__ import annotations

import abc


class Transport(abc.ABC):
    """What a host needs of whatever runs hosts; methods raise `mail.Unreachable`."""

    @abc.abstractmethod
    async def call(self, host: str, sealed: bytes) -> str:
        """Has a host take a batch.

        Args:
          host: Its name.
          sealed: The batch.

        Returns:
          The life of the process that has answered. It has taken the batch if that is for it.
        """

    @abc.abstractmethod
    async def watch(self, host: str, life: str) -> None:
        """Returns, or raises, when a process of a host is gone."""

    @abc.abstractmethod
    async def start_coordinator(self) -> None:
        """Starts the Coordinator's host, unless there is one."""

    @abc.abstractmethod
    async def restart(self, host: str) -> None:
        """Ends a process that does not answer; another one follows, except the Coordinator's."""

    @abc.abstractmethod
    async def leave(self) -> None:
        """Ends this process for good."""

    @abc.abstractmethod
    def node_address(self) -> str:
        """Address of this node, for other machines."""

    @abc.abstractmethod
    def remember(self, name: str, value: str) -> None:
        """Keeps a text for the next process of this host."""

    @abc.abstractmethod
    def remembered(self, name: str) -> str:
        """What was kept; empty if nothing was."""
