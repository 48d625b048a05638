"""Groups of devices whose reports are summed securely: what of a task's options fits together.

A round's devices are divided among Aggregators, about equally. Each group's sum is computed by
the protocol of `secure_sums`, or is lost where too few of its devices stay; the sums of groups
are added in the clear.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from tff_dpftrl import validation
from tff_dpftrl.runtime.plans import plan_pb2, secure_report
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.secure_sums import neighbours, parameters, shareholders

if TYPE_CHECKING:
    from tff_dpftrl.runtime.tasks import config as config_lib

ThreatModel = Literal["honest-but-curious", "active-server"]

LARGEST_COMPLETE = 500
"""Devices of a group in which everybody shares secrets with everybody."""
SECURITY_BITS = 40
"""A neighbour graph may show more than a group's sum with a probability of 2 to minus this."""

_CORRUPT_FRACTION = 0.05
_ONLY_SECURE = ("secure_threshold", "secure_neighbours", "secure_corrupt_fraction", "least_group")
_IN_PLANS = {model: in_plan for in_plan, model in secure_report.THREAT_MODELS.items()}
_LEAST_FRACTIONS = {
    parameters.ThreatModel.HONEST_BUT_CURIOUS: ("a half", 1 / 2),
    parameters.ThreatModel.ACTIVE_SERVER: ("two thirds", 2 / 3),
}


def check(config: config_lib.TaskConfig) -> None:
    """Refuses options of secure aggregation that do not fit together.

    Args:
      config: All options, `clients_per_round` and the rest of which were checked.

    Raises:
      ValueError: If so; it names option, value and remedy.
    """
    if config.secure_aggregation is None:
        for name in _ONLY_SECURE:
            if getattr(config, name) is not None:
                raise validation.UsageError(
                    f"{name}={getattr(config, name)!r} has no meaning without secure_aggregation: "
                    "give it ('honest-but-curious' or 'active-server'), or leave this out."
                )
        return
    _check_bits(config)
    _check_threshold(config)
    _check_least_group(config)
    _check_neighbours(config)
    validation.positive("secure_step_timeout", config.secure_step_timeout)


def num_groups(config: config_lib.TaskConfig) -> int:
    """How many groups the devices of a round make, if as many come as are wanted."""
    return math.ceil(config.rounds.wanted / config.devices_per_aggregator)


def least_group(config: config_lib.TaskConfig) -> int:
    """The fewest devices in a group's sum: its share of a round's fewest reports, if not given."""
    if config.least_group is not None:
        return config.least_group
    return max(2, min(config.rounds.least // num_groups(config), _reporting(config)))


def _reporting(config: config_lib.TaskConfig) -> int:
    """The largest `least_group` with which there are so many groups: see `Task.num_groups`."""
    groups, wanted_ = num_groups(config), config.rounds.wanted
    most = math.ceil(wanted_ / groups)
    return next(n for n in range(most, -1, -1) if wanted_ >= groups * n * config.over_selection)


def changes(config: config_lib.TaskConfig) -> dict[str, Any]:
    """What `TaskConfig.resolved` keeps."""
    return {} if config.secure_aggregation is None else {"least_group": least_group(config)}


def wanted(config: config_lib.TaskConfig) -> plan_pb2.SecureAggregation | None:
    """What the plans of a task demand of the sums of its reports; None if nothing."""
    if config.secure_aggregation is None:
        return None
    return plan_pb2.SecureAggregation(
        threat_model=_IN_PLANS[_threat_model(config)],
        least_devices=least_group(config),
        most_devices=config.rounds.wanted,
        least_neighbours=config.secure_neighbours or 0,
    )


def stated(config: config_lib.TaskConfig) -> terms_lib.SecureAggregation | None:
    """What the terms of a task say of it; None if reports are summed in the clear."""
    if config.secure_aggregation is None:
        return None
    _, least = _LEAST_FRACTIONS[_threat_model(config)]
    k = config.secure_neighbours
    return terms_lib.SecureAggregation(
        threat_model=config.secure_aggregation,
        least_group=least_group(config),
        threshold=config.secure_threshold or least,
        neighbours=k,
        corrupt_fraction=None if k is None else _corrupt_fraction(config),
    )


def _threat_model(config: config_lib.TaskConfig) -> parameters.ThreatModel:
    return parameters.ThreatModel(config.secure_aggregation)


def _check_bits(config: config_lib.TaskConfig) -> None:
    name = f"secure_aggregation={config.secure_aggregation!r}"
    if config.secagg_bits is None:
        raise validation.UsageError(
            f"{name} sums integers: give secagg_bits, the bits of one parameter (20 to 24 are "
            "usual)."
        )
    least = (2 * config.rounds.wanted).bit_length()
    if config.secagg_bits < least:
        raise validation.UsageError(
            f"secagg_bits={config.secagg_bits} has no room for the sum of the "
            f"{config.rounds.wanted} devices that a round chooses: raise it to {least} at least, "
            "and to 20 for little rounding."
        )


def _check_threshold(config: config_lib.TaskConfig) -> None:
    if config.secure_threshold is None:
        return
    words, least = _LEAST_FRACTIONS[_threat_model(config)]
    if not least <= config.secure_threshold < 1:
        raise validation.UsageError(
            f"secure_threshold={config.secure_threshold:g} must be {words} or more, and below 1, "
            f"with secure_aggregation={config.secure_aggregation!r}: devices take part in nothing "
            "less. Leave it out for the least."
        )


def _check_least_group(config: config_lib.TaskConfig) -> None:
    groups, least = num_groups(config), least_group(config)
    if least < 2:
        raise validation.UsageError(
            f"least_group={least} must be at least 2: the sum of one device is what it sent."
        )
    fits = _reporting(config)
    if least > fits:
        lower = "lower it, or raise" if fits >= 2 else "no group has fewer than 2: raise"
        raise validation.UsageError(
            f"least_group={least} is above the {fits} devices that report in each of {groups} "
            f"groups, of {config.rounds.wanted} that a round chooses "
            f"(over_selection={config.over_selection:g}): {lower} "
            f"devices_per_aggregator={config.devices_per_aggregator} or "
            f"clients_per_round={config.clients_per_round}."
        )


def _check_neighbours(config: config_lib.TaskConfig) -> None:
    model, k = _threat_model(config), config.secure_neighbours
    largest = math.ceil(config.rounds.wanted / num_groups(config))
    if k is None:
        if largest > LARGEST_COMPLETE:
            remedy = "lower devices_per_aggregator"
            if model is parameters.ThreatModel.HONEST_BUT_CURIOUS:
                remedy += ", or give secure_neighbours"
            raise validation.UsageError(
                f"devices_per_aggregator={config.devices_per_aggregator} makes groups of "
                f"{largest}, and in groups of more than {LARGEST_COMPLETE} it takes too long that "
                f"every device shares secrets with every other one: {remedy}."
            )
        if config.secure_corrupt_fraction is not None:
            raise validation.UsageError(
                f"secure_corrupt_fraction={config.secure_corrupt_fraction:g} is what "
                "secure_neighbours are enough for, and there are none: give these, or leave it out."
            )
        return
    if model is parameters.ThreatModel.ACTIVE_SERVER:
        raise validation.UsageError(
            f"secure_neighbours={k} lets the server draw who shares secrets with whom, and an "
            "active server may draw what suits it: leave it out, with devices_per_aggregator of "
            f"{LARGEST_COMPLETE} or fewer."
        )
    validation.number("secure_corrupt_fraction", _corrupt_fraction(config), at_least=0, below=1)
    if k % 2 or k < 2:
        raise validation.UsageError(
            f"secure_neighbours={k} must be even and at least 2: half of them are on either side "
            "of a device on a ring."
        )
    if k >= least_group(config):
        raise validation.UsageError(
            f"secure_neighbours={k} must be below least_group={least_group(config)}, or there may "
            "be none of so many: lower it, or leave it out to share secrets with all."
        )
    if _insecure(config, largest, k) > -SECURITY_BITS:
        enough = next(
            (
                more
                for more in range(k + 2, min(largest, least_group(config)), 2)
                if _insecure(config, largest, more) <= -SECURITY_BITS
            ),
            None,
        )
        remedy = "raise least_group, or leave this out, with groups that are smaller"
        if enough:
            remedy = f"raise it to {enough}"
        raise validation.UsageError(
            f"secure_neighbours={k} in groups of {largest} could show more than a group's sum with "
            f"a probability above 2**-{SECURITY_BITS}, if secure_corrupt_fraction="
            f"{_corrupt_fraction(config):g} of the devices are in league with the server and "
            f"all but least_group={least_group(config)} drop out: {remedy}."
        )


def _corrupt_fraction(config: config_lib.TaskConfig) -> float:
    given = config.secure_corrupt_fraction
    return _CORRUPT_FRACTION if given is None else given


def _insecure(config: config_lib.TaskConfig, num_devices: int, k: int) -> float:
    """log2 of the probability that more than the sum can be learnt."""
    shares = k + 1
    threshold = shareholders.threshold(
        shares, _threat_model(config), config.secure_threshold or 0.0
    )
    neighbourhood = neighbours.Neighbourhood(num_devices, k, threshold)
    corrupt, least = _corrupt_fraction(config), least_group(config)
    if corrupt * num_devices >= least:
        return 0.0
    # Not what a round can do without: each group's sum is seen before they are added.
    drop_out = 1 - least / num_devices
    return neighbours.failure_probabilities(neighbourhood, corrupt, drop_out).insecure
