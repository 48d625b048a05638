"""Seeds of the noise: 128 bits from the operating system, and a tree of sub-seeds.

All noise is a pure function of (root seed, stream, block, tensor, draw index).
Every arrow of that path is one call of `derive`, so a round that is repeated
after a crash repeats its noise, and no two draws share a seed.

`tf.random.*` without a seed starts from 32 bits of entropy, which can be
searched exhaustively by a reader of one noisy round. A root seed is therefore
read from the operating system's generator.
"""

from __future__ import annotations

import tensorflow as tf

from tff_dpftrl import validation

PHILOX = 1
"""Number of `tf.random.Algorithm.PHILOX`, as TensorFlow's raw ops take it."""

_WORD = 1 << 64
_SEED_BYTES = 16
_FOLDS = 4


def root_seed_from_os() -> tf.Tensor:
    """Reads a fresh root seed from the operating system whenever the op runs.

    Lines are read from `/dev/urandom`, inside the graph, because a federated
    computation is traced once and may run in another process. Bytes of a line
    are uniform on all values but the line ends; 64 of them, folded four times by
    exclusive or, are within 1e-9 of uniform on 128 bits.

    Returns:
      int64 tensor of shape [2].

    Raises:
      tf.errors.InvalidArgumentError: When run, if too few bytes were read.
    """
    # A line has 256 bytes on average: fewer than 64 in 32 lines never happens.
    lines = tf.data.TextLineDataset("/dev/urandom", buffer_size=16384).take(32)
    join = tf.autograph.experimental.do_not_convert(lambda left, right: left + right)
    text = lines.reduce(tf.constant(b""), join)
    num_bytes = _SEED_BYTES * _FOLDS
    enough = tf.debugging.assert_greater_equal(
        tf.strings.length(text), num_bytes, message="/dev/urandom gave too few bytes for a seed."
    )
    with tf.control_dependencies([enough]):
        words = tf.io.decode_raw(tf.strings.substr(text, 0, num_bytes), tf.int64)
    seed, *others = tf.unstack(tf.reshape(words, [_FOLDS, 2]))
    for other in others:
        seed = tf.bitwise.bitwise_xor(seed, other)
    return seed


def root_seed(deterministic_seed: int | None) -> tf.Tensor:
    """Returns the root seed of a run: from the operating system, or the given one.

    Args:
      deterministic_seed: Seed of the run, an integer in [0, 2^128); from the operating
        system if None. A run with a known seed is not private.

    Returns:
      int64 tensor of shape [2].

    Raises:
      ValueError: If `deterministic_seed` is out of range.
    """
    deterministic_seed = validation.seed("deterministic_seed", deterministic_seed)
    if deterministic_seed is None:
        return root_seed_from_os()
    words = [deterministic_seed % _WORD, deterministic_seed // _WORD]
    return tf.bitcast(tf.constant(words, tf.uint64), tf.int64)


def derive(seed: tf.Tensor, index: tf.Tensor | int) -> tf.Tensor:
    """Derives the sub-seed number `index` of a seed.

    It is one block of Philox-4x32. Its key and upper counter word are a bijection of
    `seed`, its lower counter word is `index`: all 128 bits of the seed count, and
    different indices never collide. A seed serves either to derive sub-seeds or to
    draw, never both.

    Args:
      seed: Parent seed, int64 tensor of shape [2].
      index: Number of the sub-seed, an integer scalar that is not negative.

    Returns:
      int64 tensor of shape [2].
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter = tf.stack([tf.cast(index, tf.uint64), counter[1]])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2], key=key, counter=counter, alg=PHILOX, dtype=tf.int64
    )
