"""Plans of every door have the numbers that the code before "one plan" gave them.

Each line of recorded_plans.jsonl has a door, what is asked there, and what the plan gave: ε, δ, ρ,
z, sensitivity, the first three cohorts, and the first noise, both of a fixed seed.
"""

import dataclasses
import json
import math
import pathlib

import pytest

from tff_dpftrl.accounting import facts, parts, planner, planner_request, sampled_plans
from tff_dpftrl.finetuning import amplified, example_sampling, group_size, passes, run_privacy
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import identity, serialization, table, workload
from tff_dpftrl.numpy_noise import stream
from tff_dpftrl.participation import observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import participants, privacy, simulated_run

_RECORD = pathlib.Path(__file__).parent / "recorded_plans.jsonl"
_LINES = [json.loads(line) for line in _RECORD.read_text("utf-8").splitlines()]
_SEED = 7
_TRAINING = {
    "dp-ftrl": privacy.DpFtrl,
    "sampled": privacy.DpFedAvg,
    "amplified": privacy.Amplified,
}


def _options(momentum=None, **options):
    rule = None if momentum is None else workload.UpdateRule(momentum=momentum).workload(24)
    return table.Options(workload=rule, **options)


_FROM_JSON = {
    "options": lambda value: _options(**value),
    "deployment": lambda value: simulated_run.Deployment(*value),
    "others": parts.from_json,
    "pool": lambda value: participants.Pool(*value),
    "starts": tuple,
    "later_clip_norms": lambda value: tuple(map(tuple, value)),
    "group_size": lambda value: group_size.Choice(**value) if isinstance(value, dict) else value,
    "schema": lambda value: schema_lib.MinSep(*value),
    "strategy": serialization.strategy_from_dict,
}


def _values(asked):
    return {name: _FROM_JSON.get(name, lambda value: value)(value) for name, value in asked.items()}


def _finite(value):
    return value if value is not None and math.isfinite(value) else None


def _of_run(plan, cohorts):
    seen = observed.ObservedParticipation(plan.num_rounds, plan.num_rounds, 1, {1: 1})
    stated = plan.statement(seen, facts.Facts(), charge_all_rounds=True)
    noise = stream.NoiseStream(
        getattr(plan, "strategy", None) or identity.Identity(),  # Independent where there is none.
        noise_multiplier=plan.noise_multiplier,
        clip_norm=plan.clip_norm,
        template=[(2,)],
        seed=_SEED,
    )
    half = plan.epsilon_after(plan.num_rounds // 2)
    return {
        "z": plan.noise_multiplier,
        "wanted_z": plan.wanted_noise_multiplier,
        "epsilon": _finite(stated.epsilon),
        "epsilon_of_half": _finite(half),
        "delta": stated.delta,
        "rho": _finite(stated.rho_zcdp),
        "sensitivity_squared": stated.parameters.get("sensitivity_squared"),
        "parts": [_finite(cost.epsilon_alone) for cost in stated.parts],
        "simulated_epsilon": stated.parameters.get("simulated_epsilon"),
        "expected": plan.clients_per_round,
        "declared": list(dataclasses.astuple(plan.declared)),
        "noise_to_signal": plan.noise_to_signal(1000),
        "cohorts": [cohorts(index) for index in range(min(3, plan.num_rounds))],
        "noise": noise.next(0)[0].tolist(),
    }


def _training(door, of, asked):
    plan = _TRAINING[door](**asked).plan(*of)
    sampler = plan.sampler(_SEED)
    return _of_run(plan, lambda index: sampler.cohort(index).tolist())


def _finetuning(door, of, asked):
    users, rows = example_sampling.of_sizes(of), asked.get("group_size", 1)
    if door in ("example", "user"):
        made = plan_lib.make_plan(users, sampling=door, **asked)
        plan = run_privacy.SampledFinetuning.of(made, clip_norm=0.5, deterministic_seed=None)
        rows = made.group_size
    elif door == "passes":
        plan = passes.Passes(**asked).asked(clip_norm=0.5).plan(len(users), 1000)
    else:
        one = amplified.Amplified(**asked).with_bands(users)
        plan = one.asked(users, clip_norm=0.5).plan(len(users), 1000)
    batches = passes.batches_of(plan, users, rows, _SEED)

    def cohort(index):
        batch = batches(index)
        return [batch.unit_users.tolist(), batch.examples.tolist()]

    return _of_run(plan, cohort)


def _task(asked, of):
    pytest.importorskip("cryptography")
    from tff_dpftrl.runtime import participation_histograms
    from tff_dpftrl.runtime.tasks import secure_groups, task_privacy
    from tff_dpftrl.runtime.tasks import terms as terms_lib

    secure = asked.pop("secure_aggregation", None)
    terms = terms_lib.Terms(
        server_plan="ab" * 32,
        files={},
        kind="training",
        population="keyboards",
        task="next-word",
        num_devices=1000,
        data="typed words",
        vocabulary_source=None,
        vocabulary_is_public=True,
        initial_weights_source=None,
        initial_weights_are_public=False,
        parameters={},
        secure_aggregation=secure and secure_groups.SecureGroups(**secure),
        **asked,
    )
    accounted = task_privacy.TaskPrivacy(terms)
    seen = participation_histograms.ObservedRounds(*of)
    so_far = accounted.so_far(seen)
    stated = accounted.statement(seen)
    return {
        "epsilon": so_far.epsilon,
        "next_epsilon": so_far.next_epsilon,
        "rho": so_far.rho_zcdp,
        "declared_epsilon": so_far.declared_epsilon,
        "charged": stated.parameters["num_rounds_charged"],
        "stated_epsilon": stated.epsilon,
        "sensitivity_squared": stated.parameters["sensitivity_squared"],
    }


def _planner(of, asked):
    kept = ("report_goal", "noise_multiplier", "epsilon", "rho_zcdp", "sensitivity_squared")
    kept += ("noise_in_sum", "noise_per_round", "upload_bytes")
    plans = planner.make_plans(planner_request.Request(**asked), of)
    return {plan.mechanism: [plan.to_dict()[name] for name in kept] for plan in plans}


def _sampled_plans(of, asked):
    kept = ("report_goal", "noise_multiplier", "epsilon", "noise_in_sum", "memory_copies")
    plans = sampled_plans.make_plans(of, **asked)
    return {f"{i}": [plan.to_dict()[name] for name in kept] for i, plan in enumerate(plans)}


def _gives(door, of, asked):
    asked = _values(asked)
    if door in _TRAINING:
        return _training(door, of, asked)
    if door == "task":
        return _task(asked, of)
    if door == "planner":
        return _planner(of, asked)
    if door == "sampled plans":
        return _sampled_plans(of, asked)
    return _finetuning(door, of, asked)


def _close(value):
    """Floats are compared with a tolerance below that of the searches for noise, 1e-4."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-6, abs=1e-300)
    if isinstance(value, dict):
        return {name: _close(one) for name, one in value.items()}
    return [_close(one) for one in value] if isinstance(value, list) else value


def _check(is_quick):
    lines = [line for line in _LINES if line["quick"] == is_quick]
    assert lines
    for line in lines:
        gives = _gives(line["door"], line["of"], line["asked"])
        assert gives == _close(line["gives"]), (line["door"], line["of"], line["asked"])


def test_a_spread_of_plans_has_the_recorded_numbers():
    _check(True)


@pytest.mark.slow
def test_all_other_plans_have_the_recorded_numbers():
    _check(False)
