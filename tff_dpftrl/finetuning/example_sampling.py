"""Which examples of which users enter which step, as pure functions of a secret seed.

Two ways to sample (Charles et al. 2024). *Example-level sampling* (ELS, Algorithm 1):
each user puts at most G examples into a pool, once, and every example of the pool is in
a step with probability p. *User-level sampling* (ULS, Algorithm 2): every user is in a
step with probability q, with at most G examples that are drawn anew in every step.

Privacy rests on four things, all of them here. The samples are Poisson: independent and of any
size, empty ones included. A user's choice of examples is a function of the seed, the user, the step
(ULS) and the user's own number of examples, and of nothing else: no other user's data moves it. No
user has more than G examples in the pool or in a step, which is checked where they are chosen and
again where a batch is made. And the seed stays secret: take it from `runs.cohort_seed`, and publish
neither it nor the batches. All randomness is SHAKE-256 of the seed, so that a step that is repeated
after a crash has the same batch, whatever the version of NumPy.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import user_ids, user_text
from tff_dpftrl.participation import cohorts, secret_cohorts


@dataclasses.dataclass(frozen=True)
class Users:
    """Users and the numbers of their examples: all that sampling needs to know of the data.

    A user without examples is refused, not dropped: how many users there are decides
    the sampling probability, and the accounting takes that number for public.

    Attributes:
      ids: Distinct names, in any order that stays the same.
      num_examples: Number of examples of each user, int64, shape [users], at least 1.
    """

    ids: tuple[str, ...]
    num_examples: np.ndarray

    def __post_init__(self):
        ids = tuple(self.ids)
        sizes = np.array(self.num_examples)
        if not ids:
            raise validation.UsageError("ids must name at least one user, got none.")
        if sizes.shape != (len(ids),) or not np.issubdtype(sizes.dtype, np.integer):
            raise validation.UsageError(
                f"num_examples must be one integer for each of {len(ids)} ids, got shape "
                f"{sizes.shape}, {sizes.dtype}."
            )
        if len(set(ids)) < len(ids):
            twice = next(
                one
                for one, other in zip(sorted(ids), sorted(ids)[1:], strict=False)
                if one == other
            )
            raise validation.UsageError(
                f"ids must differ, got {twice!r} twice: merge its examples."
            )
        user_ids.check(ids, "ids")
        without = np.flatnonzero(sizes < 1)
        if without.size:
            more = f" and {without.size - 1} more" if without.size > 1 else ""
            raise validation.UsageError(
                f"num_examples must be at least 1, got {sizes[without[0]]} for user "
                f"{ids[without[0]]!r}{more}: leave users without examples out of the data."
            )
        sizes = sizes.astype(np.int64)
        sizes.flags.writeable = False
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "num_examples", sizes)

    def __len__(self) -> int:
        return len(self.ids)

    def pool_size(self, group_size: int) -> int:
        """Returns the number of examples if each user gives at most `group_size`: Σ min(n_u, G)."""
        return int(np.minimum(self.num_examples, group_size).sum())


@dataclasses.dataclass(frozen=True)
class Batch:
    """The examples of one step, by the units whose gradients are clipped.

    A unit is an example (ELS) or a user (ULS); the gradient of a unit is the mean over
    its rows. There may be no unit at all: the step then adds noise to nothing.

    Attributes:
      unit_users: Index into `Users.ids` of the user of each unit, int64, shape [units],
        never decreasing.
      examples: Index of each row among its user's examples, int64, shape [rows].
      row_splits: Rows row_splits[i] to row_splits[i + 1] − 1 are unit i's, int64, shape
        [units + 1].
    """

    unit_users: np.ndarray
    examples: np.ndarray
    row_splits: np.ndarray

    @property
    def num_units(self) -> int:
        """Number of units, perhaps 0."""
        return len(self.unit_users)

    @property
    def num_rows(self) -> int:
        """Number of examples, that is of gradients, perhaps 0."""
        return len(self.examples)

    @property
    def row_users(self) -> np.ndarray:
        """Index of the user of each row, int64, shape [rows]."""
        return np.repeat(self.unit_users, np.diff(self.row_splits))


class Contributions(abc.ABC):
    """Batches of a run, whose T steps are numbered 0 … T − 1.

    Attributes:
      group_size: G, the largest number of examples of one user in the pool (ELS) or in a step
        (ULS).
      sampling_probability: p of an example (ELS) or q of a user (ULS) in one step, in (0, 1].
    """

    def __init__(
        self,
        users: Users,
        *,
        group_size: int,
        sampling_probability: float,
        num_steps: int,
        seed: int,
    ):
        """Checks the arguments; `seed` must be secret and have at least 128 random bits."""
        self.users = users
        self.group_size = check_group_size(group_size)
        self._seed = validation.integer("seed", seed, minimum=0)
        self._sampler = cohorts.LazyPoissonSampler(
            num_clients=self._num_units(),
            sampling_probability=sampling_probability,
            num_rounds=validation.integer("num_steps", num_steps, minimum=1),
            seed=seed,
        )

    @property
    def sampling_probability(self) -> float:
        """P of an example (ELS) or q of a user (ULS)."""
        return self._sampler.sampling_probability

    @property
    def num_steps(self) -> int:
        """T."""
        return self._sampler.num_rounds

    @property
    @abc.abstractmethod
    def expected_gradients(self) -> float:
        """Expected number of examples in a step; how many there are differs."""

    @abc.abstractmethod
    def batch(self, step: int) -> Batch:
        """Returns the examples of a step, the same every time; steps come in any order.

        A user with more than G examples in the batch, which cannot happen, raises RuntimeError.
        """

    @abc.abstractmethod
    def _num_units(self) -> int:
        """Returns how many units the samples are drawn from."""

    def _checked(self, batch: Batch) -> Batch:
        """Returns the batch after counting each user's examples once more."""
        users, examples = batch.row_users, batch.examples
        sizes = self.users.num_examples
        in_order = (np.diff(users) > 0) | ((np.diff(users) == 0) & (np.diff(examples) > 0))
        if (
            not in_order.all()
            or np.any(examples < 0)
            or np.any(examples >= sizes[users])
            or np.any(np.bincount(users, minlength=1) > self.group_size)
        ):
            raise RuntimeError(
                f"A step would use an example twice, one that is not there, or more than "
                f"group_size={self.group_size} of one user: the guarantee would not hold."
            )
        return batch


class ExampleSampling(Contributions):
    """ELS: a pool of at most G examples a user, chosen once; each is sampled by itself.

    Examples that are not in the pool are never used. Units are examples. Where users are in
    groups that take turns, an example is sampled at its user's turns only.
    """

    def __init__(self, users: Users, *, num_groups: int = 1, **kwargs):
        """Chooses the pool; users are in `num_groups` groups that take turns (`secret_cohorts`)."""
        group_size = check_group_size(kwargs["group_size"])
        seed = validation.integer("seed", kwargs["seed"], minimum=0)
        chosen = [
            random_examples(f"pool/{seed}", user, size, group_size)
            for user, size in zip(users.ids, users.num_examples.tolist(), strict=True)
        ]
        counts = np.array([len(one) for one in chosen])
        if counts.max() > group_size:
            raise RuntimeError(f"The pool has more than group_size={group_size} of one user.")
        self._pool = np.concatenate(chosen)
        self._owners = np.repeat(np.arange(len(users)), counts)
        super().__init__(users, **kwargs)
        turns = secret_cohorts.CyclicPoissonSampler(
            num_clients=len(users),
            num_groups=num_groups,
            sampling_probability=1.0,
            num_rounds=self.num_steps,
            seed=seed,
        )
        self._num_groups, self._groups = turns.num_groups, turns.groups[self._owners]

    @property
    def pool_size(self) -> int:
        """|D_sub|, the number of examples in the pool."""
        return len(self._pool)

    @property
    @override
    def expected_gradients(self) -> float:
        # p · |D_sub|, and the share of it whose turn it is.
        return self.sampling_probability * self.pool_size / self._num_groups

    @override
    def batch(self, step: int) -> Batch:
        sampled = self._sampler.cohort(step)
        sampled = sampled[self._groups[sampled] == step % self._num_groups]
        return self._checked(
            Batch(self._owners[sampled], self._pool[sampled], np.arange(len(sampled) + 1))
        )

    def _num_units(self) -> int:
        return len(self._pool)


class UserSampling(Contributions):
    """ULS: users are sampled, each with at most G examples, drawn anew in every step.

    Units are users.
    """

    @property
    @override
    def expected_gradients(self) -> float:
        # q · Σ min(n_u, G).
        return self.sampling_probability * self.users.pool_size(self.group_size)

    @override
    def batch(self, step: int) -> Batch:
        sampled = self._sampler.cohort(step)
        return self._checked(
            batch_of_users(self.users, sampled, self.group_size, f"rows/{self._seed}/{step}")
        )

    def _num_units(self) -> int:
        return len(self.users)


def batch_of_users(users: Users, members: np.ndarray, group_size: int, stream: str) -> Batch:
    """Draws at most `group_size` examples of each of the users in a step; units are users.

    `members` are distinct indices of users, int64; the batch has them in the order of `users`.
    `stream` names the random stream, with the secret seed, like "turns/<seed>/<step>".
    """
    members = np.sort(members)
    chosen = [
        random_examples(stream, users.ids[user], int(users.num_examples[user]), group_size)
        for user in members.tolist()
    ]
    splits = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
    return Batch(members, np.concatenate([np.zeros(0, np.int64), *chosen]), splits)


def check_group_size(group_size: int) -> int:
    """Returns G as an `int`; refuses all but integers of at least 1."""
    return validation.integer(
        "group_size",
        group_size,
        minimum=1,
        remedy="It is the largest number of examples of one user: try the users' median.",
    )


def random_examples(stream: str, user_id: str, num_examples: int, limit: int) -> np.ndarray:
    """Draws min(n_u, limit) of a user's examples, uniformly without replacement; increasing int64.

    A function of the arguments alone: `stream` names the random stream, with the secret seed, like
    "pool/<seed>". The choice for a smaller `limit` is a part of that for a larger one.
    """
    if num_examples <= limit:
        return np.arange(num_examples, dtype=np.int64)
    return np.sort(random_order(stream, user_id, num_examples, limit))


def random_order(stream: str, user_id: str, num_examples: int, limit: int) -> np.ndarray:
    """Returns the first min(n_u, limit) of a user's examples in a uniformly random order, int64."""
    count = min(num_examples, limit)
    label = f"tff_dpftrl/finetuning/{stream}/{num_examples}/{user_id}"
    digest = hashlib.shake_256(label.encode("utf-8", "surrogatepass")).digest(8 * count)
    # Fisher and Yates, whose array 0 … n − 1 is kept only where it has been changed.
    moved: dict[int, int] = {}
    order = []
    for place, word in enumerate(np.frombuffer(digest, dtype="<u8").tolist()):
        # A word times a range, over 2^64, is uniform up to n · 2^-64.
        other = place + (word * (num_examples - place) >> 64)
        order.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return np.array(order, dtype=np.int64)


def of_sizes(sizes: Sequence[int] | np.ndarray) -> Users:
    """Users of whom only the numbers of examples are known, named "0", "1" and so on."""
    return Users(tuple(map(str, range(len(sizes)))), np.array(sizes))


def of_text(corpus: user_text.UserText) -> Users:
    """Returns the users of a corpus who have a text that is not blank, and how many each has."""
    sizes = {u: sum(bool(t.strip()) for t in corpus.examples(u)) for u in corpus.user_ids}
    sizes = {user: size for user, size in sizes.items() if size}
    if not sizes:
        raise validation.UsageError(
            f"data {corpus.name!r} has no user to train on who has a text that is not blank: use "
            "other text."
        )
    return Users(tuple(sizes), np.array(list(sizes.values())))
