"""Plans of a small task, which are built once for all tests of commands that only need some."""

import pickle

import pytest

from tests import shared_folders
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder


@pytest.fixture(scope="session")
def plans(tmp_path_factory):
    """The plans of the process "blt", for `small_folder.write_plans`."""

    def make(folder):
        folder.mkdir()
        built = small_folder.plans(small_tasks.PROCESSES["blt"]())
        (folder / "plans.pickle").write_bytes(pickle.dumps(built))

    folder = shared_folders.made_once(tmp_path_factory, "small_plans", make)
    return pickle.loads((folder / "plans.pickle").read_bytes())
