"""Texts as `tf.train.Example` protos, the form in which plans parse examples.

A plan's graph parses examples with `tf.io.parse_example`, without code beyond TensorFlow. An
application that only records examples should not have to import TensorFlow, which takes seconds.
So the encoding is implemented here: the message is small and will not change
(tensorflow/core/example/example.proto). Tests compare it with TensorFlow's encoding.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Mapping, Sequence

from tff_dpftrl import validation
from tff_dpftrl.data import user_text
from tff_dpftrl.runtime.device import example_store

COLLECTION = "text"
"""Default collection of the texts of a task."""
TEXT_FEATURE = "tokens"
"""Default name of the bytes feature with the texts."""

Values = Sequence[bytes] | Sequence[str] | Sequence[int] | Sequence[float]


def encode(features: Mapping[str, Values]) -> bytes:
    """Serializes a `tf.train.Example`, features sorted by name: equal examples are equal bytes.

    Bytes or strings become a bytes list, integers an int64 list, floats (rounded to float32) a
    float list. An empty sequence is a feature without a kind. Strings become UTF-8, normalised to
    NFC: the graphs that split them cannot do so. It raises ValueError for mixed or other values,
    and for those beyond int64 or float32.
    """
    entries = b"".join(
        _field(1, _field(1, name.encode("utf-8")) + _field(2, _feature(name, features[name])))
        for name in sorted(features)
    )
    return _field(1, entries)


def encode_text(text: str, feature: str = TEXT_FEATURE) -> bytes:
    """Serializes a text; plans split it into words."""
    return encode({feature: [text]})


def add_user(
    store: example_store.SqliteExampleStore,
    corpus: user_text.UserText,
    user_id: str,
    *,
    collection: str = COLLECTION,
    feature: str = TEXT_FEATURE,
    recorded: float | None = None,
) -> None:
    """Adds the texts of one user of a corpus to a store, the last one as the newest.

    This is to try out a device; the id of the user is not stored. `recorded` is the time of the
    examples in seconds since 1970 (default: now).
    """
    texts = corpus.examples(user_id)
    store.add(collection, (encode_text(text, feature) for text in texts), recorded=recorded)


def _feature(name: str, values: Values) -> bytes:
    kinds = {type(value) for value in values}
    if not kinds:
        return b""
    if kinds <= {bytes, str}:
        try:
            encoded = [
                unicodedata.normalize("NFC", v).encode() if isinstance(v, str) else v
                for v in values
            ]
        except UnicodeEncodeError:
            raise validation.UsageError(f"{name}: texts must be Unicode.") from None
        return _field(1, b"".join(_field(1, value) for value in encoded))
    if kinds == {float}:
        try:
            packed = struct.pack(f"<{len(values)}f", *values)
        except OverflowError:
            raise validation.UsageError(f"{name}: floats must fit into float32.") from None
        return _field(2, _field(1, packed))
    if kinds == {int}:
        if not all(-(2**63) <= value < 2**63 for value in values):
            raise validation.UsageError(f"{name}: integers must fit into 64 bits.")
        return _field(3, _field(1, b"".join(_varint(value % 2**64) for value in values)))
    raise validation.UsageError(
        f"{name}: values must be all bytes or strings, all int or all float, got "
        f"{', '.join(sorted(kind.__name__ for kind in kinds))}."
    )


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
