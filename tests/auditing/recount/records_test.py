"""Tests of tff_dpftrl.auditing.recount.records."""

import math
import types
import zipfile

import numpy as np
import pytest

from tff_dpftrl.auditing.recount import file_checks, record_checks, records
from tff_dpftrl.runs import checkpoint


@pytest.mark.parametrize("part", ["2", "2,1.4", "2,1.48"])
def test_a_row_that_a_crash_cut_short_is_left_out(tmp_path, part):
    path = tmp_path / "metrics.csv"
    path.write_text("round,epsilon\n1,1.25\n" + part)
    assert records.read_rows(tmp_path, path.name, []) == [{"round": "1", "epsilon": "1.25"}]
    path.write_text("round,epsilon\n1,1.25\n2,1.48\n")
    assert [row["round"] for row in records.read_rows(tmp_path, path.name, [])] == ["1", "2"]


@pytest.mark.parametrize(
    ("config", "words", "outcome", "says"),
    [
        ({"noise": "philox"}, [2**50, 7], "consistent", "It has 128 bits"),
        ({"noise": "secure"}, [2**50, 7, 1, 2], "consistent", "It has 256 bits"),
        ({"noise": "secure"}, [2**50, 7], "violated", "that of secure noise has 256"),
        ({"noise": "secure"}, [1, 2, 3, 4], "violated", "nobody draws by chance"),
        ({"noise": "philox"}, [[2**50, 7], [2**51, 3]], "consistent", "It has 128 bits"),
        ({"noise": "philox"}, [[2**50, 7], [1, 2]], "violated", "it has [1, 2], which nobody"),
        ({"noise": "secure", "noise_party": "ab"}, [0, 0], "not tested", "parties draw the noise"),
    ],
)
def test_a_seed_has_the_bits_of_its_generator(config, words, outcome, says):
    tensor = types.SimpleNamespace(whole=lambda: np.array(words))
    run = types.SimpleNamespace(
        statement=None, config=config, checkpoint={"aggregator/seed": tensor}
    )
    terms = types.SimpleNamespace(is_secret=True, noise_multiplier=1.0)
    found = record_checks.seed("seed", run, terms)
    assert found.outcome == outcome and says in found.says


@pytest.mark.parametrize("entries_at_a_time", [1, 4, 100])
def test_tensors_are_read_and_hashed_in_parts(tmp_path, monkeypatch, entries_at_a_time):
    monkeypatch.setattr(records, "_PART", entries_at_a_time)
    state = {"a": np.arange(10, dtype=np.float32).reshape(2, 5), "b": [np.int64(3), np.zeros([0])]}
    folder = checkpoint.CheckpointFolder(tmp_path / "private" / "checkpoints", binding="b")
    folder.folder.parent.mkdir()
    name = folder.save(0, checkpoint.Snapshot.of(state), {})
    ledger = records.Ledger((1, 1, 1), name, {}, {}, {}, {}, {})
    found = records._checkpoint(tmp_path, ledger, [])
    assert found is not None and found.fingerprint(binding="b") == name
    np.testing.assert_array_equal(found.get("a").whole(), state["a"])
    assert found.get("b/0").whole() == 3 and found.get("b/1").whole().shape == (0,)
    squares = record_checks._squares_of_rows(found.get("a"))
    np.testing.assert_array_equal(squares, [30, 255])


@pytest.mark.parametrize("entry", ["0000/a", "0001/a", "9999/a"])
def test_a_tensor_too_many_changes_the_fingerprint(tmp_path, entry):
    """Even at a path that another tensor has: who resumes the run refuses such a file."""
    folder = checkpoint.CheckpointFolder(tmp_path / "private" / "checkpoints")
    folder.folder.parent.mkdir()
    name = folder.save(0, checkpoint.Snapshot.of({"a": np.arange(3.0), "b": np.arange(4.0)}), {})
    (path,) = folder.folder.iterdir()
    with zipfile.ZipFile(path, "a") as archive, archive.open(f"{entry}.npy", "w") as stream:
        np.lib.format.write_array(stream, np.arange(3.0))
    with pytest.raises(checkpoint.CheckpointError):
        folder.load(0, name)
    ledger = records.Ledger((1, 1, 1), name, {}, {}, {}, {}, {})
    found = records._checkpoint(tmp_path, ledger, [])
    assert found is None or found.fingerprint() != name


@pytest.mark.parametrize("shape", [(-1, -1), (-2, 3, -1)])
def test_a_tensor_of_a_negative_size_is_unreadable(tmp_path, shape):
    path = tmp_path / "private" / "checkpoints" / "round_00000000_x.npz"
    path.parent.mkdir(parents=True)
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    with zipfile.ZipFile(path, "w") as archive, archive.open("0000/a.npy", "w") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(bytes(8 * math.prod(shape)))
    unreadable = []
    ledger = records.Ledger((1, 1, 1), "x", {}, {}, {}, {}, {})
    assert records._checkpoint(tmp_path, ledger, unreadable) is None
    assert "cannot be read" in unreadable[0]


def test_a_link_out_of_the_folder_is_unreadable(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "given" / "x.json").symlink_to("../x.json")
    unreadable = []
    assert records.read_json(tmp_path / "given", "x.json", unreadable) is None
    assert len(unreadable) == 1 and "leads out of the folder" in unreadable[0]
    (tmp_path / "given" / "private").symlink_to(tmp_path)
    assert records.read_json(tmp_path / "given", "private/x.json", unreadable) is None
    (tmp_path / "ledger.sqlite").touch()
    assert records._ledger(tmp_path / "given", unreadable) is None
    assert ["leads out of the folder" in one for one in unreadable] == [True] * 3


def test_a_damaged_state_is_unreadable(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path / "private" / "checkpoints")
    folder.folder.parent.mkdir()
    name = folder.save(0, checkpoint.Snapshot.of([np.arange(100.0)]), {})
    (path,) = folder.folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-500] ^= 1
    path.write_bytes(content)
    unreadable = []
    ledger = records.Ledger((1, 1, 1), name, {}, {}, {}, {}, {})
    assert records._checkpoint(tmp_path, ledger, unreadable) is None
    assert "cannot be read" in unreadable[0]


@pytest.mark.parametrize("at", [0, 6, 7, 8, 30])
def test_a_secret_is_found_wherever_parts_end(tmp_path, monkeypatch, at):
    monkeypatch.setattr(file_checks, "_PART_BYTES", 8)
    path = tmp_path / "a"
    path.write_bytes(b"." * at + b"secret" + b"." * 9)
    assert any(b"secret" in part for part in file_checks._parts(path, 6))
