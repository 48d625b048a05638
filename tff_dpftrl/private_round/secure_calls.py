"""Draws of the cryptographic stream: a call in the graph that Python answers.

TensorFlow has no AES. A graph that stays in this process calls Python for its draws. A graph for
others, a TFF computation or a signed plan, has calls of a function instead that says that nobody
answers: no other noise takes their place. An engine that runs such a graph, a compiled process or
a server of tasks, puts `answered` in the place of those functions, which `size_of` finds.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tff_dpftrl.numpy_noise import secure_draws
from tff_dpftrl.private_round import seeds

DTYPE = tf.float64
"""Dtype of secure draws, and of the noise that is made of them."""

_NAME = "secure_draw_path_{}_size_{}_end"
_PATTERN = re.compile(_NAME.format(r"(\d+)", r"(\d+)"))
_UNANSWERED = (
    "Secure noise is drawn by compiled processes and by servers of tasks: TensorFlow Federated's "
    "own executor cannot draw it. Take noise 'philox' there."
)
_FOR_OTHERS = contextvars.ContextVar("graphs_for_others", default=False)


@contextlib.contextmanager
def graphs_for_others() -> Iterator[None]:
    """Leaves secure draws open in the graphs that are traced inside, as in those of TFF."""
    token = _FOR_OTHERS.set(True)
    try:
        yield
    finally:
        _FOR_OTHERS.reset(token)


def is_for_others() -> bool:
    """Checks whether a graph is traced here that another engine runs."""
    with tf.init_scope():
        return not tf.executing_eagerly() or _FOR_OTHERS.get()


def normal(seed: tf.Tensor, size: int, scale: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Draws independent Gaussians, rounded to multiples of `secure_draws.STEP`.

    `scale` is their standard deviation before they are rounded.
    """
    build = _unanswered if is_for_others() else answered
    return build(seed.shape[0] or 0, size)(seed, tf.convert_to_tensor(scale, DTYPE))


@functools.cache
def answered(path_length: int, size: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the function that draws by Python, traced once in this process.

    It takes the seed with the indices of the draw, int64, and a scale, float64.
    """

    def draw(seed: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        python = functools.partial(_draw, size=size)
        drawn = tf.numpy_function(python, [seed, scale], DTYPE)
        return tf.ensure_shape(drawn, [size])

    with tf.init_scope():
        return _function(draw, path_length).get_concrete_function()


def _unanswered(path_length: int, size: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    def draw(seed: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        del seed, scale  # A message with the seed in it would reach logs.
        name = _NAME.format(path_length, size)
        never = tf.raw_ops.Assert(condition=False, data=[_UNANSWERED], name=name)
        with tf.control_dependencies([never]):
            return tf.zeros([size], DTYPE)

    return _function(draw, path_length)


def _function(draw: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], path_length: int):
    signature = [tf.TensorSpec([path_length], tf.int64), tf.TensorSpec([], DTYPE)]
    return tf.function(draw, input_signature=signature, autograph=False)


def size_of(node_name: str) -> tuple[int, int] | None:
    """Reads the arguments of `answered` from a node's name; None if it is no unanswered draw."""
    found = _PATTERN.search(node_name)
    return (int(found[1]), int(found[2])) if found else None


def _draw(path: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    seed, indices = path[: seeds.SECURE_WORDS], path[seeds.SECURE_WORDS :]
    root = seed.astype("<i8").tobytes()
    return secure_draws.normal(root, indices.tolist(), size, float(scale))
