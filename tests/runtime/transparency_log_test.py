"""The log: trees as in RFC 6962, whatever is changed is found, and what was entered stays."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import re
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime import transparency_log as logs

_KEY, _OTHER = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2))
_NAME = "example.org/keyboard"

# The leaves and roots that tests of Certificate Transparency have in common.
_LEAVES = [bytes.fromhex(leaf) for leaf in (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
)]  # fmt: skip
_ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def _entry(content):
    return logs.Entry("statement", "run", hashlib.sha256(content).hexdigest(), "2026-01-01")


def _append(folder, *contents, key=_KEY, name=None):
    return logs.append(folder, [(_entry(content), content) for content in contents], key, name)


def _read(folder, key=_KEY):
    return logs.read(folder, key.public_key())


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of a log of five entries."""
    _append(tmp_path / "log", *(b"%d" % k for k in range(5)), name=_NAME)
    return tmp_path / "log"


def test_trees_are_those_of_certificate_transparency():
    leaves = [logs.leaf_hash(leaf) for leaf in _LEAVES]
    for size, root in _ROOTS.items():
        assert logs.root_hash(leaves[:size]).hex() == root


def test_a_path_leads_to_the_root_from_its_own_place_only():
    for size in range(1, 18):
        leaves = [logs.leaf_hash(bytes([k])) for k in range(size)]
        root = logs.root_hash(leaves)
        for index in range(size):
            path = logs.inclusion_path(leaves, index)
            for place in range(-1, size + 1):
                found = logs.root_by_path(leaves[index], place, size, path)
                assert (found == root) == (place == index)
            assert logs.root_by_path(leaves[index], index, size, [*path, root]) != root
            assert not path or logs.root_by_path(leaves[index], index, size, path[1:]) != root


def test_what_was_entered_is_known_and_stays(folder):
    before = (folder / logs.ENTRIES).read_bytes()
    assert [entry.sha256 for entry in _append(folder, b"3", b"5")] == [_entry(b"5").sha256]
    assert (folder / logs.ENTRIES).read_bytes().startswith(before)
    log = _read(folder)
    assert [log.place_of(b"%d" % k) for k in range(7)] == [0, 1, 2, 3, 4, 5, None]
    assert (log.checkpoint.log_name, log.checkpoint.size) == (_NAME, 6)
    assert log.missing_files() == []
    (folder / logs.FILES / _entry(b"2").sha256).unlink()
    assert log.missing_files() == [_entry(b"2")]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:-1],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0].replace(b"run", b"ran"), *lines[1:]],
        lambda lines: [b"\n", *lines],
    ],
)
def test_a_changed_entry_is_found(folder, change):
    lines = (folder / logs.ENTRIES).read_bytes().splitlines(keepends=True)
    (folder / logs.ENTRIES).write_bytes(b"".join(change(lines)))
    with pytest.raises(logs.LogRefusedError, match="one was changed or removed"):
        _read(folder)
    with pytest.raises(logs.LogRefusedError, match="one was changed or removed"):
        _append(folder, b"new")


def test_a_changed_file_is_found(folder):
    (folder / logs.FILES / _entry(b"2").sha256).write_bytes(b"3")
    with pytest.raises(logs.LogRefusedError, match="was changed since it was entered"):
        _read(folder).missing_files()
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(b"2")
    (folder / logs.FILES / _entry(b"2").sha256).unlink()
    (folder / logs.FILES / _entry(b"2").sha256).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="leads out of the folder"):
        _read(folder).missing_files()


@pytest.mark.parametrize("name", [logs.CHECKPOINT, logs.ENTRIES])
def test_a_log_is_of_regular_files_in_its_folder(folder, name):
    elsewhere = (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="leads out of the folder"):
        _read(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match="is no regular file"):
        _read(folder)


def test_lines_that_no_checkpoint_counts_are_replaced(folder):
    """A crash between the two files leaves them; nobody was shown them."""
    with (folder / logs.ENTRIES).open("ab") as file:
        file.write(_entry(b"lost").line() + b"\nhalf a li")
    assert _read(folder).checkpoint.size == 5
    _append(folder, b"new")
    assert [_read(folder).place_of(content) for content in (b"new", b"lost")] == [5, None]


def test_a_log_that_was_rewritten_does_not_go_on(folder, tmp_path):
    earlier = _read(folder).checkpoint
    _append(folder, b"5")
    now = _read(folder)
    now.check_continues(earlier)
    _append(tmp_path / "fork", *(b"%d" % (k + 1) for k in range(6)), name=_NAME)
    with pytest.raises(logs.LogRefusedError, match="the log was rewritten"):
        _read(tmp_path / "fork").check_continues(earlier)
    _append(tmp_path / "short", b"0", name=_NAME)
    with pytest.raises(logs.LogRefusedError, match="has 1 entries where it had 5"):
        _read(tmp_path / "short").check_continues(earlier)
    _append(tmp_path / "other", *(b"%d" % k for k in range(5)), name="other")
    with pytest.raises(logs.LogRefusedError, match="is of the log example.org/keyboard, not of"):
        _read(tmp_path / "other").check_continues(earlier)


def test_only_the_logs_key_signs(folder):
    with pytest.raises(logs.LogRefusedError, match="is not signed with the key of the log"):
        _read(folder, _OTHER)
    with pytest.raises(logs.LogRefusedError, match="is not signed with the key of the log"):
        _append(folder, b"new", key=_OTHER)
    note = (folder / logs.CHECKPOINT).read_text("utf-8")
    for changed in (note.replace("\n5\n", "\n4\n"), note.replace("keyboard\n5", "keyboarb\n5")):
        (folder / logs.CHECKPOINT).write_text(changed, "utf-8")
        with pytest.raises(logs.LogRefusedError, match="is not signed with the key of the log"):
            _read(folder)
    for unreadable in (b"", b"\xff\n", b"a\nb\nc\n\n"):
        (folder / logs.CHECKPOINT).write_bytes(unreadable)
        with pytest.raises(logs.LogRefusedError, match="is no checkpoint of a log"):
            _read(folder)


def test_a_checkpoint_is_a_signed_note(folder):
    """As golang.org/x/mod/sumdb/note has it: type 1 is Ed25519, the key's hash comes first."""
    text, signature = (folder / logs.CHECKPOINT).read_text("utf-8").split("\n\n")
    lines = text.split("\n")
    assert lines[:2] == [_NAME, "5"] and base64.b64decode(lines[2]) == _read(folder).checkpoint.root
    dash, name, encoded = signature.removesuffix("\n").split(" ")
    assert (dash, name) == ("—", _NAME)
    public = signing_keys.raw(_KEY.public_key())
    named = hashlib.sha256(f"{_NAME}\n".encode() + b"\x01" + public).digest()[:4]
    assert base64.b64decode(encoded)[:4] == named
    _KEY.public_key().verify(base64.b64decode(encoded)[4:], f"{text}\n".encode())


def test_a_witness_may_sign_too(folder):
    note = (folder / logs.CHECKPOINT).read_text("utf-8")
    witness = base64.b64encode(bytes(68)).decode()
    cosigned = note.replace("\n\n", f"\n\n— witness.example {witness}\n— {_NAME} !\n", 1)
    assert logs.Checkpoint.verified(cosigned, _KEY.public_key(), "it") == _read(folder).checkpoint


def test_a_proof_is_of_one_file_in_one_log(folder):
    public = _KEY.public_key()
    log = _read(folder)
    for place in range(5):
        proof = log.prove(place)
        assert logs.entry_by_proof(proof, b"%d" % place, public) == _entry(b"%d" % place)
        with pytest.raises(logs.LogRefusedError, match="is of another file"):
            logs.entry_by_proof(proof, b"x", public)
        for changed in (proof.replace("run", "ran"), proof.replace(f"\n{place}\n", "\n7\n", 1)):
            with pytest.raises(logs.LogRefusedError, match="does not lead from its entry"):
                logs.entry_by_proof(changed, b"%d" % place, public)
    with pytest.raises(logs.LogRefusedError, match="The end of the proof is no checkpoint"):
        logs.entry_by_proof("nothing", b"0", public)


def test_names_are_given_once(folder, tmp_path):
    with pytest.raises(validation.UsageError, match="leave out --name"):
        _append(folder, b"new", name="another")
    with pytest.raises(logs.LogRefusedError, match="There is no log in"):
        _append(tmp_path / "none", b"new")
    assert not (tmp_path / "none").exists()
    for name in ("", "a b", "a+b", "a\nb"):
        with pytest.raises(validation.UsageError, match="no spaces and no plus sign"):
            _append(tmp_path / "none", b"new", name=name)


def test_one_process_at_a_time_signs(folder):
    code = f"import fcntl, sys; f = open({str(folder / '.lock')!r}, 'w'); "
    code += "fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(validation.UsageError, match="Another process enters files"):
            _append(folder, b"new")
        other.communicate(b"")
    assert len(_append(folder, b"new")) == 1


def test_entries_are_lines_whatever_they_are_of(folder):
    odd = dataclasses.replace(_entry(b"odd"), of="zwei\nZeilen\u2028\r—")
    logs.append(folder, [(odd, b"odd")], _KEY)
    assert list(_read(folder).entries())[-1] == odd


@pytest.mark.parametrize("change", [b"[]", b'{"a": 1}', b"no", b'"sha256": "../x"', b'"of": 3'])
def test_what_is_no_entry_is_refused_though_its_keeper_signed_it(folder, change):
    line = _entry(b"new").line()
    name, _, _ = change.partition(b":")
    new = re.sub(name + b': "[^"]*"', change, line) if name in line else change
    (folder / logs.ENTRIES).write_bytes(new + b"\n")
    root = logs.root_hash([logs.leaf_hash(new)])
    (folder / logs.CHECKPOINT).write_text(logs.Checkpoint(_NAME, 1, root).sign(_KEY))
    log = _read(folder)
    with pytest.raises(logs.LogRefusedError, match="is no entry"):
        list(log.entries())
    with pytest.raises(logs.LogRefusedError, match="is no entry"):
        _append(folder, b"newer")
    with pytest.raises(logs.LogRefusedError, match="does not lead"):
        logs.entry_by_proof(log.prove(0), b"new", _KEY.public_key())


@pytest.mark.parametrize("size", [-1, "05", "1_0", " 5"])
def test_a_size_is_a_number_of_entries(folder, size):
    note = logs.Checkpoint(_NAME, size, bytes(32)).sign(_KEY)
    with pytest.raises(logs.LogRefusedError, match="no checkpoint"):
        logs.Checkpoint.verified(note, _KEY.public_key(), "it")
