"""Tests of what is said before the first round."""

import dataclasses
import sys
import types

import pytest

from tff_dpftrl import validation
from tff_dpftrl.data import user_text, vocabulary
from tff_dpftrl.runs import privacy
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import opening, startup

_NUM_PARAMETERS = 10_000


def _plan(**options):
    defaults = {"mechanism": "identity", "num_rounds": 16, "clients_per_round": 5, "min_sep": 4}
    config = config_lib.TrainingConfig.of(**(defaults | options))
    return config.request().plan(100, _NUM_PARAMETERS)


def test_the_epsilon_to_come_is_that_of_all_rounds():
    plan = _plan(noise_multiplier=5.0, delta=1e-6)
    lines = startup.describe_plan(plan, _NUM_PARAMETERS)
    assert lines[: len(plan.describe())] == plan.describe()
    (told,) = [line for line in lines if line.startswith("Privacy: ε at most")]
    assert told.endswith("at δ = 1e-06 after all 16 rounds.")
    assert float(told.split()[4]) == pytest.approx(plan.epsilon_after(16), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [{"mechanism": "none"}, {"noise_multiplier": 5.0, "deterministic_noise_seed": 1}],
)
def test_without_a_guarantee_none_is_announced(options):
    assert "Privacy: NO guarantee." in startup.describe_plan(_plan(**options), _NUM_PARAMETERS)


def test_the_run_that_is_simulated_is_announced():
    plan = _plan(
        noise_multiplier=5.0, simulate_report_goal=50, simulate_population=1000, min_sep=None
    )
    lines = startup.describe_plan(plan, _NUM_PARAMETERS)
    (told,) = [line for line in lines if line.startswith("Simulation: ")]
    assert plan.simulated.promise() in told


def test_without_noise_there_is_nothing_to_compare():
    lines = startup.describe_plan(_plan(mechanism="none"), _NUM_PARAMETERS)
    assert not any(line.startswith("Noise to signal") for line in lines)


@pytest.mark.parametrize(
    "text, is_warned",
    [
        ("我们在学习语言模型", True),
        ("ภาษาไทยไม่มีช่องว่าง", True),
        ("ខ្មែរ", True),
        ("हिन्दी में लिखना", False),
        ("한국어 문장입니다", False),
        ("he said 你好 and went away then", False),
    ],
)
def test_words_of_scripts_without_spaces_are_warned_of(text, is_warned):
    corpus = user_text.UserText.from_mapping("m", {"u": [text] * 2000})
    words = vocabulary.Vocabulary(("a",), "a list")
    survey = types.SimpleNamespace(
        **{"num_users": 1, "num_users_without_text": 0, "num_words": 9, "oov_share": 0.0}
    )
    others = {"num_held_out_users": 1, "num_untouched_users": 0, "training_text": survey}
    task = types.SimpleNamespace(words=words, train=types.SimpleNamespace(corpus=corpus), **others)
    said = " ".join(startup.describe_task(task))
    assert ("sees whole sentences as words. Take sub-words: --tokenizer" in said) == is_warned


@pytest.mark.parametrize("share, is_hinted", [(0.99, False), (1.01, True)])
def test_noise_that_may_swamp_the_signal_is_hinted_at(share, is_hinted):
    # Independent noise: z √(d n) over n rounds of 5 clients.
    noise_multiplier = share * privacy.SWAMPED * 16 * 5 / (_NUM_PARAMETERS * 16) ** 0.5
    lines = startup.describe_plan(_plan(noise_multiplier=noise_multiplier), _NUM_PARAMETERS)
    (told,) = [line for line in lines if line.startswith("Noise to signal")]
    assert f": {share * privacy.SWAMPED:.2g} (" in told
    assert (
        any(
            line.startswith("Hint: the recorded runs that learned clearly had at most 0.3,")
            for line in lines
        )
        == is_hinted
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"algorithm": "dp-fedavg", "mechanism": "blt", "min_sep": None}],
)
def test_a_delta_that_protects_nobody_is_named_before_the_first_round(options):
    def said(delta):
        plan = _plan(noise_multiplier=5.0, delta=delta, **options)
        return " ".join(startup.describe_plan(plan, _NUM_PARAMETERS))

    assert "Warning: δ = 0.01 is not below 1 / 100, one over the users" in said(0.01)
    assert "Warning: δ = 0.002 times the 100 users is 0.2: publishing" in said(0.002)
    assert "Warning: δ" not in said(0.001)


@pytest.mark.parametrize(
    "share, words, said",
    [
        (0.1, vocabulary.Vocabulary(("a",), "a list"), None),
        (
            0.11,
            vocabulary.Vocabulary(("a",), "a list"),
            "Take --vocabulary english, --vocabulary F",
        ),
        (0.11, vocabulary.english(10), "Take --vocabulary FILE"),
    ],
)
def test_many_unknown_words_are_answered_with_what_to_do(share, words, said):
    lines = startup.describe_unknown_words(share, words)
    assert len(lines) == (said is not None)
    if said is not None:
        assert said in lines[0] and "larger --vocabulary-size" in lines[0]
        assert "0.11" not in lines[0] and "11" not in lines[0]  # The exact share stands elsewhere.


def test_many_unknown_words_of_a_kept_vocabulary_ask_for_other_weights():
    (line,) = startup.describe_unknown_words(0.3, vocabulary.english(10), are_kept=True)
    assert "Take initial weights that tff-dpftrl pretrain makes with --vocabulary FILE" in line


def test_a_vocabulary_without_any_word_of_the_text_is_refused():
    words = vocabulary.Vocabulary((".", ","), "a list")
    with pytest.raises(ValueError, match=r"vocabulary \(2 words, a list\) has no word of the text"):
        startup.describe_unknown_words(1.0, words)
    # Of noised counts that would show a draw before it is kept.
    counted = dataclasses.replace(words, is_public=False, is_noised=True)
    assert len(startup.describe_unknown_words(1.0, counted)) == 1


@pytest.mark.parametrize(
    "package, option",
    [
        ("cryptography", {"noise": "secure"}),
        ("pyarrow", {"data": "none.parquet"}),
        ("tokenizers", {"tokenizer": "sentencepiece"}),
        ("tokenizers", {"vocabulary": "tokenizer.json"}),
    ],
)
def test_a_missing_package_is_found_before_anything_is_read(monkeypatch, tmp_path, package, option):
    monkeypatch.setitem(sys.modules, package, None)
    options = {"data": str(tmp_path / "none.jsonl"), "noise_multiplier": 1.0, **option}
    with pytest.raises(validation.UsageError, match=f"needs {package}, which is not installed"):
        opening.open_run(config_lib.TrainingConfig.of(**options), tmp_path / "run")
