"""Kinds of files that the package reads, as its own writers made them, then changed."""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import os
import pathlib
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.fuzzing import judging, mutations
from tests.models import checkpoint_folders
from tests.training import toy_model
from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee, statement, statement_text
from tff_dpftrl.data import jsonl, sources, sqlite, tables, tokenizer, vocabulary, vocabulary_file
from tff_dpftrl.finetuning import config as finetuning_config
from tff_dpftrl.mechanisms import (
    banded,
    banded_optimize,
    banded_toeplitz,
    blt,
    certificate,
    dense,
    identity,
    inverse_banded,
    restarts,
    serialization,
    tree,
)
from tff_dpftrl.models import export, hugging_face
from tff_dpftrl.participation import ledger, observed, recount
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import checkpoint, cohort_seed, committed_rounds, manifest, metrics_log
from tff_dpftrl.runtime import participation_histograms, signing_keys, tls
from tff_dpftrl.runtime.device import example_store, participation_timer, text_examples
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.status import session_table
from tff_dpftrl.runtime.store import interface, sql
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.sweeps import folder as sweep_folder
from tff_dpftrl.training import config as training_config
from tff_dpftrl.training import options, trained_model, warm_start

PLAN_KEY = signing_keys.ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SCHEMA = schema_lib.MinSep(num_rounds=8, min_sep=2, max_participations=3)
_NUM_VALID = 3
_FAULTS = 0.08
_CONFIGS = options._BUILT_IN
_NOW = 1_700_000_000.0

Write = Callable[[pathlib.Path, int], None]
Read = Callable[[pathlib.Path], Any]


def _fault(path: pathlib.Path, drawn: random.Random) -> None:
    """Puts something else in the place of a file."""
    content = path.read_bytes()
    path.unlink()
    match drawn.randrange(7):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path.parent / "nowhere")
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to(path.parent)
        case 4:
            path.write_bytes(b"")
        case 5:
            path.write_bytes(content)
            path.chmod(0o666)
        case _:
            pass


def kind(
    name: str,
    write: Write,
    changes: Mapping[str, mutations.Mutation],
    read: Read,
    *,
    writes: bool = False,
    refusals: tuple[type[Exception], ...] = (validation.UsageError, OSError),
    faults: float = _FAULTS,
) -> judging.Kind:
    """A kind of folder, of whose files one is changed at a time.

    Args:
      name: Its name.
      write: Makes a valid folder, given an empty one and a number to differ by.
      changes: How to change the files that are changed, by their names, which may have a
        wildcard.
      read: Reads the folder.
      writes: Whether the reader may change files, and make new ones.
      refusals: What it is documented to raise.
      faults: How often the file is missing, empty, a link or a folder.

    Returns:
      The kind.
    """

    def prepare(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
        valid = [folder / f"valid {i}" for i in range(_NUM_VALID)]
        for i, path in enumerate(valid):
            path.mkdir()
            write(path, i)
        used = folder / "used"
        used.mkdir()

        def make(drawn: random.Random) -> judging.Case:
            judging.empty(used)
            chosen, other = drawn.choice(valid), drawn.choice(valid)
            shutil.copytree(chosen, used, dirs_exist_ok=True)
            pattern, mutate = drawn.choice(sorted(changes.items()))
            path = min(used.rglob(pattern))
            if drawn.random() < faults:
                _fault(path, drawn)
            else:
                others = min(other.rglob(pattern)).read_bytes()
                path.write_bytes(mutate(path.read_bytes(), others, drawn))
            kept = () if writes else tuple(file.name for file in used.rglob("*"))
            return judging.Case(lambda: read(used), used, kept, writes)

        return make

    return judging.Kind(name, prepare, refusals)


# Mechanisms and what is said of privacy.


def _strategies() -> list:
    rng = np.random.default_rng(0)
    return [
        blt.Blt((0.9, 0.5), (0.3, 0.2)),
        restarts.Restarted(tree.Tree(8), (0, 4)),
        banded.Banded(np.where(np.arange(8)[:, None] >= np.arange(3), rng.uniform(size=(8, 3)), 0)),
        banded_toeplitz.BandedToeplitz((1.0, 0.5, 0.25)),
        inverse_banded.InverseBanded((1.0, -0.5)),
        dense.Dense(np.tril(np.ones((8, 8)))),
        tree.FullTree(),
        identity.Identity(),
    ]


def write_strategy(folder: pathlib.Path, number: int) -> None:
    strategy = _strategies()[number]
    with contextlib.suppress(ValueError):
        serialization.save(folder / "s.json", strategy, certificate.certify(strategy, SCHEMA))


def _read_strategy(folder: pathlib.Path) -> None:
    found = serialization.load(folder / "s.json")
    serialization.load_certificate(folder / "s.json")
    found.sensitivity(SCHEMA)
    found.prefix_noise_variance(SCHEMA.num_rounds)


def _other_strategies(folder: pathlib.Path, number: int) -> None:
    strategy = _strategies()[3 + number]
    serialization.save(folder / "s.json", strategy)


def _write_statement(folder: pathlib.Path, number: int) -> None:
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(8), noise_multiplier=float(number), schema=SCHEMA, delta=1e-6
    )
    seen = observed.Participation(8, 2, 3) if number else None
    made = statement.dp_ftrl_statement(claim, unit_of_privacy="device", observed=seen)
    (folder / "statement.json").write_text(statement_text.to_json(made))


def _read_statement(folder: pathlib.Path) -> None:
    found = statement.PrivacyStatement.from_json(
        (folder / "statement.json").read_text("utf-8", "surrogateescape")
    )
    statement_text.markdown(found)
    statement_text.to_json(found)


def _write_bandmf(folder: pathlib.Path, number: int) -> None:
    _optimize(folder, number)


def _optimize(folder: pathlib.Path, number: int = 0) -> None:
    banded_optimize.optimize_banded(
        SCHEMA, 2, max_iterations=2 + number, checkpoint=folder / "b.npz", checkpoint_every=1
    )


# Text and options.


def _write_corpus(folder: pathlib.Path, number: int) -> None:
    rows = [
        {"user_id": f"user {i}", "examples": [f"some words {i}", "ß and more"] * (1 + number)}
        for i in range(3)
    ]
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _write_packed(folder: pathlib.Path, number: int) -> None:
    _write_corpus(folder, number)
    content = gzip.compress((folder / "c.jsonl").read_bytes(), mtime=0)
    (folder / "c.jsonl.gz").write_bytes(content)
    (folder / "c.jsonl").unlink()


def _read_corpus(path: pathlib.Path) -> None:
    corpus = jsonl.read(path)
    vocabulary.most_frequent(corpus, 5, source="tests")


def _write_table(path: pathlib.Path, number: int) -> None:
    """Writes a table in the format of the file's name, with text, numbers or lists as ids."""
    ids = (["ann", "bob", "çem"], [7, 8, 9], [["ann", "bob"], ["bob"], ["çem"]])[number]
    users, texts = ids * 2, [f'some "words" {i}' for i in range(6)]
    if path.suffix == ".jsonl":
        rows = [{"user": u, "text": t} for u, t in zip(users, texts, strict=True)]
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("user", "text"), *zip(users, texts, strict=True)])
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table({"user": users, "text": texts}), path, row_group_size=2)
    else:
        made = pa.table({"user": users, "text": texts})
        with (pa.ipc.new_stream if number else pa.ipc.new_file)(path, made.schema) as writer:
            writer.write_table(made)


def _read_table(path: pathlib.Path) -> None:
    """Reads a table with options that depend on its size, so that a seed repeats them."""
    number = path.stat().st_size
    table = tables.TableOptions(
        user_column=(None, "user")[number % 2],
        encoding=(None, None, "utf-16", "latin-1")[number % 4],
        max_bad_rows=(0.01, 0.9)[number // 4 % 2],
    )
    owned = (None, 2)[number % 5 == 4]
    spec = str(path if number % 3 else path.parent)
    sources.load_user_text(spec, table=table, notice=judging.one_line, rows_per_owner=owned)


def _table_kind(name: str, mutate: mutations.Mutation) -> judging.Kind:
    return kind(
        f"table {name}",
        lambda folder, number: _write_table(folder / name, number),
        {name: mutate},
        lambda folder: _read_table(folder / name),
    )


def _write_sqlite(folder: pathlib.Path, number: int) -> None:
    with contextlib.closing(sqlite3.connect(folder / "c.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER);"
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        for client in map("client {}".format, range(2 + number)):
            connection.execute("INSERT INTO client_metadata VALUES (?, 'train', 1)", [client])
            example = text_examples.encode_text(f"words of {client}")
            connection.execute("INSERT INTO examples VALUES ('train', ?, ?)", (client, example))
        connection.commit()


def _read_sqlite(folder: pathlib.Path) -> None:
    corpus = sqlite.read(folder / "c.sqlite", split_name="train")
    for user in corpus.user_ids:
        corpus.examples(user)


def _write_vocabulary(folder: pathlib.Path, number: int) -> None:
    words = vocabulary.Vocabulary(("a", "b", "ß")[: 1 + number], "tests")
    vocabulary_file.write(folder / "vocabulary.json", words, tokenizer.Tokenizer())
    (folder / "words.txt").write_text("one 1\ntwo 2\nthree\n" * (1 + number))


def _read_vocabulary(folder: pathlib.Path) -> None:
    words, rule = vocabulary_file.read(folder / "vocabulary.json")
    words.ids(rule.words("a b and more"))


_CONFIG_FILES = {
    "quickstart.toml": training_config.TrainingConfig,
    "next_word.toml": task_config.TaskConfig,
    "finetune.toml": finetuning_config.FinetuningConfig,
}
_FINETUNE = """[data]
data = "docs"
initial_weights = "results/pretrained"
num_steps = 10
compute_budget = 64
[privacy]
target_epsilon = 4.0
clip_norm = 1.0
learning_rate = 0.1
"""


def _write_configs(folder: pathlib.Path, number: int) -> None:
    del number
    for name in ("quickstart.toml", "next_word.toml"):
        shutil.copy(_CONFIGS / name, folder / name)
    (folder / "finetune.toml").write_text(_FINETUNE)


def _read_configs(folder: pathlib.Path) -> None:
    for name, kind_ in _CONFIG_FILES.items():
        path = folder / name
        options.config_from_mapping(options.read_toml(path), str(path), kind_)


# Runs.

_COLUMNS = (metrics_log.Column("round", "its number"), metrics_log.Column("loss", "the loss"))


def _write_metrics(folder: pathlib.Path, number: int) -> None:
    log = metrics_log.MetricsLog(folder, _COLUMNS, 0)
    for t in range(3 + number):
        log.append({"round": t + 1, "loss": 1.5 * t if t else None})


def _write_manifest(folder: pathlib.Path, number: int) -> None:
    (folder / "private").mkdir()
    made = manifest.Manifest(
        {"noise_multiplier": 0.5, "data": "docs", "max_users": None, "number": number},
        {"schema": {"num_rounds": 3, "min_sep": 1}, "starts": [0, 2]},
        {"training_users": 7},
        {"training users": manifest.identity(["a", "b"])},
    )
    made.keep(folder)
    made.publish(folder)
    cohort_seed.create(folder)


def _read_manifest(folder: pathlib.Path) -> None:
    manifest.read(folder).check_identities({"training users": ["a", "b"]}, remedy="restore them")


def _state(number: int) -> dict[str, Any]:
    return {"aggregator": (np.int64(number), np.full(3, number / 2)), "weights": np.zeros(number)}


def _write_checkpoint(folder: pathlib.Path, number: int) -> None:
    checkpoint.CheckpointFolder(folder).save(
        number, checkpoint.Snapshot.of(_state(number)), {"metrics": {"loss": 0.5}}
    )


def _read_checkpoint(folder: pathlib.Path) -> None:
    [path] = [path for path in folder.iterdir() if path.name.startswith("round_")] or [None]
    name = "round_00000000_" + "0" * 32 if path is None else path.stem
    _, done, fingerprint = name.split("_")
    found, _ = checkpoint.CheckpointFolder(folder).load(int(done), fingerprint)
    found.in_structure_of(_state(1))


def _write_rounds(folder: pathlib.Path, number: int) -> None:
    with committed_rounds.CommittedRounds.create(folder, SCHEMA, _state(0), {}) as rounds:
        for t in range(number):
            rounds.begin(t, [f"user {t}", "nobody" if t else "somebody"])
            rounds.commit(t, _state(t + 1), {})
        if number:
            rounds.begin(number, [f"user {number}"])


def _read_rounds(folder: pathlib.Path) -> None:
    with committed_rounds.CommittedRounds.open(folder, SCHEMA) as rounds:
        rounds.restore()
        rounds.observed()


def _read_ledger(folder: pathlib.Path) -> None:
    recount.recount(folder / "ledger.sqlite")
    with ledger.Ledger.open(folder / "ledger.sqlite", SCHEMA) as book:
        book.observed()
        if book.pending_round is not None:
            book.commit_round(book.pending_round, [], "a new state")
        t = book.observed().num_rounds
        last = book.last_checkpoint
        cohort = ["user 0", "new"]
        book.begin_round(t, cohort, noise_fingerprint="n", checkpoint_fingerprint=last)
        book.commit_round(t, cohort, "a newer state")


def _write_model(folder: pathlib.Path, number: int) -> None:
    toy_model.write(folder, last=toy_model.weights(number))
    content = {"source": "a book", "pretraining": {"data": "book.jsonl"}}
    (folder / warm_start.RECORD).write_text(json.dumps(content))


def _read_model(folder: pathlib.Path) -> None:
    warm_start.source(folder)
    warm_start.refuse_protected(folder, "docs")
    export.read(folder / "model.npz")
    trained_model.find(folder).load()


_OF_CHECKPOINTS: dict[str, mutations.Mutation] = {
    **dict.fromkeys(
        ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        mutations.json_text,
    ),
    "model*.safetensors": mutations.safetensors,
}


def _checkpoint_of(*names: str) -> Write:
    """Returns what copies one of the checkpoints of these names."""

    def write(folder: pathlib.Path, number: int) -> None:
        source = checkpoint_folders.FOLDER / names[number % len(names)]
        for path in source.glob("*[!yz]"):  # Not the golden arrays.
            shutil.copy(path, folder)
        (folder / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 0.5}')

    return write


def _read_hugging_face(folder: pathlib.Path) -> None:
    found = trained_model.find(folder)
    model = found.load(sequence_length=4)
    model.words.ids(found.rule.words("a text"))
    hugging_face.config_of(model.model)


def _write_sweep(folder: pathlib.Path, number: int) -> None:
    sweep_folder.write(folder, {"data": "docs", "num_rounds": number}, {"seed": (0, 1, 2)})
    sweep_folder.write_ending(folder, sweep_folder.Ending(number, "the end"))


def _read_sweep(folder: pathlib.Path) -> None:
    sweep_folder.read(folder)
    sweep_folder.read_ending(folder)
    sweep_folder.check(folder, {"data": "docs", "num_rounds": 1}, {"seed": (0, 1, 2)})


# The runtime.

_RULE = participation_timer.ParticipationRule(2, 3, 1.0)
_BUCKETS = participation_histograms.ParticipationBuckets.for_schema(SCHEMA)


def write_timer(folder: pathlib.Path, number: int) -> None:
    with contextlib.closing(
        participation_timer.ParticipationTimer.open(folder / "timer", clock=lambda: _NOW)
    ) as timer:
        for t in range(number):
            timer.record("tests", f"task {t}", t, _RULE, _BUCKETS)


def _read_timer(folder: pathlib.Path) -> None:
    later = itertools.count(_NOW + 10_000, 10_000)
    with contextlib.closing(
        participation_timer.ParticipationTimer.open(folder / "timer", clock=lambda: next(later))
    ) as timer:
        timer.check("tests", "task 0", 4, _RULE)
        timer.record("tests", "task 0", 4, _RULE, _BUCKETS)
        timer.record("tests", "another", 4, _RULE, _BUCKETS)


def write_examples(folder: pathlib.Path, number: int) -> None:
    with contextlib.closing(
        example_store.SqliteExampleStore.open(folder / "examples", clock=lambda: _NOW)
    ) as store:
        store.add("text", [text_examples.encode_text("some words")] * (1 + 3 * number))


def _read_examples(folder: pathlib.Path) -> None:
    with contextlib.closing(
        example_store.SqliteExampleStore.open(
            folder / "examples",
            clock=lambda: _NOW,
            retention=example_store.Retention(max_bytes=500),
        )
    ) as store:
        found = store.select("text", max_examples=5)
        assert all(isinstance(example, bytes) for example in found)
        store.counts()
        store.add("text", [text_examples.encode_text("a new one")])
        store.expire()


def _write_store(folder: pathlib.Path, number: int) -> None:
    with contextlib.closing(sql.SqlStore(folder)) as store:
        store.add_task("tests", "task", model=b"model", state=b"state")
        epoch = store.acquire("tests", "owner", now=0.0, duration=10.0).epoch
        for t in range(number):
            store.commit(
                "tests", "task", round_index=t, epoch=epoch, model=b"m", state=b"s",
                metrics={"loss": 0.5}, now=1.0,
            )  # fmt: skip
    for left in folder.glob("*-*"):
        left.unlink()


def _read_store(folder: pathlib.Path) -> None:
    with contextlib.closing(sql.SqlStore(folder)) as store:
        store.tasks("tests")
        last = store.last_commit("tests", "task")
        store.history("tests", "task")
        store.lease("tests")
        lease = store.acquire("tests", "another", now=1e6, duration=10.0)
        store.renew("tests", "another", lease.epoch, now=1e6, duration=10.0)
        store.commit(
            "tests", "task", round_index=last.rounds_done, epoch=lease.epoch, model=b"m",
            state=b"s", metrics={}, now=1e6,
        )  # fmt: skip


def _write_sessions(folder: pathlib.Path, number: int) -> None:
    table = session_table.SessionTable()
    for shape in ("-v[]+^", "-#", "other")[: 1 + number]:
        table.add(shape)
    table.save(folder / "sessions.json")


def _read_sessions(folder: pathlib.Path) -> None:
    table = session_table.SessionTable.load(folder / "sessions.json")
    table.to_markdown()
    table.add("-v[]+^")


def _write_server_folder(folder: pathlib.Path, number: int) -> None:
    here = server_folder.of(folder)
    here.keep_rounds({"task": ("f" * 64, number), "other": ("e" * 64, 7)})
    here.write_endpoint("localhost:8443", "http://127.0.0.1:8080")


def _read_server_folder(folder: pathlib.Path) -> None:
    here = server_folder.of(folder)
    for task in ("task", "other", "new"):
        here.check_rounds("toys", task, "f" * 64, 7)
    here.address()


def _write_keys(folder: pathlib.Path, number: int) -> None:
    signing_keys.create(folder / "key")
    tls.create_self_signed(folder / "server.pem", folder / "server.key", ["localhost", "127.0.0.1"])
    os.utime(folder / "key", (number, number))


def _read_keys(folder: pathlib.Path) -> None:
    signing_keys.load_private(folder / "key")
    signing_keys.load_public(folder / "key.pub")
    tls.load(folder / "server.pem", folder / "server.key")


_json = mutations.json_text

KINDS = (
    kind("strategy", write_strategy, {"s.json": _json}, _read_strategy),
    kind("strategy of others", _other_strategies, {"s.json": _json}, _read_strategy),
    kind("statement", _write_statement, {"statement.json": _json}, _read_statement),
    kind("bandmf checkpoint", _write_bandmf, {"b.npz": mutations.archive}, _optimize, writes=True),
    kind(
        "corpus",
        _write_corpus,
        {"c.jsonl": mutations.json_lines},
        lambda folder: _read_corpus(folder / "c.jsonl"),
    ),
    kind(
        "packed corpus",
        _write_packed,
        {"c.jsonl.gz": mutations.compressed(mutations.json_lines)},
        lambda folder: _read_corpus(folder / "c.jsonl.gz"),
    ),
    _table_kind("t.csv", mutations.table),
    _table_kind("t.jsonl", mutations.table),
    _table_kind("t.parquet", mutations.scattered),
    _table_kind("t.arrow", mutations.scattered),
    kind("corpus in SQLite", _write_sqlite, {"c.sqlite": mutations.sqlite}, _read_sqlite),
    kind("vocabulary", _write_vocabulary, {"vocabulary.json": _json}, _read_vocabulary),
    kind(
        "word list",
        _write_vocabulary,
        {"words.txt": mutations.lines_of_text},
        lambda folder: vocabulary.from_file(folder / "words.txt", 2),
    ),
    kind(
        "config", _write_configs, dict.fromkeys(_CONFIG_FILES, mutations.toml_text), _read_configs
    ),
    kind(
        "metrics",
        _write_metrics,
        {"metrics.csv": mutations.lines_of_text},
        lambda folder: metrics_log.read_rows(folder, 3),
    ),
    kind(
        "manifest", _write_manifest, {"config.json": _json, "manifest.json": _json}, _read_manifest
    ),
    kind("cohort seed", _write_manifest, {"cohort_seed": mutations.scattered}, cohort_seed.read),
    kind("checkpoint", _write_checkpoint, {"round_*.npz": mutations.archive}, _read_checkpoint),
    kind(
        "committed rounds",
        _write_rounds,
        {
            "ledger.sqlite": mutations.sqlite,
            "ledger.sqlite.key": mutations.scattered,
            "round_*.npz": mutations.archive,
        },
        _read_rounds,
        writes=True,
    ),
    kind("ledger", _write_rounds, {"ledger.sqlite": mutations.sqlite}, _read_ledger, writes=True),
    kind(
        "model",
        _write_model,
        {"model.npz": mutations.archive, "vocabulary.json": _json, warm_start.RECORD: _json},
        _read_model,
    ),
    kind(
        "checkpoint of GPT-2",
        _checkpoint_of("gpt2", "gpt2_half"),
        _OF_CHECKPOINTS,
        _read_hugging_face,
        refusals=(validation.UsageError,),
    ),
    kind(
        "checkpoint of Llama",
        _checkpoint_of("llama_untied"),
        _OF_CHECKPOINTS | {"model.safetensors.index.json": _json},
        _read_hugging_face,
        refusals=(validation.UsageError,),
    ),
    kind("sweep", _write_sweep, {"*.json": _json}, _read_sweep),
    kind("timer", write_timer, {"timer": mutations.sqlite}, _read_timer, writes=True),
    kind(
        "example store", write_examples, {"examples": mutations.sqlite}, _read_examples, writes=True
    ),
    kind(
        "store",
        _write_store,
        {"*.sqlite*": mutations.sqlite},
        _read_store,
        writes=True,
        refusals=(validation.UsageError, OSError, interface.StoreError),
    ),
    kind("session counts", _write_sessions, {"sessions.json": _json}, _read_sessions),
    kind(
        "server folder",
        _write_server_folder,
        {"rounds.json": _json, "endpoint.json": _json},
        _read_server_folder,
    ),
    kind(
        "keys",
        _write_keys,
        dict.fromkeys(("key", "key.pub", "server.pem", "server.key"), mutations.pem),
        _read_keys,
    ),
)
"""All of them."""
