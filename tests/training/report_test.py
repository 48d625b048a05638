"""Tests of what a run says of itself on the terminal."""

from __future__ import annotations

import math

import pytest

from tff_dpftrl.accounting import guarantee, parts
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema
from tff_dpftrl.runs import joint_runs, reporting
from tff_dpftrl.training import metrics_columns, report, vocabulary_share


def test_a_delta_that_protects_nobody_is_not_quoted_alone():
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=9.0, schema=schema.MinSep(9, 9, 1), delta=0.5
    )
    with pytest.warns(UserWarning, match="not below 1 / 27"):
        flattering = statement_lib.dp_ftrl_statement(claim, unit_of_privacy="user", num_users=27)
    promise = reporting.promise(flattering)
    assert promise.startswith("Privacy: ε = 0 at δ = 0.5")
    title = report._title("docs", flattering)
    assert title.endswith("with a caveat: see privacy_statement.md")
    assert promise.endswith(flattering.headline_caveats[0])


def test_a_private_vocabulary_is_said_beside_epsilon():
    (caveat,) = report._headline_caveats({"vocabulary": "private"}, {})
    assert "vocabulary were counted on protected users without noise" in caveat
    assert report._headline_caveats({"vocabulary": "docs"}, {}) == ()
    # Text that was given in memory has words of its own, whatever the config says.
    assert report._headline_caveats({"vocabulary": "docs"}, {"vocabulary_is_public": False}) == (
        caveat,
    )
    assert report._headline_caveats({"vocabulary": "docs"}, {"vocabulary_is_public": True}) == ()


def test_a_run_that_a_choice_is_made_among_says_so_beside_epsilon():
    config, facts = {"vocabulary": "docs"}, {joint_runs.IS_ONE: True}
    assert report._headline_caveats(config, facts) == (sentences.ONE_OF_A_CHOICE,)


def test_words_counted_with_noise_are_a_part_of_epsilon_of_the_run_that_counted_them():
    facts = {"vocabulary_is_public": False, "vocabulary_is_noised": True}
    (caveat,) = report._headline_caveats({"vocabulary": "vocabulary.json"}, facts)
    assert "another run protects: its statement covers" in caveat
    part = vocabulary_share.part(1.0, 1e-5)
    assert report._headline_caveats({"vocabulary": "dp"}, facts, others=parts.to_json([part])) == ()
    # Whatever the options say: without the part nothing covers the words.
    assert report._headline_caveats({"vocabulary": "dp"}, facts) == (caveat,)


@pytest.mark.parametrize(
    ("facts", "is_said"),
    [
        ({"initial_weights_source": "a run", "initial_weights_are_public": False}, True),
        ({"initial_weights_source": "begun before this was recorded"}, True),
        ({"initial_weights_source": "a book", "initial_weights_are_public": True}, False),
        ({}, False),
    ],
)
def test_weights_that_may_tell_of_people_are_said_beside_epsilon(facts, is_said):
    expected = (sentences.INITIAL_WEIGHTS,) if is_said else ()
    assert report._headline_caveats({"vocabulary": "docs"}, facts) == expected


def test_what_tells_of_a_cohort_is_not_for_publishing():
    exact = [column.name for column in metrics_columns.COLUMNS if column.is_exact]
    assert exact == ["loss", "top1", "clients", "seconds"]


@pytest.mark.parametrize(
    "losses, failed",
    [([math.log(34)], False), ([9.0, 2.0], False), ([2.0, 3.6], True), ([], False)],
)
def test_a_model_that_is_worse_than_a_guess_is_called_so(losses, failed):
    warning = report.failure([{"eval_loss": loss} for loss in losses], vocabulary_size=34)
    assert (warning is not None) == failed
    if failed:
        assert "3.6, that of taking all words for equally likely is 3.526" in warning
