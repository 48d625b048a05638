"""Line charts as inline SVG: in the colours of the page, and in words for screen readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tff_dpftrl.reports import markup

MOST_SERIES = 8
"""Number of curves that can be told apart: later ones are left out, and named as left out."""

_WIDTH, _HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 40
_MOST_POINTS = 400
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "4 2", "10 4", "1 3", "12 3 2 3 2 3")


def chart(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    percent: bool = False,
    levels: Mapping[str, float] | None = None,
) -> str:
    """Draws curves.

    Args:
      title: What is shown, in a few words.
      curves: Points by label, sorted by their first coordinate; empty curves are left out.
      x: Name of the horizontal axis.
      y: Name of the vertical axis, with its unit.
      percent: Whether values are shares, shown in %.
      levels: Horizontal lines, by label; none by default.

    Returns:
      A figure in HTML; "" if there is no point.
    """
    curves = {label: _thinned(points) for label, points in curves.items() if points}
    if not curves:
        return ""
    shown = dict(list(curves.items())[:MOST_SERIES])
    levels = levels or {}
    across = [a for points in shown.values() for a, _ in points]
    along = [b for points in shown.values() for _, b in points] + list(levels.values())
    at_x, at_y = _axis(across), _axis([0.0, *along] if min(along) >= 0.0 else along)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        a = (point[0] - at_x[0]) / (at_x[-1] - at_x[0])
        b = (point[1] - at_y[0]) / (at_y[-1] - at_y[0])
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + a * width, 1), round(_TOP + (1 - b) * height, 1)

    parts = []
    for value in at_y:
        height = place((at_x[0], value))[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {height}H{_WIDTH - _RIGHT}"/>')
        parts.append(_label(_LEFT - 6, height + 4, _number(value, percent), "end"))
    for value in at_x:
        parts.append(
            _label(place((value, at_y[0]))[0], _HEIGHT - _BOTTOM + 16, _number(value), "middle")
        )
    parts.append(_label((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x, "middle"))
    for number, value in enumerate(levels.values()):
        height = place((at_x[0], value))[1]
        parts.append(f'<path class="level l{number % 4}" d="M{_LEFT} {height}H{_WIDTH - _RIGHT}"/>')
    for number, points in enumerate(shown.values()):
        places = [place(point) for point in points]
        line = "L".join(f"{a} {b}" for a, b in places)
        dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        parts.append(f'<path class="curve c{number}"{dash} d="M{line}"/>')
        if len(places) <= 40:
            parts += [
                f'<circle class="dot c{number}" cx="{a}" cy="{b}" r="2.5"/>' for a, b in places
            ]
    said = [
        f"{label}: from {_number(points[0][1], percent)} at {x} {points[0][0]:g} to "
        f"{_number(points[-1][1], percent)} at {x} {points[-1][0]:g}"
        for label, points in shown.items()
    ]
    said += [f"{label}: {_number(value, percent)}" for label, value in levels.items()]
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{markup.text(f"{title}. {y} by {x}. " + "; ".join(said))}.">'
        f"{''.join(parts)}</svg>"
    )
    return markup.element(
        "figure",
        markup.element("figcaption", f"{markup.text(title)} <span>({markup.text(y)})</span>")
        + picture
        + _legend(shown, levels, percent, len(curves) - len(shown)),
    )


def _legend(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    levels: Mapping[str, float],
    percent: bool,
    num_left_out: int,
) -> str:
    keys = []
    for number, (label, points) in enumerate(curves.items()):
        dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        key = f'<path class="curve c{number}"{dash} d="M0 6H28"/>'
        keys.append((key, f"{label}, at last {_number(points[-1][1], percent)}"))
    for number, (label, value) in enumerate(levels.items()):
        key = f'<path class="level l{number % 4}" d="M0 6H28"/>'
        keys.append((key, f"{label} {_number(value, percent)}"))
    lines = [
        f'<li><svg viewBox="0 0 28 12" aria-hidden="true">{key}</svg>{markup.text(label)}</li>'
        for key, label in keys
    ]
    if num_left_out:
        lines.append(f"<li>{num_left_out} more are not drawn.</li>")
    return markup.element("ul", "".join(lines), class_="legend")


def _label(a: float, b: float, text: str, anchor: str) -> str:
    return f'<text x="{a:g}" y="{b:g}" text-anchor="{anchor}">{markup.text(text)}</text>'


def _number(value: float, percent: bool = False) -> str:
    if percent:
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns evenly chosen points, the last one among them."""
    step = math.ceil(len(points) / _MOST_POINTS)
    return list(points[::-1][::step])[::-1]


def _axis(values: Sequence[float]) -> list[float]:
    """Returns round values from below the least to above the greatest one."""
    least, most = min(values), max(values)
    span = (most - least) or abs(most) or 1.0
    raw = span / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(k * unit for k in (1, 2, 2.5, 5, 10) if k * unit >= raw * 0.999)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]
