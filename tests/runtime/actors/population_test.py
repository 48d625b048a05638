import dataclasses
import sys

import pytest

from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.schedules import simulation

SERVED = simulation.small_population()
SIZES = population.RoundSettings(goal_count=100)


def test_sizes_of_a_round():
    assert (SIZES.wanted, SIZES.least) == (130, 80)
    odd = dataclasses.replace(SIZES, goal_count=3, over_selection=1.1, least_fraction=0.5)
    assert (odd.wanted, odd.least) == (4, 2)
    exact = dataclasses.replace(SIZES, over_selection=1.0, least_fraction=1.0)
    assert (exact.wanted, exact.least) == (100, 100)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("goal_count", 0),
        ("over_selection", 0.9),
        ("least_fraction", 0.0),
        ("least_fraction", 1.1),
        ("selection_timeout", 0.0),
        ("reporting_timeout", float("nan")),
        ("exchange_timeout", -1.0),
        ("devices_per_aggregator", 0),
    ],
)
def test_senseless_sizes_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        dataclasses.replace(SIZES, **{argument: value})


def test_senseless_populations_are_refused_by_name():
    training = SERVED.task("training")
    with pytest.raises(ValueError, match="different names"):
        dataclasses.replace(SERVED, tasks=(training, training))
    with pytest.raises(ValueError, match="different names"):
        dataclasses.replace(SERVED, tasks=())
    with pytest.raises(ValueError, match="model_of='training' of the task 'evaluation'"):
        dataclasses.replace(SERVED, tasks=(SERVED.task("evaluation"),))
    for argument in ("lease_seconds", "silence_seconds"):
        with pytest.raises(ValueError, match=f"{argument} .*One lost heartbeat"):
            dataclasses.replace(SERVED, **{argument: 1.5 * SERVED.heartbeat_seconds})
    with pytest.raises(ValueError, match="weight"):
        dataclasses.replace(training, weight=0.0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
