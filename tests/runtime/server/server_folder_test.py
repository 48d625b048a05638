"""Tests of tff_dpftrl.runtime.server.server_folder."""

from __future__ import annotations

import os
import stat

import pytest

from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.store import sql

NAMES = ("localhost",)


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_the_stores_folder_around_it_are_for_their_owner(tmp_path):
    store = tmp_path / "store"
    folder = server_folder.of(store / "server")  # `serve` makes it before the store.
    folder.make(NAMES)
    sql.SqlStore(store).close()
    assert (_mode(store), _mode(folder.path)) == (0o700, 0o700)
    assert {_mode(path) for path in (folder.private_key, folder.issuer)} == {0o600}


def test_a_certificate_that_is_there_must_have_the_names_that_are_asked_for(tmp_path):
    folder = server_folder.of(tmp_path / "server")
    folder.make(("a.example", "2001:db8::1"))
    made = folder.certificate.read_bytes()
    for names in (None, ("A.example",), ("2001:DB8:0::1", "a.example")):
        folder.make(names)
    with pytest.raises(
        ValueError, match=r"names has \['b.example'\], and .*certificate.pem was ma"
    ):
        folder.make(("a.example", "b.example"))
    folder.make(("b.example",), certificate=False)  # The server has another certificate.
    assert folder.certificate.read_bytes() == made
    folder.certificate.unlink()
    folder.make(None)
    assert tls.load(folder.certificate, folder.private_key).names == ("localhost", "127.0.0.1")


def test_an_issuers_key_that_others_can_use_is_refused_as_the_private_key_is(tmp_path):
    folder = server_folder.of(tmp_path / "server")
    folder.make(NAMES)
    before = folder.issuer.read_bytes()
    folder.issuer.chmod(0o640)
    with pytest.raises(ValueError, match=f"mode 0640.*chmod 600 {folder.issuer}"):
        folder.make(NAMES)
    folder.make(NAMES, issuer=False)  # The tokens are those of another issuer.
    folder.issuer.chmod(0o600)
    folder.make(NAMES)
    assert folder.issuer.read_bytes() == before
