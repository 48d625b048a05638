"""Many distinguishing games in one run: canary clients that share no coordinate.

Each canary has a unit direction over all tensors, with coordinates that no other canary has. With
equal chances it sends this direction at many times the clip norm in the rounds of a pattern, or
is zeroed out. A trial is what all rounds released along its direction. If the noise of different
coordinates is independent, as the claim says, and clients are clipped one by one, the trials of a
run are independent, whatever else is wrong: canaries move no coordinate of each other's. A
mechanism of which that is not known needs a run for each trial. In a discretised secure sum the
rounding of all clients reaches all coordinates, as noise beside the claimed one: it hides canaries
further, and depends a little on the other trials of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.auditing.evidence import transcripts as transcripts_lib

if TYPE_CHECKING:
    from tff_dpftrl.auditing import playing

FAR_ABOVE = 1e3
"""Norm of a canary's update, in clip norms."""

_MOST_QUIET = 2000  # Largest number of recorded coordinates of each tensor.
_MOST_QUIET_RUNS = 64  # Largest number of recorded runs: all pairs of them are compared.
_FEWEST_QUIET = 16
_MOST_NOISE = 30_000_000  # Largest number of recorded floats: 240 MB.
_MAX_NORM = 1e15
_NEGLIGIBLE = 1e-6
_QUIET = 0.2


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries with disjoint coordinates, and quiet coordinates that no canary moves.

    By coordinate, of shape [dim]: `owner` is the number of its canary, int, -1 where it is quiet;
    `direction` is its entry in the canary's unit direction, float64.
    """

    owner: np.ndarray
    direction: np.ndarray
    number: int

    @classmethod
    def over(cls, sizes: list[int], at_most: int, seed: int) -> Canaries:
        """Draws as many canaries as the largest tensor has room for, a fifth of it left quiet."""
        rng = np.random.default_rng(seed)
        usable = [size - int(_QUIET * size) for size in sizes]
        number = max(1, min(at_most, max(usable)))
        owners = []
        for size, room in zip(sizes, usable, strict=True):
            each = room // number
            some = np.repeat(np.arange(number), each)
            if each == 0:
                some = rng.permutation(number)[:room]
            # Quiet coordinates come first: the same neighbouring ones in all tensors.
            others = np.pad(some, (0, room - len(some)), constant_values=-1)
            owners.append(np.concatenate([np.full(size - room, -1), rng.permutation(others)]))
        owner = np.concatenate(owners)
        counts = np.bincount(owner[owner >= 0], minlength=number)
        signs = rng.choice([-1.0, 1.0], len(owner))
        direction = np.where(owner < 0, 0.0, signs / np.sqrt(counts[np.maximum(owner, 0)]))
        return cls(owner, direction, number)

    def of(self, canary: int) -> np.ndarray:
        """Returns the direction of one canary, float64, shape [dim]."""
        return np.where(self.owner == canary, self.direction, 0.0)

    def projections(self, released: np.ndarray) -> np.ndarray:
        """Returns the projection of a release on each canary's direction, shape [number]."""
        owned = self.owner >= 0
        products = released[owned] * self.direction[owned]
        return np.bincount(self.owner[owned], products, self.number)

    @property
    def quiet(self) -> np.ndarray:
        """Coordinates that no canary moves."""
        return np.flatnonzero(self.owner < 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Games:
    """Recordings of games.

    Attributes:
      transcripts: Transcripts of all trials, in clip norms if the mechanism is known.
      noise: Releases of the first runs on quiet coordinates, up to some thousand of each
        tensor; none if no mechanism is known. float64, shape [runs, rounds, coordinates].
      tensor_of: Tensor of each coordinate of `noise`, int, shape [coordinates].
      significant_bits: Significant bits of the floats of each tensor.
      counts: Noised counts of adaptive clipping, minus those without clients, in standard
        deviations of their noise; None without it. float64, shape [runs, rounds].
      clip_norms: Published clip norms, float64, shape [runs, rounds]; None without any.
    """

    transcripts: transcripts_lib.Transcripts
    noise: np.ndarray
    tensor_of: np.ndarray
    significant_bits: list[int]
    counts: np.ndarray | None
    clip_norms: np.ndarray | None


class Scale:
    """Converts releases to sums of updates in clip norms."""

    def __init__(self, mechanism: mechanism_lib.Mechanism | None):
        """Initialises a scale of a mechanism; if None, releases stay as they are."""
        self._mechanism = mechanism
        self._norm = 1.0 if mechanism is None else mechanism.clip_norm

    def largest_norm(self, before: playing.Played | None) -> float:
        """Returns the largest norm that the next round may clip to, by the last one's numbers."""
        if before is None or self._mechanism is None or not self._mechanism.publishes_clip_norm:
            return self._norm
        measured = before.measurements
        active = measured["clip_norm"]
        return min(_MAX_NORM, max(active, measured.get("estimated_clip_norm", active)))

    def norm(self, played: playing.Played) -> float:
        """Returns the norm that a round clipped to."""
        if self._mechanism is None or not self._mechanism.publishes_clip_norm:
            return self._norm
        return played.measurements["clip_norm"]

    def sums(self, played: playing.Played) -> np.ndarray:
        """Returns the noised sum that a round released, in clip norms, shape [dim]."""
        if self._mechanism is None:
            return played.released
        return played.released * (self._mechanism.clients_per_round / self.norm(played))

    def count(self, played: playing.Played) -> float:
        """Returns a round's noised count in standard deviations; 0 without adaptive clipping."""
        if self._mechanism is None or not self._mechanism.count_stddev:
            return 0.0
        fraction = played.measurements["unclipped_fraction"] - 0.5
        return fraction * self._mechanism.clients_per_round / self._mechanism.count_stddev


@dataclasses.dataclass(frozen=True, eq=False)
class GamePlan:
    """Rounds, canaries and runs of games. Each run has a new initial state.

    `signal`, float64 of shape [rounds], is the factor of the direction that a canary sends if it
    takes part: 1, -1 or, outside of the pattern, 0. Before round `resume_at` each run is saved and
    resumed in another process; never if None.
    """

    signal: np.ndarray
    canaries: Canaries
    num_runs: int
    resume_at: int | None


def play(
    player: playing.Player,
    plan: GamePlan,
    mechanism: mechanism_lib.Mechanism | None,
    *,
    resumed: playing.Player,
    resume: playing.Resume,
    seed: int,
    progress: Callable[[str], None],
) -> Games:
    """Plays all games.

    Canaries that are zeroed out send zeros in every second run, and stay away in the others. Rounds
    without canaries are empty, or have one client that sends zeros. With adaptive clipping each
    canary comes with a client that sends next to nothing: as many clients are then below the
    estimate as above, so that it stays where it is. `resume` makes the state to resume from of a
    state as NumPy arrays.
    """
    rng = np.random.default_rng(seed)
    num_rounds, canaries = len(plan.signal), plan.canaries
    scale = Scale(mechanism)
    released = np.zeros((plan.num_runs, canaries.number, num_rounds))
    present = rng.integers(0, 2, (plan.num_runs, canaries.number)).astype(bool)
    quiet = _quiet(player, plan, mechanism)
    noise = np.zeros((min(plan.num_runs, _MOST_QUIET_RUNS), num_rounds, len(quiet)))
    counts, norms = (np.zeros((plan.num_runs, num_rounds)) for _ in range(2))
    for run in range(plan.num_runs):
        sends_zeros = run % 2 == 1
        state, played, current = player.initialize(), None, player
        for t in range(num_rounds):
            if t == plan.resume_at:
                from tff_dpftrl.auditing import playing

                state, current = resume(playing.as_arrays(state)), resumed
            factor = plan.signal[t] * canary_norm(player, scale.largest_norm(played))
            cohort = _cohort(current, canaries, present[run], factor, sends_zeros, mechanism)
            current.entropy.renew()
            played = current.next(state, cohort)
            state, sums = played.state, scale.sums(played)
            released[run, :, t] = canaries.projections(sums)
            if run < len(noise):
                noise[run, t] = sums[quiet]
            counts[run, t], norms[run, t] = scale.count(played), scale.norm(played)
        progress(f"Run {run + 1} of {plan.num_runs}, {canaries.number} canaries each.")
    tensor_of = np.repeat(np.arange(len(player.sizes)), player.sizes)
    has_counts = mechanism is not None and mechanism.count_stddev
    publishes = mechanism is not None and mechanism.publishes_clip_norm
    return Games(
        transcripts_lib.Transcripts(released.reshape(-1, num_rounds), present.ravel()),
        noise,
        tensor_of[quiet],
        player.significant_bits,
        counts if has_counts else None,
        norms if publishes else None,
    )


def canary_norm(player: playing.Player, largest_norm: float) -> float:
    """Returns the norm of a canary's update: far above the clip norm, but finite in its floats."""
    return min(FAR_ABOVE * largest_norm, player.largest_value)


def measured_signal(
    player: playing.Player,
    state: Any,
    canaries: Canaries,
    mechanism: mechanism_lib.Mechanism,
) -> float:
    """Measures what canaries add along their directions, where a round can be replayed.

    Every second canary takes part in two rounds from one state: once in its direction and once in
    the opposite one. Returns half of the difference, in clip norms, on average: 1 if the mechanism
    does what it says.
    """
    scale = Scale(mechanism)
    present = np.arange(canaries.number) % 2 == 0
    norm = canary_norm(player, scale.largest_norm(None))
    forth, back = (
        scale.sums(player.next(state, _cohort(player, canaries, present, factor, True, mechanism)))
        for factor in (norm, -norm)
    )
    return float(np.mean(canaries.projections(forth - back)[present])) / 2.0


def _quiet(
    player: playing.Player, plan: GamePlan, mechanism: mechanism_lib.Mechanism | None
) -> np.ndarray:
    """Returns the coordinates to record: the first ones of each tensor that no canary moves."""
    if mechanism is None:
        return np.arange(0)
    quiet = plan.canaries.quiet if np.any(plan.signal) else np.arange(player.dim)
    runs = min(plan.num_runs, _MOST_QUIET_RUNS)
    room = _MOST_NOISE // (runs * len(plan.signal) * len(player.sizes))
    most = min(_MOST_QUIET, max(_FEWEST_QUIET, room))
    ends = np.cumsum(player.sizes)
    starts = np.searchsorted(quiet, ends - player.sizes)
    stops = np.searchsorted(quiet, ends)
    return np.concatenate(
        [quiet[start : min(stop, start + most)] for start, stop in zip(starts, stops, strict=True)]
    )


def _cohort(
    player: playing.Player,
    canaries: Canaries,
    present: np.ndarray,
    factor: float,
    sends_zeros: bool,
    mechanism: mechanism_lib.Mechanism | None,
) -> Iterator[np.ndarray]:
    """Yields the clients of one round; `factor` is 0 if it is not in the pattern."""
    if factor == 0.0:
        if sends_zeros:
            yield player.zeroed()
        return
    for canary, takes_part in enumerate(present):
        if takes_part:
            yield player.client(factor * canaries.of(canary))
        elif sends_zeros:
            yield player.zeroed()
    if mechanism is not None and mechanism.count_stddev:
        companion = np.zeros(player.dim)
        companion[canaries.quiet[:1]] = abs(factor) / FAR_ABOVE * _NEGLIGIBLE
        for _ in range(int(np.sum(present))):
            yield player.client(companion)
