"""Memory of draws between the rounds of a compiled process: the same noise, made in less time.

A draw is a function of its seed. The memory has rows, each with the seed of a draw and the draw
itself. A call with a slot (`private_round.repeated_draws`) takes its row if the seed is the one
asked for, and else makes the draw and writes the row. So the noise has the same bits with a memory
of any size, from any state, whichever rounds were run before, and in several threads.

The memory is no part of a state: it is in this process only, secret like the state that it is
made of, and a resumed run fills it again in its first rounds.
"""

from __future__ import annotations

import itertools
import os
import weakref

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import graph_function
from tff_dpftrl.private_round import gaussians, repeated_draws, secure_calls, seeds

_DEFAULT_BYTES = 320 << 20  # All 20 copies of a model of 4 million weights over 2,000 rounds.
_COUNTER = itertools.count()
_CPU = "/CPU:0"
_STATEFUL = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessCase": "Case",
    "StatelessIf": "If",
    "StatelessWhile": "While",
}


class DrawMemory:
    """Memory of the draws of one graph, which is freed with this object."""

    def __init__(self, memory_copies: int | None = None):
        """Initialises the memory, of at most `memory_copies` draws of the size of the model.

        As many are kept as fit into 320 MiB if it is None.
        """
        if memory_copies is not None:
            validation.integer("memory_copies", memory_copies, minimum=0)
        self._most_copies = memory_copies
        self.num_copies = 0
        """Number of draws of the size of the model that are kept."""

    def attach(self, graph_def: tf.compat.v1.GraphDef) -> None:
        """Allocates the memory that a graph can use, and changes the graph to use it."""
        names = [function.signature.name for function in graph_def.library.function]
        kinds = {name: kind for name in names if (kind := repeated_draws.kind_of(name))}
        if not kinds:
            return
        copies = self._most_copies
        if copies is None:
            copies = _DEFAULT_BYTES // sum(k.size * _dtype(k).size for k in kinds.values())
        self.num_copies = min(copies, max(kind.num_slots for kind in kinds.values()))
        if self.num_copies:
            _call_instead(graph_def, {name: self._keeper(kind) for name, kind in kinds.items()})

    def _keeper(self, kind: repeated_draws.TensorDraws) -> tf.types.experimental.ConcreteFunction:
        """Allocates the rows of a tensor, and traces the function that draws with them."""
        num_rows, length = min(self.num_copies, kind.num_slots), _row_length(kind)
        dtype = _dtype(kind)

        # TensorFlow frees a variable of this name when it is told to, and not before.
        name = f"repeated_draws_{os.getpid()}_{next(_COUNTER)}"

        def rows() -> tf.Tensor:
            return tf.raw_ops.VarHandleOp(dtype=dtype, shape=[num_rows, length], shared_name=name)

        with tf.init_scope(), tf.device(_CPU):
            tf.raw_ops.AssignVariableOp(resource=rows(), value=tf.zeros([num_rows, length], dtype))
            freed = weakref.finalize(self, _free, rows())
        freed.atexit = False

        def draw(seed: tf.Tensor, slot: tf.Tensor) -> tf.Tensor:
            with tf.device(_CPU):
                handle = rows()
                return tf.cond(
                    slot < num_rows,
                    lambda: _kept(handle, seed, slot, kind),
                    lambda: gaussians.repeated(seed, kind.size),
                )

        specs = [tf.TensorSpec([kind.seed_length], tf.int64), tf.TensorSpec([], tf.int64)]
        return tf.function(draw, input_signature=specs, autograph=False).get_concrete_function()


def _free(handle: tf.Tensor) -> None:
    # The garbage collector may come while this thread builds a graph, which is not to do it.
    with tf.__internal__.eager_context.eager_mode():
        tf.raw_ops.DestroyResourceOp(resource=handle)


def _dtype(kind: repeated_draws.TensorDraws) -> tf.DType:
    return tf.float32 if kind.seed_length == seeds.PHILOX_WORDS else secure_calls.DTYPE


def _row_length(kind: repeated_draws.TensorDraws) -> int:
    return kind.size + kind.seed_length * tf.int64.size // _dtype(kind).size


def _kept(
    handle: tf.Tensor, seed: tf.Tensor, slot: tf.Tensor, kind: repeated_draws.TensorDraws
) -> tf.Tensor:
    """Returns a draw of the row of a slot, which has it then if it did not before."""
    # Seed and draw are read at once, and written at once: no other thread comes between. To write,
    # `ResourceScatterUpdate` has a lock of its own in some versions of TensorFlow only.
    size, dtype = kind.size, _dtype(kind)
    row = tf.raw_ops.ResourceGather(resource=handle, indices=slot, dtype=dtype)
    row = tf.ensure_shape(row, [_row_length(kind)])

    def make() -> tf.Tensor:
        drawn = gaussians.repeated(seed, size)
        new = tf.concat([drawn, tf.reshape(tf.bitcast(seed, dtype), [-1])], axis=0)
        write = tf.raw_ops.ResourceScatterNdUpdate(ref=handle, indices=[[slot]], updates=new[None])
        with tf.control_dependencies([write]):
            return tf.identity(drawn)

    kept_seed = row[size:] if dtype.size == tf.int64.size else tf.reshape(row[size:], [-1, 2])
    kept_seed = tf.bitcast(kept_seed, tf.int64)
    return tf.cond(tf.reduce_all(tf.equal(kept_seed, seed)), lambda: row[:size], make)


def _call_instead(
    graph_def: tf.compat.v1.GraphDef,
    replacements: dict[str, tf.types.experimental.ConcreteFunction],
) -> None:
    """Calls other functions, with effects, in place of some functions of a graph."""
    library = graph_def.library
    for concrete in replacements.values():
        library.function.append(concrete.function_def)
        library.function.extend(concrete.graph.as_graph_def().library.function)
    new_names = {old: new.function_def.signature.name for old, new in replacements.items()}
    for node in graph_function.nodes_of(graph_def):
        for function in graph_function.called_by(node):
            function.name = new_names.get(function.name, function.name)
    # Whatever calls a function with effects has effects.
    bodies = [(None, graph_def.node), *((f.signature, f.node_def) for f in library.function)]
    with_effects, num_before = set(new_names.values()), -1
    while len(with_effects) > num_before:
        num_before = len(with_effects)
        for signature, nodes in bodies:
            for node in nodes:
                called = {function.name for function in graph_function.called_by(node)}
                if called & with_effects:
                    node.op = _STATEFUL.get(node.op, node.op)
                    if signature is not None:
                        signature.is_stateful = True
                        with_effects.add(signature.name)
