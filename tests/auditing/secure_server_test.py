"""The audit that plays the server sees nothing of sound code, and finds what is planted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.auditing import secure_server
from tff_dpftrl.secure_sums import device, keys, masks, noise_party, parameters, vectors

_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(3000, 2**20), vectors.Segment(500, 5003))
_NOISED = 1
_SIGNING = [ed25519.Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2)]
_STDDEV = 300.0
_ROWS = (0, 1, 2, 3, 5, 6)  # Of the attempts: the fourth row was given to an attempt that failed.
_CONTEXTS = [f"round {row}".encode() for row in _ROWS]
_ERROR_RATE = 1e-6


def _demanded(num_parties, **changes):
    return parameters.Parameters(
        _LAYOUT,
        parameters.ThreatModel.HONEST_BUT_CURIOUS,
        3,
        noise_parties=tuple(k.public_key().public_bytes_raw() for k in _SIGNING[:num_parties]),
        **changes,
    )


class _Parties:
    """Makes noise parties with correlated noise: the running differences of one another's rows."""

    def __init__(self, *, scale=1.0, rows=_ROWS, kind=noise_party.NoiseParty):
        self._scale, self._rows, self._kind = scale, rows, kind

    def __call__(self, demanded, session, context, party, attempt):
        row = self._rows[attempt % len(self._rows)]

        def draw():
            made = vectors.zeros(demanded.layout)
            drawn = _STDDEV * self._scale * (_unit(party, row) - 0.5 * _unit(party, row - 1))
            made[_NOISED][:] = np.round(drawn).astype(np.int64) % 2**20
            return made

        return self._kind(demanded, session, _SIGNING[party], draw, context=context)


def _unit(party, row):
    return np.random.default_rng([party, row + 1]).standard_normal(_LAYOUT[_NOISED].size)


def _covariance(num_parties):
    rows = np.array(_ROWS)
    gaps = np.abs(rows[:, np.newaxis] - rows)
    return num_parties * _STDDEV**2 * np.select([gaps == 0, gaps == 1], [1.25, -0.5], 0.0)


def _outcomes(num_parties=1, *, make_party=None, make_device=secure_server.honest_device):
    demanded = _demanded(num_parties)
    make_party = make_party or _Parties()
    attempts = secure_server.play(demanded, make_party, _CONTEXTS, make_device=make_device)
    found = (
        secure_server.hidden(demanded, attempts, _ERROR_RATE),
        secure_server.noise(demanded, attempts, _NOISED, _covariance(num_parties), _ERROR_RATE),
        secure_server.refused(demanded, make_party, make_device=make_device),
    )
    return [finding.outcome for finding in found], found


@pytest.mark.parametrize("num_parties", [1, 2])
def test_sound_code_is_not_accused(num_parties):
    outcomes, found = _outcomes(num_parties)
    assert outcomes == ["consistent"] * 3, found
    assert "Each of 9 was refused" in found[2].says
    assert found[0].trials == 6 * 3501 + 5 * 3501
    assert found[0].power == "1.78% of the entries without a mask"


def test_the_server_is_left_with_vector_and_noise_exactly():
    demanded = _demanded(2)
    [attempt] = secure_server.play(demanded, _Parties(), _CONTEXTS[:1])
    expected = sum(
        np.round(_STDDEV * (_unit(party, 0) - 0.5 * _unit(party, -1))) for party in range(2)
    )
    left = (attempt.after[1].astype(int) - attempt.vector[1].astype(int)) % 2**20
    np.testing.assert_array_equal(left, expected % 2**20)
    np.testing.assert_array_equal(attempt.after[0], attempt.vector[0])


def test_a_graph_of_neighbours_is_played_too():
    demanded = _demanded(1, least_neighbours=6)
    attempts = secure_server.play(demanded, _Parties(), _CONTEXTS)
    assert secure_server.hidden(demanded, attempts, _ERROR_RATE).outcome == "consistent"


# Planted faults.


def _reused(rows):
    return _Parties(rows=rows)


def test_noise_of_an_abandoned_attempt_that_is_used_again_is_found():
    # The fourth attempt was abandoned after its noise was sent; the fifth gets the same row.
    outcomes, found = _outcomes(make_party=_reused((0, 1, 2, 3, 3, 6)))
    assert outcomes == ["consistent", "violated", "consistent"]
    assert "attempts 4 and 5 have the same noise" in found[1].says


def test_part_of_the_noise_that_is_used_again_is_found():
    # Only the new draw of a row is used again, not the row: no two attempts have the same noise.
    class Mixed(_Parties):
        def __call__(self, demanded, session, context, party, attempt):
            row = _ROWS[attempt % len(_ROWS)]
            fresh = 2 if attempt == 4 else row

            def draw():
                made = vectors.zeros(demanded.layout)
                drawn = _STDDEV * (_unit(party, fresh) - 0.5 * _unit(party, row - 1))
                made[_NOISED][:] = np.round(drawn).astype(np.int64) % 2**20
                return made

            return noise_party.NoiseParty(demanded, session, _SIGNING[party], draw, context=context)

    outcomes, found = _outcomes(make_party=Mixed())
    assert outcomes == ["consistent", "violated", "consistent"]
    assert "the largest is" in found[1].says


@pytest.mark.parametrize("scale", [0.0, 0.95])
def test_too_little_noise_is_found(scale):
    outcomes, found = _outcomes(make_party=_Parties(scale=scale))
    assert outcomes[1] == "violated"
    assert "times the claimed one" in found[1].says


def test_noise_of_one_of_two_parties_is_found_to_be_too_little():
    demanded = _demanded(1)
    attempts = secure_server.play(demanded, _Parties(), _CONTEXTS)
    finding = secure_server.noise(demanded, attempts, _NOISED, _covariance(2), _ERROR_RATE)
    assert finding.outcome == "violated"


def test_a_device_without_the_mask_of_the_noise_party_is_found():
    class Careless(device.Participant):
        def answer(self, message):
            if message.WhichOneof("message") == "received_shares":
                self._noise_mask_keys = []
            return super().answer(message)

    def make(demanded, session, context, vector):
        return Careless(demanded, session, vector, context=context)

    outcomes, found = _outcomes(make_device=make)
    assert outcomes[0] == "violated"
    assert "not uniform" in found[0].says


def test_a_mask_that_is_the_same_in_two_attempts_is_found(monkeypatch):
    def same(self, noise_session, index, others_public):
        del self, noise_session, others_public
        return bytes([index]) * masks.KEY_BYTES

    monkeypatch.setattr(keys.KeyPair, "noise_mask_key", same)
    outcomes, found = _outcomes()
    assert outcomes[0] == "violated"
    assert "masks of two attempts" in found[0].says


def test_a_device_that_takes_any_key_for_the_partys_is_found():
    class Trusting(device.Participant):
        def answer(self, message):
            if message.WhichOneof("message") == "directory":
                signed = [
                    keys.sign_noise_party(_SIGNING[0], self._noise_session, keys_.mask_key)
                    for keys_ in message.directory.noise_parties
                ]
                del message.directory.noise_parties[:]
                message.directory.noise_parties.extend(signed)
            return super().answer(message)

    def make(demanded, session, context, vector):
        return Trusting(demanded, session, vector, context=context)

    outcomes, found = _outcomes(make_device=make)
    assert outcomes == ["consistent", "consistent", "violated"]
    for said in ("a key that the server made", "keys of another session", "another round"):
        assert said in found[2].says


def test_a_noise_party_that_answers_twice_is_found():
    class Obliging(noise_party.NoiseParty):
        def answer(self, message):
            kept = self._mask_keys
            try:
                return super().answer(message)
            finally:
                self._mask_keys = kept

    outcomes, found = _outcomes(make_party=_Parties(kind=Obliging))
    assert outcomes == ["consistent", "consistent", "violated"]
    assert found[2].says == "a noise party answers a second request."


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"noise_parties": ()}, "noise_parties is empty"),
        ({"threat_model": parameters.ThreatModel.ACTIVE_SERVER}, "replace it by HONEST"),
    ],
)
def test_parameters_that_cannot_be_played(changes, match):
    demanded = dataclasses.replace(_demanded(1), **changes)
    with pytest.raises(validation.UsageError, match=match):
        secure_server.play(demanded, _Parties(), _CONTEXTS)
