"""The private rounds that this process has built: which clipping belongs to which release.

A factory registers the two TensorFlow computations of a private round, the one that
clips at the clients and the one that adds the noise at the server, and
`check_process` recognises them by their exact bytes. Nothing else can be taken for
them: equal bytes are the same function.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection

import tensorflow as tf
import tensorflow_federated as tff


@dataclasses.dataclass(frozen=True)
class Release:
    """One pair of a clipping and the release of its sums.

    Attributes:
      noise_multiplier: z, in units of the norm of one client's contribution; the
        smallest one, if aggregators with other norms run the same two computations.
      not_private_because: Why the release protects nobody, or None.
    """

    noise_multiplier: float
    not_private_because: str | None


_releases: dict[tuple[bytes, bytes], Release] = {}
_contributions: dict[bytes, frozenset[int]] = {}
_totals: dict[bytes, frozenset[int]] = {}


def register(
    *,
    clip: tff.Computation,
    contributions: Collection[int],
    release: tff.Computation,
    totals: Collection[int],
    noise_multiplier: float,
    deterministic_seed: int | None,
) -> None:
    """Declares that `release` makes sums of what `clip` returns private.

    Whoever calls this vouches for it: the norm of one client's `contributions` is bounded,
    and the release adds noise of `noise_multiplier` times the bound to every total.

    Args:
      clip: A `tff.tensorflow.computation` that the clients run.
      contributions: Which top-level elements of its result are summed.
      release: A `tff.tensorflow.computation` that the server runs once on the sums.
      totals: Which top-level elements of its argument are the sums.
      noise_multiplier: z; with 0 the release is not private.
      deterministic_seed: The seed of the noise if somebody knows it, else None.
    """
    reason = None
    if noise_multiplier == 0:
        reason = "its noise_multiplier is 0"
    elif deterministic_seed is not None:
        reason = "the seed of its noise is known (deterministic_seed)"
    # The seed is not in the release's graph, so that one made with a known seed may have the
    # same bytes as a private one; `note_seed` tells them apart, else neither counts as private.
    clip_digest = digest(clip.to_building_block())
    release_digest = digest(release.to_building_block())
    contributions, totals = frozenset(contributions), frozenset(totals)
    _contributions[clip_digest] = _contributions.get(clip_digest, contributions) & contributions
    _totals[release_digest] = _totals.get(release_digest, totals) & totals
    known = _releases.get((clip_digest, release_digest))
    if known is not None:
        reason = reason or known.not_private_because
        noise_multiplier = min(noise_multiplier, known.noise_multiplier)
    _releases[clip_digest, release_digest] = Release(noise_multiplier, reason)


def note_seed(deterministic_seed: int | None) -> None:
    """Writes into the graph of a release whether the seed of its noise is known.

    Call it in the function that becomes the `tff.tensorflow.computation`.

    Args:
      deterministic_seed: As in `register`.
    """
    if deterministic_seed is not None:
        tf.no_op(name="deterministic_seed")


def digest(computation: tff.framework.CompiledComputation) -> bytes:
    """SHA-256 of a compiled computation: its graph, and what goes in and out of it."""
    return hashlib.sha256(computation.proto.SerializeToString(deterministic=True)).digest()


def contributions_of(clip: bytes) -> frozenset[int] | None:
    """The elements of a clipping's result that may be summed, None if it is unknown."""
    return _contributions.get(clip)


def find(clip: bytes, release: bytes) -> Release | None:
    """The registered pair of these digests, None if there is none."""
    return _releases.get((clip, release))


def totals_of(release: bytes) -> frozenset[int] | None:
    """The elements of a release's argument that are sums, None if it is unknown."""
    return _totals.get(release)
