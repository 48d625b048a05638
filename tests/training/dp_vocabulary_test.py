"""Tests of runs whose vocabulary is counted on the training users with noise."""

import json

import pytest

from tests import kills
from tests.training import toy_run
from tff_dpftrl import execution
from tff_dpftrl.accounting import parts
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.data import jsonl, set_union, vocabulary_file
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import corpus as corpus_lib
from tff_dpftrl.training import process, report, run

corpus = toy_run.corpus
_EPSILON = 200.0


def _config(corpus, **options):
    noise = {"noise_multiplier": None, "target_epsilon": _EPSILON, "delta": 1e-3}
    words = {"vocabulary": "dp", "base_vocabulary": str(corpus / "base_words.txt")}
    own = {"vocabulary_size": 20, "deterministic_noise_seed": None, "num_rounds": 1, "min_sep": 1}
    return toy_run.config(corpus, **noise | words | own | options)


def _count_no_more(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("counted again")

    monkeypatch.setattr(set_union, "release", refuse)


@pytest.fixture(scope="module")
def once():
    """What was compiled; TensorFlow's destructors fail when the interpreter exits first."""
    found = {}
    yield found
    found.clear()


@pytest.fixture
def compiled_once(once, monkeypatch):
    """Compiles once what is most of the time; all draws of `_config` have as many words."""

    def made_once(owner, name):
        make = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, **kw: once.get(name) or once.setdefault(name, make(*args, **kw)),
        )

    made_once(process, "build_round")
    made_once(execution, "CompiledProcess")
    for name in ("close", "drop_initialization"):
        monkeypatch.setattr(compiled_process.CompiledProcess, name, lambda self: None)


def test_words_are_a_part_of_epsilon(corpus, tmp_path, compiled_once):
    output = tmp_path / "run"
    config = _config(corpus)
    statement = run.train(config, output).statement
    words, _ = vocabulary_file.read(output / "vocabulary.json")
    # The first public word and the second one, which users have, too; then theirs.
    assert words.words[:2] == ("of", "bao") and words.is_noised
    assert len(words.words) == 20 and set(words.words[2:]) <= set(toy_run.WORDS)
    assert statement.epsilon <= _EPSILON
    assert [cost.name for cost in statement.parts] == [parts.WEIGHTS, parts.VOCABULARY]
    weights, counted = statement.parts
    assert counted.epsilon_alone < weights.epsilon_alone < statement.epsilon
    assert not any("without noise" in caveat for caveat in statement.headline_caveats)
    assert not any(line.startswith("Choice of the vocabulary") for line in statement.not_covered)
    (public,) = (line for line in statement.assumptions if "How text is split into words" in line)
    assert public.endswith(
        "a public list: word list base_words.txt, declared public by the operator."
    )
    assert "the public words of the vocabulary" in statement.adjacency
    assert report.report(output).statement.parts == statement.parts
    # Counted anew from the records, the whole comes to the same; without the words it does not.
    assert run_folder.recount_run(output).verdict == "consistent with the claim"
    path = output / "config.json"
    changed = json.loads(path.read_text())
    changed["derived"]["others"][0]["rho_zcdp"] *= 0.5
    path.write_text(json.dumps(changed))
    found = run_folder.recount_run(output)
    assert any(one.test == "statement: ε" and one.outcome == "violated" for one in found.findings)


def test_nobody_sees_words_before_they_are_charged(corpus, tmp_path, compiled_once):
    output, lines = tmp_path / "run", []
    with kills.dying("replace manifest.json") as events, pytest.raises(kills.Killed):
        run.train(_config(corpus), output, progress=lines.append)
    assert events[-1] == "replace vocabulary.json" and kills.published(output) == {}
    # Who sees how many words are unknown, and starts anew, has looked at two counts.
    assert lines == ["Reading the data ...", "Building the computations ..."]
    manifest.check_is_free(output)


@pytest.mark.slow
def test_wherever_a_run_is_killed_it_releases_once(corpus, tmp_path, once, compiled_once):
    once.clear()  # Its process has metrics, too.
    config = _config(corpus, metrics_epsilon=2.0, eval_every=1, held_out_users="protected")

    def begin_or_go_on(output):
        run.train(None if manifest.exists(output) else config, output, progress=lambda line: None)

    for output in kills.everywhere(tmp_path, begin_or_go_on, visible=toy_run.VISIBLE):
        assert run_folder.recount_run(output).verdict == "consistent with the claim"
        stated = json.loads((output / "privacy_statement.json").read_text())
        assert {parts.VOCABULARY, parts.METRICS} < {part["name"] for part in stated["parts"]}


@pytest.mark.slow
def test_a_run_that_goes_on_counts_no_more(corpus, tmp_path, monkeypatch):
    output, kept = tmp_path / "run", tmp_path / "run" / "private" / "vocabulary.json"
    with kills.dying("replace config.json"), pytest.raises(kills.Killed):
        run.train(_config(corpus), output)
    content = kept.read_bytes()
    _count_no_more(monkeypatch)
    kept.unlink()
    with pytest.raises(
        ValueError, match="vocabulary.json is missing: .* would be a second release"
    ):
        run.train(None, output)
    changed = json.loads(content) | {"words": list(reversed(json.loads(content)["words"]))}
    kept.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="words of the vocabulary"):
        run.train(None, output)
    kept.unlink()
    (output / "vocabulary.json").write_bytes(content)  # All that an older run has.
    statement = run.train(None, output).statement
    assert (output / "vocabulary.json").read_bytes() == content
    assert statement.parts[1].name == parts.VOCABULARY


@pytest.mark.slow
def test_another_run_with_these_words_says_whose_epsilon_covers_them(corpus, tmp_path):
    path = tmp_path / vocabulary_file.NAME
    users, counting = jsonl.read(corpus / "users.jsonl"), set_union.Counting(0.2, 1e-3)
    words = set_union.add_words(None, users, 20, counting, seed=1)
    vocabulary_file.write(path, words, words.rule())
    short = {"num_rounds": 2, "min_sep": 2, "deterministic_noise_seed": None}
    statement = run.train(
        toy_run.config(corpus, vocabulary=str(path), **short), tmp_path / "run"
    ).statement
    assert not statement.parts
    (caveat,) = (line for line in statement.headline_caveats if "vocabulary" in line)
    assert "counted with noise on users whom another run protects" in caveat


def test_text_in_memory_has_its_own_words(corpus, tmp_path):
    config = toy_run.config(corpus)
    text = corpus_lib.read(config.part(corpus_lib.TextOptions))
    with pytest.raises(ValueError, match="'dp' has no meaning with text in memory"):
        run.train(_config(corpus), tmp_path / "run", text=text)
