"""What the server sees of single vectors is noise: the sum it learns, and nothing else.

A server that records every message, and removes every mask it can recover, is left with the
survivors' vectors under the masks of pairs that cancel. Given the sum, these must be uniform,
whatever the vectors were. The chi-square tests below compare what is seen for two choices of
vectors of one sum; that they would find a leak is computed, and tried on protocols that have one.
With a noise party the sum is that of vectors and noise. Which sums can be had at all is computed
from the masks that each side has added, by linear algebra.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import (
    group,
    keys,
    masks,
    noise_party,
    parameters,
    secret_sharing,
    unmasking,
    vectors,
)

_MODULUS = 3
_SIZE = 3000  # Entries of a vector, each of which is a sample.
_RUNS = 20
_SAMPLES = _RUNS * _SIZE
_ALPHA = (
    1e-7  # How often a p-value, of which there are fewer than twenty, is below it without a leak.
)
_LAYOUT = (vectors.Segment(_SIZE, _MODULUS),)
# Entries of five devices' vectors, the last of which drop out; the first three have one sum.
_INPUTS = ((0, 0, 0, 1, 2), (1, 2, 0, 2, 2))
# Entries of two devices' vectors and of the noise, of one sum; all the same noise in the first.
_NOISED = ((0, 0, 0), (1, 0, 2))
_PARTY = "party"
_PARTY_KEYS = [ed25519.Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2)]


def _party(demanded, session, number, vector):
    return noise_party.NoiseParty(demanded, session, _PARTY_KEYS[number], lambda: vector)


def _promised(number):
    return tuple(key.public_key().public_bytes_raw() for key in _PARTY_KEYS[:number])


class _Eavesdropper:
    """Keeps what a server gets, and removes the masks whose secrets it can recover."""

    def __init__(self, server):
        self._server = server
        self.sent = {}

    def receive(self, name, message):
        kind = message.WhichOneof("message")
        self.sent.setdefault(kind, {})[name] = getattr(message, kind)
        self._server.receive(name, message)

    def masked(self):
        """The masked vectors as they came, by device."""
        return {
            name: vectors.unpack(message.content, _LAYOUT)[0].astype(int)
            for name, message in self.sent["masked_vector"].items()
        }

    def _secret(self, which, owner, threshold):
        shares = {
            holder: int.from_bytes(share.share, "big")
            for holder, message in self.sent["revealed_shares"].items()
            for share in getattr(message, which)
            if share.index == owner
        }
        holders = sorted(shares)[:threshold]
        recovery = secret_sharing.Recovery([holder + 1 for holder in holders])
        return recovery.recover([shares[holder] for holder in holders])

    def unmasked(self, session, threshold, absent):
        """The masked vectors without the masks that the revealed shares give away."""
        public = {i: m.mask_key for i, m in self.sent["key_advertisement"].items()}
        bound = conversations.bound(session)
        pairs = {
            i: keys.KeyPair.from_int(self._secret("of_mask_keys", i, threshold)) for i in absent
        }
        result = {}
        for name, masked in self.masked().items():
            left = masks.MaskedSum(_LAYOUT)
            left.add([masked.astype(np.uint8)])
            if name == _PARTY:
                result[name] = left.value()[0].astype(int)
                continue
            seed = self._secret("of_self_masks", name, threshold)
            left.subtract_masks([keys.self_mask(seed, bound, name)[0]])
            for i, pair in pairs.items():
                key = pair.mask_key(bound, i, name, public[name])
                (left.subtract_masks if name < i else left.add_masks)([key])
            result[name] = left.value()[0].astype(int)
        return result


def _views(inputs, *, absent=(), lost=False, has_noise=False):
    """What is left of each survivor's vector, for many entries of the same inputs.

    Args:
      inputs: An entry of each device, the same all over its vector.
      absent: Who drops out before it sends its masked vector.
      lost: Whether the group stays below its threshold, so that no share is revealed.
      has_noise: Whether the last entry is the noise of a noise party.

    Returns:
      Entries modulo _MODULUS, shape [number of survivors, samples].
    """
    views = []
    for _ in range(_RUNS):
        least = len(inputs) if lost else 2
        demanded = parameters.Parameters(
            _LAYOUT, conversations.HONEST, least, noise_parties=_promised(int(has_noise))
        )
        session = parameters.new_session()
        server = group.Group(demanded, session)
        devices = {
            i: conversations.make_participant(demanded, session, [np.full(_SIZE, entry, np.uint8)])
            for i, entry in enumerate(inputs[: len(inputs) - has_noise])
        }
        if has_noise:
            noise = [np.full(_SIZE, inputs[-1], np.uint8)]
            devices[_PARTY] = _party(demanded, session, 0, noise)
        seen = _Eavesdropper(server)
        messages = {}
        try:
            while server.phase is not group.Phase.DONE:
                gone = absent if server.phase is group.Phase.MASKING else ()
                messages = conversations.step(
                    server, devices, messages, gone=gone, between=seen.receive
                )
        except group.GroupLostError:
            assert lost and "revealed_shares" not in seen.sent
            view = seen.masked()
        else:
            assert not lost
            num_devices = len(inputs) - has_noise
            view = seen.unmasked(session, num_devices // 2 + 1, absent)
            total = sum(inputs[-1 if i == _PARTY else i] for i in view) % _MODULUS
            np.testing.assert_array_equal(sum(view.values()) % _MODULUS, total)
        views.append(np.stack([view[name] for name in sorted(view, key=str)]))
    return np.concatenate(views, axis=1)


def _counts(view):
    """How often each combination of the survivors' entries occurs."""
    cells = np.ravel_multi_index(view, [_MODULUS] * len(view))
    return np.bincount(cells, minlength=_MODULUS ** len(view))


def _p_value(counts, others):
    table = np.stack([counts, others])
    return scipy.stats.chi2_contingency(table[:, table.sum(axis=0) > 0])[1]


def test_power_of_the_tests():
    # Of two samples of 60,000 of one of 9 combinations: if what is seen moves by 3 % in total
    # variation with the inputs, the test finds it in 999 of 1,000 cases.
    cells, moved = _MODULUS**2, 0.03
    # The least that chi-square sees: all combinations move alike, by 2 moved / cells each.
    distance = cells * (2 * moved / cells) ** 2 / (1 / cells)
    critical = scipy.stats.chi2.isf(_ALPHA, cells - 1)
    power = scipy.stats.ncx2.sf(critical, cells - 1, _SAMPLES / 2 * distance)
    assert power > 0.999


@pytest.mark.parametrize("absent", [(), (3,), (3, 4)])
def test_given_the_sum_what_is_seen_does_not_depend_on_the_vectors(absent):
    inputs = [entries[: 3 + len(absent)] for entries in _INPUTS]
    counts, others = (_counts(_views(entries, absent=absent)) for entries in inputs)
    # Two of three survivors' entries are free: 9 combinations have this sum, all as likely.
    assert np.count_nonzero(counts) == _MODULUS**2
    assert scipy.stats.chisquare(counts[counts > 0]).pvalue > _ALPHA
    assert _p_value(counts, others) > _ALPHA


def test_given_the_noised_sum_what_is_seen_depends_neither_on_vectors_nor_on_noise():
    views = [_views(entries, has_noise=True) for entries in _NOISED]
    counts, others = map(_counts, views)
    # Two of three are free: with 9 combinations of one noised sum, none is likelier.
    assert np.count_nonzero(counts) == _MODULUS**2
    assert scipy.stats.chisquare(counts[counts > 0]).pvalue > _ALPHA
    assert _p_value(counts, others) > _ALPHA
    # Before the noise comes the server has the two devices' vectors, and not even their sum.
    for view in views:
        seen = np.bincount(view[:2].sum(axis=0) % _MODULUS, minlength=_MODULUS)
        assert scipy.stats.chisquare(seen).pvalue > _ALPHA


def test_below_the_threshold_not_even_the_sum_is_seen():
    views = [_views(entries, absent=(3, 4), lost=True) for entries in ((0,) * 5, (1, 1, 2, 0, 2))]
    for view in views:
        counts = _counts(view)
        assert np.count_nonzero(counts) == _MODULUS**3
        assert scipy.stats.chisquare(counts).pvalue > _ALPHA
    assert _p_value(*map(_counts, views)) > _ALPHA


def _leave_part_unmasked(monkeypatch):
    # The first twentieth of every mask is missing.
    apply = masks._ReducedSum.apply

    def leaking(self, *args):
        before = self.total[: _SIZE // 20].copy()
        apply(self, *args)
        self.total[: _SIZE // 20] = before

    monkeypatch.setattr(masks._ReducedSum, "apply", leaking)


def _give_all_pairs_one_key(monkeypatch):
    monkeypatch.setattr(keys.KeyPair, "mask_key", lambda *args: bytes(32))


def _reduce_words_without_rejection(monkeypatch):
    # Words of two bits: modulo 3, one is 0 twice as often as 1 or 2.
    def leaking(self, pair_keys, operation):
        for key in pair_keys:
            mask = masks.MaskedSum((vectors.Segment(_SIZE, 4),))
            mask.add_masks([key])
            operation(self.total, mask.value()[0], out=self.total)

    monkeypatch.setattr(masks._ReducedSum, "apply", leaking)


@pytest.mark.parametrize(
    "leak", [_leave_part_unmasked, _give_all_pairs_one_key, _reduce_words_without_rejection]
)
def test_leaks_are_found(leak, monkeypatch):
    leak(monkeypatch)
    counts, others = (_counts(_views(entries[:3])) for entries in _INPUTS)
    assert _p_value(counts, others) < _ALPHA


# Sums that can be had, by linear algebra over the masks of the vectors that were sent.

_PRIME = 2**31 - 1  # Entries are -1, 0 and 1, two in a column at most: all fields agree.


def _null_space(matrix):
    """A basis of the combinations of rows that are 0, by elimination modulo a prime."""
    rows, columns = matrix.shape
    left = np.concatenate([matrix % _PRIME, np.eye(rows, dtype=np.int64)], axis=1)
    rank = 0
    for column in range(columns):
        pivots = np.flatnonzero(left[rank:, column])
        if not len(pivots):
            continue
        left[[rank, rank + pivots[0]]] = left[[rank + pivots[0], rank]]
        left[rank] = left[rank] * pow(int(left[rank, column]), -1, _PRIME) % _PRIME
        for row in range(rows):
            if row != rank and left[row, column]:
                left[row] = (left[row] - left[row, column] * left[rank]) % _PRIME
        rank += 1
    basis = left[rank:, columns:]
    return {tuple(np.where(row > _PRIME // 2, row - _PRIME, row)) for row in basis}


class _Masks:
    """Keys of the masks that each sender has added or subtracted, and of those the server knows."""

    def __init__(self, monkeypatch):
        self.of_sender = {}
        self.known = set()
        self.sender = None
        for name, sign in (("add_masks", 1), ("subtract_masks", -1)):
            monkeypatch.setattr(masks.MaskedSum, name, self._spy(name, sign))
        unmask = unmasking.Unmasker.unmask

        def spy(unmasker, masked):
            self.known |= {*unmasker._added, *unmasker._subtracted}
            unmask(unmasker, masked)

        monkeypatch.setattr(unmasking.Unmasker, "unmask", spy)

    def _spy(self, name, sign):
        original = getattr(masks.MaskedSum, name)

        def spied(masked, mask_keys):
            if self.sender is not None:
                own = self.of_sender.setdefault(self.sender, {})
                own.update({key: own.get(key, 0) + sign for key in mask_keys})
            original(masked, mask_keys)

        return spied

    def sums(self, senders, *, known=frozenset()):
        """Coefficients of the sums of some senders' vectors from which all masks cancel."""
        columns = sorted({key for s in senders for key in self.of_sender[s]} - self.known - known)
        matrix = [[self.of_sender[s].get(key, 0) for key in columns] for s in senders]
        return _null_space(np.array(matrix, np.int64).reshape(len(senders), len(columns)))


def _run_spied(monkeypatch, *, parties, neighbours=None, num_devices=8, gone=(3,)):
    layout = (vectors.Segment(4, 2**16),)
    demanded = parameters.Parameters(
        layout, conversations.HONEST, 2, neighbours, noise_parties=_promised(parties)
    )
    session = parameters.new_session()
    server = group.Group(demanded, session, num_neighbours=neighbours)
    zeros = vectors.zeros(layout)
    members = {
        i: conversations.make_participant(demanded, session, zeros) for i in range(num_devices)
    }
    members |= {f"party {i}": _party(demanded, session, i, zeros) for i in range(parties)}
    spied = _Masks(monkeypatch)
    for name, member in members.items():
        server.receive(name, member.advertise())
    while messages := server.advance():
        for name, message in messages.items():
            spied.sender = name
            answer = members[name].answer(message)
            spied.sender = None
            if name in gone and server.phase is group.Phase.MASKING:
                server.drop(name)
                spied.of_sender.pop(name)
            else:
                server.receive(name, answer)
    devices = [i for i in range(num_devices) if i not in gone]
    return spied, devices, [f"party {i}" for i in range(parties)]


@pytest.mark.parametrize("neighbours", [None, 4])
@pytest.mark.parametrize("parties", [1, 2])
def test_the_one_sum_that_can_be_had_has_all_devices_and_all_noise(
    neighbours, parties, monkeypatch
):
    spied, devices, noise = _run_spied(monkeypatch, parties=parties, neighbours=neighbours)
    everybody = [*devices, *noise]
    assert spied.sums(everybody) == {(1,) * len(everybody)}
    for left_out in everybody:
        assert not spied.sums([s for s in everybody if s != left_out])
    assert not spied.sums(devices)


@pytest.mark.parametrize("parties", [1, 2])
def test_with_all_secrets_that_are_shared_the_noise_is_still_in_every_sum(parties, monkeypatch):
    # The server has as many devices in league with it as it takes, or lies about survivors: it
    # knows all masks but those of noise parties.
    spied, devices, noise = _run_spied(monkeypatch, parties=parties, neighbours=4)
    of_noise = {key for name in noise for key in spied.of_sender[name]}
    shared = {key for i in devices for key in spied.of_sender[i]} - of_noise
    everybody = [*devices, *noise]
    assert spied.sums(everybody, known=shared) == {(1,) * len(everybody)}
    # One of two noise parties in league with the server takes its own noise away, and no other.
    for colluding in noise[1:]:
        others = set(spied.of_sender[colluding])
        found = spied.sums([*devices, noise[0]], known=shared | others)
        assert found == {(1,) * (len(devices) + 1)}
    # Without noise parties, the same server sees each vector.
    spied, devices, _ = _run_spied(monkeypatch, parties=0, neighbours=4)
    shared = {key for i in devices for key in spied.of_sender[i]}
    assert len(spied.sums(devices, known=shared)) == len(devices)
