"""Chooses sentences about who sees a device's report before it is summed."""

from __future__ import annotations

import decimal
import math

from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.runtime.tasks import secure_groups
from tff_dpftrl.secure_sums import parameters

_SERVERS = {
    "honest-but-curious": "a server that is honest but curious",
    "active-server": "an active server",
}


def who_sees(secure: secure_groups.SecureGroups | None) -> str:
    """Describes from whom reports are hidden, under what conditions, and what is not hidden."""
    if secure is None:
        return sentences.SUMS_ARE_SEEN
    if _is_active(secure):
        against = sentences.HIDDEN_FROM_ACTIVE
    else:
        what = ": updates with the noise, metrics without" if secure.noise_parties else ""
        share, drawn = secure.threshold, "."
        if secure.neighbours is not None:
            share, bits = secure.corrupt_fraction, secure_groups.SECURITY_BITS
            drawn = sentences.NEIGHBOURS_DRAWN.format(bits=bits, neighbours=secure.neighbours)
        against = sentences.HIDDEN_FROM_CURIOUS.format(percent=_percent(share), drawn=drawn)
        against += sentences.SEEN_BY_OTHERS.format(what=what)
    kept = sentences.SECURE_SUMS.format(least=secure.least_group)
    if not secure.noise_parties:
        return f"{kept} {against} {_smallest(secure)} {sentences.NOT_HIDDEN}"
    noised = sentences.NOISE_IN_SUMS.format(parties=_parties(secure), protects=_protects(secure))
    return f"{kept} {against} {noised} {sentences.NOISED_NOT_HIDDEN}"


def _is_active(secure: secure_groups.SecureGroups) -> bool:
    return parameters.ThreatModel(secure.threat_model) is parameters.ThreatModel.ACTIVE_SERVER


def _parties(secure: secure_groups.SecureGroups) -> str:
    number = len(secure.noise_parties)
    return (sentences.A_PARTY if number == 1 else sentences.PARTIES).format(number=number)


def _protects(secure: secure_groups.SecureGroups) -> str:
    number = len(secure.noise_parties)
    said = sentences.A_PARTY_PROTECTS if number == 1 else sentences.PARTIES_PROTECT
    return said.format(number=number)


def _corrupt_share(secure: secure_groups.SecureGroups) -> float:
    return secure.threshold if secure.corrupt_fraction is None else secure.corrupt_fraction


def _hidden_among(secure: secure_groups.SecureGroups) -> int:
    """Counts the other honest reports in the smallest group, with the most colluding devices."""
    least = secure.least_group
    if _is_active(secure):
        return least - 1 - (least - 1) // 3
    # The product may be inexact: the larger number of devices colludes.
    return least - 1 - math.floor(_corrupt_share(secure) * least * (1.0 + 1e-12))


def _smallest(secure: secure_groups.SecureGroups) -> str:
    """Describes how little hides a report in the smallest group, if most collude that may."""
    least, others = secure.least_group, _hidden_among(secure)
    said = sentences.HIDDEN_AMONG_NONE if others < 1 else sentences.HIDDEN_AMONG
    counted = strategy_lib.counted(others, "other report")
    return said.format(least=least, in_league=least - 1 - others, others=counted)


def trust(secure: secure_groups.SecureGroups | None) -> facts_lib.Trust:
    """Returns the trust model of a task: what the server sees, and what not."""
    usual, seen = statement.trust("device", in_one_place=False), who_sees(secure)
    if secure is None:
        return facts_lib.Trust(f"{usual.setting} {seen}", usual.from_whom)
    if secure.noise_parties:
        return facts_lib.Trust(
            f"{sentences.TRUST_WITH_PARTIES} {seen}",
            f"{_protects(secure)} {sentences.FROM_WHOM_WITH_PARTIES}",
        )
    sees = f"{sentences.FROM_OTHERS} {_server_sees(secure)}"
    return facts_lib.Trust(f"{sentences.TRUST_WITH_SECURE_SUMS} {seen}", sees)


def _server_sees(secure: secure_groups.SecureGroups) -> str:
    """Describes in plain words what the server sees; `who_sees` has it in full."""
    if_so = sentences.FEW_IN_LEAGUE
    if not _is_active(secure):
        if_so = sentences.CURIOUS_IN_LEAGUE.format(percent=_percent(_corrupt_share(secure)))
    left = strategy_lib.counted(_hidden_among(secure) + 1, "device")
    text = sentences.SERVER_SEES.format(least=secure.least_group, if_so=if_so, left=left)
    return f"{text} {sentences.CHOSEN_BY_MODEL}" if _is_active(secure) else text


def in_short(secure: secure_groups.SecureGroups | None) -> str:
    """Describes in a few words how reports are summed."""
    if secure is None:
        return "Reports are summed by the server in the clear."
    short = (
        f"Reports are summed securely, against {_SERVERS[secure.threat_model]}, "
        f"{secure.least_group} devices or more in a group's sum."
    )
    if secure.noise_parties:
        return f"{short} {_parties(secure)} within the sum. {_protects(secure)}"
    return short


def _percent(fraction: float) -> str:
    """Formats a share in percent, rounded down, so that it is still an allowed share."""
    down = decimal.Context(prec=3, rounding=decimal.ROUND_DOWN)
    return f"{down.create_decimal(100 * decimal.Decimal(repr(fraction))).normalize():f}"
