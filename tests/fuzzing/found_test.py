"""What changed inputs have found: each in a few lines, and how it is refused now."""

import base64
import contextlib
import dataclasses
import functools
import json
import math
import sqlite3

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from tests.fuzzing import files
from tests.runtime.device import wire_server
from tests.runtime.plans import plain_plans, secure_plans
from tests.training import toy_model
from tff_dpftrl import validation
from tff_dpftrl.accounting import statement
from tff_dpftrl.data import sqlite, vocabulary_file
from tff_dpftrl.mechanisms import serialization
from tff_dpftrl.models import export
from tff_dpftrl.participation import ledger, observed, recount
from tff_dpftrl.runs import checkpoint, manifest, metrics_log
from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.device import example_store, participation_timer, session, wire_session
from tff_dpftrl.runtime.plans import plan_pb2, secure_report, signing, tensor_values, verification
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.store import interface, sql
from tff_dpftrl.runtime.tasks import task_state
from tff_dpftrl.sweeps import folder as sweep_folder
from tff_dpftrl.training import config, options, report, warm_start

_DEEP = "[" * 100_000 + "]" * 100_000


def _refuses(error, match, read, *arguments):
    with pytest.raises(error, match=match) as caught:
        read(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 4000


def _execute(path, *statements):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for name, kind in connection.execute(
            "SELECT name, type FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP {kind} {name}")
        for text in statements:
            connection.execute(text)


# Text.


def _changed_statement(folder, **changes):
    files._write_statement(folder, 1)
    values = json.loads((folder / "statement.json").read_text())
    return json.dumps(values | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"declared": {"num_rounds": 3}}, "wrong declared"),
        ({"declared": 0.5}, "wrong declared"),
        ({"accounted": []}, "accounted is of another type"),
        ({"observed": {"num_rounds": "x"}}, "num_rounds must be"),
        ({"covered": 1.5}, "covered is of another type"),
        ({"headline_caveats": [1]}, "headline_caveats is of another type"),
        ({"parameters": []}, "parameters is of another type"),
        ({"mechanism": None}, "mechanism is of another type"),
        ({"epsilon": 10**400}, "epsilon is of another type"),
        ({"epsilon": math.nan}, "epsilon is of another type"),
        ({"parameters": {"clip_norm": math.inf}}, "parameters is of another type"),
    ],
)
def test_a_statement_has_the_types_that_its_readers_rely_on(tmp_path, changes, match):
    text = _changed_statement(tmp_path, **changes)
    _refuses(ValueError, match, statement.PrivacyStatement.from_json, text)


def test_the_format_of_a_file_may_have_lines(tmp_path):
    files._write_vocabulary(tmp_path, 0)
    files._write_sweep(tmp_path, 0)
    for path in (tmp_path / "vocabulary.json", tmp_path / "sweep.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "1\n2"}))
    _refuses(ValueError, "format '1", vocabulary_file.read, tmp_path / "vocabulary.json")
    _refuses(ValueError, "format '1", sweep_folder.read, tmp_path)


def test_observed_participation_is_of_numbers():
    _refuses(ValueError, "max_participations", observed.Participation, 1, None, -1)
    _refuses(ValueError, "min_sep", observed.Participation, 1, "2", 1)


def test_a_number_of_a_strategy_may_be_too_large_for_a_float():
    rows = [[10**400], [0.5, 1.0]]
    _refuses(
        ValueError, "wrong", serialization.strategy_from_dict, {"mechanism": "dense", "rows": rows}
    )
    _refuses(ValueError, "numbers", validation.numbers, "x", [10**400])


def test_a_message_quotes_a_value_in_part():
    _refuses(ValueError, "…", validation.integer, "x", "y" * 100_000)


def test_options_in_toml_may_be_too_deep_or_too_large(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(f"a = {_DEEP}")
    _refuses(ValueError, "nested too deeply", options.read_toml, path)
    path.write_text("clip_norm = 1" + "0" * 400)
    values = options.read_toml(path)
    _refuses(ValueError, "finite", options.config_from_mapping, values, "a", config.TrainingConfig)


def test_metrics_may_have_a_cell_without_end(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,loss\n1," + "x" * 200_000 + "\n")
    _refuses(ValueError, "not the table of a run", metrics_log.read_rows, tmp_path, 1)


@pytest.mark.parametrize("name", ["noise_version", "identities", "derived"])
def test_a_manifest_may_lack_a_part(tmp_path, name):
    files._write_manifest(tmp_path, 0)
    for path in (tmp_path / "config.json", tmp_path / "private" / "manifest.json"):
        content = json.loads(path.read_text())
        content.pop(name, None)
        path.write_text(json.dumps(content))
    _refuses(ValueError, "of version None|a part of it", manifest.read, tmp_path)


def test_what_was_changed_is_named_in_one_line(tmp_path):
    files._write_manifest(tmp_path, 0)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["derived"]["a name\u2028of two\rlines"] = 1
    path.write_text(json.dumps(content))
    _refuses(ValueError, "no longer what the run began with", manifest.read, tmp_path)


def test_a_manifest_may_lack_an_identity():
    made = manifest.Manifest({}, {}, {}, {})
    with pytest.raises(ValueError, match="no longer those"):
        made.check_identities({"training users": []}, remedy="restore them")


@pytest.mark.parametrize("content", ["[]", "[1]", '{"task": 5}', '{"task": ["a"]}', _DEEP])
def test_what_is_known_of_released_rounds_may_be_damaged(tmp_path, content):
    here = server_folder.of(tmp_path)
    here.rounds.write_text(content)
    if content != "[]":
        _refuses(ValueError, "is damaged", here.check_rounds, "population", "task", "plan", 1)
    _refuses(ValueError, "is damaged", here.keep_rounds, {})


def test_a_pretraining_may_be_of_no_text(tmp_path):
    (tmp_path / warm_start.RECORD).write_text('{"pretraining": {"data": {}}}')
    assert warm_start.pretrained_on(tmp_path) is None


def test_the_head_of_a_state_may_have_numbers_in_the_place_of_terms():
    head = json.dumps({"terms": 1.5, "observed": {}}).encode()
    _refuses(
        task_state.StateError, "other terms", task_state.observed,
        b"tff_dpftrl task state 1\n" + head + b"\n", "f" * 64,
    )  # fmt: skip
    head = json.dumps({"terms": "f" * 64, "observed": {"num_rounds": "x"}}).encode()
    _refuses(
        task_state.StateError, "num_rounds", task_state.observed,
        b"tff_dpftrl task state 1\n" + head + b"\n", "f" * 64,
    )  # fmt: skip


# Arrays.


def test_a_checkpoint_may_be_empty_or_say_that_it_is_huge(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    fingerprint = folder.save(1, checkpoint.Snapshot.of({"x": np.zeros(3)}), {})
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"'shape': (3,)", b"'shape': (9,)"))
    _refuses(checkpoint.CheckpointError, "another size|damaged", folder.load, 1, fingerprint)
    path.write_bytes(b"")
    _refuses(checkpoint.CheckpointError, "no archive", folder.load, 1, fingerprint)


def test_weights_of_a_model_may_be_no_numbers(tmp_path):
    weights = [np.full(weight.shape, "x") for weight in toy_model.weights()]
    export.write(tmp_path / "model.npz", toy_model.MODEL, weights)
    _refuses(ValueError, "no floating-point", export.read, tmp_path / "model.npz")


# SQLite keeps any type in any column.


@pytest.mark.parametrize("value", ["'text'", "x'00'", "NULL", "5"])
def test_an_example_in_a_corpus_may_be_no_bytes(tmp_path, value):
    files._write_sqlite(tmp_path, 0)
    _execute(tmp_path / "c.sqlite", f"UPDATE examples SET serialized_example_proto = {value}")
    corpus = sqlite.read(tmp_path / "c.sqlite")
    _refuses(ValueError, "not a tf.train.Example|values of", corpus.examples, "client 0")


@pytest.mark.parametrize("value", ["x'00'", "NULL"])
def test_a_client_of_a_corpus_may_have_no_text_for_a_name(tmp_path, value):
    files._write_sqlite(tmp_path, 0)
    change = f"UPDATE client_metadata SET client_id = {value} WHERE client_id = 'client 0'"
    _execute(tmp_path / "c.sqlite", change)
    _refuses(ValueError, "is no text", sqlite.read, tmp_path / "c.sqlite")


@pytest.mark.parametrize(
    "change",
    ["last_round = 'x'", "last_time = x'00'", "times = 'y'", "last_round = -1", "times = 0"],
)
def test_a_timer_may_hold_other_types(tmp_path, change):
    files.write_timer(tmp_path, 1)
    _execute(tmp_path / "timer", f"UPDATE participations SET {change}")
    timer = participation_timer.ParticipationTimer.open(tmp_path / "timer", clock=lambda: 2e9)
    with contextlib.closing(timer):
        asked = ("tests", "task 0", 9, files._RULE)
        _refuses(ValueError, "is damaged", timer.check, *asked)
        _refuses(ValueError, "is damaged", timer.record, *asked, files._BUCKETS)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE state SET bytes = 'x'",
        "UPDATE state SET rewritten = x'00'",
        "DELETE FROM state",
        "INSERT INTO state VALUES (0, 0, 0)",
    ],
)
def test_an_example_store_may_hold_other_types(tmp_path, change):
    files.write_examples(tmp_path, 0)
    _execute(tmp_path / "examples", change)
    _refuses(ValueError, "is damaged", _open, tmp_path / "examples")


def test_the_time_of_an_example_may_be_none(tmp_path):
    files.write_examples(tmp_path, 0)
    _execute(tmp_path / "examples", "UPDATE examples SET recorded = 'x'")
    _refuses(ValueError, "is damaged", _open, tmp_path / "examples")


def _open(path):
    example_store.SqliteExampleStore.open(path, clock=lambda: files._NOW).close()


def test_an_example_may_be_no_bytes(tmp_path):
    files.write_examples(tmp_path, 0)
    _execute(tmp_path / "examples", "UPDATE examples SET example = 'text'")
    store = example_store.SqliteExampleStore.open(tmp_path / "examples", clock=lambda: files._NOW)
    with contextlib.closing(store), pytest.raises(ValueError, match="an example is no bytes"):
        store.select("text", max_examples=1)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE commits SET model = 9000000000",  # `bytes` of it would be as many zeros.
        "UPDATE commits SET state = 'text'",
        "UPDATE commits SET metrics = '[1]'",
        "UPDATE commits SET metrics = 'no JSON'",
        "UPDATE commits SET rounds_done = 'x'",
    ],
)
def test_a_commit_in_a_store_may_hold_other_types(tmp_path, change):
    files._write_store(tmp_path, 1)
    with contextlib.closing(sql.SqlStore(tmp_path)) as store:
        _execute(tmp_path / "store.sqlite", change)
        _refuses(interface.StoreError, "is damaged", store.last_commit, "tests", "task")


def test_an_epoch_may_be_the_largest_of_all(tmp_path):
    files._write_store(tmp_path, 1)
    with contextlib.closing(sql.SqlStore(tmp_path)) as store:
        lease = dataclasses.replace(store.lease("tests"), epoch=2**63 - 1)
        with store._writing() as connection:
            sql._write_lease(connection, lease)
        take = functools.partial(store.acquire, now=1e9, duration=60.0)
        _refuses(interface.StoreError, "too large", take, "tests", "me")


def test_a_lease_and_a_round_may_hold_other_types(tmp_path):
    files._write_store(tmp_path, 1)
    with contextlib.closing(sql.SqlStore(tmp_path)) as store:
        _execute(
            tmp_path / "store.sqlite",
            "UPDATE leases SET epoch = x'00'",
            "UPDATE rounds SET metrics = ''",
        )
        _refuses(interface.StoreError, "is damaged", store.lease, "tests")
        _refuses(interface.StoreError, "is damaged", store.history, "tests", "task")
    assert len(interface.backup_advice({b"\0" * 100_000: 3, "task": 2})) < 1000


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("DROP TABLE clients", OSError),
        ("DROP TABLE declared", OSError),
        ("DELETE FROM declared", ValueError),
        ("UPDATE declared SET min_sep = 'x'", ValueError),
        ("UPDATE clients SET participations = 'x'", ValueError),
        ("UPDATE clients SET last_round = x'00'", ValueError),
        ("UPDATE commits SET smallest_stride = -1", ValueError),
    ],
)
def test_a_ledger_may_be_damaged(tmp_path, change, error):
    files._write_rounds(tmp_path, 2)
    path = tmp_path / "ledger.sqlite"
    _execute(path, change)
    _refuses(error, "The ledger", ledger.Ledger.open, path, files.SCHEMA)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("DROP TABLE clients", OSError),
        ("DELETE FROM declared", ValueError),
        ("DELETE FROM clients", ValueError),
        # So many would have room made for them.
        ("UPDATE clients SET client = 4000000000000 WHERE client = 1", ValueError),
        ("UPDATE asked SET client = -1 WHERE client = 1", ValueError),
    ],
)
def test_the_record_of_a_ledger_may_be_damaged(tmp_path, change, error):
    files._write_rounds(tmp_path, 2)
    path = tmp_path / "ledger.sqlite"
    _execute(path, change)
    _refuses(error, "The ledger", recount.recount, path)


def test_the_damage_of_a_ledger_is_told_in_one_line(tmp_path):
    files._write_rounds(tmp_path, 1)
    path = tmp_path / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    content[36:40] = (1000).to_bytes(4, "big")  # Free pages, of which there is none.
    path.write_bytes(content)
    _refuses(ValueError, "is damaged", recount.recount, path)


def test_tables_of_a_ledger_may_be_written_over(tmp_path):
    files._write_rounds(tmp_path, 1)
    path = tmp_path / "ledger.sqlite"
    head, dropped = path.read_bytes().split(b"CREATE TABLE dropped", 1)
    # A quote that nothing ends: SQLite tells of all that follows, with its lines.
    path.write_bytes(head + b"CREATE TABLE dropped" + dropped.replace(b"PRIM", b'"RIM', 1))
    _refuses(OSError, "malformed", ledger.Ledger.open, path, files.SCHEMA)


def test_names_of_tables_may_be_no_text(tmp_path):
    files._write_rounds(tmp_path, 1)
    files.write_examples(tmp_path, 0)
    for path, name, error, read in (
        (tmp_path / "ledger.sqlite", b"dropped", OSError, recount.recount),
        (tmp_path / "examples", b"examples", ValueError, _open),
    ):
        head, rest = path.read_bytes().split(b"CREATE TABLE " + name, 1)
        path.write_bytes(head.replace(name, b"\xff" + name[1:]) + b"\xffREATE TABLE " + name + rest)
        _refuses(error, "cannot be used|is damaged", read, path)


@pytest.mark.parametrize("name", ["2a8648ce3d030107", "a003020102"])
def test_a_certificate_may_be_of_an_unknown_curve_or_version(tmp_path, name):
    files._write_keys(tmp_path, 0)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    content, name = certificate.public_bytes(Encoding.DER), bytes.fromhex(name)
    changed = base64.encodebytes(content.replace(name, name[:-1] + b"\x22", 1))
    (tmp_path / "server.pem").write_bytes(
        b"-----BEGIN CERTIFICATE-----\n" + changed + b"-----END CERTIFICATE-----\n"
    )
    pair = tmp_path / "server.pem", tmp_path / "server.key"
    _refuses(ValueError, "no certificate", tls.load, *pair)


# Plans and messages.


@pytest.mark.parametrize("dtype", ["", "int3", "object", "float32"])
def test_a_secure_sum_is_of_integers_of_a_known_type(dtype):
    tensors = [plan_pb2.Tensor(label="x", dtype=dtype, shape=[2]), secure_plans.TENSORS[1]]
    plan = secure_plans.device(tensors=tensors)
    _refuses(secure_report.PlanNotSecureError, "integers", secure_report.parameters_of, plan)


def test_a_million_sizes_are_not_multiplied():
    many = [2**62] * 1_000_000
    assert tensor_values.num_entries(many) >= 2**64
    assert tensor_values.num_entries([3, 4]) == 12 and tensor_values.num_entries([]) == 1
    tensors = [plan_pb2.Tensor(label="x", dtype="int32", shape=many), secure_plans.TENSORS[1]]
    plan = secure_plans.device(tensors=tensors)
    _refuses(secure_report.PlanNotSecureError, "dimensions", secure_report.parameters_of, plan)
    plan = plain_plans.plan()
    plan.graph.outputs[0].shape[:] = many
    _refuses(signing.PlanRefusedError, "sizes", verification.check_device_plan, plan)


def test_names_of_a_plan_are_quoted_in_part():
    plan = plain_plans.plan()
    plan.ops.extend(f"op {i}" for i in range(10_000))
    _refuses(signing.PlanRefusedError, "more", verification.check_device_plan, plan)


class _Stream:
    def __init__(self, *messages):
        self._messages = list(messages)

    def receive(self, keep_going, *, seconds, wanted):
        return self._messages.pop(0)


def test_a_round_may_be_beyond_all_rounds():
    huge = wire_server.challenge_of(b"c" * 32, task="plain", round_index=2**64 - 1)
    steps = wire_session.WireSession(
        _Connection(_Stream(huge)), "tests", attester=None, plans=None, examples=None,
        clock=None, check_rest=None,
    )  # fmt: skip
    _refuses(session.StepFailed, "none is above", steps.check_in, lambda: None)


class _Connection:
    patience = wire_session.server_connection.Patience()

    def __init__(self, stream):
        self.open_stream = lambda address, population: stream

    def addresses(self, generator):
        return ["anywhere"]


@pytest.mark.parametrize("content", ["[", "[1]", '{"round": 1}', '{"round": 1, "head_words": []}'])
def test_figures_of_a_run_that_were_changed_are_named(content, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "held_out.json").write_text(content)
    (tmp_path / "private" / "baselines.json").write_text(content.replace("1", '"x"'))
    _refuses(ValueError, "held_out.json is damaged", report._read_held_out, tmp_path, 1)
    _refuses(ValueError, "baselines.json is damaged", report._read_baselines, tmp_path)


@pytest.mark.parametrize(
    "head_words",
    [{"top": 2, "histograms": {"10": [0.5]}}, {"top": 0, "histograms": {"\ud800": [0.5]}}],
)
def test_histograms_of_a_run_that_were_changed_are_named(head_words, tmp_path):
    by_user = {"accuracy_by_user": {"top1_in_vocab": {"users": 0}}}
    measured = {"round": 1, "head_words": head_words, **by_user}
    (tmp_path / "held_out.json").write_text(json.dumps(measured))
    _refuses(ValueError, "held_out.json is damaged", report._read_held_out, tmp_path, 1)
    head_words.update(top=1, histograms={"10": [0.5, 0.5]})
    (tmp_path / "held_out.json").write_text(json.dumps(measured))
    assert report._read_held_out(tmp_path, 1) == measured
