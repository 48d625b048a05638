"""Commands given files that were changed: a status, and one line on standard error."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import random
from collections.abc import Callable

from tests.fuzzing import files, judging, mutations
from tests.training import toy_model, toy_run
from tff_dpftrl.cli import main
from tff_dpftrl.runtime.server import server_folder

_CONFIG = "num_rounds = 8\nclip_norm = 1.0\nmin_sep = 2\nclients_per_round = 4\n"


def _run(*arguments: str | pathlib.Path) -> str:
    """Runs a command; what it says when it fails is its last line, and names the command.

    Returns:
      Its exit status, in words.
    """
    out, error = io.StringIO(), io.StringIO()
    os.environ["TFF_DPFTRL_TRACEBACK"] = "1"  # The folder of temporary files is not the case's.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
    if status not in (0, 1, 2):
        raise judging.Violation(f"the status is {status!r}: {error.getvalue()[-1500:]}")
    if status and "Traceback" in error.getvalue():
        raise judging.Violation(error.getvalue()[-500:])
    if status and not out.getvalue():
        *others, last = error.getvalue().splitlines() or [""]
        judging.one_line(last)
        if not last.startswith("tff-dpftrl ") or any(
            line.startswith("tff-dpftrl ") and ": warning: " not in line for line in others
        ):
            raise judging.Violation(f"standard error is not one line: {error.getvalue()[-500:]!r}")
    return f"status {status}"


def _account(folder: pathlib.Path) -> str:
    schema = ("--rounds", "8", "--min-sep", "2", "--noise-multiplier", "2")
    return _run("account", "--strategy", folder / "s.json", *schema)


def _write_lines(folder: pathlib.Path, number: int) -> None:
    files.write_examples(folder, number)
    (folder / "texts.txt").write_text("some words\n\nand more ß\n" * (1 + number), "utf-8")


def _add(folder: pathlib.Path) -> str:
    return _run("device", "--examples", folder / "examples", "--add", folder / "texts.txt")


def _write_device(folder: pathlib.Path, number: int) -> None:
    files.write_examples(folder, number)
    (folder / "examples.device").mkdir()
    files.write_timer(folder / "examples.device", number)
    (folder / "examples.device" / "timer").rename(
        folder / "examples.device" / "participation.sqlite"
    )
    here = server_folder.of(folder / "server")
    here.make(["localhost"])
    here.keep_plan_keys([files.PLAN_KEY.public_key()])
    here.write_endpoint("127.0.0.1:1", "")  # Nobody listens.


def _take_part(folder: pathlib.Path) -> str:
    server = ("--server-folder", folder / "server", "--population", "tests", "--once")
    return _run("device", "--examples", folder / "examples", *server)


def _write_config(folder: pathlib.Path, number: int) -> None:
    (folder / "run.toml").write_text(_CONFIG + f"noise_multiplier = {1 + number}.5\n")


def _train(folder: pathlib.Path) -> str:
    nowhere = ("--data", folder / "nowhere.jsonl", "--output", folder / "out")
    return _run("train", "--config", folder / "run.toml", *nowhere)


def _write_sizes(folder: pathlib.Path, number: int) -> None:
    (folder / "sizes.txt").write_text("\n".join(map(str, range(5, 30 + number))))


def _plan(folder: pathlib.Path) -> str:
    asked = ("--target-epsilon", "8", "--compute-budget", "64", "--steps", "5")
    return _run("finetune-plan", "--user-sizes", folder / "sizes.txt", *asked)


def _write_model(folder: pathlib.Path, number: int) -> None:
    toy_model.write(folder, last=toy_model.weights(number))


def _kind(
    name: str,
    write: files.Write,
    changes: dict[str, mutations.Mutation],
    run: Callable[[pathlib.Path], str],
) -> judging.Kind:
    return files.kind(name, write, changes, run, writes=True, refusals=())


def _write_run(folder: pathlib.Path, number: int) -> None:
    from tff_dpftrl.training import run

    corpus = folder / "corpus"
    corpus.mkdir()
    toy_run.write_corpus(corpus)
    config = toy_run.config(
        corpus, num_rounds=2, min_sep=2, eval_every=1, deterministic_noise_seed=number
    )
    run.train(config, folder / "run", progress=lambda line: None)


def _write_served(folder: pathlib.Path, number: int) -> None:
    """A task with its server's folder and store, of which rounds are committed."""
    from tests.runtime.plans import small_tasks
    from tests.runtime.tasks import small_folder
    from tff_dpftrl.runtime.store import sql
    from tff_dpftrl.runtime.tasks import planned_task

    small_folder.write(folder / "task", small_tasks.ROUNDS["blt"]())
    task = planned_task.load(folder / "task")
    with sql.SqlStore(folder / "store") as store:
        rounds = small_folder.Rounds(task, store)
        for seed in range(number):
            reports = [
                small_folder.report(
                    small_folder.device_of(task), rounds.commit.model, small_folder.examples(seed)
                )
            ]
            rounds.run(reports * 3)
    here = server_folder.of(folder / "store" / "server")
    here.make(["localhost"])
    here.keep_plan_keys([small_tasks.KEY.public_key()])
    here.keep_rounds({task.name: (task.folder.terms.server_plan, number)})


def _serve(folder: pathlib.Path) -> str:
    nowhere = ("--address", "256.0.0.1:1")  # All is read, and nobody is served.
    task = ("--population", "tests", "--task", folder / "task")
    return _run("serve", *task, "--store", folder / "store", *nowhere)


_SCHEMA = ("--rounds", "8", "--min-sep", "2")
_COMPUTING = (
    ("account", "--mechanism", "blt", "--noise-multiplier", "2", *_SCHEMA),
    ("calibrate", "--mechanism", "tree", "--target-epsilon", "8", *_SCHEMA),
    ("compare", "--vary", "rounds", "--values", "4,8", "--min-sep", "2", "tree", "identity"),
    ("finetune-plan", "--users", "50", "--examples-per-user", "5", "--target-epsilon", "8")
    + ("--compute-budget", "64", "--steps", "5"),
    ("optimize", "--mechanism", "bandtoep", *_SCHEMA),
    ("plan", "--population", "3000", "--rounds", "50", "--target-epsilon", "8"),
)
"""Commands that only compute, with valid arguments."""
_VALUES = ("0", "-1", "1", "3", "0.5", "nan", "inf", "1e308", "1e-320", "9" * 23, "", "many", "ß")
_FLAGS = ("--delta", "--max-participations", "--restart-every", "--clip-norm-inflation", "--bands")


def _arguments(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
    def case(rng: random.Random) -> judging.Case:
        arguments = list(rng.choice(_COMPUTING))
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.3:
                arguments += [rng.choice(_FLAGS), rng.choice(_VALUES)]
            else:
                flags = [i for i, text in enumerate(arguments) if text.startswith("--")]
                arguments[rng.choice(flags) + 1] = rng.choice(_VALUES)
        return judging.Case(lambda: _run(*arguments), folder)

    return case


_json, _sqlite = mutations.json_text, mutations.sqlite
_RUN = {
    "manifest.json": _json,
    "config.json": _json,
    "vocabulary.json": _json,
    "baselines.json": _json,
    "metrics.csv": mutations.lines_of_text,
    "ledger.sqlite": _sqlite,
    "ledger.sqlite.key": mutations.scattered,
    "round_*.npz": mutations.archive,
    "model.npz": mutations.archive,
    "best_model.npz": mutations.archive,
    "held_out.json": _json,
    "privacy_statement.json": _json,
}
_SERVED = {
    "config.json": _json,
    "vocabulary.json": _json,
    "task.pb": mutations.protobuf,
    "terms.json": _json,
    "terms.sig": mutations.scattered,
    "*.pub": mutations.pem,
    "store.sqlite": _sqlite,
    "rounds.json": _json,
    "certificate.pem": mutations.pem,
    "private_key.pem": mutations.pem,
    "attestation_issuer": mutations.pem,
}
KINDS = (
    judging.Kind("arguments of commands", _arguments, refusals=()),
    _kind("tff-dpftrl account", files.write_strategy, {"s.json": _json}, _account),
    _kind(
        "tff-dpftrl device --add",
        _write_lines,
        {"texts.txt": mutations.lines_of_text, "examples": _sqlite},
        _add,
    ),
    _kind(
        "tff-dpftrl device",
        _write_device,
        {
            "examples": _sqlite,
            "participation.sqlite": _sqlite,
            "endpoint.json": _json,
            "certificate.pem": mutations.pem,
            "attestation_issuer": mutations.pem,
            "*.pub": mutations.pem,
        },
        _take_part,
    ),
    _kind("tff-dpftrl train", _write_config, {"run.toml": mutations.toml_text}, _train),
    _kind("tff-dpftrl finetune-plan", _write_sizes, {"sizes.txt": mutations.lines_of_text}, _plan),
    _kind(
        "tff-dpftrl predict",
        _write_model,
        {"model.npz": mutations.archive, "vocabulary.json": _json},
        lambda folder: _run("predict", folder, "the front"),
    ),
    _kind("tff-dpftrl report", _write_run, _RUN, lambda folder: _run("report", folder / "run")),
    _kind("tff-dpftrl serve", _write_served, _SERVED, _serve),
)
"""All of them; slower than what they call."""
