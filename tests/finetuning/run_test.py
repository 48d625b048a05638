"""Tests of fine-tuning runs from options to results, and of going on with them."""

import dataclasses
import itertools
import json
import math
import pathlib
import shutil

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting.pld import pld_privacy_accountant as pld

from tests import kills
from tests.finetuning import toy_finetuning
from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tests.reports import listed_files
from tests.training import toy_run
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.data import jsonl, owners, sequences, split, tables
from tff_dpftrl.finetuning import (
    example_sampling,
    group_size,
    opening,
    passes,
    private_steps,
    proxies,
    resuming,
    run,
    run_privacy,
    step_trainer,
    trained_part,
)
from tff_dpftrl.models import export, low_rank
from tff_dpftrl.runs import committed_rounds, loop, manifest
from tff_dpftrl.training import corpus, report, trained_model

toy, no_gradients = toy_finetuning.toy, toy_finetuning.no_gradients
_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

_KINDS = {
    "user": {},
    "example": {"sampling": "example", "compute_budget": 12, "noise_multiplier": 0.7},
    "passes": {
        "sampling": "passes",
        "group_size": 2,
        "cohort_size": 8,
        "noise_multiplier": 0.7,
        "delta": 1e-3,
    },
    "cyclic": {
        "sampling": "cyclic",
        "group_size": 22,  # Units of so many tokens have less to trace.
        "cohort_size": 8,
        "bands": 2,
        "noise_multiplier": 0.7,
        "noise": "secure",
    },
    "cyclic examples": {
        "sampling": "cyclic",
        "sampled_unit": "example",
        "group_size": 3,
        "compute_budget": 12,
        "bands": 2,
        "noise_multiplier": 0.7,
    },
    "adapters": {"adapter_rank": 2, "iterate_averaging": 0.8},
}


def _finetune(config, output, lines=None):
    progress = (lambda line: None) if lines is None else lines.append
    return run.finetune(config, output, progress=progress)


def _weights(output):
    return export.read(output / "model.npz")[1]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k == "cyclic" else [pytest.mark.slow]) for k in _KINDS],
)
def test_a_run_killed_at_any_point_goes_on_with_the_same_batches_and_noise(
    kind, toy, tmp_path, monkeypatch
):
    pretrained = shutil.copytree(toy / "pretrained", tmp_path / "pretrained")
    config = toy_finetuning.config(toy, initial_weights=str(pretrained), **_KINDS[kind])
    whole = _finetune(config, tmp_path / "whole")
    assert [row["round"] for row in whole.rows] == list(range(1, toy_finetuning.NUM_STEPS + 1))
    train, publish = step_trainer.StepTrainer.train, loop.Loop._publish

    class Killed(BaseException):
        pass

    def killed_in_step(self, state, round_index, members):
        trained = train(self, state, round_index, members)
        if round_index == 1:
            raise Killed
        return trained

    def killed_after_commit(self, row):
        if row["round"] == 4:
            raise Killed
        publish(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(step_trainer.StepTrainer, "train", killed_in_step)
        with pytest.raises(Killed):
            _finetune(config, tmp_path / "killed")
    shutil.rmtree(pretrained)  # The run's folder has all that is needed of it.
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_publish", killed_after_commit)
        with pytest.raises(Killed):
            _finetune(None, tmp_path / "killed")
    reported = run.write_report(tmp_path / "killed")
    assert len(reported.rows) == 4
    resumed = _finetune(None, tmp_path / "killed")
    for one, other in zip(_weights(tmp_path / "whole"), _weights(tmp_path / "killed"), strict=True):
        np.testing.assert_array_equal(one, other)
    evaluated = [row["eval_loss"] for row in resumed.rows]
    assert evaluated == [row["eval_loss"] for row in whole.rows]
    assert run.write_report(tmp_path / "killed").statement == resumed.statement
    # The seed was given: whoever knows it can subtract the noise.
    assert not resumed.statement.has_guarantee


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["example", "passes"])
def test_secure_noise_is_stated(kind, toy, tmp_path):
    options = {**_KINDS[kind], "noise": "secure", "deterministic_noise_seed": None}
    config = toy_finetuning.config(toy, **options, num_steps=2)
    statement = _finetune(config, tmp_path / "run").statement
    is_exact = kind == "example"
    generator = sentences.noise_generator(is_exact)
    assert statement.parameters[sentences.NOISE_GENERATOR] == generator
    assert sentences.FLOATING_POINT not in statement.caveats
    assert (sentences.ROUNDED_CORRELATION in statement.caveats) == (not is_exact)
    # The median group size is drawn by another generator.
    assert (sentences.OTHER_GENERATORS in statement.caveats) == is_exact
    (path,) = (tmp_path / "run" / "private" / "checkpoints").iterdir()
    with np.load(path) as checkpoint:
        (seed,) = (checkpoint[name] for name in checkpoint.files if name.endswith("/seed"))
    assert seed.shape == (4,)
    # Sixty users are too few for a median: the group may be far larger, and ε in the millions.
    assert not run_folder.recount_run(tmp_path / "run").is_violated


@pytest.mark.slow
def test_adapters_alone_are_trained_and_the_model_is_whole(toy, tmp_path):
    config = toy_finetuning.config(toy, **_KINDS["adapters"], num_steps=3)
    lines = []
    statement = _finetune(config, tmp_path / "run", lines).statement
    model, pretrained = export.read(toy / "pretrained" / "model.npz")
    found = {
        name: (before, after)
        for name, before, after in zip(
            model.weight_shapes, pretrained, _weights(tmp_path / "run"), strict=True
        )
    }
    for name, (before, after) in found.items():
        if name.endswith("kernel"):
            assert np.linalg.matrix_rank(after - before, tol=1e-5) == 2, name
        else:
            np.testing.assert_array_equal(before, after)
    # What is kept of a step is the adapters alone, and their averages make the model.
    (path,) = (tmp_path / "run" / "private" / "checkpoints").iterdir()
    with np.load(path) as checkpoint:
        state = {name.partition("/")[2]: checkpoint[name] for name in checkpoint.files}
    adapted = low_rank.LowRank(model, pretrained, 2)
    for part in ("global_model_weights/trainable", "finalizer/average"):
        kept = [state[f"{part}/{i}"] for i in range(len(adapted.weight_shapes))]
        assert [x.shape for x in kept] == list(adapted.weight_shapes.values())
        assert f"{part}/{len(kept)}" not in state
    for one, other in zip(adapted.merged(kept), _weights(tmp_path / "run"), strict=True):
        np.testing.assert_array_equal(one, other)
    numbers = adapted.num_parameters, model.num_parameters
    assert numbers[0] < numbers[1] / 2
    parameters = statement.parameters
    assert (parameters["trained_weights"], parameters["model_weights"]) == numbers
    assert parameters["adapter_rank"] == 2
    assert f"rank 2: {numbers[0]} weights" in "".join(lines)
    (results,) = [i for i, line in enumerate(lines) if line.startswith("Results: ")]
    assert lines[results + 1].startswith("Compiling the step")
    note = (tmp_path / "run" / "metrics_README.md").read_text()
    for said in ("of fine-tuning, of the step", "in fine-tuning with sampled examples or users"):
        assert said in note
    assert manifest.read(tmp_path / "run").facts["num_parameters"] == numbers[0]
    page = (_DOCS / "reference" / "results_folder.md").read_text("utf-8")
    for path in (tmp_path / "run").glob("*.npz"):
        assert f"`{path.name}`" in page
    further = dataclasses.replace(config, initial_weights=str(tmp_path / "run"), num_steps=2)
    _finetune(further, tmp_path / "further")


@pytest.mark.slow
def test_fixed_weights_must_be_those_that_a_run_began_with(toy, tmp_path):
    _finetune(toy_finetuning.config(toy, adapter_rank=2, num_steps=2), tmp_path / "run")
    kept, whole = tmp_path / "run" / "pretrained_model.npz", _weights(tmp_path / "run")
    model, weights = export.read(kept)
    export.write(kept, model, [weight + 1 for weight in weights])
    for go_on in (lambda: _finetune(None, tmp_path / "run"), lambda: run.write_report(kept.parent)):
        with pytest.raises(ValueError, match="fixed weights .pretrained_model.npz. are no longer"):
            go_on()
    kept.unlink()  # The folder of initial_weights still has them.
    run.write_report(tmp_path / "run")
    for one, other in zip(whole, _weights(tmp_path / "run"), strict=True):
        np.testing.assert_array_equal(one, other)
    _finetune(None, tmp_path / "run")
    assert kept.exists()


def test_a_crash_before_the_fixed_weights_are_kept_does_not_let_others_in(
    toy, tmp_path, monkeypatch
):
    pretrained = shutil.copytree(toy / "pretrained", tmp_path / "pretrained")
    config = toy_finetuning.config(
        toy, adapter_rank=2, num_steps=2, initial_weights=str(pretrained)
    )

    class Killed(BaseException):
        pass

    keep, keeps = trained_part.TrainedPart.keep, []

    def killed(self, output):
        assert manifest.exists(output)
        if keeps:
            keep(self, output)
        keeps.append(output)
        raise Killed

    monkeypatch.setattr(trained_part.TrainedPart, "keep", killed)
    with pytest.raises(Killed):
        _finetune(config, tmp_path / "run")
    model, weights = export.read(pretrained / "model.npz")
    export.write(pretrained / "model.npz", model, [weight + 1 for weight in weights])
    with pytest.raises(ValueError, match="fixed weights .* are no longer"):
        _finetune(None, tmp_path / "run")
    assert not (tmp_path / "run" / "pretrained_model.npz").exists()
    export.write(pretrained / "model.npz", model, weights)
    with pytest.raises(Killed):
        _finetune(None, tmp_path / "run")
    for kept, weight in zip(
        export.read(tmp_path / "run" / "pretrained_model.npz")[1], weights, strict=True
    ):
        np.testing.assert_array_equal(kept, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, at",
    [
        (_KINDS["passes"] | {"held_out_users": "protected"}, None),
        # The private median is in config.json; its accounting takes seconds a run.
        (
            _KINDS["example"] | {"group_size_epsilon": 4.0, "adapter_rank": 2},
            ["replace manifest.json", "replace config.json", "replace pool.json"],
        ),
    ],
    ids=["passes", "example"],
)
def test_wherever_a_run_is_killed_it_releases_once(toy, tmp_path, options, at):
    options = {"num_steps": 2, "metrics_epsilon": 1.0, "deterministic_noise_seed": None} | options
    config = toy_finetuning.config(toy, **options)

    def begin_or_go_on(output):
        _finetune(None if manifest.exists(output) else config, output)

    for output in kills.everywhere(tmp_path, begin_or_go_on, at, toy_run.VISIBLE):
        stated = json.loads((output / "privacy_statement.json").read_text())
        assert "training metrics" in {part["name"] for part in stated["parts"]}


def test_adapters_of_too_high_a_rank_are_refused_before_anything_is_written(toy, tmp_path):
    config = toy_finetuning.config(toy, adapter_rank=5)
    with pytest.raises(ValueError, match="adapter_rank=5 exceeds 4, the smaller side of layer_0_q"):
        _finetune(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["user", pytest.param("example", marks=pytest.mark.slow)])
def test_the_books_have_the_users_of_every_batch(kind, toy, tmp_path, monkeypatch):
    begun, trained = [], []
    begin, step = committed_rounds.CommittedRounds.begin, private_steps.PrivateSteps.step

    def begin_and_note(self, round_index, cohort):
        begun.append(list(cohort))
        return begin(self, round_index, cohort)

    def step_and_note(self, state, row_splits, read_rows):
        trained.append((len(row_splits) - 1, read_rows(0, row_splits[-1])[0]))
        return step(self, state, row_splits, read_rows)

    monkeypatch.setattr(committed_rounds.CommittedRounds, "begin", begin_and_note)
    monkeypatch.setattr(private_steps.PrivateSteps, "step", step_and_note)
    config = toy_finetuning.config(toy, **_KINDS[kind])
    _finetune(config, tmp_path / "run")
    text = corpus.read_users(config.part(corpus.UserOptions))
    encoded = sequences.SequenceCorpus(
        text.train,
        trained_model.find(toy / "pretrained").words,
        sequences.SequenceSpec(6, split_long_texts=False),
    )
    sizes = np.array([len(encoded.sequences(user)) for user in encoded.user_ids])
    users = example_sampling.Users(encoded.user_ids, sizes)
    plan = resuming.plan_of(manifest.read(tmp_path / "run"))
    batch_of = passes.batches_of(plan, users, plan.group_size, config.deterministic_noise_seed)
    assert len(begun) == len(trained) == toy_finetuning.NUM_STEPS
    for index, (members, (num_units, words)) in enumerate(zip(begun, trained, strict=True)):
        batch = batch_of(index)
        assert members == [users.ids[user] for user in np.unique(batch.unit_users)]
        # All that was sampled is trained on, however many there are.
        assert num_units == batch.num_units and len(words) == batch.num_rows
        expected = [
            encoded.sequences(users.ids[user])[example][:-1]
            for user, example in zip(batch.row_users, batch.examples, strict=True)
        ]
        np.testing.assert_array_equal(words, expected)
    assert len({num_units for num_units, _ in trained}) > 1  # Poisson samples differ in size.


@pytest.mark.slow
def test_the_loss_of_a_step_is_that_of_its_users_and_a_step_of_nobody_has_none(
    toy, tmp_path, monkeypatch
):
    expected, step = [], private_steps.PrivateSteps.step
    model = trained_model.find(toy / "pretrained").load().model

    def step_and_note(self, state, row_splits, read_rows):
        words, targets = read_rows(0, row_splits[-1]) if row_splits[-1] else (None, None)
        weights, of_users = state["global_model_weights"]["trainable"], []
        for begin, end in itertools.pairwise(row_splits):
            log_shares = tf.nn.log_softmax(model.logits(weights, words[begin:end])).numpy()
            of_user = targets[begin:end, :, None]
            losses = -np.take_along_axis(log_shares, of_user, axis=2)
            of_users.append(np.ma.array(losses, mask=of_user == 0).mean(axis=1).mean())
        expected.append(np.mean(of_users) if of_users else None)
        return step(self, state, row_splits, read_rows)

    monkeypatch.setattr(private_steps.PrivateSteps, "step", step_and_note)
    rows = _finetune(toy_finetuning.config(toy, cohort_size=1, num_steps=8), tmp_path / "run").rows
    assert expected.count(None) in range(1, 8)
    for row, loss in zip(rows, expected, strict=True):
        assert row["loss"] == (loss and pytest.approx(loss, rel=1e-4))


@pytest.mark.parametrize("kind", ["user", pytest.param("example", marks=pytest.mark.slow)])
def test_a_private_run_states_what_its_plan_spent(kind, toy, tmp_path):
    noise = {"noise_multiplier": None, "target_epsilon": 2.0, "num_steps": 2}
    if kind == "example":  # With less, any group size is likely, up to 2¹⁶: minutes of accounting.
        noise |= {"target_epsilon": 6.0, "group_size_epsilon": 2.0}
    config = toy_finetuning.config(toy, **_KINDS[kind] | noise | {"deterministic_noise_seed": None})
    lines = []
    results = _finetune(config, tmp_path / "run", lines)
    statement = results.statement
    plan = resuming.plan_of(manifest.read(tmp_path / "run"))
    assert statement.has_guarantee and statement.epsilon == plan.epsilon <= noise["target_epsilon"]
    assert results.rows[-1]["epsilon"] == statement.epsilon
    assert statement.parameters["sampling"] == kind
    examples = sum(len(json.loads(line)["examples"]) for line in open(toy / "users.jsonl"))
    assert plan.delta > examples**-1.1  # Fewer train than there are.
    text = (tmp_path / "run" / "privacy_statement.md").read_text()
    assert "public.jsonl" in text and "in secret" in " ".join(lines)
    assert run_privacy.METRICS_NOT_COVERED in statement.not_covered
    assert listed_files.check(tmp_path / "run")["config.json"] == "yes, but"
    if kind == "example":
        assert statement.parameters["group_size_epsilon"] == 2.0
        # The private median's ε is part of what is stated.
        assert plan.epsilon_after(0) == 2.0
    assert results.rows[-1]["clients"] is None  # How many came is secret.


@pytest.mark.slow
def test_a_chain_of_runs_on_the_same_users_is_composed(toy, tmp_path):
    options = {"deterministic_noise_seed": None, "num_steps": 2, "noise_multiplier": 3.0}
    beginning, spent = toy / "pretrained", []
    for name in ("first", "second", "third"):
        config = toy_finetuning.config(toy, **options, initial_weights=str(beginning))
        results = _finetune(config, tmp_path / name)
        spent.append(results.statement.epsilon)
        beginning = tmp_path / name
    *_, says = results.statement.headline_caveats
    assert "run 'second' (ε = " in says and "began with those of the run 'first'" in says
    assert "All of these runs trained on the same users." in says and says in results.summary
    parameters, delta = results.statement.parameters, results.statement.delta
    assert parameters["delta_with_earlier_runs"] == delta
    # All steps of the three runs, composed by another accountant.
    step = dp_accounting.PoissonSampledDpEvent(
        parameters["sampling_probability"], dp_accounting.GaussianDpEvent(3.0)
    )
    accountant = pld.PLDAccountant().compose(step, 3 * 2)
    together = parameters["epsilon_with_earlier_runs"]
    assert together == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)
    assert max(spent) < together < sum(spent)


@pytest.mark.slow
def test_half_a_run_is_charged_as_a_whole_one(toy, tmp_path, monkeypatch):
    config = toy_finetuning.config(toy, deterministic_noise_seed=None)

    def interrupted(self, round_index):
        if round_index == 2:
            raise KeyboardInterrupt
        return members(self, round_index)

    members = step_trainer.StepTrainer.members
    monkeypatch.setattr(step_trainer.StepTrainer, "members", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _finetune(config, tmp_path / "run")
    monkeypatch.undo()
    reported = run.write_report(tmp_path / "run")
    assert reported.statement.parameters["num_steps_charged"] == toy_finetuning.NUM_STEPS
    assert reported.statement.parameters["num_steps"] == 2
    assert "tff-dpftrl finetune --resume" in reported.summary


@pytest.mark.slow
def test_the_choice_is_made_and_said(toy, tmp_path):
    config = toy_finetuning.config(
        toy,
        sampling="auto",
        compute_budget=64,
        target_epsilon=20.0,
        clip_norm=None,
        group_size_epsilon=4.0,
    )
    lines = []
    _finetune(config, tmp_path / "run", lines)
    said = "\n".join(lines)
    assert "Estimate-and-Double, (group size, cohort): (1, 32)" in said
    assert "the smaller one is taken" in said and "Clip norm: " in said
    derived = manifest.read(tmp_path / "run").derived
    # Whichever was taken, the private median was looked at.
    assert derived["plan"]["group_size_epsilon"] == 4.0
    assert f"Clip norm: {derived['clip_norm']:g}, about half the median" in said
    statement = (tmp_path / "run" / "privacy_statement.md").read_text()
    assert "about half the median norm" in statement and "exact size of the pool" in statement


def test_nobody_learns_of_a_private_median_before_it_is_kept(toy, tmp_path, monkeypatch):
    # A large one, which chance may draw, takes a minute to account for.
    drawn = group_size.median_choice([2, 2, 2])
    monkeypatch.setattr(group_size, "private_median_choice", lambda *args, **options: drawn)
    config = toy_finetuning.config(
        toy,
        sampling="auto",
        compute_budget=32,
        target_epsilon=5.0,
        max_epsilon=0.06,
        deterministic_noise_seed=None,
        clip_norm=None,
    )
    lines = []
    with pytest.raises(ValueError, match="max_epsilon=0.06 does not pay for one step: raise it"):
        _finetune(config, tmp_path / "run", lines)
    said = "".join(lines)
    assert "G = " not in said and "private median" not in said
    # What does not depend on the draw is told before it.
    assert "Warning: with group_size_epsilon=0.05 and so few users, the group size may be" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_text_in_memory_is_named_and_gone_on_with(toy, tmp_path, monkeypatch):
    config = toy_finetuning.config(toy, data="somebody's text", num_steps=2)
    text = corpus.read_users(toy_finetuning.config(toy).part(corpus.UserOptions))
    with pytest.raises(ValueError, match="which is what the statement would say"):
        run.finetune(dataclasses.replace(config, data="docs"), tmp_path / "run", text=text)
    progress = lambda line: None  # noqa: E731
    results = run.finetune(config, tmp_path / "run", text=text, progress=progress)
    assert results.statement.parameters["data"] == "somebody's text"
    assert run.finetune(None, tmp_path / "run", text=text, progress=progress).rows == results.rows


def test_rows_and_tables_are_the_users(toy, tmp_path):
    expected = corpus.read_users(toy_finetuning.config(toy).part(corpus.UserOptions))
    whole = (expected.train, expected.validation, expected.test)
    rows = [(u, t) for part in whole for u in part.user_ids for t in part.examples(u)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["who,body", *(f"{user},{text}" for user, text in rows)]))
    named = toy_finetuning.config(toy, data=str(table), user_column="who")
    for config, given in ((toy_finetuning.config(toy, data="docs"), rows), (named, None)):
        opened = opening.open_run(config, tmp_path / "run", rows=given, progress=lambda line: None)
        assert opened.config.data == ("rows" if given else str(table))
        found = opened.text
        assert list(found.train.texts()) == list(expected.train.texts())
        assert found.validation.user_ids == expected.validation.user_ids
    public = str(toy / "users.jsonl")
    with pytest.raises(ValueError, match="cannot be public: name other text"):
        proxies.read(public, is_tokenized=False, protected="rows", users=whole)
    pretrained_on = jsonl.read(toy / "public.jsonl")
    rows = [(u, t) for u in pretrained_on.user_ids for t in pretrained_on.examples(u)]
    with pytest.raises(ValueError, match=r"public\.jsonl', the very text that this run protects"):
        config = toy_finetuning.config(toy, data="docs")
        opening.open_run(config, tmp_path / "run", rows=rows, progress=lambda line: None)
    # Text that is protected is recognised though its columns have names of their own.
    for public in (str(table), str(toy / "users.jsonl")):
        with pytest.raises(ValueError, match="cannot be public: name other text"):
            reading = named.part(tables.TableOptions)
            proxies.read(public, is_tokenized=False, protected=str(table), table=reading)


@pytest.mark.usefixtures("no_gradients")
def test_rows_of_several_owners_are_drawn_by_themselves_and_protect_each_owner(toy, tmp_path):
    corpus = jsonl.read(toy / "users.jsonl")
    names = corpus.user_ids
    rows = [
        ([user, names[(number + 1) % len(names)]], text)
        for number, user in enumerate(names)
        for text in corpus.examples(user)
    ]
    options = {
        "sampling": "example",
        "rows_per_owner": 3,
        "compute_budget": 8,
        "num_steps": 2,
        "noise": "secure",  # Less to trace.
        "noise_multiplier": 4.0,  # With little noise, there are many losses to account for.
        "deterministic_noise_seed": None,
        "data": "rows",
    }
    config = toy_finetuning.config(toy, **options)
    assert config.group_size == 3
    found = run.finetune(config, tmp_path / "a", rows=rows, progress=lambda line: None)
    statement = found.statement
    assert statement.parameters["group_size"] == 3
    assert "all rows that name it: at most 3 of them are used" in statement.parameters["user"]
    assert any("same lists of owners" in one for one in statement.not_covered)
    assert any("names all users whose data stands in it" in one for one in statement.assumptions)
    # All owners of the rows of training users are protected, also who is first in none.
    known = manifest.read(tmp_path / "a")
    taken = owners.select([cell for cell, _ in rows], 3).is_selected
    trained = [cell for (cell, _), one in zip(rows, taken, strict=True) if one]
    trained = [cell for cell in trained if split.hash_bucket(cell[0]) > 1]
    assert known.facts["training_users"] == len({first for first, _ in trained})
    assert statement.parameters["num_users"] == len({name for cell in trained for name in cell})
    recounted = run_folder.recount_run(tmp_path / "a")
    assert not [one for one in recounted.findings if one.outcome == "violated"]
    # No owner has more than three of the rows in the pool, from which each row comes by itself.
    selected = owners.select([cell for cell, _ in rows], 3)
    pool = json.loads((tmp_path / "a" / "private" / "pool.json").read_text())
    assert sum(pool["examples_of_users"]) <= selected.is_selected.sum()
    assert max(pool["examples_of_users"]) <= 3
    with pytest.raises(ValueError, match="rows_per_owner selects rows of a table"):
        parts = split.by_user(corpus)
        run.finetune(config, tmp_path / "b", text=parts, progress=lambda line: None)
    with pytest.raises(ValueError, match="rows_per_owner"):
        lists = dataclasses.replace(config, rows_per_owner=None)
        run.finetune(lists, tmp_path / "b", rows=rows, progress=lambda line: None)


def test_proxies_must_not_be_the_rows(toy, tmp_path):
    users = jsonl.read(toy / "users.jsonl")
    rows = [(u, t) for u in users.user_ids for t in users.examples(u)]
    config = toy_finetuning.config(
        toy,
        data="docs",
        proxy_data=str(toy / "users.jsonl"),
        sampling="example",
        compute_budget=12,
        noise_multiplier=0.7,
        clip_norm=None,
    )
    with pytest.raises(ValueError, match="cannot be public: name other text"):
        run.finetune(config, tmp_path / "run", rows=rows, progress=lambda line: None)


def test_public_text_must_not_be_the_protected_one(toy, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((toy / "users.jsonl").read_bytes())
    config = toy_finetuning.config(toy, clip_norm=None, proxy_data=str(copy))
    with pytest.raises(ValueError, match="proxy_data .* cannot be public: name other text"):
        _finetune(config, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cyclic", "cyclic examples"])
def test_turns_are_chosen_stated_and_recounted(kind, toy, tmp_path):
    noise = {"noise_multiplier": None, "target_epsilon": 6.0, "bands": "auto"}
    config = toy_finetuning.config(toy, **_KINDS[kind] | noise | {"deterministic_noise_seed": None})
    lines = []
    statement = _finetune(config, tmp_path / "run", lines).statement
    said = " ".join(lines)
    assert "Noise of a step's average, in units of the clip norm" in said and "(1 band)" in said
    plan = resuming.plan_of(manifest.read(tmp_path / "run"))
    assert 5.9 < statement.epsilon == plan.epsilon_after(toy_finetuning.NUM_STEPS) <= 6.0
    assert statement.parameters["sampling"] == "cyclic"
    assert statement.parameters["sampled_unit"] == config.sampled_unit
    text = statement_text.markdown(statement)
    assert "One party, which holds the data of every user, draws the samples" in text
    assert "δ is n^-1.1 for the" in text and "clients send" not in text
    recounted = run_folder.recount_run(tmp_path / "run")
    says = {one.test: (one.outcome, one.says) for one in recounted.findings}
    assert not [one for one in says.values() if one[0] == "violated"], says
    assert "those that the secret seed draws" in says["sampling: ledger and secret seed"][1]


@pytest.mark.slow
def test_passes_are_stated_without_clients(toy, tmp_path):
    config = toy_finetuning.config(toy, **_KINDS["passes"] | {"deterministic_noise_seed": None})
    statement = _finetune(config, tmp_path / "run").statement
    text = statement_text.markdown(statement)
    assert statement.has_guarantee and "in one place" in text
    assert "clients send" not in text and "sent to clients" not in text
    assert statement.parameters["group_size"] == 2


@pytest.mark.slow
def test_a_model_that_got_worse_is_said_to_be(toy, tmp_path):
    config = toy_finetuning.config(toy, noise_multiplier=200.0, learning_rate=1.0, num_steps=2)
    results = _finetune(config, tmp_path / "run")
    assert 0 < results.baselines["pretrained"] < 1
    if results.rows[-1]["eval_top1_in_vocab"] < results.baselines["pretrained"]:
        assert "less accurate than the one it began with" in results.summary


@pytest.mark.slow
def test_no_noise_is_no_guarantee(toy, tmp_path):
    config = toy_finetuning.config(toy, noise_multiplier=0.0, deterministic_noise_seed=None)
    statement = _finetune(config, tmp_path / "run").statement
    assert not statement.has_guarantee and statement.epsilon is None


@pytest.mark.slow
def test_training_lowers_the_loss_where_there_is_little_noise(toy, tmp_path):
    config = toy_finetuning.config(
        toy, noise_multiplier=0.01, cohort_size=30, num_steps=30, learning_rate=0.03
    )
    rows = _finetune(config, tmp_path / "run").rows
    losses = [row["eval_loss"] for row in rows if row["eval_loss"] is not None]
    assert losses[-1] < losses[0] - 0.3 and all(map(math.isfinite, losses))


@pytest.mark.slow
def test_other_data_or_a_training_run_is_refused(toy, tmp_path):
    data = tmp_path / "users.jsonl"
    data.write_text((toy / "users.jsonl").read_text())
    config = toy_finetuning.config(toy, data=str(data), num_steps=2)
    _finetune(config, tmp_path / "run")
    users = [json.loads(line) for line in data.read_text().splitlines()]
    train = next(user for user in users if split.hash_bucket(user["user_id"]) > 1)
    train["examples"].append(train["examples"][0])
    data.write_text("\n".join(map(json.dumps, users)))
    with pytest.raises(ValueError, match="numbers of the users' examples are no longer those"):
        _finetune(None, tmp_path / "run")
    train["examples"] = [" ".join(reversed(text.split())) for text in train["examples"][:-1]]
    data.write_text("\n".join(map(json.dumps, users)))
    with pytest.raises(ValueError, match="texts of the training users are no longer those"):
        _finetune(None, tmp_path / "run")
    data.write_text("\n".join(json.dumps(user) for user in users if user is not train))
    with pytest.raises(ValueError, match="training users are no longer those"):
        _finetune(None, tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        _finetune(config, tmp_path / "run")
    with pytest.raises(ValueError, match="one of tff-dpftrl train"):
        known = dataclasses.replace(
            manifest.read(tmp_path / "run"), recorded_kind=manifest.TRAINING
        )
        opening.config_of(known, tmp_path)
    with pytest.raises(ValueError, match="is one of tff-dpftrl finetune"):
        report.report(tmp_path / "run")


def test_public_text_that_is_protected_is_refused(toy, tmp_path):
    folder = tmp_path / "pretrained"
    folder.mkdir()
    for path in (toy / "pretrained").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    record = json.loads((folder / "pretraining.json").read_text())
    record["pretraining"]["data"] = str(toy / "users.jsonl")
    (folder / "pretraining.json").write_text(json.dumps(record))
    config = toy_finetuning.config(toy, initial_weights=str(folder))
    with pytest.raises(ValueError, match="the very text that this run protects"):
        _finetune(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_model_can_be_used_by_itself(toy, tmp_path):
    _finetune(toy_finetuning.config(toy, num_steps=2), tmp_path / "run")
    found = trained_model.find(tmp_path / "run").load()
    (prediction,) = found.predict(["bao dee"])
    assert len(prediction.next_words) == 5
