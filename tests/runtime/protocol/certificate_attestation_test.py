"""Attestation by certificates: paths to a root, keys, nonces, and nothing that is kept."""

from __future__ import annotations

import gc
import logging
import types

import hypothesis
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from hypothesis import strategies as st

from tests.runtime.protocol import certificates
from tff_dpftrl import validation
from tff_dpftrl.runtime.device import attester
from tff_dpftrl.runtime.protocol import attestation, certificate_attestation
from tff_dpftrl.runtime.protocol.attestation import Verdict
from tff_dpftrl.runtime.server import limits

_NONCE, _OTHER = b"n" * attestation.NONCE_BYTES, b"o" * attestation.NONCE_BYTES
_PLATFORM = certificates.Platform()
_RSA = rsa.generate_private_key(65537, 2048)


def _verifier(roots=None, clock=None, **options):
    roots = [_PLATFORM.root] if roots is None else roots
    return certificate_attestation.CertificateTokens(
        roots, clock=clock or certificates.Clock(), **options
    )


def _certified(*arguments, key=_PLATFORM.key, **options):
    """A device's certificate, and that of its authority."""
    return [_PLATFORM.certify(key, *arguments, **options), _PLATFORM.authority]


def _token(chain=None, key=None, nonce=_NONCE):
    return certificate_attestation.make_token(nonce, chain or _PLATFORM.chain, key or _PLATFORM.key)


def _verdict(chain=None, key=None, roots=None, **options):
    return _verifier(roots, **options).verify(_token(chain, key), _NONCE)


def test_a_certified_key_is_genuine_once_for_each_nonce():
    verifier = _verifier()
    token = _token()
    assert len(token) <= certificate_attestation.MAX_TOKEN_BYTES < limits.CHECK_IN_BYTES
    assert verifier.verify(token, _NONCE) is Verdict.GENUINE
    assert verifier.verify(token, _NONCE) is Verdict.REPLAYED
    assert verifier.verify(_token(), _NONCE) is Verdict.REPLAYED  # ECDSA signs anew each time.
    assert verifier.verify(_token(nonce=_OTHER), _OTHER) is Verdict.GENUINE


def test_a_token_for_another_nonce_stays_good_for_its_own():
    verifier = _verifier()
    token = _token()
    assert verifier.verify(token, _OTHER) is Verdict.OTHER_NONCE
    changed = token[:1] + _OTHER + token[33:]
    assert verifier.verify(changed, _OTHER) is Verdict.BAD_SIGNATURE
    assert verifier.verify(token, _NONCE) is Verdict.GENUINE


@pytest.mark.parametrize(
    "key",
    [
        certificates.new_key(ec.SECP384R1),
        certificates.new_key(ec.SECP521R1),
        _RSA,
        ed25519.Ed25519PrivateKey.generate(),
    ],
)
def test_these_keys_of_devices_are_accepted(key):
    chain = _certified(key=key)
    assert _verdict(chain, key) is Verdict.GENUINE


def test_weak_keys_of_devices_are_refused():
    weak = rsa.generate_private_key(65537, 1024)
    assert _verdict(_certified(key=weak), weak) is Verdict.BAD_CHAIN
    odd = certificates.new_key(ec.SECP256K1)
    token = _token(_certified(key=odd), _PLATFORM.key)
    assert _verifier().verify(token, _NONCE) is Verdict.BAD_CHAIN


def _authority(key, **options):
    """Makes an authority below the root, and a chain to it."""
    below = certificates.certify(
        *("below", key, "root", _PLATFORM.root_key), **({"is_authority": True} | options)
    )
    return [certificates.certify("batch", _PLATFORM.key, "below", key), below]


_UNKNOWN = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")
_BAD_CHAINS = {
    "without the authority": lambda: [_PLATFORM.batch],
    "authority that is none": lambda: _authority(_RSA, is_authority=False),
    "authority without usage": lambda: _authority(_RSA, usage=()),
    "authority with a weak key": lambda: _authority(rsa.generate_private_key(65537, 1024)),
    "unknown critical extension": lambda: _authority(_RSA, extension=_UNKNOWN),
    "device with one": lambda: _certified(extension=_UNKNOWN),
    "device without usage": lambda: _certified(usage=()),
    "device with another usage": lambda: _certified(usage=("key_encipherment",)),
    "device that is an authority": lambda: _certified(is_authority=True),
    "device certified by a device": lambda: [
        certificates.certify("mine", _PLATFORM.key, "batch", _PLATFORM.key),
        *_PLATFORM.chain,
    ],
    "too long a path": lambda: [
        certificates.certify("batch", _PLATFORM.key, "deep", _RSA),
        certificates.certify("deep", _RSA, "authority", _PLATFORM.authority_key, is_authority=True),
        _PLATFORM.authority,
    ],
    "weak hash": lambda: _certified(hash_algorithm=hashes.SHA224()),
    "authority of the same name": lambda: [
        certificates.certify("batch", _PLATFORM.key, "authority", _RSA),
        _PLATFORM.authority,
    ],
}


@pytest.mark.parametrize("what", _BAD_CHAINS)
def test_a_chain_that_leads_nowhere_is_refused(what):
    assert _verdict(_BAD_CHAINS[what]()) is Verdict.BAD_CHAIN


def test_such_chains_are_accepted_without_the_fault():
    """Or the faults above would prove nothing."""
    assert _verdict(_authority(_RSA)) is Verdict.GENUINE


def test_another_root_of_the_same_name_is_refused():
    other = certificates.Platform()
    assert _verdict(roots=[other.root]) is Verdict.BAD_CHAIN
    assert _verdict(roots=[other.root, _PLATFORM.root]) is Verdict.GENUINE


def test_sha_1_is_refused():
    """As a certificate that cryptography would not make, signed by the authority's RSA key."""
    good = _authority(_RSA)
    assert _verdict(good) is Verdict.GENUINE
    sha256, sha1 = bytes.fromhex("2a864886f70d01010b"), bytes.fromhex("2a864886f70d010105")
    signed = good[0].tbs_certificate_bytes.replace(sha256, sha1)
    signature = _RSA.sign(signed, padding.PKCS1v15(), hashes.SHA1())
    content = good[0].public_bytes(serialization.Encoding.DER)
    content = content.replace(sha256, sha1).replace(good[0].signature, signature)
    weak = x509.load_der_x509_certificate(content)
    assert isinstance(weak.signature_hash_algorithm, hashes.SHA1)
    _RSA.public_key().verify(signature, signed, padding.PKCS1v15(), hashes.SHA1())
    assert _verdict([weak, good[1]]) is Verdict.BAD_CHAIN


def test_a_signature_by_another_key_is_refused():
    assert _verdict(key=certificates.new_key()) is Verdict.BAD_SIGNATURE
    # Nor does it pass for another certificate of the same key.
    again = _certified()
    first, second = _token(), _token(again)
    size = 35 + int.from_bytes(first[33:35], "big")
    start = 35 + int.from_bytes(second[33:35], "big")
    assert _verifier().verify(first[:size] + second[start:], _NONCE) is Verdict.BAD_SIGNATURE


def test_certificates_expire_and_have_to_begin():
    clock = certificates.Clock()
    verifier = _verifier(clock=clock)
    short = _certified(days=11)
    assert verifier.verify(_token(short), _NONCE) is Verdict.GENUINE
    clock.now += 2 * 86_400
    token = _token(short, nonce=_OTHER)
    assert verifier.verify(token, _OTHER) is Verdict.NOT_VALID_NOW
    clock.now -= 2 * 86_400  # A clock that goes back revives nothing.
    assert verifier.verify(token, _OTHER) is Verdict.NOT_VALID_NOW
    early = certificates.Clock()
    early.now -= 9 * 86_400
    verifier = _verifier(clock=early)
    early.now = certificates.NOW - 20 * 86_400
    assert verifier.verify(_token(), _NONCE) is Verdict.GENUINE


@pytest.mark.parametrize("which", ["batch", "authority", "root"])
def test_a_revoked_certificate_anywhere_on_the_path_is_refused(which):
    revoked = {getattr(_PLATFORM, which).serial_number}
    assert _verdict(revoked=revoked) is Verdict.REVOKED
    assert _verdict(revoked={10**6}) is Verdict.GENUINE


def test_memory_is_bounded_and_comes_back():
    clock = certificates.Clock()
    verifier = _verifier(clock=clock, max_remembered=2, remember_s=10.0)
    nonces = [bytes([i]) * 32 for i in range(4)]
    verdicts = [verifier.verify(_token(nonce=nonce), nonce) for nonce in nonces[:3]]
    assert verdicts == [Verdict.GENUINE, Verdict.GENUINE, Verdict.OVERLOADED]
    clock.now += 21.0
    assert verifier.verify(_token(nonce=nonces[3]), nonces[3]) is Verdict.GENUINE


_SEEDED = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_FIXED = _token(_certified(key=_SEEDED), _SEEDED)


def test_the_token_whose_bytes_are_changed_is_genuine():
    assert _verifier().verify(_FIXED, _NONCE) is Verdict.GENUINE


@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
@hypothesis.given(
    st.lists(
        st.tuples(st.integers(0, len(_FIXED) - 1), st.integers(1, 255)),
        min_size=1,
        max_size=3,
        unique_by=lambda change: change[0],
    ),
    st.sampled_from([len(_FIXED), 40, 1]),
    st.binary(max_size=200),
)
def test_any_bytes_get_a_reason(changes, cut, other):
    token = bytearray(_FIXED)
    for place, change in changes:
        token[place] ^= change
    for changed in (bytes(token[:cut]), other):
        assert _verifier().verify(changed, _NONCE) is not Verdict.GENUINE


def _reachable(start):
    """Returns all objects that Python can reach from one, without modules, classes and code."""
    found, left = {}, [start]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, (type, types.ModuleType, types.CodeType)):
            found[id(one)] = one
            functions = (types.FunctionType, types.BuiltinFunctionType)
            left += [] if isinstance(one, functions) else gc.get_referents(one)
    return list(found.values())


def test_a_server_keeps_and_logs_nothing_of_a_certificate(caplog):
    caplog.set_level(logging.DEBUG)
    name = "device-4711"
    verifier = _verifier()
    chain = _certified(name)
    assert verifier.verify(_token(chain), _NONCE) is Verdict.GENUINE
    assert verifier.verify(_token(chain[:1], nonce=_OTHER), _OTHER) is Verdict.BAD_CHAIN
    assert name not in caplog.text
    kept = _reachable(verifier)
    assert _NONCE in [one for one in kept if isinstance(one, bytes)]  # So that it looks there.
    assert not any(isinstance(one, x509.Certificate) for one in kept)
    assert not any(name.encode() in one for one in kept if isinstance(one, bytes))


def test_roots_that_no_path_can_lead_to_are_refused():
    key = certificates.new_key()

    def root(key=key, **options):
        return certificates.certify("mine", key, "mine", key, **({"is_authority": True} | options))

    assert _verifier([root()])
    for bad, message in (
        ([], "roots is empty"),
        ([root(is_authority=False)], "The root CN=mine is no certificate of an authority"),
        ([root(usage=())], "is no certificate of an authority"),
        ([root(days=5)], "only: name the current one"),
        ([root(key=ed25519.Ed25519PrivateKey.generate())], "a key of a kind that is not accepted"),
        ([root(key=rsa.generate_private_key(65537, 1024))], "a key of a kind that is not accepted"),
    ):
        with pytest.raises(validation.UsageError, match=message):
            _verifier(bad)


def test_files_of_a_device_are_read(tmp_path):
    _PLATFORM.write(tmp_path)
    own = attester.CertificateAttester(tmp_path / "chain.pem", tmp_path / "device.key")
    roots = certificate_attestation.read_certificates(tmp_path / "roots.pem")
    assert _verifier(roots).verify(own.token(_NONCE), _NONCE) is Verdict.GENUINE
    with pytest.raises(validation.UsageError, match="nonce must have 32 bytes, got 3"):
        own.token(b"abc")


def test_files_that_do_not_fit_are_named(tmp_path):
    _PLATFORM.write(tmp_path)
    chain, key = tmp_path / "chain.pem", tmp_path / "device.key"

    def refused(message):
        with pytest.raises(validation.UsageError, match=message):
            attester.CertificateAttester(chain, key)

    key.write_bytes(certificates.key_pem(certificates.new_key()))
    refused("chain.pem is not that of the key")
    key.write_bytes(certificates.key_pem(certificates.new_key(ec.SECP256K1)))
    refused("of an accepted kind: EC on P-256")
    key.write_text("nothing")
    refused("holds no private key, in unencrypted PEM")
    key.chmod(0o644)
    refused("a private key that others can use")
    chain.write_bytes(certificates.pem(*[_PLATFORM.batch] * 5))
    refused("has 5 certificates, more than 4: leave out the root")
    chain.write_text("nothing")
    refused("holds no certificates in PEM")
    chain.unlink()
    refused("cannot be read: No such file")


def test_serial_numbers_are_read(tmp_path):
    path = tmp_path / "revoked.txt"
    path.write_text("# Stolen\n0a\n0xFF  # Broken\n\n01:02\n", encoding="utf-8-sig")
    assert certificate_attestation.read_revoked(path) == {10, 255, 0x102}
    for bad in ("12 34", "xyz", "0x", "1" * 41):
        path.write_text(f"01\n{bad}\n")
        with pytest.raises(validation.UsageError, match="line 2: .* is no serial number"):
            certificate_attestation.read_revoked(path)
    with pytest.raises(validation.UsageError, match="cannot be read"):
        certificate_attestation.read_revoked(tmp_path / "nothing")


def test_long_chains_are_refused_before_they_are_sent():
    long = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(3000))
    chain = _certified(extension=long)
    with pytest.raises(validation.UsageError, match="more than 3500: leave out the root"):
        _token(chain)
