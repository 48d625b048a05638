"""Tests of tff_dpftrl.runtime.cluster.serving: what hosts are built from."""

from __future__ import annotations

import os
import pickle
import random
import sys

import pytest

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.runtime import serving as serving_lib
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.protocol import attestation

pytest.importorskip("ray", reason="Ray is not installed: run `make test-distributed`.")

from tff_dpftrl.runtime.cluster import serving  # noqa: E402 (It needs Ray.)


@pytest.fixture(scope="module", name="files")
def _files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    small_folder.write(folder / "small", small_tasks.PROCESSES["blt"]())
    signing_keys.create(folder / "issuer")
    return serving.Files(
        tasks=[folder / "small"],
        plan_keys=[],
        certificate=folder / "certificate.pem",
        private_key=folder / "private_key.pem",
        attestation_keys=[signing_keys.public_path(folder / "issuer")],
    )


def _deployment(files, address="127.0.0.1:0", store="store", num_selectors=3):
    settings = serving_lib.Settings(address=address, population_size=500.0, round_seconds=2.0)
    return serving.deployment(
        "tests", store, files, settings, num_selectors=num_selectors, num_workers=2
    )


def test_hosts_build_what_is_served_from_files_of_their_node(files):
    deployed = pickle.loads(pickle.dumps(_deployment(files)))
    parts = deployed.build()
    assert parts.population.name == "tests" and list(parts.tasks) == ["small"]
    expected = serving_lib.put_together(
        [serving.planned_task.load(files.tasks[0])],
        serving_lib.Settings(population_size=500.0, round_seconds=2.0),
    )
    (task,), (known,) = parts.population.tasks, expected.population.tasks
    assert task.rest_seconds == known.rest_seconds == 2.0
    assert (task.rounds, task.num_rounds) == (known.rounds, known.num_rounds)
    turns = [one.pace(1000.0, random.Random(0)) for one in (parts, expected)]
    assert turns[0] == turns[1]
    assert isinstance(parts.attestation, attestation.SignedTokens)
    assert {*map(os.fspath, (*files.tasks, *files.attestation_keys))} <= set(deployed.needed_paths)


def test_paths_are_those_of_the_first_command_wherever_hosts_are(files, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    relative = serving.Files(["a"], ["b"], "c", "d", None)
    deployed = _deployment(relative)
    assert deployed.needed_paths == tuple(str(tmp_path / name) for name in "cdab") + (
        str(tmp_path / "store"),
    )
    assert deployed.options["attestation_keys"] is None
    assert _deployment(relative, store="postgresql://host/name").store == "postgresql://host/name"


def test_each_selector_has_a_port_of_its_own(files):
    assert _deployment(files).addresses == ("127.0.0.1:0",) * 3
    fixed = _deployment(files, "[::]:8443")
    assert fixed.addresses == ("[::]:8443", "[::]:8444", "[::]:8445")
    with pytest.raises(ValueError, match="no room for 3 Selectors"):
        _deployment(files, "127.0.0.1:65534")


def test_other_settings_make_another_deployment(files):
    own = _deployment(files).fingerprint()
    assert _deployment(files).fingerprint() == own
    assert _deployment(files, num_selectors=2).fingerprint() != own


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
