"""Secrets are recovered as far as shares can be right, and wrong ones never pass for them."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from tff_dpftrl.secure_sums import secret_sharing, unmasking

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
_POINTS = {holder: holder + 1 for holder in range(7)}


@_SETTINGS
@hypothesis.given(st.data())
def test_recovered_secrets_are_right_and_recoverable_ones_recovered(data):
    recoverer = unmasking.Recoverer({})
    num_holders = data.draw(st.integers(2, 12))
    threshold = data.draw(st.integers(2, num_holders))
    liars = data.draw(st.sets(st.integers(0, num_holders - 1), max_size=4))
    for secret in data.draw(st.lists(st.integers(0, 2**256 - 1), min_size=1, max_size=4)):
        split = secret_sharing.split([secret], threshold, num_holders)
        points = {holder: holder + 1 for holder in range(num_holders)}
        shares = {holder: share for holder, (share,) in enumerate(split)}
        for holder in data.draw(st.sets(st.integers(0, num_holders - 1), max_size=2)) - liars:
            del shares[holder]  # Did not answer.
        present_liars = liars & shares.keys()
        for holder in present_liars:
            shares[holder] = (shares[holder] + 1 + holder) % secret_sharing.PRIME
        known = {secret: "known"}.get
        recovered = recoverer.recover(shares, points, threshold, known)
        assert recovered in (None, "known")
        if threshold + 2 * len(present_liars) <= len(shares):
            assert recovered == "known"


def test_with_suspects_known_fewer_spare_shares_are_needed():
    recoverer = unmasking.Recoverer({})

    def shares(secret, liars):
        split = secret_sharing.split([secret], 3, 7)
        return {
            holder: (share + (holder in liars) * (7 + holder)) % secret_sharing.PRIME
            for holder, (share,) in enumerate(split)
        }

    assert recoverer.recover(shares(5, {0, 1}), _POINTS, 3, {5: "known"}.get) == "known"
    later = shares(6, {0, 1})
    del later[5], later[6]  # Of five shares two are wrong, and one could be corrected.
    assert unmasking.Recoverer({}).recover(later, _POINTS, 3, {6: "known"}.get) is None
    assert recoverer.recover(later, _POINTS, 3, {6: "known"}.get) == "known"


def test_who_left_out_shares_is_asked_after_all_others(monkeypatch):
    num_computed = 0
    init = secret_sharing.Recovery.__init__

    def counted(self, points):
        nonlocal num_computed
        num_computed += 1
        init(self, points)

    monkeypatch.setattr(secret_sharing.Recovery, "__init__", counted)
    split = secret_sharing.split([5], 3, 7)
    all_shares = {holder: share for holder, (share,) in enumerate(split)}
    # Of four devices each leaves out others: 2⁴ sets, of which each would take its own factors.
    left_out = [{i for i in range(4) if case >> i & 1} for case in range(16)]
    num_revealed = {holder: 16 - 8 * (holder < 4) for holder in range(7)}
    recoverer = unmasking.Recoverer(num_revealed)
    for missing in left_out:
        shares = {holder: all_shares[holder] for holder in all_shares.keys() - missing}
        assert recoverer.recover(shares, _POINTS, 3, {5: "known"}.get) == "known"
    assert num_computed == 1


def test_too_few_shares_ask_nobody():
    def known(secret):
        raise AssertionError(secret)

    assert unmasking.Recoverer({}).recover({0: 1, 1: 2}, _POINTS, 3, known) is None
