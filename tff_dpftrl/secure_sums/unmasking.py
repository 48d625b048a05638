"""How the masks that are left in a sum of masked vectors are recovered, verified and removed.

A wrong share would give a wrong sum that nobody sees. So a secret counts as recovered only when
it is the one that its device is known by: a mask key by the public key that was advertised, the
seed of a self-mask by its commitment. Wrong shares are corrected as long as there are two more
right ones than needed for each of them, and whoever sent one is asked last for other secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tff_dpftrl.secure_sums import keys, masks, secret_sharing

_Known = TypeVar("_Known")


class Recoverer:
    """Recovers many secrets of one group, whose shares the same devices tend to hold."""

    def __init__(self, num_revealed: Mapping[int, int]):
        """Starts without suspicion.

        Args:
          num_revealed: How many shares each device has revealed. Those with most are asked first,
            so that the same few are asked for one secret after the other whatever others left out.
        """
        self._num_revealed = num_revealed
        self._recoveries: dict[tuple[int, ...], secret_sharing.Recovery] = {}
        self._suspects: set[int] = set()

    def recover(
        self,
        shares: Mapping[int, int],
        points: Mapping[int, int],
        threshold: int,
        known: Callable[[int], _Known | None],
    ) -> _Known | None:
        """A secret that passes its check.

        Args:
          shares: By the index of the device that held them.
          points: Of the shares, by the same index.
          threshold: How many recover the secret.
          known: Makes of a number what it is wanted for; None if it is not the secret.

        Returns:
          What `known` makes of the secret; None if there are too few shares, or too many wrong
          ones among them.
        """
        if len(shares) < threshold:
            return None
        trusted = sorted(shares.keys() - self._suspects, key=self._rank)
        holders = trusted + sorted(shares.keys() & self._suspects)
        first = tuple(points[holder] for holder in holders[:threshold])
        if first not in self._recoveries:
            self._recoveries[first] = secret_sharing.Recovery(first)
        secret = self._recoveries[first].recover([shares[holder] for holder in holders[:threshold]])
        result = known(secret)
        if result is not None:
            return result
        for chosen in (trusted, holders):
            corrected = secret_sharing.correct(
                [points[holder] for holder in chosen],
                [shares[holder] for holder in chosen],
                threshold,
            )
            result = None if corrected is None else known(corrected[0])
            if result is not None:
                self._suspects |= {holder for holder in chosen if points[holder] in corrected[1]}
                return result
        return None

    def _rank(self, holder: int) -> tuple[int, int]:
        return -self._num_revealed.get(holder, 0), holder


class Unmasker:
    """Recovers the masks that are in a sum from what the devices of one session have revealed."""

    def __init__(self, session: bytes, num_revealed: Mapping[int, int]):
        """Starts without masks.

        Args:
          session: Name of the session, that keys are bound to.
          num_revealed: How many shares each device has revealed.
        """
        self._session = session
        self._recoverer = Recoverer(num_revealed)
        self._added: list[bytes] = []  # Keys of masks, by what the devices did.
        self._subtracted: list[bytes] = []

    def recover_self_mask(
        self,
        owner: int,
        shares: Mapping[int, int],
        points: Mapping[int, int],
        threshold: int,
        commitment: bytes,
    ) -> bool:
        """Recovers the mask that a device has added of its own.

        Args:
          owner: Index of the device, whose vector is in the sum.
          shares: Of its seed, by holder.
          points: Of the shares, by holder.
          threshold: How many recover it.
          commitment: What its seed is known by.

        Returns:
          Whether the seed could be recovered.
        """

        def known(seed: int) -> bytes | None:
            if seed >> 8 * keys.SEED_BYTES:
                return None
            mask_key, committed = keys.self_mask(seed, self._session, owner)
            return mask_key if committed == commitment else None

        mask_key = self._recoverer.recover(shares, points, threshold, known)
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
        """Recovers the masks that an absent device has in common with its neighbours.

        Args:
          owner: Index of the device, whose vector is not in the sum.
          shares: Of its private key for masks, by holder.
          points: Of the shares, by holder.
          threshold: How many recover it.
          public_key: Its public key.
          others: The public keys of its neighbours in the sum, by index.

        Returns:
          Whether the key could be recovered.
        """

        def known(key: int) -> keys.KeyPair | None:
            if key >> 8 * keys.PRIVATE_KEY_BYTES:
                return None
            pair = keys.KeyPair.from_int(key)
            return pair if pair.public == public_key else None

        pair = self._recoverer.recover(shares, points, threshold, known)
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
