"""TFF's federated averaging on real text: noise of this package beside TFF's own, at the same ε.

    python -m experiments.tff_demo [--seed 0]

Two programs of TensorFlow Federated that differ in one argument, `model_aggregator`. One has TFF's
Gaussian noise, the other one noise that is correlated over the rounds. Text, model, cohorts, ε and
δ are the same. It takes less than three minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import dp_accounting  # noqa: E402
import tensorflow_federated as tff  # noqa: E402
import tqdm  # noqa: E402

import tff_dpftrl  # noqa: E402
from tff_dpftrl.accounting import statement_text  # noqa: E402
from tff_dpftrl.data import client_datasets, docstrings, sequences, split, vocabulary  # noqa: E402
from tff_dpftrl.learning import functional_model, local_model  # noqa: E402
from tff_dpftrl.models import central_training, evaluation, metrics, word_lstm  # noqa: E402

EPSILON, DELTA = 8.0, 1e-5
CLIP_NORM = 0.3
GAUSSIAN, BLT = "TFF's Gaussian", "BLT of tff_dpftrl"
# Each has its best of 0.1, 0.3, 0.5, 1 and 2, by held-out users of another seed. More noise wants
# smaller steps.
SERVER_RATES = {GAUSSIAN: 0.5, BLT: 1.0}


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is trained; a test takes less."""

    vocabulary_size: int = 1000
    sequence_length: int = 20
    embedding_size: int = 32
    state_size: int = 64
    num_rounds: int = 120
    clients_per_round: int = 30


class Task:
    """Text, model and cohorts, which both programs share."""

    def __init__(self, size: Size, seed: int):
        """Reads the text and pretrains the model."""
        # A user is a module of an installed package; its examples are sentences of its docstrings.
        users = split.by_user(docstrings.read())
        # Vocabulary and first weights come from the standard library. It is public: no user has it.
        words = vocabulary.standard_library(size.vocabulary_size)
        spec = sequences.SequenceSpec(size.sequence_length)
        public = sequences.SequenceCorpus(docstrings.read_standard_library(), words, spec).pooled()
        special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
        model = word_lstm.WordLstm(
            vocabulary_size=words.size,
            sequence_length=size.sequence_length,
            embedding_size=size.embedding_size,
            state_size=size.state_size,
        )
        *_, pretrained = central_training.epochs(
            model,
            model.initial_weights(seed),
            public,
            num_epochs=1,
            batch_size=64,
            learning_rate=3e-3,
            seed=seed,
        )
        self.first_weights = pretrained.weights
        self.model = functional_model.build(model, special, seed, pretrained.weights)
        self.train = sequences.SequenceCorpus(users.train, words, spec)
        held_out = sequences.SequenceCorpus(users.validation, words, spec).pooled(
            max_sequences=2000
        )
        self._evaluate = evaluation.Evaluator(model, special, held_out)
        # Nobody comes back before all others had their turn.
        self.sampler = tff_dpftrl.MinSepSampler(
            num_clients=len(users.train),
            clients_per_round=size.clients_per_round,
            num_rounds=size.num_rounds,
            min_sep=min(size.num_rounds, len(users.train) // size.clients_per_round),
            seed=seed,
        )

    def accuracy(self, weights: Any) -> float:
        """Returns the share of held-out words of the vocabulary that are a model's first guess."""
        return self._evaluate(weights)["top1_in_vocab"]

    def dataset(self, user: int, round_index: int) -> Any:
        """Returns the batches of a client in a round."""
        spec = client_datasets.ClientSpec(batch_size=8, max_sequences=32)
        user_id = self.train.user_ids[user]
        return client_datasets.client_dataset(self.train, user_id, spec, round_index)


def gaussian(task: Task) -> tff.aggregators.UnweightedAggregationFactory:
    """Returns TFF's aggregator, with the noise for the same ε.

    A user who takes part k times is in k sums with independent noise. Together they tell as much of
    it as one sum with 1/√k of the noise. TFF's accounting usually counts on cohorts that are
    drawn by chance and in secret. These cohorts are not, so that ε is not amplified.
    """
    most = task.sampler.schema.effective_participations
    z = dp_accounting.get_sigma_gaussian(EPSILON, DELTA) * math.sqrt(most)
    print(f"{GAUSSIAN}: noise multiplier {z:.3f}")
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        z, task.sampler.clients_per_round, CLIP_NORM
    )


def blt(task: Task) -> tff_dpftrl.DPFTRLFactory:
    """Returns the aggregator of this package, optimised and calibrated for the same cohorts."""
    schema = task.sampler.schema
    strategy = tff_dpftrl.optimize_blt(schema)
    z = tff_dpftrl.calibrate_noise_multiplier(strategy, schema, target_epsilon=EPSILON, delta=DELTA)
    print(f"{BLT}: noise multiplier {z:.3f}")
    return tff_dpftrl.build_dp_ftrl_aggregator(
        strategy,
        noise_multiplier=z,
        clip_norm=CLIP_NORM,
        clients_per_round=task.sampler.clients_per_round,
    )


def train(task: Task, name: str, aggregator: Any) -> tuple[float, tff_dpftrl.ObservedParticipation]:
    """Trains with an aggregator; returns the accuracy, and how often users took part."""
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        local_model.as_tff(task.model),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(SERVER_RATES[name], momentum=0.9),
        model_aggregator=aggregator,
    )
    # Rounds of both programs run in this process, without TFF's executor: the same model, sooner.
    process = tff_dpftrl.compile_process(process)
    state = process.initialize()
    record = tff_dpftrl.ParticipationCounter(len(task.train.user_ids))
    for t in tqdm.trange(task.sampler.num_rounds, desc=name, mininterval=5):
        cohort = task.sampler.cohort(t)
        record.add(cohort)
        state = process.next(state, [task.dataset(user, t) for user in cohort]).state
    return task.accuracy(process.get_model_weights(state).trainable), record.observed


def run(size: Size, seed: int) -> dict[str, float]:
    """Trains with both aggregators; prints the privacy statement of ours, and all accuracies."""
    # Clients run in threads; TensorFlow's threads for one operation would only wait for each other.
    tff_dpftrl.execution.limit_operation_threads(size.clients_per_round)
    task = Task(size, seed)
    schema, num_users = task.sampler.schema, len(task.train.user_ids)
    print(f"{num_users} users; {schema}; ε = {EPSILON:g}, δ = {DELTA:g}")
    ours = blt(task)
    accuracies = {"before training": task.accuracy(task.first_weights)}
    accuracies[GAUSSIAN], _ = train(task, GAUSSIAN, gaussian(task))
    accuracies[BLT], observed = train(task, BLT, ours)
    statement = tff_dpftrl.dp_ftrl_statement(
        ours.guarantee(schema, DELTA),
        tff_dpftrl.Facts(vocabulary_source=task.train.vocabulary.source),
        unit_of_privacy="user",
        num_users=num_users,
        observed=observed,
    )
    print("\n" + statement_text.markdown(statement))
    print(f"Top-1 accuracy on users who never train, seed {seed}, ε = {EPSILON:g} for both:")
    for name, accuracy in accuracies.items():
        print(f"  {name:<20}{accuracy:.2%}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of text, cohorts and first weights")
    run(Size(), parser.parse_args().seed)
