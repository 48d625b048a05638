"""Recovery and removal of the masks that are left in a sum of masked vectors.

A wrong share would silently give a wrong sum. So a recovered secret is verified: a mask key by the
public key that was advertised, the seed of a self-mask by its commitment. Wrong shares are
corrected as long as each of them comes with two more shares than needed. Once a holder has sent a
wrong share, its shares are used last for other secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tff_dpftrl.secure_sums import keys, masks, secret_sharing

_Verified = TypeVar("_Verified")


class Recoverer:
    """Recovery of many secrets of one group, whose shares the same devices tend to hold."""

    def __init__(self, num_revealed: Mapping[int, int]):
        """Starts without suspicion.

        The devices that revealed most shares come first, so that most secrets are recovered from
        the same few devices.
        """
        self._num_revealed = num_revealed
        self._recoveries: dict[tuple[int, ...], secret_sharing.Recovery] = {}
        self._suspects: set[int] = set()

    def recover(
        self,
        shares: Mapping[int, int],
        points: Mapping[int, int],
        threshold: int,
        verify: Callable[[int], _Verified | None],
    ) -> _Verified | None:
        """Recovers a secret; returns the key that `verify` turns it into.

        None if there are too few shares, or too many wrong ones among them. `verify` returns None
        for a number that is not the secret. Shares and points are by the index of their holder.
        """
        if len(shares) < threshold:
            return None
        trusted = sorted(shares.keys() - self._suspects, key=self._rank)
        holders = trusted + sorted(shares.keys() & self._suspects)
        first = tuple(points[holder] for holder in holders[:threshold])
        if first not in self._recoveries:
            self._recoveries[first] = secret_sharing.Recovery(first)
        secret = self._recoveries[first].recover([shares[holder] for holder in holders[:threshold]])
        result = verify(secret)
        if result is not None:
            return result
        for chosen in (trusted, holders):
            corrected = secret_sharing.correct(
                [points[holder] for holder in chosen],
                [shares[holder] for holder in chosen],
                threshold,
            )
            if corrected is None:
                continue
            secret, wrong_points = corrected
            result = verify(secret)
            if result is not None:
                self._suspects |= {holder for holder in chosen if points[holder] in wrong_points}
                return result
        return None

    def _rank(self, holder: int) -> tuple[int, int]:
        return -self._num_revealed.get(holder, 0), holder


class Unmasker:
    """Recovery of the masks in a sum from the shares that one session's devices have revealed."""

    def __init__(self, session: bytes, num_revealed: Mapping[int, int]):
        """Starts without masks; keys are bound to the session."""
        self._session = session
        self._recoverer = Recoverer(num_revealed)
        self._added: list[bytes] = []  # Keys of the masks that devices added, or subtracted.
        self._subtracted: list[bytes] = []

    def recover_self_mask(
        self,
        owner: int,
        shares: Mapping[int, int],
        points: Mapping[int, int],
        threshold: int,
        commitment: bytes,
    ) -> bool:
        """Recovers the self-mask of a device whose vector is in the sum; returns whether it could.

        Shares of the seed, and their points, are by holder.
        """

        def verify(seed: int) -> bytes | None:
            if seed >> 8 * keys.SEED_BYTES:
                return None
            mask_key, committed = keys.self_mask(seed, self._session, owner)
            return mask_key if committed == commitment else None

        mask_key = self._recoverer.recover(shares, points, threshold, verify)
        if mask_key is None:
            return False
        self._added.append(mask_key)
        return True

    def recover_pair_masks(
        self,
        owner: int,
        shares: Mapping[int, int],
        points: Mapping[int, int],
        threshold: int,
        public_key: bytes,
        others: Mapping[int, bytes],
    ) -> bool:
        """Recovers the masks that an absent device has in common with its neighbours, if it can.

        The device's vector is not in the sum. Shares of its private key for masks, and their
        points, are by holder. `others` are the public keys of its neighbours in the sum, by index.
        """

        def verify(key: int) -> keys.KeyPair | None:
            if key >> 8 * keys.PRIVATE_KEY_BYTES:
                return None
            pair = keys.KeyPair.from_int(key)
            return pair if pair.public == public_key else None

        pair = self._recoverer.recover(shares, points, threshold, verify)
        if pair is None:
            return False
        mask_keys = {
            other: pair.mask_key(self._session, owner, other, others_public)
            for other, others_public in others.items()
        }
        # The device of the lower index has added the mask, the other has subtracted it.
        self._added += [key for other, key in mask_keys.items() if other < owner]
        self._subtracted += [key for other, key in mask_keys.items() if other > owner]
        return True

    def unmask(self, masked: masks.MaskedSum) -> None:
        """Removes all masks that were recovered from a sum."""
        masked.subtract_masks(self._added)
        masked.add_masks(self._subtracted)
