"""Tests of `tff-dpftrl task`: options, keys, groups, and its errors."""

import json
import stat
import types

import pytest

from tests import small_disk
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder, tiny_task
from tff_dpftrl.cli import main
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.plans import signing
from tff_dpftrl.runtime.status import session_table
from tff_dpftrl.runtime.tasks import making, planned_task, provenance, task_folder, task_report

disk = small_disk.disk

_OPTIONS = """
population = "keyboard"
num_devices = 300

[federated_learning]
num_rounds = 20
clients_per_round = 40

[privacy]
noise_multiplier = 1.0
"""


@pytest.fixture
def made(monkeypatch):
    """The tasks that would have been made."""
    found = []

    def make(config, output, key, *, built, progress):
        assert built.package_version and built.builder == "Ada"
        found.append((config, output, key))
        return types.SimpleNamespace(name=output.name)

    monkeypatch.setattr(making, "make", make)
    return found


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "task.toml"
    path.write_text(_OPTIONS)
    return str(path)


def _new(*arguments):
    return main.main(["task", "new", "--builder", "Ada", *map(str, arguments)])


def test_flags_overrule_the_file(made, options, tmp_path, capsys):
    output = tmp_path / "tasks" / "nwp"
    arguments = ["--rounds", "30", "--over-selection", "1.5", "--no-shuffle"]
    assert _new("--config", options, *arguments, "--output", output) == 0
    [(config, path, key)] = made
    assert (config.learning.num_rounds, config.serving.over_selection) == (30, 1.5)
    assert not config.definition.shuffle
    assert (config.learning.clients_per_round, path) == (40, output)
    printed = capsys.readouterr()
    assert f"--population keyboard --task {output}" in printed.out
    assert f"Made the signing key {output.parent / 'signing_key'}" in printed.err


def test_a_reviewer_approves_what_is_shown(tmp_path, capsys):
    task, key = tmp_path / "small", tmp_path / "alice.key"
    plans = small_folder.plans(small_tasks.ROUNDS["blt"]())
    provenance.put_into(provenance.find(builder="Ada"), plans.server, plans.devices)
    small_folder.write_plans(task, plans)
    assert main.main(["task", "show", str(task)]) == 0
    shown = capsys.readouterr().out
    assert "Built by Ada with tff_dpftrl" in shown and "approved by   nobody" in shown
    for _ in range(2):  # A second time changes nothing.
        assert main.main(["task", "approve", str(task), "--key", str(key)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("Made the signing key") == 1
    assert "Approved the task 'small'. Built by Ada" in printed.out
    assert main.main(["task", "show", str(task), "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    name = signing.key_name(signing_keys.load_public(f"{key}.pub"))
    assert shown["approved_by"] == [name.hex()]
    assert shown["server_plan"] == task_folder.read(task).terms.server_plan


def test_code_that_is_not_committed_is_refused_unless_forced(made, options, tmp_path, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / "digits.py").write_text("")
    more = ["--build", tmp_path / "digits.py:build", "--output", tmp_path / "digits"]
    (tmp_path / "build.toml").write_text(
        "population = 'keyboard'\nnum_devices = 300\n[privacy]\nnoise_multiplier = 1.0\n"
    )
    assert _new("--config", tmp_path / "build.toml", *more) == 2
    error = capsys.readouterr().err.strip()
    assert "since any commit: nobody could find" in error and "\n" not in error
    assert not made and not (tmp_path / "signing_key").exists()
    assert _new("--config", tmp_path / "build.toml", *more, "--allow-dirty") == 0
    assert len(made) == 1


def test_a_task_that_is_not_there_is_not_approved(tmp_path, capsys):
    key = tmp_path / "alice.key"
    assert main.main(["task", "approve", str(tmp_path), "--key", str(key)]) == 2
    assert "There is no task in" in capsys.readouterr().err
    assert not key.exists()


def test_a_key_is_made_once_and_is_private(made, options, tmp_path, capsys):
    for name in ("one", "two"):
        assert _new("--config", options, "--output", tmp_path / name) == 0
    key = tmp_path / "signing_key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert made[0][2].private_bytes_raw() == made[1][2].private_bytes_raw()
    signing_keys.load_public(tmp_path / "signing_key.pub")
    assert capsys.readouterr().err.count("Made the signing key") == 1
    key.chmod(0o644)
    assert _new("--config", options, "--output", tmp_path / "three") == 2
    assert "a private key that others can use" in capsys.readouterr().err


def test_a_grid_makes_a_group(made, options, tmp_path, capsys):
    output = tmp_path / "nwp"
    grid = "client-learning-rate=0.1,0.3"
    assert _new("--config", options, "--grid", grid, "--output", output) == 0
    assert [(config.learning.client_learning_rate, path.name) for config, path, _ in made] == [
        (0.1, "nwp-client_learning_rate=0.1"),
        (0.3, "nwp-client_learning_rate=0.3"),
    ]
    assert "client_learning_rate=0.1 --task" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-rund", "3"], "unknown option --num-rund; did you mean --num-rounds"),
        (["--rounds", "x"], "invalid int value: 'x'"),
        (["--deterministic-noise-seed", "3"], "unknown option --deterministic-noise-seed"),
        (["--population", "a b"], "population must be a name"),
        (["--expect", "loss = 3"], "got 'loss = 3': give the name of a metric, < or >, and a num"),
        (["--num-devices", "3"], "num_devices=3 is below the 52 devices"),
        (["--grid", "clip_norm"], "--grid must be like"),
        (["--grid", "clip_nrom=1,2"], "unknown option 'clip_nrom'"),
        (["--vocabulary", "private"], "the server never sees"),
        (["--evaluates", "tasks/nwp"], "leave out --config"),
        (["--config", "nowhere.toml"], "Cannot read the config file nowhere.toml"),
    ],
)
def test_bad_options_are_refused_with_one_line(made, options, tmp_path, capsys, arguments, message):
    try:
        status = _new("--config", options, "--output", tmp_path / "nwp", *arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not made
    assert not (tmp_path / "signing_key").exists()


@pytest.mark.parametrize(
    ("value", "expected"), [([], "active-server"), (["honest-but-curious"], "honest-but-curious")]
)
def test_secure_aggregation_without_a_value_is_that_against_an_active_server(
    made, options, tmp_path, value, expected
):
    arguments = ["--secagg-bits", "20", "--secure-aggregation", *value]
    assert _new("--config", options, "--output", tmp_path / "nwp", *arguments) == 0
    assert made[0][0].sums.secure_aggregation == expected


def test_an_evaluation_has_groups_of_its_own_size(monkeypatch, tmp_path):
    found = []

    def make(of, config, output, key, *, built, progress):
        found.append(config)
        return types.SimpleNamespace(name=output.name)

    monkeypatch.setattr(making, "make_evaluation", make)
    secure = small_folder.CONFIG.changed(
        clients_per_round=40,
        secagg_bits=20,
        secure_aggregation="honest-but-curious",
    )
    config = secure.resolved("small")
    assert config.sums.least_group == 32
    small_folder.write(tmp_path / "small", small_tasks.ROUNDS["blt"](), config=config)
    arguments = ["--evaluates", tmp_path / "small", "--clients-per-round", "10"]
    assert _new(*arguments, "--output", tmp_path / "watch") == 0
    assert found[0].resolved("watch").sums.least_group == 8
    assert found[0].sums.secure_aggregation == "honest-but-curious"


def test_a_task_is_never_overwritten(made, options, tmp_path, capsys):
    (tmp_path / "nwp").mkdir()
    assert _new("--config", options, "--output", tmp_path / "nwp") == 2
    assert "a task is never overwritten" in capsys.readouterr().err


def test_a_part_must_be_named(capsys):
    with pytest.raises(SystemExit):
        main.main(["task"])
    assert "required: COMMAND" in capsys.readouterr().err


def test_there_is_no_report_without_task_and_store(tmp_path, capsys):
    assert main.main(["task", "report", str(tmp_path)]) == 2
    assert "There is no task in" in capsys.readouterr().err
    folder = tmp_path / "small"
    small_folder.write(folder, small_tasks.ROUNDS["blt"]())
    assert main.main(["task", "report", str(folder), "--store", str(tmp_path / "no")]) == 2
    assert "There is no store at" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    (tmp_path / "store").mkdir()
    assert main.main(["task", "report", str(folder), "--store", str(tmp_path / "store")]) == 2
    assert "has no task 'small'" in capsys.readouterr().err


def test_a_report_lists_sessions_with_and_without_a_plan(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "small"
    small_folder.write(folder, small_tasks.ROUNDS["blt"]())
    (tmp_path / "store" / "server").mkdir(parents=True)
    sessions = session_table.SessionTable()
    for shape in ("-#", "-v[]+^"):
        sessions.add(shape)
    sessions.save(tmp_path / "store" / "server" / "sessions.json")
    found = types.SimpleNamespace(summary="2 of 6 rounds.")
    monkeypatch.setattr(task_report, "write", lambda *_, **__: found)
    assert main.main(["task", "report", str(folder), "--store", str(tmp_path / "store")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["-v[]+^", "1", "100.0", "%"] in lines and ["-#", "1"] in lines


def test_the_help_of_a_part_says_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        main.main(["task", "new", "--help"])
    printed = capsys.readouterr().out
    assert "--over-selection" in printed and "--proxy-data" in printed
    assert "--stop-at-accuracy" not in printed
    assert "Default: ." not in printed


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 10])
def test_a_task_is_made_when_there_is_room_again(disk, tmp_path, capsys, pages):
    tiny_task.write_corpora(tmp_path)
    options = tiny_task.config(tmp_path).to_dict()
    lines = [f"{k} = {json.dumps(v)}" for k, v in options.items() if v is not None]
    (tmp_path / "task.toml").write_text("\n".join(lines))
    output = disk.folder / "tasks" / "toy"
    disk.leave(pages)
    assert _new("--config", tmp_path / "task.toml", "--output", output) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert said == "tff-dpftrl task: [Errno 28] No space left on device: make room on the disk."
    disk.give_back()
    left = {file.name for file in output.parent.iterdir()} if output.parent.exists() else set()
    assert left <= {"signing_key", "signing_key.pub"}
    keys = {name: (output.parent / name).read_bytes() for name in left}
    assert _new("--config", tmp_path / "task.toml", "--output", output) == 0
    if "signing_key" in left:
        assert {name: (output.parent / name).read_bytes() for name in left} == keys
    assert planned_task.load(output).name == "toy"
