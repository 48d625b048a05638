"""The check of secret sampling, on which ε of DP-FedAvg, ELS and ULS rests."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.recount import findings, record_checks, records
from tff_dpftrl.auditing.recount import terms as terms_lib

_ERROR_RATE = 1e-3


def sampling(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Draws the cohorts again from the secret seed; without it, tests whether they can be Poisson.

    The ledger knows users by pseudonyms. So the redrawn samples are compared by their pattern: how
    many users were in exactly which rounds. Equal patterns mean equal samples up to names.
    """
    if run.ledger is None:
        return findings.skipped(test, record_checks.GONE)
    if not terms.is_secret:
        return findings.skipped(test, "the seed is no secret: there is no guarantee to test")
    rounds = sorted(run.ledger.rounds)
    seen = {t: set(run.ledger.asked.get(t, ())) for t in rounds}
    owners, wrong = _owners(run, terms)
    if wrong:
        return findings.judged(test, wrong, "")
    if wrong := _strides(run, terms):
        return findings.judged(test, wrong, "")
    if run.cohort_seed is None or owners is None:
        return _tested(test, run, terms, seen)
    drawn = {
        t: set(owners[units].tolist()) for t, units in _drawn(run, terms, rounds, owners).items()
    }
    sizes = [t for t in rounds if len(drawn[t]) != len(seen[t])]
    if sizes:
        t = sizes[0]
        wrong = [
            f"{len(sizes)} of {len(rounds)} samples are not those of the secret seed: in round {t} "
            f"were {len(seen[t])} users, and the seed draws {len(drawn[t])}"
        ]
    elif _patterns(drawn) != _patterns(seen):
        wrong = ["the samples have the sizes that the secret seed draws, and other members"]
    fine = f"The samples of {len(rounds)} rounds are those that the secret seed draws"
    return findings.judged(test, wrong, fine, nothing=not rounds and "no round was begun")


def _owners(run: records.Records, terms: terms_lib.Terms) -> tuple[np.ndarray | None, list[str]]:
    """Returns the user of each unit that is sampled, None if that is not recorded, and faults."""
    plan, declared = run.derived.get("plan"), None
    if "pool" in run.derived:
        declared = run.derived["pool"]["size"]
    elif plan is None or plan["sampling"] == "user":
        return np.arange(run.num_users), []
    elif not plan["units_are_declared"]:
        declared = plan["num_units"]
    if run.pool is None:
        return None, []
    sizes, wrong = np.array(run.pool, np.int64), []
    if len(sizes) != run.num_users:
        wrong.append(f"the pool is of {len(sizes)} users, of {run.num_users}")
    if sizes.max(initial=0) > terms.group_size:
        wrong.append(f"a user has {sizes.max()} examples in the pool, above the group size")
    if declared is not None and sizes.sum() != declared:
        wrong.append(f"the pool has {sizes.sum()} examples, and the plan {declared}")
    return np.repeat(np.arange(len(sizes)), sizes), wrong


def _strides(run: records.Records, terms: terms_lib.Terms) -> list[str]:
    """Lists what no sampling with groups or a stride can draw, whatever the seed."""
    stride, turns = terms.stride, run.ledger.turns().values()
    gaps = [j - i for mine in turns for i, j in zip(mine, mine[1:], strict=False)]
    has_groups = terms.sampling is not None and terms.sampling["kind"] != "b-min-sep"
    if has_groups and (number := sum(gap % stride > 0 for gap in gaps)):
        return [f"{number} times a user came at the turn of another of the {stride} groups"]
    number = sum(gap < stride for gap in gaps)
    return [f"{number} times a user came again in less than {stride} rounds"] if number else []


def _drawn(
    run: records.Records, terms: terms_lib.Terms, rounds: Sequence[int], owners: np.ndarray
) -> dict[int, np.ndarray]:
    """Draws the units of each round again, whose users are `owners`."""
    seed, probability, count = run.cohort_seed, terms.probability, len(owners)
    if terms.sampling is None:
        draw = _lazy_poisson if "plan" in run.derived else _poisson
        return {t: draw(seed, t, count, probability) for t in rounds}
    stride = terms.stride
    poisson = {t: _lazy_poisson(seed, t, count, probability) for t in rounds}
    if terms.sampling["kind"] != "b-min-sep":
        of_user = _words(run.num_users, "CyclicPoissonSampler", seed, 0) % np.uint64(stride)
        group = of_user[owners]
        return {t: units[group[units] == t % stride] for t, units in poisson.items()}
    # Before the first round one of the last stride - 1 was a unit's with its stationary share.
    share = probability / (1.0 + (stride - 1) * probability)
    uniform = (_words(count, "MinSepPoissonSampler", seed, 0) >> np.uint64(11)) * 2.0**-53
    free = np.floor(uniform / share) + 1.0
    free[free >= stride] = 0.0
    drawn = {}
    for t, units in poisson.items():  # From round 0 on: a ledger is one history.
        drawn[t] = units[free[units] <= t]
        free[drawn[t]] = t + stride
    return drawn


def _patterns(members: Mapping[int, Iterable[int]]) -> collections.Counter[tuple[int, ...]]:
    """Counts the users who were in exactly the same rounds."""
    rounds_of = collections.defaultdict(list)
    for t in sorted(members):
        for user in members[t]:
            rounds_of[user].append(t)
    return collections.Counter(map(tuple, rounds_of.values()))


def _bytes(count: int, *label: object) -> bytes:
    """Draws bytes: SHAKE-256 of a label."""
    return hashlib.shake_256("/".join(map(str, ("tff_dpftrl", *label))).encode()).digest(count)


def _words(count: int, *label: object) -> np.ndarray:
    """Draws 64-bit words."""
    return np.frombuffer(_bytes(8 * count, *label), "<u8")


def _poisson(seed: int, t: int, count: int, probability: float) -> np.ndarray:
    """Draws the clients of one round of DP-FedAvg: 53 bits of a 64-bit word each."""
    words = _words(count, "PoissonSampler", seed, t)
    return np.flatnonzero((words >> np.uint64(11)) < probability * 2.0**53)


def _lazy_poisson(seed: int, t: int, count: int, probability: float) -> np.ndarray:
    """Draws the units of one step of ELS or ULS: 72 bits each, the last 64 where they matter."""
    if probability == 1.0:
        return np.arange(count)
    name = "LazyPoissonSampler"
    first = _bytes(count, name, seed, t)
    numerator, denominator = probability.as_integer_ratio()
    bound = (numerator * 2**72) // denominator
    undecided = [i for i, byte in enumerate(first) if byte == bound >> 64]
    rest = _bytes(8 * len(undecided), name, seed, t, "undecided")
    more = {i: int.from_bytes(rest[8 * k : 8 * k + 8], "little") for k, i in enumerate(undecided)}
    taken = [i for i, byte in enumerate(first) if (byte << 64) + more.get(i, 0) < bound]
    return np.array(taken, np.int64)


def _tested(
    test: str, run: records.Records, terms: terms_lib.Terms, seen: Mapping[int, set[int]]
) -> audit_report.Finding:
    """Tests sizes, repeats and overlaps of samples against independent Poisson samples.

    A user of ELS is in a step with probability 1 − (1 − p)^m for m ≤ G examples in the pool: at
    most that for G. Larger counts than the largest probability allows refute it. Where groups
    take turns, each user has one turn in as many rounds: these together are one Poisson sample.
    """
    if (terms.sampling or {}).get("kind") == "b-min-sep":
        return findings.skipped(test, "strides are kept, and the secret seed is not recorded")
    turns = [range(i, i + terms.stride) for i in range(0, len(seen), terms.stride)]
    seen = {
        i: set[int]().union(*(seen.get(t, ()) for t in turn))
        for i, turn in enumerate(turns)
        if turn.stop <= len(seen)
    }
    users, rounds = run.num_users, sorted(seen)
    most = 1.0 - (1.0 - terms.probability) ** terms.group_size
    each = _ERROR_RATE / 4.0
    total = sum(map(len, seen.values()))
    times = max(collections.Counter(u for one in seen.values() for u in one).values(), default=0)
    pairs = list(zip(rounds[::2], rounds[1::2], strict=False))
    both = sum(len(seen[i] & seen[j]) for i, j in pairs)
    wrong = []
    if stats.binom.sf(total - 1, users * len(rounds), most) < each:
        wrong.append(f"{total} users are in {len(rounds)} samples, more than by chance")
    if terms.group_size == 1 and stats.binom.cdf(total, users * len(rounds), most) < each:
        wrong.append(f"{total} users are in {len(rounds)} samples, fewer than by chance")
    if users * stats.binom.sf(times - 1, len(rounds), most) < each:
        wrong.append(f"a user is in {times} of {len(rounds)} samples, more than by chance")
    if stats.binom.sf(both - 1, users * len(pairs), most**2) < each:
        wrong.append(f"{both} users are in two samples that follow each other, not by chance")
    fine = (
        f"Sizes, repeats and overlaps of {len(rounds)} samples are what chance allows; the secret "
        "seed, by which they could be drawn again, or the sizes of the pool are not recorded"
    )
    if not rounds:
        return findings.skipped(test, "there is no whole sample")
    return dataclasses.replace(
        findings.judged(test, wrong, fine), error_rate=_ERROR_RATE, trials=len(rounds)
    )
