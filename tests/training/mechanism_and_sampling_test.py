"""The table of docs/explanation/which_mechanism.md: what it says runs, and the rest is refused."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.training import toy_run
from tff_dpftrl.mechanisms import table
from tff_dpftrl.runs import privacy, sampled_privacy
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import noise_options, process, run

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / "docs/explanation/which_mechanism.md").read_text("utf-8")
_SECTION = _PAGE.partition("## Every mechanism with every sampling")[2].partition("\n## ")[0]
_NUM_CLIENTS, _NUM_ROUNDS = 30, 8

corpus = toy_run.corpus


def _cells():
    """Yields mechanism, options of the sampling and what the table says of them."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"(?:^\|.*\n)+", _SECTION, re.MULTILINE)[0].splitlines()
    )
    for row in rows:
        for mechanism in re.findall("`(.+?)`", row[0]):
            for column, says in zip(header[1:], row[1:], strict=True):
                flag = re.search("--(algorithm|sampling) ([a-z-]+)", column)
                yield mechanism, {flag[1]: flag[2]} if flag else {}, says


_CELLS = list(_cells())
_RUNS = [cell for cell in _CELLS if cell[2].startswith("runs")]
_REFUSED = [cell for cell in _CELLS if cell[2].startswith("no")]


def _options(mechanism, sampling):
    options = {"mechanism": mechanism, "noise_multiplier": 1.0, "num_rounds": _NUM_ROUNDS}
    if sampling == {"algorithm": "dp-fedavg"} and mechanism == "identity":
        del options["mechanism"]  # DP-FedAvg's noise is independent without saying so.
    elif mechanism == "blt":
        options["buffers"] = 2  # The default mechanism is not seen to be given, its options are.
    elif "bands" in table.MECHANISMS[mechanism].options:
        options["bands"] = 3
    return {"clients_per_round": 6, "clip_norm": 0.5, "delta": 1e-5, **options, **sampling}


def test_every_mechanism_and_every_sampling_has_a_cell():
    assert {mechanism for mechanism, *_ in _CELLS} == set(table.runnable())
    samplings = {sampling["sampling"] for _, sampling, _ in _CELLS if "sampling" in sampling}
    assert samplings == set(noise_options.Sampling.__args__)
    assert len(_CELLS) == len(_RUNS) + len(_REFUSED) == 4 * len(table.runnable())


@pytest.mark.parametrize(("mechanism", "sampling", "says"), _RUNS)
def test_what_runs_has_a_guarantee_and_releases_noised_sums(mechanism, sampling, says):
    config = config_lib.TrainingConfig.of(**_options(mechanism, sampling))
    plan = config.request().plan(_NUM_CLIENTS, 100)
    assert 0.0 < plan.epsilon_after(1) <= plan.epsilon_after(_NUM_ROUNDS) < float("inf")
    assert plan.needs_secret_cohorts == ("[S]" not in says)
    private_round = process.build_aggregation(config.rules, plan).private_round
    released = _rounds(private_round, plan)
    # What is left after the clients' sum has the noise that the plan says.
    noise = released * plan.clients_per_round / (plan.noise_multiplier * plan.clip_norm)
    assert np.all(np.isfinite(noise)) and 0.5 < np.std(noise[0]) < 2.0


def _rounds(private_round, plan: privacy.FederatedPlan) -> np.ndarray:
    """The released averages less those of the clients, shape [rounds, 200]."""
    sampler, shapes, rest = plan.sampler(seed=1), [[200]], []
    state = private_round.initial_state(shapes)
    update = np.full(200, 200**-0.5 * plan.clip_norm / 2, np.float32)
    for t in range(3):
        members = sampler.cohort(t)
        seen = private_round.broadcast(state)
        weight = 1.0 if isinstance(plan, sampled_privacy.SampledPlan) else None
        sent = [private_round.clip_client([tf.constant(update)], seen, weight)[0]] * len(members)
        state, (average,), _ = private_round.release(state, private_round.total(sent, shapes))
        rest.append(np.asarray(average) - len(members) * update / plan.clients_per_round)
    return np.array(rest)


@pytest.mark.parametrize(("mechanism", "sampling", "says"), _REFUSED)
def test_what_does_not_run_is_refused_with_the_message_of_the_page(mechanism, sampling, says):
    number = re.fullmatch(r"no \[(\d)\]", says)[1]
    message = re.search(rf'- \[{number}\] "(.+?)"', _SECTION.replace("\n  ", " "))[1]
    with pytest.raises(ValueError, match=re.escape(message)):
        config = config_lib.TrainingConfig.of(**_options(mechanism, sampling))
        config.request().plan(_NUM_CLIENTS, 9)


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "sampling", "says"), _RUNS)
def test_what_runs_is_trained(corpus, tmp_path, mechanism, sampling, says):
    options = {"mechanism": "blt", "buffers": None, "min_sep": None}
    options |= _options(mechanism, sampling) | {"num_rounds": 8, "deterministic_noise_seed": None}
    results = run.train(toy_run.config(corpus, **options), tmp_path / "run")
    assert results.statement.has_guarantee
    assert results.statement.data_in_one_place == ("sampling" in sampling)
