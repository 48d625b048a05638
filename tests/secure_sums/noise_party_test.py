"""Noise parties: no sum without their noise, asked for last, once, and for the named devices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.secure_sums import conversations
from tff_dpftrl import validation
from tff_dpftrl.secure_sums import (
    group,
    keys,
    masks,
    noise_party,
    parameters,
    refusals,
    secure_sum_pb2,
    vectors,
)

_HONEST, _ACTIVE = conversations.HONEST, conversations.ACTIVE
_BOTH = pytest.mark.parametrize("model", [_HONEST, _ACTIVE])
_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(6, 1000))
_SIGNING = [
    ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2, 3)
]
_PUBLIC = [key.public_key().public_bytes_raw() for key in _SIGNING]
_N = 7
_CONTEXT = b"round 3, row 5 of the noise"


def _vector(i):
    return [np.array([1], np.uint32), np.full(6, i, np.uint16)]


def _noise(party):
    return [np.array([0], np.uint32), np.arange(6, dtype=np.uint16) + 900 + party]


class _Conversation:
    """Seven devices and some noise parties, run up to a phase."""

    def __init__(self, model, until=group.Phase.DONE, *, parties=1, gone=None, **changes):
        self.demanded = dataclasses.replace(
            parameters.Parameters(
                _LAYOUT, model, 3, most_devices=20, noise_parties=_PUBLIC[:parties]
            ),
            **changes,
        )
        self.session = parameters.new_session()
        self.drawn = []
        self.devices = {
            i: conversations.make_participant(self.demanded, self.session, _vector(i), _CONTEXT)
            for i in range(_N)
        }
        for i in range(parties):
            self.devices[f"party {i}"] = self.party(i)
        self.server = group.Group(
            self.demanded,
            self.session,
            context=_CONTEXT,
            num_neighbours=self.demanded.least_neighbours,
        )
        self.messages = {}
        while self.server.phase is not until:
            self.step((gone or {}).get(self.server.phase, ()))

    def party(self, i, **changes):
        arguments = {"demanded": self.demanded, "session": self.session, "context": _CONTEXT}
        return noise_party.NoiseParty(
            signing_key=_SIGNING[i],
            draw_noise=lambda: self.drawn.append(i) or _noise(i),
            **arguments | changes,
        )

    def noise_session(self):
        return self.demanded.noise_session(parameters.bound_session(self.session, _CONTEXT))

    def step(self, gone=()):
        self.messages = conversations.step(self.server, self.devices, self.messages, gone=gone)


def _assert_sum(conversation, survivors, parties):
    assert conversation.server.survivors == tuple(survivors)
    summands = [*map(_vector, survivors), *map(_noise, range(parties))]
    expected = conversations.plain_sum(_LAYOUT, summands)
    for entries, right in zip(conversation.server.total(), expected, strict=True):
        np.testing.assert_array_equal(entries, right)


@_BOTH
@pytest.mark.parametrize("parties", [1, 2])
def test_a_sum_has_the_whole_noise_of_each_party(model, parties):
    gone = {group.Phase.SHARING: [0], group.Phase.MASKING: [2], group.Phase.REVEALING: [5]}
    if model is _ACTIVE:
        gone = {group.Phase.MASKING: [2]}
    conversation = _Conversation(model, parties=parties, gone=gone)
    left_out = {
        device for phase, some in gone.items() if phase.name != "REVEALING" for device in some
    }
    _assert_sum(conversation, sorted(set(range(_N)) - left_out), parties)
    assert conversation.drawn == list(range(parties))


def test_a_graph_of_neighbours_has_the_party_beside_it():
    conversation = _Conversation(_HONEST, least_neighbours=4, gone={group.Phase.MASKING: [2]})
    _assert_sum(conversation, [0, 1, 3, 4, 5, 6], 1)


def test_without_noise_parties_nothing_is_asked_for():
    conversation = _Conversation(_HONEST, parties=0)
    _assert_sum(conversation, range(_N), 0)


# What a device refuses.


def _add_unpromised(noise_keys, conversation):
    conversation.demanded = dataclasses.replace(conversation.demanded, noise_parties=_PUBLIC)
    noise_keys.add().CopyFrom(conversation.party(2).advertise().noise_party_keys)


def _sign_by_server(noise_keys, conversation):
    session = conversation.noise_session()
    forged = keys.sign_noise_party(_SIGNING[2], session, keys.KeyPair().public)
    noise_keys[0].mask_key, noise_keys[0].signature = forged.mask_key, forged.signature


def _replay(**changes):
    def edit(noise_keys, conversation):
        other = dict(changes)
        if "demanded" in other:
            other["demanded"] = dataclasses.replace(conversation.demanded, **other["demanded"])
        noise_keys[0].CopyFrom(conversation.party(0, **other).advertise().noise_party_keys)

    return edit


def _key_of_a_device(noise_keys, conversation):
    session = conversation.noise_session()
    key = conversation.messages[0].directory.members[0].keys.encryption_key
    noise_keys[0].CopyFrom(keys.sign_noise_party(_SIGNING[0], session, key))


_ATTACKS = [
    (lambda sent, _: sent.pop(), refusals.NoisePartyMissingError),
    (lambda sent, _: sent[1].CopyFrom(sent[0]), refusals.NoisePartyMissingError),
    (lambda sent, _: sent.add().CopyFrom(sent[0]), refusals.UnknownNoisePartyError),
    (_add_unpromised, refusals.UnknownNoisePartyError),
    (
        lambda sent, _: setattr(sent[0], "mask_key", keys.KeyPair().public),
        refusals.ForgedNoisePartyError,
    ),
    (_sign_by_server, refusals.ForgedNoisePartyError),
    (_replay(session=bytes(32)), refusals.ForgedNoisePartyError),
    (_replay(context=b"round 3, row 4 of the noise"), refusals.ForgedNoisePartyError),
    (
        _replay(demanded={"layout": (*_LAYOUT, vectors.Segment(1, 2))}),
        refusals.ForgedNoisePartyError,
    ),
    (_replay(demanded={"least_devices": 2}), refusals.ForgedNoisePartyError),
    (_replay(demanded={"noise_parties": tuple(_PUBLIC)}), refusals.ForgedNoisePartyError),
    (lambda sent, _: setattr(sent[0], "mask_key", bytes(32)), refusals.WeakKeyError),
    (_key_of_a_device, refusals.EqualKeysError),
]


@_BOTH
@pytest.mark.parametrize("edit, error", _ATTACKS)
def test_devices_refuse_a_group_without_the_promised_parties(model, edit, error):
    conversation = _Conversation(model, group.Phase.SHARING, parties=2)
    message = conversation.messages[0]
    edit(message.directory.noise_parties, conversation)
    with pytest.raises(error) as caught:
        conversation.devices[0].answer(message)
    assert caught.type is error
    with pytest.raises(refusals.SessionOverError):
        conversation.devices[0].answer(message)


@_BOTH
def test_the_attacks_change_what_devices_would_accept(model):
    conversation = _Conversation(model, group.Phase.SHARING, parties=2)
    message = conversation.messages[0]
    # The order on the wire is no matter, and neither are keys of the same session anew.
    message.directory.noise_parties.reverse()
    if model is _HONEST:
        _replay()(message.directory.noise_parties[1:], conversation)
    assert conversation.devices[0].answer(message).WhichOneof("message") == "shares"


def test_devices_without_a_promise_refuse_noise_parties():
    conversation = _Conversation(_HONEST, group.Phase.SHARING, parties=1)
    demanded = dataclasses.replace(conversation.demanded, noise_parties=())
    device = conversations.make_participant(demanded, conversation.session, _vector(0), _CONTEXT)
    own = device.advertise().key_advertisement
    message = conversation.messages[0]
    message.directory.members[0].keys.CopyFrom(own)
    with pytest.raises(refusals.UnknownNoisePartyError):
        device.answer(message)


def test_devices_that_were_shown_different_parties_do_not_sign_for_each_other():
    # An active server splits the group: device 0 gets the keys of another attempt of this session.
    conversation = _Conversation(_ACTIVE, group.Phase.SHARING)
    other = conversation.party(0).advertise().noise_party_keys
    conversation.messages[0].directory.noise_parties[0].CopyFrom(other)
    while conversation.server.phase is not group.Phase.REVEALING:
        # The group refuses the signature of device 0, and passes the others'.
        def receive(name, answer):
            try:
                conversation.server.receive(name, answer)
            except group.MessageRefusedError:
                assert name == 0

        conversation.messages = conversations.step(
            conversation.server, conversation.devices, conversation.messages, between=receive
        )
    assert 0 in conversation.server.survivors and 0 not in conversation.messages


# What the party refuses: it draws no noise then, and answers nothing more.


def _too_few(request, _):
    del request.devices[2:]


def _too_many(request, _):
    for index in range(_N, 25):
        request.devices.add(index=index, encryption_key=keys.KeyPair().public)


def _second_key(make):
    """Gives the second device of a request the key that `make` returns."""

    def edit(request, conversation):
        request.devices[1].encryption_key = make(request, conversation)

    return edit


@pytest.mark.parametrize(
    "edit, error",
    [
        (_too_few, refusals.TooFewDevicesError),
        (_too_many, refusals.TooManyDevicesError),
        (lambda sent, _: setattr(sent.devices[1], "index", 0), refusals.MalformedMessageError),
        (_second_key(lambda sent, _: sent.devices[0].encryption_key), refusals.EqualKeysError),
        (
            _second_key(lambda _, conversation: conversation.devices["party 0"]._mask_keys.public),
            refusals.EqualKeysError,
        ),
        (_second_key(lambda *_: bytes(32)), refusals.WeakKeyError),
    ],
)
def test_the_party_refuses_and_draws_nothing(edit, error):
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    message = conversation.messages["party 0"]
    kept = secure_sum_pb2.ToDevice.FromString(message.SerializeToString())
    edit(message.noise_request, conversation)
    party = conversation.devices["party 0"]
    with pytest.raises(error) as caught:
        party.answer(message)
    assert caught.type is error
    with pytest.raises(refusals.SessionOverError):
        party.answer(kept)
    assert not conversation.drawn


def test_devices_answer_no_request_for_noise():
    conversation = _Conversation(_HONEST, group.Phase.MASKING)
    with pytest.raises(refusals.MalformedMessageError):
        conversation.devices[0].answer(secure_sum_pb2.ToDevice(noise_request={}))


@pytest.mark.parametrize("field", ["directory", "received_shares", "survivors", None])
def test_the_party_answers_nothing_but_its_request(field):
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    message = secure_sum_pb2.ToDevice(**({} if field is None else {field: {}}))
    with pytest.raises(refusals.MalformedMessageError):
        conversation.devices["party 0"].answer(message)
    assert not conversation.drawn


def test_the_party_answers_once_in_a_session():
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    party, message = conversation.devices["party 0"], conversation.messages["party 0"]
    party.answer(message)
    with pytest.raises(refusals.SessionOverError, match="answers once"):
        party.answer(message)
    with pytest.raises(refusals.SessionOverError):
        party.advertise()
    assert conversation.drawn == [0]


def test_the_party_answers_nothing_before_it_has_advertised_or_after_it_has_left():
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    message = conversation.messages["party 0"]
    with pytest.raises(refusals.SessionOverError):
        conversation.party(0).answer(message)
    conversation.devices["party 0"].forget()
    with pytest.raises(refusals.SessionOverError):
        conversation.devices["party 0"].answer(message)
    assert not conversation.drawn


@pytest.mark.parametrize("wrong", [OSError("the ledger's disk is full"), []])
def test_noise_that_cannot_be_drawn_or_does_not_fit_ends_the_session(wrong):
    conversation = _Conversation(_HONEST, group.Phase.NOISING)

    def draw_noise():
        conversation.drawn.append(0)
        if isinstance(wrong, OSError):
            raise wrong
        return wrong

    party = conversation.party(0)
    party._draw_noise = draw_noise
    party.advertise()
    with pytest.raises((OSError, ValueError)):
        party.answer(conversation.messages["party 0"])
    with pytest.raises(refusals.SessionOverError):
        party.answer(conversation.messages["party 0"])
    assert conversation.drawn == [0]


def test_a_party_that_was_not_promised():
    conversation = _Conversation(_HONEST, group.Phase.ADVERTISING)
    with pytest.raises(validation.UsageError, match=f"{_PUBLIC[2].hex()}, and the plan promises"):
        conversation.party(2)


def test_the_noise_is_packed_bit_by_bit_if_asked():
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    party = conversation.party(0, packs_bits=True)
    party.advertise()
    content = party.answer(conversation.messages["party 0"]).masked_vector.content
    assert len(content) == vectors.packed_bytes(_LAYOUT, in_bits=True)


# What the group does without a party.


def test_a_group_waits_for_its_parties_before_keys_go_out():
    conversation = _Conversation(_HONEST, group.Phase.ADVERTISING, parties=2)
    for name, device in conversation.devices.items():
        if name != "party 1":
            conversation.server.receive(name, device.advertise())
    assert conversation.server.missing_noise_parties == (_PUBLIC[1],)
    conversation.server.drop("party 0")
    assert conversation.server.missing_noise_parties == tuple(_PUBLIC[:2])
    with pytest.raises(group.GroupLostError, match=f"{_PUBLIC[0].hex()} is not in the group"):
        conversation.server.advance()


@_BOTH
@pytest.mark.parametrize("phase", [p for p in group.Phase if p.name not in ("DONE", "LOST")])
def test_a_group_whose_party_is_gone_is_lost_without_noise(model, phase):
    if model is _HONEST and phase is group.Phase.CONFIRMING:
        return  # There is no such phase.
    conversation = _Conversation(model, phase, parties=2)
    if phase is group.Phase.ADVERTISING:
        del conversation.devices["party 1"]
    else:
        conversation.server.drop("party 1")
    with pytest.raises(group.GroupLostError, match=f"{_PUBLIC[1].hex()} is not in the group"):
        if phase is group.Phase.NOISING:
            conversation.server.receive(
                "party 0", conversation.devices["party 0"].answer(conversation.messages["party 0"])
            )
            conversation.server.advance()
        else:
            conversation.step()
    assert conversation.server.phase is group.Phase.LOST
    assert conversation.drawn == ([0] if phase is group.Phase.NOISING else [])


def test_a_party_that_goes_after_its_noise_has_come_is_no_loss():
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    party = conversation.devices["party 0"]
    assert conversation.server.outstanding == {"party 0"}
    conversation.server.receive("party 0", party.answer(conversation.messages["party 0"]))
    conversation.server.drop("party 0")
    assert not conversation.server.advance()
    _assert_sum(conversation, range(_N), 1)


def test_a_party_that_is_silent_or_sends_no_vector_costs_the_group():
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    with pytest.raises(group.GroupLostError, match="has not sent its noise"):
        conversation.server.advance()
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    with pytest.raises(group.MessageRefusedError, match="No masked vector"):
        conversation.server.receive(
            "party 0", secure_sum_pb2.ToServer(masked_vector={"content": b"12"})
        )
    with pytest.raises(group.GroupLostError):
        conversation.server.advance()


def test_a_device_cannot_send_the_noise():
    conversation = _Conversation(_HONEST, group.Phase.NOISING)
    answer = conversation.devices["party 0"].answer(conversation.messages["party 0"])
    with pytest.raises(group.MessageRefusedError):
        conversation.server.receive(3, answer)


def _other_party(conversation):
    demanded = dataclasses.replace(conversation.demanded, noise_parties=_PUBLIC)
    return conversation.party(2, demanded=demanded).advertise()


def _other_context(conversation):
    return conversation.party(0, context=b"round 2").advertise()


def _weak_mask_key(conversation):
    message = conversation.party(0).advertise()
    message.noise_party_keys.mask_key = bytes(32)
    return message


@pytest.mark.parametrize(
    "make, match",
    [
        (_other_party, "which the devices were not promised"),
        (_other_context, "has signed for another session, context or layout"),
        (_weak_mask_key, "no point of large order"),
    ],
)
def test_groups_refuse_keys_that_devices_would_refuse(make, match):
    conversation = _Conversation(_HONEST, group.Phase.ADVERTISING)
    with pytest.raises(group.MessageRefusedError, match=match):
        conversation.server.receive("party", make(conversation))


@pytest.mark.parametrize("name", ["party", "again", 0])
def test_groups_refuse_a_party_that_joins_twice_or_as_a_device(name):
    conversation = _Conversation(_HONEST, group.Phase.ADVERTISING)
    conversation.server.receive("party", conversation.party(0).advertise())
    conversation.server.receive(0, conversation.devices[0].advertise())
    with pytest.raises(group.MessageRefusedError, match="has joined already"):
        conversation.server.receive(name, conversation.party(0).advertise())
    with pytest.raises(group.MessageRefusedError, match="A second advertisement"):
        conversation.server.receive("party", conversation.devices[1].advertise())


def test_numbers_of_devices_do_not_count_parties():
    conversation = _Conversation(_HONEST, group.Phase.ADVERTISING, parties=2, least_devices=7)
    for name in (0, 1, 2, 3, 4, 5, "party 0", "party 1"):
        conversation.server.receive(name, conversation.devices[name].advertise())
    with pytest.raises(group.GroupLostError, match="6 devices joined, where the sum needs 7"):
        conversation.server.advance()


# Noise without which nothing opens, whatever else the server has.


def _without_masks_but_noise_parties(conversation):
    """Returns what is left of device 0's vector for a server that has all secrets but one.

    It has all that can be had of device 0 by shares: its self-mask and its private key for masks.
    """
    device = conversation.devices[0]
    bound = parameters.bound_session(conversation.session, _CONTEXT)
    seed, pair = device._seed, device._mask_keys
    answer = device.answer(conversation.messages[0]).masked_vector.content
    left = masks.MaskedSum(_LAYOUT)
    left.add(vectors.unpack(answer, _LAYOUT))
    left.subtract_masks([keys.self_mask(seed, bound, 0)[0]])
    left.subtract_masks(
        [
            pair.mask_key(bound, 0, other, member.mask_key)
            for other, member in device._members.items()
            if other
        ]
    )
    return left


@_BOTH
def test_all_shares_of_all_secrets_open_no_vector(model):
    # More devices than the threshold are in league with the server, which lies about survivors.
    opened = _without_masks_but_noise_parties(_Conversation(model, group.Phase.MASKING, parties=0))
    np.testing.assert_array_equal(opened.value()[1], _vector(0)[1])
    conversation = _Conversation(model, group.Phase.MASKING)
    channel_keys = conversation.devices[0]._channel_keys
    masked = _without_masks_but_noise_parties(conversation)
    assert not np.array_equal(masked.value()[1], _vector(0)[1])
    # It is the party's mask that is left, of a key that the device has kept to itself.
    noise_session = conversation.devices[0]._noise_session
    party_key = conversation.devices["party 0"]._mask_keys.public
    masked.subtract_masks([channel_keys.noise_mask_key(noise_session, 0, party_key)])
    np.testing.assert_array_equal(masked.value()[1], _vector(0)[1])


def test_sessions_of_noise_differ_by_all_that_must_agree():
    demanded = parameters.Parameters(_LAYOUT, _HONEST, 3, noise_parties=_PUBLIC[:1])
    others = [
        dataclasses.replace(demanded, **changes)
        for changes in (
            {"layout": (vectors.Segment(1, 2**32), vectors.Segment(6, 1001))},
            {"layout": (vectors.Segment(1, 2**32), vectors.Segment(7, 1000))},
            {"layout": _LAYOUT[:1]},
            {"least_devices": 4},
            {"noise_parties": _PUBLIC[1:2]},
            {"noise_parties": _PUBLIC[:2]},
            {"noised_plans": b"of another making"},
        )
    ]
    sessions = [
        every.noise_session(session)
        for every in (demanded, *others)
        for session in (b"a" * 32, b"b" * 32)
    ]
    assert len(set(sessions)) == 2 * (len(others) + 1)


@pytest.mark.parametrize(
    "parties, match",
    [
        (_PUBLIC[:1] * 2, f"has the key {_PUBLIC[0].hex()} twice: name each noise party once"),
        ([b"short"], "must be keys of 32 bytes, got b'short'"),
        (["x" * 32], "must be keys of 32 bytes"),
    ],
)
def test_promises_that_make_no_sense(parties, match):
    with pytest.raises(validation.UsageError, match=match):
        parameters.Parameters(_LAYOUT, _HONEST, 2, noise_parties=parties)
