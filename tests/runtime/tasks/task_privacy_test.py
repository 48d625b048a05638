"""Tests of what tasks spend, when they must end, and their privacy statements."""

import dataclasses
import json

import numpy as np
import pytest

from tests.runtime.tasks import small_folder
from tff_dpftrl.accounting import composition, gaussian, guarantee, statement_text
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.tasks import secure_groups, summation_sentences, task_privacy
from tff_dpftrl.runtime.tasks import terms as terms_lib

_SCHEMA = small_folder.SCHEMA
_SEEN = participation_histograms.ObservedRounds


def _terms(**changes):
    return dataclasses.replace(small_folder.TERMS, server_plan="ab" * 32, **changes)


def _guarantee(num_rounds, min_sep, max_participations, noise_multiplier=0.5):
    return guarantee.dp_ftrl_guarantee(
        small_folder.TERMS.strategy,
        noise_multiplier=noise_multiplier,
        schema=schema_lib.MinSep(num_rounds, min_sep, max_participations),
        delta=1e-5,
    )


@pytest.mark.parametrize(
    ("seen", "schema"),
    [
        (_SEEN(1, None, 1), (1, 2, 3)),
        (_SEEN(3, 2, 2), (3, 2, 3)),
        (_SEEN(6, 3, 2), (6, 2, 3)),  # Better than declared: declared.
        (_SEEN(4, 1, 3, 0, 1, 1), (4, 2, 3)),  # What is reported is no charge.
        (_SEEN(6, 2, 5, 1), (6, 2, 3)),
    ],
)
def test_the_declared_participation_is_spent(seen, schema):
    found = task_privacy.TaskPrivacy(_terms()).so_far(seen)
    expected = _guarantee(*schema)
    assert found.epsilon == expected.epsilon
    assert found.rho_zcdp == expected.rho_zcdp
    assert (found.num_rounds, found.min_sep) == (seen.num_rounds, seen.min_sep)
    assert found.skipped_rounds == seen.skipped_rounds
    more, min_sep, most = min(schema[0] + 1, 6), *schema[1:]
    assert found.next_epsilon == _guarantee(more, min_sep, most).epsilon >= found.epsilon
    assert found.declared_epsilon == found.budget_epsilon == _guarantee(6, 2, 3).epsilon


def test_epsilon_is_that_of_all_patterns_of_participation():
    """Computed anew: the largest norm of a sum of columns of C, over every allowed pattern."""
    matrix = small_folder.TERMS.strategy.strategy_matrix(6)
    patterns = _SCHEMA.patterns()
    sensitivity = max(np.linalg.norm(matrix[:, list(rounds)].sum(axis=1)) for rounds in patterns)
    found = task_privacy.TaskPrivacy(_terms()).so_far(_SEEN(6, 2, 3))
    assert found.epsilon == pytest.approx(gaussian.epsilon(sensitivity / 0.5, 1e-5), rel=1e-9)


def test_nothing_is_spent_before_the_first_round():
    found = task_privacy.TaskPrivacy(_terms()).so_far(_SEEN())
    assert (found.epsilon, found.rho_zcdp) == (0.0, 0.0)
    assert found.next_epsilon == _guarantee(1, 2, 3).epsilon > 0


def test_all_declared_rounds_are_paid_for():
    task = task_privacy.TaskPrivacy(_terms())
    assert [task.refusal(_SEEN(n, 2, 3)) for n in range(6)] == [None] * 6
    assert task.refusal(_SEEN(6, 2, 3)) == "all 6 declared rounds are done"


def test_a_budget_ends_a_task_before_it_is_exceeded():
    costs = [_guarantee(n, 2, 3).epsilon for n in range(1, 7)]
    task = task_privacy.TaskPrivacy(_terms(max_epsilon=(costs[2] + costs[3]) / 2))
    refusals = [task.refusal(_SEEN(n, 2, min(n, 3))) for n in range(1, 5)]
    assert refusals[:2] == [None, None]
    assert refusals[2].startswith("round 4 would bring ε to")
    assert f"above the budget of {task.budget_epsilon:.2f}"[:25] in refusals[2]
    assert task.so_far(_SEEN(3, 2, 2)).epsilon <= task.budget_epsilon
    # A budget that is just what was asked for pays for all rounds.
    exact = task_privacy.TaskPrivacy(_terms(max_epsilon=costs[-1]))
    assert exact.refusal(_SEEN(5, 2, 3)) is None


def test_no_report_ends_a_task_early():
    for terms in (_terms(), _terms(max_epsilon=_guarantee(6, 2, 3).epsilon)):
        task = task_privacy.TaskPrivacy(terms)
        for num_rounds in range(1, 6):
            assert task.refusal(_SEEN(num_rounds, 1, num_rounds, num_rounds, 9, 1)) is None


def test_without_noise_nothing_is_promised():
    task = task_privacy.TaskPrivacy(_terms(strategy=None, noise_multiplier=0.0))
    assert task.so_far(_SEEN(2, 2, 1)).epsilon is None
    assert task.refusal(_SEEN(2, 1, 2)) is None
    statement = task.statement(_SEEN(2, 2, 1))
    assert statement.mechanism == "none"
    assert not statement.has_guarantee


def test_the_statement_of_a_task_that_is_over_is_of_its_rounds():
    task = task_privacy.TaskPrivacy(_terms())
    statement = task.statement(_SEEN(6, 2, 3))
    assert statement.epsilon == _guarantee(6, 2, 3).epsilon
    assert statement.declared == statement.accounted == _SCHEMA
    assert statement.observed.min_sep == 2
    assert statement.unit_of_privacy == "device"
    besides = statement.assumptions[-2:]
    assert besides == (task_privacy.honest_devices(None), sentences_lib.REPORTED_BY_DEVICES)
    assert "is not covered by ε; the others are." in besides[0] and "wrap" not in str(besides)
    assert statement.setting.endswith(summation_sentences.SUMS_ARE_SEEN)
    assert any("evaluation tasks" in text for text in statement.not_covered)
    assert statement.parameters["server_plan_sha256"] == "ab" * 32
    assert statement.parameters["num_rounds_done"] == 6
    assert statement_lib.PrivacyStatement.from_json(statement_text.to_json(statement)) == statement
    assert statement.headline_caveats == task.headline_caveats(_SEEN(6, 2, 3)) == ()
    assert "Each device enforces the declared participation" in statement_text.markdown(statement)
    assert "the record of participation is complete" not in statement_text.markdown(statement)


def test_what_devices_report_of_their_participation_makes_no_condition_go_away():
    statement = task_privacy.TaskPrivacy(_terms()).statement(_SEEN(6, 2, 3))
    assert (
        "differential privacy, if the participation schema was kept: devices keep to it by their "
        "own timers, and nobody can check what they report of it**"
        in statement_text.markdown(statement)
    )
    odds = statement_text.plain(statement)[2]
    assert "This holds if devices keep to the declared participation by their own timers" in odds
    assert "not observed" not in odds
    assert statement.observed is not None
    assert json.loads(statement_text.to_json(statement))["participation_record"] == "assumed"
    # Statements of earlier versions are read as they were written.
    earlier = dataclasses.replace(statement, assumptions=statement.assumptions[:-1])
    assert '"participation_record": "observed"' in statement_text.to_json(earlier)
    assert statement_lib.PrivacyStatement.from_json(statement_text.to_json(earlier)) == earlier


def _statement(**secure):
    terms = _terms(secure_aggregation=secure_groups.SecureGroups(**secure))
    return task_privacy.TaskPrivacy(terms).statement(_SEEN(6, 2, 3))


def test_of_a_single_report_the_noise_parties_leave_the_update_with_noise():
    secure = {"threat_model": "honest-but-curious", "least_group": 40, "threshold": 0.6}
    assert "updates with the noise, metrics without" not in _statement(**secure).setting
    for parties in (("00" * 32,), ("00" * 32, "11" * 32)):
        stated = _statement(**secure, noise_parties=parties)
        assert "who dropped out: updates with the noise, metrics without." in stated.setting
        assert ("and the noise party, which can subtract" in stated.from_whom) == (
            len(parties) == 1
        )
        assert ("unless all 2 noise parties collude" in stated.from_whom) == (len(parties) == 2)
        assert "protection is from everybody who sees" not in stated.from_whom


@pytest.mark.parametrize(
    ("secure", "sentences"),
    [
        (
            {"threat_model": "honest-but-curious", "least_group": 40, "threshold": 0.6},
            [
                "40 devices or more",
                "keeps to the protocol",
                "no more than 60 % of a group's devices",
                "a report that is the only other one in it",
                "A server that does not keep to the protocol can see single reports",
            ],
        ),
        (
            {
                "threat_model": "honest-but-curious",
                "least_group": 300,
                "threshold": 0.5,
                "neighbours": 150,
                "corrupt_fraction": 0.05,
            },
            ["no more than 5 %", "at most 2^-40 in each sum", "150 others, drawn at random"],
        ),
        (
            {"threat_model": "active-server", "least_group": 40, "threshold": 0.9},
            [
                "may do anything, under three conditions. First, fewer than a third",
                "counts once for each attestation token under which it takes part",
                "neither the issuer of these tokens is in league with it",
                "this key has signed no plan for the devices by which reports are seen",
                "same one to all devices of a group, but may make it for the purpose",
            ],
        ),
    ],
)
def test_a_statement_names_the_server_from_whom_reports_were_hidden(secure, sentences):
    statement = _statement(**secure)
    who_sees = summation_sentences.who_sees(secure_groups.SecureGroups(**secure))
    assert statement.setting.endswith(who_sees)
    for sentence in (*sentences, summation_sentences.NOT_HIDDEN):
        assert sentence in who_sees
    assert "what devices send" not in statement.setting
    assert not any("secure aggregation" in text for text in statement.caveats)
    plain = statement_text.plain(statement)[1]
    assert f"exact sums of what {secure['least_group']} devices or more send" in plain
    assert "under the conditions that Trust below has in full" in plain
    assert "nothing is proven for the others in it either" in plain
    assert summation_sentences.SUMS_ARE_SEEN not in statement.setting
    (honest,) = [one for one in statement.assumptions if "wrap around" in one]
    assert "The others are, but for those in a sum with a device that does not clip" in honest
    assert "the others are." not in honest and "nobody sees whether one does" in honest
    assert statement.parameters["secure_aggregation"] == secure["threat_model"]
    assert statement.parameters["secure_least_group"] == secure["least_group"]
    assert statement.parameters["secure_threshold"] == secure["threshold"]


@pytest.mark.parametrize(
    ("threshold", "percent"),
    [(2 / 3, "66.6 %"), (0.6666, "66.6 %"), (0.57, "57 %"), (0.9999, "99.9 %")],
)
def test_shares_of_colluding_devices_are_never_rounded_up(threshold, percent):
    secure = secure_groups.SecureGroups("honest-but-curious", 40, threshold)
    assert f"no more than {percent} of" in summation_sentences.who_sees(secure)


@pytest.mark.parametrize(
    ("secure", "in_league", "others"),
    [
        (("active-server", 2, 0.75), 0, "1 other report: "),
        (("active-server", 3, 0.75), 0, "2 other reports: "),
        (("active-server", 4, 0.75), 1, "2 other reports: "),
        (("active-server", 100, 0.75), 33, "66 other reports: "),
        (("honest-but-curious", 2, 0.6), 1, None),
        (("honest-but-curious", 10, 0.6), 6, "3 other reports: "),
        # 0.57 · 100 is a little less in floating point.
        (("honest-but-curious", 100, 0.57), 57, "42 other reports: "),
        (("honest-but-curious", 40, 0.75, 20, 0.1), 4, "35 other reports: "),
    ],
)
def test_a_statement_says_among_how_few_reports_one_is_hidden(secure, in_league, others):
    said = summation_sentences.who_sees(secure_groups.SecureGroups(*secure))
    assert f"In a group of {secure[1]}, with {in_league} of them in league, a report is " in said
    if others is None:
        assert "alone in what is left of the sum: it is not hidden." in said
    else:
        assert f"in one exact sum with {others}whoever knows them knows it." in said


@pytest.mark.parametrize(
    ("parameters", "named"),
    [({}, "loss and accuracy on the devices,"), ({"metrics": "areas (9 numbers)"}, "areas (9 num")],
)
def test_a_statement_names_the_metrics_that_it_does_not_cover(parameters, named):
    told = task_privacy.TaskPrivacy(_terms(parameters=parameters)).statement(_SEEN(6, 2, 3))
    (text,) = [one for one in told.not_covered if one.startswith("Metrics of rounds")]
    assert text.startswith(f"Metrics of rounds ({named}")


def test_whoever_ends_a_task_early_is_charged_for_what_it_might_have_run():
    statement = task_privacy.TaskPrivacy(_terms()).statement(_SEEN(2, None, 1))
    assert statement.epsilon == _guarantee(6, 2, 3).epsilon
    assert statement.parameters["num_rounds_charged"] == 6
    budget = _guarantee(4, 2, 3).epsilon
    limited = task_privacy.TaskPrivacy(_terms(max_epsilon=budget))
    assert limited.statement(_SEEN(2, None, 1)).epsilon == budget
    ended = limited.statement(_SEEN(4, 2, 2))
    assert ended.epsilon == budget
    assert ended.parameters["num_rounds_charged"] == 4


def _said(caveat):
    """Reads the ε in a caveat."""
    return float(caveat.split("ε would be ")[1].split(" ")[0].removesuffix("."))


def test_what_contradicts_the_declaration_stands_beside_epsilon():
    seen = _SEEN(6, 1, 3, 2, contradicting_reports=5, contradicting_rounds=1)
    task = task_privacy.TaskPrivacy(_terms())
    statement = task.statement(seen)
    assert statement.epsilon == _guarantee(6, 2, 3).epsilon
    assert statement.declared == statement.accounted == _SCHEMA
    assert statement.observed == seen.participation()
    contradiction, unknown = statement.headline_caveats
    assert "a stride of 1 rounds is below min_sep=2" in contradiction
    assert "5 reports in 1 round." in contradiction
    assert "of 2 rounds add up to what no devices can report" in unknown
    for caveat, schema in ((contradiction, (6, 1, 3)), (unknown, (6, 1, 5))):
        exact = _guarantee(*schema).epsilon
        assert statement.epsilon < exact <= _said(caveat) <= 1.001 * exact
    assert f"**{contradiction}**" in statement_text.markdown(statement)
    counts = ("contradicting_reports", "contradicting_rounds", "unknown_rounds")
    assert [statement.parameters[name] for name in counts] == [5, 1, 2]
    assert statement_lib.PrivacyStatement.from_json(statement_text.to_json(statement)) == statement
    metrics = task.so_far(seen).metrics()
    assert metrics["participation/contradicting_reports"] == 5
    assert metrics["participation/unknown_rounds"] == 2
    assert task.headline_caveats(seen) == statement.headline_caveats


def test_what_is_said_of_a_task_that_goes_on_is_for_as_many_rounds_as_its_epsilon():
    seen = _SEEN(2, 1, 2, 0, 1, 1)
    task = task_privacy.TaskPrivacy(_terms())
    for caveats, num_rounds in (
        (task.headline_caveats(seen), 2),
        (task.statement(seen).headline_caveats, 6),
    ):
        (caveat,) = caveats
        exact = _guarantee(num_rounds, 1, 3).epsilon
        assert exact <= _said(caveat) <= 1.001 * exact


def test_contradictions_that_an_earlier_version_did_not_count_are_said():
    (contradiction,) = task_privacy.TaskPrivacy(_terms()).headline_caveats(_SEEN(6, 1, 4))
    assert "max_participations=3" in contradiction
    assert "of a number that is not known" in contradiction


def test_tasks_of_one_population_are_composed():
    terms = _terms()
    other = _guarantee(3, 2, 3, noise_multiplier=2.0)
    statement = task_privacy.TaskPrivacy(terms).statement(
        _SEEN(6, 2, 3), others={"more": other.rho_zcdp}
    )
    rho = guarantee.composed_rho([_guarantee(6, 2, 3), other])
    epsilon = gaussian.epsilon(gaussian.mu_from_rho(rho), 1e-5)
    (caveat,) = statement.headline_caveats
    assert "training of: more" in caveat
    found = float(caveat.split("ε = ")[1].split(" ")[0])
    assert epsilon <= found <= epsilon * 1.01
    without = task_privacy.TaskPrivacy(terms).statement(_SEEN(6, 2, 3), others={"more": None})
    assert "nothing is promised for all together" in without.headline_caveats[0]


def test_what_begins_with_other_peoples_weights_says_so():
    terms = _terms(initial_weights_source="the model 'old'", vocabulary_is_public=False)
    statement = task_privacy.TaskPrivacy(terms).statement(_SEEN(6, 2, 3))
    assert any("'old'" in text for text in statement.not_covered)
    assert len(statement.headline_caveats) == 2
    assert task_privacy.TaskPrivacy(terms).headline_caveats() == statement.headline_caveats


def test_what_begins_with_the_model_of_a_run_is_composed_with_it():
    earlier = composition.Spent("first", delta=1e-6, epsilon=2.0)
    terms = _terms(initial_weights_source="the run 'first'", earlier_runs=(earlier,))
    statement = task_privacy.TaskPrivacy(terms).statement(_SEEN(6, 2, 3))
    (says,) = statement.headline_caveats
    assert "run 'first' (ε = 2 at δ = 1e-06). Whether they trained on the same users is not" in says
    together = statement.parameters["epsilon_with_earlier_runs"]
    assert together == pytest.approx(statement.epsilon + 2.0)
    again = terms_lib._from_dict(json.loads(terms.to_bytes()))
    assert again == terms and b"earlier_runs" not in _terms().to_bytes()


def test_there_is_no_statement_of_nothing():
    with pytest.raises(ValueError, match="released no round"):
        task_privacy.TaskPrivacy(_terms()).statement(_SEEN())
    evaluation = _terms(kind="evaluation", model_of="small", strategy=None)
    with pytest.raises(ValueError, match="no privacy statement"):
        task_privacy.TaskPrivacy(evaluation).statement(_SEEN(1, None, 1))
