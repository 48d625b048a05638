"""Rounds of DP-FedAvg with pfl-research (PyTorch), for `benchmarks/rounds.py` (see README.md).

    python pfl_rounds.py WORKLOAD.npz [--threads 1]

The model is `tff_dpftrl.models.word_lstm.WordLstm` with one embedding for input and output,
as a `torch.nn.LSTM`; the rounds are those of pfl's own `FederatedAveraging`, in one process.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
import pfl
import round_server
import torch
import workload as workload_lib
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

_FOREVER = 10**9


class WordLstm(torch.nn.Module):
    """Embedding, LSTM, projection, scores against the same embedding; words come first."""

    def __init__(self, weights):
        super().__init__()
        embedding, input_kernel, recurrent_kernel, gate_bias, projection, output_bias = weights
        self.embedding = torch.nn.Parameter(torch.tensor(embedding))
        self.lstm = torch.nn.LSTM(embedding.shape[1], projection.shape[0], batch_first=True)
        self.projection = torch.nn.Parameter(torch.tensor(projection))
        self.output_bias = torch.nn.Parameter(torch.tensor(output_bias))
        with torch.no_grad():
            self.lstm.weight_ih_l0.copy_(_torch_gates(input_kernel))
            self.lstm.weight_hh_l0.copy_(_torch_gates(recurrent_kernel))
            self.lstm.bias_ih_l0.copy_(_torch_gates(gate_bias))
            self.lstm.bias_hh_l0.zero_()
        self.lstm.bias_hh_l0.requires_grad_(False)  # One bias is enough.

    def loss(self, words, targets):
        """Mean cross-entropy of the targets; padding is left out before the largest product."""
        states, _ = self.lstm(torch.nn.functional.embedding(words, self.embedding))
        is_target = (words != 0) & (targets != 0)
        scores = states[is_target] @ self.projection @ self.embedding.T + self.output_bias
        return torch.nn.functional.cross_entropy(scores, targets[is_target])

    def metrics(self, words, targets):
        """None: pfl wants the function, and the benchmark no evaluation."""
        del words, targets
        return {}

    def weights(self) -> list[np.ndarray]:
        """The weights in the order, and the layout, of `WordLstm.weight_shapes`."""
        lstm = self.lstm
        gates = (lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0)
        return [
            self.embedding.detach().numpy(),
            *(_our_gates(g.detach().numpy()) for g in gates),
            self.projection.detach().numpy(),
            self.output_bias.detach().numpy(),
        ]


def _torch_gates(kernel: np.ndarray) -> torch.Tensor:
    """Our columns are forget, enter, leave, new; PyTorch's rows enter, forget, new, leave."""
    forget, enter, leave, new = np.split(kernel, 4, axis=-1)
    return torch.tensor(np.concatenate([enter, forget, new, leave], axis=-1).T.copy())


def _our_gates(kernel: np.ndarray) -> np.ndarray:
    enter, forget, new, leave = np.split(kernel.T, 4, axis=-1)
    return np.concatenate([forget, enter, leave, new], axis=-1)


class _Rounds(TrainingProcessCallback):
    """Holds `FederatedAveraging.run` between two rounds until the next one is asked for."""

    def __init__(self, rounds: Iterator[int]):
        self._rounds = rounds
        self.cohort: int | None = None

    def on_train_begin(self, *, model) -> Metrics:
        del model
        self.cohort = next(self._rounds, None)
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        del aggregate_metrics, model, central_iteration
        self.cohort = next(self._rounds, None)
        return self.cohort is None, Metrics()


def main() -> None:
    """Loads the workload and serves rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--threads", type=int, help="of PyTorch; one for each core if not given")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    work = workload_lib.load(args.workload)
    module = WordLstm(work.weights)
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(
            [w for w in module.parameters() if w.requires_grad],
            lr=work.server_learning_rate,
            momentum=work.server_momentum,
        ),
    )
    cohorts = [[torch.tensor(rows, dtype=torch.int64) for rows in c] for c in work.cohorts]
    rounds = _Rounds(
        round_server.rounds(module.weights, pfl=pfl.__version__, torch=torch.__version__)
    )
    clients = itertools.cycle(range(len(cohorts[0])))

    def user_dataset(client: int) -> PyTorchTensorDataset:
        sequences = cohorts[rounds.cohort][client]
        return PyTorchTensorDataset((sequences[:, :-1], sequences[:, 1:]))

    data = FederatedDataset(user_dataset, lambda: next(clients))
    mechanism = GaussianMechanism(work.clip_norm, work.noise_multiplier)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=_FOREVER,
            evaluation_frequency=_FOREVER,
            train_cohort_size=len(cohorts[0]),
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, [CentrallyAppliedPrivacyMechanism(mechanism)]),
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.client_learning_rate,
            local_batch_size=work.batch_size,
        ),
        callbacks=[rounds],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
