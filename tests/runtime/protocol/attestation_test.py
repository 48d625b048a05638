"""Tests of tff_dpftrl.runtime.protocol.attestation."""

from __future__ import annotations

import hypothesis
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import strategies as st

from tests.runtime.protocol import certificates
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.protocol.attestation import Verdict

deterministic = hypothesis.settings(deadline=None, derandomize=True)

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_NONCE = b"n" * attestation.NONCE_BYTES


def _pair(lifetime_s=300.0, key=_KEY, **options):
    clock = certificates.Clock()
    issuer = attestation.TokenIssuer(key, clock=clock, lifetime_s=lifetime_s)
    return clock, issuer, attestation.SignedTokens([_KEY.public_key()], clock=clock, **options)


def test_a_token_is_genuine_once():
    _, issuer, verifier = _pair()
    token = issuer.issue(_NONCE)
    assert len(token) == attestation.TOKEN_BYTES
    assert verifier.verify(token, _NONCE) is Verdict.GENUINE
    assert verifier.verify(token, _NONCE) is Verdict.REPLAYED
    assert verifier.verify(issuer.issue(_NONCE), _NONCE) is Verdict.GENUINE


def test_a_token_for_another_nonce_stays_good_for_its_own():
    _, issuer, verifier = _pair()
    token = issuer.issue(_NONCE)
    assert verifier.verify(token, attestation.new_challenge()) is Verdict.OTHER_NONCE
    assert verifier.verify(token, _NONCE) is Verdict.GENUINE


def test_a_token_of_an_issuer_who_is_not_trusted_is_named():
    other = ed25519.Ed25519PrivateKey.generate()
    _, issuer, verifier = _pair(key=other)
    assert verifier.verify(issuer.issue(_NONCE), _NONCE) is Verdict.UNKNOWN_ISSUER
    # Claiming to be the trusted one does not help: the signature is still the other's.
    _, genuine, _ = _pair()
    claimed = genuine.issue(_NONCE)[:-64]
    forged = claimed + other.sign(attestation._CONTEXT + claimed)
    assert verifier.verify(forged, _NONCE) is Verdict.BAD_SIGNATURE
    both = attestation.SignedTokens(
        [_KEY.public_key(), other.public_key()], clock=certificates.Clock(), clock_skew_s=0
    )
    assert both.verify(issuer.issue(_NONCE), _NONCE) is Verdict.GENUINE
    assert both.verify(genuine.issue(_NONCE), _NONCE) is Verdict.GENUINE


@pytest.mark.parametrize(
    ("later", "verdict"),
    [(300.0, Verdict.GENUINE), (330.0, Verdict.GENUINE), (331.0, Verdict.EXPIRED)],
)
def test_a_token_expires_when_the_clocks_may_not_explain_it(later, verdict):
    clock, issuer, verifier = _pair(clock_skew_s=30.0)
    token = issuer.issue(_NONCE)
    clock.now += later
    assert verifier.verify(token, _NONCE) is verdict


def test_a_token_may_not_outlive_the_memory_of_used_ones():
    _, issuer, verifier = _pair(lifetime_s=631.0, longest_lifetime_s=600.0, clock_skew_s=30.0)
    assert verifier.verify(issuer.issue(_NONCE), _NONCE) is Verdict.TOO_LONG_VALID


def test_a_clock_that_goes_back_revives_nothing():
    clock, issuer, verifier = _pair(longest_lifetime_s=300.0, clock_skew_s=0)
    token = issuer.issue(_NONCE)
    assert verifier.verify(token, _NONCE) is Verdict.GENUINE
    begin = clock.now
    for _ in range(4):  # Long enough to forget the token.
        clock.now += 301.0
        assert verifier.verify(issuer.issue(_NONCE), _NONCE) is Verdict.GENUINE
    clock.now = begin
    assert verifier.verify(token, _NONCE) is Verdict.EXPIRED


@deterministic
@hypothesis.given(
    st.lists(st.tuples(st.floats(0, 700), st.integers(0, 5)), min_size=1, max_size=60),
    st.floats(0, 60),
)
def test_no_token_is_genuine_twice_whenever_it_comes(steps, skew):
    clock, issuer, verifier = _pair(longest_lifetime_s=600.0, clock_skew_s=skew)
    tokens, used = [], set()
    for seconds, which in steps:
        clock.now += seconds
        tokens.append(issuer.issue(_NONCE))
        token = tokens[max(0, len(tokens) - 1 - which)]
        verdict = verifier.verify(token, _NONCE)
        assert verdict in (Verdict.GENUINE, Verdict.REPLAYED, Verdict.EXPIRED)
        assert (verdict is Verdict.GENUINE) <= (token not in used)
        if verdict is Verdict.GENUINE:
            used.add(token)


def test_memory_is_bounded_and_comes_back():
    clock, issuer, verifier = _pair(max_remembered=10, longest_lifetime_s=600.0, clock_skew_s=0)
    verdicts = [verifier.verify(issuer.issue(_NONCE), _NONCE) for _ in range(12)]
    assert verdicts == [Verdict.GENUINE] * 10 + [Verdict.OVERLOADED] * 2
    clock.now += 1_201.0
    assert verifier.verify(issuer.issue(_NONCE), _NONCE) is Verdict.GENUINE


def test_who_has_no_token_cannot_fill_the_memory():
    _, issuer, verifier = _pair(max_remembered=1)
    token = issuer.issue(_NONCE)
    for position in range(len(token)):
        changed = bytearray(token)
        changed[position] ^= 1
        assert verifier.verify(bytes(changed), _NONCE) in (
            Verdict.MALFORMED,
            Verdict.UNKNOWN_ISSUER,
            Verdict.BAD_SIGNATURE,
        )
    assert verifier.verify(token, _NONCE) is Verdict.GENUINE


@deterministic
@hypothesis.given(st.binary(max_size=300), st.binary(max_size=64))
def test_any_bytes_get_a_reason(token, nonce):
    _, _, verifier = _pair()
    assert verifier.verify(token, nonce) in (Verdict.MALFORMED, Verdict.UNKNOWN_ISSUER)


def test_tokens_share_nothing_but_version_issuer_and_time():
    clock, issuer, _ = _pair()
    one = issuer.issue(attestation.new_challenge())
    two = issuer.issue(attestation.new_challenge())
    fields = [attestation._FIELDS.unpack(token[:-64]) for token in (one, two)]
    same = [a == b for a, b in zip(*fields, strict=True)]
    assert same == [True, True, False, False, True]
    assert one[-64:] != two[-64:]


def test_a_bound_nonce_depends_on_every_part_and_where_parts_end():
    nonces = {
        attestation.bound_nonce(challenge, *context)
        for challenge in (b"a", b"b")
        for context in ((), ("x",), ("y",), ("x", "y"), ("xy",), ("", "xy"), ("xy", ""))
    }
    assert len(nonces) == 14
    assert {len(nonce) for nonce in nonces} == {attestation.NONCE_BYTES}
    assert attestation.bound_nonce(b"a", "x") == attestation.bound_nonce(b"a", "x")


def test_bad_arguments_are_named():
    clock = certificates.Clock()
    with pytest.raises(ValueError, match="nonce must have 32 bytes, got 31"):
        attestation.TokenIssuer(_KEY, clock=clock).issue(b"n" * 31)
    with pytest.raises(ValueError, match="lifetime_s"):
        attestation.TokenIssuer(_KEY, clock=clock, lifetime_s=0)
    with pytest.raises(ValueError, match="issuers is empty"):
        attestation.SignedTokens([], clock=clock)
    with pytest.raises(ValueError, match="max_remembered"):
        attestation.SignedTokens([_KEY.public_key()], clock=clock, max_remembered=0)
