"""Registry of the private rounds built in this Python process: pairs of clipping and release.

A factory registers two TensorFlow computations of a private round: the one that
clips at the clients, and the one that adds the noise at the server. `check_process`
recognises them by the digests of their graphs, so that it mistakes nothing else for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection

import tensorflow as tf

from tff_dpftrl.execution import entropy, graph_function, tff_names


@dataclasses.dataclass(frozen=True)
class Release:
    """Registered pair of a clipping and the release of its sums.

    `noise_multiplier` is z in units of the norm of one client's contribution: the smallest one, if
    several aggregators run the same two computations. `not_private_because` is the reason why the
    release is not private, or None.
    """

    noise_multiplier: float
    not_private_because: str | None


_releases: dict[tuple[bytes, bytes], Release] = {}
_contributions: dict[bytes, frozenset[int]] = {}
_totals: dict[bytes, frozenset[int]] = {}


def register(
    *,
    clip: tff_names.ConcreteComputation,
    contributions: Collection[int],
    release: tff_names.ConcreteComputation,
    totals: Collection[int],
    noise_multiplier: float,
    deterministic_seed: int | None,
) -> None:
    """Declares that `release` makes the sums of the results of `clip` private.

    The caller vouches for two facts: the norm of one client's `contributions` is bounded,
    and the release adds noise of `noise_multiplier` times the bound to every total.

    `contributions` are the indices of the top-level elements of the result of `clip` that are
    summed, and `totals` those of the elements of the argument of `release` that are the sums. With
    noise multiplier 0, a given seed, or one from a file of tests, the release is not private.
    """
    reason = None
    if noise_multiplier == 0:
        reason = "its noise_multiplier is 0"
    elif deterministic_seed is not None:
        reason = "the seed of its noise is known (deterministic_seed)"
    elif not entropy.is_of_the_system(_graph_of(_compiled(release))):
        reason = "the seed of its noise comes from a file, and not from the operating system"
    # A release reads fresh bits of the operating system unless its seed is known, and so has
    # another graph. If the graphs were the same, neither would count as private.
    clip_digest = digest(_compiled(clip))
    release_digest = digest(_compiled(release))
    contributions, totals = frozenset(contributions), frozenset(totals)
    _contributions[clip_digest] = _contributions.get(clip_digest, contributions) & contributions
    _totals[release_digest] = _totals.get(release_digest, totals) & totals
    known = _releases.get((clip_digest, release_digest))
    if known is not None:
        reason = reason or known.not_private_because
        noise_multiplier = min(noise_multiplier, known.noise_multiplier)
    _releases[clip_digest, release_digest] = Release(noise_multiplier, reason)


def _compiled(computation: tff_names.ConcreteComputation) -> tff_names.CompiledComputation:
    block = computation.to_building_block()
    if not isinstance(block, tff_names.CompiledComputation):
        raise TypeError(f"A TensorFlow computation is a compiled one, got {type(block)}.")
    return block


def _graph_of(computation: tff_names.CompiledComputation) -> tf.compat.v1.GraphDef:
    graph = tf.compat.v1.GraphDef()
    computation.proto.tensorflow.graph_def.Unpack(graph)
    return graph


def digest(computation: tff_names.CompiledComputation) -> bytes:
    """Computes the SHA-256 of a compiled computation: its graph and the bindings of its tensors.

    TensorFlow numbers the functions of a graph anew in every trace: the graph is hashed without
    these numbers.
    """
    content = type(computation.proto)()
    content.CopyFrom(computation.proto)
    packed, graph = content.tensorflow.graph_def, _graph_of(computation)
    graph_function.make_canonical(graph)
    packed.ClearField("value")
    message = content.SerializeToString(deterministic=True)
    return hashlib.sha256(message + graph.SerializeToString(deterministic=True)).digest()


def contributions_of(clip: bytes) -> frozenset[int] | None:
    """Returns the elements of a clipping's result that may be summed, None if it is unknown."""
    return _contributions.get(clip)


def find(clip: bytes, release: bytes) -> Release | None:
    """Returns the registered pair of these digests, None if there is none."""
    return _releases.get((clip, release))


def totals_of(release: bytes) -> frozenset[int] | None:
    """Returns the elements of a release's argument that are sums, None if it is unknown."""
    return _totals.get(release)
