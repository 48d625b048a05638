"""Tests of what a run says of itself on the terminal."""

from __future__ import annotations

import sys

import pytest

from tff_dpftrl.accounting import guarantee
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema
from tff_dpftrl.training import config, report


def test_a_delta_that_protects_nobody_is_not_quoted_alone():
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=9.0, schema=schema.MinSep(9, 9, 1), delta=0.5
    )
    with pytest.warns(UserWarning, match="not below 1 / 27"):
        flattering = statement_lib.dp_ftrl_statement(claim, unit_of_privacy="user", num_users=27)
    promise = report._promise(flattering)
    assert promise.startswith("Privacy: ε = 0 at δ = 0.5")
    title = report._title(config.TrainingConfig(noise_multiplier=9.0), flattering)
    assert title.endswith("with a caveat: see privacy_statement.md")
    assert promise.endswith(flattering.headline_caveats[0])


def test_a_private_vocabulary_is_said_beside_epsilon():
    private = config.TrainingConfig(noise_multiplier=9.0, vocabulary="private")
    (caveat,) = report._headline_caveats(private, {})
    assert "vocabulary were counted on the training users without noise" in caveat
    public = config.TrainingConfig(noise_multiplier=9.0)
    assert report._headline_caveats(public, {}) == ()
    # Text that was given in memory has words of its own, whatever the config says.
    assert report._headline_caveats(public, {"vocabulary_is_public": False}) == (caveat,)
    assert report._headline_caveats(public, {"vocabulary_is_public": True}) == ()


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
    options = config.TrainingConfig(noise_multiplier=9.0)
    expected = (sentences.INITIAL_WEIGHTS,) if is_said else ()
    assert report._headline_caveats(options, facts) == expected


def test_what_tells_of_a_cohort_is_not_for_publishing():
    exact = [column.name for column in report.COLUMNS if column.is_exact]
    assert exact == ["loss", "top1", "clients", "seconds"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
