"""Audits of training configs: of the config's aggregator, and of a short run of a tiny model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee, parts
from tff_dpftrl.auditing import aggregator as aggregator_lib
from tff_dpftrl.auditing import audit_report, defaults, directions, training
from tff_dpftrl.auditing import canaries as canaries_lib
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.discretization import grid
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.learning import rounds as rounds_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.models import table
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import party_noise
from tff_dpftrl.runs import amplified_privacy, dp_ftrl_privacy, sampled_privacy
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus, process

if TYPE_CHECKING:
    from tff_dpftrl.runtime.tasks import task_config

_SIZE = 680  # Of each tensor: 500 canaries have a coordinate in it, and a fifth of it is quiet.
_MOST_CANARIES = 150
_FEWEST_CANARIES = 20
_REAL_CLIENTS = 4
_MOST_ROUNDS = 60

_Config: TypeAlias = "config_lib.TrainingConfig | task_config.TaskConfig"
_Plan: TypeAlias = (
    "dp_ftrl_privacy.DpFtrlPlan | amplified_privacy.AmplifiedPlan | sampled_privacy.SampledPlan"
)


def audit_config(
    config: _Config,
    *,
    num_clients: int | None = None,
    trials: int = defaults.TRIALS,
    rounds: int = 200,
    error_rate: float = defaults.ERROR_RATE,
    progress: Callable[[str], None] | None = None,
) -> audit_report.AuditReport:
    """Audits what `train` would run with a config, on a tiny model.

    Updates have as many tensors as those of the config's model, of the same ranks; their sizes are
    small. The sizes of a custom model are not in a config: of it there are a vector and a matrix.

    First, `audit_aggregator` plays many games with the aggregator that the config would build for
    its population (mechanism, noise, clipping, encoding). Then `audit_training` does one short run
    with canaries of the whole learning process, with the config's algorithm and optimizers. A run
    of fewer rounds than the config has is held against the claim for these rounds; some later ones
    are played alone, each from a state that was advanced without clients. Of a task with noise
    parties, `served_noise` then plays the server against them; the games before have the noise that
    the server would add. The seeds of the noise are secret, whatever the config says.

    The audit does not show that a run kept to its schema or used this code; the recount of a run
    does. Without `num_clients`, clients are counted in the config's corpus. `error_rate` is the
    largest chance that a correct config is called violated.
    """
    progress = progress or (lambda line: None)
    corpus.require_packages(config.to_dict())
    if isinstance(config, config_lib.TrainingConfig):
        config = config.changed(deterministic_noise_seed=None)
    if num_clients is None:
        num_clients = len(corpus.read_users(config.text).train)
    shapes = _shapes(config)
    plan = config.request().plan(num_clients, _num_weights(shapes))
    if not plan.has_guarantee:
        raise validation.UsageError(
            "config promises nothing: it has no noise. Give it a mechanism and noise_multiplier "
            "or target_epsilon."
        )
    return _audit(config, plan, shapes, trials, rounds, error_rate, progress)


def _shapes(config: _Config) -> list[list[int]]:
    """Returns small shapes of the ranks that the tensors of the config's model have."""
    ranks: Sequence[int] = (1, 2)
    language = config.language
    if language.model != table.CUSTOM:
        # Number and ranks of the tensors do not depend on vocabulary and sequence length.
        model = table.build(
            language.model, vocabulary_size=100, sequence_length=4, **language.model_sizes
        )
        ranks = [len(shape) for shape in model.weight_shapes.values()]
    weights_of_canaries = directions.COORDINATES_EACH * _MOST_CANARIES
    size = max(_SIZE, 2 * math.ceil(weights_of_canaries / (2 * len(ranks))))
    return aggregator_lib.shapes_of(ranks, size)


def _num_weights(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _audit(
    config: _Config,
    plan: _Plan,
    shapes: Sequence[Sequence[int]],
    trials: int,
    rounds: int,
    error_rate: float,
    progress: Callable[[str], None],
) -> audit_report.AuditReport:
    """Does the audits of a plan."""
    num_parties = len(getattr(config, "noise_parties", ()))
    error_rate /= 3.0 if num_parties else 2.0
    built = process.build_aggregation(config.rules, plan)
    progress(f"The aggregator: {trials} games of {min(rounds, plan.num_rounds)} rounds.")
    games = aggregator_lib.audit_aggregator(
        built,
        schema=plan.declared,
        claim=_claim_of_known(plan, plan.declared),
        value_type=shapes,
        budget=aggregator_lib.GameBudget(
            trials, min(rounds, plan.num_rounds), error_rate=error_rate
        ),
        progress=progress,
    )
    progress("The learning process: a short run of a tiny model, with canaries.")
    run = _short_run(config, plan, shapes, built, error_rate, progress)
    of_parties: tuple[audit_report.Finding, ...] = ()
    if num_parties:
        progress("The noise parties, against a server with all devices but one in league.")
        of_parties = _noise_parties(config, plan, shapes, num_parties, error_rate)
    game_findings, trade_off = games.findings, games.trade_off
    if config.language.model == table.CUSTOM:
        says = "They are not in the config: a vector and a matrix are played with in their place."
        of_model = audit_report.Finding("the tensors of the custom model", "not tested", says)
        game_findings = (of_model, *game_findings)
    if plan.needs_secret_cohorts:  # Held against another claim.
        game_findings = _without_bounds(game_findings)
        trade_off = run.trade_off
    others = [one.name for one in plan.others]
    if isinstance(config, config_lib.TrainingConfig):
        others += [parts.METRICS] if config.releases.has_metrics else []
        others += [parts.EVALUATION] if config.num_evaluations else []
    algorithm = name = config.privacy.algorithm
    ranks = sorted({len(shape) for shape in shapes})
    tensors = f"{len(shapes)} small tensors of ranks {', '.join(map(str, ranks))}"
    if not isinstance(plan, sampled_privacy.SampledPlan):
        name = plan.strategy.name
    return audit_report.AuditReport(
        subject=f"what the config runs: {algorithm}, {name}, {plan.num_clients} users, "
        f"{tensors}, and {run.subject}",
        claim=_claim_of(plan, plan.declared),
        findings=game_findings + run.findings + of_parties + audit_report.untested(others),
        is_ours=True,
        trade_off=trade_off,
    )


def _noise_parties(
    config: _Config,
    plan: _Plan,
    shapes: Sequence[Sequence[int]],
    num_parties: int,
    error_rate: float,
) -> tuple[audit_report.Finding, ...]:
    """Audits the noise parties of a task, on a grid with room for their noise."""
    private_round = process.build_aggregation(config.rules, plan).private_round
    multiplier = getattr(private_round, "update_noise_multiplier", private_round.noise_multiplier)
    encoding = grid.for_bits(
        _num_weights(shapes),
        plan.encoding.max_clients,
        config.secagg_bits,
        noise_ratio=party_noise.noise_ratio(
            plan.strategy, multiplier, plan.num_rounds, num_parties
        ),
    )
    plan = dataclasses.replace(plan, encoding=encoding)
    private_round = process.build_aggregation(config.rules, plan).private_round
    noise = party_noise.PartyNoise(private_round, shapes, encoding)
    # Imported here: it needs `cryptography`, which a machine that trains may not have.
    from tff_dpftrl.auditing import served_noise

    return served_noise.audit_noise_parties(
        noise, plan.strategy, plan.num_rounds, num_parties, error_rate
    )


def _short_run(
    config: _Config,
    plan: _Plan,
    shapes: Sequence[Sequence[int]],
    built: rounds_lib.Aggregation,
    error_rate: float,
    progress: Callable[[str], None],
) -> audit_report.AuditReport:
    """Makes one run of the config's process with a tiny model, then plays later rounds alone."""
    num_rounds = min(plan.num_rounds, _MOST_ROUNDS)
    schema = dataclasses.replace(plan.declared, num_rounds=num_rounds)
    number, most_canaries, room = _MOST_CANARIES, None, None
    encoding = getattr(plan, "encoding", None)
    if encoding is not None:
        room = encoding.max_clients - _REAL_CLIENTS
        most_canaries, number = _that_fit(room, schema)
    canaries = canaries_lib.Canaries(_tiny_model(shapes), number=number)
    if isinstance(plan, sampled_privacy.SampledPlan):
        most_clients = mechanism_lib.Mechanism.of(built).most_clients
        room = most_clients and max(1, most_clients - _REAL_CLIENTS)
    learning, starts = config.learning, config.privacy.starts(plan.num_rounds)
    momentum = learning.server_momentum if learning.server_optimizer == "momentum" else 0.0
    cohorts = functools.partial(_real_clients, _num_weights(shapes))
    with training.runnable(process.build_round(plan, config.rules, canaries.model)) as runs:
        short_run = training.audit_training(
            runs,
            canaries=canaries,
            claim=_claim_of(plan, schema),
            schema=schema,
            cohorts=cohorts,
            # The strategy may be for more rounds: the run has its first ones.
            strategy=getattr(plan, "strategy", None),
            server_momentum=momentum,
            game=training.CanaryGame(
                getattr(plan, "sampling_probability", None),
                most_canaries,
                error_rate / 2.0,
                sampling=getattr(plan, "sampling", None),
            ),
            progress=progress,
        )
        played, _ = short_run.findings[0].covers
        later = _later_rounds(starts, plan.num_rounds, after=max(played.indices, default=0))
        once = dataclasses.replace(plan.declared, max_participations=1)
        single = training.audit_single_rounds(
            runs,
            later,
            canaries=canaries,
            claim=_claim_of_known(plan, once),
            cohorts=cohorts,
            server_momentum=momentum,
            server_restarts=config.rules.server_restarts,
            game=training.CanaryGame(most_canaries=room, error_rate=error_rate / 2.0),
            progress=progress,
        )
    if plan.needs_secret_cohorts:
        single = _without_bounds(single)
    findings = [_of_training(one, plan.num_rounds) for one in (*short_run.findings, *single)]
    subject = f"tiny model, {num_rounds} rounds with {canaries.number} canaries"
    return dataclasses.replace(short_run, subject=subject, findings=tuple(findings), is_ours=True)


def _without_bounds(findings: Sequence[audit_report.Finding]) -> tuple[audit_report.Finding, ...]:
    """Returns findings without the bounds that are no bounds of the claim of a secret sample."""
    about = " Here everybody knows who was sampled; the claim is of a secret sample."
    return tuple(
        dataclasses.replace(one, says=one.says + about, mu_at_least=None, epsilon_at_least=None)
        for one in findings
    )


def _later_rounds(starts: Sequence[int], num_rounds: int, after: int) -> list[int]:
    """Returns rounds to play alone: around powers of two, two restarts, and the last one."""
    last = min(num_rounds, aggregator_lib.MOST_ROUNDS_WITHOUT_CLIENTS) - 1
    powers = [2**k for k in range(last.bit_length())]
    restarts = [t for t in starts if after < t <= last]
    begun = {*powers, *restarts[:1], *restarts[-1:]}
    return sorted(t for t in {last, *begun, *(t - 1 for t in begun)} if after < t <= last)


def _of_training(finding: audit_report.Finding, num_rounds: int) -> audit_report.Finding:
    """Returns a finding as one of a run's training, which the games do not look at."""
    covers = [
        dataclasses.replace(
            one,
            what=f"training {one.what}",
            total=num_rounds if one.what == "rounds" else one.total,
        )
        for one in finding.covers
    ]
    return dataclasses.replace(finding, test=f"training: {finding.test}", covers=tuple(covers))


def _claim_of_known(plan: _Plan, schema: schema_lib.MinSep) -> claim_lib.Claim:
    """Returns what the updates' noise promises if everybody knows who is in which round."""
    return claim_lib.Claim.of(
        guarantee.dp_ftrl_guarantee(
            getattr(plan, "strategy", identity.Identity()),
            noise_multiplier=plan.noise_multiplier,
            schema=schema,
            delta=plan.delta,
        )
    )


def _claim_of(plan: _Plan, schema: schema_lib.MinSep) -> claim_lib.Claim:
    """Returns what a run promises of the updates of its first rounds."""
    if not plan.needs_secret_cohorts:
        return _claim_of_known(plan, schema)
    alone = dataclasses.replace(plan, others=())
    return claim_lib.Claim(alone.epsilon_after(schema.num_rounds), plan.delta)


def _that_fit(room: int, schema: schema_lib.MinSep) -> tuple[int, int]:
    """Returns the canaries in a round, and in all, for sums with room for so many clients."""
    stride = min(schema.min_sep, schema.num_rounds)
    most = max(1, min(room, -(-_MOST_CANARIES // stride)))
    number = min(_MOST_CANARIES, most * stride)
    if number < _FEWEST_CANARIES:
        raise validation.UsageError(
            f"secagg_bits leaves room for {number} canaries, and {_FEWEST_CANARIES} are needed: "
            "raise clients_per_round."
        )
    return most, number


def _tiny_model(shapes: Sequence[Sequence[int]]) -> model_lib.Model:
    """Returns a linear regression without much to learn, with weights of these shapes."""

    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training):
        del training
        weights, _ = model_weights
        return tf.linalg.matvec(x, tf.concat([tf.reshape(one, [-1]) for one in weights], 0))

    def loss(output, label, sample_weight=None):
        del sample_weight
        return tf.reduce_mean((output - label) ** 2)

    return model_lib.Model(
        initial_weights=(tuple(np.zeros(shape, np.float32) for shape in shapes), ()),
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec=(
            tf.TensorSpec([None, _num_weights(shapes)], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ),
    )


def _real_clients(num_weights: int, round_index: int) -> Sequence[tf.data.Dataset]:
    """Returns clients with made-up data, other ones in each round."""
    rng = np.random.default_rng(round_index)
    scale = num_weights**-0.5
    return [
        tf.data.Dataset.from_tensors(
            (
                rng.normal(scale=scale, size=(2, num_weights)).astype(np.float32),
                rng.normal(size=2).astype(np.float32),
            )
        )
        for _ in range(_REAL_CLIENTS)
    ]
