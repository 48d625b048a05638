"""The sweeps of DP-FedAvg's figures can be run, and are what the paper varies."""

import pathlib
import shlex

import pytest

from experiments import make
from tff_dpftrl.cli import main, sweep
from tff_dpftrl.runs import sampled_privacy
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder, running

_CONFIG = "experiments/dp_fedavg.toml"
_SWEEPS = {
    name: section["commands"][0]
    for name, section in make.read()[1].items()
    if _CONFIG in section["commands"][0]
}
_USERS, _PARAMETERS = 1000, 90_000


@pytest.fixture(name="cells_of")
def _cells_of(monkeypatch, tmp_path):
    """A function that returns the cells that the command of a sweep would run."""
    config = (make.ROOT / _CONFIG).read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    pathlib.Path("experiments").mkdir()
    pathlib.Path(_CONFIG).write_text(config, encoding="utf-8")
    found = []

    class Stopped(BaseException):
        pass

    def run(cells, *args, **options):
        del args, options
        found.append(cells)
        raise Stopped

    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(sweep, "_check", lambda *args: {})  # A process reads the data.

    def cells_of(name):
        with pytest.raises(Stopped):
            main.main(shlex.split(_SWEEPS[name])[1:])
        cells = cells_lib.grid(*folder.read(tmp_path / "results" / name))
        assert cells == found.pop()
        return cells

    return cells_of


@pytest.mark.parametrize("name", _SWEEPS)
def test_the_command_begins_cells_of_three_seeds(name, cells_of):
    cells = cells_of(name)  # In results/NAME, from where the next command collects them.
    assert {cell.config.seed for cell in cells} == {0, 1, 2}
    assert len({str(cell.setting) for cell in cells}) == len(cells) / 3 >= 2
    for cell in cells:
        cell.config.request().check(_USERS)
        assert cell.config.language.max_users == _USERS


def test_cohorts_of_ten_have_the_noise_of_those_they_stand_for(cells_of):
    plans = {
        cell.config.simulation.simulate_report_goal: cell.config.request().plan(_USERS, _PARAMETERS)
        for cell in cells_of("dp_fedavg_headline")
        if cell.config.seed == 0
    }
    assert list(plans) == [100, 1250, 5000]
    for goal, plan in plans.items():
        assert isinstance(plan, sampled_privacy.SampledPlan)
        stddev = plan.noise_multiplier * plan.clip_norm / plan.clients_per_round
        assert stddev == pytest.approx(plan.clip_norm / goal)  # z = 1
        assert plan.simulated.deployment.population == 763_430


def test_a_change_halfway_costs_nothing(cells_of):
    cells = [cell for cell in cells_of("dp_fedavg_schedule") if cell.config.seed == 0]
    plans = [cell.config.request().plan(_USERS, _PARAMETERS) for cell in cells]
    assert len({plan.simulated.epsilon for plan in plans}) == 1
    assert plans[0].clip_norms == 10.0 and plans[1].clip_norms == (10.0,) * 75 + (1.0,) * 75
