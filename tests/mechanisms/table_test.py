"""Tests of the table of mechanisms: defaults, options, restarts."""

import dataclasses
import subprocess
import sys

import pytest

from tff_dpftrl.mechanisms import (
    banded_toeplitz_optimize,
    blt_optimize,
    defaults,
    inverse_banded,
    inverse_banded_optimize,
    restarts,
    table,
    tree,
    workload,
)
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(60, 20, 3)
_LONG = schema_lib.MinSep(400, 100, 4)


@pytest.mark.parametrize("name", table.MECHANISMS)
def test_every_mechanism_is_built_named_and_described(name):
    mechanism = table.MECHANISMS[name]
    strategy = table.build(name, _SCHEMA)
    assert strategy.sensitivity(_SCHEMA).squared >= 3
    assert strategy.max_rounds is None or strategy.max_rounds >= 60
    assert strategy.name and mechanism.summary
    if mechanism.runnable:
        strategy.noise_recipe()
    else:
        with pytest.raises(ValueError, match="cannot be run"):
            strategy.noise_recipe()


@pytest.mark.parametrize("name", table.MECHANISMS)
def test_restarts_are_of_the_longest_block(name):
    starts = restarts.starts(60, every=24, first=10)
    strategy = table.build(name, _SCHEMA, starts=starts)
    assert strategy.starts == (0, 10, 34, 58)
    assert strategy.max_rounds is None or strategy.max_rounds >= 60
    assert strategy.name.endswith(", restarted 3 times")
    block = table.build(name, schema_lib.MinSep(24, 20, 3))
    assert strategy.base.name == block.name
    assert strategy.base.sensitivity(_SCHEMA_OF_A_BLOCK) == block.sensitivity(_SCHEMA_OF_A_BLOCK)


_SCHEMA_OF_A_BLOCK = schema_lib.MinSep(24, 20, 2)


def test_the_defaults_are_those_of_the_optimisers():
    assert table.build("blt", _LONG) == blt_optimize.optimize_blt(_LONG)
    optimal = banded_toeplitz_optimize.optimize_banded_toeplitz(_LONG)
    assert table.build("bandtoep", _LONG) == optimal
    assert optimal.bands == _LONG.min_sep
    assert table.build("bandtoep", _SCHEMA).bands == 20
    assert table.build("bandtoep", schema_lib.MinSep(5, 20, 1)).bands == 5
    assert table.build("bifr", _LONG) == inverse_banded_optimize.optimize_bifr(_LONG)
    assert table.build("bisr", _LONG) == inverse_banded.InverseBanded.bisr(16)
    assert table.build("tree-vanilla", _LONG) == tree.Tree(400, variance_reduction=False)


def test_options_reach_the_optimisers():
    free = table.build("blt", _LONG, table.Options(max_decay=1, buffers=3))
    assert free == blt_optimize.optimize_blt(_LONG, num_buffers=3, max_decay=1)
    assert free.buf_decay[0] > defaults.max_decay(400)
    rms = table.build("blt", _LONG, table.Options(error="rms"))
    assert rms.rms_loss(_LONG) < table.build("blt", _LONG).rms_loss(_LONG)
    worst = table.build("bifr", _LONG, table.Options(error="max", bands=7))
    assert worst.bands == 7
    assert worst.max_loss(_LONG) < table.build("bifr", _LONG, table.Options(bands=7)).max_loss(
        _LONG
    )
    cgd = table.build("lambda-cgd", _LONG, table.Options(correlation=0.5))
    assert cgd == inverse_banded.InverseBanded.lambda_cgd(0.5)
    assert table.build("lambda-cgd", _LONG).rms_loss(_LONG) < cgd.rms_loss(_LONG)
    for name in ("bandmf", "bandtoep", "bandfhu"):
        assert table.build(name, _SCHEMA, table.Options(bands=5)).bands == 5


def test_a_person_is_told_what_a_default_costs():
    heard = []
    table.build("blt", _LONG, notify=heard.append)
    assert not heard
    table.build("blt", _LONG, table.Options(max_decay=1, buffers=4), notify=heard.append)
    assert "ties this BLT to 400 rounds" in heard.pop()
    table.build("blt", _LONG, table.Options(buffers=8), notify=heard.append)
    assert "8 buffers are more" in heard.pop()


@pytest.mark.parametrize("name", table.MECHANISMS)
@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(table.Options)])
def test_an_option_is_taken_or_refused(name, option, tmp_path):
    values = {"error": "max", "buffers": 2, "max_decay": 0.9, "bands": 3, "correlation": 0.5}
    values["checkpoint"] = str(tmp_path / "search.npz")
    values["workload"] = workload.UpdateRule(momentum=0.9).workload(60)
    options = table.Options(**{option: values[option]})
    if option in table.MECHANISMS[name].options:
        assert table.fitting(name, options) == options
        table.build(name, _SCHEMA, options)
    else:
        assert table.fitting(name, options) == table.Options()
        with pytest.raises(ValueError, match=f"{option} is for .*, not for {name}: leave it out"):
            table.build(name, _SCHEMA, options)


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="mechanism must be one of blt, .* got 'magic'"):
        table.build("magic", _SCHEMA)
    with pytest.raises(ValueError, match="error must be 'max' or 'rms', got 'min'"):
        table.Options(error="min")
    with pytest.raises(ValueError, match="error has no meaning"):
        table.build("lambda-cgd", _SCHEMA, table.Options(error="max", correlation=0.5))


def test_names_and_options_need_no_numpy():
    code = (
        "import sys; from tff_dpftrl.mechanisms import table; table.Options(); table.runnable(); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'scipy', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
