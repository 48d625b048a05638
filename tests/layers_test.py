"""Keeps the strata apart: maths without TensorFlow, operations without TFF, imports one way."""

from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "tff_dpftrl"
_MATHS = ("participation", "mechanisms", "accounting", "discretization", "numpy_noise")
_FEDERATED = (*_MATHS, "private_round", "aggregators", "learning", "execution", "models", "data")
# What each package may import of ours, besides itself and the files at the top.
_ALLOWED = {
    "participation": (),
    "mechanisms": ("participation",),
    "discretization": (),
    "accounting": ("participation", "mechanisms", "discretization"),
    "numpy_noise": ("participation", "mechanisms", "accounting"),
    "reports": ("accounting",),
    "private_round": ("mechanisms", "discretization", "numpy_noise"),
    "aggregators": (*_MATHS, "private_round", "execution"),
    "learning": (*_MATHS, "private_round", "aggregators", "execution", "models", "data"),
    "execution": ("private_round",),
    "models": (),
    "data": (),
    "runs": (*_MATHS, "private_round", "reports"),
    "finetuning": (*_MATHS, "private_round", "models", "data", "runs", "training"),
    "training": (*_FEDERATED, "reports", "runs"),
    "sweeps": ("accounting", "mechanisms", "reports", "runs", "finetuning", "training"),
    "secure_sums": (),
    "auditing": (*_FEDERATED, "runs", "finetuning", "training", "runtime", "secure_sums"),
    "runtime": (*_FEDERATED, "secure_sums", "reports", "runs", "training"),
    "cli": (
        *_FEDERATED,
        "reports",
        "secure_sums",
        "runs",
        "finetuning",
        "training",
        "auditing",
        "sweeps",
        "runtime",
    ),
}
# Lines of each room, with its pages and scripts. Before you raise one, look for what can go.
_LINES = {
    "runtime": 30_070,
    "auditing": 10_340,
    "cli": 7_770,
    "accounting": 7_110,
    "finetuning": 7_150,
    "training": 5_750,
    "mechanisms": 5_620,
    "models": 5_250,
    "runs": 4_700,
    "data": 4_450,
    "execution": 3_160,
    "secure_sums": 3_040,
    "private_round": 2_970,
    "aggregators": 2_520,
    "sweeps": 2_550,
    "learning": 2_360,
    "participation": 2_090,
    "reports": 1_680,
    "top": 1_150,
    "numpy_noise": 1_010,
    "discretization": 380,
}
_LINES_OF_TESTS = 103_400
_WORDS_OF_DOCUMENTS = 80_000
# What runs on text have in common: options, corpus, models in folders. None of it trains a round.
_TEXT_OF_TRAINING = (
    "composed",
    "corpus",
    "language_config",
    "options",
    "pretraining",
    "report",
    "startup",
    "text_task",
    "trained_model",
    "warm_start",
)
_AT_THE_TOP = (
    "version",
    "validation",
    "durable_files",
    "json_text",
    "array_files",
    "array_tensors",
    "packages",
    "pictures",
    "quiet_tensorflow",
)
# Parts of the runtime that a device starts with, or a server without TensorFlow.
_LIGHT_RUNTIME = ("actors", "device", "fleet", "protocol", "server", "status", "store")
# Only these import TFF when they are imported, beside `aggregators`.
_OF_TFF = {
    "auditing": ("tff_aggregators", "variable_canaries"),
    "execution": (
        "contexts",
        "large_constants",
        "leaves",
        "process_form",
        "secure_sum_check",
        "tff_names",
    ),
    "learning": (
        "dp_fedavg",
        "local_model",
        "tff_metrics",
        "tff_rounds",
    ),
}
# What the server's actors, and the simulator of their schedules, must not import.
_ENGINES = ("asyncio", "concurrent", "grpc", "ray", "sqlalchemy", "threading", "time")
_TENSORFLOW = ("tensorflow", "tensorflow_federated", "tensorflow_privacy", "tensorflow_text")


def _modules() -> list[pathlib.Path]:
    return sorted(_PACKAGE.glob("*/**/*.py"))


class _Names(NamedTuple):
    """Names in a module: dotted ones of its imports, and attributes by the name they are of."""

    imports: frozenset[str]
    attributes: frozenset[tuple[str, str]]


@functools.cache
def _names(path: pathlib.Path) -> _Names:
    """Reads the names in a module, at any depth of its code."""
    found, attributes = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.add((node.value.id, node.attr))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import: name the package in full."
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return _Names(frozenset(found), frozenset(attributes))


def _imports(path: pathlib.Path) -> frozenset[str]:
    return _names(path).imports


def _ours(path: pathlib.Path) -> set[str]:
    """Names of our packages, and modules beside them, that a module imports."""
    return {
        name.split(".")[1]
        for name in _imports(path)
        if name.startswith("tff_dpftrl.") and not name.startswith("tff_dpftrl.__")
    }


def _is_of_tff(package: str, module: str) -> bool:
    return package == "aggregators" or module in _OF_TFF.get(package, ())


def _imported_with(path: pathlib.Path) -> set[str]:
    """Names that are imported when a module is: not in a function, nor for a type checker."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _label(path: pathlib.Path) -> str:
    return str(path.relative_to(_PACKAGE))


def _of_every_module(check):
    """A test that checks all modules, and names those that fail: thousands of tests take time."""

    def test():
        failed = []
        for path in _modules():
            try:
                check(path)
            except AssertionError as error:
                failed.append(f"{_label(path)}: {error}")
        assert not failed, "\n".join(failed)

    return test


@_of_every_module
def test_imports_go_one_way(path):
    package = path.relative_to(_PACKAGE).parts[0]
    assert package in _ALLOWED, f"{package} is new: say in this test what it may import."
    allowed = {package, *_AT_THE_TOP, *_ALLOWED[package]}
    assert _ours(path) <= allowed, f"{package} must not import {_ours(path) - allowed}."


def _size(folder: pathlib.Path, *endings: str, words: bool = False) -> int:
    texts = [
        path.read_text(encoding="utf-8")
        for ending in endings
        for path in folder.rglob(f"*.{ending}")
        if not path.name.endswith("_pb2.py")
    ]
    return sum(len(text.split() if words else text.splitlines()) for text in texts)


def test_nothing_outgrows_its_budget():
    code = ("py", "js", "css")
    sizes = {path.name: _size(path, *code) for path in _PACKAGE.iterdir() if path.is_dir()}
    top = sum(len(path.read_text("utf-8").splitlines()) for path in _PACKAGE.glob("*.py"))
    sizes = {room: size for room, size in sizes.items() if size} | {"top": top}
    assert sizes.keys() == _LINES.keys()
    budgets = {room: (size, _LINES[room]) for room, size in sizes.items()}
    budgets["tests"] = (_size(_PACKAGE.parent / "tests", "py"), _LINES_OF_TESTS)
    words = _size(_PACKAGE.parent / "docs", "md", words=True)
    budgets["words of docs"] = (words, _WORDS_OF_DOCUMENTS)
    above = {name: pair for name, pair in budgets.items() if pair[0] > pair[1]}
    assert not above, f"Larger than their budgets: {above}. Remove something, or raise a budget."
    # What was gained is kept: a budget follows the room that shrinks.
    loose = {name: pair for name, pair in budgets.items() if 1.05 * pair[0] + 50 < pair[1]}
    assert not loose, f"Lower the budgets of {loose} to what is needed now."


def _circles(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns names in circles, and between them; none if all can be put into one order."""
    left = {name: set(targets) & imports.keys() for name, targets in imports.items()}
    while True:
        used = set().union(*left.values())
        inside = {name for name, targets in left.items() if targets and name in used}
        if inside == left.keys():
            return sorted(left)
        left = {name: left[name] & inside for name in inside}


def test_no_imports_make_a_circle():
    """Those in functions and for type checkers count; doors import all that is in their room."""
    paths = [path for path in _modules() if path.name != "__init__.py"]
    names = [f"tff_dpftrl.{_label(path)[:-3].replace('/', '.')}" for path in paths]
    found = _circles({name: _imports(path) for name, path in zip(names, paths, strict=True)})
    assert not found, f"These import each other in circles, or stand between two: {found}."


def test_a_circle_is_found():
    line = {"a": ["b"], "b": ["c"], "c": ["outside"], "d": ["a"]}
    assert _circles(line) == []
    assert _circles({**line, "c": ["b"]}) == ["b", "c"]


@_of_every_module
def test_strata_import_no_higher_framework(path):
    roots = {name.split(".")[0] for name in _imports(path)}
    package = path.relative_to(_PACKAGE).parts[0]
    if package in (
        *_MATHS,
        "reports",
        "secure_sums",
        "sweeps",
    ):  # A sweep waits for hours beside what needs the memory.
        assert not roots & {*_TENSORFLOW, "jax"}


@_of_every_module
def test_only_what_is_of_tff_is_imported_with_tff(path):
    package = path.relative_to(_PACKAGE).parts[0]
    if _is_of_tff(package, path.stem):
        return
    for name in _imported_with(path):
        _, room, module, *_ = (*name.split("."), "", "")
        assert not name.startswith("tensorflow_federated"), f"{_label(path)} imports TFF."
        if name.startswith("tff_dpftrl."):
            assert not _is_of_tff(room, module), f"{_label(path)} imports {name}, which needs TFF."


@_of_every_module
def test_numerics_is_machinery_of_the_mechanisms(path):
    if path.relative_to(_PACKAGE).parts[0] != "mechanisms":
        inside = [name for name in _imports(path) if "mechanisms.numerics" in name]
        assert not inside, f"{_label(path)} imports {inside}; ask a strategy instead."


@_of_every_module
def test_fine_tuning_has_its_rounds_from_the_kernel(path):
    if path.relative_to(_PACKAGE).parts[0] == "finetuning":
        prefix = "tff_dpftrl.training."
        ours = {name.removeprefix(prefix) for name in _imports(path) if name.startswith(prefix)}
        assert ours <= {*_TEXT_OF_TRAINING}, f"{_label(path)} imports {ours} of training."


@_of_every_module
def test_the_kernel_of_a_run_knows_no_text_and_no_options(path):
    if path.relative_to(_PACKAGE).parts[0] == "runs":
        assert _ours(path) <= {"runs", *_AT_THE_TOP, *_MATHS, "private_round", "reports"}
        assert not any(name.endswith((".config", ".options")) for name in _imports(path))


@_of_every_module
def test_evidence_of_an_audit_is_maths(path):
    if path.relative_to(_PACKAGE).parts[:2] == ("auditing", "evidence"):
        roots = {name.split(".")[0] for name in _imports(path)}
        assert _ours(path) <= {"auditing", *_AT_THE_TOP, *_MATHS}
        assert not roots & {*_TENSORFLOW, "jax"}


# Rooms of TFF that `tff_names` does not stand before: they keep their names in later releases.
_ROOMS_OF_TFF = {"learning", "aggregators", "templates", "simulation"}
_NAMES_OF_TFF = "execution/tff_names.py"


def _of_tff(path: pathlib.Path) -> set[str]:
    """Names that a module takes directly from TFF's top."""
    return {attribute for name, attribute in _names(path).attributes if name == "tff"} | {
        name.removeprefix("tensorflow_federated.")
        for name in _imports(path)
        if name.startswith("tensorflow_federated.")
    }


@_of_every_module
def test_the_language_of_tff_is_named_in_one_module(path):
    names = _of_tff(path) - _ROOMS_OF_TFF
    if _label(path) != _NAMES_OF_TFF:
        assert not names, f"{_label(path)} takes {names} from TFF: take it from tff_names."


def test_the_module_that_names_the_language_of_tff_does():
    assert _of_tff(_PACKAGE / _NAMES_OF_TFF) - _ROOMS_OF_TFF


def test_actors_hold_no_engine_code():
    for folder in (_PACKAGE / "runtime/actors", _PACKAGE.parent / "verification/schedules"):
        paths = sorted(folder.glob("*.py"))
        assert paths
        for path in paths:
            roots = {name.split(".")[0] for name in _imports(path)}
            assert not roots & {*_ENGINES, *_TENSORFLOW}, path


@_of_every_module
def test_the_package_imports_nothing_that_stands_beside_it(path):
    beside = {"verification", "tests", "benchmarks", "experiments"}
    assert not {name.split(".")[0] for name in _imports(path)} & beside


def test_the_rules_catch_a_violation(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text("def f():\n    from tff_dpftrl.accounting import guarantee\n")
    assert _ours(module) == {"accounting"}
    module = tmp_path / "worse.py"
    module.write_text("from tff_dpftrl import accounting\nimport tensorflow.compat.v1 as tf\n")
    assert _ours(module) == {"accounting"}
    assert "tensorflow.compat.v1" in _imports(module)


_BLOCKED = f"""
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {_TENSORFLOW!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def _run_blocked(code: str) -> subprocess.CompletedProcess:
    return _run(_BLOCKED + code)


def _run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=_PACKAGE.parent,
        timeout=300,
    )


def test_maths_can_be_imported_without_tensorflow():
    done = _run_blocked(f"""
import tff_dpftrl
for package in {(*_MATHS, "secure_sums")!r}:
    root = importlib.import_module("tff_dpftrl." + package)
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
""")
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert "tff_dpftrl.mechanisms.blt_optimize" in names
    assert "tff_dpftrl.accounting.guarantee" in names


def test_the_light_runtime_can_be_imported_without_tensorflow():
    done = _run_blocked(f"""
for package in {_LIGHT_RUNTIME!r}:
    root = importlib.import_module("tff_dpftrl.runtime." + package)
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
importlib.import_module("tff_dpftrl.runtime.cluster.host_kinds")  # Before their tasks.
""")
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert "tff_dpftrl.runtime.protocol.attestation" in names
    assert "tff_dpftrl.runtime.store.sql" in names


def test_a_task_is_made_and_served_without_tff():
    code = _BLOCKED.replace(repr(_TENSORFLOW), repr(("tensorflow_federated",)))
    done = _run(
        "import os\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        + code
        + """
importlib.import_module("tff_dpftrl.runtime.tasks.planned_task")
importlib.import_module("tff_dpftrl.runtime.tasks.making")
"""
    )
    assert done.returncode == 0, done.stderr


def test_accounting_on_the_command_line_works_without_tensorflow():
    done = _run_blocked("""
from tff_dpftrl.cli import main
sys.exit(main.main("account --mechanism blt --noise-multiplier 7 --rounds 200 --min-sep 50 "
                   "--delta 1e-10 --format json".split()))
""")
    assert done.returncode == 0, done.stderr
    assert '"epsilon"' in done.stdout


@pytest.mark.parametrize(
    "command, wanted, unwanted",
    [
        ("--help", "argparse", ("numpy", "tff_dpftrl.cli.account", "tff_dpftrl.training")),
        ("account --help", "tff_dpftrl.cli.account", ("numpy", "tff_dpftrl.cli.train")),
        (
            "account --mechanism tree --noise-multiplier 7 --rounds 200 --min-sep 50",
            "scipy.optimize",
            ("dp_accounting", "scipy.signal", "scipy.stats", "tff_dpftrl.training"),
        ),
    ],
)
def test_a_command_imports_no_more_than_it_needs(command, wanted, unwanted):
    done = _run(f"""
import sys
from tff_dpftrl.cli import main
try:
    main.main({command.split()!r})
except SystemExit:
    pass
assert {wanted!r} in sys.modules
assert not set({unwanted!r}) & set(sys.modules), set({unwanted!r}) & set(sys.modules)
""")
    assert done.returncode == 0, done.stderr


def test_every_command_says_what_it_does_without_the_extras():
    extras = ("cryptography", "google", "grpc", "matplotlib", "prometheus_client", "pyarrow")
    extras += ("psycopg2", "ray", "sqlalchemy", "tornado", "uvloop", *_TENSORFLOW)
    done = _run(
        _BLOCKED.replace(repr(_TENSORFLOW), repr(extras))
        + """
import contextlib, io
from tff_dpftrl.cli import main
for command in main._SUBCOMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main.main([command, "--help"]) == 0, command
    assert f"tff-dpftrl {command}" in said.getvalue()
"""
    )
    assert done.returncode == 0, done.stderr


@_of_every_module
def test_figures_are_made_in_one_module(path):
    prefixes = ("matplotlib.backends", "matplotlib.pyplot")
    assert not any(name.startswith(prefixes) for name in _imports(path)), "ask pictures for it."


@_of_every_module
def test_keras_is_behind_one_module(path):
    attributes = {attribute for _, attribute in _names(path).attributes}
    assert "keras" not in attributes or path.name == "keras_versions.py"
    assert not {"keras", "tf_keras"} & {name.split(".")[0] for name in _imports(path)}


def test_the_blocker_blocks():
    done = _run_blocked("import tensorflow")
    assert done.returncode != 0
    assert "tensorflow is blocked" in done.stderr
