"""What one device's vector reaches in a secure sum: its own group's round, and nothing else."""

import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tests.secure_sums import conversations
from tff_dpftrl.runtime.actors import actor, messages, population, roles, secure_aggregator
from tff_dpftrl.runtime.plans import tensor_values
from tff_dpftrl.runtime.protocol import session_stream
from tff_dpftrl.runtime.tasks import planned_task
from tff_dpftrl.secure_sums import secure_sum_pb2, vectors
from verification import memory_store

_COUNT, _STRIDES, _TIMES, _METRICS = range(4)  # Segments of a vector; the last is the first metric.
_VECTOR, _OWN_COUNT = "secure/update/vector", "secure/update/count"
_BIT = "secure/bit/doubled"


class _Game:
    """A task with learned clip norm, and the vectors of two groups of three devices."""

    def __init__(self):
        process = small_tasks.SECURE_ONLY_ROUNDS["secagg adaptive"]()
        folder = small_folder.folder_of(
            process,
            terms=small_folder.SECURE_TERMS,
            secure_aggregation=small_tasks.SECURE_AGGREGATION,
        )
        self.task = planned_task.PlannedTask(folder)
        self.layout = self.task.served.task.secure_sum.layout
        self.commit = small_folder.Rounds(self.task, memory_store.MemoryStore()).commit
        device = small_folder.device_of(self.task)
        self.honest = [
            small_folder.secure_report_of(device, self.commit.model, small_folder.examples(seed))
            for seed in range(6)
        ]
        self.idle = small_folder.secure_report_of(device, self.commit.model, [])

    def segment(self, label):
        """Number of the segment of a tensor of the update."""
        labels = [tensor.label for tensor in self.task.folder.server.update]
        return _METRICS + labels.index(label)

    def changed(self, segment, values):
        """The vector of the first device with other entries in a segment, modulo its modulus."""
        vector = [part.copy() for part in self.honest[0]]
        modulus, part = self.layout[segment].modulus, vector[segment]
        part[...] = [value % modulus for value in np.ravel(np.array(values, object))]
        return vector

    def sum_of(self, reports):
        total = vectors.zeros(self.layout)
        for report in reports:
            vectors.add(total, report, self.layout)
        return total

    def group(self, vector):
        """The sum of the first group, with a vector in the place of its first device's."""
        total = self.sum_of([vector, *self.honest[1:3]])
        return self.task.served.task.summation.decode_group(total, 3)

    def committed(self, *groups):
        """What the step makes of the sums of groups."""
        summation = self.task.served.task.summation
        total = summation.zero()
        for group in groups:
            total = summation.merge(total, group)
        step = self.task.served.task.server_step
        return step.apply(total, 3 * len(groups), self.commit.model, self.commit.state)

    def other_group(self):
        return self.task.served.task.summation.decode_group(self.sum_of(self.honest[3:]), 3)


@pytest.fixture(scope="module")
def game():
    return _Game()


def _model(game, result):
    return tensor_values.from_bytes(result.model, game.task.folder.server.prepare.outputs)


_LIES = {
    "everything is huge": lambda game: [
        np.full_like(part, segment.modulus - 1) if index > _TIMES else part
        for index, (part, segment) in enumerate(zip(game.honest[0], game.layout, strict=True))
    ],
    "everything is zero": lambda game: vectors.zeros(game.layout),
    "a count of two": lambda game: game.changed(_COUNT, 2),
    "a count of none": lambda game: game.changed(_COUNT, 0),
    "an encoding's count above its room": lambda game: game.changed(
        game.segment(_OWN_COUNT), 2**31 - 2
    ),
    "an encoding's count of two": lambda game: game.changed(game.segment(_OWN_COUNT), 2),
    "an encoding's count below zero": lambda game: game.changed(game.segment(_OWN_COUNT), -1),
    "a bit of -1e5": lambda game: game.changed(game.segment(_BIT), -200_000),
    "a bit of +5e5": lambda game: game.changed(game.segment(_BIT), 1_000_000),
    "an entry that wraps around": lambda game: game.changed(
        game.segment(_VECTOR), [2**15, 0, 0, 0]
    ),
    "a metric far below zero": lambda game: game.changed(_METRICS, -(2**42)),
    "a metric beyond that of three": lambda game: game.changed(_METRICS, 3 * 2**40),
    "a histogram of -1 and 1": lambda game: game.changed(_STRIDES, [-1, 1, 0, 0, 0, 0, 0]),
    "a histogram of two devices": lambda game: game.changed(_TIMES, [2, 0, 0]),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_sum_that_is_not_of_honest_devices_loses_its_group_and_nothing_else(game, lie):
    with pytest.raises(population.UnusableReport):
        game.group(_LIES[lie](game))
    alone = game.committed(game.other_group())
    assert all(np.isfinite(part).all() for part in _model(game, alone))


def _norm_bound(game):
    (bound,) = [b for b in game.task.folder.server.report_bounds if b.HasField("norm")]
    return bound.norm


def test_the_norm_of_a_group_is_that_of_its_devices_at_most(game):
    """By the triangle inequality, exactly: nothing below is refused, and all that is above."""
    segment, norm = game.segment(_VECTOR), _norm_bound(game)
    others = game.sum_of(game.honest[1:3])[segment].astype(np.int64) - 2 * int(norm.centre)
    # The longest that one device can add to the first entry, and one step more.
    rest = float(np.sum(others[1:] ** 2))
    most = int(np.sqrt((3 * norm.largest) ** 2 - rest) - others[0])
    zero = np.array([0, 0, 0, 0])
    for extra, is_lost in ((0, False), (1, True)):
        entries = zero + int(norm.centre)
        entries[0] += most + extra
        forged = game.changed(segment, entries)
        if is_lost:
            with pytest.raises(population.UnusableReport, match="not clipped to the norm"):
                game.group(forged)
        else:
            game.group(forged)


def test_a_vector_of_zeros_shifts_the_sum_unnoticed(game):
    """As documented: it is a long update, and the others may have had short ones."""
    forged = game.changed(game.segment(_VECTOR), [0, 0, 0, 0])
    summation = game.task.served.task.summation
    group = summation.decode_group(game.sum_of([forged, game.idle, game.idle]), 3)
    result = game.committed(group, game.other_group())
    assert all(np.isfinite(part).all() for part in _model(game, result))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=strategies.data())
def test_no_vector_of_one_device_raises_in_the_servers_step(game, data):
    """Each one either loses its group, or is in a sum that the step can use."""
    vector = [part.copy() for part in game.honest[0]]
    for part, segment in zip(vector, game.layout, strict=True):
        largest = segment.modulus - 1
        if data.draw(strategies.booleans()):
            drawn = strategies.sampled_from([0, 1, 2, largest]) | strategies.integers(0, largest)
            values = data.draw(strategies.lists(drawn, min_size=part.size, max_size=part.size))
            part[...] = np.array(values, np.uint64).astype(part.dtype)
    try:
        group = game.group(vector)
    except population.UnusableReport:
        return
    result = game.committed(group, game.other_group())
    assert all(np.isfinite(part).all() for part in _model(game, result))
    assert 0.5 < result.metrics["aggregator/estimated_clip_norm"] < 2


def _run(game, reports):
    """An Aggregator with devices that send these; who was told what, and the sum."""
    names = [f"device {index}" for index in range(len(reports))]
    role = roles.AggregatorRole(
        "attempt", "small", 0, game.commit.model, tuple(names), parent="attempt"
    )
    aggregator = secure_aggregator.SecureAggregator(
        "sums", game.task.served.task, role, random.Random(0), lambda *_: (7.0, 9.0)
    )
    participants, steps, ends, waiting, parts = {}, dict.fromkeys(names, 0), {}, {}, []

    def take(effects):
        for effect in effects:
            if not isinstance(effect, actor.Send):
                continue
            told, name = effect.message, effect.to
            if isinstance(told, messages.Configure):
                made = conversations.make_participant(
                    game.task.served.task.secure_sum,
                    told.secure_sum_session,
                    reports[names.index(name)],
                    context=session_stream.secure_sum_context(
                        told.task, told.round_index, told.model
                    ),
                )
                participants[name], waiting[name] = made, made.advertise()
            elif isinstance(told, messages.SecureSumAnswer):
                asked = secure_sum_pb2.ToDevice.FromString(told.content)
                waiting[name] = participants[name].answer(asked)
            elif isinstance(told, messages.ReportAccepted | messages.ReportRefused):
                ends[name] = told
            elif isinstance(told, messages.PartialSum):
                parts.append(told)

    take(aggregator.start(0.0))
    while waiting:
        for name, message in list(waiting.items()):
            del waiting[name]
            content = message.SerializeToString()
            step = steps[name]
            steps[name] += 1
            sent = messages.SecureSumMessage(name, "attempt", step, content)
            take(aggregator.step(1.0, sent))
        if not waiting:
            take(aggregator.step(1.0, messages.CloseReporting()))
        if parts:
            break
    return ends, parts


def test_the_devices_of_a_spoilt_group_are_told_that_it_is_lost(game):
    honest, (part,) = _run(game, game.honest[:3])
    assert {type(end) for end in honest.values()} == {messages.ReportAccepted}
    assert part.total is not None and part.counts["summed_groups"] == 1
    spoilt, (part,) = _run(game, [_LIES["everything is huge"](game), *game.honest[1:3]])
    assert {end.refusal for end in spoilt.values()} == {messages.Refusal.GROUP_LOST}
    assert part.total is None and part.counts["lost_groups"] == 1
