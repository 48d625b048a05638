"""`privacy.png`: the trade-off curve of a statement, and ε against δ. Needs Matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tff_dpftrl import pictures, validation
from tff_dpftrl.accounting import display, gaussian, trade_off

if TYPE_CHECKING:
    from tff_dpftrl.accounting import privacy_statement

Curve = Callable[[np.ndarray], np.ndarray]
"""Function from false positive rates to the smallest false negative rates."""

# Blue, orange and green of Okabe & Ito, which colour-blind readers tell apart; and line styles.
RUN, OTHER, TESTS = ("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "o-")
_POINTS = 401
_FOOTNOTE = (
    "False alarm: a guess says “used” of data that was not. Missed alarm: it says “not used” of "
    "data that was.\nNo test of what is released is below the curve of this run."
)


def draw_trade_off(
    axes: Any, curves: Sequence[tuple[str, tuple[str, str], Curve]], *, chance: str
) -> None:
    """Draws trade-off curves, and that of chance, on square axes from 0 to 1."""
    # Denser at both ends, where the curves are steep.
    rates = np.sin(np.linspace(0.0, np.pi / 2.0, _POINTS)) ** 2
    axes.plot(rates, 1.0 - rates, ":", color="0.4", lw=1.2, label=chance)
    for label, (colour, style), curve in curves:
        axes.plot(rates, curve(rates), style, color=colour, lw=1.8, label=label)
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)


def draw(statement: privacy_statement.PrivacyStatement) -> Any:
    """Draws what a statement promises, in two panels, for a page of 16 cm.

    On the left: missed alarms against false alarms of the best guesses whether one's data was
    used. On the right: δ against ε. A Gaussian mechanism is compared with what its (ε, δ) alone
    says, another run with the Gaussian mechanism of the same (ε, δ).

    A statement without a guarantee is refused.
    """
    of_run, epsilon, delta = statement.trade_off(), statement.epsilon, statement.delta
    if of_run is None or epsilon is None:
        raise validation.UsageError("A statement without a guarantee has no curve to draw.")
    if of_run.mu is not None:
        run_label = f"this run: Gaussian, μ = {display.round_up(of_run.mu, 3)}"
        other, other_label = trade_off.TradeOff(((epsilon, delta),)), "(ε, δ) alone"
    else:
        mu = gaussian.mu(epsilon, delta)
        run_label = "this run" if statement.profile else "this run, by (ε, δ) alone"
        other = trade_off.TradeOff(((epsilon, delta),), mu)
        other_label = f"Gaussian of the same (ε, δ), μ = {mu:.3g}"
    figure = pictures.new_figure(8.6, 4.6)
    left, right = figure.subplots(1, 2)
    draw_trade_off(
        left,
        [
            (other_label, OTHER, other.least_false_negative_rate),
            (run_label, RUN, of_run.least_false_negative_rate),
        ],
        chance="chance",
    )
    wrong = 1.0 - of_run.best_guess()
    share = display.percent_up(of_run.best_guess())
    left.plot([wrong], [wrong], "s", color="black", label=f"guess after a coin: {share} right")
    left.set_xlabel("false alarms (share of data not used)")
    left.set_ylabel("missed alarms (share of data used)")
    left.legend(fontsize=8, loc="upper right")
    epsilons = np.linspace(0.0, max(epsilon, 1e-3), 101)
    for curve, label, (colour, style) in (
        (other, other_label, OTHER),
        (of_run, run_label, RUN),
    ):
        if curve.mu is not None:
            deltas = [gaussian.delta(curve.mu, one) for one in epsilons]
            right.plot(epsilons, deltas, style, color=colour, lw=1.8, label=label)
    if statement.profile:
        right.plot(*zip(*statement.profile, strict=True), "o", color=RUN[0], label=run_label)
    stated = f"stated: ε = {display.round_up(epsilon)}, δ = {display.delta(delta)}"
    right.plot([epsilon], [delta], "D", color="black", label=stated)
    right.set_yscale("log")
    right.set_xlim(left=0.0)
    right.set_xlabel("ε")
    right.set_ylabel("δ")
    right.grid(alpha=0.3)
    right.legend(fontsize=8, loc="lower left")
    figure.suptitle(
        f"{statement.mechanism}: protection of one {statement.unit_of_privacy}", fontsize=11
    )
    figure.supxlabel(_FOOTNOTE, fontsize=8)
    return figure
