"""Tests of making tasks from options, and of their reports."""

import csv
import dataclasses
import json
import random
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.fleet import server_thread
from tests.runtime.plans import small_tasks
from tests.runtime.server import example_service
from tests.runtime.tasks import tiny_task
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.data import sequences, tokenizer, user_text
from tff_dpftrl.models import export, held_out, metrics, table, text_cache
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.fleet import behaviour, fleet
from tff_dpftrl.runtime.plans import measured_run, plan_pb2, predicates
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.status import session_table
from tff_dpftrl.runtime.tasks import (
    language_task,
    making,
    planned_task,
    provenance,
    summation_sentences,
    task_config,
    task_report,
)
from tff_dpftrl.training import corpus, trained_model
from verification import memory_store


@pytest.fixture(scope="module", autouse=True)
def quick_measurement():
    """Replaces the measurement of plans in separate processes by a constant cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))
        yield


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    tiny_task.write_corpora(folder)
    return folder


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def folder(corpora, lines, tmp_path_factory):
    """Makes a training task, and checks that the text of its devices is not read."""

    def fail(config):
        raise AssertionError("The devices' text was read.")

    output = tmp_path_factory.mktemp("tasks") / "toy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "read_users", fail)
        return making.make(
            tiny_task.config(corpora, expect="loss < 4, update > 0.01"),
            output,
            small_tasks.KEY,
            built=provenance.find(builder="Ada"),
            progress=lines.append,
        )


def test_the_plans_follow_from_the_options(folder, lines):
    config, device = folder.config, folder.devices[0]
    assert (config.serving.task, config.privacy.min_sep) == ("toy", 4)  # 400 devices, 65 a round.
    assert (device.population, device.task, device.kind) == ("tests", "toy", plan_pb2.TRAINING)
    assert device.selection.collection == "text"
    assert device.selection.max_examples == 200
    assert device.participation.min_sep_rounds == folder.terms.schema.min_sep == 4
    assert device.participation.times_edges[-1] == folder.terms.schema.max_participations == 1
    assert device.seed_policy == plan_pb2.DEVICE_DRAWS
    assert folder.terms.noise_multiplier == 0.5
    assert folder.terms.strategy.name == "identity"
    generator = folder.terms.parameters[sentences.NOISE_GENERATOR]
    assert generator == sentences.SECURE_AND_EXACT  # The default; the noise is independent.
    assert _seed_shape(folder) == [4]
    served = planned_task.PlannedTask(folder).served.task
    assert served.tested_tensorflow == tuple(device.tested_tensorflow) == (tf.__version__,)
    assert folder.words.words == tuple(dict.fromkeys(folder.words.words))
    readme = (folder.path / "README.md").read_text()
    assert "ε at most" in readme and "65 devices are chosen" in readme
    assert folder.server.provenance == provenance.find(builder="Ada")
    assert device.provenance.package_version and not device.provenance.builder
    assert "Built by Ada with tff_dpftrl" in readme
    assert "- As expected: loss < 4 (loss 3.5" in readme
    assert "- As expected: update > 0.01 (update 0." in readme
    assert any("Testing the plans" in line for line in lines)
    tested = f"Tested for devices of version 1 and later: TensorFlow {tf.__version__}"
    assert any(tested in line for line in lines)


def _seed_shape(made):
    (seed,) = (t for t in made.server.prepare.inputs if t.label == "aggregator/seed")
    return list(seed.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "shape"),
    [({"noise": "philox"}, [2]), ({"noise_multiplier": 0.0}, [4])],
)
def test_a_task_without_secure_noise_names_no_generator(corpora, tmp_path, changes, shape):
    config = tiny_task.config(corpora, **changes)
    made = making.make(config, tmp_path / "noise", small_tasks.KEY, progress=lambda line: None)
    assert sentences.NOISE_GENERATOR not in made.terms.parameters
    assert _seed_shape(made) == shape


@pytest.mark.slow
def test_a_task_with_secure_aggregation_sends_nothing_in_the_clear(corpora, tmp_path):
    config = tiny_task.config(
        corpora, secagg_bits=20, secure_aggregation="honest-but-curious", least_group=3
    )
    made = making.make(config, tmp_path / "secure", small_tasks.KEY, progress=lambda line: None)
    device, stated = made.devices[0], made.terms.secure_aggregation
    assert len(device.secure_sums) == len(device.graph.outputs)
    assert not made.server.zero.outputs
    asked = device.secure_aggregation
    assert asked == made.server.secure_aggregation
    assert (asked.least_devices, asked.most_devices) == (3, 65)
    assert (stated.threat_model, stated.least_group) == ("honest-but-curious", 3)
    assert "Reports are summed by secure aggregation" in (made.path / "README.md").read_text()


def test_nothing_is_overwritten(folder, corpora):
    with pytest.raises(ValueError, match="never overwritten"):
        making.make(tiny_task.config(corpora), folder.path, small_tasks.KEY, progress=print)


@pytest.mark.slow
def test_a_task_that_fails_its_tests_is_refused_with_the_reasons(corpora, tmp_path):
    config = tiny_task.config(corpora, client_learning_rate=1e-12, expect="loss < 1")
    with pytest.raises(predicates.TaskRefusedError) as caught:
        making.make(config, tmp_path / "new" / "toy", small_tasks.KEY, progress=lambda line: None)
    assert any("The update is zero" in reason for reason in caught.value.reasons)
    assert any("'loss < 1' is not met; measured: loss 3." in r for r in caught.value.reasons)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_decay_does_not_stop_the_test_of_a_short_task(corpora, tmp_path):
    config = tiny_task.config(corpora, num_rounds=3, proxy_rounds=4, server_decay="cosine")
    made = making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)
    assert made.path.exists()


def test_a_budget_must_pay_for_a_round(corpora, tmp_path):
    config = tiny_task.config(corpora, max_epsilon=0.1)
    with pytest.raises(ValueError, match="max_epsilon=0.1 does not pay for one round"):
        making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)


def test_an_interpreter_without_tensorflow_is_refused_before_plans_are_built(corpora, tmp_path):
    config = tiny_task.config(corpora, test_python=f"{sys.executable},/nowhere/python")
    with pytest.raises(ValueError, match="test_python '/nowhere/python' cannot be started"):
        making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)


def test_public_text_must_not_be_what_is_protected(corpora, tmp_path):
    config = tiny_task.config(corpora, proxy_data=str(corpora / "users.jsonl"))
    with pytest.raises(ValueError, match="proxy_data .* is the data that is protected"):
        making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)


@pytest.mark.pictures
def test_everything_is_reported_of_what_was_committed(folder, tmp_path):
    rounds = tiny_task.begun(folder, memory_store.MemoryStore())
    with pytest.raises(ValueError, match="has not released a round"):
        task_report.write(folder, rounds.store, tmp_path)
    for _ in range(2):
        tiny_task.run_round(rounds)
    output = tmp_path / "new" / "report"
    sessions = session_table.SessionTable()
    sessions.add("-v[]+^")
    found = task_report.write(folder, rounds.store, output, sessions=sessions)
    assert "| `-v[]+^` | 1 | 100.0 % |" in (output / task_report.SESSIONS).read_text()
    assert [row["round"] for row in found.rows] == [1, 2]
    with open(output / "private" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert float(rows[1]["privacy/epsilon"]) == found.rows[1]["privacy/epsilon"]
    assert rows[0]["participation/min_sep"] == ""
    assert float(rows[0]["client_work/train/loss"]) > 0
    # What was committed is what is exported.
    _, weights = export.read(output / "model.npz")
    values = plan_pb2.Values.FromString(rounds.commit.model).values
    for weight, value in zip(weights, values, strict=False):
        np.testing.assert_array_equal(weight.ravel(), np.frombuffer(value.content, np.float32))
    (predicted,) = trained_model.find(output).load().predict([tiny_task.TEXTS[0]])
    assert predicted.next_words
    assert set(found.held_out) >= {"top1_in_vocab", "loss"}
    assert "top-1 accuracy on held-out users" in found.summary
    statement = (output / "privacy_statement.md").read_text()
    assert "Each device enforces the declared participation" in statement
    assert found.statement.parameters["num_rounds_charged"] == 4
    assert "The statement charges 4" in found.summary
    assert (output / "curves.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
@pytest.mark.parametrize("is_secure", [False, True])
def test_order_statistics_are_those_of_the_devices_of_a_round(corpora, tmp_path, is_secure):
    secure = {"secagg_bits": 20, "secure_aggregation": "honest-but-curious", "least_group": 2}
    options = {"order_statistics": True} | (secure if is_secure else {})
    config = tiny_task.config(corpora, **options)
    made = making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)
    store = memory_store.MemoryStore()
    rounds = tiny_task.begun(made, store)
    run_round = tiny_task.run_secure_round if is_secure else tiny_task.run_round
    run_round(rounds)
    row = rounds.commit.metrics
    prefix = "client_work/train"
    assert not any(name.endswith("_histogram") for name in row)
    low, middle, high, width = (
        row[f"{prefix}/loss/{name}"] for name in ("p10", "median", "p90", "resolution")
    )
    # Devices have about equally many targets: their mean is between the extremes.
    assert 0 < low <= middle <= high
    assert low - width <= row[f"{prefix}/loss"] <= high + width
    # Each of the three devices has three sequences.
    sequences = f"{prefix}/num_sequences"
    assert row[sequences] == 9
    assert abs(row[f"{sequences}/median"] - 3) <= row[f"{sequences}/resolution"]
    assert row[f"{prefix}/seconds/median"] > 0
    found = task_report.write(made, store, tmp_path / "report", with_held_out=False)
    assert f"{prefix}/loss/median" in found.rows[0]
    assert any("p10, median and p90 over the devices of loss, top1" in text
               for text in found.statement.not_covered)  # fmt: skip
    watch = making.make_evaluation(
        made,
        made.config.changed(task="", min_sep=None, max_participations=None),
        tmp_path / "watch",
        small_tasks.KEY,
        progress=lambda line: None,
    )
    watched = tiny_task.begun(watch, store)
    run_round(watched, model=rounds.commit.model)
    assert watched.commit.metrics["client_work/eval/current_round_metrics/loss/median"] > 0


def _with_cache_on_a_host(made):
    """What `train` measures with a cache of the same text, of the model before training."""
    config, words = made.config, made.words
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    model = table.build(
        config.language.model,
        vocabulary_size=words.size,
        sequence_length=config.language.sequence_length,
        **config.language.model_sizes,
    )
    texts = {str(i): tiny_task.TEXTS[i : i + 3][::-1] for i in range(3)}  # The earliest first.
    of_users = sequences.SequenceCorpus(
        user_text.UserText.from_mapping("test", texts),
        words,
        sequences.SequenceSpec(config.language.sequence_length),
    )
    rows = [of_users.sequences(user) for user in texts]
    users = np.repeat(np.arange(3), [len(one) for one in rows])
    places = np.concatenate([np.arange(len(one)) for one in rows])
    cache = text_cache.EarlierText(dict(enumerate(rows)), users, places, special)
    found = held_out.predict_words(
        model,
        model.initial_weights(config.seed),
        special,
        np.concatenate(rows),
        mix=cache.mix,
    )
    has_text = places[found.rows] > 0
    return {
        "top1_in_vocab": found.is_best.mean(),
        "top1_in_vocab_with_cache": found.is_best_mixed.mean(),
        "earlier_text_num_in_vocab": has_text.sum(),
        "earlier_text_top1_in_vocab": found.is_best[has_text].mean(),
        "earlier_text_top1_in_vocab_with_cache": found.is_best_mixed[has_text].mean(),
    }


@pytest.mark.slow
def test_an_evaluation_takes_the_model_that_is_trained(folder, corpora, tmp_path):
    config = folder.config.changed(
        task="",
        clients_per_round=3,
        min_sep=None,
        max_participations=None,
        expect=None,
    )
    made = making.make_evaluation(
        folder, config, tmp_path / "watch", small_tasks.KEY, progress=lambda line: None
    )
    assert (made.name, made.terms.kind, made.terms.model_of) == ("watch", "evaluation", "toy")
    assert made.devices[0].kind == plan_pb2.EVALUATION
    readme = (made.path / "README.md").read_text()
    assert "that device's own figure, also with secure sums" in readme
    store = memory_store.MemoryStore()
    trained, watched = tiny_task.begun(folder, store), tiny_task.begun(made, store)
    measured = []
    for _ in range(2):
        tiny_task.run_round(watched, model=trained.commit.model)
        measured.append(
            {name.rpartition("/")[2]: value for name, value in watched.commit.metrics.items()}
        )
        tiny_task.run_round(trained)
    assert measured[0]["loss"] != measured[1]["loss"]
    first, expected = measured[0], _with_cache_on_a_host(made)
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert 0 < first["earlier_text_num_in_vocab"] < first["num_in_vocab"]
    assert first["top1_in_vocab_with_cache"] > first["top1_in_vocab"]
    assert made.devices[0].least_runtime_version == 1  # Devices of the first version run it.
    bounds = {
        made.server.update[bound.tensors[0]].label.partition("/")[2]: bound.entries.largest
        for bound in made.server.report_bounds
    }
    assert bounds["0/earlier_text/num_top1_with_cache"] == bounds["0/counts/num_top1"] > 0
    found = task_report.write(made, store, tmp_path / "report", with_held_out=False)
    assert found.statement is None
    assert "2 rounds evaluated toy" in found.summary
    assert "With a cache of each device's own earlier text: top-1 accuracy" in found.summary
    assert "on the 66.7% of words that have such text" in found.summary
    assert not (tmp_path / "report" / "model.npz").exists()
    # Its metrics have no ρ: the task that trains is not composed with it.
    assert not task_report.write(folder, store, tmp_path / "other").statement.headline_caveats
    with pytest.raises(ValueError, match="is the task that is evaluated"):
        making.make_evaluation(
            folder, folder.config, tmp_path / "toy", small_tasks.KEY, progress=print
        )
    earlier = dataclasses.replace(folder.words, word_rule=tokenizer.NO_MARKS)
    of = dataclasses.replace(folder, words=earlier)
    with pytest.raises(ValueError, match="vocabulary is not that of the task 'toy': give the voc"):
        making.make_evaluation(of, config, tmp_path / "old", small_tasks.KEY, progress=print)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive_clipping", [False, True])
def test_a_task_and_its_evaluation_show_the_server_sums_of_groups(
    corpora, tmp_path, adaptive_clipping
):
    config = tiny_task.config(
        corpora,
        secagg_bits=20,
        secure_aggregation="honest-but-curious",
        least_group=3,
        adaptive_clipping=adaptive_clipping,
    )
    made = making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)
    options = made.config.changed(
        task="", clients_per_round=4, min_sep=None, max_participations=None
    )
    watch = making.make_evaluation(
        made, options, tmp_path / "watch", small_tasks.KEY, progress=lambda line: None
    )
    assert watch.terms.secure_aggregation == made.terms.secure_aggregation
    assert not watch.server.zero.outputs
    store = memory_store.MemoryStore()
    trained, watched = tiny_task.begun(made, store), tiny_task.begun(watch, store)
    for _ in range(2):
        tiny_task.run_secure_round(watched, model=trained.commit.model)
        tiny_task.run_secure_round(trained)
    row = watched.commit.metrics
    assert row["client_work/eval/current_round_metrics/num_sequences"] == 9
    assert row["client_work/eval/current_round_metrics/loss"] > 1
    assert row["client_work/eval/current_round_metrics/earlier_text_num_in_vocab"] == 18
    found = task_report.write(made, store, tmp_path / "report", with_held_out=False)
    assert "summed securely, against a server that is honest but curious, 3" in found.summary
    who_sees = summation_sentences.who_sees(made.terms.secure_aggregation)
    assert found.statement.setting.endswith(who_sees)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive_clipping", [False, True])
def test_secure_sums_hold_all_devices_that_are_chosen(corpora, tmp_path, adaptive_clipping):
    config = tiny_task.config(
        corpora, secagg_bits=20, adaptive_clipping=adaptive_clipping, num_rounds=4
    )
    made = making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)
    assert made.server.secure_sums
    rounds = tiny_task.begun(made, memory_store.MemoryStore())
    tiny_task.run_round(rounds)
    assert rounds.commit.rounds_done == 1
    largest = max(rule.modulus for rule in made.server.secure_sums)
    assert largest >= 2 * config.round_settings.wanted


@pytest.mark.slow
def test_a_fleet_trains_it_over_the_wire(corpora, tmp_path):
    rounds = {"clients_per_round": 8, "num_devices": 40, "min_sep": 2, "num_rounds": 3}
    seconds = {"selection_timeout": 5.0, "reporting_timeout": 10.0, "exchange_timeout": 5.0}
    config = tiny_task.config(corpora, **rounds, **seconds)
    making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)
    task = planned_task.load(tmp_path / "toy", small_tasks.KEYS)
    store = memory_store.MemoryStore()
    task.add_to(store)
    observer = example_service.Notes()
    options = {
        "population": population.Population(
            "tests",
            (task.served.task,),
            heartbeat_seconds=0.5,
            silence_seconds=30.0,
            lease_seconds=60.0,
        ),
        "tasks": {"toy": task.served},
        "store": store,
        "endpoint": example_service.endpoint(tmp_path),
        "pace": lambda now, randomness: (0.3 + 0.3 * randomness.random(), 2.0),
        "observer": observer,
        "randomness": random.Random(1),
    }
    with server_thread.running(lambda: server.Server.of(**options)) as address:
        devices = fleet.Fleet(
            fleet.ConnectionSettings(
                address,
                (tmp_path / "server.pem").read_bytes(),
                (signing_keys.raw(small_tasks.KEYS[0]),),
            ),
            "tests",
            str(corpora / "users.jsonl"),
            num_devices=40,
            rates=behaviour.Rates(drop_outs=0.05, stragglers=0.0),
            start_within_s=0.5,
            usual_wait_s=1.0,
        )
        ending, stop = fleet.Ending(rounds=3, seconds=60.0), threading.Event()
        fleet.run(devices, ending, stop=stop, on_session_end=lambda end: None)
    commit = store.last_commit("tests", "toy")
    seen = task.observed(commit)
    assert commit.rounds_done == 3 == seen.num_rounds
    assert (seen.unknown_rounds, seen.min_sep in (None, 2)) == (0, True)
    assert commit.metrics["devices/reports"] >= 7
    assert task.refusal(commit) == "all 3 declared rounds are done"
    found = task_report.write(task.folder, store, tmp_path / "report")
    assert found.statement.epsilon == task.privacy(commit).epsilon
    assert "The task is over" in found.summary


@pytest.mark.slow
def test_an_averaged_model_is_what_is_released(corpora, tmp_path):
    config = tiny_task.config(corpora, iterate_averaging=0.5, server_decay="cosine")
    made = making.make(config, tmp_path / "toy", small_tasks.KEY, progress=lambda line: None)
    rounds = tiny_task.begun(made, memory_store.MemoryStore())
    for _ in range(2):
        tiny_task.run_round(rounds)
    task_report.write(made, rounds.store, tmp_path / "report", with_held_out=False)
    _, weights = export.read(tmp_path / "report" / "model.npz")
    last = plan_pb2.Values.FromString(rounds.commit.model).values[0]
    assert not np.array_equal(weights[0].ravel(), np.frombuffer(last.content, np.float32))


def test_options_of_the_folder_can_be_read_again(folder):
    assert task_config.TaskConfig.of(**folder.config.to_dict()) == folder.config


def test_proxies_without_spaces_are_warned_of(tmp_path):
    tiny_task.write_corpora(tmp_path)
    users = [{"user_id": f"p{i}", "examples": ["我们在学习"]} for i in range(4)]
    (tmp_path / "public.jsonl").write_text("\n".join(map(json.dumps, users)))
    lines = []
    language_task.read_public(tiny_task.config(tmp_path).definition, 200, lines.append)
    assert any("sees whole sentences as words" in line for line in lines)
