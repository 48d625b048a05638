"""What the server sees of single vectors is noise: the sum it learns, and nothing else.

A server that records every message, and removes every mask it can recover, is left with the
survivors' vectors under the masks of pairs that cancel. Given the sum, these must be uniform,
whatever the vectors were. The chi-square tests below compare what is seen for two choices of
vectors of one sum; that they would find a leak is computed, and tried on protocols that have one.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import scipy.stats

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import group, keys, masks, parameters, secret_sharing, vectors

_MODULUS = 3
_SIZE = 3000  # Entries of a vector, each of which is a sample.
_RUNS = 20
_SAMPLES = _RUNS * _SIZE
_ALPHA = 1e-7  # How often a p-value, of which there are nine, is below it without a leak.
_LAYOUT = (vectors.Segment(_SIZE, _MODULUS),)
# Entries of five devices' vectors, the last of which drop out; the first three have one sum.
_INPUTS = ((0, 0, 0, 1, 2), (1, 2, 0, 2, 2))


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
            seed = self._secret("of_self_masks", name, threshold)
            left.subtract_masks([keys.self_mask(seed, bound, name)[0]])
            for i, pair in pairs.items():
                key = pair.mask_key(bound, i, name, public[name])
                (left.subtract_masks if name < i else left.add_masks)([key])
            result[name] = left.value()[0].astype(int)
        return result


def _views(inputs, *, absent=(), lost=False):
    """What is left of each survivor's vector, for many entries of the same inputs.

    Args:
      inputs: An entry of each device, the same all over its vector.
      absent: Who drops out before it sends its masked vector.
      lost: Whether the group stays below its threshold, so that no share is revealed.

    Returns:
      Entries modulo _MODULUS, shape [number of survivors, samples].
    """
    views = []
    for _ in range(_RUNS):
        least = len(inputs) if lost else 2
        demanded = parameters.Parameters(_LAYOUT, conversations.HONEST, least)
        session = parameters.new_session()
        server = group.Group(demanded, session)
        devices = {
            i: conversations.make_participant(demanded, session, [np.full(_SIZE, entry, np.uint8)])
            for i, entry in enumerate(inputs)
        }
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
            view = seen.unmasked(session, len(inputs) // 2 + 1, absent)
            total = sum(inputs[i] for i in view) % _MODULUS
            np.testing.assert_array_equal(sum(view.values()) % _MODULUS, total)
        views.append(np.stack([view[name] for name in sorted(view)]))
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
