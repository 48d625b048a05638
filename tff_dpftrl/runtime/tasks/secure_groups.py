"""Groups of devices whose reports are summed securely: which options fit together.

The devices of a round are divided among Aggregators, about equally. Each group's sum is computed
by the protocol of `secure_sums`. It is lost where too few devices of the group stay. The sums of
the groups are added in the clear.

The command line reads these options; it imports neither protocol buffers nor cryptography.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.secure_sums import neighbours as neighbours_lib
from tff_dpftrl.secure_sums import parameters, shareholders

if TYPE_CHECKING:
    from tff_dpftrl.runtime.plans import plan_pb2
    from tff_dpftrl.runtime.tasks import terms

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
_LEAST_FRACTIONS = {
    parameters.ThreatModel.HONEST_BUT_CURIOUS: ("a half", 1 / 2),
    parameters.ThreatModel.ACTIVE_SERVER: ("two thirds", 2 / 3),
}


@dataclasses.dataclass(frozen=True)
class SecureGroups:
    """Groups of a round in which the devices of a task sum their reports."""

    threat_model: ThreatModel  # A value of `secure_sums.parameters.ThreatModel`.
    rounds: population.RoundSettings  # `devices_per_aggregator` is the largest size of a group.
    secagg_bits: int | None  # Bits of one parameter of an encoded update; None is refused.
    given_least_group: int | None = None  # None: a group's share of the fewest reports.
    # Share of a group, more than which has to stay to the end; None for the least that the threat
    # model allows.
    secure_threshold: float | None = None
    secure_neighbours: int | None = None  # Number of a device's neighbours; None for all.
    # Share of the devices that may collude with the server, for which `secure_neighbours` are
    # enough; None for 0.05.
    secure_corrupt_fraction: float | None = None
    noise_parties: tuple[str, ...] = ()  # Raw public keys, hexadecimal.

    def __post_init__(self):
        self._check_noise_parties()
        self._check_bits()
        self._check_threshold()
        self._check_least_group()
        self._check_neighbours()

    @property
    def num_groups(self) -> int:
        """Number of groups of a round that chooses as many devices as wanted."""
        return math.ceil(self.rounds.wanted / self.rounds.devices_per_aggregator)

    @property
    def least_group(self) -> int:
        """Fewest devices in a group's sum."""
        if self.given_least_group is not None:
            return self.given_least_group
        return max(2, min(self.rounds.least // self.num_groups, self._reporting))

    def demanded(self) -> plan_pb2.SecureAggregation:
        """Returns what the plans of a task demand of the sums of its reports."""
        from tff_dpftrl.runtime.plans import plan_pb2

        return plan_pb2.SecureAggregation(
            threat_model=plan_pb2.SecureAggregation.ThreatModel.Value(self._model.name),
            least_devices=self.least_group,
            most_devices=self.rounds.wanted,
            least_neighbours=self.secure_neighbours or 0,
            noise_parties=map(bytes.fromhex, self.noise_parties),
        )

    def stated(self) -> terms.SecureAggregation:
        """Returns what the terms of a task state of the sums of its reports."""
        from tff_dpftrl.runtime.tasks import terms

        _, least = _LEAST_FRACTIONS[self._model]
        k = self.secure_neighbours
        return terms.SecureAggregation(
            threat_model=self.threat_model,
            least_group=self.least_group,
            threshold=self.secure_threshold or least,
            neighbours=k,
            corrupt_fraction=None if k is None else self._corrupt_fraction,
            noise_parties=self.noise_parties,
        )

    @property
    def _model(self) -> parameters.ThreatModel:
        return parameters.ThreatModel(self.threat_model)

    @property
    def _largest_group(self) -> int:
        return math.ceil(self.rounds.wanted / self.num_groups)

    @property
    def _reporting(self) -> int:
        """The largest `least_group` that leaves `num_groups` groups: see `Task.num_groups`."""
        wanted, groups = self.rounds.wanted, self.num_groups
        return next(
            n
            for n in range(self._largest_group, -1, -1)
            if wanted >= groups * n * self.rounds.over_selection
        )

    @property
    def _corrupt_fraction(self) -> float:
        given = self.secure_corrupt_fraction
        return _CORRUPT_FRACTION if given is None else given

    def _check_noise_parties(self) -> None:
        """Refuses parties that cannot hide the one sum of a round."""
        if not self.noise_parties:
            return
        for key in self.noise_parties:
            if self.noise_parties.count(key) > 1:
                raise validation.UsageError(
                    f"noise_party has the key {key[:16]} twice: two parties protect from a server "
                    "that colludes with one of them only if they are two. Name each once."
                )
        if len(self.noise_parties) > MOST_PARTIES:
            raise validation.UsageError(
                f"noise_party names {len(self.noise_parties)} parties, and each adds the whole "
                f"noise: name {MOST_PARTIES} at most."
            )
        for key in self.noise_parties:
            if not _is_public_key(bytes.fromhex(key)):
                raise validation.UsageError(
                    f"noise_party has {key}, which is no public key of Ed25519, and no party could "
                    "sign with its private key: give the KEY.pub of tff-dpftrl noise-party new-key."
                )
        wanted = self.rounds.wanted
        if wanted > LARGEST_NOISED:
            raise validation.UsageError(
                f"noise_party needs one group a round, and clients_per_round="
                f"{self.rounds.goal_count} with over_selection={self.rounds.over_selection:g} "
                f"choose {wanted} devices: lower one of these until it is {LARGEST_NOISED}, the "
                "most of one group."
            )
        if self.num_groups > 1:
            raise validation.UsageError(
                f"noise_party needs one group a round, since each group's sum would take the whole "
                f"noise, and devices_per_aggregator={self.rounds.devices_per_aggregator} makes "
                f"{self.num_groups} of {wanted} devices: raise it to {wanted}"
                + (", with secure_neighbours." if wanted > LARGEST_COMPLETE else ".")
            )

    def _check_bits(self) -> None:
        name, wanted = f"secure_aggregation={self.threat_model!r}", self.rounds.wanted
        if self.secagg_bits is None:
            raise validation.UsageError(
                f"{name} sums integers: give secagg_bits, the bits of one parameter (20 to 24 are "
                "usual)."
            )
        least = (2 * wanted).bit_length()
        if self.secagg_bits < least:
            raise validation.UsageError(
                f"secagg_bits={self.secagg_bits} has no room for the sum of the {wanted} devices "
                f"that a round chooses: raise it to {least} at least, and to 20 for little "
                "rounding."
            )

    def _check_threshold(self) -> None:
        if self.secure_threshold is None:
            return
        words, least = _LEAST_FRACTIONS[self._model]
        if not least <= self.secure_threshold < 1:
            raise validation.UsageError(
                f"secure_threshold={self.secure_threshold:g} must be {words} or more, and below 1, "
                f"with secure_aggregation={self.threat_model!r}: devices refuse less. Leave it out "
                "for the least."
            )

    def _check_least_group(self) -> None:
        least, fits = self.least_group, self._reporting
        if least < 2:
            raise validation.UsageError(
                f"least_group={least} must be at least 2: the sum of one device is its report."
            )
        if least > fits:
            lower = "lower it, or raise" if fits >= 2 else "no group has fewer than 2: raise"
            rounds = self.rounds
            raise validation.UsageError(
                f"least_group={least} is above the {fits} devices that report in each of "
                f"{self.num_groups} groups, of {rounds.wanted} that a round chooses "
                f"(over_selection={rounds.over_selection:g}): {lower} "
                f"devices_per_aggregator={rounds.devices_per_aggregator} or "
                f"clients_per_round={rounds.goal_count}."
            )

    def _check_neighbours(self) -> None:
        k, least = self.secure_neighbours, self.least_group
        if k is None:
            self._check_complete()
            return
        if self._model is parameters.ThreatModel.ACTIVE_SERVER:
            raise validation.UsageError(
                f"secure_neighbours={k} lets the server draw who shares secrets with whom, and an "
                "active server may draw what suits it: leave it out, with devices_per_aggregator "
                f"of {LARGEST_COMPLETE} or fewer."
            )
        validation.number("secure_corrupt_fraction", self._corrupt_fraction, at_least=0, below=1)
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
        if self._log2_insecure(k) > -SECURITY_BITS:
            self._refuse_neighbours(k)

    def _check_complete(self) -> None:
        """Refuses options that do not fit groups in which each device shares secrets with all."""
        if self._largest_group > LARGEST_COMPLETE:
            remedy = "lower devices_per_aggregator"
            if self._model is parameters.ThreatModel.HONEST_BUT_CURIOUS:
                remedy += ", or give secure_neighbours"
            raise validation.UsageError(
                f"devices_per_aggregator={self.rounds.devices_per_aggregator} makes groups of "
                f"{self._largest_group}, and in groups of more than {LARGEST_COMPLETE} it takes "
                f"too long that every device shares secrets with every other one: {remedy}."
            )
        if self.secure_corrupt_fraction is not None:
            raise validation.UsageError(
                f"secure_corrupt_fraction={self.secure_corrupt_fraction:g} is what "
                "secure_neighbours are enough for, and there are none: give these, or leave it out."
            )

    def _refuse_neighbours(self, k: int) -> None:
        """Refuses too few neighbours, with the number that would be enough."""
        larger = range(k + 2, min(self._largest_group, self.least_group), 2)
        enough = next((n for n in larger if self._log2_insecure(n) <= -SECURITY_BITS), None)
        remedy = "raise least_group, or leave this out, with groups that are smaller"
        if enough:
            remedy = f"raise it to {enough}"
        raise validation.UsageError(
            f"secure_neighbours={k} in groups of {self._largest_group} could show more than a "
            f"group's sum with a probability above 2**-{SECURITY_BITS}, if secure_corrupt_fraction="
            f"{self._corrupt_fraction:g} of the devices collude with the server and all but "
            f"least_group={self.least_group} drop out: {remedy}."
        )

    def _log2_insecure(self, k: int) -> float:
        """Returns log2 of the probability that more than the sum can be learnt."""
        num_devices, least = self._largest_group, self.least_group
        threshold = shareholders.threshold(k + 1, self._model, self.secure_threshold or 0.0)
        neighbourhood = neighbours_lib.Neighbourhood(num_devices, k, threshold)
        corrupt = self._corrupt_fraction
        if corrupt * num_devices >= least:
            return 0.0
        # A round that goes on without a group is no help: its sum is seen before sums are added.
        drop_out = 1 - least / num_devices
        return neighbours_lib.failure_probabilities(neighbourhood, corrupt, drop_out).insecure


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
