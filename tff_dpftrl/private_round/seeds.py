"""Seeds of the noise: bits from the operating system, and a tree of sub-seeds.

A round's noise is a function of the seed that its execution drew, and of stream, block, tensor and
draw index. Every arrow of that path is one call of `derive`: two draws share a seed only by a
chance of about 2⁻¹²⁸. A round that is executed again, from a backup or in a second copy of a
run, draws another seed. So what two executions publish differs at least by the round's new draw,
twice. A tree with variance reduction has new draws of a weight of 0.577 to 1.

`tf.random.*` without a seed starts from 32 bits of entropy, which can be
searched exhaustively by a reader of one noisy round. A seed is therefore
read from the operating system's generator: 128 bits for Philox, 256 for secure noise.

A sub-seed of a secure seed is the seed itself with the index appended: the path that
`numpy_noise.secure_draws` derives a key from.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf

from tff_dpftrl import validation

PHILOX = 1
"""Number of `tf.random.Algorithm.PHILOX`, as TensorFlow's raw ops take it."""

PHILOX_WORDS = 2
"""Number of 64-bit words in a root seed of Philox."""

SECURE_WORDS = 4
"""Number of 64-bit words in a root seed of secure noise."""

SOURCE = "/dev/urandom"
"""File of the operating system's generator, as graphs name it."""

_WORD = 1 << 64
_FOLDS = 4
_LINES = 32
_READ_FROM: contextvars.ContextVar[str | None] = contextvars.ContextVar("read_from", default=None)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Traces graphs that read their seeds from a file: for tests and audits, never for a run."""
    token = _READ_FROM.set(path)
    try:
        yield
    finally:
        _READ_FROM.reset(token)


def root_seed_from_os(num_words: int = PHILOX_WORDS) -> tf.Tensor:
    """Reads a fresh root seed from the operating system whenever the op runs.

    Lines are read from `/dev/urandom`, inside the graph, because a federated
    computation is traced once and may run in another process. Bytes of a line
    are uniform on all values but the line ends. Four of them, joined by exclusive or,
    make a byte: in total variation 128 bits are within 6.2e-8 of uniform, and 256
    within 1.3e-7; no seed is likelier than a uniform one by more than a factor of 1 + 1.6e-5.
    """
    # A line has 256 bytes on average: fewer than 128 in 32 lines never happens. Raw operations,
    # since a pipeline of `tf.data` is optimised in every call, which takes ten times as long.
    with tf.device("CPU:0"):
        lines = tf.raw_ops.TextLineDataset(
            filenames=[_READ_FROM.get() or SOURCE], compression_type="", buffer_size=16384
        )
        # Taken before they are a batch: the other way round, TensorFlow warns of the type.
        taken = tf.raw_ops.TakeDataset(
            input_dataset=lines, count=_LINES, output_types=[tf.string], output_shapes=[[]]
        )
        batch = tf.raw_ops.BatchDatasetV2(
            input_dataset=taken,
            batch_size=_LINES,
            drop_remainder=False,
            output_types=[tf.string],
            output_shapes=[[None]],
        )
        (batch,) = tf.raw_ops.DatasetToSingleElement(
            dataset=batch, output_types=[tf.string], output_shapes=[[None]]
        )
        text = tf.strings.reduce_join(batch)
        num_bytes = 8 * num_words * _FOLDS
        too_few = "/dev/urandom gave too few bytes for a seed."
        enough = tf.debugging.assert_greater_equal(
            tf.strings.length(text), num_bytes, message=too_few
        )
        with tf.control_dependencies([enough]):
            words = tf.io.decode_raw(tf.strings.substr(text, 0, num_bytes), tf.int64)
        seed, *others = tf.unstack(tf.reshape(words, [_FOLDS, num_words]))
        for other in others:
            seed = tf.bitwise.bitwise_xor(seed, other)
    return seed


def of_execution(run_seed: tf.Tensor, deterministic_seed: int | None) -> tf.Tensor:
    """Draws the seed of the new noise of one execution of a round: the run's, joined by fresh bits.

    Their exclusive or is as hard to guess as the harder of the two. With a deterministic seed it
    is the run's seed alone.
    """
    if deterministic_seed is not None:
        return tf.convert_to_tensor(run_seed)
    return tf.bitwise.bitwise_xor(run_seed, root_seed_from_os(run_seed.shape[0] or 0))


def root_seed(deterministic_seed: int | None, *, secure: bool = False) -> tf.Tensor:
    """Returns the root seed of a run: from the operating system, or the given one.

    A run with a known seed is not private. The seed is int64, of shape [2]; [4] for secure noise.
    """
    deterministic_seed = validation.seed("deterministic_seed", deterministic_seed)
    num_words = SECURE_WORDS if secure else PHILOX_WORDS
    if deterministic_seed is None:
        return root_seed_from_os(num_words)
    words = [deterministic_seed % _WORD, deterministic_seed // _WORD, 0, 0][:num_words]
    return tf.bitcast(tf.constant(words, tf.uint64), tf.int64)


def is_secure(seed: tf.Tensor) -> bool:
    """Checks whether a seed is one of secure noise, or a sub-seed of it."""
    return seed.shape[0] != PHILOX_WORDS


def derive(seed: tf.Tensor, index: tf.Tensor | int) -> tf.Tensor:
    """Derives the sub-seed number `index` of a seed.

    For Philox, it is one block of Philox-4x32. Its key and upper counter word are a bijection of
    `seed`, its lower counter word is `index`: all 128 bits of the seed count, and
    different indices never collide. A seed serves either to derive sub-seeds or to
    draw, never both.
    """
    if is_secure(seed):
        return tf.concat([seed, [tf.cast(index, tf.int64)]], axis=0)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter = tf.stack([tf.cast(index, tf.uint64), counter[1]])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2], key=key, counter=counter, alg=PHILOX, dtype=tf.int64
    )
