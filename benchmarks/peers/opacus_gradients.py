"""Clipped gradients of Opacus, for `benchmarks/finetuning_peers.py` (see README.md).

    python opacus_gradients.py GRADIENTS.npz

"hooks" forms the gradients of all rows; "ghost" takes their norms without forming them, and goes
back a second time; "fast" forms them layer by layer, and goes back a second time. The plain
gradient of the LSTM is that of PyTorch's own layer, which Opacus replaces by `DPLSTM`.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings

import numpy as np
import round_server
import torch
import workload as workload_lib
from opacus import grad_sample, layers, optimizers
from opacus.utils import fast_gradient_clipping_utils
from torch import nn

warnings.filterwarnings("ignore")


class Transformer(nn.Module):
    """`tff_dpftrl_gradients.UntiedTransformer`; parts have the names of its weights."""

    def __init__(
        self,
        vocabulary_size,
        sequence_length,
        embedding_size,
        num_layers,
        num_heads,
        feed_forward_size,
    ):
        """Makes the layers."""
        super().__init__()
        self._heads, size = num_heads, embedding_size
        self._blocks = [f"layer_{layer}_" for layer in range(num_layers)]
        self.embedding = nn.Embedding(vocabulary_size, size)
        self.position_embedding = nn.Embedding(sequence_length, size)
        for block in self._blocks:
            for name, module in {
                "attention_norm": nn.LayerNorm(size),
                "query_key_value": nn.Linear(size, 3 * size, bias=False),
                "attention_output": nn.Linear(size, size, bias=False),
                "feed_forward_norm": nn.LayerNorm(size),
                "feed_forward": nn.Linear(size, feed_forward_size),
                "feed_forward_output": nn.Linear(feed_forward_size, size),
            }.items():
                self.add_module(block + name, module)
        self.output_norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, vocabulary_size)

    def forward(self, words):
        """Scores, shape [rows, T, V]."""
        rows, length = words.shape
        positions = torch.arange(length).repeat(rows, 1)
        states = self.embedding(words) + self.position_embedding(positions)
        for block in self._blocks:
            own = {k.removeprefix(block): v for k, v in self.named_children()}
            projected = own["query_key_value"](own["attention_norm"](states))
            projected = projected.reshape(rows, length, 3, self._heads, -1)
            mixed = nn.functional.scaled_dot_product_attention(
                *projected.permute(2, 0, 3, 1, 4), is_causal=True
            )
            mixed = mixed.transpose(1, 2).reshape(rows, length, -1)
            states = states + own["attention_output"](mixed)
            inner = nn.functional.gelu(own["feed_forward"](own["feed_forward_norm"](states)))
            states = states + own["feed_forward_output"](inner)
        return self.output(self.output_norm(states))


class WordLstm(nn.Module):
    """`WordLstm` with two embeddings."""

    def __init__(self, layer, *, vocabulary_size, embedding_size, state_size, **_):
        """Makes the layers; `layer` is the LSTM's class."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.lstm = layer(embedding_size, state_size, batch_first=True)
        self.projection = nn.Linear(state_size, embedding_size, bias=False)
        self.output = nn.Linear(embedding_size, vocabulary_size)

    def forward(self, words):
        """Scores, shape [rows, T, V]."""
        return self.output(self.projection(self.lstm(self.embedding(words))[0]))


def _gates(weight: np.ndarray) -> np.ndarray:
    """From forget, input, output, new to PyTorch's order of gates, and back, in the last axis."""
    forget, enter, leave, new = np.split(weight, 4, axis=-1)
    return np.concatenate([enter, forget, new, leave], axis=-1)


def _gates_back(weight: np.ndarray) -> np.ndarray:
    enter, forget, new, leave = np.split(weight, 4, axis=-1)
    return np.concatenate([forget, enter, leave, new], axis=-1)


_LSTM = {
    "input_kernel": "lstm.weight_ih_l0",
    "recurrent_kernel": "lstm.weight_hh_l0",
    "gate_bias": "lstm.bias_ih_l0",
}


def _theirs(name: str) -> tuple[str, bool]:
    """Name of a weight in PyTorch, and whether it is transposed there."""
    if name in _LSTM:
        return _LSTM[name], True
    if name == "output_embedding":
        return "output.weight", False
    if name.endswith("_kernel"):
        return name.removesuffix("_kernel") + ".weight", True
    if name.endswith("_scale"):
        return name.removesuffix("_scale") + ".weight", False
    if name.endswith("_bias"):
        return name.removesuffix("_bias") + ".bias", False
    return name + ".weight", name == "projection"


def _module(work: workload_lib.Gradients, lstm: type[nn.Module]) -> nn.Module:
    """The model with the workload's weights."""
    if work.model == "transformer":
        module = Transformer(**work.sizes)
    else:
        module = WordLstm(lstm, **work.sizes)
        # One bias, as in the other frameworks; that of the recurrent part stays 0.
        dict(module.named_parameters())["lstm.bias_hh_l0"].requires_grad_(False).zero_()
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in work.weights.items():
            target, transposed = _theirs(name)
            weight = _gates(weight) if name in _LSTM else weight
            parameters[target].copy_(torch.tensor(weight.T if transposed else weight))
    return module.train()


def _in_our_order(
    gradients: dict[str, torch.Tensor], work: workload_lib.Gradients
) -> list[np.ndarray]:
    """Gradients in the order and layout of the workload's weights."""
    ordered = []
    for name in work.weights:
        target, transposed = _theirs(name)
        gradient = gradients[target].numpy()
        gradient = gradient.T if transposed else gradient
        ordered.append(_gates_back(gradient) if name in _LSTM else gradient)
    return ordered


def _losses(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of each row."""
    losses = nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    return losses.mean(dim=1)


def _mean(module, words, targets):
    def run():
        module.zero_grad()
        _losses(module(words), targets).mean().backward()
        return {name: p.grad for name, p in module.named_parameters()}

    return run


def _optimizer(kind, module, clip_norm):
    """Makes an optimizer of Opacus, which only clips and sums here."""
    return kind(
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=None,
        loss_reduction="sum",
    )


def _hooks(module, words, targets, clip_norm):
    wrapped = grad_sample.GradSampleModule(module, loss_reduction="sum")
    optimizer = _optimizer(optimizers.DPOptimizer, module, clip_norm)

    def run():
        optimizer.zero_grad()
        _losses(wrapped(words), targets).sum().backward()
        optimizer.clip_and_accumulate()
        return {name: getattr(p, "summed_grad", None) for name, p in module.named_parameters()}

    return run


def _in_two_passes(module, words, targets, clip_norm, *, use_ghost_clipping):
    wrapped = grad_sample.GradSampleModuleFastGradientClipping(
        module,
        loss_reduction="sum",
        max_grad_norm=clip_norm,
        use_ghost_clipping=use_ghost_clipping,
    )
    optimizer = _optimizer(optimizers.DPOptimizerFastGradientClipping, module, clip_norm)

    def run():
        optimizer.zero_grad()
        fast_gradient_clipping_utils.DPTensorFastGradientClipping(
            wrapped, optimizer, _losses(wrapped(words), targets), "sum"
        ).backward()
        return {name: p.grad for name, p in module.named_parameters()}

    return run


def main() -> None:
    """Loads the workload and serves gradients, one way for each round index."""
    work = workload_lib.load_gradients(sys.argv[1])
    words, targets = (
        torch.tensor(x, dtype=torch.long) for x in (work.rows[:, :-1], work.rows[:, 1:])
    )
    data = words, targets
    functions = {"PyTorch, plain": _mean(_module(work, nn.LSTM), *data)}
    if not work.is_large:
        hooks = _hooks(_module(work, layers.DPLSTM), *data, work.clip_norm)
        functions["Opacus, hooks"] = hooks
    for name, ghost in {"ghost": True, "fast": False}.items():
        module = _module(work, layers.DPLSTM)
        functions[f"Opacus, {name}"] = _in_two_passes(
            module, *data, work.clip_norm, use_ghost_clipping=ghost
        )

    def way(function):
        return lambda: _in_our_order(function(), work)

    speeds = workload_lib.product_speeds(torch.tensor, torch.matmul)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "opacus")}
    ways = {name: way(function) for name, function in functions.items()}
    round_server.serve_ways(ways, speeds={"PyTorch": speeds}, versions=versions)


if __name__ == "__main__":
    main()
