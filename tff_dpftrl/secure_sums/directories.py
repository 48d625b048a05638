"""What a device checks of the keys of its group before it makes a mask or a share of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tff_dpftrl.secure_sums import keys, parameters, refusals, secure_sum_pb2


def check(
    directory: secure_sum_pb2.Directory,
    advertised: secure_sum_pb2.KeyAdvertisement,
    demanded: parameters.Parameters,
) -> dict[int, secure_sum_pb2.KeyAdvertisement]:
    """Refuses a directory that a device does not go on with.

    Args:
      directory: As the server sent it.
      advertised: The keys that this device has made.
      demanded: What it demands.

    Returns:
      The keys of its neighbours, and its own, by increasing index.

    Raises:
      ProtocolRefusedError: If it is refused; the subclass says why.
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
    """Refuses keys that other devices have not made for this session, where a server is active.

    Args:
      members: What `check` returned.
      own_index: Index of this device, whose own keys need no proof.
      session: The session, bound to its context.
      verify: Whether a proof (the second argument) holds for an identity key (the first).

    Raises:
      ProtocolRefusedError: If any is refused; the subclass says why.
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
                f"The identity key of device {index} is not proven to be a genuine device's: "
                "its proof is of another session or key, or by nobody whom this device trusts."
            )
