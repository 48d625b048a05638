"""Sentences about who sees a device's report before it is summed.

Each sentence must be true of every task whose terms carry it, and claim no more than is proven.
"""

from __future__ import annotations

import decimal
import math

from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.runtime.tasks import secure_groups
from tff_dpftrl.secure_sums import parameters

SUMS_ARE_SEEN = (
    "Reports were summed by the server in the clear, without secure aggregation: it is trusted "
    "not to look at single reports, nor to keep them."
)
NOT_HIDDEN = (
    "Not hidden are the sums of groups, metrics among them, which are exact and without noise; how "
    "many devices report, drop out and are refused, and when; and the devices' network addresses."
)
NOISED_NOT_HIDDEN = (
    "Not hidden, and without noise, are exact sums of what devices report besides their updates: "
    "metrics, and how often and in which rounds they took part; how many devices report, drop out "
    "and are refused, and when; and the devices' network addresses."
)

_SERVERS = {
    "honest-but-curious": "a server that is honest but curious",
    "active-server": "an active server",
}


def who_sees(secure: secure_groups.SecureGroups | None) -> str:
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
        against = f"{_curious(secure.threshold)} {_seen_by_others(secure)}"
    else:
        against = _curious_with_neighbours(secure.neighbours, secure.corrupt_fraction)
        against = f"{against} {_seen_by_others(secure)}"
    if secure.noise_parties:
        return f"{kept} {against} {who_adds_noise(secure)} {NOISED_NOT_HIDDEN}"
    return f"{kept} {against} {_smallest(secure)} {NOT_HIDDEN}"


def who_adds_noise(secure: secure_groups.SecureGroups) -> str:
    """Describes who adds the noise within the sums, whom that protects from, and what it needs."""
    return (
        f"{_parties(secure)} within the sum of each round, so that the server sees no updates, and "
        f"no sums of updates, without it. {_protects(secure)} This rests on devices' software, "
        "which refuses a sum without a party whose key is in the signed plan; on the holder of the "
        "key that signs plans, who could sign one without; and on each party's keeping its seed "
        "secret, and giving the noise of a round once, which it records before it sends any. A "
        "round whose sum was abandoned after that is skipped, and counts as one of the rounds that "
        "ε is of."
    )


def _parties(secure: secure_groups.SecureGroups) -> str:
    number = len(secure.noise_parties)
    if number == 1:
        return "A noise party, which is another operator without data, adds the noise"
    return (
        f"Each of {number} noise parties, which are other operators without data, adds the whole "
        "noise"
    )


def _protects(secure: secure_groups.SecureGroups) -> str:
    number = len(secure.noise_parties)
    if number == 1:
        return (
            "The noise protects from everybody but the devices and the noise party, which can "
            "subtract it from what is released; from the server, too, unless it colludes with the "
            "noise party."
        )
    return (
        "The noise protects from everybody but the devices, the server included, unless all "
        f"{number} noise parties collude: together they can subtract it from what is released."
    )


def _hidden_among(secure: secure_groups.SecureGroups) -> int:
    """Counts the other honest reports in the smallest group, with the most colluding devices."""
    least = secure.least_group
    if parameters.ThreatModel(secure.threat_model) is parameters.ThreatModel.ACTIVE_SERVER:
        return least - 1 - (least - 1) // 3
    # The product may be inexact: the larger number of devices colludes.
    share = secure.threshold if secure.corrupt_fraction is None else secure.corrupt_fraction
    return least - 1 - math.floor(share * least * (1.0 + 1e-12))


def _smallest(secure: secure_groups.SecureGroups) -> str:
    """Describes how little hides a report in the smallest group, if most collude that may."""
    least, others = secure.least_group, _hidden_among(secure)
    of_group = f"In a group of {least}, with {least - 1 - others} of them in league,"
    if others < 1:
        return f"{of_group} a report is alone in what is left of the sum: it is not hidden."
    counted = strategy_lib.counted(others, "other report")
    return f"{of_group} a report is in one exact sum with {counted}: whoever knows them knows it."


def trust(secure: secure_groups.SecureGroups | None) -> facts_lib.Trust:
    """Returns the trust model of a task: what the server sees, and what not."""
    usual = sentences.trust("device", in_one_place=False)
    if secure is None:
        return facts_lib.Trust(f"{usual.setting} {SUMS_ARE_SEEN}", usual.from_whom)
    if secure.noise_parties:
        return facts_lib.Trust(
            "Differential privacy with noise that the server does not know: it need not be trusted "
            "with updates, nor with their sums. It is trusted to keep secret, and to erase, the "
            f"exact sums of metrics and participation that it sees. {who_sees(secure)}",
            f"{_protects(secure)} It does so however much they know of others. Of metrics and "
            "participation the server sees exact sums, which ε does not cover. All devices of a "
            "sum must follow the algorithm: one that does not can make it wrap around, and then "
            "nothing is proven for the others in it. Trust below has in full on what else this "
            "rests.",
        )
    setting = (
        "Central differential privacy, with secure sums: the server is trusted to run the "
        "mechanism as it is written, to keep secret the sums before noise is added, and the noise "
        "with its seed and state, and to erase them. It need not be trusted with single reports, "
        f"as far as this goes: {who_sees(secure)}"
    )
    return facts_lib.Trust(setting, f"{sentences.FROM_OTHERS} {_server_sees(secure)}")


def _server_sees(secure: secure_groups.SecureGroups) -> str:
    """Describes in plain words what the server sees; `who_sees` has it in full."""
    is_active = parameters.ThreatModel(secure.threat_model) is parameters.ThreatModel.ACTIVE_SERVER
    if is_active:
        if_so = "fewer than a third of these devices are in league with it"
    else:
        share = secure.threshold if secure.corrupt_fraction is None else secure.corrupt_fraction
        if_so = (
            f"it keeps to the protocol, and no more than {_percent(share)} % of these devices are "
            "in league with it"
        )
    left = strategy_lib.counted(_hidden_among(secure) + 1, "device")
    texts = [
        f"The server is not among these: it sees exact sums of what {secure.least_group} devices "
        "or more send, and is trusted to keep them secret.",
        "Of a single device it learns what such a sum tells, and no more, under the conditions "
        f"that Trust below has in full: {if_so}, among others.",
        f"With the most devices in league, the rest of a sum can be of only {left}.",
        "All devices of a sum must follow the algorithm: one that does not can make it wrap "
        "around, and then nothing is proven for the others in it either.",
    ]
    if is_active:
        texts.append("By the model that it sends it can choose what a sum shows.")
    return " ".join(texts)


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


def _curious(threshold: float) -> str:
    return (
        "Single reports are hidden from a server that keeps to the protocol and reads what it "
        f"receives, if no more than {_percent(threshold)} % of a group's devices are in league "
        "with it: together they learn the sum of the group's other devices, and so a report that "
        "is the only other one in it."
    )


def _curious_with_neighbours(neighbours: int, corrupt_fraction: float) -> str:
    return (
        "Single reports are hidden from a server that keeps to the protocol and reads what it "
        f"receives, if no more than {_percent(corrupt_fraction)} % of a group's devices are in "
        "league with it: together they learn the sum of the group's other devices, and so a report "
        "that is the only other one in it, or more with a probability of at most "
        f"2^-{secure_groups.SECURITY_BITS} in each sum. Each device shares "
        f"its secrets with {neighbours} others, drawn at random by the server (Bell et al. 2020); "
        "who is in league with it, and who drops out, must not depend on the draw."
    )


def _seen_by_others(secure: secure_groups.SecureGroups) -> str:
    """Describes what a server sees that deviates from the protocol."""
    what = ": updates with the noise, metrics without" if secure.noise_parties else ""
    return (
        "A server that does not keep to the protocol can see single reports, by keys of its own in "
        "the place of devices', or by telling devices different things about who dropped out"
        f"{what}."
    )


def _active() -> str:
    return (
        "Single reports are hidden from a server that may do anything, under three conditions. "
        "First, fewer than a third of a group's devices are in league with it. A device counts "
        "once for each attestation token under which it takes part, and a genuine device may get "
        "many tokens. Second, neither the issuer of these tokens is in league with it, who can "
        "make up devices, nor the holder of the key that signs plans, who can make other plans. "
        "Third, this key has signed no plan for the devices by which reports are seen, since they "
        "take part in every plan that it has signed. The server and the devices in league with it "
        "learn one sum of the group's other devices, and the server can leave some of these out. "
        "What a sum shows of one device is up to the model that the server sends. It sends the "
        "same one to all devices of a group, but may make it for the purpose."
    )
