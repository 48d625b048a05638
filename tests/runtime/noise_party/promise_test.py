"""A party gives noise for the tasks that it was promised for, and for the sums that they name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.runtime.noise_party import noisy_task
from tff_dpftrl.accounting import statement_sentences
from tff_dpftrl.mechanisms import restarts
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import promise as promise_lib

_RESTARTED = restarts.Restarted(noisy_task.BLT, (0, 3, 6))


def _promise(task=None, party=noisy_task.PARTY):
    return promise_lib.Promise(noisy_task.make() if task is None else task, party)


def _refused(task, match, party=noisy_task.PARTY):
    with pytest.raises(promise_lib.PromiseRefusedError, match=match) as caught:
        _promise(task, party)
    assert "\n" not in str(caught.value)


def test_what_is_promised_is_said_in_a_line():
    text = _promise().describe()
    assert "z = 1.5, clip norm 2, 8 rounds, 11 weights, sums of 2 to 6 devices" in text
    adaptive = _promise(noisy_task.make(_RESTARTED, adaptive=True))
    assert "clip norm learned" in adaptive.describe()


def test_the_noise_is_that_of_the_terms():
    promise = _promise()
    encoding = promise.encoding
    assert promise.noise.stddev == 1.5 * encoding.inflation * encoding.scaled_clip_norm
    assert encoding.padded_dim == 16


def test_secure_noise_is_drawn_where_the_terms_state_it():
    task = noisy_task.make()
    parameters = {**task.terms.parameters, statement_sentences.NOISE_GENERATOR: "AES"}
    terms = dataclasses.replace(task.terms, parameters=parameters)
    for stated, words in ((task.terms, 2), (terms, 4)):
        promise = _promise(dataclasses.replace(task, terms=stated))
        assert promise.noise.initial_state(np.arange(4)).seed.shape == (words,)


def test_a_task_for_another_party_is_refused():
    _refused(noisy_task.make(), "promises devices the noise of 03a1.* and not of", b"k" * 32)


def test_a_key_that_the_plan_has_twice_is_refused():
    task = noisy_task.make(parties=(noisy_task.PARTY, noisy_task.PARTY))
    _refused(task, "twice: name each noise party once")


def test_a_task_without_secure_sums_is_refused():
    task = noisy_task.make()
    task.server.ClearField("secure_aggregation")
    _refused(task, "has no noise party: The plan asks for no secure aggregation")


def test_a_task_without_noise_is_refused():
    task = noisy_task.make()
    _refused(
        dataclasses.replace(task, terms=dataclasses.replace(task.terms, noise_multiplier=0.0)),
        "has no noise",
    )


@pytest.mark.parametrize(
    "options, match",
    [
        ({"scaled_clip_norm": 100.0}, "devices sum 16 integers modulo .* and the grid of the"),
        ({"inflation": 1.5}, "the terms charge a norm inflated by 1.5"),
        ({"round_seed": "1"}, "devices get no seed of the rotation named '1'"),
        ({"vector": "3/0/other"}, "the plan has no update '3/0/other' to add noise to"),
        ({"count": "3/0/count"}, "the clip norm is learned in one of them only"),
        ({"adaptive": True, "count_stddev": 0.5}, "must be above noise_multiplier / 2"),
    ],
)
def test_a_plan_that_contradicts_its_terms_is_refused(options, match):
    _refused(noisy_task.make(**options), match)


def test_reports_that_are_bounded_by_another_grid_are_refused():
    task = noisy_task.make()
    task.server.report_bounds[0].norm.largest *= 1.01
    _refused(task, "reports are bounded by")


def test_a_plan_that_does_not_say_the_noise_is_refused():
    task = noisy_task.make()
    task.server.ClearField("party_noise")
    _refused(task, "does not say their noise")


def test_a_grid_without_room_for_the_noise_is_refused():
    _refused(noisy_task.make(room=0.9), "its 1 noise parties add .* with more secagg_bits")
    two = (noisy_task.PARTY, noisy_task.OTHER_PARTY)
    _refused(noisy_task.make(parties=two, room=0.75), "its 2 noise parties add")
    _promise(noisy_task.make(parties=two))


def test_the_vector_counts_no_device_and_touches_no_metric():
    promise = _promise(noisy_task.make(_RESTARTED, adaptive=True))
    integers = np.arange(promise.encoding.padded_dim)
    vector = promise.vector(integers, -3)
    np.testing.assert_array_equal(vector[3], integers)
    assert vector[5] == noisy_task.COUNT_MODULUS - 3
    assert not any(np.any(vector[i]) for i in (0, 1, 2, 4, 6))


def test_the_clip_norm_changes_at_restarts_only():
    promise = _promise(noisy_task.make(_RESTARTED, adaptive=True))

    def given(row, clip_norm):
        return ledger_lib.Given(row, "a", b"s", clip_norm, 3, 0.0, bytes(32))

    promise.check_clip_norm(0, noisy_task.CLIP, None)
    promise.check_clip_norm(2, noisy_task.CLIP, given(0, noisy_task.CLIP))
    promise.check_clip_norm(3, 0.7, given(2, noisy_task.CLIP))
    promise.check_clip_norm(5, 0.7, given(3, 0.7))
    for row, clip_norm, last in [(0, 1.0, None), (5, 0.8, given(4, 0.7))]:
        with pytest.raises(ledger_lib.NoiseRefusedError, match=f"devices of round {row} are to"):
            promise.check_clip_norm(row, clip_norm, last)


def test_the_broadcast_has_rotation_and_clip_norm():
    task = noisy_task.make(_RESTARTED, adaptive=True)
    promise = _promise(task)
    attempt = promise.attempt(noisy_task.broadcast(task, 0.5))
    assert attempt.clip_norm == 0.5
    np.testing.assert_array_equal(attempt.round_seed, noisy_task.ROUND_SEED)
    fixed = noisy_task.make()
    assert _promise(fixed).attempt(noisy_task.broadcast(fixed)).clip_norm is None
    for content in (b"x", noisy_task.broadcast(fixed), noisy_task.broadcast(task, -1.0)):
        with pytest.raises(ledger_lib.NoiseRefusedError):
            promise.attempt(content)


def test_hashes_are_those_of_the_devices_plans():
    assert promise_lib.plan_hashes(noisy_task.make()) == {noisy_task.PLAN_SHA256}
