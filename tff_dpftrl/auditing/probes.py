"""Probes of an aggregator: single rounds from saved states, most of them compared exactly.

A process can be replayed if the same state, the same clients and the same bits of the operating
system (`playing.Player.entropy`) release the same bits. Two rounds from one state then share their
noise, and differ by what the clients differ in: a probe measures what one client adds up to a
rounding error, under any noise. Without replay, means over many rounds are compared, which is less
sensitive.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from scipy import stats

from tff_dpftrl.auditing import audit_report, games, playing
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.private_round import discretize, seeds, walsh_hadamard

_TOLERANCE = 1e-5
_ROUNDINGS = 4
_SMALL_BLUR, _LARGEST_BLUR = 1e-3, 0.05
"""Rounding of the release over the allowed norm: from where it is reported; where no test is."""

_EXECUTIONS = 4  # Of one round: a number of few bits may be the same by chance in two.
_REPEATS = 200
_FRESH_STATES = 3
_NOBODY_REPEATS = 1200
_MOST_COLUMNS = 4096  # Largest number of coordinates whose means are compared.
_HALF_GRID_TRIES = 200
_OTHERS = 3
_JUST_WITHIN = 2e-5
_MUCH = 1e100
_GRID = (1.001, 1.01, 1.1, 1.3, 1.6, 1.95, 2.05, 3.0, 10.0, 100.0, 1000.0)
"""Norms of updates over the clip norm: a clipping may let some through and not others."""
_MOST_GRID_TENSORS = 4
_SEEDS = 64
_FEWEST_SEED_BITS = 80
_DECLARED_EXACT = ("summed_clients", "non_finite_clients")
"""Measurements that are documented as exact, for the operator's eyes only."""
_OVERFLOWING = (1e20, 1e38)
"""Finite float32 values whose squares are not, or whose sum is not."""


@dataclasses.dataclass(frozen=True, eq=False)
class SavedState:
    """State before the round `round_index`, which may clip to `largest_norm` at most."""

    round_index: int
    state: object
    largest_norm: float


def saved_states(
    player: playing.Player,
    mechanism: mechanism_lib.Mechanism | None,
    rounds: Sequence[int],
) -> tuple[list[SavedState], list[playing.Played]]:
    """Saves states of one run in which some clients send large updates in every round.

    They are those before `rounds`, which increase. The outcomes are of all rounds up to the last
    one.
    """
    scale, history, states = games.Scale(mechanism), [], []
    state, played = player.initialize(), None
    goal = 1 if mechanism is None else mechanism.clients_per_round
    senders = max(1, min(20, math.ceil(goal / 2)))
    for t in range(max(rounds) + 1):
        if t in rounds:
            states.append(SavedState(t, state, scale.largest_norm(played)))
        size = games.FAR_ABOVE * scale.largest_norm(played) / math.sqrt(player.dim)
        played = player.next(state, [player.client(np.full(player.dim, size))] * senders)
        state = played.state
        history.append(played)
    return states, history


class Probes:
    """Runs single rounds from saved states."""

    def __init__(
        self,
        player: playing.Player,
        mechanism: mechanism_lib.Mechanism | None,
        saved: Sequence[SavedState],
        *,
        canary_norm: float,
        seed: int,
    ):
        """Initialises probes with updates of norm `canary_norm` times `SavedState.largest_norm`."""
        self._player = player
        self._mechanism = mechanism
        self._saved = list(saved)
        self._scale = games.Scale(mechanism)
        self._much = canary_norm
        self._rng = np.random.default_rng(seed)
        self._rounding = _ROUNDINGS * 2.0 ** -min(player.significant_bits)
        self._replayable: bool | None = None

    def is_replayable(self) -> bool:
        """Returns whether two rounds from one state and the same clients release the same bits."""
        if self._replayable is None:
            self._replayable = all(
                np.array_equal(self._release(saved).released, self._release(saved).released)
                for saved in self._saved
            )
        return self._replayable

    def round_executed_again(self) -> audit_report.Finding:
        """Tests that a round that is executed again from its saved state has other noise."""
        test = "a round executed again from its state"
        for saved in self._saved:
            executed = []
            for _ in range(_EXECUTIONS):
                self._player.entropy.renew()
                executed.append(self._noised(self._release(saved)))
            for first, *others in zip(*executed, strict=True):
                if all(np.array_equal(first, other) for other in others):
                    return audit_report.Finding(
                        test,
                        "violated",
                        f"Round {saved.round_index + 1} has a tensor with the same noise, or none. "
                        "Whoever goes on from a backup with other clients publishes the exact "
                        "difference of two sums.",
                    )
        return audit_report.Finding(test, "consistent", "It has other noise in every tensor.")

    def _noised(self, played: playing.Played) -> list[np.ndarray]:
        """Returns the tensors that a round released, and the count of adaptive clipping."""
        tensors = np.split(played.released, np.cumsum(self._player.sizes)[:-1])
        if self._mechanism is not None and self._mechanism.count_stddev:
            tensors.append(np.array([self._scale.count(played)]))
        return [tensor for tensor in tensors if tensor.size]

    def resumed_round(
        self, resumed: playing.Player, resume: playing.Resume
    ) -> audit_report.Finding:
        """Tests that two rounds from a saved state are the same in a new process."""
        test = "a run resumed from its state"
        if not self.is_replayable():
            return audit_report.Finding(
                test, "not tested", "No two rounds of this process have the same noise."
            )
        for saved in self._saved:
            state, other = saved.state, resume(playing.as_arrays(saved.state))
            for t in range(2):
                one = self._player.next(state, self._others(saved))
                two = resumed.next(other, self._others(saved))
                if not np.array_equal(one.released, two.released):
                    return audit_report.Finding(
                        test,
                        "violated",
                        f"Round {saved.round_index + t + 1} releases something else after a resume "
                        f"before round {saved.round_index + 1}: the noise is not the one that was "
                        "accounted for.",
                    )
                state, other = one.state, two.state
        return audit_report.Finding(test, "consistent", "It releases the same bits.")

    def seed_bits(self) -> audit_report.Finding:
        """Tests that the seed in the state has many bits that differ between initialisations."""
        test = "entropy of the seed in the state"
        drawn = [_seed_of(self._player.initialize()) for _ in range(_SEEDS)]
        if any(seed is None for seed in drawn):
            return audit_report.Finding(test, "not tested", "The state shows no field `seed`.")
        bits = np.unpackbits(np.stack([np.ravel(seed).view(np.uint8) for seed in drawn]), axis=1)
        varying = int(np.sum(np.any(bits != bits[0], axis=0)))
        says = (
            f"{varying} of its {bits.shape[1]} bits differ between {_SEEDS} initialisations; who "
            "can search all their values can subtract noise that has no other bits, and "
            f"{_FEWEST_SEED_BITS} are too many. A seed that is computed from fewer random bits is "
            "not seen."
        )
        outcome = "consistent" if varying >= _FEWEST_SEED_BITS else "violated"
        return audit_report.Finding(test, outcome, says)

    def measurements(self) -> audit_report.Finding:
        """Tests that no measurement is the same whatever the noise is, and tells the clients."""
        test = "measurements: noised, or declared exact"
        cohorts = [
            [self._player.client(row) for row in self._rng.normal(size=(_OTHERS, self._player.dim))]
            for _ in range(2)
        ]
        one, two = (
            [
                self._player.next(self._player.initialize(), cohort).measurements
                for _ in range(_FRESH_STATES)
            ]
            for cohort in cohorts
        )
        names = sorted(set(one[0]) - set(_DECLARED_EXACT))
        exact = [
            name
            for name in names
            if all(len({m.get(name) for m in cohort}) == 1 for cohort in (one, two))
            and one[0][name] != two[0].get(name)
        ]
        if exact:
            says = (
                f"{', '.join(exact)} differ between cohorts and not between seeds of the noise: "
                "they are exact, and no guarantee covers them."
            )
            return audit_report.Finding(test, "violated", says)
        declared = [name for name in _DECLARED_EXACT if name in one[0]]
        says = f"{len(names)} numbers of a first round were compared under {_FRESH_STATES} seeds."
        if declared:
            says += f" Exact, as documented, for the operator's eyes only: {', '.join(declared)}."
        return audit_report.Finding(test, "consistent" if names else "not tested", says)

    def zero_update(self, error_rate: float) -> audit_report.Finding:
        """Tests that a client that sends zeros counts as nobody, now and in the next round."""
        return self._counts_as_nobody(
            "a client that sends zeros counts as nobody", [self._player.zeroed()], error_rate
        )

    def stays_finite(self) -> audit_report.Finding:
        """Tests that no client makes the release infinite or NaN."""
        test = "what is released is finite, whatever a client sends"
        saved = self._saved[0]
        tried = list(self._updates(saved))
        if self._player.is_weighted:
            update = np.full(self._player.dim, saved.largest_norm / math.sqrt(self._player.dim))
            tried += [
                (f"a weight of {weight}", self._player.client(update, weight))
                for weight in (np.nan, np.inf)
            ]
        for kind, client in tried:
            played = self._player.next(saved.state, [*self._others(saved), client])
            if not np.all(np.isfinite(played.released)):
                return audit_report.Finding(
                    test, "violated", f"It is not after {kind}: no noise hides that."
                )
        return audit_report.Finding(test, "consistent", f"{len(tried)} updates were tried.")

    def not_finite(self, error_rate: float) -> audit_report.Finding:
        """Tests that a client that sends NaN or infinity counts as nobody."""
        clients = []
        for value in (np.nan, np.inf, -np.inf):
            update = np.zeros(self._player.dim)
            update[self._rng.integers(self._player.dim)] = value
            clients.append(self._player.client(update))
        return self._counts_as_nobody(
            "a client that sends NaN or infinity counts as nobody", clients, error_rate
        )

    def _counts_as_nobody(
        self, test: str, clients: Sequence[np.ndarray], error_rate: float
    ) -> audit_report.Finding:
        if not self.is_replayable():
            return self._counts_as_nobody_on_average(test, clients, error_rate)
        for saved in self._saved:
            without = self._release(saved)
            later = self._player.next(without.state, [])
            for client in clients:
                with_it = self._player.next(saved.state, [*self._others(saved), client])
                difference = _first_difference(without, with_it)
                if difference is None:
                    after = self._player.next(with_it.state, [])
                    difference = _first_difference(later, after)
                if difference is not None:
                    return audit_report.Finding(
                        test, "violated", f"Round {saved.round_index + 1}: {difference}."
                    )
        return audit_report.Finding(
            test,
            "consistent",
            f"The same bits are released from {len(self._saved)} states, in the round after too.",
        )

    def _counts_as_nobody_on_average(
        self, test: str, clients: Sequence[np.ndarray], error_rate: float
    ) -> audit_report.Finding:
        saved = self._saved[0]
        # Three tests a client: means and variances of coordinates, and means of measurements.
        each = error_rate / len(clients) / 3
        dim = self._player.dim
        columns = self._rng.choice(dim, min(dim, _MOST_COLUMNS), replace=False)
        smallest = each / len(columns)
        for client in clients:
            without, with_it = np.zeros((2, _NOBODY_REPEATS, len(columns)))
            measurements = []
            for repeat in range(_NOBODY_REPEATS):
                one = self._release(saved)
                two = self._player.next(saved.state, [*self._others(saved), client])
                if not np.all(np.isfinite(two.released)):
                    return audit_report.Finding(
                        test, "violated", "What is released with it is not finite.", error_rate
                    )
                without[repeat], with_it[repeat] = one.released[columns], two.released[columns]
                measurements.append((one.measurements, two.measurements))
            measured = _measured_apart(measurements)
            if measured is not None and measured[1] < each:
                return audit_report.Finding(
                    test,
                    "violated",
                    f"In {_NOBODY_REPEATS} rounds the mean of the measurement {measured[0]} "
                    f"differs (p-value {measured[1]:.1e}).",
                    error_rate,
                    trials=_NOBODY_REPEATS,
                )
            means = _means_apart(without, with_it)
            variances = _variances_apart(without, with_it)
            if min(means, variances) < each:
                return audit_report.Finding(
                    test,
                    "violated",
                    f"In {_NOBODY_REPEATS} rounds the released means or variances differ "
                    f"(p-values {means:.1e} and {variances:.1e}).",
                    error_rate,
                    trials=_NOBODY_REPEATS,
                )
        return audit_report.Finding(
            test,
            "consistent",
            f"Means and variances of {_NOBODY_REPEATS} rounds do not differ.",
            error_rate,
            trials=_NOBODY_REPEATS,
            power="means that differ by "
            f"{_detectable(_NOBODY_REPEATS, smallest):.2g} standard deviations of the noise, "
            "in one coordinate",
        )

    def contribution(self, allowed: float, count_weight: float, error_rate: float):
        """Tests that one client adds no more than the noise is scaled to, with all that is tried.

        `allowed` is the largest norm that the claim allows. With adaptive clipping, `count_weight`
        is what a count of one standard deviation is worth. Both are in clip norms.
        """
        test = "what one client adds"
        if self._mechanism is None:
            return audit_report.Finding(
                test, "not tested", "What the noise is scaled to is not known: give mechanism."
            )
        if not self.is_replayable():
            return self._contribution_on_average(test, allowed, error_rate)
        largest, kind_of_largest, tries, is_above, blur = 0.0, "", 0, False, 0.0
        for saved in self._saved:
            for others in ([], self._others(saved)):
                without = self._player.next(saved.state, others)
                updates = itertools.chain(self._updates(saved), self._norm_grid(saved))
                if saved is self._saved[-1] and not others:
                    updates = itertools.chain(updates, self._half_grid_updates(saved))
                for kind, client in updates:
                    with_it = self._player.next(saved.state, [*others, client])
                    tries += 1
                    added = self._scale.sums(with_it) - self._scale.sums(without)
                    count = self._scale.count(with_it) - self._scale.count(without)
                    norm = math.hypot(float(np.linalg.norm(added)), count_weight * count)
                    if not norm <= largest:
                        largest, kind_of_largest = norm, f"{kind}, round {saved.round_index + 1}"
                    rounding = self._rounding * float(
                        np.linalg.norm(self._scale.sums(with_it))
                        + np.linalg.norm(self._scale.sums(without))
                        + count_weight
                        * self._mechanism.clients_per_round
                        / (self._mechanism.count_stddev or 1.0)
                    )
                    is_above |= not norm <= allowed * (1 + _TOLERANCE) + rounding
                    blur = max(blur, rounding)
        counted = ", its bit included" if count_weight else ""
        says = (
            f"The most that one client added{counted} was {_amount(largest)} clip norms "
            f"({kind_of_largest}); the noise covers {allowed:.6g}. It sent {tries} updates: of "
            f"{_GRID[0]:g} to {_GRID[-1]:g} clip norms, tiny and huge ones, along random signs, "
            "one coordinate and some single tensors, and a huge one along each tensor."
        )
        if blur > _SMALL_BLUR * allowed:
            says += f" What is released is rounded: up to {blur:.2g} clip norms more pass."
        is_blurred = blur > _LARGEST_BLUR * allowed
        outcome = "violated" if is_above else "not tested" if is_blurred else "consistent"
        return audit_report.Finding(test, outcome, says, trials=tries)

    def _contribution_on_average(
        self, test: str, allowed: float, error_rate: float
    ) -> audit_report.Finding:
        saved = self._saved[0]
        updates = [
            (kind, client, np.asarray(client[: self._player.dim], np.float64))
            for kind, client in self._updates(saved)
        ]
        moving = [(kind, client, x / np.linalg.norm(x)) for kind, client, x in updates if np.any(x)]
        directions = np.stack([direction for _, _, direction in moving])
        each, largest, kind_of_largest, spread = error_rate / len(moving), 0.0, "", 0.0

        def along(directions: np.ndarray, clients: Sequence[np.ndarray]) -> np.ndarray:
            return directions @ self._scale.sums(self._player.next(saved.state, clients))

        without = np.stack([along(directions, []) for _ in range(_REPEATS)], axis=1)
        for two, (kind, client, direction) in zip(without, moving, strict=True):
            one = np.array([along(direction, [client]) for _ in range(_REPEATS)])
            error = math.sqrt((np.var(one, ddof=1) + np.var(two, ddof=1)) / _REPEATS)
            least = float(np.mean(one) - np.mean(two) - stats.norm.isf(each) * error)
            spread = max(spread, error)
            if not least <= largest:
                largest, kind_of_largest = least, kind
        detectable = (stats.norm.isf(each) + stats.norm.ppf(0.99)) * spread
        return audit_report.Finding(
            test,
            "violated" if not largest <= allowed else "consistent",
            f"By the means of {_REPEATS} rounds one client added {_amount(largest)} clip norms or "
            f"more ({kind_of_largest or 'whatever it sent'}); the noise covers {allowed:.6g}.",
            error_rate,
            trials=_REPEATS,
            power=f"{detectable:.2g} clip norms too much",
        )

    def _release(self, saved: SavedState) -> playing.Played:
        return self._player.next(saved.state, self._others(saved))

    def _others(self, saved: SavedState) -> list[np.ndarray]:
        """Returns some clients of moderate norm, the same ones at each call."""
        rng = np.random.default_rng(saved.round_index)
        rows = rng.normal(size=(_OTHERS, self._player.dim))
        rows *= 0.5 * saved.largest_norm / np.linalg.norm(rows, axis=1, keepdims=True)
        return [self._player.client(row) for row in rows]

    def _updates(self, saved: SavedState) -> Iterator[tuple[str, np.ndarray]]:
        """Yields updates that a client may try, with names."""
        dim, norm = self._player.dim, saved.largest_norm
        signs = self._rng.choice([-1.0, 1.0], dim) / math.sqrt(dim)
        one_hot = np.zeros(dim)
        one_hot[self._rng.integers(dim)] = 1.0
        for name, factor in (("huge", self._much), ("at the norm", 1.0), ("tiny", 1e-6)):
            yield (
                f"a {name} update" if factor != 1.0 else "an update of the clip norm",
                (self._player.client(signs * factor * norm)),
            )
            yield f"a {name} one-hot update", self._player.client(one_hot * factor * norm)
        ends = np.cumsum(self._player.sizes)
        for number, (end, size) in enumerate(zip(ends, self._player.sizes, strict=True), 1):
            if size == 0:
                continue
            part = np.zeros(dim)
            part[end - size : end] = signs[end - size : end] * math.sqrt(dim / size)
            yield f"a huge update of tensor {number}", self._player.client(part * self._much * norm)
        for size in _OVERFLOWING:
            yield f"an update of entries {size:g}", self._player.client(np.full(dim, size))
        if self._player.is_weighted:
            yield "a huge weight", self._player.client(signs * self._much * norm, 1e6)
            yield "a negative weight", self._player.client(signs * self._much * norm, -1e6)

    def _norm_grid(self, saved: SavedState) -> Iterator[tuple[str, np.ndarray]]:
        """Yields updates somewhat or far above the clip norm, along several directions."""
        dim = self._player.dim
        signs = self._rng.choice([-1.0, 1.0], dim) / math.sqrt(dim)
        one_hot = np.zeros(dim)
        one_hot[self._rng.integers(dim)] = -1.0
        directions = {"random signs": signs, "one coordinate": one_hot}
        ends = np.cumsum(self._player.sizes)
        parts = [(end - size, end) for end, size in zip(ends, self._player.sizes, strict=True)]
        # Of many tensors some, so that the audit's time does not grow with the model.
        parts = [part for part in parts if part[0] < part[1]]
        for number in range(0, len(parts), max(1, len(parts) // _MOST_GRID_TENSORS)):
            begin, end = parts[number]
            alone = np.zeros(dim)
            alone[begin:end] = signs[begin:end] * math.sqrt(dim / (end - begin))
            directions[f"tensor {number + 1}"] = alone
        for name, direction in directions.items():
            for factor in _GRID:
                update = self._player.client(direction * factor * saved.largest_norm)
                yield f"an update of {factor:g} clip norms along {name}", update

    def _half_grid_updates(self, saved: SavedState) -> Iterator[tuple[str, np.ndarray]]:
        """Yields updates whose encoded coordinates all lie between two grid points."""
        encoding = self._mechanism.encoding if self._mechanism is not None else None
        if encoding is None or not hasattr(saved.state, "sum_state"):
            return
        padded, grid_norm = encoding.padded_dim, encoding.scaled_clip_norm
        seed = _rotation_seed(saved.state)
        room = (grid_norm * (1 - _JUST_WITHIN)) ** 2
        for _ in range(_HALF_GRID_TRIES):
            halves = self._rng.choice([-1.0, 1.0], padded) * _half_grid(padded, room)
            halves = self._rng.permutation(halves)
            turned = _unrotate(halves, seed)[: self._player.dim]
            update = turned * (saved.largest_norm / grid_norm)
            yield "an update halfway between grid points", self._player.client(update)


def _half_grid(dim: int, squared_norm: float) -> np.ndarray:
    """Returns numbers 1/2, 3/2, ... whose squares sum up to nearly `squared_norm`, [dim]."""
    level = math.floor(math.sqrt(squared_norm / dim) - 0.5)
    if level < 0:
        number = math.floor(4.0 * squared_norm)
        return np.where(np.arange(dim) < number, 0.5, 0.0)
    left = squared_norm - dim * (level + 0.5) ** 2
    number = math.floor(left / (2.0 * level + 2.0))
    return np.where(np.arange(dim) < number, level + 1.5, level + 0.5)


def _rotation_seed(state) -> np.ndarray:
    """Returns the public seed of the next round's rotation, in this package's secure sums."""
    sum_state = state.sum_state
    round_seed = seeds.derive(
        tf.convert_to_tensor(sum_state.rotation_seed), tf.convert_to_tensor(sum_state.round_index)
    )
    return seeds.derive(round_seed, discretize.ROTATION_STREAM)


def _unrotate(vector: np.ndarray, seed) -> np.ndarray:
    rotated = tf.constant(vector, tf.float32)
    return walsh_hadamard.unrotate(rotated, seed).numpy().astype(np.float64)


def _seed_of(state: object) -> np.ndarray | None:
    """Returns the field `seed` of a state, as integers; None if there is none."""
    seed = state.get("seed") if isinstance(state, dict) else getattr(state, "seed", None)
    if seed is None:
        return None
    array = np.asarray(seed)
    return array if array.dtype.kind in "iu" else None


def _amount(norm: float) -> str:
    return f"{norm:.6g}" if math.isfinite(norm) else "no finite number of"


def _first_difference(one: playing.Played, two: playing.Played) -> str | None:
    """Describes the first difference of two rounds' releases; None if there is none.

    The exact number of clients that were summed is left out: neighbouring cohorts have the same
    clients. So is the number of clients that were not finite, which this package's aggregators
    count on demand, for the operator's eyes and outside the guarantee.
    """
    if not np.all(np.isfinite(two.released)):
        return "what is released is not finite"
    if not np.array_equal(one.released, two.released):
        largest = float(np.max(np.abs(one.released - two.released)))
        return f"released numbers differ by up to {largest:.3g}"
    for name in one.measurements | two.measurements:
        if name in ("summed_clients", "non_finite_clients"):
            continue
        value, other = (played.measurements.get(name, math.nan) for played in (one, two))
        if not np.array_equal(value, other, equal_nan=True):
            return f"the measurement {name} is {other:g} in place of {value:g}"
    return None


def _chance_of_swaps(differences: np.ndarray) -> np.ndarray:
    """Returns p-values that the two rounds of each pair have one distribution, by columns.

    If they have, each pair may be swapped: given their sizes, the sum of a column of differences
    is distributed as Σ ±d with independent signs, whatever the noise is and however columns
    depend on each other. The chance of as large a sum is at most 2 exp(−(Σ d)² / (2 Σ d²))
    (Hoeffding 1963).
    """
    differences = np.nan_to_num(differences, nan=0.0, posinf=_MUCH, neginf=-_MUCH)
    squares = np.sum(differences**2, axis=0)
    total = np.sum(differences, axis=0) ** 2
    exponent = np.divide(total, 2.0 * squares, out=np.zeros_like(squares), where=squares > 0.0)
    return np.minimum(1.0, 2.0 * np.exp(-exponent))


def _means_apart(one: np.ndarray, two: np.ndarray) -> float:
    """Returns the p-value that two samples of pairs have the same means in all columns."""
    return min(1.0, float(np.min(_chance_of_swaps(two - one))) * one.shape[1])


def _measured_apart(
    pairs: Sequence[tuple[dict[str, float], dict[str, float]]],
) -> tuple[str, float] | None:
    """Returns the measurement whose means differ most, and its p-value; None without any."""
    p_values = []
    for name in sorted({name for pair in pairs for measured in pair for name in measured}):
        one, two = (np.array([pair[i].get(name, math.nan) for pair in pairs]) for i in (0, 1))
        if not np.array_equal(one, two, equal_nan=True):
            p_values.append((name, _means_apart(one[:, np.newaxis], two[:, np.newaxis])))
    if not p_values:
        return None
    name, p_value = min(p_values, key=lambda pair: pair[1])
    return name, min(1.0, p_value * len(p_values))


def _variances_apart(one: np.ndarray, two: np.ndarray) -> float:
    """Returns the p-value that two samples of pairs spread alike, over all columns together."""
    centre = (one.mean(axis=0) + two.mean(axis=0)) / 2.0
    squares = (two - centre) ** 2 - (one - centre) ** 2
    total = np.sum((two - centre) ** 2 + (one - centre) ** 2, axis=0)
    return float(_chance_of_swaps(squares[:, total > 0.0] @ (1.0 / total[total > 0.0])))


def _detectable(trials: int, error_rate: float) -> float:
    """Returns the difference of means, in noise deviations, found with 99 % probability."""
    needed = math.sqrt(2.0 * math.log(2.0 / error_rate)) + float(stats.norm.ppf(0.99))
    return needed * math.sqrt(2.0 / trials)
