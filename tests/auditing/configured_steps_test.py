"""What a fine-tuning config would run is audited: correct configs, and a planted fault."""

import dataclasses

import pytest

from tests.finetuning import toy_finetuning
from tff_dpftrl.auditing import audit_report, claim, configured_steps
from tff_dpftrl.cli import main
from tff_dpftrl.finetuning import clipped_sums, ghost, private_steps

toy = toy_finetuning.toy
# Chance that a correct config is called violated in a test: the noise has no seed here.
_ERROR_RATE = 1e-6
_PASSES = {"sampling": "passes", "group_size": 2, "cohort_size": 8, "delta": 1e-5}
_TURNS = {"group_size": 2, "cohort_size": 8, "noise_multiplier": 0.7}


def _audit(toy, num_users=40, **options):
    config = toy_finetuning.config(toy, **options)
    return configured_steps.audit_config(config, num_users=num_users, error_rate=_ERROR_RATE)


@pytest.mark.slow  # `step_probes_test` audits steps by default.
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**_PASSES, "noise_multiplier": 0.7, "adapter_rank": 2},
        {"sampling": "example", "compute_budget": 90, "target_epsilon": 4.0},
        {"sampling": "auto", "compute_budget": 64, "target_epsilon": 4.0},
        {**_TURNS, "sampling": "cyclic", "bands": 2},
        {**_TURNS, "sampling": "bins"},
        {**_TURNS, "sampling": "b-min-sep", "bands": 2},
        {"clip_norm": None, "normalised_clipping": False, "iterate_averaging": 0.9},
    ],
    ids=str,
)
def test_correct_configs_are_consistent(toy, options):
    found = _audit(toy, **options)
    assert found.headline.startswith("consistent with the claim (5 of 5 tests could be done")
    added = next(one for one in found.findings if one.test == "what one unit adds")
    assert float(added.says.split()[2]) > 0.999  # The clip was reached.


@pytest.fixture
def asked(monkeypatch):
    """Noise and error rate of audits that test nothing: a real one traces graphs for seconds."""
    asked = []

    def audit_steps(build, *_, plan, error_rate, **__):
        build(None)
        asked.append((plan.noise_multiplier, error_rate))
        return audit_report.AuditReport("steps", claim.Claim(1.0, 1e-6), (), is_ours=True)

    monkeypatch.setattr(configured_steps.step_probes, "audit_steps", audit_steps)
    return asked


def test_released_metrics_count_as_not_tested(toy, asked):
    (found,) = _audit(toy, metrics_epsilon=0.5).findings
    assert (found.test, found.outcome) == ("release of the training metrics", "not tested")
    assert not _audit(toy).findings


@pytest.mark.slow
def test_users_are_counted_in_the_corpus_and_their_texts_are_not_used(toy):
    config = toy_finetuning.config(toy)
    counted = configured_steps.audit_config(config, error_rate=_ERROR_RATE)
    assert ", 48 users with 2 examples each, 331 trained weights" in counted.subject
    elsewhere = dataclasses.replace(config, data=str(toy / "missing.jsonl"))
    found = configured_steps.audit_config(elsewhere, num_users=48, error_rate=_ERROR_RATE)
    assert found.claim == counted.claim


@pytest.mark.slow
def test_a_third_of_the_noise_is_found(toy, monkeypatch):
    of_plan = private_steps.round_of

    def weaker(plan, strategy, **options):
        derived = dataclasses.replace(plan, noise_multiplier=0.3 * plan.noise_multiplier)
        return of_plan(derived, strategy, **options)

    monkeypatch.setattr(private_steps, "round_of", weaker)
    assert "standard deviation" in _audit(toy).verdict


@pytest.mark.slow
def test_a_larger_clip_norm_is_found(toy, monkeypatch):
    def sums(model, rows_per_unit, *, normalised=False, **_):
        exact = clipped_sums.looped(clipped_sums.language_rows(model), normalised=normalised)
        return lambda weights, rows, splits, clip: exact(weights, rows, splits, 2.0 * clip)

    monkeypatch.setattr(ghost, "fastest_clipped_sum", sums)
    assert "what one unit adds" in _audit(toy).verdict


@pytest.mark.parametrize(
    "options, error",
    [
        ({"noise_multiplier": 0.0}, "config promises nothing"),
        ({"num_users": 5}, "exceeds the 5 users"),
    ],
)
def test_what_cannot_be_audited_is_refused(toy, options, error):
    with pytest.raises(ValueError, match=error):
        _audit(toy, **options)


@pytest.fixture
def command(toy, tmp_path):
    file = tmp_path / "finetuning.toml"
    file.write_text(
        f'data = "{toy}/users.jsonl"\ninitial_weights = "{toy}/pretrained"\nsampling = "user"\n'
        "group_size = 2\ncohort_size = 8\nclip_norm = 1.0\nnoise_multiplier = 0.7\nnum_steps = 3\n"
    )
    return ["audit", "--config", str(file), "--clients", "40", "--error-rate", "1e-6"]


def test_the_command_knows_a_fine_tuning_config_by_its_options(command, asked, capsys):
    assert main.main(command) == 4 and "nothing was tested" in capsys.readouterr().out
    assert asked == [(0.7, 1e-6)]
    assert main.main([*command, "--trials", "100"]) == 2
    assert "--trials is for games" in capsys.readouterr().err
    assert main.main([*command, "--kind", "train"]) == 2
    assert "unknown option 'cohort_size'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_audits_a_fine_tuning_config(command, capsys):
    assert main.main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("consistent with the claim (5 of 5 tests could be done)")
    assert "standard deviation of each step: noise below 0.7" in shown
