"""Tests of tff_dpftrl.runtime.server_bundle."""

import json

import pytest

from tff_dpftrl.runtime import server_bundle, signing_keys


@pytest.fixture(name="made")
def _made(tmp_path):
    (tmp_path / "certificate.pem").write_text("a certificate\n", encoding="utf-8-sig")
    plans, issuer = (signing_keys.create(tmp_path / name) for name in ("plans", "issuer"))
    made = server_bundle.ServerBundle.of(
        "keyboard",
        "a:1,b:2",
        tmp_path / "certificate.pem",
        [plans.public_key()],
        [signing_keys.public_path(tmp_path / "issuer")],
    )
    return made, plans, issuer


def test_what_is_written_is_read_and_has_no_private_key(made, tmp_path):
    bundle, plans, issuer = made
    bundle.write(tmp_path / "bundle.json")
    assert server_bundle.read(tmp_path / "bundle.json") == bundle
    assert bundle.certificate == "a certificate\n"
    for (pem,), key in ((bundle.plan_keys, plans), (bundle.issuers, issuer)):
        read = signing_keys.parse_public(pem.encode(), "bundle")
        assert signing_keys.raw(read) == signing_keys.raw(key.public_key())
    assert "PRIVATE" not in (tmp_path / "bundle.json").read_text()


@pytest.mark.parametrize(
    "changed",
    [{"version": 2}, {"server": 1}, {"plan_keys": "key"}, {"issuers": [1]}, {"population": None}],
)
def test_other_files_are_refused(made, tmp_path, changed):
    path = tmp_path / "bundle.json"
    made[0].write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match="copy device_bundle.json of the server's folder again"):
        server_bundle.read(path)
    path.write_bytes(b"\xff[")
    with pytest.raises(ValueError, match="is no bundle of this version"):
        server_bundle.read(path)
    with pytest.raises(ValueError, match="none.json cannot be read: No such file"):
        server_bundle.read(tmp_path / "none.json")
