"""A noise party's half of a secure sum: it adds noise, and without it there is no sum.

A noise party has no data. Anybody who has its noise can subtract it from what is released, even a
single party. It makes a key for one session, and signs it with the key that devices were promised.
Each device adds a mask that it has in common with the party. At the end, the server names the
devices of the sum. The party answers once: with its noise, less its masks of these devices. Only
the sum of exactly these devices, with the whole noise, has none of the masks left.

The masks come from the devices' encryption keys. Nobody gets shares of these, unlike the secrets of
other masks. So the noise rests on the party and on each device alone:

- A server may lie about survivors, draw the graph, or collude with any number of devices: it sees
  no sum of vectors without noise. It may choose of which devices the one noised sum is.
- A device that drops out before the sum is not among those named, and leaves no mask behind.
- A group that is lost before the party has answered has used no noise.

Two parties hide a sum from a server that colludes with one of them. A party that colludes with the
server takes away its own noise, and nothing else.

The caller must never use noise twice. The context must name all that the noise depends on: for
correlated noise the row of the noise, for adaptive clipping the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.secure_sums import keys, masks, parameters, refusals, secure_sum_pb2, vectors


class NoiseParty:
    """Noise party in one session of a group; to be used once.

    Its one secret is the private key of its masks. It is dropped after the answer, and after a
    refusal.
    """

    def __init__(
        self,
        demanded: parameters.Parameters,
        session: bytes,
        signing_key: ed25519.Ed25519PrivateKey,
        draw_noise: Callable[[], vectors.Vector],
        *,
        context: bytes = b"",
        packs_bits: bool = False,
    ):
        """Begins a session.

        Args:
          demanded: Parameters of the sum, from the signed plan.
          session: Name of the session, as the server gave it.
          signing_key: Private key of the party, of which the devices were promised the public half.
          draw_noise: Function that returns the noise, of the layout in `demanded`. It is called
            at most once, when the request of the server has been checked and right before the
            answer. When it returns, the noise must have been recorded as used.
          context: Bytes that must be the same on all devices, such as the model that they begin
            with. They must name all on which the noise depends.
          packs_bits: Whether the masked noise is packed bit by bit (`vectors.pack`).

        Raises:
          ValueError: If this party was not promised, or the session's name has the wrong length.
        """
        party = signing_key.public_key().public_bytes_raw()
        if party not in demanded.noise_parties:
            promised = ", ".join(key.hex() for key in demanded.noise_parties)
            raise validation.UsageError(
                f"signing_key is that of the noise party {party.hex()}, and the plan promises "
                f"{promised or 'none'}: use the key whose public half the plan names."
            )
        self._demanded = demanded
        bound = parameters.bound_session(session, context)
        self._noise_session = demanded.noise_session(bound)
        self._signing_key = signing_key
        self._draw_noise = draw_noise
        self._packs_bits = packs_bits
        self._mask_keys: keys.KeyPair | None = None
        self._has_advertised = False

    def advertise(self) -> secure_sum_pb2.ToServer:
        """Makes the first message: this party's signed key for masks.

        Raises:
          SessionOverError: If it was called before.
        """
        if self._has_advertised:
            raise refusals.SessionOverError("A noise party advertises once: make another one.")
        self._has_advertised = True
        self._mask_keys = keys.KeyPair()
        return secure_sum_pb2.ToServer(
            noise_party_keys=keys.sign_noise_party(
                self._signing_key, self._noise_session, self._mask_keys.public
            )
        )

    def answer(self, message: secure_sum_pb2.ToDevice) -> secure_sum_pb2.ToServer:
        """Answers the server's request with the masked noise, once.

        Args:
          message: Message of the server. Untrusted.

        Returns:
          The answer to send to the server.

        Raises:
          ProtocolRefusedError: If the party refuses; the subclass names the reason. No noise was
            drawn then.
          ValueError: If the noise does not have the layout. It counts as used.
        """
        mask_keys, self._mask_keys = self._mask_keys, None
        if mask_keys is None:
            raise refusals.SessionOverError(
                "A request to a noise party that has not advertised, has answered or has refused: "
                "it answers once in a session."
            )
        devices = self._check(message, mask_keys.public)
        shared = [
            mask_keys.noise_mask_key(self._noise_session, device.index, device.encryption_key)
            for device in devices
        ]
        masked = masks.MaskedSum(self._demanded.layout)
        masked.subtract_masks(shared)
        noise = self._draw_noise()
        vectors.check(noise, self._demanded.layout)
        masked.add(noise)
        content = vectors.pack(masked.value(), self._demanded.layout, in_bits=self._packs_bits)
        masked.wipe()
        return secure_sum_pb2.ToServer(masked_vector=secure_sum_pb2.MaskedVector(content=content))

    def forget(self) -> None:
        """Drops the secret, for a session that is over; a later request is refused."""
        self._has_advertised = True
        self._mask_keys = None

    def _check(
        self, message: secure_sum_pb2.ToDevice, own_key: bytes
    ) -> list[secure_sum_pb2.NoiseRequest.Device]:
        """Returns the devices whose sum the party is to hide, if all its demands are met."""
        kind = message.WhichOneof("message")
        if kind != "noise_request":
            raise refusals.MalformedMessageError(
                f"{kind or 'A message without content'}, where a noise party awaits a request."
            )
        devices = list(message.noise_request.devices)
        if len(devices) < self._demanded.least_devices:
            raise refusals.TooFewDevicesError(
                f"A sum of {len(devices)} devices, where this noise party demands "
                f"{self._demanded.least_devices}."
            )
        most_devices = self._demanded.most_devices
        if most_devices is not None and len(devices) > most_devices:
            raise refusals.TooManyDevicesError(
                f"A sum of {len(devices)} devices, where this noise party hides {most_devices} at "
                "most."
            )
        if any(b.index <= a.index for a, b in zip(devices, devices[1:], strict=False)):
            raise refusals.MalformedMessageError("Indices of the request do not increase.")
        if not all(keys.is_sound(device.encryption_key) for device in devices):
            raise refusals.WeakKeyError("A key of the request is no point of large order.")
        public_keys = {own_key, *(device.encryption_key for device in devices)}
        if len(public_keys) < len(devices) + 1:
            raise refusals.EqualKeysError("Two keys of the request are equal.")
        return devices
