"""The server's half of the protocol of Bonawitz et al. 2017 (figure 4), for one group.

The caller of a `Group` hands it messages, drops devices that are gone and ends phases: it has no
clock and no connections. It adds masked vectors as they come and keeps none. In a large group
each device has a few neighbours (Bell et al. 2020, `neighbours`).

A message that the server can tell from an honest one's excludes its sender, and the others go on
while they are enough. The group is lost if too few devices are left, or if a secret cannot be
recovered, for instance because its device has dealt wrong shares. If the server knows this before
it asks for shares, it asks for none. Not thread-safe.

Noise parties (`noise_party`) join with the devices. They are asked for their noise last, when all
other masks are gone: a group that is lost before has used no noise.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Hashable
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.secure_sums import (
    bitmaps,
    keys,
    masks,
    parameters,
    secret_sharing,
    secure_sum_pb2,
    shareholders,
    unmasking,
    vectors,
)


class MessageRefusedError(Exception):
    """The group refused a message, which changes nothing in the sum; the group goes on."""


class GroupLostError(Exception):
    """The group has no sum and cannot get one."""


class Phase(enum.Enum):
    """Phase of a group: the message it waits for; the value is the field of ToServer.

    NOISING, where it waits for the masked vectors of noise parties, is the exception.
    """

    ADVERTISING = "key_advertisement"
    SHARING = "shares"
    MASKING = "masked_vector"
    CONFIRMING = "survivors_signature"
    REVEALING = "revealed_shares"
    NOISING = "noise"
    DONE = "done"
    LOST = "lost"


_Messages = dict[int, secure_sum_pb2.ToDevice]


class Group:
    """Server's state of one group of devices in one session."""

    def __init__(
        self,
        demanded: parameters.Parameters,
        session: bytes,
        *,
        threshold_fraction: float | None = None,
        num_neighbours: int | None = None,
        verify_proof: Callable[[bytes, bytes], bool] | None = None,
        context: bytes = b"",
    ):
        """Begins the phase in which devices join.

        Args:
          demanded: Parameters that the devices demand, and the server keeps to.
          session: Name of the session, from `parameters.new_session`, for this group alone.
          threshold_fraction: Fraction of the shares of a secret, in [0, 1), that is not enough to
            recover it. None for the least that devices accept: a half, or two thirds where the
            server may be active. They never accept less.
          num_neighbours: Number of neighbours of each device, one more where both this and the
            number of devices are odd; None for all others.
          verify_proof: Function that checks whether a proof (the second argument) holds for an
            identity key (the first), where the server may be active. A device that its
            neighbours would refuse is then refused at once, so that they stay.
          context: Bytes that are the same on all devices, such as the model that they begin with.

        Raises:
          ValueError: If an argument is out of range, or no device would accept it.
        """
        self._demanded = demanded
        self._session = parameters.bound_session(session, context)
        self._is_active = demanded.threat_model is parameters.ThreatModel.ACTIVE_SERVER
        self._threshold_fraction = validation.number(
            "threshold_fraction", threshold_fraction or 0.0, at_least=0, below=1
        )
        if num_neighbours is not None:
            validation.integer("num_neighbours", num_neighbours, minimum=1)
            least = demanded.least_neighbours
            if least is None or num_neighbours < least:
                raise validation.UsageError(
                    f"num_neighbours must be {'None' if least is None else f'at least {least}'}, "
                    f"got {num_neighbours}: devices go by least_neighbours of their parameters."
                )
        self._num_neighbours = num_neighbours
        self._verify_proof = verify_proof
        self._phase = Phase.ADVERTISING
        self._lost_because = ""
        self._joined: dict[Hashable, secure_sum_pb2.KeyAdvertisement] = {}
        self._known_keys: set[bytes] = set()
        self._noise_session = demanded.noise_session(self._session)
        self._noise_parties: dict[bytes, tuple[Hashable, secure_sum_pb2.NoisePartyKeys]] = {}
        # Devices by index, from the end of the first phase on; after them the noise parties.
        self._num_devices = 0
        self._names: list[Hashable] = []
        self._indices: dict[Hashable, int] = {}
        self._advertisements: list[secure_sum_pb2.KeyAdvertisement] = []
        self._graph: shareholders.Shareholders | None = None
        self._waiting: set[int] = set()
        self._answered: set[int] = set()
        self._gone: set[int] = set()
        self._sealed: dict[int, dict[int, bytes]] = {}  # Shares, by sender and receiver.
        self._commitments: dict[int, bytes] = {}
        self._senders: set[int] = set()
        self._survivors: set[int] = set()
        self._bitmap = b""
        self._digest = b""
        self._signatures: dict[int, bytes] = {}
        self._seed_shares: dict[int, dict[int, int]] = {}  # By owner and holder.
        self._key_shares: dict[int, dict[int, int]] = {}
        self._sum = masks.MaskedSum(demanded.layout)
        self._total: vectors.Vector | None = None

    @property
    def phase(self) -> Phase:
        """Current phase: the message that the group waits for."""
        return self._phase

    @property
    def _holders(self) -> shareholders.Shareholders:
        if self._graph is None:
            raise GroupLostError("No neighbours are drawn before the devices have joined.")
        return self._graph

    @property
    def outstanding(self) -> frozenset[Hashable]:
        """Devices that may still answer in this phase; none in the first, which all may join."""
        return frozenset(self._names[index] for index in self._waiting)

    @property
    def survivors(self) -> tuple[Hashable, ...]:
        """Devices whose vectors are in the sum; none before all masked vectors have come."""
        return tuple(self._names[index] for index in sorted(self._survivors))

    @property
    def missing_noise_parties(self) -> tuple[bytes, ...]:
        """Public keys of the promised noise parties that have not joined the group."""
        return tuple(p for p in self._demanded.noise_parties if p not in self._noise_parties)

    def total(self) -> vectors.Vector:
        """Returns the sum of the survivors' vectors, modulo each segment's modulus.

        Raises:
          ValueError: If the group is not done.
        """
        if self._total is None:
            why = f" {self._lost_because}" if self._lost_because else ""
            raise validation.UsageError(
                f"The group has no sum: its phase is {self._phase.name}.{why}"
            )
        return self._total

    def receive(self, device: Hashable, message: secure_sum_pb2.ToServer) -> None:
        """Takes a device's message.

        Args:
          device: The caller's name of the device, or of the noise party.
          message: Message that the device sent. Untrusted.

        Raises:
          MessageRefusedError: If it is late, repeated, of another phase or malformed. The sender
            of a malformed one is dropped.
        """
        kind = message.WhichOneof("message")
        if self._phase is Phase.ADVERTISING and kind == "noise_party_keys":
            self._join_as_noise_party(device, message.noise_party_keys)
            return
        awaited = Phase.MASKING if self._phase is Phase.NOISING else self._phase
        if kind != awaited.value:
            raise MessageRefusedError(f"{kind}, where the group is {self._phase.name}.")
        content = getattr(message, kind)
        if self._phase is Phase.ADVERTISING:
            self._join(device, content)
            return
        index = self._indices.get(device)
        if index not in self._waiting:
            raise MessageRefusedError(f"{kind} of a device that may not answer, or has.")
        try:
            _RECEIVERS[self._phase](self, index, content)
        except MessageRefusedError:
            self.drop(device)
            raise
        self._waiting.discard(index)
        self._answered.add(index)

    def drop(self, device: Hashable) -> None:
        """Goes on without a device, and refuses its further messages.

        Its earlier messages count: a masked vector stays in the sum. Only before masked vectors
        are asked for can the others proceed as if it had never joined. Without a noise party that
        has not sent its noise the group is lost; `advance` says so.
        """
        if self._phase is Phase.ADVERTISING:
            keys_ = self._joined.pop(device, None)
            if keys_ is not None:
                self._known_keys -= _all_keys(keys_)
            for party, (name, noise_keys) in list(self._noise_parties.items()):
                if name == device:
                    del self._noise_parties[party]
                    self._known_keys.discard(noise_keys.mask_key)
            return
        index = self._indices.get(device)
        if index is None:
            return
        self._gone.add(index)
        self._waiting.discard(index)
        if self._phase is Phase.SHARING:
            self._answered.discard(index)

    def advance(self) -> dict[Any, secure_sum_pb2.ToDevice]:
        """Ends the phase with the devices that have answered, and begins the next.

        Returns:
          Messages to send, by device; none once the sum is known.

        Raises:
          GroupLostError: If the group cannot go on, with the reason; its secrets are wiped.
          ValueError: If it is done.
        """
        if self._phase is Phase.DONE:
            raise validation.UsageError("The group is done: read its total.")
        if self._phase is Phase.LOST:
            raise GroupLostError(self._lost_because)
        try:
            self._check_noise_parties()
            messages = _ADVANCES[self._phase](self)
        except GroupLostError as error:
            self._phase = Phase.LOST
            self._lost_because = str(error)
            self._wipe()
            raise
        self._answered = set()
        self._waiting = set(messages)
        return {self._names[index]: message for index, message in messages.items()}

    def _wipe(self) -> None:
        self._sum.wipe()
        self._waiting = set()
        self._sealed, self._seed_shares, self._key_shares = {}, {}, {}

    # Keys, neighbours and thresholds.

    def _join(self, device: Hashable, keys_: secure_sum_pb2.KeyAdvertisement) -> None:
        if self._has_joined(device):
            raise MessageRefusedError("A second advertisement of one device.")
        if len(self._joined) == self._demanded.most_devices:
            raise MessageRefusedError(f"The group is full: it has {len(self._joined)} devices.")
        if not keys.is_sound(keys_.encryption_key) or not keys.is_sound(keys_.mask_key):
            raise MessageRefusedError("A public key that is no point of large order.")
        if self._is_active:
            if len(keys_.identity_proof) > keys.MAX_PROOF_BYTES:
                raise MessageRefusedError(f"A proof of more than {keys.MAX_PROOF_BYTES} bytes.")
            if not keys.advertisement_is_signed(self._session, keys_):
                raise MessageRefusedError("Keys that are not signed for this session.")
            if self._verify_proof is not None and not self._verify_proof(
                keys_.identity_key, keys_.identity_proof
            ):
                raise MessageRefusedError("An identity key not proven to be a genuine device's.")
        elif keys_.identity_key or keys_.identity_proof or keys_.signature:
            raise MessageRefusedError("An identity, where the threat model has none.")
        public_keys = _all_keys(keys_)
        if keys_.encryption_key == keys_.mask_key or public_keys & self._known_keys:
            raise MessageRefusedError("A key that occurs twice.")
        keys_.DiscardUnknownFields()  # Otherwise all neighbours would receive them.
        self._known_keys |= public_keys
        self._joined[device] = keys_

    def _has_joined(self, name: Hashable) -> bool:
        return name in self._joined or any(name == own for own, _ in self._noise_parties.values())

    def _join_as_noise_party(self, name: Hashable, keys_: secure_sum_pb2.NoisePartyKeys) -> None:
        if keys_.party not in self._demanded.noise_parties:
            raise MessageRefusedError(
                f"The noise party {keys_.party.hex()}, which the devices were not promised."
            )
        if self._has_joined(name) or keys_.party in self._noise_parties:
            raise MessageRefusedError("A noise party that has joined already.")
        if not keys.is_sound(keys_.mask_key):
            raise MessageRefusedError("A public key that is no point of large order.")
        if not keys.noise_party_is_signed(self._noise_session, keys_):
            raise MessageRefusedError(
                f"The noise party {keys_.party.hex()} has signed for another session, context or "
                "layout, or not at all."
            )
        if keys_.mask_key in self._known_keys:
            raise MessageRefusedError("A key that occurs twice.")
        keys_.DiscardUnknownFields()
        self._known_keys.add(keys_.mask_key)
        self._noise_parties[keys_.party] = name, keys_

    def _check_noise_parties(self) -> None:
        """Checks that no noise party is missing whose noise has not come."""
        gone = {self._names[index] for index in self._gone - self._answered}
        for party in self._demanded.noise_parties:
            if party not in self._noise_parties or self._noise_parties[party][0] in gone:
                raise GroupLostError(
                    f"The noise party {party.hex()} is not in the group: there is no sum without "
                    "its noise."
                )

    def _end_advertising(self) -> _Messages:
        num_devices = self._num_devices = len(self._joined)
        self._check_enough(num_devices, "joined")
        noise_parties = [self._noise_parties[party] for party in self._demanded.noise_parties]
        noise_keys = [keys_ for _, keys_ in noise_parties]
        self._names = [*self._joined, *(name for name, _ in noise_parties)]
        self._indices = {name: index for index, name in enumerate(self._names)}
        self._advertisements = list(self._joined.values())
        self._joined, self._known_keys = {}, set()
        self._graph = shareholders.Shareholders(
            num_devices,
            self._num_neighbours,
            self._demanded.threat_model,
            self._threshold_fraction,
        )
        if self._is_active:
            self._digest = keys.directory_digest(
                num_devices,
                self._holders.thresholds[0],
                enumerate(self._advertisements),
                [keys_.mask_key for keys_ in noise_keys],
            )
        entries = [
            secure_sum_pb2.Directory.Member(index=index, keys=keys_)
            for index, keys_ in enumerate(self._advertisements)
        ]
        messages = {}
        for index, members in enumerate(self._holders.members):
            messages[index] = secure_sum_pb2.ToDevice()
            directory = messages[index].directory
            directory.index = index
            directory.num_devices = num_devices
            directory.threshold = self._holders.thresholds[index]
            directory.members.extend([entries[member] for member in sorted(members)])
            directory.noise_parties.extend(noise_keys)
        self._phase = Phase.SHARING
        return messages

    def _check_enough(self, number: int, what: str) -> None:
        if number < self._demanded.least_devices:
            raise GroupLostError(
                f"{number} devices {what}, where the sum needs {self._demanded.least_devices}."
            )

    # Shares.

    def _receive_shares(self, index: int, shares: secure_sum_pb2.Shares) -> None:
        others = self._holders.members[index] - {index}
        if len(shares.ciphertexts) != len(others) or any(
            len(ciphertext.content) != keys.SEALED_SHARES_BYTES for ciphertext in shares.ciphertexts
        ):
            raise MessageRefusedError(
                f"Other than {len(others)} shares of {keys.SEALED_SHARES_BYTES} bytes."
            )
        if len(shares.self_mask_commitment) != keys.COMMITMENT_BYTES:
            raise MessageRefusedError(f"A commitment of other than {keys.COMMITMENT_BYTES} bytes.")
        sealed = {ciphertext.index: ciphertext.content for ciphertext in shares.ciphertexts}
        if sealed.keys() != others:
            raise MessageRefusedError("Shares for others than the neighbours.")
        self._sealed[index] = sealed
        self._commitments[index] = shares.self_mask_commitment

    def _end_sharing(self) -> _Messages:
        self._senders = self._holders.with_enough(self._answered)
        self._check_enough(len(self._senders), "have sent shares and have enough neighbours left")
        messages = {}
        for index in sorted(self._senders):
            messages[index] = secure_sum_pb2.ToDevice()
            received = messages[index].received_shares
            for other in sorted(self._holders.members[index] & self._senders - {index}):
                received.ciphertexts.add(index=other, content=self._sealed[other][index])
        self._sealed = {}
        self._phase = Phase.MASKING
        return messages

    # Masked vectors.

    def _receive_masked_vector(self, index: int, masked: secure_sum_pb2.MaskedVector) -> None:
        del index  # `_answered` records the sender.
        try:
            vector = vectors.unpack(masked.content, self._demanded.layout)
        except ValueError as error:
            raise MessageRefusedError(f"No masked vector: {error}") from None
        self._sum.add(vector)

    def _end_masking(self) -> _Messages:
        survivors = set(self._answered)
        self._check_enough(len(survivors), "have sent masked vectors")
        answering = survivors - self._gone
        self._check_recoverable(survivors, answering)
        if not self._holders.is_connected(survivors):
            raise GroupLostError(
                "The survivors fall apart into sets that are not neighbours: the server would see "
                "the sum of each set."
            )
        self._survivors = survivors
        self._bitmap = bitmaps.write(survivors, self._num_devices)
        message = secure_sum_pb2.ToDevice(survivors={"bitmap": self._bitmap})
        self._phase = Phase.CONFIRMING if self._is_active else Phase.REVEALING
        return dict.fromkeys(sorted(answering), message)

    def _absent(self, survivors: set[int]) -> list[int]:
        """Returns the devices whose mask keys have to be recovered."""
        return self._holders.with_present_neighbours(self._senders - survivors, survivors)

    def _check_recoverable(self, survivors: set[int], answering: set[int]) -> None:
        for owner in (*survivors, *self._absent(survivors)):
            if not self._holders.recoverable(owner, answering):
                raise GroupLostError(
                    "Too few devices are left that hold shares of one device's secrets: "
                    f"{len(self._holders.members[owner] & answering)}, where it takes "
                    f"{self._holders.thresholds[owner]}."
                )

    # Signatures over the survivors, where the server may be active.

    def _receive_signature(self, index: int, signature: secure_sum_pb2.SurvivorsSignature) -> None:
        if not keys.survivors_are_signed(
            self._session,
            self._digest,
            self._bitmap,
            self._advertisements[index].identity_key,
            signature.signature,
        ):
            raise MessageRefusedError("A signature that is not over these keys and survivors.")
        self._signatures[index] = signature.signature

    def _end_confirming(self) -> _Messages:
        answering = self._answered - self._gone
        self._check_recoverable(self._survivors, answering)
        message = secure_sum_pb2.ToDevice()
        for index, signature in sorted(self._signatures.items()):
            message.survivors_signatures.signatures.add(index=index, signature=signature)
        self._phase = Phase.REVEALING
        return dict.fromkeys(sorted(answering), message)

    # Shares of the secrets from which the masks come that are left in the sum.

    def _receive_revealed(self, index: int, revealed: secure_sum_pb2.RevealedShares) -> None:
        known = self._holders.members[index] & self._senders
        both = (
            (revealed.of_self_masks, known & self._survivors, self._seed_shares),
            (revealed.of_mask_keys, known - self._survivors, self._key_shares),
        )
        for shares, asked_for, _ in both:
            owners = {share.index for share in shares}
            if len(shares) > len(owners) or not owners <= asked_for:
                raise MessageRefusedError("Shares that were not asked for, or two of one secret.")
            if any(len(share.share) != secret_sharing.SHARE_BYTES for share in shares):
                raise MessageRefusedError(
                    f"A share of other than {secret_sharing.SHARE_BYTES} bytes."
                )
        for shares, _, kept in both:
            for share in shares:
                value = int.from_bytes(share.share, "big")
                if value < secret_sharing.PRIME:
                    kept.setdefault(share.index, {})[index] = value

    def _end_revealing(self) -> _Messages:
        revealed = (*self._seed_shares.values(), *self._key_shares.values())
        num_revealed = collections.Counter(itertools.chain.from_iterable(revealed))
        unmasker = unmasking.Unmasker(self._session, num_revealed)
        for owner in sorted(self._survivors):
            self._check_recovered(
                unmasker.recover_self_mask(
                    owner,
                    self._seed_shares.get(owner, {}),
                    self._holders.points[owner],
                    self._holders.thresholds[owner],
                    self._commitments[owner],
                ),
                owner,
                len(self._seed_shares.get(owner, {})),
            )
        for owner in self._absent(self._survivors):
            others = self._holders.members[owner] & self._survivors
            self._check_recovered(
                unmasker.recover_pair_masks(
                    owner,
                    self._key_shares.get(owner, {}),
                    self._holders.points[owner],
                    self._holders.thresholds[owner],
                    self._advertisements[owner].mask_key,
                    {other: self._advertisements[other].mask_key for other in sorted(others)},
                ),
                owner,
                len(self._key_shares.get(owner, {})),
            )
        unmasker.unmask(self._sum)
        if not self._demanded.noise_parties:
            return self._finish()
        self._seed_shares, self._key_shares = {}, {}
        message = secure_sum_pb2.ToDevice()
        for index in sorted(self._survivors):
            message.noise_request.devices.add(
                index=index, encryption_key=self._advertisements[index].encryption_key
            )
        self._phase = Phase.NOISING
        return dict.fromkeys(range(self._num_devices, len(self._names)), message)

    # Noise, by which the last masks go.

    def _end_noising(self) -> _Messages:
        for index in range(self._num_devices, len(self._names)):
            if index not in self._answered:
                raise GroupLostError(
                    f"The noise party {self._names[index]!r} has not sent its noise: there is no "
                    "sum without it."
                )
        return self._finish()

    def _finish(self) -> _Messages:
        self._total = self._sum.value()
        self._wipe()
        self._phase = Phase.DONE
        return {}

    def _check_recovered(self, is_recovered: bool, owner: int, num_shares: int) -> None:
        if not is_recovered:
            what = "too few" if num_shares < self._holders.thresholds[owner] else "too many wrong"
            raise GroupLostError(
                f"A secret of device {self._names[owner]!r} cannot be recovered: {what} shares "
                f"among the {num_shares} revealed, where it takes "
                f"{self._holders.thresholds[owner]}. Others cannot read its shares if it has "
                "another session or context."
            )


def _all_keys(keys_: secure_sum_pb2.KeyAdvertisement) -> set[bytes]:
    return {keys_.encryption_key, keys_.mask_key, keys_.identity_key} - {b""}


_RECEIVERS: dict[Phase, Callable[..., None]] = {
    Phase.SHARING: Group._receive_shares,
    Phase.MASKING: Group._receive_masked_vector,
    Phase.CONFIRMING: Group._receive_signature,
    Phase.REVEALING: Group._receive_revealed,
    Phase.NOISING: Group._receive_masked_vector,
}
_ADVANCES: dict[Phase, Callable[..., _Messages]] = {
    Phase.ADVERTISING: Group._end_advertising,
    Phase.SHARING: Group._end_sharing,
    Phase.MASKING: Group._end_masking,
    Phase.CONFIRMING: Group._end_confirming,
    Phase.REVEALING: Group._end_revealing,
    Phase.NOISING: Group._end_noising,
}
