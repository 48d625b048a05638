"""Layers with written-out gradients, which cost little more than their matrix products.

TensorFlow's own gradient of an unrolled LSTM makes a gradient as large as the recurrent
kernel at every step and adds them up, and its gradient of a table that is looked up and
multiplied with copies the table. That took as long as the products themselves. All
operations here can be vectorised by `tf.vectorized_map`. Derivatives are the first only.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_LANES = 16  # Numbers in the widest vector of a CPU.


def lookup(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table; the gradient is dense.

    Args:
      table: Floating, shape [V, E], with V known when the graph is made.
      ids: Rows to return, integer, any shape.

    Returns:
      The rows, of `table`'s dtype, shape [..., E].
    """

    @tf.custom_gradient
    def run(table):
        def gradient(rows):
            return tf.math.unsorted_segment_sum(rows, ids, table.shape[0])

        return tf.gather(table, ids), gradient

    return run(table)


def lstm(
    gate_inputs: tf.Tensor, recurrent_kernel: tf.Tensor, *, couple_gates: bool = False
) -> tf.Tensor:
    """Runs a layer of LSTM (Hochreiter and Schmidhuber 1997) from a state of zeros.

    The gates lie side by side: forget, input and output gate, and the new value. Coupled
    gates (CIFG, Greff et al. 2017) come without the forget gate, which is one minus the
    input gate.

    Args:
      gate_inputs: What inputs and biases add to each gate, floating, shape [T, batch,
        4 · H], or [T, batch, 3 · H] with coupled gates. The layer is unrolled: T must be
        known when the graph is made.
      recurrent_kernel: What the hidden state is multiplied with, shape [H, 4 · H] or
        [H, 3 · H].
      couple_gates: Whether gates are coupled.

    Returns:
      The hidden state after each step, of the same dtype, shape [T, batch, H].
    """
    num_steps, size = gate_inputs.shape[0], recurrent_kernel.shape[0]

    @tf.custom_gradient
    def run(gate_inputs, recurrent_kernel):
        hidden = cell = None
        steps = []
        for inputs in tf.unstack(gate_inputs, num=num_steps):
            if hidden is not None:
                inputs += tf.matmul(hidden, recurrent_kernel)
            gates, new = tf.split(inputs, [inputs.shape[1] - size, size], axis=1)
            gates, new = tf.sigmoid(gates), tf.tanh(new)
            keep, enter, leave = _keep_enter_leave(gates, couple_gates)
            cell = enter * new if cell is None else keep * cell + enter * new
            squashed = tf.tanh(cell)
            hidden = leave * squashed
            steps.append((gates, new, cell, squashed, hidden))
        *trace, hidden = (tf.stack(values) for values in zip(*steps, strict=True))

        def gradient(hidden_gradients):
            gate_gradients = _backward(trace, hidden_gradients, recurrent_kernel, couple_gates)
            # All steps at once; the first had no hidden state before it.
            before = tf.reshape(hidden[:-1], [-1, size])
            after = tf.reshape(gate_gradients[1:], [-1, recurrent_kernel.shape[1]])
            return gate_gradients, tf.matmul(before, after, transpose_a=True)

        return hidden, gradient

    return run(gate_inputs, recurrent_kernel)


def _keep_enter_leave(gates: tf.Tensor, couple_gates: bool) -> Sequence[tf.Tensor]:
    """Splits the last axis: shares of the cell kept, of the new value, and put out."""
    if couple_gates:
        enter, leave = tf.split(gates, 2, axis=-1)
        return 1.0 - enter, enter, leave
    return tf.split(gates, 3, axis=-1)


def _backward(
    trace: Sequence[tf.Tensor],
    hidden_gradients: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    couple_gates: bool,
) -> tf.Tensor:
    """Goes back through time: gradients of the gates before their non-linearities."""
    gates, new, cell, squashed = trace
    num_steps = gates.shape[0]
    keep, enter, leave = _keep_enter_leave(gates, couple_gates)
    previous = tf.concat([tf.zeros_like(cell[:1]), cell[:-1]], axis=0)
    # Whatever needs no gradient from later steps is computed for all steps at once: the
    # derivatives by the gates, of the hidden state for the output gate, else of the cell.
    inner = [new - previous, squashed] if couple_gates else [previous, new, squashed]
    by_sigmoids = tf.concat(inner, axis=2) * gates * (1.0 - gates)
    by_gates = tf.concat([by_sigmoids, enter * (1.0 - tf.square(new))], axis=2)
    hidden_by_cell = leave * (1.0 - tf.square(squashed))
    transposed = _transposed(recurrent_kernel)
    per_step = [hidden_gradients, by_gates, hidden_by_cell, keep]
    per_step = zip(*(tf.unstack(values, num=num_steps) for values in per_step), strict=True)
    gate_gradients = []
    gate_gradient = cell_gradient = None
    for hidden_gradient, by_gate, by_cell, kept in reversed(list(per_step)):
        if gate_gradient is None:
            cell_gradient = hidden_gradient * by_cell
        else:
            hidden_gradient += tf.matmul(gate_gradient, transposed)[:, : new.shape[2]]
            cell_gradient += hidden_gradient * by_cell
        outer = [cell_gradient, hidden_gradient, cell_gradient]
        outer = outer if couple_gates else [cell_gradient, *outer]
        gate_gradient = tf.concat(outer, axis=1) * by_gate
        gate_gradients.append(gate_gradient)
        cell_gradient *= kept
    return tf.stack(gate_gradients[::-1])


def _transposed(recurrent_kernel: tf.Tensor) -> tf.Tensor:
    """Transposes the kernel once for all steps: [gates · H, H], and columns of zeros.

    Products with a matrix that each of them transposes take three times as long on a CPU,
    and twice as long where its rows are not whole vectors.
    """
    size, gates = recurrent_kernel.shape
    padding = -size % _LANES
    padded = tf.pad(recurrent_kernel, [[0, padding], [0, 0]])
    # In three dimensions, or TensorFlow would optimise the transposition into the products.
    transposed = tf.transpose(tf.reshape(padded, [size + padding, -1, size]), [1, 2, 0])
    return tf.reshape(transposed, [gates, size + padding])
