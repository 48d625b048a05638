"""Tests of tff_dpftrl.runtime.status.access."""

from __future__ import annotations

import base64
import stat

import pytest

from tff_dpftrl.runtime import addresses
from tff_dpftrl.runtime.status import access

TOKEN = "correct-horse-battery"


def _basic(user_and_password):
    return "Basic " + base64.b64encode(user_and_password.encode()).decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_decision(host):
    access.Access().check(host)
    assert addresses.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.nip.io"])
def test_other_machines_need_one(host):
    with pytest.raises(ValueError, match=f"host='{host}' is for other machines"):
        access.Access(names=["example.org"]).check(host)
    access.Access(token=TOKEN).check(host)
    access.Access(is_open=True).check(host)


def test_a_server_has_the_names_that_it_was_given_and_its_addresses():
    given = access.Access(names=["Status.example.org", "fd00::7"], is_open=True)
    for name in ("status.example.org", "fd00::7", "0.0.0.0", "10.0.0.1"):
        assert given.knows(name, "0.0.0.0", "10.0.0.1")
    for name in ("evil.example", "10.0.0.2", "localhost", "127.0.0.1", "example.org", ""):
        assert not given.knows(name, "0.0.0.0", "10.0.0.1")
    assert given.knows("localhost", "0.0.0.0", "127.0.0.1")
    assert access.Access().knows("localhost", "127.0.0.2", "127.0.0.2")


@pytest.mark.parametrize("name", ["", "*.example.org", "http://a", "a:80", "a/b", "a b", "ä"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="is no name of a server"):
        access.Access(names=[name])


def test_the_token_comes_as_bearer_or_as_password():
    given = access.Access(token=TOKEN)
    for header in (
        f"Bearer {TOKEN}",
        f"bearer  {TOKEN}",
        _basic(f":{TOKEN}"),
        _basic(f"a:{TOKEN}"),
    ):
        assert given.admits(header), header
    for header in (
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Digest {TOKEN}",
        f"Basic {TOKEN}",
        "Basic \xe9",
        "Bearer \xe9",
        _basic(TOKEN),
        _basic(f"{TOKEN}:"),
        _basic(f"a:b:{TOKEN}"),
    ):
        assert not given.admits(header), header
    assert access.Access().admits("")
    assert TOKEN not in repr(given)


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "with a space in it", "é" * 20])
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused(tmp_path, token):
    with pytest.raises(ValueError, match="16 characters"):
        access.Access(token=token)
    path = tmp_path / "token"
    path.write_text(token)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=f"{path} holds no token"):
        access.token_of(path)


def test_a_token_excludes_an_open_page():
    with pytest.raises(ValueError, match="exclude"):
        access.Access(token=TOKEN, is_open=True)


def test_the_file_of_a_token_is_made_once_and_for_its_owner(tmp_path):
    path = tmp_path / "new" / "token"
    token = access.token_of(path)
    assert len(token) >= 40 and access.token_of(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert access.token_of(tmp_path / "other") != token
    path.write_text(token, encoding="utf-8-sig")
    assert access.token_of(path) == token
    path.chmod(0o644)
    with pytest.raises(ValueError, match=f"{path} is a token that others can use .mode 0644"):
        access.token_of(path)
