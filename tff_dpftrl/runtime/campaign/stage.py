"""The folder of a campaign: what servers and devices have in common, and what they leave."""

from __future__ import annotations

import dataclasses
import pathlib

from tff_dpftrl.runtime.campaign import book, toys
from tff_dpftrl.runtime.server import server_folder as server_folder_lib
from tff_dpftrl.runtime.store import sql


@dataclasses.dataclass(frozen=True)
class Stage:
    """Paths in the folder.

    Attributes:
      folder: The folder.
    """

    folder: pathlib.Path

    @property
    def store(self) -> pathlib.Path:
        """The store that all servers share."""
        return self.folder / "store"

    @property
    def server_folder(self) -> server_folder_lib.ServerFolder:
        """Certificate and keys."""
        return server_folder_lib.of(self.folder / "server")

    @property
    def events(self) -> pathlib.Path:
        """What servers' observers heard, a file for each process."""
        return self.folder / "events"

    @property
    def logs(self) -> pathlib.Path:
        """What servers printed, a file for each process."""
        return self.folder / "logs"

    def make(self, seed: int) -> None:
        """Makes keys, and a store with the tasks at their beginning.

        Args:
          seed: Of the noise.

        Raises:
          OSError: If the folder cannot be written.
        """
        for folder in (self.folder, self.events, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.server_folder.make(("localhost", "127.0.0.1"))
        with sql.SqlStore(self.store) as store:
            for task in toys.TASKS:
                state = toys.first_state(task, toys.noise_seed(seed, task))
                model = toys.first_model(task)
                store.add_task(toys.POPULATION, task, model=model, state=state)
        book.begin(self.store)
