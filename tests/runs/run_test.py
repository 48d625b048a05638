"""Tests of the kernel of runs, with a trainer of a few lines: killed anywhere, gone on with."""

import contextlib
import dataclasses
import functools
import secrets

import numpy as np
import pytest

from tests import kills
from tff_dpftrl import durable_files, private_round, validation
from tff_dpftrl.accounting import facts, parts, privacy_plot
from tff_dpftrl.auditing.recount import records
from tff_dpftrl.runs import (
    cohort_seed,
    committed_rounds,
    curves,
    dp_ftrl_privacy,
    loop,
    manifest,
    metrics_log,
    prepared,
    released_metrics,
    released_model,
    reporting,
    sampled_privacy,
    stopping,
    tensorboard_log,
)
from tff_dpftrl.runs import run as run_lib

_USERS = [f"user{i}" for i in range(12)]
_COMMON = {"num_rounds": 4, "clients_per_round": 4, "clip_norm": 1.0, "delta": 1e-5}
_NOISE = {"noise_multiplier": 1.0}
_PUBLIC_SEED = 5


def _sampled(**options):
    asked = sampled_privacy.SampledPrivacy(algorithm="dp-fedavg", **_COMMON, **(_NOISE | options))
    return asked.plan(len(_USERS), 3)


def _in_turns(**options):
    asked = dp_ftrl_privacy.DpFtrlPrivacy(**(_COMMON | _NOISE | options), mechanism="identity")
    return asked.plan(len(_USERS), 3)


class _Crash(BaseException):
    """Stands for the death of the process."""


class _Trainer(prepared.Trainer):
    """Adds the number of members and noise that is a function of the state."""

    too_fast = "learning_rate"
    unit = "clients"

    def __init__(self, plan, weights=(0.0, 0.0, 0.0), not_finite=0):
        self._plan = plan
        self._weights = np.array(weights)
        self._not_finite = not_finite
        self.seeds = []

    def initial_state(self):
        return {
            "aggregator": {"index": np.int64(0), "noise": np.zeros(3)},
            "global_model_weights": {"trainable": [self._weights]},
        }

    def sample_with(self, seed):
        self.seeds.append(seed)
        self._sampler = self._plan.sampler(seed)

    def members(self, round_index):
        return [_USERS[i] for i in self._sampler.cohort(round_index)]

    def train(self, state, round_index, members):
        noise = np.random.default_rng([3, round_index]).normal(size=3)
        (weights,) = state["global_model_weights"]["trainable"]
        after = {
            "aggregator": {"index": state["aggregator"]["index"] + 1, "noise": noise},
            "global_model_weights": {"trainable": [weights + len(members) + noise]},
        }
        sums = np.array([3.0, float(len(members))])
        return prepared.Trained(after, 3.0 - round_index, 0.1 * round_index, self._not_finite, sums)


class _Evaluator(prepared.Evaluator):
    """Remembers what it was shown."""

    def __init__(self, accuracies=(0.2, 0.5, 0.4, 0.3)):
        self._accuracies = list(accuracies)
        self.seen, self.examined = [], None

    def evaluate(self, weights):
        self.seen.append(weights[0].copy())
        return {"eval_top1_in_vocab": self._accuracies[len(self.seen) - 1]}

    def bounded_sums(self, weights, figures):
        return np.array([2.0, 8.0])

    def examine(self, output, rounds_done, weights):
        self.examined = rounds_done, weights[0].copy()


class _Presentation(prepared.Presentation):
    columns = tuple(
        metrics_log.Column(name, name, is_exact=name in ("loss", "top1", "clients", "seconds"))
        for name in ("round", "loss", "top1", "epsilon", "clients", "seconds", "eval_top1_in_vocab")
    )
    has_events = False

    def __init__(self):
        self.best = []

    def write_best(self, output, weights):
        self.best.append(weights[0].copy())

    def write_model(self, output, weights):
        np.savez(output / self.model_file, weights[0])

    def write(self, output, outcome):
        curves.write(output, outcome.rows, title="title")
        np.save(output / "model.npy", outcome.weights[0])
        return outcome


def _manifest(plan):
    return manifest.Manifest({"x": 1}, plan.derived(), {}, {}, recorded_kind=manifest.TRAINING)


_FIGURES = released_metrics.Figures(
    {"loss_sum": 1.0, "num": 1.0}, (released_metrics.Mean("noised_loss", "", "loss_sum", "num"),)
)
_EVALUATION = released_metrics.Figures(
    {"loss_sum": 1.0, "num": 1.0},
    (released_metrics.Mean("noised_eval_loss", "", "loss_sum", "num"),),
    prefix="noised_eval_sum_",
)


def _prepared(plan, trainer=None, evaluator=None, *, known=None, **schedule):
    presentation = _Presentation()
    figures = None if released_metrics.noise_of(plan) is None else _FIGURES
    evaluation = _EVALUATION if parts.EVALUATION in {one.name for one in plan.others} else None
    for released in filter(None, (figures, evaluation)):
        presentation.columns += released.columns
    report = prepared.Reportable(
        known=known or _manifest(plan),
        plan=plan,
        facts=facts.Facts(),
        schedule=stopping.Schedule("round", **({"eval_every": 2} | schedule)),
        released=functools.partial(released_model.weights, None),
        presentation=presentation,
        go_on="the same call",
        figures=figures,
        evaluation=evaluation,
    )
    trainer = trainer or _Trainer(plan)
    evaluator = evaluator or _Evaluator()
    made = prepared.Prepared(report, contextlib.nullcontext(trainer), evaluator, _PUBLIC_SEED)
    return made, trainer, evaluator, presentation


def _run(output, plan, *parts, progress=lambda line: None, **schedule):
    made, *rest = _prepared(plan, *parts, **schedule)
    known = manifest.read(output) if manifest.exists(output) else None
    return run_lib.train(output, known, lambda: made, lambda known: made, progress), *rest


class _OtherFigures(_Trainer):
    """Trains the same model, and measures something else."""

    def train(self, state, round_index, members):
        trained = super().train(state, round_index, members)
        return trained._replace(loss=7.0, top1=0.9, num_not_finite=2)


@pytest.mark.pictures
def test_nothing_outside_of_private_depends_on_figures_of_the_training_users(tmp_path):
    plan, found = _in_turns(), []
    for name, trainer in (("a", _Trainer(plan)), ("b", _OtherFigures(plan))):
        _run(tmp_path / name, plan, trainer)
        files = [path for path in (tmp_path / name).iterdir() if path.is_file()]
        # The README has the folder's name, and the statement a date and digests with a key.
        found.append(
            {p.name: p.read_bytes() for p in files if not p.name.startswith(("README", "privacy"))}
        )
    assert found[0] == found[1]
    assert {"metrics.csv", "curves.png", "model.npz", "config.json"} <= found[0].keys()
    for name in ("metrics.csv", "curves.png"):
        exact = [(tmp_path / run / "private" / name).read_bytes() for run in "ab"]
        assert exact[0] != exact[1]


@pytest.mark.parametrize("make_plan", [_sampled, _in_turns])
def test_a_run_does_all_rounds_and_reports(make_plan, tmp_path):
    plan, lines = make_plan(), []
    outcome, trainer, evaluator, presentation = _run(tmp_path, plan, progress=lines.append)
    assert [row["round"] for row in outcome.rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in outcome.rows] == [3.0, 2.0, 1.0, 0.0]
    assert [row["epsilon"] for row in outcome.rows] == [plan.epsilon_after(t) for t in range(1, 5)]
    assert [row["eval_top1_in_vocab"] for row in outcome.rows] == [None, 0.2, None, 0.5]
    assert outcome.progress == "All 4 rounds are done."
    assert outcome.statement.epsilon == pytest.approx(plan.epsilon_after(4))
    np.testing.assert_array_equal(outcome.weights[0], evaluator.seen[-1])
    assert evaluator.examined[0] == 4
    np.testing.assert_array_equal(evaluator.examined[1], outcome.weights[0])
    assert len(presentation.best) == 2  # Each was the best so far.
    assert any(line.endswith("0 of 4 rounds done.") for line in lines)


def test_a_model_that_is_not_the_best_is_not_kept(tmp_path):
    evaluator = _Evaluator([0.5, 0.4])
    _, _, _, presentation = _run(tmp_path, _in_turns(), None, evaluator)
    (best,) = presentation.best
    np.testing.assert_array_equal(best, evaluator.seen[0])


def test_secret_cohorts_have_a_seed_that_nobody_chose(tmp_path):
    plan = _sampled()
    seeds = []
    for name in ("a", "b"):
        _, trainer, _, _ = _run(tmp_path / name, plan)
        (seed,) = trainer.seeds
        assert seed == cohort_seed.read(tmp_path / name / "private") != _PUBLIC_SEED
        seeds.append(seed)
        _, again, _, _ = _run(tmp_path / name, plan)
        assert again.seeds == [seed]
    assert seeds[0] != seeds[1] and min(seeds).bit_length() > 200


@pytest.mark.parametrize(
    "plan", [_in_turns(), _sampled(deterministic_seed=7)], ids=["turns", "known"]
)
def test_other_cohorts_have_the_public_seed(tmp_path, plan):
    _, trainer, _, _ = _run(tmp_path, plan)
    assert trainer.seeds == [_PUBLIC_SEED]
    assert not (tmp_path / "private" / "cohort_seed").exists()


def test_the_sizes_of_secret_cohorts_are_kept_out_of_the_metrics(tmp_path):
    secret, *_ = _run(tmp_path / "secret", _sampled())
    assert [row["clients"] for row in secret.rows] == [None] * 4
    turns, *_ = _run(tmp_path / "turns", _in_turns())
    assert [row["clients"] for row in turns.rows] == [4] * 4


@pytest.mark.parametrize("make_plan", [_sampled, _in_turns])
def test_the_promise_of_a_run_is_a_sentence_with_its_caveats(make_plan, tmp_path):
    statement = _run(tmp_path, make_plan())[0].statement
    said = reporting.promise(dataclasses.replace(statement, headline_caveats=("But beware.",)))
    assert said.startswith("Privacy: ε = ") and said.endswith("privacy_statement.md. But beware.")
    assert ("ρ-zCDP" in said) == (statement.rho_zcdp is not None)


def test_without_noise_the_promise_says_that_there_is_none(tmp_path):
    statement = _run(tmp_path, _in_turns(noise_multiplier=0.0))[0].statement
    assert reporting.promise(statement).startswith("Privacy: NO guarantee. No noise")


def _releasing(**options):
    others = (
        parts.Part(parts.METRICS, "loss", noise_multiplier_of_round=0.1),
        parts.Part(parts.EVALUATION, "loss", rho_zcdp=50.0),
    )
    return _in_turns(others=others, **options)


def test_metrics_are_released_with_a_noise_of_their_own(tmp_path):
    plan, found = _releasing(), []
    for name in "ab":
        outcome, *_ = _run(tmp_path / name, plan)
        header, *published = (tmp_path / name / "metrics.csv").read_text().splitlines()
        assert "noised_loss,noised_loss_se" in header and len(published) == 4
        found += [row["noised_loss"] for row in outcome.rows]
        found += [row["noised_eval_loss"] for row in outcome.rows[1::2]]
    assert len({*found}) == 12  # Another noise in each round, and in each run.
    assert outcome.statement.epsilon > _run(tmp_path / "c", _in_turns())[0].statement.epsilon
    assert {path.name for path in (tmp_path / "a" / "private").iterdir()} == {
        path.name for path in (tmp_path / "c" / "private").iterdir()
    }


def test_a_known_seed_gives_the_same_metrics(tmp_path):
    outcome, *_ = _run(tmp_path, _releasing(deterministic_seed=7))
    evaluations = {"stddev": released_metrics.noise_of_evaluation(_releasing(), 2), "seed": 7}
    for t, row in enumerate(outcome.rows):
        expected = released_metrics.Release(_FIGURES, 0.1, 7).of_round(t, np.array([3.0, 4.0]))
        if row["round"] % 2 == 0:
            release = released_metrics.Release(_EVALUATION, **evaluations, of_evaluation=True)
            expected |= release.of_round(row["round"], np.array([2.0, 8.0]))
        assert {column: row[column] for column in expected} == expected


@pytest.mark.parametrize("lost", ["private/metrics.csv", "metrics.csv"])
def test_what_one_table_has_is_not_released_again(tmp_path, lost):
    before, *_ = _run(tmp_path, _releasing())
    (tmp_path / lost).unlink()
    after, *_ = _run(tmp_path, _releasing())
    for name in ("noised_loss", "noised_eval_loss"):
        assert [row[name] for row in after.rows] == [row[name] for row in before.rows]


def test_a_run_that_has_lost_its_evaluations_makes_no_others(tmp_path):
    _run(tmp_path, _releasing())
    for name in ("private/metrics.csv", "metrics.csv"):
        (tmp_path / name).unlink()
    with pytest.raises(validation.UsageError, match="another one would be a second release"):
        _run(tmp_path, _releasing())


@pytest.mark.parametrize("make_plan", [_sampled, _in_turns, _releasing])
@pytest.mark.parametrize("where", ["train", "begin", "commit", "_publish", "evaluate", "examine"])
def test_a_run_killed_anywhere_gives_what_it_would_have_given(
    make_plan, where, tmp_path, monkeypatch
):
    plan = make_plan(deterministic_seed=7)
    expected, *_ = _run(tmp_path / "whole", plan)
    evaluator, trainer = _Evaluator(), _Trainer(plan)
    owner = {
        "train": trainer,
        "_publish": loop.Loop,
        "evaluate": evaluator,
        "examine": evaluator,
    }.get(where, loop.committed_rounds.CommittedRounds)
    called = getattr(owner, where)
    calls = []

    def crash(*args):
        calls.append(args)
        if len(calls) == (1 if where == "examine" else 2):
            raise _Crash
        return called(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, crash)
        with pytest.raises(_Crash):
            _run(tmp_path / "killed", plan, trainer, evaluator)
    went_on, _, after, _ = _run(tmp_path / "killed", plan)
    np.testing.assert_array_equal(went_on.weights[0], expected.weights[0])
    for name in ("loss", "noised_loss"):
        assert [row.get(name) for row in went_on.rows] == [row.get(name) for row in expected.rows]
    assert went_on.statement == expected.statement
    rows = went_on.rows
    assert all(row["eval_top1_in_vocab"] is not None for row in (rows[1], rows[3]))


class _FreshTrainer(_Trainer):
    """Draws other noise whenever a round is executed, but with a known seed."""

    def train(self, state, round_index, members):
        trained = super().train(state, round_index, members)
        if self._plan.deterministic_seed is None:
            noise = np.random.default_rng().normal(size=3)
            trained.state["global_model_weights"]["trainable"][0] += noise
        return trained


class _RenewedPresentation(_Presentation):
    has_events = is_renewed = True

    def write_best(self, output, weights):
        np.savez(output / "best_model.npz", weights[0])

    def write(self, output, outcome):
        return outcome


_VISIBLE = (
    (tensorboard_log.TensorBoardLog, "append"),
    (loop, "_shown"),  # The progress bar.
    (_RenewedPresentation, "write_best"),
    (_RenewedPresentation, "write_model"),
)


@pytest.mark.parametrize("seed", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_wherever_a_run_is_killed_it_releases_once(tmp_path, monkeypatch, seed):
    plan = _releasing(num_rounds=2, deterministic_seed=seed)
    # Most of a run's time; the picture is left empty.
    monkeypatch.setattr(privacy_plot, "draw", lambda *args, **options: None)

    def run(output):
        is_new, kept = not manifest.exists(output), output / "private" / "words"
        words = secrets.token_bytes(8) if is_new else kept.read_bytes()
        trainer = _FreshTrainer(plan, not_finite=1)
        made, *_ = _prepared(plan, trainer, _Evaluator([0.2] * 4), eval_every=1)
        presentation = _RenewedPresentation()
        presentation.columns = made.report.presentation.columns
        made = dataclasses.replace(
            made,
            report=dataclasses.replace(made.report, presentation=presentation),
            keep_first=lambda output: durable_files.write(kept, words, private=True),
            keep=lambda output: durable_files.write(output / "words", words),
        )
        known = None if is_new else manifest.read(output)
        return run_lib.train(output, known, lambda: made, lambda known: made, lambda line: None)

    outputs = list(kills.everywhere(tmp_path, run, visible=_VISIBLE))
    assert len(outputs) > 35
    assert len({(output / "words").read_bytes() for output in outputs}) == len(outputs)
    models = {(output / "model.npz").read_bytes() for output in outputs}
    assert len(models) == (len(outputs) if seed is None else 1)


_COPIES = ["config.json", "private/manifest.json"]


@pytest.mark.parametrize("lost", [_COPIES[:1], _COPIES, [*_COPIES, "private/ledger.sqlite"]])
def test_a_run_whose_options_are_lost_is_not_begun_again(tmp_path, lost):
    plan = _in_turns()
    _run(tmp_path, plan)
    before = kills.published(tmp_path)
    for name in lost:
        (tmp_path / name).rename(tmp_path / "private" / f"kept {name[-8:]}")
    for gone in ("model.npz", "metrics.csv", "privacy_statement.json", "private/metrics.csv"):
        (tmp_path / gone).unlink()  # Whatever else is lost, the rounds are there.
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("private/*.*")}
    made, *_ = _prepared(plan)
    with pytest.raises(
        validation.UsageError,
        match="already holds a run: add --resume" if len(lost) == 1 else "Restore private/manifest",
    ):
        run_lib.train(tmp_path, None, lambda: made, lambda known: made, lambda line: None)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("private/*.*")} == kept
    if len(lost) == 1:
        _run(tmp_path, plan)
        after = kills.published(tmp_path)
        assert all(after[name] == before[name] for name in ("config.json", "model.npz"))


def test_a_folder_in_which_a_run_begins_is_not_emptied_by_another_process(tmp_path, monkeypatch):
    plan, keep = _in_turns(), manifest.Manifest.keep

    def keep_while_another_begins(known, output):
        with pytest.raises(validation.UsageError, match="in use by another process"):
            manifest.check_is_free(output)
        keep(known, output)

    monkeypatch.setattr(manifest.Manifest, "keep", keep_while_another_begins)
    _run(tmp_path, plan)


def test_of_two_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    """Even if the other has found the folder free already, and is about to empty it."""
    check, create = manifest.check_is_free, committed_rounds.CommittedRounds.create
    made, *_ = _prepared(_in_turns())

    def create_while_another_begins(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "check_is_free", lambda output: None)
            with pytest.raises(validation.UsageError, match="Another process begins a run in"):
                run_lib.train(tmp_path, None, lambda: made, lambda known: made, lambda line: None)
        return create(*args, **options)

    rounds = committed_rounds.CommittedRounds
    monkeypatch.setattr(rounds, "create", create_while_another_begins)
    _run(tmp_path, _in_turns())
    assert manifest.check_is_free is check and manifest.exists(tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("version", [2, 3])
def test_a_run_of_version_0_4_goes_on(tmp_path, monkeypatch, version):
    """It has a seed of its metrics, too, which later versions leave where it is."""
    plan, trainer = _releasing(), _Trainer(_in_turns())
    train = trainer.train

    def crash(state, round_index, members):
        if round_index == 2:
            raise _Crash
        return train(state, round_index, members)

    monkeypatch.setattr(trainer, "train", crash)
    with monkeypatch.context() as patch, pytest.raises(_Crash):
        patch.setattr(private_round, "NOISE_VERSION", version)
        _run(tmp_path, plan, trainer)
    (tmp_path / "private" / "metrics_seed").write_text("1f" * 32)
    known = manifest.read(tmp_path)
    assert known.noise_version == version
    outcome, *_ = _run(tmp_path, plan, known=known)
    assert len(outcome.rows) == 4 and manifest.read(tmp_path) == known
    read = records.read(tmp_path)
    assert read.checkpoint.path.stem.endswith(read.checkpoint.fingerprint(binding=read.binding))


def test_only_committed_models_are_evaluated(tmp_path, monkeypatch):
    done = []

    class Watching(_Evaluator):
        def evaluate(self, weights):
            committed = len(list((tmp_path / "private" / "checkpoints").iterdir()))
            done.append((committed, self.rounds.rounds_done))
            return super().evaluate(weights)

    evaluator = Watching()
    restore = loop.committed_rounds.CommittedRounds.restore

    def remember(rounds):
        evaluator.rounds = rounds
        return restore(rounds)

    monkeypatch.setattr(loop.committed_rounds.CommittedRounds, "restore", remember)
    _run(tmp_path, _in_turns(), None, evaluator)
    assert [rounds_done for _, rounds_done in done] == [2, 4]


def test_a_budget_ends_a_run_before_the_round_that_it_does_not_pay_for(tmp_path):
    plan = _sampled()
    budget = plan.epsilon_after(2) * 1.0001
    outcome, *_ = _run(tmp_path, plan, max_epsilon=budget)
    assert len(outcome.rows) == 2
    assert outcome.progress.startswith("Stopped after 2 of 4 rounds: the next one would bring ε")
    assert outcome.statement.epsilon == pytest.approx(plan.epsilon_after(2))  # By what was public.


def test_an_accuracy_that_ends_a_run_is_charged_as_all_rounds(tmp_path):
    plan = _in_turns()
    outcome, *_ = _run(tmp_path, plan, stop_at_accuracy=0.2)
    assert len(outcome.rows) == 2 and "stop_at_accuracy is 20.00%" in outcome.progress
    assert outcome.statement.epsilon == pytest.approx(plan.epsilon_after(4))


def test_an_interrupted_run_is_reported_and_charged_as_a_whole_one(tmp_path, monkeypatch):
    plan = _in_turns()
    trainer = _Trainer(plan)
    train = trainer.train

    def crash(state, round_index, members):
        if round_index == 3:
            raise _Crash
        return train(state, round_index, members)

    monkeypatch.setattr(trainer, "train", crash)
    with pytest.raises(_Crash):
        _run(tmp_path, plan, trainer)
    made, *_ = _prepared(plan)
    outcome = run_lib.report(tmp_path, lambda known: made.report)
    assert len(outcome.rows) == 3
    assert outcome.progress.startswith("3 of 4 rounds are done; go on with the same call.")
    assert outcome.statement.epsilon == pytest.approx(plan.epsilon_after(4))


def test_before_the_first_round_there_is_nothing_to_report(tmp_path, monkeypatch):
    plan = _in_turns()
    trainer = _Trainer(plan)

    def crash(*_):
        raise _Crash

    monkeypatch.setattr(trainer, "train", crash)
    with pytest.raises(_Crash):
        _run(tmp_path, plan, trainer)
    made, *_ = _prepared(plan)
    with pytest.raises(ValueError, match="has not committed a round yet"):
        run_lib.report(tmp_path, lambda known: made.report)


def test_a_model_that_diverged_is_not_committed(tmp_path):
    plan = _in_turns()
    trainer = _Trainer(plan, weights=(np.inf, 0.0, 0.0))
    with pytest.raises(
        validation.UsageError, match="weights after round 1 are not finite. Lower l"
    ):
        _run(tmp_path, plan, trainer)
    assert (tmp_path / "private" / "diverged.json").read_text() == '{"round": 1}\n'
    with pytest.raises(validation.UsageError, match="weights after round 1 are not finite"):
        _run(tmp_path, plan)  # Other noise might do better.
    made, *_ = _prepared(plan)
    with pytest.raises(ValueError, match="has not committed a round yet"):
        run_lib.report(tmp_path, lambda known: made.report)


@pytest.mark.parametrize(
    "plan, says",
    [(_sampled(), "some clients"), (_in_turns(), "2 of 4 clients")],
    ids=["secret", "turns"],
)
def test_updates_that_are_not_finite_are_said(tmp_path, plan, says):
    lines = []
    _run(tmp_path, plan, _Trainer(plan, not_finite=2), progress=lines.append)
    warnings = [line for line in lines if "not finite" in line]
    assert len(warnings) == 4 and says in warnings[0] and "lower learning_rate" in warnings[0]


@pytest.mark.parametrize(
    "row, shown",
    [
        (
            {"loss": 2.34567, "top1": 0.1234, "epsilon": 1.2341},
            {"loss": "2.346", "top-1": "12.3%", "ε": "1.24"},
        ),
        ({"loss": None, "top1": None, "epsilon": None}, {}),
    ],
)
def test_the_progress_bar_shows_what_is_known(row, shown):
    assert loop._shown(row) == shown


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path):
    _run(tmp_path, _in_turns())
    kept = (tmp_path / "private" / "ledger.sqlite").read_bytes()
    made, *_ = _prepared(_in_turns())
    with pytest.raises(ValueError, match="already holds a run"):
        run_lib.train(tmp_path, None, lambda: made, lambda known: made, lambda line: None)
    assert (tmp_path / "private" / "ledger.sqlite").read_bytes() == kept


def test_secrets_of_another_run_that_a_link_leads_to_are_kept(tmp_path):
    _run(tmp_path / "other", _in_turns())
    kept = (tmp_path / "other" / "private" / "ledger.sqlite").read_bytes()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "private").symlink_to(tmp_path / "other" / "private")
    made, *_ = _prepared(_in_turns())
    with pytest.raises(ValueError, match="is a link"):
        run_lib.train(tmp_path / "new", None, lambda: made, lambda known: made, lambda line: None)
    assert (tmp_path / "other" / "private" / "ledger.sqlite").read_bytes() == kept
