"""Runs how-to pages: a mechanism in a package of its own, and loops of other frameworks."""

import importlib
import pathlib
import re
import sys

import pytest

import tff_dpftrl
from tff_dpftrl.cli import main

_PAGES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "how_to"


def _blocks(page: str, language: str = "python") -> list[str]:
    text = (_PAGES / page).read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package of the page, as an installer leaves it: modules and metadata on the path."""
    (toml,) = _blocks("mechanism_in_a_sweep.md", "toml")
    code, *_ = _blocks("custom_mechanisms.md")
    table = toml.partition('[project.entry-points."tff_dpftrl.strategies"]\n')[2]
    entry = table.replace('"', "")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "my_module.py").write_text(code)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[tff_dpftrl.strategies]\n{entry}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_files_of_a_mechanism_in_a_package_are_known_to_commands(package, capsys):
    (code,) = _blocks("mechanism_in_a_sweep.md")
    exec(code, {})
    assert {file.name for file in package.glob("*.json")} == {
        "two_bands_0.3.json",
        "two_bands_0.6.json",
    }
    command = next(
        line
        for block in _blocks("mechanism_in_a_sweep.md", "sh")
        for line in block.splitlines()
        if line.startswith("tff-dpftrl account")
    )
    assert main.main(command.split()[1:]) == 0
    assert "my-two-bands" in capsys.readouterr().out


def test_without_the_package_the_message_says_what_is_missing(package, monkeypatch, capsys):
    (code,) = _blocks("mechanism_in_a_sweep.md")
    exec(code, {})
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(package)])
    schema = ["--rounds", "30", "--min-sep", "8", "--noise-multiplier", "1"]
    assert main.main(["account", "--strategy", "two_bands_0.3.json", *schema]) == 2
    assert "Unknown mechanism 'my-two-bands'" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["from_opacus.md", "from_jax_privacy.md", "from_flower.md"])
def test_the_noise_for_other_frameworks_has_the_epsilon_of_the_page(page):
    code = next(block for block in _blocks(page) if "NoiseStream" in block)
    names: dict = {}
    exec(code, names)
    stream, schema = names["stream"], names["schema"]
    assert stream.round_index == 1
    delta = 1e-5 if page == "from_flower.md" else 1e-6
    assert 7.0 < stream.guarantee(schema, delta=delta).epsilon <= 8.0


def test_the_aggregator_in_place_of_that_of_tff_has_a_guarantee():
    before, after = _blocks("from_tff_dp.md")
    names = {"tff": pytest.importorskip("tensorflow_federated"), "tff_dpftrl": tff_dpftrl}
    exec(before, names)
    exec(after, names)
    claim = names["aggregator"].guarantee(names["schema"], delta=1e-10)
    assert 4.0 < claim.epsilon < 4.5
