"""Sentences about who sees a device's report before it is summed.

Each sentence must be true of every task whose terms carry it, and claim no more than is proven.
"""

from __future__ import annotations

import decimal
import math

from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.runtime.tasks import secure_groups
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.secure_sums import parameters

SUMS_ARE_SEEN = (
    "Reports were summed by the server in the clear, without secure aggregation: it is trusted "
    "not to look at single reports, nor to keep them."
)
NOT_HIDDEN = (
    "Not hidden are the sums of groups, metrics among them, which are exact and without noise; how "
    "many devices report, drop out and are refused, and when; and the devices' network addresses."
)
NOBODY_CHECKS = (
    "Devices clip and encode their updates as the plan says. Where reports are summed securely "
    "nobody sees whether they do: one that does not can make a sum wrap around, and nothing is "
    "proven of such a sum."
)

_SERVERS = {
    "honest-but-curious": "a server that is honest but curious",
    "active-server": "an active server",
}


def who_sees(secure: terms_lib.SecureAggregation | None) -> str:
    """Describes from whom reports are hidden, under what conditions, and what is not hidden."""
    if secure is None:
        return SUMS_ARE_SEEN
    kept = (
        "Reports are summed by secure aggregation (Bonawitz et al. 2017), a group's sum being of "
        f"{secure.least_group} devices or more."
    )
    if parameters.ThreatModel(secure.threat_model) is parameters.ThreatModel.ACTIVE_SERVER:
        against = _active()
    elif secure.neighbours is None:
        against = _curious(secure.threshold)
    else:
        against = _curious_with_neighbours(secure.neighbours, secure.corrupt_fraction)
    return f"{kept} {against} {_smallest(secure)} {NOT_HIDDEN}"


def _smallest(secure: terms_lib.SecureAggregation) -> str:
    """Describes how little hides a report in the smallest group, with the most in league."""
    least = secure.least_group
    if parameters.ThreatModel(secure.threat_model) is parameters.ThreatModel.ACTIVE_SERVER:
        most_in_league = (least - 1) // 3
    else:
        # Of a product that is not exact, the larger number.
        share = secure.threshold if secure.corrupt_fraction is None else secure.corrupt_fraction
        most_in_league = math.floor(share * least * (1.0 + 1e-12))
    others = least - 1 - most_in_league
    of_group = f"In a group of {least}, with {most_in_league} of them in league,"
    if others < 1:
        return f"{of_group} a report is alone in what is left of the sum: it is not hidden."
    counted = strategy_lib.counted(others, "other report")
    return f"{of_group} a report is in one exact sum with {counted}: whoever knows them knows it."


def in_short(secure: terms_lib.SecureAggregation | None) -> str:
    """Describes in a few words how reports are summed."""
    if secure is None:
        return "Reports are summed by the server in the clear."
    return (
        f"Reports are summed securely, against {_SERVERS[secure.threat_model]}, "
        f"{secure.least_group} devices or more in a group's sum."
    )


def assumptions(secure: terms_lib.SecureAggregation | None) -> tuple[str, ...]:
    """Returns the assumptions that secure aggregation adds to a statement."""
    return () if secure is None else (NOBODY_CHECKS,)


def _percent(fraction: float) -> str:
    """Formats a share in percent, rounded down, so that it is still an allowed share."""
    down = decimal.Context(prec=3, rounding=decimal.ROUND_DOWN)
    return f"{down.create_decimal(100 * decimal.Decimal(repr(fraction))).normalize():f}"


def _curious(threshold: float) -> str:
    return (
        "Single reports are hidden from a server that keeps to the protocol and reads what it "
        f"receives, if no more than {_percent(threshold)} % of a group's devices are in league "
        "with it: together they learn the sum of the group's other devices, and so a report that "
        "is the only other one in it. A server that does not keep to the protocol can see single "
        "reports, by keys of its own in the place of devices', or by telling devices different "
        "things about who dropped out."
    )


def _curious_with_neighbours(neighbours: int, corrupt_fraction: float) -> str:
    return (
        "Single reports are hidden from a server that keeps to the protocol and reads what it "
        f"receives, if no more than {_percent(corrupt_fraction)} % of a group's devices are in "
        "league with it: together they learn the sum of the group's other devices, and so a report "
        "that is the only other one in it, or more with a probability of at most "
        f"2^-{secure_groups.SECURITY_BITS} in each sum. Each device shares "
        f"its secrets with {neighbours} others, drawn at random by the server (Bell et al. 2020); "
        "who is in league with it, and who drops out, must not depend on the draw. A server that "
        "does not keep to the protocol can see single reports, by keys of its own in the place of "
        "devices', or by telling devices different things about who dropped out."
    )


def _active() -> str:
    return (
        "Single reports are hidden from a server that may do anything, if fewer than a third of a "
        "group's devices are in league with it, each counted as often as it takes part under "
        "another attestation token, of which a genuine device may get many; if neither the issuer "
        "of these tokens is, who can make up devices, nor the holder of the key that signs plans, "
        "who can make others; and if this key has signed no plan for the devices by which reports "
        "are seen, since they take part in whatever it has signed. Together they learn one sum of "
        "the group's other devices, of which the server can leave some out. What a sum shows of "
        "one device is up to the model that the server sends: to all devices of a group the same "
        "one, which may be made for the purpose."
    )
