"""Requests imply a schema that the population can keep, and refuse what cannot be."""

from __future__ import annotations

import dataclasses

import pytest

from tff_dpftrl.accounting import planner_request
from tff_dpftrl.participation import schema as schema_lib

_REQUEST = planner_request.Request(
    population=4_000_000, num_rounds=2000, delta=1e-10, target_epsilon=5.0
)


def test_by_default_the_population_decides():
    schema = _REQUEST.schema(6500)
    assert schema == schema_lib.MinSep(2000, 4_000_000 // 6500, 4)


def test_min_sep_and_participations_can_be_given():
    schema = dataclasses.replace(_REQUEST, min_sep=100, max_participations=5).schema(6500)
    assert schema == schema_lib.MinSep(2000, 100, 5)
    assert dataclasses.replace(_REQUEST, min_sep_fraction=0.5).schema(6500).min_sep == 307
    with pytest.raises(ValueError, match="largest min_sep is 615"):
        dataclasses.replace(_REQUEST, min_sep=1000).schema(6500)


def test_published_populations_bound_the_published_separations():
    # Xu et al. 2023, Table 1: es-ES has 4.21M devices, so MinS is below 4.21M / 6500 = 647.
    assert planner_request.largest_min_sep(4_210_000, 6500) == 647


def test_timer():
    # es-ES of 2022: 24 hours led to a MinS of 313, about 314 rounds a day.
    assert planner_request.min_sep_of_timer(24, 314) == 314
    assert planner_request.min_sep_of_timer(1, 2) == 1


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"target_rho": 1.0}, "exactly one"),
        ({"target_epsilon": None}, "exactly one"),
        ({"target_epsilon": None, "target_noise": 0.0}, "target_noise"),
        ({"min_sep_fraction": 0.0}, "min_sep_fraction"),
        ({"population": 0}, "population"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"num_parameters": 0}, "num_parameters"),
        ({"max_participations": 0}, "max_participations must be at least 1, .* Leave it out"),
        ({"min_sep": 0}, "min_sep"),
        ({"delta": 1.0}, "delta"),
        ({"report_goals": (0, 5)}, "report_goals"),
    ],
)
def test_errors_name_the_argument(changes, name):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(_REQUEST, **changes)


def test_what_no_population_can_do_is_refused():
    with pytest.raises(ValueError, match="report_goal"):
        planner_request.largest_min_sep(10, 11)
    with pytest.raises(ValueError, match="timer_hours"):
        planner_request.min_sep_of_timer(0, 1)
