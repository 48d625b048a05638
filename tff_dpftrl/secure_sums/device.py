"""A device's half of the protocol of Bonawitz et al. 2017 (figure 4), for one sum.

A device's vector leaves it under two kinds of masks: a pairwise mask with each neighbour, which
cancel in the sum, and a self-mask. Its neighbours hold shares of the secrets of both. They reveal
the share of the self-mask of a device whose vector is in the sum, and the share of the mask key
of one whose vector is not. They never reveal both of one device: that would expose its vector.

A device checks each message before it answers, and refuses by name (`refusals`). Shares that do
not decrypt are left out instead: the device reveals less, and refuses no group for one neighbour's
bad shares. A group is lost all the same if a secret cannot be recovered.

A device trusts what it cannot check. An honest but curious server forwards keys unchanged. An
active server that changes them is caught by signatures of identity keys, as long as fewer than a
third of the devices collude with it. In a complete graph a device counts the devices of a sum
itself: each of them has sent it shares. With fewer neighbours it relies on the server for those
that are not its neighbours.
"""

from __future__ import annotations

import abc
import enum
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.secure_sums import (
    bitmaps,
    directories,
    keys,
    masks,
    parameters,
    refusals,
    secret_sharing,
    secure_sum_pb2,
    vectors,
)


class Identity(abc.ABC):
    """Proof system for identity keys of genuine devices, where a server may be active."""

    @abc.abstractmethod
    def make_proof(self, identity_public_key: bytes) -> bytes:
        """Proves that a genuine device has made this key, in at most keys.MAX_PROOF_BYTES."""

    @abc.abstractmethod
    def verify(self, identity_public_key: bytes, proof: bytes) -> bool:
        """Checks whether another device's proof holds for its key."""


class _Stage(enum.Enum):
    """Message that the device waits for; the value is the field of ToDevice."""

    UNUSED = "nothing"
    DIRECTORY = "directory"
    RECEIVED_SHARES = "received_shares"
    SURVIVORS = "survivors"
    SURVIVORS_SIGNATURES = "survivors_signatures"
    OVER = "no message"


_STAGES = list(_Stage)

_Secret = TypeVar("_Secret")


def _held(secret: _Secret | None) -> _Secret:
    """Returns a value that the device has at its stage, which `answer` checks before."""
    if secret is None:
        raise refusals.SessionOverError("This device has no secrets of this session.")
    return secret


class Participant:
    """Device in one session of a group; to be used once.

    Its secrets are its random numbers, its keys, its vector and the shares it holds. All are
    dropped after the last answer and after a refusal; arrays are overwritten before. Python
    cannot guarantee that no copy is left in freed memory.
    """

    def __init__(
        self,
        demanded: parameters.Parameters,
        session: bytes,
        vector: Sequence[np.ndarray],
        *,
        identity: Identity | None = None,
        context: bytes = b"",
        packs_bits: bool = False,
    ):
        """Takes a copy of the vector.

        Args:
          demanded: Parameters that the device demands of the sum, from its signed plan.
          session: Name of the session, as the server gave it.
          vector: Vector to sum, of the layout in `demanded`.
          identity: Proof system for identity keys; for an active server only.
          context: Bytes that must be the same on all devices, such as the model that they begin
            with. Devices with other contexts share no masks.
          packs_bits: Whether the masked vector is packed bit by bit (`vectors.pack`).

        Raises:
          ValueError: If the vector does not have the layout, the session's name has the wrong
            length, or the identity is missing or not needed.
        """
        is_active = demanded.threat_model is parameters.ThreatModel.ACTIVE_SERVER
        if is_active != (identity is not None):
            raise validation.UsageError(
                f"identity must be {'given' if is_active else 'None'} where the threat model is "
                f"{demanded.threat_model.value!r}, got {type(identity).__name__}."
            )
        vectors.check(vector, demanded.layout)
        self._demanded = demanded
        self._session = parameters.bound_session(session, context)
        self._noise_session = demanded.noise_session(self._session)
        self._noise_mask_keys: list[bytes] = []  # Public keys of the noise parties.
        self._identity = identity
        self._is_active = is_active
        self._packs_bits = packs_bits
        self._stage = _Stage.UNUSED
        self._survivors: bytes | None = None  # The bitmap from the server; public.
        self._sum = masks.MaskedSum(demanded.layout)
        self._sum.add(list(vector))
        self._channel_keys: keys.KeyPair | None = None
        self._mask_keys: keys.KeyPair | None = None
        self._identity_key: keys.IdentityKey | None = None
        self._advertisement: secure_sum_pb2.KeyAdvertisement | None = None
        self._index = -1
        self._num_devices = 0
        self._threshold = 0
        self._members: dict[int, secure_sum_pb2.KeyAdvertisement] = {}
        self._digest = b""
        self._channels: dict[int, keys.Channel] = {}
        self._seed: int | None = None
        self._own_share = b""
        self._received: dict[int, bytes] = {}

    def advertise(self) -> secure_sum_pb2.ToServer:
        """Makes the first message: this device's public keys.

        Raises:
          SessionOverError: If it was called before.
          ValueError: If the identity's proof is too long.
        """
        if self._stage is not _Stage.UNUSED:
            raise refusals.SessionOverError("A participant advertises once: make another one.")
        try:
            advertisement = self._make_advertisement()
        except BaseException:
            self.forget()
            raise
        self._stage = _Stage.DIRECTORY
        return secure_sum_pb2.ToServer(key_advertisement=advertisement)

    def _make_advertisement(self) -> secure_sum_pb2.KeyAdvertisement:
        self._channel_keys, self._mask_keys = keys.KeyPair(), keys.KeyPair()
        advertisement = secure_sum_pb2.KeyAdvertisement(
            encryption_key=self._channel_keys.public, mask_key=self._mask_keys.public
        )
        if self._identity is not None:
            self._identity_key = keys.IdentityKey()
            advertisement.identity_key = self._identity_key.public
            proof = self._identity.make_proof(self._identity_key.public)
            if len(proof) > keys.MAX_PROOF_BYTES:
                raise validation.UsageError(
                    f"identity must make proofs of at most {keys.MAX_PROOF_BYTES} bytes, got "
                    f"{len(proof)}."
                )
            advertisement.identity_proof = proof
            advertisement.signature = self._identity_key.sign_advertisement(
                self._session, advertisement
            )
        self._advertisement = advertisement
        return advertisement

    def answer(self, message: secure_sum_pb2.ToDevice) -> secure_sum_pb2.ToServer:
        """Answers the server's next message.

        Args:
          message: The server's message. Untrusted.

        Returns:
          The answer to send to the server.

        Raises:
          ProtocolRefusedError: If the device refuses to go on; the subclass names the reason.
        """
        kind = message.WhichOneof("message")
        try:
            self._check_order(kind, message)
            answer = _ANSWERS[self._stage](self, getattr(message, kind))
        except BaseException:
            self.forget()
            raise
        if answer.WhichOneof("message") == "revealed_shares":
            self.forget()
        return answer

    def _check_order(self, kind: str | None, message: secure_sum_pb2.ToDevice) -> None:
        if kind is None:
            raise refusals.MalformedMessageError("A message without content.")
        if kind == "noise_request":
            raise refusals.MalformedMessageError("A request to a noise party, which this is not.")
        if kind == "survivors" and self._survivors not in (None, message.survivors.bitmap):
            raise refusals.BothKindsOfSharesError(
                "Other survivors than before: shares of both secrets would be revealed of a device "
                "that is in only one of the two sets."
            )
        if self._stage in (_Stage.UNUSED, _Stage.OVER):
            raise refusals.SessionOverError(f"{kind}, where this device awaits no message.")
        if kind != self._stage.value:
            is_repeated = _STAGES.index(_Stage(kind)) < _STAGES.index(self._stage)
            error = refusals.RepeatedMessageError if is_repeated else refusals.OutOfOrderError
            raise error(f"{kind}, where this device awaits {self._stage.value}.")

    def forget(self) -> None:
        """Drops all secrets, for a device that leaves; later messages are refused."""
        self._stage = _Stage.OVER
        self._sum.wipe()
        self._channel_keys = self._mask_keys = self._identity_key = None
        self._identity = self._seed = None
        self._channels, self._received, self._own_share = {}, {}, b""

    def _answer_directory(self, directory: secure_sum_pb2.Directory) -> secure_sum_pb2.ToServer:
        self._members = directories.check(directory, _held(self._advertisement), self._demanded)
        self._index, self._num_devices = directory.index, directory.num_devices
        self._threshold = directory.threshold
        self._noise_mask_keys = directories.check_noise_parties(
            directory, self._demanded, self._noise_session
        )
        if self._is_active:
            directories.check_identities(
                self._members, self._index, self._session, _held(self._identity).verify
            )
            self._digest = keys.directory_digest(
                self._num_devices, self._threshold, self._members.items(), self._noise_mask_keys
            )
        self._seed = secrets.randbits(8 * keys.SEED_BYTES)
        shares = secret_sharing.split(
            (self._seed, _held(self._mask_keys).as_int()), self._threshold, len(self._members)
        )
        answer = secure_sum_pb2.Shares()
        _, answer.self_mask_commitment = keys.self_mask(self._seed, self._session, self._index)
        for (index, member), both in zip(self._members.items(), shares, strict=True):
            content = b"".join(share.to_bytes(secret_sharing.SHARE_BYTES, "big") for share in both)
            if index == self._index:
                self._own_share = content[: secret_sharing.SHARE_BYTES]
                continue
            channel = _held(self._channel_keys).channel(
                self._session, self._index, index, member.encryption_key
            )
            self._channels[index] = channel
            answer.ciphertexts.add(index=index, content=channel.seal(content))
        self._stage = _Stage.RECEIVED_SHARES
        return secure_sum_pb2.ToServer(shares=answer)

    def _answer_received_shares(
        self, received: secure_sum_pb2.ReceivedShares
    ) -> secure_sum_pb2.ToServer:
        indices = [ciphertext.index for ciphertext in received.ciphertexts]
        if len(set(indices)) < len(indices) or not self._channels.keys() >= set(indices):
            raise refusals.MalformedMessageError(
                "Shares from a device that is no neighbour, or two of one."
            )
        num_members = len(indices) + 1
        self._check_number(num_members, refusals.TooFewDevicesError, "sent shares")
        self._received = {
            ciphertext.index: ciphertext.content for ciphertext in received.ciphertexts
        }
        self_mask_key, _ = keys.self_mask(_held(self._seed), self._session, self._index)
        key_pair = _held(self._mask_keys)
        mask_keys = {
            index: key_pair.mask_key(
                self._session, self._index, index, self._members[index].mask_key
            )
            for index in indices
        }
        # The device of the lower index adds the mask, the other one subtracts it.
        added = [key for index, key in mask_keys.items() if self._index < index]
        # A noise party subtracts its mask of each device whose sum it hides.
        for_noise = [
            _held(self._channel_keys).noise_mask_key(self._noise_session, self._index, key)
            for key in self._noise_mask_keys
        ]
        self._sum.add_masks([self_mask_key, *for_noise, *added])
        self._sum.subtract_masks([key for index, key in mask_keys.items() if self._index > index])
        content = vectors.pack(self._sum.value(), self._demanded.layout, in_bits=self._packs_bits)
        self._sum.wipe()
        self._channel_keys = self._mask_keys = self._seed = None
        self._stage = _Stage.SURVIVORS
        return secure_sum_pb2.ToServer(masked_vector=secure_sum_pb2.MaskedVector(content=content))

    def _check_number(self, number: int, error: type[Exception], what: str) -> None:
        """Refuses fewer members than the threshold, and in a complete graph than the sum needs."""
        least = self._threshold
        if len(self._members) == self._num_devices:
            least = max(least, self._demanded.least_devices)
        if number < least:
            raise error(
                f"{number} of {len(self._members)} devices {what}, where this device demands "
                f"{least}."
            )

    def _alive(self, bitmap: bytes) -> set[int]:
        try:
            return bitmaps.read(bitmap, self._num_devices)
        except ValueError as error:
            raise refusals.MalformedMessageError(f"Survivors: {error}") from None

    def _answer_survivors(self, survivors: secure_sum_pb2.Survivors) -> secure_sum_pb2.ToServer:
        bitmap = survivors.bitmap
        alive = self._alive(bitmap)
        if self._index not in alive:
            raise refusals.NotASurvivorError("The survivors do not include this device.")
        members = alive & self._members.keys()
        if not members <= self._received.keys() | {self._index}:
            raise refusals.UnknownSurvivorsError("A survivor has never sent shares.")
        self._check_number(len(members), refusals.TooFewSurvivorsError, "survive")
        if len(alive) < self._demanded.least_devices:
            raise refusals.TooFewSurvivorsError(
                f"A sum of {len(alive)} devices, where this device demands "
                f"{self._demanded.least_devices}."
            )
        self._survivors = bitmap
        if not self._is_active:
            return self._reveal()
        self._stage = _Stage.SURVIVORS_SIGNATURES
        return secure_sum_pb2.ToServer(
            survivors_signature=secure_sum_pb2.SurvivorsSignature(
                signature=_held(self._identity_key).sign_survivors(
                    self._session, self._digest, bitmap
                )
            )
        )

    def _answer_survivors_signatures(
        self, signatures: secure_sum_pb2.SurvivorsSignatures
    ) -> secure_sum_pb2.ToServer:
        bitmap = _held(self._survivors)
        alive = self._alive(bitmap)
        signers = [signature.index for signature in signatures.signatures]
        if len(set(signers)) < len(signers) or not alive >= set(signers):
            raise refusals.MalformedMessageError(
                "A signature over the survivors of no survivor, or two of one."
            )
        for signature in signatures.signatures:
            if not keys.survivors_are_signed(
                self._session,
                self._digest,
                bitmap,
                self._members[signature.index].identity_key,
                signature.signature,
            ):
                raise refusals.OtherSurvivorsError(
                    f"Device {signature.index} has signed other keys or survivors than this device "
                    "received."
                )
        number = len({*signers, self._index})
        if number < self._threshold:
            raise refusals.TooFewSignaturesError(
                f"{number} devices signed the survivors, where this device demands "
                f"{self._threshold}."
            )
        return self._reveal()

    def _reveal(self) -> secure_sum_pb2.ToServer:
        """Reveals one share of each member that sent shares; the survivors decide which kind."""
        alive = self._alive(_held(self._survivors))
        revealed = secure_sum_pb2.RevealedShares()
        revealed.of_self_masks.add(index=self._index, share=self._own_share)
        for index, content in self._received.items():
            shares = self._channels[index].open(content)
            if shares is None or len(shares) != 2 * secret_sharing.SHARE_BYTES:
                continue
            if index in alive:
                share = shares[: secret_sharing.SHARE_BYTES]
                revealed.of_self_masks.add(index=index, share=share)
            else:
                share = shares[secret_sharing.SHARE_BYTES :]
                revealed.of_mask_keys.add(index=index, share=share)
        return secure_sum_pb2.ToServer(revealed_shares=revealed)


_ANSWERS: dict[_Stage, Callable[..., secure_sum_pb2.ToServer]] = {
    _Stage.DIRECTORY: Participant._answer_directory,
    _Stage.RECEIVED_SHARES: Participant._answer_received_shares,
    _Stage.SURVIVORS: Participant._answer_survivors,
    _Stage.SURVIVORS_SIGNATURES: Participant._answer_survivors_signatures,
}
