"""The server's part of a round, from its plan: plain TensorFlow functions, in any thread.

    broadcast = work.broadcast(state)
    sums = work.zero()
    for update in updates:  # In any order.
        sums = work.accumulate(sums, update)
    new_state, metrics = work.finish(state, sums)  # Commit both, then release.

`initialize`, `finish` and `skip` draw new noise in every call; the other functions are pure. Commit
one result of `finish` before anybody sees anything of it: a second one that is released, too, costs
privacy that nobody has counted. A state holds the seed of the noise and is secret.

A server checks devices in before it needs TensorFlow, which takes seconds to import. So only what
runs a graph imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tff_dpftrl import array_files, validation
from tff_dpftrl.runtime.plans import plan_pb2, secure_report, tensor_values

if TYPE_CHECKING:
    import tensorflow as tf

    from tff_dpftrl.execution import entropy as entropy_lib

State: TypeAlias = list[np.ndarray]
"""Tensors of a process's state; `tensor_values.to_bytes` serialises them."""

Sums: TypeAlias = list[np.ndarray]
"""Sums of updates; tensors that are summed securely come last, as int64."""

_Adding: TypeAlias = Callable[[Sequence[np.ndarray], Sequence[np.ndarray], bool], Sums]


class UpdateRefusedError(validation.UsageError):
    """Raised for an update that is not added; its device counts as lost."""


class ServerWork:
    """The server's part of a task."""

    def __init__(self, plan: plan_pb2.ServerPlan, entropy: entropy_lib.Repeated | None = None):
        """Stores a verified plan. The first call that needs a graph waits for `load`.

        With `entropy`, for tests and audits, equal arguments give equal results.
        """
        self._entropy = entropy
        self.plan = plan
        """Verified plan of the task."""
        self._num_plain = len(plan.zero.outputs)
        self._secure = plan.finish.inputs[len(plan.prepare.inputs) + self._num_plain :]
        self._loading = threading.Lock()
        self._loaded: Functions | None = None

    def load(self) -> Functions:
        """Imports TensorFlow and traces the graphs at the first call, which takes some seconds."""
        with self._loading:
            if self._loaded is None:
                self._loaded = Functions(self.plan, self._entropy)
            return self._loaded

    @property
    def state(self) -> Sequence[plan_pb2.Tensor]:
        """Tensors of a state, without values."""
        return self.plan.prepare.inputs

    @property
    def metrics(self) -> Sequence[plan_pb2.Tensor]:
        """Metrics that `finish` returns for a round; their labels are like "train/loss"."""
        return self.plan.finish.outputs[len(self.state) :]

    def initialize(self, graph: plan_pb2.Graph | None = None) -> State:
        """Makes a first state, with a new random seed of its noise at every call.

        `graph` is the plan's `initialize`, if `plan` is without it.
        """
        from tff_dpftrl.runtime.plans import graphs

        # Loaded here: its constants are the initial weights, and it is called once.
        return _arrays(graphs.results_of(self.plan.initialize if graph is None else graph))

    def broadcast(self, state: State) -> list[np.ndarray]:
        """Returns what every device of a round gets: the model, and no secret of the state."""
        return _arrays(self.load().prepare(*_tensors(state)))

    def zero(self) -> Sums:
        """Returns the sums of no updates."""
        secure = [np.zeros(list(tensor.shape), np.int64) for tensor in self._secure]
        # Zeros take memory when something is added to them.
        plain = [
            array_files.aligned(array.shape, array.dtype, zero=True)
            if array.ndim and not any(array.strides)
            else array
            for array in self.load().zero
        ]
        return [*plain, *secure]

    def check_update(self, update: Sequence[np.ndarray]) -> None:
        """Refuses an update that must not be added, with an `UpdateRefusedError`.

        An honest device whose training diverged sends zeros, where the process says so, and a count
        that the process reports. Any other number that is not finite is refused here: it would ruin
        the model.
        """
        try:
            tensor_values.check(update, self.plan.update, "update")
        except tensor_values.ValuesError as error:
            raise UpdateRefusedError(str(error)) from None
        for array, tensor in zip(update, self.plan.update, strict=True):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise UpdateRefusedError(f"update, {tensor.label}, is not finite.")
        for array, rule in zip(update[self._num_added :], self.plan.secure_sums, strict=True):
            largest = secure_report.largest_entry(rule)
            if array.size and not 0 <= array.min() <= array.max() <= largest:
                raise UpdateRefusedError(
                    f"update has integers outside [0, {largest}], the range of their secure sum."
                )

    def accumulate(self, sums: Sums, update: Sequence[np.ndarray]) -> Sums:
        """Adds an update after `check_update`; `sums` are not changed."""
        self.check_update(update)
        return self.add(sums, update)

    def add(self, sums: Sums, update: Sequence[np.ndarray], *, keeps_sums: bool = True) -> Sums:
        """Adds an update that `check_update` accepted.

        Unless `keeps_sums`, the sums change in place, without a second copy.
        """
        plain = self.load().accumulate(
            sums[: self._num_plain], update[: self._num_added], keeps_sums
        )
        secure = [array.astype(np.int64) for array in update[self._num_added :]]
        return [*plain, *_added(sums[self._num_plain :], secure, keeps_sums)]

    def merge(self, one: Sums, other: Sums, *, keeps_one: bool = True) -> Sums:
        """Returns the sum of the sums of two sets of updates; both change unless `one` is kept."""
        if not keeps_one and self.load().merge is _added:
            one, other = other, one  # The first `one` is zero, and has no memory yet.
        plain = self.load().merge(one[: self._num_plain], other[: self._num_plain], keeps_one)
        return [*plain, *_added(one[self._num_plain :], other[self._num_plain :], keeps_one)]

    def finish(
        self, state: State, sums: Sums, *, keeps_arguments: bool = True
    ) -> tuple[State, dict[str, np.ndarray]]:
        """Ends a round: adds noise and takes the optimizer's step.

        Unless `keeps_arguments`, both lists are emptied, and their memory is free as soon as it is
        not needed. It returns the new state, and the metrics by label.
        """
        from tff_dpftrl.execution import lent_arrays

        finish = self.load().finish
        num_state, given = len(state), [*state, *sums]
        if not keeps_arguments:
            state.clear()
            sums.clear()
        results = _arrays(finish(*lent_arrays.lent(given)))
        labels = [tensor.label for tensor in self.metrics]
        return results[:num_state], dict(zip(labels, results[num_state:], strict=True))

    def skip(self, state: State) -> State:
        """Skips a round of which nothing is released: keeps the model, passes over the noise."""
        return _arrays(self.load().skip(*_tensors(state)))

    def weights(self, state: State) -> dict[str, np.ndarray]:
        """Returns the model's weights by label: all of a committed state that may be released."""
        labels = [tensor.label for tensor in self.plan.get_weights.outputs]
        arrays = _arrays(self.load().get_weights(*_tensors(state)))
        return dict(zip(labels, arrays, strict=True))

    def with_weights(self, state: State, weights: Mapping[str, np.ndarray]) -> State:
        """Replaces the weights in a state by those of this or another task, from `weights`."""
        wanted = self.plan.set_weights.inputs[len(self.state) :]
        if {tensor.label for tensor in wanted} != weights.keys():
            raise validation.UsageError(
                f"weights must be {[tensor.label for tensor in wanted]}, got {list(weights)}."
            )
        arrays = [np.asarray(weights[tensor.label]) for tensor in wanted]
        tensor_values.check(arrays, wanted, "weights")
        return _arrays(self.load().set_weights(*_tensors(state), *_tensors(arrays)))

    @property
    def _num_added(self) -> int:
        return len(self.plan.update) - len(self.plan.secure_sums)


class Functions:
    """The graphs of a server's plan as functions."""

    def __init__(self, plan: plan_pb2.ServerPlan, entropy: entropy_lib.Repeated | None = None):
        from tff_dpftrl.runtime.plans import graphs

        self.prepare = graphs.function_of(plan.prepare)
        self.zero = [_light(array) for array in _arrays(graphs.function_of(plan.zero)())]
        self.accumulate = _adding(plan.accumulate)
        self.merge = _adding(plan.merge)
        self.finish = graphs.function_of(
            plan.finish, variables_from=0, draws_noise=True, entropy=entropy
        )
        self.get_weights = graphs.function_of(plan.get_weights)
        self.set_weights = graphs.function_of(plan.set_weights)
        self.skip = graphs.function_of(plan.skip, draws_noise=True, entropy=entropy)


def _adding(graph: plan_pb2.Graph) -> _Adding:
    """Makes the function that adds updates, or sums, to sums.

    NumPy adds wherever the graph does nothing else. With Python 3.11 TensorFlow leaks some bytes
    for every eager tensor, of which a report of a small model would make forty, and a call of a
    graph takes longer than such a sum.
    """
    from tff_dpftrl.runtime.plans import graphs

    if graphs.adds_in_pairs(graph):
        return _added
    function = graphs.function_of(graph)
    return lambda one, other, keeps_one: _arrays(function(*_tensors(one), *_tensors(other)))


def _added(one: Sequence[np.ndarray], other: Sequence[np.ndarray], keeps_one: bool = True) -> Sums:
    sums = []
    with np.errstate(all="ignore"):  # TensorFlow ignores these errors, too.
        for a, b in zip(one, other, strict=True):
            reuses = not keeps_one and a.flags.writeable
            # TensorFlow makes a tensor of an aligned array without a copy.
            out = a if reuses else array_files.aligned(a.shape, a.dtype)
            sums.append(np.add(a, b, out=out))
    return sums


def _light(array: np.ndarray) -> np.ndarray:
    """Returns an array with the same values, which takes no memory if all bits are zero."""
    if array.dtype.kind not in "iuf" or not array.ndim or array.any() or np.signbit(array).any():
        return array
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _tensors(arrays: Sequence[np.ndarray]) -> list[tf.Tensor]:
    from tff_dpftrl import array_tensors

    return list(map(array_tensors.tensor, arrays))


def _arrays(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    return [np.asarray(tensor) for tensor in tensors]  # No copy; not writable.
