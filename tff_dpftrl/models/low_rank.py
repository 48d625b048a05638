"""Low-rank adapters of a model, of which nothing else is trained (LoRA, Hu et al. 2021).

A kernel W of shape [inputs, outputs] stays as it is, and A B · `ALPHA` / R is added to it: A
has shape [inputs, R], B [R, outputs]. There are fewer weights to train, and to add noise to. Only
kernels are adapted, as in the paper: neither embeddings nor biases and layer norms are trained. B
begins as zero, so that the model begins as the one that it adapts.

A model need not know of its adapters. It passes each result that its weights have a part in to a
`weight_uses.Recorder` and uses the value that this returns: here, with the adapters' part added.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import language_model, weight_uses

ALPHA = 32.0
"""α of the paper, with its value for GPT-2 (Table 11).

The adapters add α / R times A B. Where steps of Adam have moved B by r, the kernel is moved by
α r / √(R · inputs), root mean square: about r for ranks around four and widths of hundreds.
Learning rates are then of the same size as where all weights are trained.
"""

_A, _B = "_adapter_a", "_adapter_b"


class LowRank(language_model.LanguageModel):
    """The adapters of a model, whose scores are a function of A and B of each kernel alone."""

    def __init__(
        self,
        model: language_model.LanguageModel,
        weights: Sequence[np.ndarray],
        adapter_rank: int,
    ):
        """Keeps the weights that are not trained.

        `adapter_rank` is at most the smallest side of a kernel.
        """
        validation.integer("adapter_rank", adapter_rank, minimum=1)
        if not model.adaptable_kernels:
            raise validation.UsageError(
                f"adapter_rank={adapter_rank} is for models with kernels that can be adapted, like "
                f"the transformer, and the model is {type(model).__name__}: leave it out, which "
                "trains all weights, or take a transformer."
            )
        kernels = {name: model.weight_shapes[name] for name in model.adaptable_kernels}
        smallest = min(kernels, key=lambda name: min(kernels[name]))
        if adapter_rank > min(kernels[smallest]):
            raise validation.UsageError(
                f"adapter_rank={adapter_rank} exceeds {min(kernels[smallest])}, the smaller side "
                f"of {smallest}: lower it, or leave it out, which trains all weights."
            )
        self.model = model
        self.adapter_rank = adapter_rank
        # Tensors, since arrays would be copied into every graph that uses them.
        self._fixed = tuple(tf.constant(weight, tf.float32) for weight in weights)
        self.alpha = ALPHA
        self._scale = ALPHA / adapter_rank

    @property
    def vocabulary_size(self) -> int:
        """The vocabulary size of the model."""
        return self.model.vocabulary_size

    @property
    def sequence_length(self) -> int:
        """The sequence length of the model."""
        return self.model.sequence_length

    @property
    @override
    def reports_uses(self) -> bool:
        return True

    @property
    @override
    def compute_dtypes(self) -> Sequence[str]:
        return self.model.compute_dtypes

    @property
    @override
    def can_recompute(self) -> bool:
        return self.model.can_recompute

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """Names and shapes of the adapters, A and B of each kernel, in order."""
        shapes, rank = collections.OrderedDict(), self.adapter_rank
        for name in self.model.adaptable_kernels:
            inputs, outputs = self.model.weight_shapes[name]
            shapes[name + _A], shapes[name + _B] = (inputs, rank), (rank, outputs)
        return shapes

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Draws A, Gaussian with standard deviation 1/√(inputs), float32; B is zero."""
        rng = np.random.Generator(np.random.Philox(seed))
        return tuple(
            (
                rng.standard_normal(shape) / math.sqrt(shape[0])
                if name.endswith(_A)
                else np.zeros(shape)
            ).astype(np.float32)
            for name, shape in self.weight_shapes.items()
        )

    def pairs(self, weights: Sequence[np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns A and B of each kernel by its name; `alpha` / R · A B is added to it."""
        named = dict(zip(self.weight_shapes, weights, strict=True))
        return {name: (named[name + _A], named[name + _B]) for name in self.model.adaptable_kernels}

    def merged(self, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns float32 weights of `model` with the adapters' products added to the kernels."""
        return self._added([weight.numpy() for weight in self._fixed], weights)

    @override
    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        weights = [tf.convert_to_tensor(weight) for weight in weights]
        return self.model.logits(self._added(self._fixed, weights), words)

    def compact_logits(
        self,
        weights: Sequence[tf.Tensor],
        words: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
        **options: bool,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores without padding, from (x A) B: A B is never formed.

        Options are those of the model.
        """

        def adapted(named, outputs, *uses, order):
            for use in uses:
                a, b = use.name + _A, use.name + _B
                if a in named:
                    inner = tf.matmul(use.inputs, named[a])
                    inner = record(inner, weight_uses.Product(a, use.inputs), order=order)
                    inner *= self._scale
                    outputs += tf.matmul(inner, named[b])
                    outputs = record(outputs, weight_uses.Product(b, inner), order=order)
            return outputs

        fixed = [tf.cast(weight, weights[0].dtype) for weight in self._fixed]
        named = dict(zip(self.weight_shapes, weights, strict=True))
        recorder = weight_uses.RecorderWithWeights(adapted, named)
        return self.model.compact_logits(fixed, words, record=recorder, **options)

    def _added(self, fixed, weights):
        """Returns `fixed` plus the adapters' part; all arrays, or all tensors."""
        named = dict(zip(self.weight_shapes, weights, strict=True))
        return [
            weight + self._scale * (named[name + _A] @ named[name + _B])
            if name + _A in named
            else weight
            for name, weight in zip(self.model.weight_shapes, fixed, strict=True)
        ]
