"""Tests of the options of fine-tuning: what fits together, and what is refused."""

import dataclasses

import pytest

from tff_dpftrl.finetuning import config
from tff_dpftrl.training import options

_NEEDED = {"initial_weights": "pretrained", "target_epsilon": 4.0, "compute_budget": 64}


def test_every_option_has_help_and_a_group():
    for field in dataclasses.fields(config.FinetuningConfig):
        assert field.metadata["help"].endswith((".", "; or")), field.name
        assert field.metadata["group"], field.name


@pytest.mark.parametrize(
    "given, message",
    [
        ({"initial_weights": None}, "initial_weights must name the folder of the model"),
        ({"target_epsilon": None}, "Give either target_epsilon or noise_multiplier, got neither"),
        ({"noise_multiplier": 1.0}, "got both"),
        ({"compute_budget": 0}, "compute_budget must be at least 1"),
        ({"group_size": 0, "sampling": "user"}, "group_size must be at least 1"),
        (
            {"group_size": 4},
            "group_size has no meaning with sampling 'auto', but",
        ),
        ({"sampling": "example", "cohort_size": 8}, "cohort_size has no meaning with sampling"),
        (
            {"sampling": "user", "group_size": 2, "cohort_size": 8},
            "group_size=2 and cohort_size=8 make 16 gradients in a step, not compute_budget=64: "
            "leave one of the three out",
        ),
        (
            {"sampling": "user", "rows_per_owner": 2},
            "rows_per_owner has no meaning with",
        ),
        (
            {"sampling": "example", "rows_per_owner": 2, "group_size": 3},
            "group_size=3 is not rows_per_owner=2",
        ),
        (
            {"sampling": "example", "group_size": 2, "group_size_epsilon": 1.0},
            "group_size_epsilon is for a group size that is chosen privately",
        ),
        (
            {"sampling": "user", "group_size_looked_at_users": True},
            "group_size_looked_at_users is for a group_size that is given",
        ),
        (
            {"sampling": "cyclic", "sampled_unit": "example", "group_size": 2, "cohort_size": 8},
            "cohort_size is a number of users",
        ),
        ({"sampling": "passes"}, "sampling 'passes' needs group_size"),
        ({"sampling": "cyclic", "bands": 0}, "bands must be at least 1"),
        ({"sampling": "cyclic", "bands": "all"}, "bands must be one of auto"),
        (
            {"sampling": "cyclic", "bands": 8, "min_sep": 4},
            "min_sep=4 is less than the 8 bands, .* raise min_sep to 8, or lower bands",
        ),
        ({"bands": 8}, "bands has no meaning with sampling 'auto', but with 'cyclic'"),
        ({"sampling": "bins", "min_sep": 8}, "min_sep has no meaning with sampling 'bins'"),
        ({"sampled_unit": "example"}, "sampled_unit has no meaning with sampling 'auto'"),
        (
            {"sampling": "cyclic", "sampled_unit": "example"},
            "sampled_unit 'example' needs group_size",
        ),
        (
            {"sampling": "cyclic", "mechanism": "blt"},
            "mechanism has no meaning with sampling 'cyclic', but with 'passes' or 'bins'",
        ),
        ({"sampling": "cyclic", "declared_units": 9}, "declared_units has no meaning with"),
        (
            {
                "sampling": "cyclic",
                "target_epsilon": None,
                "noise_multiplier": 1.0,
                "group_size": 1,
            },
            "bands are chosen by their noise at one ε: give target_epsilon, or bands",
        ),
        ({"sampling": "passes", "group_size": 2}, "sampling 'passes' needs delta"),
        ({"compute_budget": 31}, "compute_budget=31 is below 32, the cohort that Estimate-and-D"),
        (
            {"sampling": "user", "compute_budget": 4, "cohort_size": 32},
            "compute_budget=4 is smaller than cohort_size=32",
        ),
        ({"target_epsilon": 0.05}, "target_epsilon=0.05 is not above group_size_epsilon=0.05"),
        (
            {"weight_decay": 0.1},
            "weight_decay has no meaning with optimizer 'adam', but",
        ),
        ({"optimizer": "sgd", "momentum": 0.5}, "momentum has no meaning with optimizer 'sgd'"),
        (
            {"sampling": "user", "group_size": 2, "group_size_epsilon": 1.0},
            "group_size_epsilon has no meaning with sampling 'user'",
        ),
        ({"deterministic_noise_seed": -1}, "deterministic_noise_seed must be at least 0"),
        (
            {"max_epsilon": 1.0, "deterministic_noise_seed": 3},
            "max_epsilon has no meaning with deterministic_noise_seed",
        ),
        (
            {"sampling": "user", "compute_budget": None, "cohort_size": 64},
            "cohort_size needs group_size or compute_budget beside it",
        ),
        (
            {"sampling": "user", "target_epsilon": None, "noise_multiplier": 1.0},
            "chosen by their noise at one ε: give target_epsilon",
        ),
        (
            {"sampling": "passes", "group_size": 2, "delta": 1e-6, "declared_units": 5},
            "declared_units has no meaning with sampling 'passes'",
        ),
        ({"mechanism": "tree"}, "mechanism has no meaning with sampling 'auto'"),
        ({"warmup_steps": 500}, "warmup_steps must be below num_steps=500"),
        ({"second_moment_decay": 1.0}, "second_moment_decay must be a finite number, below 1"),
        ({"delta": 1.5}, "delta must be a finite number"),
        ({"clip_norm": 1e19}, r"clip_norm must be .* at most 1e\+18, got 1e\+19. Rescale"),
        ({"learning_rate": 1e39}, r"learning_rate must be .* at most 1e\+38, got 1e\+39"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, "),
        ({"iterate_averaging": 1.0}, "iterate_averaging must be"),
        ({"stop_at_accuracy": 30.0}, "at most 1, got 30.0. It is a share: 0.3 for 30 %."),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        config.FinetuningConfig(**_NEEDED | given)


def test_budget_group_size_and_cohort_may_all_be_given_where_they_agree():
    given = {"compute_budget": 64, "group_size": 8, "cohort_size": 8}
    assert config.FinetuningConfig(**_NEEDED | given | {"sampling": "user"}).cohort_size == 8
    passes = {"sampling": "passes", "delta": 1e-6}
    assert config.FinetuningConfig(**_NEEDED | given | passes).group_size == 8


@pytest.mark.parametrize("given", [{"compute_budget": 64}, {}])
def test_all_that_is_missing_is_named_at_once(given):
    with pytest.raises(ValueError) as refused:
        config.FinetuningConfig(**{"sampling": "passes"} | given)
    for words in ("initial_weights must", "target_epsilon or", "group_size", "needs delta"):
        assert words in str(refused.value)


def test_earlier_runs_have_options_without_effect_on_record():
    begun = {"mechanism": "blt", "sampling": "user", "group_size": 2, "momentum": 0.5}
    found = config.FinetuningConfig.of_begun(**_NEEDED | begun | {"optimizer": "sgd"})
    assert found.mechanism is None and found.momentum == 0.9 and found.group_size == 2


def test_rounds_are_no_option_of_it():
    with pytest.raises(ValueError, match="unknown option 'num_rounds'"):
        options.config_from_mapping({"num_rounds": 3}, "x.toml", config.FinetuningConfig)
