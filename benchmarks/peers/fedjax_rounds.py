"""Rounds of DP-FedAvg with FedJAX, for `benchmarks/rounds.py` (see README.md).

    python fedjax_rounds.py WORKLOAD.npz [--unroll 20]

The model is `tff_dpftrl.models.word_lstm.WordLstm` with one embedding for input and output;
the clients run in `fedjax.for_each_client`, the way FedJAX's own algorithms are written, with
its backend for one device.
"""

from __future__ import annotations

import argparse

import fedjax
import jax
import jax.numpy as jnp
import round_server
import workload as workload_lib


def main() -> None:
    """Loads the workload and serves rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--unroll", type=int, default=20, help="steps of the LSTM in one of a loop")
    args = parser.parse_args()
    work = workload_lib.load(args.workload)
    cohorts = [
        [fedjax.ClientDataset({"x": rows[:, :-1], "y": rows[:, 1:]}) for rows in cohort]
        for cohort in work.cohorts
    ]

    def loss(weights, batch):
        embedding, input_kernel, recurrent_kernel, gate_bias, projection, output_bias = weights
        words, targets = batch["x"], batch["y"]
        gates = embedding[words.T] @ input_kernel + gate_bias

        def cell(carry, gate_inputs):
            hidden, memory = carry
            gate_inputs += hidden @ recurrent_kernel
            forget, enter, leave, new = jnp.split(gate_inputs, 4, axis=1)
            memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros([words.shape[0], recurrent_kernel.shape[0]])
        _, states = jax.lax.scan(cell, (zeros, zeros), gates, unroll=args.unroll)
        scores = states @ projection @ embedding.T + output_bias
        own = jnp.take_along_axis(scores, targets.T[..., None], axis=-1)[..., 0]
        losses = jax.scipy.special.logsumexp(scores, axis=-1) - own
        is_target = (words.T != 0) & (targets.T != 0)
        total = jnp.sum(jnp.where(is_target, losses, 0.0))
        return total / jnp.maximum(jnp.sum(is_target), 1)

    def client_init(weights, _):
        return weights

    def client_step(weights, batch):
        gradients = jax.grad(loss)(weights, batch)
        return jax.tree_util.tree_map(
            lambda w, g: w - work.client_learning_rate * g, weights, gradients
        )

    def client_final(old, new):
        update = jax.tree_util.tree_map(jnp.subtract, new, old)
        return fedjax.tree_util.tree_clip_by_global_norm(update, work.clip_norm)

    @jax.jit
    def server(weights, velocity, total, key, num_clients):
        keys = jax.random.split(key, len(total) + 1)
        noised = [
            (t + work.noise_multiplier * work.clip_norm * jax.random.normal(k, t.shape))
            / num_clients
            for t, k in zip(total, keys[1:], strict=True)
        ]
        velocity = [work.server_momentum * v + n for v, n in zip(velocity, noised, strict=True)]
        weights = [
            w + work.server_learning_rate * v for w, v in zip(weights, velocity, strict=True)
        ]
        return weights, velocity, keys[0]

    run_clients = fedjax.for_each_client(client_init, client_step, client_final)
    initial = [jnp.asarray(weight) for weight in work.weights]
    state = {
        "weights": initial,
        "velocity": [jnp.zeros_like(w) for w in initial],
        "key": jax.random.PRNGKey(work.seed),
    }

    for index in round_server.rounds(lambda: state["weights"], jax=jax.__version__):
        clients = [
            (i, data.batch(batch_size=work.batch_size), jnp.zeros([]))
            for i, data in enumerate(cohorts[index])
        ]
        total = None
        for _, update in run_clients(state["weights"], clients):
            total = update if total is None else fedjax.tree_util.tree_add(total, update)
        state["weights"], state["velocity"], state["key"] = server(
            state["weights"], state["velocity"], total, state["key"], len(clients)
        )
        jax.block_until_ready(state["weights"])


if __name__ == "__main__":
    main()
