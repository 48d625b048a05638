"""An unrolled LSTM with written-out gradients, which cost little more than its matrix products.

TensorFlow's gradient of an unrolled LSTM makes a gradient as large as the recurrent kernel at
every step and adds them up, which took as long as the products themselves. All operations here
can be vectorised by `tf.vectorized_map`. They have first derivatives only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

_LANES = 16  # Floats in the widest vector of a CPU.


def lstm(
    gate_inputs: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    projection: tf.Tensor | None = None,
    *,
    couple_gates: bool = False,
) -> tf.Tensor:
    """Runs a layer of LSTM (Hochreiter and Schmidhuber 1997) from a state of zeros.

    The gates lie side by side: forget, input and output gate, and the new value. Coupled gates
    (CIFG, Greff et al. 2017) come without the forget gate, which is one minus the input gate. With
    a projection (Sak et al. 2014) the gates see the projected hidden state of the step before
    instead of the hidden state itself.

    `gate_inputs` are the parts of the gates from inputs and biases, shape [T, batch, 4 · H], or [T,
    batch, 3 · H] with coupled gates; T must be known when the graph is made. `recurrent_kernel` has
    shape [P, 4 · H] or [P, 3 · H], where P is H without a projection. `projection` has shape [H,
    P]. Returns the output after each step, shape [T, batch, P].
    """
    num_steps, size = gate_inputs.shape[0], gate_inputs.shape[2] // (3 if couple_gates else 4)

    @tf.custom_gradient
    def run(gate_inputs, recurrent_kernel, *projection):
        output = cell = None
        steps, hidden_states = [], []
        for inputs in tf.unstack(gate_inputs, num=num_steps):
            if output is not None:
                inputs += tf.matmul(output, recurrent_kernel)
            gates, new = tf.split(inputs, [inputs.shape[1] - size, size], axis=1)
            gates, new = tf.sigmoid(gates), tf.tanh(new)
            keep, enter, leave = _keep_enter_leave(gates, couple_gates)
            cell = enter * new if cell is None else keep * cell + enter * new
            squashed = tf.tanh(cell)
            output = hidden = leave * squashed
            for matrix in projection:  # One or none.
                hidden_states.append(hidden)
                output = tf.matmul(hidden, matrix)
            steps.append((gates, new, cell, squashed, output))
        *trace, outputs = (tf.stack(values) for values in zip(*steps, strict=True))

        def gradient(output_gradients):
            gate_gradients, output_gradients = _backward(
                trace, output_gradients, recurrent_kernel, projection, couple_gates
            )
            # All steps at once; the first had no output before it.
            gradients = [_outer(outputs[:-1], gate_gradients[1:])]
            if projection:
                gradients.append(_outer(tf.stack(hidden_states), tf.stack(output_gradients)))
            return gate_gradients, *gradients

        return outputs, gradient

    return run(gate_inputs, recurrent_kernel, *([] if projection is None else [projection]))


def _outer(inputs: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of a kernel: outer products summed over steps and batch."""
    inputs, gradients = (tf.reshape(x, [-1, x.shape[-1]]) for x in (inputs, gradients))
    return tf.matmul(inputs, gradients, transpose_a=True)


def _keep_enter_leave(gates: tf.Tensor, couple_gates: bool) -> Sequence[tf.Tensor]:
    """Splits the last axis into the forget, input and output gates."""
    if couple_gates:
        enter, leave = tf.split(gates, 2, axis=-1)
        return 1.0 - enter, enter, leave
    return tf.split(gates, 3, axis=-1)


def _backward(
    trace: Sequence[tf.Tensor],
    output_gradients: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    projection: Sequence[tf.Tensor],
    couple_gates: bool,
) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """Returns the gradients of the gates before their non-linearities, and of the outputs.

    Back-propagation through time adds the parts from later steps.
    """
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
    before_kernel = _times_transposed(recurrent_kernel)
    before_projection = [_times_transposed(matrix) for matrix in projection]
    per_step = [output_gradients, by_gates, hidden_by_cell, keep]
    per_step = zip(*(tf.unstack(values, num=num_steps) for values in per_step), strict=True)
    steps = []
    gate_gradient = cell_gradient = None
    for output_gradient, by_gate, by_cell, kept in reversed(list(per_step)):
        if gate_gradient is not None:
            output_gradient += before_kernel(gate_gradient)
        hidden_gradient = output_gradient
        for before in before_projection:
            hidden_gradient = before(output_gradient)
        through_cell = hidden_gradient * by_cell
        cell_gradient = through_cell if cell_gradient is None else cell_gradient + through_cell
        outer = [cell_gradient, hidden_gradient, cell_gradient]
        outer = outer if couple_gates else [cell_gradient, *outer]
        gate_gradient = tf.concat(outer, axis=1) * by_gate
        steps.append((gate_gradient, output_gradient))
        cell_gradient *= kept
    gate_gradients, output_gradients = zip(*reversed(steps), strict=True)
    return tf.stack(gate_gradients), output_gradients


def _times_transposed(kernel: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the product with a kernel's transpose, which is made once for all steps.

    On a CPU, products that each transpose the matrix take three times as long. They take twice
    as long where its rows are not whole vectors, so the transpose is padded with columns of
    zeros, which are cut off the products.
    """
    rows, columns = kernel.shape
    padding = -rows % _LANES
    padded = tf.pad(kernel, [[0, padding], [0, 0]])
    # In three dimensions, or TensorFlow would optimise the transposition into the products.
    transposed = tf.transpose(tf.reshape(padded, [rows + padding, -1, 1]), [1, 2, 0])
    transposed = tf.reshape(transposed, [columns, rows + padding])
    return lambda gradients: tf.matmul(gradients, transposed)[:, :rows]
