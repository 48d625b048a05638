"""Tests of runs of any model: the books of a run, on vectors whose mean is learnt."""

import dataclasses
import json
import pathlib
import re
import stat

import numpy as np
import pytest
import tensorflow as tf

import tff_dpftrl
from tests import kills
from tests.reports import listed_files
from tff_dpftrl import validation
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.cli import main
from tff_dpftrl.finetuning import amplified, custom_run, example_sampling, passes, plan
from tff_dpftrl.models import keras_versions
from tff_dpftrl.runs import committed_rounds, manifest

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
_STEPS = 5


def _table():
    rng = np.random.default_rng(3)
    return {f"user {i}": rng.normal(2.0, 1.0, [1 + i % 4, 3]).astype(np.float32) for i in range(60)}


def _users(table):
    return example_sampling.Users(tuple(table), np.array([len(rows) for rows in table.values()]))


def _losses(weights, rows):
    return 0.5 * tf.reduce_sum(tf.square(weights[0] - rows), axis=1)


def _passes(**changes):
    options = {"users_per_step": 20, "num_steps": _STEPS, "delta": 1e-5, "noise_multiplier": 2.0}
    return passes.Passes(**options | {"group_size": 2, "mechanism": "tree"} | changes)


def _plan(table, sampling="user", **noise):
    return plan.make_plan(
        _users(table),
        sampling=sampling,
        group_size=2,
        expected_units=20,
        num_steps=_STEPS,
        **(noise or {"target_epsilon": 8.0}),
    )


class _Crash(Exception):
    pass


def _finetune(output, table=None, made=None, *, crash_at=None, lines=None, **options):
    table = _table() if table is None else table
    calls = []

    # A new run reads a few rows first, to try the losses.
    crash_at = crash_at and crash_at + (not manifest.exists(pathlib.Path(output)))

    def read(examples):
        calls.append(examples)
        if len(calls) == crash_at:
            raise _Crash
        return np.stack([table[user][example] for user, example in examples])

    def error(weights):
        return {"error": np.linalg.norm(weights[0] - 2.0)}

    options = {
        "weights": [np.zeros(3, np.float32)],
        "row_losses": _losses,
        "trained_on": "nothing",
        "clip_norm": 1.0,
        "optimizer": lambda: tf.keras.optimizers.Adam(0.3),
        "evaluate": error,
        "every": 2,
        "units_at_once": 64,  # One piece a step: a crash is at a step.
        "in_one_pass": False,  # Less to trace.
        **options,
    }

    def taken(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: options.pop(name) for name in names if name in options})

    return custom_run.finetune(
        output,
        taken(custom_run.Model),
        custom_run.Examples(_users(table), read, digest=options.pop("digest", None)),
        _plan(table) if made is None else made,
        taken(custom_run.Steps),
        taken(custom_run.Evaluation),
        progress=(lines if lines is not None else []).append,
        **options,
    )


@pytest.mark.pictures
@pytest.mark.parametrize("sampling", ["user", pytest.param("example", marks=pytest.mark.slow)])
def test_a_run_keeps_books_and_states_what_its_plan_spent(sampling, tmp_path):
    made = _plan(_table(), sampling)
    results = _finetune(tmp_path / "run", made=made, trained_on="nobody's data")
    assert results.statement.has_guarantee and results.statement.epsilon == made.epsilon <= 8.0
    assert [row["round"] for row in results.rows] == list(range(1, _STEPS + 1))
    assert all(row["loss"] is not None for row in results.rows)
    measured = [row["round"] for row in results.rows if row["eval_error"] is not None]
    assert measured == [2, 4, 5]
    assert results.rows[-1]["eval_error"] < np.linalg.norm([2.0, 2.0, 2.0])  # It learnt.
    (kept,) = np.load(tmp_path / "run" / "weights.npz").values()
    np.testing.assert_array_equal(kept, results.weights[0])
    text = (tmp_path / "run" / "privacy_statement.md").read_text()
    assert "nobody's data" in text
    assert listed_files.check(tmp_path / "run")["weights.npz"] == "yes"
    about = (text, (tmp_path / "run" / "README.md").read_text())
    assert not re.findall(
        "vocabulary|n-gram|which words|nats|other people|Private text", "".join(about)
    )
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert stat.S_IMODE((tmp_path / "run" / "private").stat().st_mode) == 0o700
    note = (tmp_path / "run" / "metrics_README.md").read_text()
    assert "- `loss`" in note.partition("**Do not publish** them")[2]
    assert "loss" not in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("crash_at", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_same_call_goes_on_with_the_same_batches_and_noise(crash_at, tmp_path):
    seed = {"deterministic_noise_seed": 11, "iterate_averaging": 0.5}
    whole = _finetune(tmp_path / "whole", **seed)
    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", crash_at=crash_at, **seed)
    resumed = _finetune(tmp_path / "run", **seed)
    np.testing.assert_array_equal(resumed.weights[0], whole.weights[0])
    assert resumed.rows == whole.rows
    # It has ended: there is nothing to go on with, and nothing changes.
    again = _finetune(tmp_path / "run", crash_at=1, **seed)
    np.testing.assert_array_equal(again.weights[0], whole.weights[0])


@pytest.mark.slow
def test_wherever_a_run_is_killed_it_releases_once(tmp_path):
    made = _passes(num_steps=2)
    for output in kills.everywhere(tmp_path, lambda output: _finetune(output, made=made)):
        assert json.loads((output / "privacy_statement.json").read_text())["epsilon"]


def test_the_same_call_goes_on_where_the_options_are_lost(tmp_path):
    made, lost = _passes(num_steps=1), tmp_path / "config.json"
    whole = _finetune(tmp_path, made=made)
    content = lost.read_bytes()
    lost.unlink()
    np.testing.assert_array_equal(_finetune(tmp_path, made=made).weights[0], whole.weights[0])
    assert lost.read_bytes() == content


@pytest.mark.parametrize("began_in_one_pass", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_way_of_clipping_that_it_began_with(began_in_one_pass, tmp_path):
    """Another trial, of other rows, might choose another one."""
    lines = []
    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", crash_at=3, lines=lines, in_one_pass=began_in_one_pass)
    way = next(line for line in lines if line.startswith("Gradients are clipped"))
    assert (way == "Gradients are clipped in one pass.") == began_in_one_pass
    results = _finetune(tmp_path / "run", in_one_pass=True)
    assert len(results.rows) == _STEPS
    assert (results.clipping == "Gradients are clipped in one pass.") == began_in_one_pass
    assert "way of clipping" not in (tmp_path / "run" / "config.json").read_text()


def test_a_run_that_ended_early_is_charged_as_a_whole_one_and_goes_on_with_its_samples(tmp_path):
    made, lines = _plan(_table(), noise_multiplier=2.0, delta=0.01), []
    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", made=made, crash_at=3, lines=lines)
    assert any(line.startswith("Warning: δ = 0.01 times the ") for line in lines)
    seed = (tmp_path / "run" / "private" / "cohort_seed").read_text()
    told = json.loads((tmp_path / "run" / "privacy_statement.json").read_text())
    assert told["parameters"]["num_steps"] == 2
    assert told["epsilon"] == made.epsilon > made.epsilon_after(2)
    results = _finetune(tmp_path / "run", made=made)
    assert len(results.rows) == _STEPS
    assert (tmp_path / "run" / "private" / "cohort_seed").read_text() == seed


def test_nobody_sees_a_model_whose_step_is_not_committed(tmp_path):
    """A crash in `evaluate`, then other rows, would be two releases with one noise."""
    table, seen = _table(), []

    def evaluate(weights):
        seen.append(weights[0].copy())
        if len(seen) == 2:  # The first is before the first step.
            raise _Crash
        return {"error": float(np.linalg.norm(weights[0]))}

    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", evaluate=evaluate)
    others = {user: -rows for user, rows in table.items()}
    results = _finetune(tmp_path / "run", table=others, evaluate=evaluate)
    # Step 2, at which it crashed, is not trained again: the same weights are measured.
    np.testing.assert_array_equal(seen[3], seen[1])
    assert results.rows[1]["eval_error"] == pytest.approx(np.linalg.norm(seen[1]))
    assert [row["round"] for row in results.rows if row["eval_error"] is not None] == [2, 4, 5]


def test_variables_of_the_caller_never_keep_a_step_that_is_not_committed(tmp_path, monkeypatch):
    def fail(*args):
        assert np.any(variable.numpy())
        raise OSError

    variable = tf.Variable(np.zeros(3, np.float32))
    monkeypatch.setattr(committed_rounds.CommittedRounds, "commit", fail)
    with pytest.raises(OSError):
        _finetune(tmp_path / "run", variables=[variable])
    np.testing.assert_array_equal(variable, np.zeros(3))


def test_a_run_knows_its_examples_by_their_digest_and_keeps_it_private(tmp_path):
    _finetune(tmp_path / "run", digest="5eed", frozen=[np.ones(2, np.float64)])
    same = {"digest": "5eed", "frozen": [np.ones(2, np.float64)]}
    _finetune(tmp_path / "run", **same)
    for other in ("face", None):
        with pytest.raises(ValueError, match="The contents of the examples are not those"):
            _finetune(tmp_path / "run", **{**same, "digest": other})
    with pytest.raises(ValueError, match="The initial weights are not those"):
        _finetune(tmp_path / "run", **{**same, "frozen": [np.zeros(2, np.float64)]})
    assert "contents of the examples" in (tmp_path / "run/private/manifest.json").read_text()
    assert "contents of the examples" not in (tmp_path / "run/config.json").read_text()


@pytest.mark.slow
def test_passes_keep_their_schema_and_go_on_with_their_noise(tmp_path):
    seed = {"deterministic_noise_seed": 7, "made": _passes()}
    whole = _finetune(tmp_path / "whole", **seed)
    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", crash_at=4, **seed)
    resumed = _finetune(tmp_path / "run", **seed)
    np.testing.assert_array_equal(resumed.weights[0], whole.weights[0])
    stated = _finetune(tmp_path / "private", made=_passes()).statement
    # 60 users, 20 a step: everybody once in three steps, and 5 of them are made.
    schema = tff_dpftrl.MinSep(_STEPS, 3, 2)
    claim = tff_dpftrl.dp_ftrl_guarantee(
        tff_dpftrl.build_strategy("tree", schema), noise_multiplier=2.0, schema=schema, delta=1e-5
    )
    assert stated.epsilon == pytest.approx(claim.epsilon, rel=1e-9)
    assert stated.declared == schema and stated.parameters["group_size"] == 2
    reported = custom_run.write_report(tmp_path / "private").statement
    assert reported == stated
    for other in (_passes(group_size=3), _passes(mechanism="blt"), _plan(_table())):
        with pytest.raises(ValueError, match="began with"):
            _finetune(tmp_path / "private", made=other)
    _finetune(tmp_path / "sampled")
    with pytest.raises(ValueError, match="began with"):
        _finetune(tmp_path / "sampled", made=_passes())


def _used():
    optimizer = keras_versions.SGD()
    optimizer.iterations.assign(1)
    return optimizer


def _amplified(**changes):
    options = {"units_per_step": 6, "num_steps": _STEPS, "delta": 1e-5, "target_epsilon": 8.0}
    return amplified.Amplified(**{"sampling": "cyclic", **options, "group_size": 2, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["user", "example"])
def test_turns_go_on_with_their_samples_bands_and_noise(unit, tmp_path):
    made = _amplified(sampled_unit=unit)
    seed = {"deterministic_noise_seed": 7, "made": made}
    whole = _finetune(tmp_path / "whole", **seed)
    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", crash_at=3, **seed)
    resumed = _finetune(tmp_path / "run", **seed)
    np.testing.assert_array_equal(resumed.weights[0], whole.weights[0])
    stated = _finetune(tmp_path / "private", made=made).statement
    assert 7.9 < stated.epsilon <= 8.0
    assert stated.parameters["sampling"] == "cyclic" and stated.parameters["group_size"] == 2
    assert custom_run.write_report(tmp_path / "private").statement == stated
    assert (tmp_path / "private" / "private" / "pool.json").exists() == (unit == "example")
    for other in (_amplified(group_size=3), _amplified(bands=1), _passes(), _plan(_table())):
        with pytest.raises(ValueError, match="began with"):
            _finetune(tmp_path / "private", made=other)
    with pytest.raises(ValueError, match="began with clip_norm"):
        _finetune(tmp_path / "private", made=made, clip_norm=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users_per_step": 0}, "users_per_step"),
        ({"users_per_step": 61}, "exceeds the 60"),
        ({"delta": 0.0}, "delta"),
        ({"target_epsilon": 1.0}, "exactly one of"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"mechanism": "magic"}, "mechanism must be one of"),
        ({"mechanism": None}, "mechanism must be one of"),
        ({"mechanism": "none"}, "mechanism must be one of"),
    ],
)
def test_passes_that_cannot_be_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _finetune(tmp_path / "run", made=_passes(**changes))
    assert not (tmp_path / "run").exists()


def _says_that_weights_are_unknown(results):
    return sentences.INITIAL_WEIGHTS in " ".join(results.statement.headline_caveats)


def test_unknown_weights_are_a_caveat_beside_epsilon(tmp_path):
    """Random ones are none: the run of the next test begins with them."""
    assert _says_that_weights_are_unknown(_finetune(tmp_path / "run", trained_on=None))
    with pytest.raises(ValueError, match="trained_on must name"):
        _finetune(tmp_path / "blank", trained_on=" ")


def test_a_run_that_begins_with_another_s_weights_is_composed_with_it(tmp_path):
    first = _finetune(tmp_path / "first", trained_on="nothing")
    assert not _says_that_weights_are_unknown(first)
    for _ in range(2):  # The second call goes on with the run.
        results = _finetune(tmp_path / "second", trained_on=tmp_path / "first")
        *_, says = results.statement.headline_caveats
        assert "'first'" in says and "All of these runs trained on the same users." in says
        together = results.statement.parameters
        # Twice as many steps with the same noise and sampling.
        twice = {"num_steps": 2 * _STEPS, "delta": together["delta_with_earlier_runs"]}
        both = plan.of_record(_plan(_table()).record | twice)
        assert both.epsilon < 2.0 * first.statement.epsilon
        assert together["epsilon_with_earlier_runs"] == pytest.approx(both.epsilon, rel=1e-4)
    with pytest.raises(ValueError, match="There is no run in .*nowhere"):
        _finetune(tmp_path / "third", trained_on=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("row_losses", "message"),
    [
        (lambda w, rows: _losses(w, rows - tf.reduce_mean(rows, 0)), "beside others"),
        (lambda w, rows: tf.reduce_sum(tf.square(rows), axis=1), "does not use its argument"),
        (lambda w, rows: tf.math.log(-1.0 - _losses(w, rows)), "row_losses gives nan"),
    ],
)
def test_losses_are_tried_before_a_folder_is_made(row_losses, message, tmp_path):
    with pytest.raises(validation.UsageError, match=message):
        _finetune(tmp_path / "run", row_losses=row_losses)
    assert not (tmp_path / "run").exists()


def test_losses_are_tried_again_during_the_run(tmp_path):
    table = _table()
    first = {user: np.abs(rows) for user, rows in table.items()}

    def turned(weights, rows):  # Mixes rows where the trial before the run cannot see it.
        mean = tf.reduce_mean(rows, 0)
        return _losses(weights, tf.where(rows < 0, rows - mean, rows))

    later = {u: -rows if i > 4 else rows for i, (u, rows) in enumerate(first.items())}
    with pytest.raises(validation.UsageError, match="beside others"):
        _finetune(tmp_path / "run", table=later, row_losses=turned)
    assert (tmp_path / "run").exists()


def test_a_step_without_any_finite_gradient_is_not_committed(tmp_path):
    def losses(weights, rows):
        return _losses(weights, rows) * tf.where(
            tf.reduce_max(tf.abs(weights[0])) > 0.45, np.nan, 1
        )

    with pytest.raises(validation.UsageError, match="No gradient of the .* in step 3 is finite"):
        _finetune(tmp_path / "run", row_losses=losses, evaluate=None)
    assert len(custom_run.write_report(tmp_path / "run").rows) == 2


@pytest.mark.slow
def test_a_run_that_an_older_version_began_goes_on(tmp_path, monkeypatch):
    public = manifest.Manifest._public

    def older(self):
        content = {name: value for name, value in public(self).items() if name != "kind"}
        config = {k: v for k, v in content["config"].items() if k != "max_epsilon"}
        return content | {"config": config}

    with monkeypatch.context() as patch:
        patch.setattr(manifest.Manifest, "_public", older)
        with pytest.raises(_Crash):
            _finetune(tmp_path / "run", crash_at=4)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "kind" not in written and "max_epsilon" not in written["config"]
    assert len(custom_run.write_report(tmp_path / "run").rows) == 3
    assert len(_finetune(tmp_path / "run").rows) == _STEPS


@pytest.mark.parametrize("refused", ["budget", "users", "optimizer"])
def test_what_could_never_begin_is_refused_before_a_folder_is_made(tmp_path, refused):
    made = _plan(_table())
    options, message = {"max_epsilon": 1.0, "deterministic_noise_seed": 3}, "max_epsilon has no"
    if refused == "optimizer":
        optimizer = tf.keras.optimizers.AdamW(0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        options, message = {"optimizer": lambda: optimizer}, "exclude_from_weight_decay"
    if refused == "users":
        made, options, message = _plan(dict(list(_table().items())[1:])), {}, "make a new plan"
    with pytest.raises(validation.UsageError, match=message):
        _finetune(tmp_path / "run", made=made, **options)
    assert not (tmp_path / "run").exists()


def test_a_budget_ends_a_run_and_pays_for_what_was_run(tmp_path):
    made = _plan(_table(), noise_multiplier=2.0)
    budget = (made.epsilon_after(3) + made.epsilon_after(4)) / 2
    results = _finetune(tmp_path / "run", made=made, max_epsilon=budget)
    assert len(results.rows) == 3 and results.statement.epsilon == made.epsilon_after(3)
    assert results.rows[-1]["eval_error"] is not None  # The last model is measured in any case.
    assert "Stopped after 3 of 5 steps: the next one would bring ε to" in results.summary
    assert _finetune(tmp_path / "run", made=made, max_epsilon=budget).rows == results.rows
    with pytest.raises(ValueError, match="began with max_epsilon"):
        _finetune(tmp_path / "run", made=made)
    with pytest.raises(ValueError, match="does not pay for one step"):
        _finetune(tmp_path / "none", made=made, max_epsilon=made.epsilon_after(1) / 2)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_an_interrupted_run_is_reported_without_its_data(tmp_path, capsys):
    with pytest.raises(_Crash):
        _finetune(tmp_path / "run", crash_at=4)
    (tmp_path / "run" / "weights.npz").unlink()
    # Nothing sends the reader in a circle.
    assert main.main(["predict", str(tmp_path / "run"), "a text"]) == 2
    assert "weights.npz by tff-dpftrl report" in capsys.readouterr().err
    reported = custom_run.write_report(tmp_path / "run")
    assert f"After 2 steps: error {reported.rows[1]['eval_error']:.4g}." in reported.summary
    for command in (["predict", "a text"], ["predict", "a text", "--model", "best"], ["export"]):
        command.insert(1, str(tmp_path / "run"))
        assert main.main(command if command[0] == "predict" else [*command, "exported"]) == 2
        said = capsys.readouterr().err
        assert "Read them by numpy.load" in said and "tff-dpftrl report" not in said
    assert main.main(["report", str(tmp_path / "run")]) == 0
    assert "weights (weights.npz, which numpy.load reads" in capsys.readouterr().out
    assert len(reported.rows) == 3
    assert "3 of 5 steps are done; go on with the call of finetuning.custom_run" in reported.summary
    assert (tmp_path / "run" / "weights.npz").exists()
    assert main.main(["report", str(tmp_path / "run"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["statement"]["epsilon"] == reported.statement.epsilon
    assert main.main(["finetune", "--resume", "--output", str(tmp_path / "run")]) == 2
    assert "is one of finetuning.custom_run.finetune, not of tff-dpftrl" in capsys.readouterr().err
    assert len(_finetune(tmp_path / "run").rows) == _STEPS


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run that stopped after its first step, and that no call goes on with."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(_Crash):
        _finetune(folder, crash_at=2)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_norm": 2.0}, "clip_norm = 1.0, not 2.0"),
        ({"weights": [np.ones(3, np.float32)]}, "initial weights are not those"),
        ({"optimizer": lambda: tf.keras.optimizers.SGD(0.3)}, "optimizer"),
        ({"normalised_clipping": False}, "normalised_clipping = True, not False"),
    ],
)
def test_only_what_it_began_with_can_go_on(change, message, begun):
    with pytest.raises(ValueError, match=message):
        _finetune(begun, **change)


def test_other_users_or_another_plan_are_refused(begun):
    with pytest.raises(ValueError, match="began with plan"):
        _finetune(begun, made=_plan(_table(), noise_multiplier=1.5))
    renamed = {f"my {name}": rows for name, rows in _table().items()}
    with pytest.raises(ValueError, match="users are not those"):
        _finetune(begun, table=renamed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [np.zeros(3)]}, r"weights\[0\] must be finite and float32, got float64"),
        ({"weights": [np.full(3, np.nan, np.float32)]}, "finite"),
        ({"clip_norm": 1e-7}, "clip_norm must be .* at least 1e-06"),
        ({"every": 0}, "every"),
        ({"units_at_once": 0}, "units_at_once"),
        ({"optimizer": _used}, "optimizer SGD has a state already .*iteration"),
        (
            {"optimizer": lambda: keras_versions.LossScaleOptimizer(keras_versions.SGD())},
            "optimizer scales losses",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _finetune(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_not_kept(tmp_path):
    with pytest.raises(ValueError, match="Training diverged: the weights after step 1"):
        _finetune(tmp_path / "run", learning_rate=lambda step: float("inf"))
    assert not (tmp_path / "run" / "weights.npz").exists()


def test_without_noise_there_is_no_guarantee_and_nothing_need_be_measured(tmp_path):
    made = _plan(_table(), noise_multiplier=0.0)
    results = _finetune(tmp_path / "run", made=made, evaluate=None)
    assert not results.statement.has_guarantee
    assert set(results.rows[0]) == {"round", "loss", "epsilon"}


@pytest.mark.slow
def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    text = (_DOCS / "how_to" / "finetuning.md").read_text(encoding="utf-8")
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if "custom_run" in block
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "finetuning.md", "exec"), {})
    assert (tmp_path / "results" / "mine" / "privacy_statement.md").exists()
