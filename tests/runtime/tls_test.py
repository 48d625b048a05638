import datetime
import stat

import pytest
from cryptography import x509

from tff_dpftrl import validation
from tff_dpftrl.runtime import tls


@pytest.fixture
def pair(tmp_path):
    paths = tmp_path / "server.pem", tmp_path / "server.key"
    tls.create_self_signed(*paths)
    return paths


def test_a_certificate_is_for_the_names_it_was_made_for(tmp_path, pair):
    identity = tls.load(*pair)
    assert identity.names == ("localhost", "127.0.0.1")
    other = tmp_path / "other.pem", tmp_path / "other.key"
    tls.create_self_signed(*other, ["example.org", "::1"])
    assert tls.load(*other).names == ("example.org", "::1")
    assert "PRIVATE" not in repr(identity)


def test_a_long_name_is_served_as_well(tmp_path):
    name = "internal." * 12 + "example.org"
    paths = tmp_path / "long.pem", tmp_path / "long.key"
    tls.create_self_signed(*paths, [name])
    assert tls.load(*paths).names == (name,)


@pytest.mark.parametrize("name", ["bücher.example", ""])
def test_a_name_of_no_host_is_refused(tmp_path, name):
    paths = tmp_path / "new.pem", tmp_path / "new.key"
    with pytest.raises(validation.UsageError, match="cannot be in a certificate"):
        tls.create_self_signed(*paths, [name])
    assert not paths[0].exists() and not paths[1].exists()


def test_a_key_is_for_its_owner_and_never_overwritten(pair):
    assert stat.S_IMODE(pair[1].stat().st_mode) == 0o600
    before = pair[1].read_bytes()
    for given in (pair, (pair[0], pair[1].with_name("new")), (pair[0].with_name("new"), pair[1])):
        with pytest.raises(ValueError, match="exists already"):
            tls.create_self_signed(*given)
    assert pair[1].read_bytes() == before
    assert not pair[0].with_name("new").exists()


def test_a_key_that_others_can_read_is_refused(pair):
    pair[1].chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        tls.load(*pair)


def test_what_is_no_pair_is_refused(tmp_path, pair):
    other = tmp_path / "other.pem", tmp_path / "other.key"
    tls.create_self_signed(*other)
    with pytest.raises(ValueError, match="is not the key of"):
        tls.load(pair[0], other[1])
    with pytest.raises(ValueError, match="no certificate at"):
        tls.load(tmp_path / "nowhere", pair[1])
    with pytest.raises(ValueError, match="no private key at"):
        tls.load(pair[0], tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no certificate"):
        tls.load(pair[1], pair[1])
    other[1].write_text("nonsense")
    with pytest.raises(ValueError, match="holds no private key"):
        tls.load(pair[0], other[1])
    with pytest.raises(ValueError, match="names is empty"):
        tls.create_self_signed(tmp_path / "a", tmp_path / "b", [])


def test_a_certificate_whose_time_is_over_is_refused(tmp_path, monkeypatch, pair):
    certificate = x509.load_pem_x509_certificate(pair[0].read_bytes())
    after = certificate.not_valid_after_utc + datetime.timedelta(seconds=1)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return after.astimezone(tz)

    monkeypatch.setattr(tls.datetime, "datetime", Later)
    with pytest.raises(ValueError, match="Renew it"):
        tls.load(*pair)
