"""Honest devices refuse every named attack of a server, by name, and keep no secret after it."""

from __future__ import annotations

import gc
import types

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import x25519

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import (
    bitmaps,
    device,
    group,
    keys,
    parameters,
    refusals,
    secret_sharing,
    secure_sum_pb2,
    vectors,
)

_HONEST, _ACTIVE = conversations.HONEST, conversations.ACTIVE
_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(6, 1000))
_BOTH = pytest.mark.parametrize("model", [_HONEST, _ACTIVE])
_N = 7


class _Conversation:
    """A group of seven devices, run up to a phase; `messages` is what devices get next."""

    def __init__(
        self,
        model,
        until,
        *,
        num_devices=_N,
        least_devices=3,
        most_devices=None,
        gone=None,
        fraction=None,
        num_neighbours=None,
    ):
        self.demanded = parameters.Parameters(
            _LAYOUT, model, least_devices, num_neighbours, most_devices=most_devices
        )
        self.session = parameters.new_session()
        self.devices = {
            i: conversations.make_participant(
                self.demanded, self.session, [np.array([1], np.uint32), np.full(6, i, np.uint16)]
            )
            for i in range(num_devices)
        }
        self.server = group.Group(
            self.demanded, self.session, threshold_fraction=fraction, num_neighbours=num_neighbours
        )
        self.messages = {}
        self.gone = gone or {}
        while self.server.phase is not until:
            self.step()

    def step(self):
        gone = self.gone.get(self.server.phase, ())
        self.messages = conversations.step(self.server, self.devices, self.messages, gone=gone)

    def all_refuse(self, error, *, messages=None):
        """Every device refuses its message by this name, and is over after it."""
        for name, message in (messages or self.messages).items():
            with pytest.raises(error) as caught:
                self.devices[name].answer(message)
            assert caught.type is error
            with pytest.raises(refusals.SessionOverError):
                self.devices[name].answer(secure_sum_pb2.ToDevice(received_shares={}))


def _replaced(message, **fields):
    """A copy of an advertisement with other fields."""
    copy = secure_sum_pb2.KeyAdvertisement()
    copy.CopyFrom(message)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def _tamper_keys(conversation, change):
    """Changes, in each directory, the keys of the device after the one that is told."""
    for name, message in conversation.messages.items():
        other = message.directory.members[(name + 1) % len(message.directory.members)]
        other.keys.CopyFrom(change(name, other.keys))


def _after(i, directory, steps=1):
    """The keys of the device that follows the i-th by as many steps."""
    return directory.members[(i + steps) % _N].keys


def _own_entry_missing_or_under_another_index(i, directory):
    if i % 2:
        del directory.members[i]
    else:
        directory.index = (i + 1) % _N


def _weak_key(weak):
    return refusals.WeakKeyError, lambda i, d: setattr(_after(i, d), "encryption_key", weak)


def _own_key(field):
    change = lambda i, d: setattr(d.members[i].keys, field, keys.KeyPair().public)  # noqa: E731
    return refusals.OwnKeysReplacedError, change


@_BOTH
@pytest.mark.parametrize(
    ("error", "change"),
    [
        _own_key("encryption_key"),
        _own_key("mask_key"),
        (refusals.OwnKeysReplacedError, _own_entry_missing_or_under_another_index),
        (
            refusals.EqualKeysError,
            lambda i, d: setattr(_after(i, d), "mask_key", _after(i, d, 2).encryption_key),
        ),
        *map(_weak_key, (bytes(32), b"\1" + bytes(31), bytes(31), b"", b"\xff" * 32)),
        (refusals.MalformedMessageError, lambda i, d: setattr(d, "threshold", _N + 1)),
        (refusals.TooFewNeighboursError, lambda i, d: d.members.pop((i + 1) % _N)),
        (refusals.MalformedMessageError, lambda i, d: d.members.add().CopyFrom(d.members[0])),
        (refusals.MalformedMessageError, lambda i, d: setattr(d.members[-1], "index", _N)),
        (refusals.MalformedMessageError, lambda i, d: d.members.reverse()),
    ],
)
def test_directories_that_a_server_changed(model, error, change):
    conversation = _Conversation(model, group.Phase.SHARING)
    for name, message in conversation.messages.items():
        change(name, message.directory)
    conversation.all_refuse(error)


@pytest.mark.parametrize(("model", "least"), [(_HONEST, 4), (_ACTIVE, 5)])
def test_low_threshold(model, least):
    conversation = _Conversation(model, group.Phase.SHARING)
    for message in conversation.messages.values():
        assert message.directory.threshold == least
        message.directory.threshold -= 1
    conversation.all_refuse(refusals.LowThresholdError)


def test_keys_exchanged_between_devices_in_the_active_model():
    conversation = _Conversation(_ACTIVE, group.Phase.SHARING)
    for name, message in conversation.messages.items():
        a, b = (_after(name, message.directory, steps) for steps in (1, 2))
        a.mask_key, b.mask_key = b.mask_key, a.mask_key
    conversation.all_refuse(refusals.ForgedKeysError)


# The directory.


@_BOTH
def test_replayed_session(model):
    # The same session's name, and all that the server said in it, to devices with new keys.
    old = _Conversation(model, group.Phase.SHARING)
    for name in old.devices:
        vector = vectors.zeros(_LAYOUT)
        old.devices[name] = conversations.make_participant(old.demanded, old.session, vector)
        old.devices[name].advertise()
    old.all_refuse(refusals.OwnKeysReplacedError)


def test_keys_of_another_session_in_the_active_model():
    conversation = _Conversation(_ACTIVE, group.Phase.SHARING)
    other = _Conversation(_ACTIVE, group.Phase.SHARING)
    known = [member.keys for member in other.messages[0].directory.members]
    _tamper_keys(conversation, lambda name, _: known[name])
    conversation.all_refuse(refusals.ForgedKeysError)


@pytest.mark.parametrize("field", ["encryption_key", "mask_key", "identity_key", "signature"])
def test_swapped_keys_in_the_active_model(field):
    conversation = _Conversation(_ACTIVE, group.Phase.SHARING)
    new = {"identity_key": keys.IdentityKey().public, "signature": bytes(64)}
    swapped = new.get(field) or keys.KeyPair().public
    _tamper_keys(conversation, lambda _, sent: _replaced(sent, **{field: swapped}))
    conversation.all_refuse(refusals.ForgedKeysError)


def test_identity_minted_by_the_server():
    conversation = _Conversation(_ACTIVE, group.Phase.SHARING)

    def minted(_, sent):
        identity = keys.IdentityKey()
        fields = {"mask_key": keys.KeyPair().public, "identity_key": identity.public}
        own = _replaced(sent, **fields)
        return _replaced(
            own,
            signature=identity.sign_advertisement(conversations.bound(conversation.session), own),
        )

    _tamper_keys(conversation, minted)
    conversation.all_refuse(refusals.UnprovenIdentityError)


def test_equal_identities():
    # One genuine device that joins twice, with keys that it has signed: a Sybil of one key.
    conversation = _Conversation(_ACTIVE, group.Phase.ADVERTISING)
    advertisements = {i: d.advertise().key_advertisement for i, d in conversation.devices.items()}
    double = keys.IdentityKey()
    directory = secure_sum_pb2.Directory(num_devices=_N + 2, threshold=_N)
    members = list(advertisements.values())
    for _ in range(2):
        own = secure_sum_pb2.KeyAdvertisement(
            encryption_key=keys.KeyPair().public,
            mask_key=keys.KeyPair().public,
            identity_key=double.public,
            identity_proof=conversations.Identity().make_proof(double.public),
        )
        own.signature = double.sign_advertisement(conversations.bound(conversation.session), own)
        members.append(own)
    for index, member in enumerate(members):
        directory.members.add(index=index, keys=member)
    for name in conversation.devices:
        directory.index = name
        conversation.messages[name] = secure_sum_pb2.ToDevice()
        conversation.messages[name].directory.CopyFrom(directory)
    conversation.all_refuse(refusals.EqualKeysError)


@_BOTH
def test_small_group(model):
    conversation = _Conversation(model, group.Phase.SHARING, num_devices=3)
    for message in conversation.messages.values():
        members = message.directory.members
        del members[(message.directory.index + 1) % 3]
        message.directory.num_devices = 2
        for i, member in enumerate(members):
            message.directory.index = i if member.index == message.directory.index else 5
            member.index = i
    for name, message in conversation.messages.items():
        own = conversation.devices[name]._advertisement
        members = message.directory.members
        message.directory.index = next(m.index for m in members if m.keys == own)
    conversation.all_refuse(refusals.TooFewDevicesError)


@_BOTH
def test_group_too_large_to_work_through(model, monkeypatch):
    conversation = _Conversation(model, group.Phase.SHARING, most_devices=_N)
    messages = conversation.messages
    # What a server could make a device compute for hours; it is refused before any of it.
    monkeypatch.setattr(secret_sharing, "split", None)
    for message in messages.values():
        message.directory.num_devices = _N + 1
    conversation.all_refuse(refusals.TooManyDevicesError)


# The shares on their way.


@pytest.mark.parametrize(
    ("model", "least", "kept"),
    [(_HONEST, 3, 2), (_ACTIVE, 3, 3), (_HONEST, _N, 5), (_ACTIVE, _N, 5)],
)
def test_too_few_senders_of_shares(model, least, kept):
    """With the device itself, fewer than the threshold, or than the devices demanded."""
    conversation = _Conversation(model, group.Phase.MASKING, least_devices=least)
    for message in conversation.messages.values():
        del message.received_shares.ciphertexts[kept:]
    conversation.all_refuse(refusals.TooFewDevicesError)


@pytest.mark.parametrize("index", ["own", "repeated", "unknown"])
def test_shares_from_nobody(index):
    conversation = _Conversation(_HONEST, group.Phase.MASKING)
    for name, message in conversation.messages.items():
        ciphertexts = message.received_shares.ciphertexts
        ciphertexts[0].index = {"own": name, "repeated": ciphertexts[1].index}.get(index, _N)
    conversation.all_refuse(refusals.MalformedMessageError)


@_BOTH
def test_shares_that_do_not_decrypt_are_left_out(model):
    conversation = _Conversation(model, group.Phase.MASKING)
    for message in conversation.messages.values():
        for ciphertext in message.received_shares.ciphertexts:
            if ciphertext.index == 2:
                ciphertext.content = ciphertext.content[::-1]
            if ciphertext.index == 3:
                ciphertext.content = b"short"
    while conversation.server.phase is not group.Phase.REVEALING:
        conversation.step()
    for name, message in conversation.messages.items():
        revealed = conversation.devices[name].answer(message).revealed_shares
        indices = {share.index for share in revealed.of_self_masks}
        assert indices == set(range(_N)) - ({2, 3} - {name})


def test_shares_relayed_as_another_devices_are_left_out():
    conversation = _Conversation(_HONEST, group.Phase.MASKING)
    message = conversation.messages[0]
    a, b = message.received_shares.ciphertexts[:2]
    a.content, b.content = b.content, a.content
    while conversation.server.phase is not group.Phase.REVEALING:
        conversation.step()
    revealed = conversation.devices[0].answer(conversation.messages[0]).revealed_shares
    assert {share.index for share in revealed.of_self_masks} == set(range(_N)) - {1, 2}


# The survivors.


def _survivors(*indices, num_devices=_N):
    bitmap = bitmaps.write(indices, num_devices)
    return secure_sum_pb2.ToDevice(survivors={"bitmap": bitmap})


def _before_survivors(model, **kwargs):
    phase = group.Phase.CONFIRMING if model is _ACTIVE else group.Phase.REVEALING
    return _Conversation(model, phase, **kwargs)


@_BOTH
def test_too_few_survivors_for_the_threshold(model):
    conversation = _before_survivors(model)
    number = {_HONEST: 3, _ACTIVE: 4}[model]
    messages = {name: _survivors(*range(number)) for name in range(number)}
    conversation.all_refuse(refusals.TooFewSurvivorsError, messages=messages)


@_BOTH
def test_fewer_survivors_than_demanded(model):
    conversation = _before_survivors(model, least_devices=6)
    messages = {name: _survivors(*range(5)) for name in range(5)}
    conversation.all_refuse(refusals.TooFewSurvivorsError, messages=messages)


def test_fewer_survivors_than_demanded_though_enough_are_neighbours():
    # One of 12 is missing, and so at most one of the 5 who hold a device's shares.
    conversation = _before_survivors(_HONEST, num_devices=12, least_devices=12, num_neighbours=4)
    messages = {name: _survivors(*range(11), num_devices=12) for name in range(11)}
    conversation.all_refuse(refusals.TooFewSurvivorsError, messages=messages)


@_BOTH
def test_device_that_is_said_not_to_have_survived(model):
    conversation = _before_survivors(model)
    messages = {
        name: _survivors(*(i for i in range(_N) if i != name)) for name in conversation.messages
    }
    conversation.all_refuse(refusals.NotASurvivorError, messages=messages)


@_BOTH
def test_survivors_that_never_sent_shares(model):
    conversation = _before_survivors(model, gone={group.Phase.SHARING: {4}})
    messages = {name: _survivors(*range(_N)) for name in conversation.messages}
    conversation.all_refuse(refusals.UnknownSurvivorsError, messages=messages)


@_BOTH
@pytest.mark.parametrize("bitmap", [b"", b"\x7f\0", b"\xff"])
def test_no_bitmap_of_the_group(model, bitmap):
    conversation = _before_survivors(model)
    message = secure_sum_pb2.ToDevice(survivors={"bitmap": bitmap})
    messages = dict.fromkeys(conversation.messages, message)
    conversation.all_refuse(refusals.MalformedMessageError, messages=messages)


@_BOTH
def test_both_kinds_of_shares_of_one_device(model):
    conversation = _before_survivors(model)
    answers = {
        name: conversation.devices[name].answer(message)
        for name, message in conversation.messages.items()
    }
    for answer in answers.values():
        if model is _HONEST:
            kinds = (answer.revealed_shares.of_self_masks, answer.revealed_shares.of_mask_keys)
            of_self_masks, of_mask_keys = ({share.index for share in kind} for kind in kinds)
            assert of_self_masks == set(range(_N)) and not of_mask_keys
    # Now device 6 is said to be absent, for the other share of its secrets.
    messages = {name: _survivors(*range(6)) for name in range(6)}
    conversation.all_refuse(refusals.BothKindsOfSharesError, messages=messages)


@_BOTH
def test_survivors_told_again(model):
    conversation = _before_survivors(model)
    for name, message in conversation.messages.items():
        conversation.devices[name].answer(message)
    error = {_HONEST: refusals.SessionOverError, _ACTIVE: refusals.RepeatedMessageError}[model]
    conversation.all_refuse(error)


def test_each_device_reveals_one_kind_of_share_of_each():
    gone = {group.Phase.MASKING: {2, 5}}
    conversation = _Conversation(_HONEST, group.Phase.REVEALING, gone=gone)
    for name, message in conversation.messages.items():
        revealed = conversation.devices[name].answer(message).revealed_shares
        assert {share.index for share in revealed.of_mask_keys} == {2, 5}
        assert {share.index for share in revealed.of_self_masks} == set(range(_N)) - {2, 5}


# Signatures over the survivors.


def test_different_survivors_told_to_different_devices():
    conversation = _before_survivors(_ACTIVE)
    # Half of them hear of all, the others that device 6 is absent: both kinds of shares of 6.
    told = {name: _survivors(*range(_N if name < 3 else 6)) for name in range(6)}
    signatures = secure_sum_pb2.ToDevice()
    for name, message in told.items():
        signature = conversation.devices[name].answer(message).survivors_signature.signature
        signatures.survivors_signatures.signatures.add(index=name, signature=signature)
    conversation.all_refuse(refusals.OtherSurvivorsError, messages=dict.fromkeys(told, signatures))


def _signed(conversation):
    """The signatures of all over the survivors, as a message."""
    signatures = secure_sum_pb2.ToDevice()
    for name, message in conversation.messages.items():
        signature = conversation.devices[name].answer(message).survivors_signature.signature
        signatures.survivors_signatures.signatures.add(index=name, signature=signature)
    return signatures


def test_only_the_signatures_of_those_who_were_told_the_same():
    conversation = _before_survivors(_ACTIVE)
    signatures = _signed(conversation)
    # A device's own counts; four of seven are too few.
    for name in conversation.devices:
        own = secure_sum_pb2.ToDevice()
        own.CopyFrom(signatures)
        kept = {name, (name + 1) % _N, (name + 2) % _N, (name + 3) % _N}
        for i in reversed(range(_N)):
            if i not in kept:
                del own.survivors_signatures.signatures[i]
        conversation.all_refuse(refusals.TooFewSignaturesError, messages={name: own})


def test_forged_signature_over_survivors():
    conversation = _before_survivors(_ACTIVE)
    signatures = _signed(conversation)
    for name in conversation.devices:
        forged = secure_sum_pb2.ToDevice()
        forged.CopyFrom(signatures)
        other = forged.survivors_signatures.signatures[(name + 1) % _N]
        identity = keys.IdentityKey()
        digest, bitmap = conversation.server._digest, conversation.server._bitmap
        other.signature = identity.sign_survivors(
            conversations.bound(conversation.session), digest, bitmap
        )
        conversation.all_refuse(refusals.OtherSurvivorsError, messages={name: forged})


def test_signatures_of_a_replayed_session():
    old = _signed(_before_survivors(_ACTIVE))
    conversation = _before_survivors(_ACTIVE)
    _signed(conversation)
    conversation.all_refuse(
        refusals.OtherSurvivorsError, messages=dict.fromkeys(conversation.devices, old)
    )


@pytest.mark.parametrize("case", ["repeated", "no survivor"])
def test_signatures_of_no_survivor_or_two_of_one(case):
    gone = {group.Phase.MASKING: {0}}
    conversation = _before_survivors(_ACTIVE, gone=gone)
    signatures = _signed(conversation)
    entries = signatures.survivors_signatures.signatures
    entries[0].index = {"repeated": entries[1].index, "no survivor": 0}[case]
    conversation.all_refuse(
        refusals.MalformedMessageError, messages=dict.fromkeys(conversation.messages, signatures)
    )


# Order, and the end.


@_BOTH
def test_every_message_comes_once_and_in_order(model):
    conversation = _Conversation(model, group.Phase.SHARING)
    heard = [dict(conversation.messages)]
    while conversation.server.phase is not group.Phase.REVEALING:
        conversation.step()
        heard.append(dict(conversation.messages))
    for position in range(len(heard)):
        for kind in range(len(heard)):
            if kind == position:
                continue
            again = _Conversation(model, group.Phase.SHARING)
            for _ in range(position):
                again.step()
            error = refusals.RepeatedMessageError if kind < position else refusals.OutOfOrderError
            again.all_refuse(error, messages={0: heard[kind][0]})


def test_message_without_content_and_message_before_the_advertisement():
    conversation = _Conversation(_HONEST, group.Phase.SHARING)
    messages = dict.fromkeys(conversation.devices, secure_sum_pb2.ToDevice())
    with pytest.raises(refusals.MalformedMessageError):
        conversation.devices[0].answer(messages[0])
    unused = conversations.make_participant(
        conversation.demanded, conversation.session, vectors.zeros(_LAYOUT)
    )
    with pytest.raises(refusals.SessionOverError):
        unused.answer(conversation.messages[1])


@_BOTH
def test_advertises_once(model):
    conversation = _Conversation(model, group.Phase.SHARING)
    with pytest.raises(refusals.SessionOverError):
        conversation.devices[0].advertise()


def _objects(root):
    """All that can be reached from an object's own state, through any of our objects."""
    seen, todo = {}, [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(value)] = value
        todo.extend(gc.get_referents(value))
        if isinstance(value, np.ndarray):
            todo.append(value.base)
    return list(seen.values())


class _Secrets:
    """What a device has made or been told in confidence, and whether an object has it still."""

    def __init__(self, monkeypatch):
        self.numbers, self.contents = set(), set()
        randbits, open_, pair = device.secrets.randbits, keys.Channel.open, keys.KeyPair.__init__

        def spied_randbits(bits):
            number = randbits(bits)
            self.numbers.add(number)
            return number

        def spied_open(channel, content):
            opened = open_(channel, content)
            self.contents |= {opened} - {None}
            return opened

        def spied_pair(pair_, private_key=None):
            pair(pair_, private_key)
            self.numbers.add(pair_.as_int())

        monkeypatch.setattr(device.secrets, "randbits", spied_randbits)
        monkeypatch.setattr(keys.Channel, "open", spied_open)
        monkeypatch.setattr(keys.KeyPair, "__init__", spied_pair)

    def left_in(self, participant, vector):
        orders = ("big", "little")
        texts = {number.to_bytes(32, order) for number in self.numbers for order in orders}
        texts |= self.contents
        texts |= {text[:33] for text in self.contents} | {text[33:] for text in self.contents}
        texts |= {entries.tobytes() for entries in vector}
        texts |= {entries.astype(np.int64).tobytes() for entries in vector}
        remaining = []
        for value in _objects(participant):
            if isinstance(value, int) and value in self.numbers:
                remaining.append(value)
            if isinstance(value, (bytes, bytearray, np.ndarray)):
                held = bytes(value) if not isinstance(value, np.ndarray) else value.tobytes()
                remaining.extend(text for text in texts if text in held)
            if isinstance(value, (x25519.X25519PrivateKey, keys.KeyPair, keys.Channel)):
                remaining.append(value)
            if isinstance(value, keys.IdentityKey):
                remaining.append(value)
        return remaining


_VECTOR = [np.array([0x1234567], np.uint32), np.array([901, 802, 703, 604, 505, 406], np.uint16)]


@_BOTH
@pytest.mark.parametrize("end", ["answered", "refused", "forgotten"])
def test_no_secret_is_left_after_the_end(model, end, monkeypatch):
    spied = _Secrets(monkeypatch)
    conversation = _Conversation(model, group.Phase.ADVERTISING)
    participant = conversations.make_participant(
        conversation.demanded, conversation.session, [entries.copy() for entries in _VECTOR]
    )
    conversation.devices[3] = participant
    assert spied.left_in(participant, _VECTOR)  # The vector.
    conversation.gone = {group.Phase.MASKING: {5}}
    while conversation.server.phase is not group.Phase.REVEALING:
        conversation.step()
        # So the search does find what is there.
        assert spied.left_in(participant, _VECTOR)
    if end == "answered":
        participant.answer(conversation.messages[3])
        assert len(spied.contents) >= _N - 1
    elif end == "refused":
        with pytest.raises(refusals.ProtocolRefusedError):
            participant.answer(_survivors(0, 1, 3))
    else:
        participant.forget()
    assert not spied.left_in(participant, _VECTOR)


def test_representations_show_no_secret():
    conversation = _Conversation(_HONEST, group.Phase.REVEALING)
    participant = conversation.devices[0]
    owners = (participant, participant._sum, keys.KeyPair(), conversation.server)
    for owner in (*owners, *participant._channels.values()):
        assert repr(owner) == object.__repr__(owner)  # A type and an address.


def test_secrets_come_from_the_operating_system(monkeypatch):
    drawn = []
    randbits = device.secrets.randbits
    monkeypatch.setattr(device.secrets, "randbits", lambda k: drawn.append(k) or randbits(k))
    _Conversation(_HONEST, group.Phase.MASKING)
    assert drawn.count(256) == _N
    assert secret_sharing.split.__kwdefaults__["random_below"] is secret_sharing.secrets.randbelow


@pytest.mark.slow
@_BOTH
def test_a_hundred_devices_send_little_more_than_their_vectors(model):
    layout = (vectors.Segment(1, 2**32), vectors.Segment(100_000, 2**32))
    demanded = parameters.Parameters(layout, model, 2)
    session = parameters.new_session()
    zeros = vectors.zeros(layout)
    devices = {i: conversations.make_participant(demanded, session, zeros) for i in range(100)}
    server, messages, num_bytes = group.Group(demanded, session), {}, 0

    def receive(name, answer):
        nonlocal num_bytes
        num_bytes += answer.ByteSize() if name == 0 else 0
        server.receive(name, answer)

    while server.phase is not group.Phase.DONE:
        gone = range(90, 100) if server.phase is group.Phase.MASKING else ()
        messages = conversations.step(server, devices, messages, gone=gone, between=receive)
    assert 1 < num_bytes / vectors.packed_bytes(layout) < 1.15


# Construction.


def test_arguments_that_do_not_fit():
    honest = parameters.Parameters(_LAYOUT, _HONEST, 2)
    active = parameters.Parameters(_LAYOUT, _ACTIVE, 2)
    session, vector = parameters.new_session(), vectors.zeros(_LAYOUT)
    with pytest.raises(ValueError, match="identity must be given where .* 'active-server', got N"):
        device.Participant(active, session, vector)
    with pytest.raises(ValueError, match="identity must be None where .* 'honest"):
        device.Participant(honest, session, vector, identity=conversations.Identity())
    with pytest.raises(ValueError, match="session must have 32 bytes, got 3"):
        device.Participant(honest, b"abc", vector)
    with pytest.raises(ValueError, match="vector must have 2 segments"):
        device.Participant(honest, session, vector[:1])


def test_proof_that_is_too_long_ends_the_session():
    class Wordy(conversations.Identity):
        def make_proof(self, identity_public_key):
            return bytes(keys.MAX_PROOF_BYTES + 1)

    demanded = parameters.Parameters(_LAYOUT, _ACTIVE, 2)
    participant = device.Participant(
        demanded, parameters.new_session(), vectors.zeros(_LAYOUT), identity=Wordy()
    )
    with pytest.raises(ValueError, match="proofs of at most 4096 bytes, got 4097"):
        participant.advertise()
    with pytest.raises(refusals.SessionOverError):
        participant.advertise()


def test_vector_is_copied():
    conversation = _Conversation(_HONEST, group.Phase.ADVERTISING, num_devices=3)
    vector = [np.array([1], np.uint32), np.full(6, 5, np.uint16)]
    conversation.devices[0] = conversations.make_participant(
        conversation.demanded, conversation.session, vector
    )
    vector[1][:] = 999
    conversations.run(conversation.server, conversation.devices)
    np.testing.assert_array_equal(conversation.server.total()[1], [5 + 1 + 2] * 6)


def _told(model, contexts):
    """The first messages of a server to devices, each of which was told another thing."""
    demanded = parameters.Parameters(_LAYOUT, model, 3)
    session = parameters.new_session()
    devices = {
        i: conversations.make_participant(
            demanded, session, [np.array([1], np.uint32), np.full(6, i, np.uint16)], context
        )
        for i, context in enumerate(contexts)
    }
    return demanded, session, devices


def test_devices_that_were_told_different_things_refuse_each_other_where_the_server_is_active():
    _, _, devices = _told(_ACTIVE, [b"model", b"model", b"model", b"model for the victim"])
    advertisements = [participant.advertise() for participant in devices.values()]
    for i, participant in devices.items():
        directory = secure_sum_pb2.Directory(index=i, num_devices=4, threshold=3)
        for j, advertisement in enumerate(advertisements):
            directory.members.add(index=j, keys=advertisement.key_advertisement)
        with pytest.raises(refusals.ForgedKeysError):
            participant.answer(secure_sum_pb2.ToDevice(directory=directory))


def test_a_server_takes_no_keys_of_a_device_that_was_told_something_else():
    demanded, session, devices = _told(_ACTIVE, [b"model", b"other"])
    server = group.Group(demanded, session, context=b"model")
    server.receive(0, devices[0].advertise())
    with pytest.raises(group.MessageRefusedError, match="not signed for this session"):
        server.receive(1, devices[1].advertise())


@pytest.mark.parametrize("other", [b"model", b"another model"])
def test_masks_of_devices_that_were_told_different_things_do_not_cancel(other):
    demanded, session, devices = _told(_HONEST, [b"model", b"model", b"model", other])
    server = group.Group(demanded, session, context=b"model")
    messages = {}
    try:
        while server.phase is not group.Phase.DONE:
            messages = conversations.step(server, devices, messages)
        total = server.total()[1].tolist()
    except group.GroupLostError:  # The seed of the other is not the one that it committed to.
        total = None
    assert (total == [6] * 6) == (other == b"model")
