"""Groups of devices whose reports are summed securely: their options, and which fit together.

The devices of a round are divided among Aggregators, about equally. Each group's sum is computed
by the protocol of `secure_sums`. It is lost where too few devices of the group stay. The sums of
the groups are added in the clear.

The command line reads these options; it imports neither protocol buffers nor cryptography.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, Literal

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.secure_sums import neighbours as neighbours_lib
from tff_dpftrl.secure_sums import parameters, shareholders

if TYPE_CHECKING:
    from tff_dpftrl.runtime.plans import plan_pb2

ThreatModel = Literal["honest-but-curious", "active-server"]

LARGEST_COMPLETE = 500
"""Largest number of devices of a group in which each shares secrets with all others."""
LARGEST_NOISED = 5000
"""Largest number of devices of a group with noise parties, which is the group of a whole round."""
MOST_PARTIES = 8
"""Largest number of noise parties of a task."""
SECURITY_BITS = 40
"""Negative log2 of the probability with which neighbour graphs may reveal more than a sum."""

_CORRUPT_FRACTION = 0.05
_KEY = re.compile("[0-9a-f]{64}")
_LEAST_FRACTIONS = {
    parameters.ThreatModel.HONEST_BUT_CURIOUS: ("a half", 1 / 2),
    parameters.ThreatModel.ACTIVE_SERVER: ("two thirds", 2 / 3),
}


@dataclasses.dataclass(frozen=True)
class SecureGroups:
    """Groups in which the devices of a task sum their reports, as its signed terms state them."""

    threat_model: str  # Behaviour of the server: a value of `secure_sums.parameters.ThreatModel`.
    least_group: int  # Smallest number of devices in the sum of a group.
    threshold: float  # Share of the holders of a secret's shares, more than which recover it.
    neighbours: int | None = None  # Number of a device's neighbours; None for its whole group.
    # Share of the devices that may collude with the server, for which `neighbours` were chosen;
    # None without `neighbours`.
    corrupt_fraction: float | None = None
    # Raw public keys, hexadecimal, of the parties that each add the whole noise within the sum, so
    # that the server sees no sum of updates without it; empty if the server adds it.
    noise_parties: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "noise_parties", tuple(self.noise_parties))
        parameters.ThreatModel(self.threat_model)
        validation.integer("least_group", self.least_group, minimum=2)
        validation.number("threshold", self.threshold, at_least=0.5, below=1)
        if (self.neighbours is None) != (self.corrupt_fraction is None):
            raise validation.UsageError(
                f"neighbours={self.neighbours} and corrupt_fraction={self.corrupt_fraction} go "
                "together: give both or neither."
            )
        if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in self.noise_parties):
            raise validation.UsageError(
                f"noise_parties must be keys of 64 hexadecimal digits, got {self.noise_parties!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values; those of earlier versions without noise parties."""
        values = dataclasses.asdict(self)
        if not self.noise_parties:
            del values["noise_parties"]
        return values

    def demanded(self, most_devices: int) -> plan_pb2.SecureAggregation:
        """Returns what plans demand of sums that have room for the reports of `most_devices`."""
        from tff_dpftrl.runtime.plans import plan_pb2

        model = parameters.ThreatModel(self.threat_model)
        return plan_pb2.SecureAggregation(
            threat_model=plan_pb2.SecureAggregation.ThreatModel.Value(model.name),
            least_devices=self.least_group,
            most_devices=most_devices,
            least_neighbours=self.neighbours or 0,
            noise_parties=map(bytes.fromhex, self.noise_parties),
        )


def of_rounds(
    rounds: population.RoundSettings,
    threat_model: ThreatModel,
    *,
    secagg_bits: int | None,
    least_group: int | None,
    neighbours: int | None,
    corrupt_fraction: float | None,
    noise_parties: tuple[str, ...],
) -> SecureGroups:
    """Chooses the groups of a task's rounds by its options, or refuses options that do not fit.

    The default of `least_group` is a group's share of the fewest reports, and that of
    `corrupt_fraction` 0.05. Without `secagg_bits`, the bits of one parameter of an encoded update,
    there are none. `rounds.devices_per_aggregator` is the largest size of a group.
    """
    _check_noise_parties(rounds, noise_parties)
    _check_bits(rounds.wanted, threat_model, secagg_bits)
    threshold = _threshold(rounds.secure_threshold, threat_model)
    reporting = _reporting(rounds)
    if least_group is None:
        least_group = max(2, min(rounds.least // _num_groups(rounds), reporting))
    if least_group > reporting:
        lower = "lower it, or raise" if reporting >= 2 else "no group has fewer than 2: raise"
        raise validation.UsageError(
            f"least_group={least_group} is above the {reporting} devices that report in each of "
            f"{_num_groups(rounds)} groups, of {rounds.wanted} that a round chooses "
            f"(over_selection={rounds.over_selection:g}): {lower} "
            f"devices_per_aggregator={rounds.devices_per_aggregator} or "
            f"clients_per_round={rounds.goal_count}."
        )
    if neighbours is None:
        _check_complete(rounds, threat_model, corrupt_fraction)
    elif corrupt_fraction is None:
        corrupt_fraction = _CORRUPT_FRACTION
    groups = SecureGroups(
        threat_model, least_group, threshold, neighbours, corrupt_fraction, noise_parties
    )
    if neighbours is not None:
        _check_neighbours(groups, neighbours, _largest_group(rounds))
    return groups


def _num_groups(rounds: population.RoundSettings) -> int:
    """Returns the number of groups of a round that chooses as many devices as wanted."""
    return math.ceil(rounds.wanted / rounds.devices_per_aggregator)


def _largest_group(rounds: population.RoundSettings) -> int:
    return math.ceil(rounds.wanted / _num_groups(rounds))


def _reporting(rounds: population.RoundSettings) -> int:
    """Returns the largest `least_group` that leaves the number of groups: see `Task.num_groups`."""
    groups = _num_groups(rounds)
    return next(
        n
        for n in range(_largest_group(rounds), -1, -1)
        if rounds.wanted >= groups * n * rounds.over_selection
    )


def _check_noise_parties(rounds: population.RoundSettings, keys: tuple[str, ...]) -> None:
    """Refuses parties that cannot hide the one sum of a round."""
    if not keys:
        return
    for key in keys:
        if keys.count(key) > 1:
            raise validation.UsageError(
                f"noise_party has the key {key[:16]} twice: two parties protect from a server "
                "that colludes with one of them only if they are two. Name each once."
            )
    if len(keys) > MOST_PARTIES:
        raise validation.UsageError(
            f"noise_party names {len(keys)} parties, and each adds the whole noise: name "
            f"{MOST_PARTIES} at most."
        )
    for key in keys:
        if not _is_public_key(bytes.fromhex(key)):
            raise validation.UsageError(
                f"noise_party has {key}, which is no public key of Ed25519, and no party could "
                "sign with its private key: give the KEY.pub of tff-dpftrl noise-party new-key."
            )
    wanted, groups = rounds.wanted, _num_groups(rounds)
    if wanted > LARGEST_NOISED:
        raise validation.UsageError(
            f"noise_party needs one group a round, and clients_per_round={rounds.goal_count} with "
            f"over_selection={rounds.over_selection:g} choose {wanted} devices: lower one of these "
            f"until it is {LARGEST_NOISED}, the most of one group."
        )
    if groups > 1:
        raise validation.UsageError(
            "noise_party needs one group a round, since each group's sum would take the whole "
            f"noise, and devices_per_aggregator={rounds.devices_per_aggregator} makes {groups} of "
            f"{wanted} devices: raise it to {wanted}"
            + (", with secure_neighbours." if wanted > LARGEST_COMPLETE else ".")
        )


def _check_bits(wanted: int, threat_model: str, bits: int | None) -> None:
    if bits is None:
        raise validation.UsageError(
            f"secure_aggregation={threat_model!r} sums integers: give secagg_bits, the bits of one "
            "parameter (20 to 24 are usual)."
        )
    least = (2 * wanted).bit_length()
    if bits < least:
        raise validation.UsageError(
            f"secagg_bits={bits} has no room for the sum of the {wanted} devices that a round "
            f"chooses: raise it to {least} at least, and to 20 for little rounding."
        )


def _threshold(given: float | None, threat_model: str) -> float:
    words, least = _LEAST_FRACTIONS[parameters.ThreatModel(threat_model)]
    if given is None:
        return least
    if not least <= given < 1:
        raise validation.UsageError(
            f"secure_threshold={given:g} must be {words} or more, and below 1, with "
            f"secure_aggregation={threat_model!r}: devices refuse less. Leave it out for the least."
        )
    return given


def _check_complete(
    rounds: population.RoundSettings, threat_model: str, corrupt_fraction: float | None
) -> None:
    """Refuses options that do not fit groups in which each device shares secrets with all."""
    largest = _largest_group(rounds)
    if largest > LARGEST_COMPLETE:
        remedy = "lower devices_per_aggregator"
        if parameters.ThreatModel(threat_model) is parameters.ThreatModel.HONEST_BUT_CURIOUS:
            remedy += ", or give secure_neighbours"
        raise validation.UsageError(
            f"devices_per_aggregator={rounds.devices_per_aggregator} makes groups of {largest}, "
            f"and in groups of more than {LARGEST_COMPLETE} it takes too long that every device "
            f"shares secrets with every other one: {remedy}."
        )
    if corrupt_fraction is not None:
        raise validation.UsageError(
            f"secure_corrupt_fraction={corrupt_fraction:g} is what secure_neighbours are enough "
            "for, and there are none: give these, or leave it out."
        )


def _check_neighbours(groups: SecureGroups, k: int, largest: int) -> None:
    """Refuses neighbours that are not enough, or do not fit groups of up to `largest` devices."""
    least, corrupt = groups.least_group, groups.corrupt_fraction or 0.0
    if parameters.ThreatModel(groups.threat_model) is parameters.ThreatModel.ACTIVE_SERVER:
        raise validation.UsageError(
            f"secure_neighbours={k} lets the server draw who shares secrets with whom, and an "
            "active server may draw what suits it: leave it out, with devices_per_aggregator "
            f"of {LARGEST_COMPLETE} or fewer."
        )
    validation.number("secure_corrupt_fraction", corrupt, at_least=0, below=1)
    if k % 2 or k < 2:
        raise validation.UsageError(
            f"secure_neighbours={k} must be even and at least 2: half of them are on either "
            "side of a device on a ring."
        )
    if k >= least:
        raise validation.UsageError(
            f"secure_neighbours={k} must be below least_group={least}, since the smallest "
            "group has no more: lower it, or leave it out to share secrets with all."
        )
    if _is_insecure(groups, k, largest):
        larger = range(k + 2, min(largest, least), 2)
        enough = next((n for n in larger if not _is_insecure(groups, n, largest)), None)
        remedy = "raise least_group, or leave this out, with groups that are smaller"
        if enough:
            remedy = f"raise it to {enough}"
        raise validation.UsageError(
            f"secure_neighbours={k} in groups of {largest} could show more than a group's sum with "
            f"a probability above 2**-{SECURITY_BITS}, if secure_corrupt_fraction={corrupt:g} of "
            "the devices collude with the server and all but "
            f"least_group={least} drop out: {remedy}."
        )


def _is_insecure(groups: SecureGroups, k: int, num_devices: int) -> bool:
    """Returns whether more than a sum can be learnt with a probability that is too large."""
    model, corrupt = parameters.ThreatModel(groups.threat_model), groups.corrupt_fraction or 0.0
    threshold = shareholders.threshold(k + 1, model, groups.threshold)
    neighbourhood = neighbours_lib.Neighbourhood(num_devices, k, threshold)
    if corrupt * num_devices >= groups.least_group:
        return True
    # A round that goes on without a group is no help: its sum is seen before sums are added.
    drop_out = 1 - groups.least_group / num_devices
    log2 = neighbours_lib.failure_probabilities(neighbourhood, corrupt, drop_out).insecure
    return log2 > -SECURITY_BITS


_PRIME = 2**255 - 19
_CURVE_D = -121665 * pow(121666, -1, _PRIME) % _PRIME


def _is_public_key(raw: bytes) -> bool:
    """Returns whether bytes are a point of Ed25519 that is not of small order (RFC 8032, 5.1).

    With a point of small order signatures can be forged without any private key.
    """
    y = int.from_bytes(raw, "little") % 2**255
    if y >= _PRIME:
        return False
    for is_doubled in (False, True, True):
        # From -x² + y² = 1 + d x² y²; the y of the doubled point needs x² only.
        squared_x = (y * y - 1) * pow(_CURVE_D * y * y + 1, -1, _PRIME) % _PRIME
        if not is_doubled and pow(squared_x, (_PRIME - 1) // 2, _PRIME) > 1:
            return False  # No square.
        y = (y * y + squared_x) * pow(2 - y * y + squared_x, -1, _PRIME) % _PRIME
    return y != 1
