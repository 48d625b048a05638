"""A device's checks of its group's public keys, before it makes masks or shares of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tff_dpftrl.secure_sums import keys, parameters, refusals, secure_sum_pb2


def check(
    directory: secure_sum_pb2.Directory,
    advertised: secure_sum_pb2.KeyAdvertisement,
    demanded: parameters.Parameters,
) -> dict[int, secure_sum_pb2.KeyAdvertisement]:
    """Checks an untrusted directory of public keys against the device's demands.

    Returns the keys of the device and its neighbours, by increasing index. It raises a subclass of
    `ProtocolRefusedError` that names the reason.
    """
    most_devices = demanded.most_devices
    if most_devices is not None and directory.num_devices > most_devices:
        raise refusals.TooManyDevicesError(
            f"A group of {directory.num_devices}, where this device takes part in one of "
            f"{most_devices} at most."
        )
    indices = [member.index for member in directory.members]
    if any(b <= a for a, b in zip(indices, indices[1:], strict=False)):
        raise refusals.MalformedMessageError("Indices of the directory do not increase.")
    if indices and indices[-1] >= directory.num_devices:
        raise refusals.MalformedMessageError(
            f"Device {indices[-1]} in a group of {directory.num_devices}."
        )
    members = {member.index: member.keys for member in directory.members}
    own = members.get(directory.index)
    if own is None or own != advertised:
        raise refusals.OwnKeysReplacedError(
            "The directory does not have the keys that this device has made."
        )
    if directory.num_devices < demanded.least_devices:
        raise refusals.TooFewDevicesError(
            f"A group of {directory.num_devices}, where this device demands "
            f"{demanded.least_devices}."
        )
    least_neighbours = demanded.least_neighbours
    if least_neighbours is None:
        least_neighbours = directory.num_devices - 1
    if len(members) - 1 < least_neighbours:
        raise refusals.TooFewNeighboursError(
            f"{len(members) - 1} neighbours, where this device demands {least_neighbours}."
        )
    least_threshold = demanded.threat_model.least_threshold(len(members))
    if directory.threshold < least_threshold:
        raise refusals.LowThresholdError(
            f"A threshold of {directory.threshold} of {len(members)} shares, where this "
            f"device demands {least_threshold}."
        )
    if directory.threshold > len(members):
        raise refusals.MalformedMessageError(
            f"A threshold of {directory.threshold} of {len(members)} shares."
        )
    public_keys = [
        key for member in members.values() for key in (member.encryption_key, member.mask_key)
    ]
    if not all(map(keys.is_sound, public_keys)):
        raise refusals.WeakKeyError("A key of the directory is no point of large order.")
    if len(set(public_keys)) < len(public_keys):
        raise refusals.EqualKeysError("Two keys of the directory are equal.")
    return members


def check_identities(
    members: Mapping[int, secure_sum_pb2.KeyAdvertisement],
    own_index: int,
    session: bytes,
    verify: Callable[[bytes, bytes], bool],
) -> None:
    """Checks that genuine devices made the keys for this session, for active servers.

    `members` are from `check`; the device's own keys need no proof. `session` is bound to its
    context. `verify(identity_key, proof)` tells whether a proof holds. It raises a subclass of
    `ProtocolRefusedError`.
    """
    identity_keys = [member.identity_key for member in members.values()]
    if len(set(identity_keys)) < len(identity_keys):
        raise refusals.EqualKeysError("Two identity keys of the directory are equal.")
    for index, member in members.items():
        if index == own_index:
            continue
        if not keys.advertisement_is_signed(session, member):
            raise refusals.ForgedKeysError(
                f"Device {index} has not signed these keys for this session."
            )
        if not verify(member.identity_key, member.identity_proof):
            raise refusals.UnprovenIdentityError(
                f"The identity key of device {index} is not proven to be a genuine device's: its "
                "proof is of another session or key, or from an issuer that this device does not "
                "trust."
            )


def check_noise_parties(
    directory: secure_sum_pb2.Directory, demanded: parameters.Parameters, noise_session: bytes
) -> list[bytes]:
    """Checks that the noise parties which the device was promised are in its group.

    `check` must have accepted the directory. Returns the parties' public keys for masks, in the
    order of `demanded`. It raises a subclass of `ProtocolRefusedError` that names the reason.
    """
    promised = demanded.noise_parties
    parties = {keys_.party: keys_ for keys_ in directory.noise_parties}
    for party in promised:
        if party not in parties:
            raise refusals.NoisePartyMissingError(
                f"The noise party {party.hex()} is not in the group."
            )
    if len(directory.noise_parties) > len(promised):
        raise refusals.UnknownNoisePartyError(
            f"{len(directory.noise_parties)} noise parties, where this device was promised "
            f"{len(promised)}."
        )
    for party in promised:
        if not keys.is_sound(parties[party].mask_key):
            raise refusals.WeakKeyError("A noise party's key is no point of large order.")
        if not keys.noise_party_is_signed(noise_session, parties[party]):
            raise refusals.ForgedNoisePartyError(
                f"The noise party {party.hex()} has not signed its key for this sum: it is of "
                "another session, round, model or layout, or the server has made it."
            )
    mask_keys = [parties[party].mask_key for party in promised]
    others = [
        key
        for member in directory.members
        for key in (member.keys.encryption_key, member.keys.mask_key)
    ]
    if len({*mask_keys, *others}) < len(mask_keys) + len(others):
        raise refusals.EqualKeysError("A noise party's key occurs twice in the directory.")
    return mask_keys
