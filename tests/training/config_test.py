"""Tests of the training config: types and bounds."""

import re

import pytest

from tff_dpftrl.accounting import defaults
from tff_dpftrl.mechanisms import workload
from tff_dpftrl.runs import amplified_privacy, sampled_privacy
from tff_dpftrl.training import composed, config


def test_every_option_has_help_and_a_group():
    options = composed.options_of(config.TrainingConfig)
    assert len(options) == 78
    for name, (field, _) in options.items():
        assert field.metadata["help"].endswith("."), name
        assert field.metadata["group"], name


def test_integers_are_accepted_for_floats_and_nothing_else_is_converted():
    made = config.TrainingConfig.of(noise_multiplier=1)
    assert made.privacy.noise_multiplier == 1.0 and isinstance(made.privacy.noise_multiplier, float)
    with pytest.raises(ValueError, match="num_rounds must be of type int, got '5'"):
        config.TrainingConfig.of(noise_multiplier=1.0, num_rounds="5")
    with pytest.raises(ValueError, match="num_rounds must be of type int, got True"):
        config.TrainingConfig.of(noise_multiplier=1.0, num_rounds=True)


_DP = {"vocabulary": "dp", "target_epsilon": 1.0}


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"target_epsilon": 1.0, "base_vocabulary": "docs"},
            "base_vocabulary has no meaning with a vocabulary",
        ),
        (_DP | {"base_vocabulary": "private"}, "base_vocabulary must be public, and 'private' is"),
        (_DP | {"base_vocabulary": "dp"}, "base_vocabulary must be public, and 'dp' is counted"),
        (_DP | {"tokenizer": "wordpiece"}, "'dp' counts words, and tokenizer 'wordpiece' learns"),
        (
            {"vocabulary": "dp", "noise_multiplier": 1.0},
            "'dp' takes a share of the budget: give target_epsilon",
        ),
        ({"vocabulary": "dp", "mechanism": "none"}, "'dp' takes a share of the budget"),
        (
            _DP | {"simulate_report_goal": 40, "simulate_population": 1000},
            "'dp' has no meaning with simulate_report_goal",
        ),
    ],
)
def test_a_vocabulary_that_no_budget_is_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config.TrainingConfig.of(**options)


@pytest.mark.parametrize(
    "given, base, size",
    [
        ({"data": "docs"}, "docs", 4000),
        ({"data": "u.csv"}, "english", 4000),
        ({"data": "u.csv", "vocabulary_size": 7}, "english", 7),
        ({"base_vocabulary": "none"}, "none", 4000),
        ({"base_vocabulary": "docs", "data": "u.csv"}, "docs", 4000),
        ({"initial_weights": "there"}, "there/vocabulary.json", None),
    ],
)
def test_words_of_users_are_added_to_the_usual_public_list(given, base, size):
    made = config.TrainingConfig.of(**_DP | given).with_defaults()
    language = made.language
    assert (language.vocabulary, language.base_vocabulary) == ("dp", base)
    assert language.vocabulary_size == size
    assert made.with_defaults() == made


def test_a_share_for_the_vocabulary_is_kept_beside_the_defaults():
    shares = "vocabulary=0.1,metrics=0.05"
    made = config.TrainingConfig.of(**_DP | {"budget_shares": shares}).with_defaults()
    assert (made.language.vocabulary, made.releases.budget_shares) == ("dp", shares)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs either noise_multiplier or target_epsilon, got neither"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "got both"),
        ({"mechanism": "none", "noise_multiplier": 1.0}, "no meaning with mechanism 'none'"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be finite"),
        ({"target_epsilon": 0.0}, "target_epsilon must be a finite number, above 0, got 0"),
        (
            {"noise_multiplier": 1.0, "delta": 1.0},
            "delta must be a finite number, above 0 and below 1, got 1",
        ),
        (
            {"noise_multiplier": 1.0, "clip_norm": 0.0},
            "clip_norm must be a finite number, at least 1e-06 .*, got 0",
        ),
        ({"noise_multiplier": 1.0, "num_rounds": 0}, "num_rounds must be at least 1"),
        ({"noise_multiplier": 1.0, "mechanism": "laplace"}, "mechanism must be one of blt, "),
        (
            {"noise_multiplier": 1.0, "mechanism": "tree", "buffers": 2},
            "buffers is for the mech",
        ),
        (
            {"mechanism": "none", "noise": "secure"},
            "noise 'secure' has no meaning with mechanism 'none'",
        ),
        ({"noise_multiplier": 1.0, "noise": "aes"}, "noise must be one of philox, secure"),
        (
            {"noise_multiplier": 1.0, "server_momentum": 1.0},
            "server_momentum must be a finite number, below 1, got 1",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        config.TrainingConfig.of(**options)


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        *(
            ({name: value}, r"at least 1e-37 and at most 1e\+38")
            for name in ("client_learning_rate", "server_learning_rate", "server_adam_epsilon")
            for value in (1e39, 1e-46)
        ),
        *(({"clip_norm": value}, r"at least 1e-06 and at most 1e\+18") for value in (1e-7, 1e19)),
        ({"noise_multiplier": 1e19}, r"at most 1e\+18"),
        ({"stop_at_accuracy": 30.0}, "above 0 and at most 1"),
        ({"max_decay": 0.0}, "above 0 and at most 1"),
        ({"max_decay": 1.5}, "above 0 and at most 1"),
    ],
)
def test_numbers_that_no_run_can_use_are_refused_before_data_is_read(options, bounds):
    ((name, value),) = options.items()
    message = f"^{name} must be a finite number, {bounds}, got {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=message):
        config.TrainingConfig.of(**{"noise_multiplier": 1.0} | options)


@pytest.mark.parametrize(
    ("name", "value"), [("clip_learning_rate", 1e39), ("target_unclipped_quantile", 1.5)]
)
def test_options_of_adaptive_clipping_have_bounds_and_are_for_it_alone(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number, at most"):
        config.TrainingConfig.of(noise_multiplier=1.0, adaptive_clipping=True, **{name: value})
    with pytest.raises(ValueError, match=f"{name} has no meaning with algorithm 'dp-ftrl', but"):
        config.TrainingConfig.of(noise_multiplier=1.0, **{name: value})
    # An earlier version took it there, where it has no effect.
    assert config.TrainingConfig.of_begun(noise_multiplier=1.0, **{name: value})


def test_paths_become_absolute_and_keywords_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = config.TrainingConfig.of(
        noise_multiplier=1.0, data="a/users.jsonl", vocabulary="../words.txt", strategy="s.json"
    ).with_absolute_paths()
    assert named.language.data == str(tmp_path / "a" / "users.jsonl")
    assert named.language.vocabulary == str(tmp_path / ".." / "words.txt")
    assert named.privacy.strategy == str(tmp_path / "s.json")
    for vocabulary in ("docs", "private"):
        made = config.TrainingConfig.of(noise_multiplier=1.0, vocabulary=vocabulary)
        assert made.with_absolute_paths() == made


def test_the_privacy_asked_for_is_that_of_the_algorithm():
    sampled = config.TrainingConfig.of(noise_multiplier=2.0, algorithm="dp-fedsgd").request()
    assert sampled == sampled_privacy.SampledPrivacy(
        algorithm="dp-fedsgd",
        num_rounds=100,
        clients_per_round=20,
        clip_norm=0.5,
        delta=defaults.DELTA,
        noise_multiplier=2.0,
    )
    adaptive = config.TrainingConfig.of(
        target_epsilon=2.0, adaptive_clipping=True, num_rounds=1500, mechanism="blt", buffers=2
    ).request()
    assert adaptive.starts == (0, 128, 1152) and adaptive.adaptive_clipping
    assert adaptive.options.buffers == 2 and adaptive.target_epsilon == 2.0
    assert config.TrainingConfig.of(mechanism="none").request().mechanism is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"simulate_report_goal": 100}, "go together"),
        ({"simulate_population": 100}, "go together"),
        ({"simulate_report_goal": 100, "simulate_population": 99}, "is below"),
        ({"simulate_report_goal": 10, "simulate_population": 99}, "clients_per_round=20 exceeds"),
    ],
)
def test_a_simulation_needs_a_larger_run(options, message):
    with pytest.raises(ValueError, match=message):
        config.TrainingConfig.of(noise_multiplier=1.0, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "none"},
        {"noise_multiplier": 1.0, "max_epsilon": 3.0},
        {"noise_multiplier": 1.0, "secagg_bits": 16},
    ],
    ids=["none", "max_epsilon", "secagg_bits"],
)
def test_what_has_no_meaning_in_a_simulation_is_refused(options):
    with pytest.raises(ValueError, match="has no meaning with simulate_report_goal, because"):
        config.TrainingConfig.of(simulate_report_goal=100, simulate_population=1000, **options)


def test_adam_adds_something_to_a_moment_that_may_be_zero():
    with pytest.raises(ValueError, match="server_adam_epsilon must be .* at least 1e-37"):
        config.TrainingConfig.of(noise_multiplier=1.0, server_adam_epsilon=0.0)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_decay_of_averages_is_between_zero_and_one(value):
    with pytest.raises(ValueError, match="iterate_averaging must be"):
        config.TrainingConfig.of(noise_multiplier=1.0, iterate_averaging=value)


def test_a_warm_up_ends():
    with pytest.raises(ValueError, match="server_warmup_rounds must be below num_rounds=10"):
        config.TrainingConfig.of(noise_multiplier=1.0, num_rounds=10, server_warmup_rounds=10)


@pytest.mark.parametrize(
    "options", [{"estimator": "clipped-denominator"}, {"per_layer_clipping": True}]
)
def test_options_of_sampled_algorithms_are_refused_for_dp_ftrl(options):
    (name,) = options
    with pytest.raises(
        ValueError,
        match=f"{name} has no meaning with algorithm 'dp-ftrl', but with algorithm 'dp-f",
    ):
        config.TrainingConfig.of(noise_multiplier=1.0, **options)
    of_run = config.TrainingConfig.of(algorithm="dp-fedavg", noise_multiplier=1.0, **options)
    assert getattr(of_run.request(), name) == options[name]


def test_later_clip_norms_stand_behind_the_rounds_before_them():
    options = {"algorithm": "dp-fedsgd", "noise_multiplier": 1.0, "num_rounds": 100}
    made = config.TrainingConfig.of(**options, clip_norm_schedule="40:0.3, 60:0.1")
    assert made.request().later_clip_norms == ((40, 0.3), (60, 0.1))
    assert config.TrainingConfig.of(**options).request().later_clip_norms == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm_schedule": "40"}, "like 2000:7.9,4000:5, got '40'"),
        ({"clip_norm_schedule": "forty:0.3"}, "like 2000:7.9,4000:5"),
        ({"clip_norm_schedule": ""}, "like 2000:7.9,4000:5"),
        ({"clip_norm_schedule": "0:0.3"}, "between 0 and num_rounds=100, got '0:0.3'"),
        ({"clip_norm_schedule": "60:0.3,40:0.1"}, "growing numbers of rounds"),
        ({"clip_norm_schedule": "100:0.3"}, "growing numbers of rounds"),
        ({"clip_norm_schedule": "40:nan"}, "clip_norm_schedule must be .* at least 1e-06"),
        (
            {"clip_norm_schedule": "40:0.3,60:1e19"},
            "clip_norm_schedule must be .*, got 1e.19. Resc",
        ),
        (
            {"clip_norm_schedule": "40:0.3", "algorithm": "dp-ftrl"},
            "has no meaning with algorithm 'dp-ftrl'",
        ),
        (
            {"clip_norm_schedule": "40:0.3", "sampling": "cyclic", "mechanism": "bandtoep"},
            "has no meaning with sampling",
        ),
    ],
)
def test_what_is_no_schedule_of_clip_norms_is_refused(options, message):
    given = {"algorithm": "dp-fedavg", "noise_multiplier": 1.0, "num_rounds": 100}
    with pytest.raises(ValueError, match=message):
        config.TrainingConfig.of(**given | options)


def test_a_workload_is_that_of_the_server():
    options = {"noise_multiplier": 1.0, "num_rounds": 30, "workload": "auto"}
    made = config.TrainingConfig.of(server_momentum=0.8, server_decay="cosine", **options)
    rule = workload.UpdateRule(momentum=0.8, decay="cosine")
    assert made.request().options.workload == rule.workload(30)
    plain = config.TrainingConfig.of(server_optimizer="sgd", **options)
    assert (
        plain.request().options == config.TrainingConfig.of(noise_multiplier=1.0).request().options
    )
    for changes, message in (
        ({"mechanism": "tree"}, "workload is for the mechanism blt or .* not for tree"),
        ({"strategy": "file"}, "workload has no meaning with a strategy file"),
        ({"algorithm": "dp-fedavg"}, "workload has no meaning with algorithm 'dp-fedavg' or"),
    ):
        with pytest.raises(ValueError, match=message):
            config.TrainingConfig.of(**options | changes)


_CYCLIC = {"sampling": "cyclic", "mechanism": "bandtoep", "bands": 4, "noise_multiplier": 1.0}


def test_a_sampling_asks_for_amplified_privacy_whatever_the_algorithm():
    asked = config.TrainingConfig.of(**_CYCLIC).request()
    assert isinstance(asked, amplified_privacy.AmplifiedPrivacy)
    assert (asked.sampling, asked.options.bands, asked.min_sep) == ("cyclic", 4, None)
    assert config.TrainingConfig.of(**_CYCLIC, algorithm="dp-fedavg").request() == asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": "dp-fedsgd"},
            "mechanism has no meaning with algorithm 'dp-fedavg' or 'dp-fedsgd'",
        ),
        ({"adaptive_clipping": True}, "adaptive_clipping has no meaning with sampling 'cyclic'"),
        ({"secagg_bits": 16}, "secagg_bits has no meaning with sampling"),
        ({"max_participations": 3}, "max_participations has no meaning with sampling"),
        (
            {"algorithm": "dp-fedavg", "estimator": "clipped-denominator"},
            "estimator has no meaning with sampling",
        ),
        (
            {"mechanism": "none", "bands": None, "noise_multiplier": None},
            "sampling has no meaning with mechanism 'none'",
        ),
        (
            {"sampling": None, "algorithm": "dp-fedavg", "mechanism": "blt"},
            "with sampling 'cyclic' or 'bins'",
        ),
    ],
)
def test_what_no_sampled_run_can_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config.TrainingConfig.of(**(_CYCLIC | options))
