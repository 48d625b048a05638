"""One name, one schema, one noise multiplier: one ε, wherever a mechanism can be named."""

import json
import pathlib
import re

import pytest

import tff_dpftrl
from tff_dpftrl.accounting import gaussian
from tff_dpftrl.cli import main
from tff_dpftrl.mechanisms import restarts, table
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import noise_options

# 360 devices, 10 a round: the largest stride is 36.
_POPULATION, _GOAL, _ROUNDS = 360, 10, 120
_SCHEMA = tff_dpftrl.MinSep(_ROUNDS, 36, 4)
_NOISE, _DELTA = 3.0, 1e-6
_FLAGS = [f"--rounds={_ROUNDS}", "--min-sep=36", "--max-participations=4"]


def _command(capsys, *arguments):
    assert main.main([*arguments, "--format=json"]) == 0
    return json.loads(capsys.readouterr().out)


def _epsilon_of_training(**options):
    config = config_lib.TrainingConfig.of(
        num_rounds=_ROUNDS,
        clients_per_round=_GOAL,
        noise_multiplier=_NOISE,
        delta=_DELTA,
        **options,
    )
    plan = config.request().plan(_POPULATION, num_parameters=10)
    assert plan.schema == _SCHEMA
    return plan.epsilon_after(_ROUNDS)


@pytest.mark.parametrize("name", table.MECHANISMS)
def test_every_command_and_the_library_agree(name, capsys):
    strategy = tff_dpftrl.build_strategy(name, _SCHEMA)
    expected = tff_dpftrl.dp_ftrl_guarantee(
        strategy, noise_multiplier=_NOISE, schema=_SCHEMA, delta=_DELTA
    ).epsilon
    assert 0.1 < expected < 100
    found = {}
    which, noise, delta = f"--mechanism={name}", f"--noise-multiplier={_NOISE}", f"--delta={_DELTA}"
    found["account"] = _command(capsys, "account", which, *_FLAGS, noise, delta)["epsilon"]

    target = f"--target-epsilon={expected!r}"
    calibrated = _command(capsys, "calibrate", which, *_FLAGS, target, delta)
    assert calibrated["noise_multiplier"] == pytest.approx(_NOISE, rel=1e-9)
    again = f"--noise-multiplier={calibrated['noise_multiplier']!r}"
    found["calibrate"] = _command(capsys, "account", which, *_FLAGS, again, delta)["epsilon"]

    vary = ["--vary=rounds", f"--values={_ROUNDS}"]
    (point,) = _command(capsys, "compare", name, *_FLAGS, *vary)
    found["compare"] = gaussian.epsilon(point["sensitivity"] / _NOISE, _DELTA)

    if table.MECHANISMS[name].runnable:
        population = [f"--population={_POPULATION}", f"--rounds={_ROUNDS}"]
        goal = [f"--report-goals={_GOAL}", f"--mechanisms={name}"]
        (plan,) = _command(capsys, "plan", *population, *goal, target, delta)["plans"]
        assert plan["noise_multiplier"] == pytest.approx(_NOISE, rel=1e-9)
        found["plan"] = plan["epsilon"]
        found["train"] = _epsilon_of_training(mechanism=name)
    assert found == {command: pytest.approx(expected, rel=1e-9) for command in found}


@pytest.mark.parametrize("name", ["blt", "tree", "bandtoep", "bisr"])
def test_they_agree_on_restarts(name, capsys):
    starts = restarts.starts(_ROUNDS, first=25, every=70)
    expected = tff_dpftrl.dp_ftrl_guarantee(
        tff_dpftrl.build_strategy(name, _SCHEMA, starts=starts),
        noise_multiplier=_NOISE,
        schema=_SCHEMA,
        delta=_DELTA,
    ).epsilon
    accounted = _command(
        capsys, "account", f"--mechanism={name}", *_FLAGS, f"--noise-multiplier={_NOISE}",
        f"--delta={_DELTA}", "--first-restart=25", "--restart-every=70",
    )  # fmt: skip
    trained = _epsilon_of_training(
        mechanism=name, adaptive_clipping=True, restart_warmup=25, restart_every=70
    )
    assert accounted["epsilon"] == expected
    assert trained == pytest.approx(expected, rel=1e-12)


def test_train_offers_what_can_be_run():
    assert [*table.runnable(), "none"] == list(noise_options.Mechanism.__args__)


def test_no_guarantee_in_words_has_a_smaller_delta_than_the_one_that_it_holds_at():
    package = pathlib.Path(tff_dpftrl.__file__).parent
    nearest = re.compile(r'\bat (δ|delta)( =)? ("\s+f")?\{[^{}]*:[.\d]*g\}')
    rooms = ("accounting", "cli", "finetuning", "reports", "runs", "sweeps", "training")
    sources = [path for room in rooms for path in package.joinpath(room).rglob("*.py")]
    assert len(sources) > 100
    assert not [path.name for path in sources if nearest.search(path.read_text("utf-8"))]
