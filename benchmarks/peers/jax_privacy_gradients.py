"""Clipped gradients of jax_privacy, for `benchmarks/finetuning_peers.py` (see README.md).

    python jax_privacy_gradients.py GRADIENTS.npz

`clipping.clipped_grad` takes the gradients of as many rows at a time as its argument
`microbatch_size` says, one microbatch after the other.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import round_server
import workload as workload_lib
from jax_privacy import clipping

_MICROBATCHES = (1, 2, 8, None)
"""Rows; None stands for all."""


def _norm(inputs, scale, bias):
    centred = inputs - inputs.mean(-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def transformer_scores(w, words, *, num_layers, num_heads, **_):
    """Scores of `tff_dpftrl_gradients.UntiedTransformer`, shape [rows, T, V]."""
    states = w["embedding"][words] + w["position_embedding"]
    rows, length, size = states.shape
    ahead = jnp.triu(jnp.full([length, length], -1e9), k=1)
    for layer in range(num_layers):
        own = {k.removeprefix(f"layer_{layer}_"): v for k, v in w.items()}
        inputs = _norm(states, own["attention_norm_scale"], own["attention_norm_bias"])
        projected = inputs @ own["query_key_value_kernel"]
        projected = projected.reshape(rows, length, 3, num_heads, -1)
        query, key, value = projected.transpose(2, 0, 3, 1, 4)
        shares = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1]) + ahead
        mixed = (jax.nn.softmax(shares) @ value).transpose(0, 2, 1, 3).reshape(rows, length, size)
        states += mixed @ own["attention_output_kernel"]
        inputs = _norm(states, own["feed_forward_norm_scale"], own["feed_forward_norm_bias"])
        inner = inputs @ own["feed_forward_kernel"] + own["feed_forward_bias"]
        inner = jax.nn.gelu(inner, approximate=False)
        states += inner @ own["feed_forward_output_kernel"] + own["feed_forward_output_bias"]
    outputs = _norm(states, w["output_norm_scale"], w["output_norm_bias"])
    return outputs @ w["output_embedding"].T + w["output_bias"]


def lstm_scores(w, words, **_):
    """Scores of `WordLstm` with two embeddings, shape [T, rows, V]."""
    gates = w["embedding"][words.T] @ w["input_kernel"] + w["gate_bias"]

    def cell(carry, gate_inputs):
        hidden, memory = carry
        gate_inputs += hidden @ w["recurrent_kernel"]
        forget, enter, leave, new = jnp.split(gate_inputs, 4, axis=1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (hidden, memory), hidden

    zeros = jnp.zeros([words.shape[0], w["recurrent_kernel"].shape[0]])
    _, states = jax.lax.scan(cell, (zeros, zeros), gates, unroll=words.shape[1])
    return (states @ w["projection"] @ w["output_embedding"].T + w["output_bias"]).swapaxes(0, 1)


_SCORES = {"transformer": transformer_scores, "word-lstm": lstm_scores}


def main() -> None:
    """Loads the workload and serves gradients, one way for each round index."""
    work = workload_lib.load_gradients(sys.argv[1])
    weights = {name: jnp.asarray(weight) for name, weight in work.weights.items()}

    def loss(weights, rows):
        scores, targets = _SCORES[work.model](weights, rows[:, :-1], **work.sizes), rows[:, 1:]
        own = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.scipy.special.logsumexp(scores, axis=-1) - own)

    def clipped(microbatch):
        return jax.jit(
            clipping.clipped_grad(loss, l2_clip_norm=work.clip_norm, microbatch_size=microbatch)
        )

    functions = {"JAX, plain": jax.jit(jax.grad(loss))}
    functions |= {
        f"jax_privacy, {'all rows' if size is None else size} at a time": clipped(size)
        for size in _MICROBATCHES[: 2 if work.is_large else None]
    }

    def way(function):
        def run():
            gradients = function(weights, jnp.asarray(work.rows))
            return [np.asarray(gradients[name]) for name in weights]

        return run

    product = jax.jit(jnp.matmul)
    speeds = workload_lib.product_speeds(
        jnp.asarray, lambda a, b: product(a, b).block_until_ready()
    )
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jax_privacy")}
    ways = {name: way(function) for name, function in functions.items()}
    round_server.serve_ways(ways, speeds={"JAX": speeds}, versions=versions)


if __name__ == "__main__":
    main()
