"""Parts of a server with a mistake, for `server_process --actors` and `--store`."""

from tests.verification.schedules import mistakes
from tff_dpftrl.runtime.store import sql

ReleasesBeforeTheCommit = mistakes.FACTORIES["ReleasesBeforeTheCommit"]


class CommitsUnderAnyEpoch(sql.SqlStore):
    """A commit under an old epoch is made as if it were the latest one.

    No attempt is noted: a new leader would skip its round, which would refuse the old commit.
    """

    def begin_attempt(self, population, task, **values):
        pass

    def commit(self, population, task, *, epoch, **values):
        mine = self.lease(population)
        with self._writing() as connection:
            sql._write_lease(connection, sql.interface.Lease(population, "", epoch, 0.0))
        try:
            return super().commit(population, task, epoch=epoch, **values)
        finally:
            with self._writing() as connection:
                sql._write_lease(connection, mine)
