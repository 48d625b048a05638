"""Tests that understated strategies are found and sound ones are not, and of classes in files."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tff_dpftrl
from tff_dpftrl.auditing import strategy as strategy_check
from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    noise_recipe,
    restarts,
    serialization,
    tree,
)
from tff_dpftrl.mechanisms import strategy as strategy_lib

_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "how_to" / "custom_mechanisms.md"
_SCHEMA = tff_dpftrl.MinSep(24, 6, 4)
_BLT = blt.Blt((0.95, 0.5), (0.3, 0.2))
_RNG = np.random.default_rng(3)
_LAG = np.subtract.outer(np.arange(24), np.arange(24))
_SIGNED = np.where(_LAG > 0, _RNG.normal(size=_LAG.shape) / 4, 0.0) + np.eye(24)
_SOUND = {
    "identity": identity.Identity(),
    "blt": _BLT,
    "banded": banded.Banded(
        np.where(np.arange(3) <= np.arange(24)[:, None], 0.4, 0.0) + [0.6, 0, 0]
    ),
    "banded toeplitz": banded_toeplitz.BandedToeplitz.fhu(5),
    "signed toeplitz": banded_toeplitz.BandedToeplitz((1.0, -0.4, 0.3)),
    "inverse banded": inverse_banded.InverseBanded.bisr(4),
    "oscillating": inverse_banded.InverseBanded((1.0, 0.6)),
    "dense": dense.Dense(_SIGNED),
    "tree": tree.Tree(24),
    "vanilla tree": tree.Tree(24, variance_reduction=False),
    "restarted blt": restarts.Restarted(_BLT, (0, 5, 17)),
    "restarted tree": restarts.Restarted(tree.Tree(24), (0, 9)),
}


@pytest.mark.parametrize("name", _SOUND)
def test_strategies_of_this_package_are_consistent(name):
    check = tff_dpftrl.check_strategy(_SOUND[name], _SCHEMA)
    assert not check.is_violated, str(check)
    assert {finding.outcome for finding in check.findings} == {"consistent"}
    check.raise_if_violated()


def test_what_cannot_be_streamed_is_not_tested():
    check = tff_dpftrl.check_strategy(tree.FullTree(), _SCHEMA)
    outcomes = [finding.outcome for finding in check.findings]
    assert outcomes == ["not tested"] + ["consistent"] * 4, str(check)
    assert ": not fully tested (streamed noise)\n" in str(check)


def test_what_refuses_every_test_is_not_consistent():
    def refuse(base, *arguments):
        raise NotImplementedError("no")

    names = ("strategy_matrix", "noise_matrix", "sensitivity", "noise_recipe")
    check = tff_dpftrl.check_strategy(_Changed(_BLT, **dict.fromkeys(names, refuse)), _SCHEMA)
    assert {finding.outcome for finding in check.findings} == {"not tested"}
    assert "planted: not tested\n" in str(check) and not check.is_violated


def _same_noise(base, num_rounds):
    noise = np.zeros([num_rounds, num_rounds])
    noise[:, 0] = 1.0
    return noise


@pytest.mark.parametrize("test", ["sensitivity, all patterns", "sensitivity, strongest pattern"])
def test_noise_that_later_rounds_repeat_is_a_violation(test):
    check = tff_dpftrl.check_strategy(_Changed(_BLT, noise_matrix=_same_noise), _SCHEMA)
    (finding,) = [one for one in check.findings if one.test == test]
    assert finding.outcome == "violated" and "singular" in finding.says, str(check)


class _Changed(strategy_lib.Strategy):
    """Strategy that is another one but for what is planted."""

    mechanism = "planted"

    def __init__(self, base, **planted):
        self._base, self._planted = base, planted

    def _call(self, name, *arguments):
        if name in self._planted:
            return self._planted[name](self._base, *arguments)
        return getattr(self._base, name)(*arguments)

    def strategy_matrix(self, num_rounds):
        return self._call("strategy_matrix", num_rounds)

    def noise_matrix(self, num_rounds):
        return self._call("noise_matrix", num_rounds)

    def sensitivity(self, schema):
        return self._call("sensitivity", schema)

    def prefix_noise_variance(self, num_rounds):
        return self._call("prefix_noise_variance", num_rounds)

    def round_noise_variance(self, num_rounds):
        return self._call("round_noise_variance", num_rounds)

    def noise_recipe(self):
        return self._call("noise_recipe")

    def memory_copies(self, num_rounds):
        return self._call("memory_copies", num_rounds)

    def to_dict(self):
        return {"mechanism": self.mechanism}


def _sensitivity(squared):
    return lambda base, schema: strategy_lib.Sensitivity(squared(base, schema), True, "planted")


def _one(base, schema):
    return base.sensitivity(dataclasses.replace(schema, max_participations=1)).squared


def _gap_for_stride(base, schema):
    wider = min(schema.min_sep + 1, schema.num_rounds)
    return base.sensitivity(dataclasses.replace(schema, min_sep=wider)).squared


def _without_signs(base, schema):
    matrix = base.strategy_matrix(schema.num_rounds)
    patterns = [matrix[:, list(rounds)].sum(axis=1) for rounds in schema.patterns()]
    return max(float(column @ column) for column in patterns)


_SCALED = noise_recipe.BufferedNoise((0.95, 0.5), (0.25, 0.2))
# What is planted: the strategy, and the test that finds it.
_PLANTED = {
    "participations counted once": (
        _Changed(_BLT, sensitivity=_sensitivity(_one)),
        "sensitivity, all patterns",
    ),
    "columns that overlap added as if they did not": (
        _Changed(
            _BLT,
            sensitivity=_sensitivity(
                lambda base, schema: schema.effective_participations * _one(base, schema)
            ),
        ),
        "sensitivity, all patterns",
    ),
    "a gap taken for a stride": (
        _Changed(_BLT, sensitivity=_sensitivity(_gap_for_stride)),
        "sensitivity, all patterns",
    ),
    "opposite updates forgotten": (
        _Changed(
            banded_toeplitz.BandedToeplitz((1.0, -0.4, 0.3)),
            sensitivity=_sensitivity(_without_signs),
        ),
        "sensitivity, all patterns",
    ),
    "one in a thousand too little": (
        _Changed(
            _BLT,
            sensitivity=_sensitivity(lambda base, schema: 0.999 * base.sensitivity(schema).squared),
        ),
        "sensitivity, strongest pattern",
    ),
    "understated in long runs only": (
        _Changed(
            _BLT,
            sensitivity=_sensitivity(
                lambda base, schema: (
                    base.sensitivity(schema).squared * (0.9 if schema.num_rounds > 12 else 1.0)
                )
            ),
        ),
        "sensitivity, strongest pattern",
    ),
    "restarts of the noise that the sensitivity does not know": (
        _Changed(_BLT, noise_recipe=lambda base: restarts.Restarted(base, (0, 12)).noise_recipe()),
        "streamed noise",
    ),
    "a recipe of other numbers": (
        _Changed(_BLT, noise_recipe=lambda base: _SCALED),
        "streamed noise",
    ),
    "independent noise under a correlated matrix": (
        _Changed(_BLT, noise_recipe=lambda base: noise_recipe.IdentityNoise()),
        "streamed noise",
    ),
    "noise of half the size everywhere but in C": (
        _Changed(
            inverse_banded.InverseBanded((1.0, -0.5)),
            noise_matrix=lambda base, n: 0.5 * base.noise_matrix(n),
            noise_recipe=lambda base: noise_recipe.InverseBandedNoise(((0.5, -0.25),)),
        ),
        "noise matrix",
    ),
    "a sensitivity that is no number": (
        _Changed(_BLT, sensitivity=_sensitivity(lambda base, schema: float("nan"))),
        "sensitivity, all patterns",
    ),
    "a flattering loss": (
        _Changed(_BLT, prefix_noise_variance=lambda base, n: 0.9 * base.prefix_noise_variance(n)),
        "losses",
    ),
}


@pytest.mark.parametrize("name", _PLANTED)
def test_what_is_planted_is_found(name):
    strategy, test = _PLANTED[name]
    check = strategy_check.check_strategy(strategy, _SCHEMA)
    found = {finding.test: finding.outcome for finding in check.findings}
    assert found[test] == "violated", str(check)
    with pytest.raises(ValueError, match="VIOLATED"):
        check.raise_if_violated()


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="strategy must be"):
        strategy_check.check_strategy("blt", _SCHEMA)
    with pytest.raises(ValueError, match="streamed_rounds"):
        strategy_check.check_strategy(_BLT, _SCHEMA, streamed_rounds=0)
    with pytest.raises(ValueError, match="num_rounds"):
        strategy_check.check_strategy(_BLT, tff_dpftrl.MinSep(5000, 10, 3))


def _blocks():
    return re.findall(r"```python\n(.*?)```", _PAGE.read_text("utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_page_runs_and_its_mechanisms_pass(capsys):
    pytest.importorskip("tensorflow_federated", reason="the page builds aggregators of TFF")
    names = {"tf": tf}
    for block in _blocks():
        exec(block, names)
    assert "my-two-bands: consistent" in capsys.readouterr().out
    assert "not tested" not in str(names["check"])
    report = tff_dpftrl.audit_aggregator(
        names["aggregator"],
        schema=tff_dpftrl.MinSep(4, 2, 2),
        budget=tff_dpftrl.auditing.aggregator.GameBudget(trials=200, seed=1),
    )
    (clipped,) = [one for one in report.findings if one.test == "what one client adds"]
    assert clipped.outcome == "consistent", clipped


@pytest.fixture
def installed(tmp_path):
    """Folder with the page's strategy as an installed package."""
    (tmp_path / "my_module.py").write_text(_blocks()[0])
    (tmp_path / "my_raising.py").write_text('raise RuntimeError("first line\\nsecond line")')
    (tmp_path / "my_unparsed.py").write_text("this is no Python")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tff_dpftrl.strategies]\n"
        "my-two-bands = my_module:TwoBands\n"
        "other-name = my_module:TwoBands\n"
        "missing = my_module:Missing\n"
        "raising = my_raising:Anything\n"
        "unparsed = my_unparsed:Anything\n"
    )
    return tmp_path


def test_an_installed_class_is_written_and_read(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    import my_module  # noqa: PLC0415

    file = installed / "strategy.json"
    tff_dpftrl.save_strategy(file, my_module.TwoBands(0.25))
    loaded = tff_dpftrl.load_strategy(file)
    assert type(loaded) is my_module.TwoBands and loaded.weight == 0.25

    class Forgetful(my_module.TwoBands):
        def to_dict(self):
            return {"mechanism": self.mechanism, "weight": 0.5 * self.weight}

    with pytest.raises(ValueError, match="nor installed as the entry point"):
        tff_dpftrl.save_strategy(file, Forgetful(0.5))
    monkeypatch.setattr(my_module, "TwoBands", Forgetful)
    with pytest.raises(ValueError, match="does not make again"):
        tff_dpftrl.save_strategy(file, Forgetful(0.5))
    for name, message in (
        ("other-name", "must be a subclass"),
        ("missing", "'missing' .*cannot be loaded"),
        ("raising", "'raising' .*cannot be loaded: RuntimeError: first line.$"),
        ("unparsed", "'unparsed' .*cannot be loaded: SyntaxError"),
    ):
        with pytest.raises(ValueError, match=message):
            serialization.strategy_from_dict({"mechanism": name, "weight": 0.5})
    monkeypatch.setattr(Forgetful, "from_dict", classmethod(lambda cls, values: values))
    with pytest.raises(ValueError, match="must return a Strategy, got a dict"):
        serialization.strategy_from_dict({"mechanism": "my-two-bands", "weight": 0.5})


def test_a_file_cannot_name_code():
    with pytest.raises(ValueError, match="Unknown mechanism 'os:system'"):
        serialization.strategy_from_dict({"mechanism": "os:system"})


def test_commands_know_an_installed_class(installed):
    text = '{"mechanism": "my-two-bands", "weight": 0.25}'
    file = installed / "strategy.json"
    file.write_text(f'{{"format": "tff_dpftrl.strategy", "version": 1, "strategy": {text}}}')
    command = [sys.executable, "-m", "tff_dpftrl.cli.main", "account", "--strategy", str(file)]
    command += ["--rounds", "40", "--min-sep", "4", "--noise-multiplier", "3", "--delta", "1e-6"]
    path = os.pathsep.join(sys.path)
    known = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), path])},
    )
    assert known.returncode == 0, known.stderr
    assert "my-two-bands" in known.stdout
    unknown = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert unknown.returncode == 2 and "Unknown mechanism" in unknown.stderr
