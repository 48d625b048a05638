"""Tests of what the README of a task's folder promises of privacy."""

import dataclasses

import pytest

from tests.runtime.tasks import small_folder
from tff_dpftrl.accounting import composition
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.tasks import readme, task_privacy

_SEEN = participation_histograms.ObservedRounds(6, 2, 3)


class _OfAnAuthor(tree.Tree):
    """A mechanism of code outside the package."""


def _text(terms):
    return readme.text(
        terms,
        [plan_pb2.DevicePlan()],
        population.RoundSettings(goal_count=3),
        features={"text": named_tensors.Feature("text", None)},
        max_rows=None,
        model="a few weights",
        tested=[],
    )


@pytest.mark.parametrize(
    ("changes", "caveats"),
    [
        ({}, []),
        ({"vocabulary_is_public": False}, [sentences.PRIVATE_VOCABULARY]),
        (
            {"vocabulary_is_public": False, "vocabulary_is_noised": True},
            [sentences.NOISED_ELSEWHERE],
        ),
        ({"initial_weights_source": "the model 'old'"}, [sentences.INITIAL_WEIGHTS]),
        ({"strategy": _OfAnAuthor(6)}, ["the author of the mechanism 'tree' claims"]),
        ({"num_devices": 50_000}, ["δ = 1e-05 times the 50000 devices is 0.5:"]),
        (
            {
                "vocabulary_is_public": False,
                "initial_weights_source": "the run 'first'",
                "earlier_runs": (composition.Spent("first", delta=1e-6, epsilon=2.0),),
            },
            [sentences.PRIVATE_VOCABULARY, "run 'first' (ε = 2 at δ = 1e-06). Whether they"],
        ),
        (
            {"earlier_runs": (composition.Spent("first", delta=1e-6, epsilon=None),)},
            ["'first' (without a guarantee). Whether they trained on the same users is not known."],
        ),
    ],
)
def test_what_must_stand_beside_epsilon_stands_below_the_promise(changes, caveats):
    terms = dataclasses.replace(small_folder.TERMS, **changes)
    _, _, privacy = _text(terms).partition("## Privacy")
    said = [line.strip("*") for line in privacy.splitlines() if line.startswith("**")]
    for one, caveat in zip(said, caveats, strict=True):
        assert caveat in one
    # The statement of the finished task says the same.
    statement = task_privacy.TaskPrivacy(terms).statement(_SEEN)
    assert said == list(statement.headline_caveats)


@pytest.mark.parametrize("is_secure", [False, True])
def test_it_says_whom_a_device_that_does_not_follow_the_plan_concerns(is_secure):
    text = _text(small_folder.SECURE_TERMS if is_secure else small_folder.TERMS)
    assert ("is not covered by ε; the others are." in text) == (not is_secure)
    assert text.count("it can make the sum wrap around, and nothing is proven") == is_secure
    assert sentences.REPORTED_BY_DEVICES in text


def test_without_noise_there_is_no_promise_and_no_caveat():
    terms = dataclasses.replace(
        small_folder.TERMS, strategy=None, noise_multiplier=0.0, vocabulary_is_public=False
    )
    text = _text(terms)
    assert "NO guarantee: no noise is added." in text and "**" not in text
