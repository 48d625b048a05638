"""Tests of what Bazel's runs of folders ask for."""

import pytest

from tests import run_folder


def test_late_imports_and_data_must_be_declared(tmp_path):
    source, declared = tmp_path / "source", tmp_path / "declared"
    files = {
        "tff_dpftrl/models/lstm.py": "def f():\n    from tff_dpftrl.data import split\n",
        "tff_dpftrl/models/page.css": "",
        "tff_dpftrl/models/README.md": "",
        "tff_dpftrl/data/split.py": "import os\n",
        "tests/models/lstm_test.py": "def test():\n    import tests.data.toy as toy\n",
        "tests/data/toy.py": "",
    }
    for name, text in files.items():
        for folder in (source, declared):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (declared / "tff_dpftrl/models/README.md").unlink()  # Nothing reads it.
    (declared / "tests/__init__.py").touch()  # Bazel's own.
    assert run_folder.undeclared(declared, source) == []
    for name in ("models/page.css", "data/split.py"):
        (declared / "tff_dpftrl" / name).unlink()
    (declared / "tests/data/toy.py").unlink()
    assert run_folder.undeclared(declared, source) == [
        "tests/data/toy.py, for tests/models",
        "tff_dpftrl/data/split.py, for tff_dpftrl/models",
        "tff_dpftrl/models/page.css, for tff_dpftrl/models",
    ]


def test_only_the_last_test_of_all_files_runs(tmp_path, capsys):
    for name in ("one_test.py", "two_test.py"):
        text = "def test_first():\n    assert False\n\n\ndef test_last():\n    pass\n"
        (tmp_path / name).write_text(text)
    plugins = [run_folder.LastTest()]
    assert pytest.main(["-q", f"--rootdir={tmp_path}", str(tmp_path)], plugins=plugins) == 0
    assert "1 passed" in capsys.readouterr().out
