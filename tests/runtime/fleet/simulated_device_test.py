"""Tests of tff_dpftrl.runtime.fleet.simulated_device and tally."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.plans import secure_plans
from tff_dpftrl.data import user_text
from tff_dpftrl.runtime.device import session, text_examples
from tff_dpftrl.runtime.fleet import simulated_device, tally
from tff_dpftrl.runtime.fleet.behaviour import Attack, Behaviour, DropOut
from tff_dpftrl.runtime.plans import plan_pb2, tensor_values
from tff_dpftrl.secure_sums import secure_sum_pb2

_UPDATE = [np.float32([[1.0, 2.0]]), np.int32([3]), np.float64(4.0)]
_TENSORS = [
    plan_pb2.Tensor(dtype="float32", shape=[1, 2]),
    plan_pb2.Tensor(dtype="int32", shape=[1]),
    plan_pb2.Tensor(dtype="float64"),
]


def test_the_newest_texts_of_a_user_come_first():
    corpus = user_text.UserText.from_mapping("c", {"a": ["one", "two", "three"], "b": ["x"]})
    texts = simulated_device.UserTexts(corpus, "a")
    encoded = [text_examples.encode_text(text) for text in ("three", "two")]
    assert texts.select("any", max_examples=2, recorded_since=1e12) == encoded
    assert len(texts.select("any", max_examples=9)) == 3
    with pytest.raises(ValueError, match="max_examples"):
        texts.select("any", max_examples=0)


def test_an_attack_is_what_it_is_called():
    update = tensor_values.to_bytes(_UPDATE)
    weights, count, other = tensor_values.from_bytes(
        simulated_device.attacked(update, Attack.NAN), _TENSORS
    )
    assert np.isnan(weights).all() and np.isnan(other) and count == 3
    with pytest.raises(tensor_values.ValuesError, match="of shape"):
        tensor_values.from_bytes(simulated_device.attacked(update, Attack.SHAPE), _TENSORS)
    with pytest.raises(tensor_values.ValuesError, match="cannot be read"):
        tensor_values.from_bytes(simulated_device.attacked(update, Attack.GARBAGE), _TENSORS)
    assert simulated_device.attacked(update, Attack.ATTEMPT) == update


def test_an_attack_on_a_secure_sum_is_in_one_of_its_messages():
    def keys():
        keys_ = secure_sum_pb2.KeyAdvertisement(encryption_key=b"e" * 32, mask_key=b"m" * 32)
        return secure_sum_pb2.ToServer(key_advertisement=keys_)

    def vector():
        return secure_sum_pb2.ToServer(masked_vector={"content": b"vector"})

    changed = simulated_device.attacked_message
    assert changed(keys(), Attack.NAN).key_advertisement.mask_key == bytes(32)
    assert changed(vector(), Attack.SHAPE).masked_vector.content == b"vector" + bytes(4)
    for message, attack in ((vector, Attack.NAN), (keys, Attack.SHAPE), (keys, None)):
        assert changed(message(), attack) == message()


@pytest.mark.parametrize(("threat_model", "num_messages"), [(1, 4), (2, 5)])
def test_a_device_goes_away_before_any_of_its_messages(threat_model, num_messages):
    """The last of them where the server may be active comes after a signature."""

    class Stream:
        def __init__(self):
            self.sent = 0

        def send(self, message):
            self.sent += 1

    def sent_with(drop_out_at):
        upload = simulated_device.SimulatedUpload(
            secure_plans.device(secure_aggregation=secure_plans.wanted(threat_model=threat_model)),
            bytes(32),
            context=b"",
            attester=None,
            issuers=[ed25519.Ed25519PrivateKey.generate().public_key()],
            clock=time.time,
            behaviour=Behaviour(DropOut.UPLOAD, drop_out_at),
        )
        stream = Stream()
        assert upload.num_messages == num_messages
        with pytest.raises(session.Interrupted, match="went away before its shares"):
            for step in range(num_messages):
                upload.send(stream, step, secure_sum_pb2.ToServer(shares={}))
        return stream.sent

    assert [sent_with((i + 0.5) / num_messages) for i in range(num_messages)] == list(
        range(num_messages)
    )


def test_sessions_are_counted_by_their_shapes():
    counts = tally.Tally()
    for shape, outcome, reason, *asked in (
        *3 * [("-v[]+^", session.SessionOutcome.COMPLETED, "", "t", 4)],
        ("-v[]+#", session.SessionOutcome.REPORT_REFUSED, "late", "t", 4),
        ("-v!", session.SessionOutcome.RESTING, "rests", "t", 4),
        ("-v[!", session.SessionOutcome.INTERRUPTED, "went away", "t", 5),
        ("-#", session.SessionOutcome.NOT_SELECTED, "enough"),
        ("-*", session.SessionOutcome.FAILED, "gone"),
    ):
        counts.add(tally.SessionEnd(shape, outcome, reason, *asked))
    assert [row[:4] for row in counts.table()[1:]] == [
        ["-v[]+^ ", "3", "60.0%", "75%"],
        ["-v[!   ", "1", "20.0%", "2%"],
        ["-v[]+# ", "1", "20.0%", "22%"],
    ]
    assert counts.summary(4.0) == [
        "8 sessions in 4 s (2.0/s); reports of 3 counted, in 1 rounds",
        "nothing to do: 1 the participation timer runs, 1 not selected, 1 failed",
        counts.rests_advice,
        "refused, 1 times: late",
        "failed, 1 times: gone",
    ]
    assert counts.to_dict(4.0)["shapes"] == {"-v[]+^": 3, "-v[]+#": 1, "-v[!": 1}
    assert tally.Tally().summary(4.0)[1] == "nothing to do: 0"


def test_devices_that_rest_are_told_what_mends_it_until_a_report_counts():
    counts = tally.Tally()
    for reason in ("first.", "min_sep=3."):
        counts.add(tally.SessionEnd("-v!", session.SessionOutcome.RESTING, reason))
    assert counts.summary(1.0)[2].startswith("2 sessions since the last report were of devices")
    assert "the last of them: min_sep=3. If" in counts.summary(1.0)[2]
    counts.add(tally.SessionEnd("-v[]+^", session.SessionOutcome.COMPLETED, "", "t", 4))
    assert len(counts.summary(1.0)) == 2
