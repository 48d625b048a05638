import hashlib
import stat

import pytest

from tff_dpftrl.participation import pseudonyms


def test_pseudonyms_are_blake2b_under_the_key():
    key = bytes(range(32))
    expected = hashlib.blake2b("é".encode(), key=key, digest_size=16).digest()
    assert pseudonyms.Pseudonyms(key).of(["é"]) == [expected]


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=f"key must have 32 bytes, got {length}"):
        pseudonyms.Pseudonyms(bytes(length))


def test_every_key_gives_other_pseudonyms(tmp_path):
    first = pseudonyms.Pseudonyms.create(tmp_path / "a")
    second = pseudonyms.Pseudonyms.create(tmp_path / "b")
    assert first.of(["user"]) != second.of(["user"])
    assert first.check != second.check


def test_a_key_file_is_private_and_can_be_loaded_again(tmp_path):
    path = tmp_path / "key"
    created = pseudonyms.Pseudonyms.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = pseudonyms.Pseudonyms.load(path)
    assert loaded.of(["a", "b"]) == created.of(["a", "b"])
    assert loaded.check == created.check


def test_the_check_does_not_reveal_a_pseudonym():
    key = bytes(range(32))
    names = pseudonyms.Pseudonyms(key)
    assert bytes.fromhex(names.check)[:16] != names.of([""])[0]


def test_a_missing_or_damaged_key_is_refused(tmp_path):
    with pytest.raises(ValueError, match="key file .* is missing"):
        pseudonyms.Pseudonyms.load(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes"):
        pseudonyms.Pseudonyms.load(tmp_path / "short")


def test_bad_user_ids_are_refused():
    names = pseudonyms.Pseudonyms(bytes(32))
    with pytest.raises(ValueError, match="appears twice"):
        names.of(["a", "b", "a"])
    with pytest.raises(ValueError, match="strings, got a int"):
        names.of([3])
