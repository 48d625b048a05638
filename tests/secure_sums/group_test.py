"""Sums of groups are exact for any drop-outs, or the group is lost and nothing revealed."""

from __future__ import annotations

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import group, keys, parameters, secret_sharing, secure_sum_pb2, vectors

_HONEST, _ACTIVE = conversations.HONEST, conversations.ACTIVE
_BOTH = pytest.mark.parametrize("model", [_HONEST, _ACTIVE])
_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(5, 1000), vectors.Segment(3, 2**20))
_PHASES = list(group.Phase)

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
_MODULI = st.one_of(
    st.integers(2, 300),
    st.integers(2**16 - 5, 2**16 + 5),
    st.integers(2**31, 2**32),
    st.integers(0, 63).map(lambda log: 2 ** (log + 1)),
)
_LAYOUTS = st.lists(st.builds(vectors.Segment, st.integers(1, 9), _MODULI), min_size=1, max_size=4)


def _devices(demanded, session, num_devices, seed=0):
    rng = np.random.default_rng(seed)
    inputs = {
        name: conversations.random_vector(demanded.layout, rng)
        for name in map("device {}".format, range(num_devices))
    }
    devices = {
        name: conversations.make_participant(demanded, session, vector)
        for name, vector in inputs.items()
    }
    return inputs, devices


def _left_at_the_end(demanded, names, drop_outs, fraction):
    """The survivors that a complete graph should have; None where the group should be lost."""
    left = names - drop_outs.get(group.Phase.ADVERTISING, set())
    threshold = max(
        math.floor((fraction or 0) * len(left)) + 1,
        demanded.threat_model.least_threshold(len(left)),
    )
    if len(left) < demanded.least_devices:
        return None
    for phase in _PHASES[1:3]:
        left = left - drop_outs.get(phase, set())
        if len(left) < max(threshold, demanded.least_devices):
            return None
    survivors = left
    for phase in _PHASES[3:5]:
        if phase is not group.Phase.CONFIRMING or demanded.threat_model is _ACTIVE:
            left = left - drop_outs.get(phase, set())
    return survivors if len(left) >= threshold else None


@_SETTINGS
@hypothesis.given(st.data())
def test_sum_is_that_of_the_survivors_or_there_is_none(data):
    model = data.draw(st.sampled_from(parameters.ThreatModel))
    num_devices = data.draw(st.integers(2, 12))
    neighbours = None
    if model is _HONEST and data.draw(st.booleans()):
        neighbours = data.draw(st.integers(2, 8))
    demanded = parameters.Parameters(
        tuple(data.draw(_LAYOUTS)),
        model,
        data.draw(st.integers(2, num_devices)),
        neighbours and max(1, min(neighbours, num_devices - 3)),
    )
    names = [f"device {i}" for i in range(num_devices)]
    drop_outs = data.draw(
        st.dictionaries(
            st.sampled_from(_PHASES[:5]), st.sets(st.sampled_from(names), max_size=2), max_size=3
        )
    )
    session = parameters.new_session()
    inputs, devices = _devices(demanded, session, num_devices)
    fraction = data.draw(st.sampled_from([None, 0.1, 0.7, 0.95]))
    server = group.Group(demanded, session, threshold_fraction=fraction, num_neighbours=neighbours)
    expected = _left_at_the_end(demanded, inputs.keys(), drop_outs, fraction)
    try:
        conversations.run(server, devices, drop_outs=drop_outs)
    except group.GroupLostError:
        assert server.phase is group.Phase.LOST
        # With few neighbours it depends on the graph who can go on.
        assert expected is None if neighbours is None else any(drop_outs.values())
        with pytest.raises(ValueError, match="no sum"):
            server.total()
        return
    gone = set().union(*(drop_outs.get(phase, set()) for phase in _PHASES[:3]))
    if neighbours is None:
        assert set(server.survivors) == expected == inputs.keys() - gone
    else:
        assert set(server.survivors) <= inputs.keys() - gone
        assert len(server.survivors) >= demanded.least_devices
    total = conversations.plain_sum(demanded.layout, [inputs[name] for name in server.survivors])
    for entries, wanted in zip(server.total(), total, strict=True):
        np.testing.assert_array_equal(entries, wanted)


@_SETTINGS
@hypothesis.given(st.data())
def test_reordered_and_repeated_messages_change_nothing(data):
    model = data.draw(st.sampled_from(parameters.ThreatModel))
    session = parameters.new_session()
    demanded = parameters.Parameters(_LAYOUT, model, 3)
    inputs, devices = _devices(demanded, session, 5)
    server = group.Group(demanded, session)
    messages, sent = {}, []
    while server.phase is not group.Phase.DONE:
        if server.phase is group.Phase.ADVERTISING:
            answers = {name: device.advertise() for name, device in devices.items()}
        else:
            answers = {name: devices[name].answer(message) for name, message in messages.items()}
        late = data.draw(st.lists(st.sampled_from(sent), max_size=4)) if sent else []
        repeated = data.draw(st.lists(st.sampled_from(sorted(answers)), max_size=3))
        items = [*answers.items(), *late, *((name, answers[name]) for name in repeated)]
        taken = set()
        for name, answer in data.draw(st.permutations(items)):
            if answer is answers[name] and name not in taken:
                server.receive(name, answer)
                taken.add(name)
            else:
                with pytest.raises(group.MessageRefusedError):
                    server.receive(name, answer)
        sent += answers.items()
        messages = server.advance()
    _assert_sum(server, inputs)
    assert set(server.survivors) == inputs.keys()


def _assert_sum(server, inputs):
    expected = conversations.plain_sum(_LAYOUT, [inputs[name] for name in server.survivors])
    for total, entries in zip(server.total(), expected, strict=True):
        np.testing.assert_array_equal(total, entries)


class _Run:
    """A group of some devices, run up to a phase; `messages` is what devices get next."""

    def __init__(self, model, until, *, num_devices=7, least_devices=3, gone=None, **kwargs):
        least_neighbours = kwargs.pop("least_neighbours", None)
        self.demanded = parameters.Parameters(_LAYOUT, model, least_devices, least_neighbours)
        self.session = parameters.new_session()
        self.inputs, self.devices = _devices(self.demanded, self.session, num_devices)
        self.names = list(self.devices)
        self.server = group.Group(self.demanded, self.session, **kwargs)
        self.messages = {}
        self.gone = gone or {}
        while self.server.phase is not until:
            self.step()

    def step(self):
        gone = [self.names[i] for i in self.gone.get(self.server.phase, ())]
        self.messages = conversations.step(self.server, self.devices, self.messages, gone=gone)

    def answers(self):
        if self.server.phase is group.Phase.ADVERTISING:
            return {name: device.advertise() for name, device in self.devices.items()}
        return {name: self.devices[name].answer(m) for name, m in self.messages.items()}

    def receive(self, answers, but=None):
        for name, answer in answers.items():
            if name != but:
                self.server.receive(name, answer)

    def finish(self):
        while self.server.phase is not group.Phase.DONE:
            self.step()


def _bytes_of_another_length(content):
    return st.binary(max_size=2 * len(content) + 3).filter(lambda b: len(b) != len(content))


# What may be wrong with a message of each phase: (phase, what changes its content).
_MALFORMED = {
    "short key": (0, lambda m: setattr(m, "mask_key", m.mask_key[1:])),
    "no key": (0, lambda m: m.ClearField("encryption_key")),
    "weak key": (0, lambda m: setattr(m, "mask_key", bytes(32))),
    "one key twice": (0, lambda m: setattr(m, "mask_key", m.encryption_key)),
    "too few shares": (1, lambda m: m.ciphertexts.pop()),
    "too many shares": (1, lambda m: m.ciphertexts.add().CopyFrom(m.ciphertexts[0])),
    "shares twice": (1, lambda m: m.ciphertexts[0].CopyFrom(m.ciphertexts[1])),
    "shares for nobody": (1, lambda m: setattr(m.ciphertexts[0], "index", 99)),
    "shares for itself": (1, lambda m: setattr(m.ciphertexts[0], "index", 0)),
    "long shares": (1, lambda m: setattr(m.ciphertexts[0], "content", bytes(10_000))),
    "no commitment": (1, lambda m: m.ClearField("self_mask_commitment")),
    "short vector": (2, lambda m: setattr(m, "content", m.content[1:])),
    "long vector": (2, lambda m: setattr(m, "content", m.content + bytes(1))),
    "no vector": (2, lambda m: m.ClearField("content")),
    "entry beyond its modulus": (2, lambda m: setattr(m, "content", b"\xff" * len(m.content))),
    "shares revealed twice": (4, lambda m: m.of_self_masks.add().CopyFrom(m.of_self_masks[0])),
    "share of nobody": (4, lambda m: setattr(m.of_self_masks[0], "index", 99)),
    "other kind of share": (4, lambda m: m.of_mask_keys.add().CopyFrom(m.of_self_masks[1])),
    "short share": (4, lambda m: setattr(m.of_self_masks[0], "share", b"abc")),
}


@_BOTH
@pytest.mark.parametrize("what", _MALFORMED)
def test_malformed_message_costs_its_sender_alone(model, what):
    phase, change = _MALFORMED[what]
    run = _Run(model, _PHASES[phase])
    bad = run.names[0]
    answers = run.answers()
    change(getattr(answers[bad], answers[bad].WhichOneof("message")))
    if model is _ACTIVE and phase == 0:  # What it signs it may choose as badly.
        identity = run.devices[bad]._identity_key
        content = answers[bad].key_advertisement
        content.signature = identity.sign_advertisement(conversations.bound(run.session), content)
    run.receive(answers, but=bad)
    with pytest.raises(group.MessageRefusedError) as refused:
        run.server.receive(bad, answers[bad])
    assert refused.value.args[0]
    assert bad not in run.server.outstanding
    if phase:  # It has had its chance.
        with pytest.raises(group.MessageRefusedError):
            run.server.receive(bad, answers[bad])
    run.messages = run.server.advance()
    run.finish()
    gone = set() if phase == 4 else {bad}
    assert set(run.server.survivors) == run.inputs.keys() - gone
    _assert_sum(run.server, run.inputs)


@pytest.mark.parametrize("field", ["identity_key", "identity_proof", "signature"])
def test_identities_that_nobody_asked_for_or_that_do_not_hold(field):
    run = _Run(_HONEST, group.Phase.ADVERTISING)
    answer = run.devices[run.names[0]].advertise()
    setattr(answer.key_advertisement, field, b"x")
    with pytest.raises(group.MessageRefusedError, match="threat model has none"):
        run.server.receive(run.names[0], answer)
    verify = conversations.Identity().verify
    run = _Run(_ACTIVE, group.Phase.ADVERTISING, verify_proof=verify)
    answer = run.devices[run.names[0]].advertise()
    good = secure_sum_pb2.ToServer()
    good.CopyFrom(answer)
    setattr(answer.key_advertisement, field, bytes(32))
    with pytest.raises(group.MessageRefusedError, match="not signed|not proven"):
        run.server.receive(run.names[0], answer)
    answer.CopyFrom(good)
    answer.key_advertisement.identity_proof = bytes(keys.MAX_PROOF_BYTES + 1)
    with pytest.raises(group.MessageRefusedError, match="more than 4096 bytes"):
        run.server.receive(run.names[0], answer)
    run.server.receive(run.names[0], good)


def test_full_group_takes_nobody_until_somebody_leaves():
    demanded = parameters.Parameters(_LAYOUT, _HONEST, 2, most_devices=3)
    session = parameters.new_session()
    inputs, devices = _devices(demanded, session, 4)
    *first, late = devices
    server = group.Group(demanded, session)
    advertisements = {name: device_.advertise() for name, device_ in devices.items()}
    for name in first:
        server.receive(name, advertisements[name])
    with pytest.raises(group.MessageRefusedError, match="full: it has 3 devices"):
        server.receive(late, advertisements[late])
    server.drop(first[0])
    server.receive(late, advertisements[late])
    messages = server.advance()
    while server.phase is not group.Phase.DONE:
        messages = conversations.step(server, devices, messages)
    assert set(server.survivors) == inputs.keys() - {first[0]}
    _assert_sum(server, inputs)


@_BOTH
def test_nothing_that_a_device_adds_to_its_keys_is_handed_on(model):
    run = _Run(model, group.Phase.ADVERTISING)
    answers = run.answers()
    unknown = b"\xfa\x7f\x80\x08" + bytes(1024)  # Field 2047, which no version has.
    for name, answer in answers.items():
        content = answer.key_advertisement.SerializeToString()
        larger = secure_sum_pb2.KeyAdvertisement.FromString(content + unknown)
        assert larger.ByteSize() > 1024
        run.server.receive(name, secure_sum_pb2.ToServer(key_advertisement=larger))
    messages = run.server.advance()
    assert len(messages) == len(run.devices)
    assert all(message.ByteSize() < 1024 * len(run.devices) / 2 for message in messages.values())


@_BOTH
def test_two_devices_with_a_key_of_one(model):
    run = _Run(model, group.Phase.ADVERTISING)
    a, b = run.names[:2]
    first, second = (run.devices[name].advertise() for name in (a, b))
    run.server.receive(a, first)
    copied = second.key_advertisement
    copied.mask_key = first.key_advertisement.encryption_key
    if model is _ACTIVE:
        copied.signature = run.devices[b]._identity_key.sign_advertisement(
            conversations.bound(run.session), copied
        )
    with pytest.raises(group.MessageRefusedError, match="occurs twice"):
        run.server.receive(b, second)
    with pytest.raises(group.MessageRefusedError, match="second advertisement"):
        run.server.receive(a, first)
    run.server.drop(a)
    run.server.receive(b, second)  # The first one is gone, and its keys with it.


def test_signature_over_other_survivors_costs_its_sender_alone():
    run = _Run(_ACTIVE, group.Phase.CONFIRMING)
    answers = run.answers()
    bad = run.names[3]
    answers[bad].survivors_signature.signature = bytes(64)
    run.receive(answers, but=bad)
    with pytest.raises(group.MessageRefusedError, match="not over these keys and survivors"):
        run.server.receive(bad, answers[bad])
    run.messages = run.server.advance()
    assert run.messages.keys() == set(run.names) - {bad}
    run.finish()
    assert bad in run.server.survivors  # Its vector came before.
    _assert_sum(run.server, run.inputs)


def test_who_may_answer():
    run = _Run(_HONEST, group.Phase.SHARING, gone={group.Phase.MASKING: {1}})
    assert run.server.outstanding == set(run.names)
    assert run.server.survivors == ()
    with pytest.raises(group.MessageRefusedError, match="may not answer"):
        run.server.receive("stranger", run.answers()[run.names[0]])
    with pytest.raises(group.MessageRefusedError, match="where the group is SHARING"):
        run.server.receive("stranger", secure_sum_pb2.ToServer())
    run = _Run(_HONEST, group.Phase.REVEALING, gone={group.Phase.MASKING: {1}})
    assert run.server.outstanding == set(run.names) - {run.names[1]}
    assert run.server.survivors == tuple(run.names[:1] + run.names[2:])
    run.server.drop(run.names[2])
    run.server.drop("stranger")
    assert run.server.outstanding == set(run.names) - {run.names[1], run.names[2]}
    del run.messages[run.names[2]]
    run.finish()
    assert run.server.outstanding == frozenset()
    assert run.names[2] in run.server.survivors
    _assert_sum(run.server, run.inputs)
    with pytest.raises(ValueError, match="is done"):
        run.server.advance()


def test_device_that_goes_after_sharing_is_as_if_it_had_not():
    run = _Run(_HONEST, group.Phase.SHARING)
    run.receive(run.answers())
    run.server.drop(run.names[6])
    messages = run.server.advance()
    assert run.names[6] not in messages
    for message in messages.values():
        assert 6 not in {c.index for c in message.received_shares.ciphertexts}


@_BOTH
@pytest.mark.parametrize("phase", range(4))
def test_below_the_threshold_nothing_is_asked_for(model, phase):
    # One fewer than the threshold (4 of 7; 5 of an active server's), or than the least.
    at_least = 4 if phase == 0 else {_HONEST: 4, _ACTIVE: 5}[model]
    if phase == 3 and model is _HONEST:
        phase = 4
    run = _Run(model, _PHASES[phase], least_devices=4 if phase == 0 else 2)
    for name, answer in list(run.answers().items())[: at_least - 1]:
        run.server.receive(name, answer)
    with pytest.raises(group.GroupLostError) as lost:
        run.server.advance()
    assert run.server.phase is group.Phase.LOST
    with pytest.raises(group.GroupLostError, match=str(lost.value)[:20]):
        run.server.advance()
    with pytest.raises(group.MessageRefusedError):
        run.server.receive(run.names[6], secure_sum_pb2.ToServer())
    assert not any(entries.any() for entries in run.server._sum.value())
    assert not run.server._seed_shares and not run.server._sealed


def test_exactly_the_threshold_is_enough_in_every_phase():
    for model, threshold in ((_HONEST, 4), (_ACTIVE, 5)):
        for phase in _PHASES[1:5]:
            run = _Run(model, group.Phase.DONE, gone={phase: range(threshold, 7)})
            expected = 7 if phase in _PHASES[3:] else threshold
            assert len(run.server.survivors) == expected
            _assert_sum(run.server, run.inputs)


@_BOTH
def test_fewer_survivors_than_demanded_are_lost_before_anything_is_revealed(model):
    run = _Run(model, group.Phase.MASKING, least_devices=7, gone={group.Phase.MASKING: {0}})
    with pytest.raises(group.GroupLostError, match="6 devices have sent masked vectors.*needs 7"):
        run.step()


# Wrong shares.


def _spoil(answers, names, which="of_self_masks"):
    for name in names:
        for share in getattr(answers[name].revealed_shares, which):
            share.share = (int.from_bytes(share.share, "big") ^ 1).to_bytes(33, "big")


@pytest.mark.parametrize("which", ["of_self_masks", "of_mask_keys"])
@pytest.mark.parametrize("num_wrong", [1, 2])
def test_wrong_shares_are_corrected(which, num_wrong):
    # Of 8 shares 5 are needed: one wrong one can be corrected.
    run = _Run(_HONEST, group.Phase.REVEALING, num_devices=9, gone={group.Phase.MASKING: {2}})
    answers = run.answers()
    _spoil(answers, run.names[:num_wrong], which)
    run.receive(answers)
    if num_wrong == 1:
        run.server.advance()
        _assert_sum(run.server, run.inputs)
    else:
        with pytest.raises(group.GroupLostError, match="too many wrong shares among the 8"):
            run.server.advance()
        assert run.server.phase is group.Phase.LOST


def test_missing_shares_and_numbers_that_are_no_shares():
    run = _Run(_HONEST, group.Phase.REVEALING)
    answers = run.answers()
    for name in run.names[:3]:
        revealed = answers[name].revealed_shares
        revealed.of_self_masks[0].share = b"\xff" * secret_sharing.SHARE_BYTES
        del revealed.of_self_masks[1]
    run.receive(answers)
    run.server.advance()
    _assert_sum(run.server, run.inputs)
    run = _Run(_HONEST, group.Phase.REVEALING)
    answers = run.answers()
    for name in run.names[:4]:
        del answers[name].revealed_shares.of_self_masks[2:]
    run.receive(answers)
    with pytest.raises(group.GroupLostError, match="'device 4' .*too few shares among the 3"):
        run.server.advance()


def test_device_that_deals_wrong_shares_gives_no_wrong_sum():
    run = _Run(_HONEST, group.Phase.SHARING)
    answers = run.answers()
    answers[run.names[1]].shares.self_mask_commitment = bytes(32)
    run.receive(answers)
    run.messages = run.server.advance()
    with pytest.raises(group.GroupLostError, match="'device 1' cannot be recovered: too many"):
        run.finish()


def test_who_sent_a_wrong_share_is_asked_last(monkeypatch):
    run = _Run(_HONEST, group.Phase.REVEALING, num_devices=9)
    answers = run.answers()
    _spoil(answers, run.names[:2])
    corrections = []
    correct = secret_sharing.correct
    monkeypatch.setattr(
        secret_sharing, "correct", lambda *args: corrections.append(1) or correct(*args)
    )
    run.receive(answers)
    run.server.advance()
    _assert_sum(run.server, run.inputs)
    assert len(corrections) == 1


# The neighbour graph.


@pytest.mark.parametrize("num_devices, num_neighbours", [(14, 8), (13, 5), (40, 11), (8, 11)])
def test_few_neighbours(num_devices, num_neighbours):
    run = _Run(
        _HONEST,
        group.Phase.SHARING,
        num_devices=num_devices,
        num_neighbours=num_neighbours,
        least_neighbours=min(num_neighbours, num_devices - 1),
        gone={group.Phase.SHARING: {0}, group.Phase.MASKING: {1}, group.Phase.REVEALING: {2}},
    )
    expected = min(num_devices - 1, num_neighbours + num_neighbours % 2 * (num_devices % 2))
    for message in run.messages.values():
        assert len(message.directory.members) == expected + 1
        assert message.directory.threshold == (expected + 1) // 2 + 1
    run.finish()
    assert set(run.server.survivors) == run.inputs.keys() - set(run.names[:2])
    _assert_sum(run.server, run.inputs)


def _ring(monkeypatch, num_neighbours):
    """Neighbours in the order of the devices, instead of at random."""
    make = group.shareholders.neighbours.random_neighbours
    monkeypatch.setattr(
        group.shareholders.neighbours, "random_neighbours", lambda n, k: make(n, k, order=range(n))
    )
    return dict(num_neighbours=num_neighbours, least_neighbours=num_neighbours)


def test_devices_left_with_too_few_neighbours_leave_too(monkeypatch):
    # Each has two on either side and needs 3 of 5: without 2 and 3, 1 and 4 have 3 left, but
    # without 5 as well 4 has 2.
    ring = _ring(monkeypatch, 4)
    gone = {group.Phase.SHARING: {2, 3, 5}}
    run = _Run(_HONEST, group.Phase.MASKING, num_devices=12, gone=gone, **ring)
    assert run.messages.keys() == set(run.names) - {run.names[i] for i in (2, 3, 4, 5)}
    run.finish()
    _assert_sum(run.server, run.inputs)


def test_survivors_without_enough_holders_are_lost(monkeypatch):
    ring = _ring(monkeypatch, 4)
    gone = {group.Phase.MASKING: {2, 3, 5}}
    run = _Run(_HONEST, group.Phase.MASKING, num_devices=12, gone=gone, **ring)
    with pytest.raises(group.GroupLostError, match="Too few devices are left that hold shares"):
        run.step()


def test_survivors_that_fall_apart_are_lost():
    run = _Run(_HONEST, group.Phase.MASKING, num_devices=8)
    # Two cliques, as no good graph would have.
    cliques = [frozenset(range(4)), frozenset(range(4, 8))]
    run.server._holders.members = [cliques[i // 4] for i in range(8)]
    run.server._holders.thresholds = [3] * 8
    with pytest.raises(group.GroupLostError, match="fall apart"):
        run.step()


@pytest.mark.slow
def test_large_group_with_few_neighbours():
    rng = np.random.default_rng(0)
    dropping = {
        phase: set(rng.choice(1000, 50, replace=False).tolist())
        for phase in (group.Phase.SHARING, group.Phase.MASKING, group.Phase.REVEALING)
    }
    run = _Run(
        _HONEST,
        group.Phase.DONE,
        num_devices=1000,
        num_neighbours=50,
        least_neighbours=50,
        gone=dropping,
    )
    gone = dropping[group.Phase.SHARING] | dropping[group.Phase.MASKING]
    assert set(run.server.survivors) == run.inputs.keys() - {run.names[i] for i in gone}
    _assert_sum(run.server, run.inputs)


# Construction.


@pytest.mark.parametrize(
    "kwargs, match",
    [
        ({"threshold_fraction": 1.0}, "threshold_fraction must be"),
        ({"threshold_fraction": -0.1}, "threshold_fraction must be"),
        ({"num_neighbours": 0}, "num_neighbours must be at least 1"),
        ({"num_neighbours": 5}, "num_neighbours must be None, got 5"),
        ({"num_neighbours": 5, "least_neighbours": 6}, "num_neighbours must be at least 6, got 5"),
    ],
)
def test_arguments_that_no_device_accepts(kwargs, match):
    with pytest.raises(ValueError, match=match):
        _Run(_HONEST, group.Phase.ADVERTISING, **kwargs)


def test_thresholds_keep_to_what_devices_demand_whatever_the_fraction():
    for model, least in ((_HONEST, 4), (_ACTIVE, 5)):
        for fraction, expected in ((None, least), (0.1, least), (0.8, 6), (0.99, 7)):
            run = _Run(model, group.Phase.SHARING, threshold_fraction=fraction)
            assert run.messages[run.names[0]].directory.threshold == expected
