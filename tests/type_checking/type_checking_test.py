"""Type checkers read the public names: they accept the code of the pages, and find mistakes."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MISTAKES = pathlib.Path(__file__).with_name("planted_mistakes.py")
_PAGES = [
    page
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")))
    if "```python\n" in page.read_text("utf-8")
]
_CHECKED = ("README.md", "drop_in.md", "dp_ftrl.md")  # By default; all take twice as long.
# Names that a page leaves to its reader, with their types; Any may be anything.
_GIVEN = {
    "README.md": {
        "schema": "tff_dpftrl.MinSep",
        "model_fn": "Any",
        "as_before": "dict[str, Any]",
    },
    "drop_in.md": {
        "model_fn": "Any",
        "devices": "list[str]",
        "client_data": "Any",
        "held_out_data": "Any",
    },
    "auditing.md": {
        "aggregator": "tff_dpftrl.DPFTRLFactory",
        "client_optimizer_fn": "Any",
        "cohort_of_round": "Any",
        "delta": "float",
        "model": "tff.learning.models.FunctionalModel",
        "my_factory": "tff.aggregators.UnweightedAggregationFactory",
        "statement": "tff_dpftrl.PrivacyStatement",
    },
    "distribution.md": {
        "process": "Any",
        "dataset_fn": "Any",
        "spec": "Any",
        "client_tensors": "Any",
        "client_datasets": "Any",
    },
    "from_flower.md": {"strategy": "Any", "DifferentialPrivacyServerSideFixedClipping": "Any"},
    "finetuning.md": {"frame": "Any"},
    "migration.md": {"record_specs": "Any"},
    "private_processes.md": {
        "process": "tff.learning.templates.LearningProcess",
        "client_optimizer": "Any",
        "model_fn": "Any",
        "ours": "tff_dpftrl.DPFTRLFactory",
    },
}
# What a line that is no mistake has in it, by the page: TFF types an argument too narrowly, and
# PyTorch and a reader's package are not in the environment.
_ALLOWED = {
    "checkpoints.md": "transformers",
    "private_processes.md": "metrics_aggregator=no_metrics",
    "other_frameworks.md": "torch",
    "mechanism_in_a_sweep.md": "my_package",
}
_LAZY = ("tff_dpftrl", "tff_dpftrl.aggregators", "tff_dpftrl.execution")


def _code(page: pathlib.Path) -> str:
    """The Python of a page, as one module; of examples with prompts what is typed."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    parser = doctest.DocTestParser()
    return "\n".join(
        "".join(example.source for example in parser.get_examples(block)) or block
        for block in blocks
    )


def _module(page: pathlib.Path) -> str:
    """The Python of a page below the names that it leaves to its reader."""
    given = _GIVEN.get(page.name, {})
    return "".join(
        [
            "from typing import Any\n",
            "import tensorflow as tf\n" if page.name != "custom_models.md" else "",
            "import tensorflow_federated as tff\nimport tff_dpftrl\n",
            "def _given() -> Any: ...\n",
            *(f"{name}: {its_type} = _given()\n" for name, its_type in given.items()),
            _code(page),
        ]
    )


def _check(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Returns the findings of the type checker in a folder, by the name of the file."""
    (folder / "pyrightconfig.json").write_text(
        json.dumps(
            {
                "extraPaths": [str(_ROOT)],
                "pythonVersion": "3.11",
                "typeCheckingMode": "basic",
                # What is planted, and what a page shows, is an expression of no use now and then.
                "reportUnusedExpression": False,
            }
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.stdout, done.stderr.decode()  # Of an environment without basedpyright.
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    findings: dict[str, list[dict]] = {}
    for finding in report["generalDiagnostics"]:
        findings.setdefault(pathlib.Path(finding["file"]).name, []).append(finding)
    return findings


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([page for page in _PAGES if page.name in _CHECKED], id="some pages"),
        pytest.param(_PAGES, id="all pages", marks=pytest.mark.slow),
    ],
)
def pages(request):
    return request.param


@pytest.fixture(scope="module")
def findings(pages, tmp_path_factory):
    """Findings by page, and those of the planted mistakes, in one run of the checker."""
    pytest.importorskip("tensorflow_federated", reason="pages use its types")
    folder = tmp_path_factory.mktemp("checked")
    (folder / _MISTAKES.name).write_text(_MISTAKES.read_text("utf-8"), "utf-8")
    for page in pages:
        (folder / f"{page.stem}.py").write_text(_module(page), "utf-8")
    return _check(folder)


def test_the_code_of_pages_has_no_type_errors(findings, pages):
    wrong = {}
    for page in pages:
        lines = _module(page).splitlines()
        for finding in findings.get(f"{page.stem}.py", []):
            line = lines[finding["range"]["start"]["line"]].strip()
            if page.name not in _ALLOWED or _ALLOWED[page.name] not in line:
                wrong[page.name, line] = finding["message"]
    assert not wrong


def test_every_planted_mistake_is_found_and_nothing_else(findings):
    lines = _MISTAKES.read_text("utf-8").splitlines()
    planted = {number for number, line in enumerate(lines, 1) if "# mistake" in line}
    found = {finding["range"]["start"]["line"] + 1 for finding in findings[_MISTAKES.name]}
    assert len(planted) >= 25
    assert {lines[n - 1] for n in planted - found} == set()
    assert {lines[n - 1] for n in found - planted} == set()


def _names_for_checkers(module: str) -> dict[str, str]:
    """Where a module's imports for type checkers find each name, as `module:name`."""
    source = pathlib.Path(importlib.import_module(module).__file__).read_text("utf-8")
    found = {}
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom)
                for alias in line.names:
                    found[alias.asname or alias.name] = f"{line.module}:{alias.name}"
    return found


@pytest.mark.parametrize("module", _LAZY)
def test_checkers_and_python_look_in_the_same_modules(module):
    package = importlib.import_module(module)
    named = _names_for_checkers(module)
    assert sorted(named) == sorted(set(package.__all__) - {"__version__"})
    assert len(set(package.__all__)) == len(package.__all__)
    for name, place in named.items():
        home, _, original = package._MODULE_OF.get(name, "").partition(":")
        if home:
            assert place == f"tff_dpftrl.{home}:{original or name}"
        else:  # A folder of the package.
            assert place == f"tff_dpftrl:{name}"
            assert getattr(package, name) is importlib.import_module(f"tff_dpftrl.{name}")


def test_the_top_offers_every_folder_of_the_package():
    import tff_dpftrl

    root = pathlib.Path(tff_dpftrl.__file__).parent
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert folders <= set(tff_dpftrl.__all__)
    assert (root / "py.typed").exists()
