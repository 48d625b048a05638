"""Shares of a budget: what they promise, and which are refused."""

import math

import pytest

from tff_dpftrl.accounting import budget_shares, gaussian, parts

_DELTA = 1e-6


def test_parts_and_the_rest_for_the_weights_spend_the_whole():
    shares = {"vocabulary": 0.02, "metrics": 0.3}
    rho = budget_shares.split(8.0, _DELTA, shares)
    whole = gaussian.mu(8.0, _DELTA)
    assert rho["metrics"] / rho["vocabulary"] == pytest.approx(15.0)
    rest = parts.GaussianRounds(whole * math.sqrt(0.68))
    others = [parts.Part(budget_shares.PARTS[name], "", rho[name]) for name in shares]
    assert parts.compose(rest, others, _DELTA) == pytest.approx(8.0, rel=1e-9)


@pytest.mark.parametrize(
    "rounds", [parts.GaussianRounds(0.8, 5), parts.SampledRounds(1.1, 0.05, 60, 2)]
)
def test_figures_of_rounds_with_a_share_leave_the_rest_to_updates(rounds):
    noise = budget_shares.noise_of_round(rounds, 0.19)
    figure = parts.Part(parts.METRICS, "", noise_multiplier_of_round=noise)
    if isinstance(rounds, parts.GaussianRounds):
        rest = parts.GaussianRounds(0.9 * rounds.mu, 5)
    else:
        rest = parts.SampledRounds(rounds.noise_multiplier / 0.9, 0.05, 60, 2)
    whole = parts.compose(rounds, (), _DELTA)
    assert parts.compose(rest, [figure], _DELTA) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(
    "rounds", [parts.GaussianRounds(0.8, 5), parts.SampledRounds(1.1, 0.05, 9)]
)
def test_figures_of_rounds_cost_what_they_may(rounds):
    noise = budget_shares.noise_of_round_for_epsilon(rounds, 0.5, _DELTA)
    figure = parts.Part(parts.METRICS, "", noise_multiplier_of_round=noise)
    alone = parts.costs(rounds, "", [figure], _DELTA)[1].epsilon_alone
    assert 0.499 < alone <= 0.5


def test_shares_are_read():
    text = "vocabulary=0.02, metrics=0.05"
    assert budget_shares.parse(text) == {"vocabulary": 0.02, "metrics": 0.05}
    default = budget_shares.DEFAULTS["vocabulary"]
    assert budget_shares.parse("vocabulary,metrics=0.5") == {"vocabulary": default, "metrics": 0.5}


def test_a_run_takes_shares_of_what_it_releases():
    of_run = budget_shares.of_run
    assert of_run(None, (), 8.0) == {}
    assert of_run("metrics=0.1", ("vocabulary", "metrics"), 8.0) == {
        "vocabulary": budget_shares.DEFAULTS["vocabulary"],
        "metrics": 0.1,
    }
    with pytest.raises(ValueError, match="releases no training metrics"):
        of_run("metrics=0.1", ("vocabulary",), 8.0)
    with pytest.raises(ValueError, match="shares of target_epsilon: give it"):
        of_run("vocabulary=0.1", ("vocabulary",), None)
    with pytest.raises(ValueError, match="leaves nothing for the weights"):
        of_run("metrics=0.99", ("vocabulary", "metrics"), 8.0)


def test_planned_parts_leave_the_rest_of_delta():
    others = budget_shares.planned(8.0, _DELTA, {"vocabulary": 0.02, "metrics": 0.1})
    assert [part.name for part in others] == [parts.VOCABULARY, parts.METRICS]
    assert [part.delta for part in others] == [pytest.approx(0.1 * _DELTA), 0.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vocabulary=1.5", "vocabulary the share 1.5 .* below 1"),
        ("metrics=0", "metrics the share 0.0 .* above 0"),
        ("vocabulary=0.5,metrics=0.5", "add up to 1, which leaves nothing for the weights"),
        ("words=0.1", "'words', which is no part: take vocabulary, metrics"),
        ("vocabulary=", "like vocabulary=0.02"),
        ("words", "like vocabulary=0.02"),
        ("vocabulary=0.1,vocabulary=0.1", "each part once"),
        ("vocabulary=nan", "like vocabulary=0.02"),
        ("", "like vocabulary=0.02"),
    ],
)
def test_shares_that_split_no_budget_are_refused_in_one_line(text, says):
    with pytest.raises(ValueError, match=says) as error:
        budget_shares.parse(text)
    assert "\n" not in str(error.value)
