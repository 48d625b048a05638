"""A file system with as much room as a test leaves, or none, or that cannot be written."""

import contextlib
import itertools
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import pytest

_SIZE = 64 * 2**20


class SmallDisk:
    """A file system in memory of its own.

    Attributes:
      folder: Where it is mounted.
    """

    def __init__(self, folder: pathlib.Path):
        """Mounts it at an empty folder; needs the rights to."""
        self.folder = folder
        self._ballast = folder / "ballast"
        self._mount("-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder))

    def _mount(self, *arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)

    def leave(self, pages: int) -> None:
        """Takes all room but a number of pages, which is what files grow by."""
        for _ in range(20):  # A process that writes may take some of the room meanwhile.
            self.give_back()
            found = os.statvfs(self.folder)
            with contextlib.suppress(OSError), open(self._ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, (found.f_bavail - pages) * found.f_frsize)
                return
        raise AssertionError("the disk does not fill up")

    def give_back(self) -> None:
        """Makes room again."""
        self._ballast.unlink(missing_ok=True)

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Allows no write; no file may be open for writing then."""
        self._mount("-o", "remount,ro", str(self.folder))
        try:
            yield
        finally:
            self._mount("-o", "remount,rw", str(self.folder))

    def close(self) -> None:
        """Takes it away, with all that is in it."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)


@pytest.fixture
def disk(tmp_path):
    """A small disk; skips the test where nobody may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        made = SmallDisk(folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the rights to mount a file system")
    yield made
    made.close()


def at_every_page(
    disk: SmallDisk, attempt: Callable[[pathlib.Path], None], pages: Iterator[int] | None = None
) -> Iterator[tuple[pathlib.Path, OSError | None]]:
    """Has something write until there is no room: after no page, after one, and so on.

    Args:
      disk: Where it writes.
      attempt: Writes into the folder that it is given.
      pages: How much room to leave; 0, 1, ... if None.

    Yields:
      The folder, with room again, and the error; None the last time, when all was written.
    """
    for left in itertools.count() if pages is None else pages:
        folder = disk.folder / f"with {left} pages"
        folder.mkdir()
        disk.leave(left)
        failure = None
        try:
            attempt(folder)
        except OSError as error:
            failure = error
        disk.give_back()
        yield folder, failure
        if failure is None:
            return
