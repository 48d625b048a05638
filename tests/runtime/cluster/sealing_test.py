import pickle

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tff_dpftrl.runtime.cluster import sealing

SECRET = b"numbers of a device"


def new_key():
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


KEY = new_key()


def test_what_is_sealed_can_be_opened_where_the_key_is_the_same():
    sealed = sealing.Seal(KEY, "toys").seal({"a": SECRET}, "worker-0")
    assert sealing.Seal(KEY, "toys").open(sealed, "worker-0") == {"a": SECRET}


def test_what_is_sealed_cannot_be_read_and_never_looks_the_same():
    seal = sealing.Seal(KEY, "toys")
    assert SECRET in pickle.dumps(SECRET)
    first, second = (seal.seal(SECRET, "worker-0") for _ in range(2))
    assert SECRET not in first
    # All of it differs by chance in one byte of 256: 100 bytes have a common stretch of 16
    # with a probability below 2^-120.
    stretches = {first[i : i + 16] for i in range(len(first) - 15)}
    assert not stretches & {second[i : i + 16] for i in range(len(second) - 15)}


@pytest.mark.parametrize(
    "other",
    [
        lambda sealed: sealing.Seal(new_key(), "toys").open(sealed, "worker-0"),
        lambda sealed: sealing.Seal(KEY, "others").open(sealed, "worker-0"),
        lambda sealed: sealing.Seal(KEY, "toys").open(sealed, "worker-1"),
        lambda sealed: sealing.Seal(KEY, "toys").open(sealed[:-1], "worker-0"),
        lambda sealed: sealing.Seal(KEY, "toys").open(sealed[:20], "worker-0"),
        lambda sealed: sealing.Seal(KEY, "toys").open(b"", "worker-0"),
    ],
    ids=["key", "population", "host", "cut", "short", "empty"],
)
def test_nobody_else_opens_it(other):
    with pytest.raises(sealing.NotSealed):
        other(sealing.Seal(KEY, "toys").seal(SECRET, "worker-0"))


def test_no_byte_can_be_changed():
    seal = sealing.Seal(KEY, "toys")
    sealed = seal.seal(SECRET, "worker-0")
    for i in range(len(sealed)):
        changed = bytearray(sealed)
        changed[i] ^= 1
        with pytest.raises(sealing.NotSealed):
            seal.open(bytes(changed), "worker-0")


class _Told:
    """Tells when it is unpickled."""

    heard: list[str] = []

    def __reduce__(self):
        return _Told.heard.append, ("unpickled",)


def test_only_what_was_sealed_is_unpickled():
    seal = sealing.Seal(KEY, "toys")
    _Told.heard.clear()
    with pytest.raises(sealing.NotSealed):
        seal.open(pickle.dumps(_Told()), "worker-0")
    assert _Told.heard == []
