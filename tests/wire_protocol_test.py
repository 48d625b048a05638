"""Tests that the page of the wire protocol has what the messages have, and derives what they do."""

import hashlib
import hmac
import pathlib
import re

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tff_dpftrl.runtime.device import server_connection
from tff_dpftrl.runtime.plans import allowed_ops, plan_pb2, rounded_updates, signing, verification
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.secure_sums import keys, masks, parameters, secure_sum_pb2, vectors

_PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "reference" / "wire_protocol.md"
_TEXT = _PAGE.read_text("utf-8")
# What stays on the server, but for being named.
_OF_SERVERS = {"ServerPlan", "SignedTask", "ReportBound"}


def _messages(descriptors):
    for message in descriptors:
        if message.name not in _OF_SERVERS:
            yield message
            yield from _messages(message.nested_types)


@pytest.mark.parametrize("module", [wire_pb2, plan_pb2, secure_sum_pb2])
def test_the_page_names_each_message_and_field(module):
    names = set()
    for message in _messages(module.DESCRIPTOR.message_types_by_name.values()):
        if not message.GetOptions().map_entry:
            names |= {message.name, *message.fields_by_name}
    for enum in module.DESCRIPTOR.enum_types_by_name.values():
        names |= {value for value in enum.values_by_name if "UNSPECIFIED" not in value}
    missing = {name for name in names - {"message"} if not re.search(rf"`[^`]*\b{name}\b", _TEXT)}
    assert not missing
    assert all(name in _TEXT for name in _OF_SERVERS & set(dir(module)))


def test_the_page_names_no_field_that_is_not_there():
    modules = (wire_pb2, plan_pb2, secure_sum_pb2)
    messages = {
        message.name: message
        for module in modules
        for message in _messages(module.DESCRIPTOR.message_types_by_name.values())
    }
    tables = re.findall(r"^### `(\w+)`$(.*?)(?=^#)", _TEXT, re.MULTILINE | re.DOTALL)
    assert len(tables) == 8
    for name, text in tables:
        fields = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        assert fields == list(messages[name].fields_by_name), name


@pytest.mark.parametrize(
    "said, value",
    [
        ("128,000,000 bytes", server_connection._MAX_MESSAGE_BYTES),
        ("first `update_part` has 1,024 bytes", session_stream.FIRST_PART_BYTES),
        ("more than 1,048,576 bytes", session_stream.PART_BYTES),
        ("`ReportAnswer`, transfer included | 600 s", server_connection.Patience().upload_s),
        ("transfer included | 3,600 s", server_connection.Patience().selection_s),
        ("32,000,000 with their envelope", verification.DEFAULT_CEILING.plan_bytes),
        ("2,000,000,000, 600 and 64,000,000", verification.DEFAULT_CEILING.memory_bytes),
        ("This page is version 2 ", max(session_stream.VERSIONS)),
        ("today 3:", allowed_ops.RUNTIME_VERSION),
        ("The built-in token has 129 bytes", attestation.TOKEN_BYTES),
        ("an attestation token of 4,096 bytes", keys.MAX_PROOF_BYTES),
    ],
)
def test_numbers_are_those_of_the_code(said, value):
    assert said in _TEXT
    assert f"{value:,.0f}" in said


# From here on, what the page says, written down again without the package's own derivations.

SESSION = bytes(range(32))


def _prefixed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def _hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    key, block, result = hmac.digest(salt, secret, "sha256"), b"", b""
    while len(result) < length:
        counter = bytes([len(result) // 32 + 1])
        block = hmac.digest(key, block + info + counter, "sha256")
        result += block
    return result[:length]


def _bound_session() -> bytes:
    context = hashlib.sha256(_prefixed(b"task") + _prefixed(b"7") + _prefixed(b"model")).digest()
    label = b"tff_dpftrl secure sum: session and context\0"
    return hashlib.sha256(label + SESSION + hashlib.sha256(context).digest()).digest()


def test_nonce_and_token():
    label = b"tff_dpftrl attestation nonce\0"
    parts = b"".join(map(_prefixed, (b"challenge", b"example.org", "Gebär".encode())))
    nonce = hashlib.sha256(label + parts).digest()
    assert nonce == session_stream.attested_nonce(b"challenge", "example.org", "Gebär")
    key = ed25519.Ed25519PrivateKey.generate()
    token = attestation.TokenIssuer(key, clock=lambda: 1000.0, lifetime_s=300.0).issue(nonce)
    raw = key.public_key().public_bytes_raw()
    assert token[0] == 1 and token[1:9] == hashlib.sha256(raw).digest()[:8]
    assert token[9:41] == nonce and int.from_bytes(token[57:65], "big") == 1300
    key.public_key().verify(token[65:], b"tff_dpftrl attestation token\0" + token[:65])


def test_signature_of_a_plan():
    key = ed25519.Ed25519PrivateKey.generate()
    signed = signing.sign(plan_pb2.DevicePlan(task="task"), key)
    assert signed.sha256 == hashlib.sha256(signed.plan).digest()
    content = b"tff_dpftrl tff_dpftrl.runtime.plans.DevicePlan 1:" + signed.sha256
    key.public_key().verify(signed.signature, content)


def test_session_and_keys_of_a_secure_sum():
    context = session_stream.secure_sum_context("task", 7, b"model")
    assert parameters.bound_session(SESSION, context) == _bound_session()
    private = [x25519.X25519PrivateKey.from_private_bytes(bytes([i] * 32)) for i in (1, 2)]
    public = [key.public_key().public_bytes_raw() for key in private]
    indices = (5).to_bytes(4, "big") + (9).to_bytes(4, "big")
    info = b"tff_dpftrl secure sum: mask of a pair\0" + indices + public[0] + public[1]
    expected = _hkdf(private[0].exchange(private[1].public_key()), SESSION, info, 32)
    assert keys.KeyPair(private[1]).mask_key(SESSION, 9, 5, public[0]) == expected
    info = b"tff_dpftrl secure sum: self-mask\0" + (5).to_bytes(4, "big")
    derived = _hkdf((77).to_bytes(32, "big"), SESSION, info, 64)
    assert keys.self_mask(77, SESSION, 5) == (derived[:32], derived[32:])


def test_keys_of_a_noise_party():
    promised = [ed25519.Ed25519PrivateKey.from_private_bytes(bytes([i] * 32)) for i in (3, 4)]
    raw = [key.public_key().public_bytes_raw() for key in promised]
    layout = (vectors.Segment(7, 2**20), vectors.Segment(5, 1000))
    model = parameters.ThreatModel.HONEST_BUT_CURIOUS
    plans = b"digest of plans"
    demanded = parameters.Parameters(layout, model, 40, noise_parties=raw, noised_plans=plans)
    label = b"tff_dpftrl secure sum: what a noise party's noise is for\0"
    numbers = b"".join(number.to_bytes(16, "big") for number in (2, 7, 2**20, 5, 1000, 40))
    bound = hashlib.sha256(label + SESSION + numbers + b"".join(raw) + plans).digest()
    assert demanded.noise_session(SESSION) == bound
    private = [x25519.X25519PrivateKey.from_private_bytes(bytes([i] * 32)) for i in (1, 2)]
    public = [key.public_key().public_bytes_raw() for key in private]
    info = b"tff_dpftrl secure sum: mask of a noise party\0" + 2 * (5).to_bytes(4, "big")
    secret = private[0].exchange(private[1].public_key())
    expected = _hkdf(secret, bound, info + b"".join(sorted(public)), 32)
    for own, other in ((0, 1), (1, 0)):
        assert keys.KeyPair(private[own]).noise_mask_key(bound, 5, public[other]) == expected
    signed = keys.sign_noise_party(promised[1], bound, public[0])
    assert (signed.party, signed.mask_key) == (raw[1], public[0])
    label = b"tff_dpftrl secure sum: key of a noise party\0"
    promised[1].public_key().verify(signed.signature, label + bound + public[0])


def _words(key: bytes, number: int, dtype: str, count: int) -> np.ndarray:
    start = number.to_bytes(8, "big") + bytes(8)
    stream = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()
    return np.frombuffer(stream.update(bytes(count * np.dtype(dtype).itemsize)), dtype)


def test_masks():
    key = bytes(range(32))
    layout = tuple(vectors.Segment(size, m) for size, m in ((3, 256), (5, 2**20), (1000, 1000)))
    masked = masks.MaskedSum(layout)
    masked.add_masks([key])
    bytes_, wide, odd = masked.value()
    # The wider words come first, and take 5 · 4 bytes of 32.
    np.testing.assert_array_equal(wide, _words(key, 0, "<u4", 5) % 2**20)
    np.testing.assert_array_equal(bytes_, _words(key, 0, "u1", 35)[32:])
    limit = 65 * 1000
    words, spare = _words(key, 3, "<u2", 1000), _words(key, 2**63 + 3, "<u2", 100)
    rejected = words >= limit
    assert 1 <= rejected.sum() <= 50
    expected = words.copy()
    expected[rejected] = spare[spare < limit][: rejected.sum()]
    np.testing.assert_array_equal(odd, expected % 1000)


def test_packed_vectors():
    layout = tuple(vectors.Segment(size, m) for size, m in ((9, 1000), (2, 2**15), (5, 2**16)))
    vector = [np.arange(9) + 990, np.array([1, 2]), np.arange(5) * 1000]
    vector = [part.astype(segment.dtype) for part, segment in zip(vector, layout, strict=True)]
    ten_bits = sum(int(entry) << 10 * i for i, entry in enumerate(vector[0])).to_bytes(12, "little")
    # Two entries of 15 bits take as many bytes as they do one by one.
    expected = ten_bits + b"".join(part.astype("<u2").tobytes() for part in vector[1:])
    assert vectors.pack(vector, layout, in_bits=True) == expected


def test_rounded_tensors():
    x = np.array([[0.5, -2.0], [1e-9, 2 / 3]])
    (q,), (scale,) = rounded_updates.rounded([x], [0])
    largest = np.abs(x).max()
    np.testing.assert_array_equal(q, np.rint(32767 * x / largest))
    longer = np.linalg.norm(q.astype(float)) * largest / (32767 * np.linalg.norm(x))
    assert scale == pytest.approx((1 - 2e-7) * largest / 32767 / max(1, longer), rel=1e-12)
