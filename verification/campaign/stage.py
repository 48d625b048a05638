"""The folder of a campaign: what servers and devices have in common, and what they leave."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from tff_dpftrl.runtime.server import server_folder as server_folder_lib
from tff_dpftrl.runtime.store import sql
from verification.campaign import database_log, tiny_tasks


@dataclasses.dataclass(frozen=True)
class Stage:
    """Paths in the folder.

    Attributes:
      folder: The folder.
    """

    folder: pathlib.Path

    @property
    def store(self) -> pathlib.Path | str:
        """The store that all servers share: a folder, or the URL of a PostgreSQL database."""
        return self._store_url.read_text() if self._store_url.exists() else self.folder / "store"

    @property
    def populations(self) -> dict[str, list[str]]:
        """Tasks by population."""
        return json.loads(self._populations.read_text())

    @property
    def _populations(self) -> pathlib.Path:
        return self.folder / "populations.json"

    @property
    def _store_url(self) -> pathlib.Path:
        return self.folder / "store_url"

    @property
    def server_folder(self) -> server_folder_lib.ServerFolder:
        """Certificate and keys."""
        return server_folder_lib.of(self.folder / "server")

    @property
    def events(self) -> pathlib.Path:
        """Events that servers' observers got, a file for each process."""
        return self.folder / "events"

    @property
    def logs(self) -> pathlib.Path:
        """Output of the servers, a file for each process."""
        return self.folder / "logs"

    def make(
        self,
        seed: int,
        store_url: str = "",
        populations: Mapping[str, Sequence[str]] = tiny_tasks.ONE_POPULATION,
    ) -> None:
        """Makes keys, and a store with the tasks at their beginning.

        Args:
          seed: Seed of the noise.
          store_url: URL of an empty PostgreSQL database; a store in the folder if empty.
          populations: Tasks by population.

        Raises:
          OSError: If the folder cannot be written.
        """
        for folder in (self.folder, self.events, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self._populations.write_text(json.dumps(populations))
        if store_url:
            self._store_url.touch(mode=0o600)
            self._store_url.write_text(store_url)
        self.server_folder.make(("localhost", "127.0.0.1"))
        with sql.SqlStore(self.store) as store:
            for population, tasks in populations.items():
                for task in tasks:
                    state = tiny_tasks.first_state(task, tiny_tasks.noise_seed(seed, task))
                    model = tiny_tasks.first_model(task)
                    store.add_task(population, task, model=model, state=state)
        database_log.begin(self.store)
