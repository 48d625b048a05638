"""Noise of a DP-FTRL run as a stream of NumPy arrays, with its guarantee.

    stream = tff_dpftrl.NoiseStream(strategy, noise_multiplier=z, clip_norm=c, template=params)
    noise = stream.next(t)  # Add it to the sum of round t's clipped updates, then divide.
    claim = stream.guarantee(schema, delta=1e-6)

docs/how_to/other_frameworks.md has whole loops.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.mechanisms import noise_recipe, serialization
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.numpy_noise import kernels, philox
from tff_dpftrl.participation import schema as schema_lib

_UPDATE_STREAM = 0  # That of the updates in `private_round`.
_VERSION = 2  # Raised with every change after which a state has another form.
_STDDEVS = (1e-30, 1e30)  # Outside these, float32 noise comes near the ends of its range.
_RESUME = "Give the state that NoiseStream.state returned."


class NoiseStream:
    """Stream of the noise of one DP-FTRL run: `noise_multiplier · clip_norm · (C⁻¹ z)_t`.

    The noise is for the *sum* of the round's clipped updates: add it before the division by
    the number of clients. The caller's code clips and sums, and nothing here can check it.
    The sensitivity is covered if no user adds more than `clip_norm` (L2, all tensors together)
    to the sum of a round.

    Every call of `next` draws from fresh bits of the operating system. If a run goes on twice from
    one state, the new draws of the two *branches* are independent, and what the branches cost adds
    up (docs/explanation/participation.md).

    A stream holds past noise, or the seeds that it is drawn from again: whoever reads the object,
    a pickle of it or its state can subtract noise.

    With a given seed, which is for tests, the noise is a function of seed and round. It is the
    noise that an aggregator with the same strategy and seed adds: the random words are equal bit
    for bit, the noise up to float32 rounding. On one machine with one version of NumPy, a stream
    that goes on from a state repeats it bit for bit.

    Attributes:
      strategy: Strategy C that correlates the noise of different rounds.
      noise_multiplier: Standard deviation of z per unit clip norm.
      clip_norm: Largest L2 norm of what one user adds to the sum of a round.
      seed_is_known: Whether the caller gave the seed, so that nothing is private.
    """

    def __init__(
        self,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        clip_norm: float,
        template: Sequence[Any] | Mapping[str, Any],
        seed: int | None = None,
    ):
        """Initialises the stream before its first round.

        Args:
          strategy: Strategy C that correlates the noise of different rounds.
          noise_multiplier: Standard deviation of z for clip norm 1. With 0 there is no noise
            and no privacy.
          clip_norm: L2 norm that one user's update is clipped to, all tensors together.
          template: List or dict of the tensors that get noise: arrays of floats, of any
            framework, or their shapes. Their order counts, that of a dict's items too.
          seed: Seed of all noise, an integer in [0, 2^128), for tests only: a reader who knows
            it can subtract the noise. If None, every round has fresh bits of the operating system.

        Raises:
          ValueError: If an argument cannot be used.
        """
        self.strategy = strategy_lib.check_strategy(strategy)
        self.noise_multiplier = validation.noise_multiplier(noise_multiplier)
        self.clip_norm = validation.positive("clip_norm", clip_norm)
        stddev = self.noise_multiplier * self.clip_norm
        if stddev != 0.0 and not _STDDEVS[0] <= stddev <= _STDDEVS[1]:
            raise validation.UsageError(
                f"noise_multiplier times clip_norm must be 0 or in {_STDDEVS[0]} ... "
                f"{_STDDEVS[1]}, got {stddev}: rescale the updates and the clip norm."
            )
        self.seed_is_known = validation.seed("seed", seed) is not None
        seed = secrets.randbits(128) if seed is None else operator.index(seed)
        self._names, self._shapes = _names_and_shapes(template)
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        recipe, self._starts = noise_recipe.blocks(strategy.noise_recipe())
        self._kernel = kernels.build(recipe)
        self._max_block = getattr(recipe, "max_rounds", None)
        buffer = np.zeros([self._kernel.num_buffers, sum(self._sizes)], np.float32)
        # The seed of the run, then those of past draws that later rounds may make again.
        seeds = np.tile(
            np.array(philox.seed_from_int(seed), np.uint32), [1 + self._kernel.num_seeds, 1]
        )
        # All in one attribute: a call that is interrupted changes nothing that the next one reads.
        self._position = (0, buffer, seeds)

    @property
    def round_index(self) -> int:
        """Index of the next round: the number of rounds whose noise was drawn."""
        return self._position[0]

    @property
    def noise_fingerprint(self) -> str:
        """Fingerprint of the stream before its next round, for `Ledger.begin_round`.

        It tells no seed. A round that is executed again has the same, though other noise.
        """
        round_index, _, seeds = self._position
        text = f"tff_dpftrl noise of round {round_index} from seed {seeds[0].tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def next(self, round_index: int) -> Any:
        """Draws the noise of the next round.

        A round of which nothing is released uses up its index all the same: draw its noise
        and drop it.

        Args:
          round_index: Index of the round in the caller's loop, from 0. It must be that of the
            stream: a model and a stream from different checkpoints do not fit.

        Returns:
          New float32 arrays, as a list or a dict like the template: noise for the sum of
          clipped updates, before any division.

        Raises:
          ValueError: If it is not this round's turn, or the strategy has no such round.
        """
        expected, buffer, seeds = self._position
        if validation.integer("round_index", round_index) != expected:
            raise validation.UsageError(
                f"round_index must be {expected}, the next round of this stream, got "
                f"{round_index}: the noise of a round fits the rounds that the stream has drawn "
                "for. To go on after a crash, restore model and stream from one checkpoint."
            )
        block = bisect.bisect_right(self._starts, expected) - 1
        t = expected - self._starts[block]
        for index, limit in ((expected, self.strategy.max_rounds), (t, self._max_block)):
            if limit is not None and index >= limit:
                raise validation.UsageError(noise_recipe.beyond_horizon(limit))
        kernel, executed = self._kernel, seeds[0]
        if not self.seed_is_known:
            fresh = philox.seed_from_int(secrets.randbits(128))
            executed = executed ^ np.array(fresh, np.uint32)
        if kernel.num_seeds:
            seeds[1 + kernel.slot(kernel.new_draw(t))] = executed

        def draw(index: int) -> np.ndarray:
            words = seeds[1 + kernel.slot(index)] if kernel.num_seeds else executed
            root = philox.derive(tuple(words.tolist()), _UPDATE_STREAM)
            block_seed = philox.derive(root, block)
            parts = [
                philox.normal(philox.derive(philox.derive(block_seed, position), index), size)
                for position, size in enumerate(self._sizes)
            ]
            return np.concatenate(parts)

        unit, buffer = kernel.step(buffer, t, draw)
        stddev = np.float64(self.noise_multiplier * self.clip_norm)
        scaled = np.empty_like(unit)
        np.multiply(unit, stddev, out=scaled, dtype=np.float64, casting="same_kind")
        parts = np.split(scaled, np.cumsum(self._sizes)[:-1])
        noise = [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        self._position = (expected + 1, buffer, seeds)
        return noise if self._names is None else dict(zip(self._names, noise, strict=True))

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `from_state` needs to go on with the next round.

        The state is secret: it holds past noise, or the seeds of it. Save it in one file with the
        model that the drawn rounds have made, before that model is released. A round that crashed
        before that has shown nothing, and is executed again with other noise at no cost.

        Returns:
          New arrays by name, for `numpy.savez` and the like.

        Raises:
          ValueError: If the strategy is of a class that cannot be written; pickle the stream.
        """
        round_index, buffer, seeds = self._position
        return {
            "round_index": np.array(round_index, np.int64),
            # In the shape that version 1 had, where no past draw is made again.
            "seed": seeds.copy() if self._kernel.num_seeds else seeds[0].copy(),
            "buffer": buffer.copy(),
            "parameters": np.array(self._parameters),
        }

    @functools.cached_property
    def _parameters(self) -> str:
        """Everything but seed and position, as JSON."""
        return json.dumps(
            {
                "version": _VERSION,
                "strategy": json.loads(serialization.strategy_to_json(self.strategy)),
                "noise_multiplier": self.noise_multiplier,
                "clip_norm": self.clip_norm,
                "names": self._names,
                "shapes": self._shapes,
                "seed_is_known": self.seed_is_known,
            }
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NoiseStream:
        """Makes the stream that returned a state, before its next round.

        What both draw from there on is independent, unless the seed was given: if both go on, they
        are two branches, whose costs add up.

        Args:
          state: Arrays that `state` returned, or the archive that `numpy.load` reads.

        Returns:
          The stream.

        Raises:
          ValueError: If this is no such state, or one of another version.
        """
        try:
            values = json.loads(np.asarray(state["parameters"]).item())
            version = values["version"]
            if version not in (1, _VERSION):
                raise _of_other_version(version)
            round_index = np.asarray(state["round_index"]).item()
            # Version 1, which kept no seeds of past draws, has a vector.
            seeds = np.array(state["seed"], ndmin=2)
            buffer = np.array(state["buffer"], np.float32)
            if not np.all(np.isfinite(buffer)):
                raise ValueError("the buffer must be finite")
            names, shapes = values["names"], values["shapes"]
            template = shapes if names is None else dict(zip(names, shapes, strict=True))
            strategy = json.dumps(values["strategy"])
            noise_multiplier, clip_norm = values["noise_multiplier"], values["clip_norm"]
            seed_is_known = values["seed_is_known"]
            if not isinstance(seed_is_known, bool):
                raise TypeError("seed_is_known must be true or false")
        except validation.UsageError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise validation.UsageError(f"state is damaged: {error!r}. {_RESUME}") from None
        stream = cls(
            serialization.strategy_from_json(strategy),
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            template=template,
            seed=0,  # Until its own is set below.
        )
        stream.seed_is_known = seed_is_known
        if version == 1 and not noise_recipe.state_is_of_0_4(stream.strategy.noise_recipe()):
            raise _of_other_version(version)
        for name, array, new in zip(
            ("buffer", "seed"), (buffer, seeds), stream._position[1:], strict=True
        ):
            if (array.dtype, array.shape) != (new.dtype, new.shape):
                raise validation.UsageError(
                    f"state is damaged: {name} must be {new.dtype} of shape {new.shape}, got "
                    f"{array.dtype} of shape {array.shape}. {_RESUME}"
                )
        round_index = validation.integer("round_index", round_index, minimum=0)
        stream._position = (round_index, buffer, seeds)
        return stream

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """Computes the guarantee of a run with this noise, for zeroing out one user.

        It holds if the caller clips every user's update to `clip_norm`, adds each round's noise
        to the sum of that round's cohort and of no other, the cohorts keep to the schema, and of
        the branches of a state one is shown at most.
        `dp_ftrl_statement` lists what it relies on.

        Args:
          schema: Participation schema of the users; all its rounds are charged.
          delta: Parameter δ for which ε is stated.

        Returns:
          The guarantee. If the seed of the noise was given, the run has none, and a statement
          made of the guarantee says so.

        Raises:
          ValueError: If an argument is out of range, the strategy is not defined for that many
            rounds, or noise was drawn for more rounds than the schema has.
        """
        if schema.num_rounds < self.round_index:
            raise validation.UsageError(
                f"schema must have all {self.round_index} rounds whose noise was drawn, got "
                f"num_rounds={schema.num_rounds}."
            )
        return guarantee_lib.dp_ftrl_guarantee(
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=schema,
            delta=delta,
            seed_is_known=self.seed_is_known,
            clip_norm=self.clip_norm,
            clipped_by_caller=True,
        )


def _of_other_version(version: object) -> validation.UsageError:
    return validation.UsageError(
        f"state is of version {version} and this package draws version {_VERSION}: go on with the "
        "version of tff_dpftrl that began the run."
    )


def _names_and_shapes(
    template: Sequence[Any] | Mapping[str, Any],
) -> tuple[list[str] | None, list[tuple[int, ...]]]:
    """Reads a template; the names are None if it is a list."""
    wanted = "a list or a dict of arrays or shapes, at least one"
    if isinstance(template, Mapping):
        names, leaves = list(template), list(template.values())
        if not all(isinstance(name, str) for name in names):
            raise validation.UsageError(f"template must have strings as names, got {names!r}.")
    elif isinstance(template, list | tuple):
        names, leaves = None, list(template)
    else:
        kind = type(template).__name__
        raise validation.UsageError(f"template must be {wanted}, got a {kind}: put it in a list.")
    if not leaves:
        raise validation.UsageError(f"template must be {wanted}, got {template!r}.")
    return names, [_shape(leaf) for leaf in leaves]


def _shape(leaf: Any) -> tuple[int, ...]:
    """Reads the shape of an array of floats, or a shape."""
    if hasattr(leaf, "dtype"):
        validation.float_dtype("template", leaf.dtype)
    try:
        shape = tuple(operator.index(size) for size in getattr(leaf, "shape", leaf))
    except TypeError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise validation.UsageError(
            "template must hold arrays or shapes of known sizes, got "
            f"{leaf if isinstance(leaf, tuple | list) else type(leaf).__name__}: "
            "flatten nested containers first, e.g. by jax.tree.flatten."
        )
    return shape
