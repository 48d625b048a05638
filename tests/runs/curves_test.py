"""Tests of curves.png: what is drawn, and what is said about it."""

import pytest

from tff_dpftrl.runs import curves

_HELD_OUT = [{"round": 1, "eval_top1_in_vocab": 0.1, "eval_loss": 2.0, "epsilon": 1.0}]


def _footnote(rows, baselines):
    figure = curves.draw(rows, title="title", baselines=baselines)
    return "" if figure._supxlabel is None else figure._supxlabel.get_text()


@pytest.mark.parametrize(
    "rows, baselines",
    [
        ([_HELD_OUT[0] | {"loss": 2.0}], {}),
        ([_HELD_OUT[0] | {"top1": 0.2}], {}),
        (_HELD_OUT, {"bigrams": 0.3}),
    ],
)
def test_exact_figures_carry_a_footnote(rows, baselines):
    assert _footnote(rows, baselines) == curves.EXACT
    assert "do not publish" in curves.EXACT


def test_noised_and_held_out_figures_carry_none():
    assert _footnote(_HELD_OUT, {}) == ""


def test_every_column_and_baseline_is_drawn():
    figure = curves.draw(
        [_HELD_OUT[0] | {"loss": 3.0, "top1": 0.2}], title="title", baselines={"bigrams": 0.3}
    )
    assert [len(axes.lines) for axes in figure.axes] == [3, 2, 1]
    figure = curves.draw(_HELD_OUT, title="title", public_baselines={"pretrained": 0.1})
    assert len(figure.axes[0].lines) == 2 and figure._supxlabel is None


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_baselines_are_told_apart_from_light_to_dark(number):
    baselines = {f"{n}-grams": 0.1 * n for n in range(1, number + 1)}
    figure = curves.draw(_HELD_OUT, title="title", baselines=baselines)
    lines = figure.axes[0].lines[-number:]
    shades = [float(line.get_color()) for line in lines]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == number
    assert shades[0] == 0.7 and shades[-1] == pytest.approx(0.2 if number > 1 else 0.7)
    assert [line.get_label() for line in lines] == list(baselines)


@pytest.mark.pictures
@pytest.mark.parametrize(
    "rows, baselines",
    [
        ([_HELD_OUT[0] | {"loss": 2.0}], {}),
        pytest.param([_HELD_OUT[0] | {"top1": 0.2}], {}, marks=pytest.mark.slow),
        pytest.param(_HELD_OUT, {"bigrams": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_what_is_published_does_not_depend_on_exact_figures(tmp_path, rows, baselines):
    curves.write(tmp_path, _HELD_OUT, title="title")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    public = (tmp_path / "curves.png").read_bytes()
    assert public.startswith(b"\x89PNG")
    curves.write(tmp_path, rows, title="title", baselines=baselines)
    assert (tmp_path / "curves.png").read_bytes() == public
    assert (tmp_path / "private" / "curves.png").read_bytes() not in (b"", public)
