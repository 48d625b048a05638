"""Parameters of a secure sum: the devices' demands, to which the server keeps."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import secrets

from tff_dpftrl import validation
from tff_dpftrl.secure_sums import vectors

SESSION_BYTES = 32

NOISE_PARTY_KEY_BYTES = 32

_FOR_CONTEXT = b"tff_dpftrl secure sum: session and context\0"
_FOR_NOISE = b"tff_dpftrl secure sum: what a noise party's noise is for\0"


class ThreatModel(enum.Enum):
    """Assumption about the server.

    HONEST_BUT_CURIOUS: It follows the protocol, and reads what it can.
    ACTIVE_SERVER: It may send any messages; devices recognise each other by identity keys.
    """

    HONEST_BUT_CURIOUS = "honest-but-curious"
    ACTIVE_SERVER = "active-server"

    def least_threshold(self, num_members: int) -> int:
        """Returns the least threshold of a secret's shares (Bonawitz et al. 2017, section 6).

        Args:
          num_members: Number of devices that hold shares of the secret, its owner included.

        Returns:
          More than half of the members. More than two thirds under ACTIVE_SERVER, because the
          server may send different messages to different devices.
        """
        if self is ThreatModel.ACTIVE_SERVER:
            return 2 * num_members // 3 + 1
        return num_members // 2 + 1


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Demands of a device, from its signed plan, to which the server keeps.

    Attributes:
      layout: Layout of the summed vectors.
      threat_model: Assumption about the server.
      least_devices: Least number of devices in a sum, at least 2.
      least_neighbours: Least number of a device's neighbours. None if they must be all others of
        its group, as they must be where the server may be active.
      most_devices: Largest number of devices in a group, for which the moduli have room and
        whose keys a device is ready to check; None for any number.
      noise_parties: Public Ed25519 keys, 32 bytes each, of the parties that add noise to the sum
        (`noise_party`). Without the vector of each of them there is no sum. They are no devices:
        the numbers of devices do not count them.
      noised_plans: Digest of the plans whose noise the parties add; empty without parties.
    """

    layout: vectors.Layout
    threat_model: ThreatModel
    least_devices: int
    least_neighbours: int | None = None
    most_devices: int | None = None
    noise_parties: tuple[bytes, ...] = ()
    noised_plans: bytes = b""

    def __post_init__(self):
        object.__setattr__(self, "layout", tuple(self.layout))
        if not self.layout:
            raise validation.UsageError("layout is empty: name at least one segment.")
        for part in self.layout:
            if not isinstance(part, vectors.Segment):
                raise validation.UsageError(
                    f"layout must be of Segments, got {part!r}: use vectors.Segment."
                )
        if not isinstance(self.threat_model, ThreatModel):
            raise validation.UsageError(
                f"threat_model must be a ThreatModel, got {self.threat_model!r}: use "
                f"{' or '.join(map(str, ThreatModel))}."
            )
        validation.integer(
            "least_devices",
            self.least_devices,
            minimum=2,
            remedy="The sum of one device is its vector.",
        )
        if self.most_devices is not None:
            validation.integer("most_devices", self.most_devices, minimum=self.least_devices)
        if self.least_neighbours is not None:
            validation.integer("least_neighbours", self.least_neighbours, minimum=1)
            if self.threat_model is ThreatModel.ACTIVE_SERVER:
                raise validation.UsageError(
                    f"least_neighbours must be None, got {self.least_neighbours}, where the "
                    "server may be active: it is secure with the complete graph only."
                )
            if self.most_devices is not None and self.least_neighbours >= self.most_devices:
                raise validation.UsageError(
                    f"least_neighbours must be below most_devices={self.most_devices}, got "
                    f"{self.least_neighbours}: no group could have so many."
                )
        object.__setattr__(self, "noise_parties", tuple(self.noise_parties))
        for key in self.noise_parties:
            if not isinstance(key, bytes) or len(key) != NOISE_PARTY_KEY_BYTES:
                raise validation.UsageError(
                    f"noise_parties must be keys of {NOISE_PARTY_KEY_BYTES} bytes, got {key!r}: "
                    "use the raw bytes of a public Ed25519 key."
                )
        if len(set(self.noise_parties)) < len(self.noise_parties):
            twice = next(k for k in self.noise_parties if self.noise_parties.count(k) > 1)
            raise validation.UsageError(
                f"noise_parties has the key {twice.hex()} twice: name each noise party once."
            )

    @property
    def num_steps(self) -> int:
        """Number of steps that follow the devices' keys."""
        return 3 + (self.threat_model is ThreatModel.ACTIVE_SERVER) + bool(self.noise_parties)

    def noise_session(self, session: bytes) -> bytes:
        """Binds a session to everything that devices and noise parties must agree on.

        Args:
          session: Name of the session, from `bound_session`.

        Returns:
          SESSION_BYTES bytes, over which noise parties sign, and from which their masks are
          derived: two sides with another layout, least number of devices, list of noise parties or
          plans refuse each other's keys and share no mask.
        """
        digest = hashlib.sha256(_FOR_NOISE + session)
        numbers = [len(self.layout), *(n for s in self.layout for n in (s.size, s.modulus))]
        for number in (*numbers, self.least_devices):
            digest.update(number.to_bytes(16, "big"))
        digest.update(b"".join([*self.noise_parties, self.noised_plans]))
        return digest.digest()


def new_session() -> bytes:
    """Draws the name of one attempt at one sum: SESSION_BYTES bytes from the operating system."""
    return secrets.token_bytes(SESSION_BYTES)


def bound_session(session: bytes, context: bytes) -> bytes:
    """Binds a session's name to a context that all devices of the sum must have in common.

    Args:
      session: Name of the session, as the server gave it.
      context: Any bytes, such as the model that devices begin with; empty for nothing.

    Returns:
      SESSION_BYTES bytes, from which all keys are derived and over which devices sign: two
      devices with different contexts have no mask in common, and refuse each other's signatures.
    """
    context_digest = hashlib.sha256(context).digest()
    return hashlib.sha256(_FOR_CONTEXT + check_session(session) + context_digest).digest()


def check_session(session: bytes) -> bytes:
    """Returns a session's name after checking its type and length.

    Raises:
      ValueError: If it is not bytes, or not SESSION_BYTES of them.
    """
    if not isinstance(session, bytes):
        raise validation.UsageError(
            f"session must be bytes, got {type(session).__name__}. Use new_session()."
        )
    if len(session) != SESSION_BYTES:
        raise validation.UsageError(
            f"session must have {SESSION_BYTES} bytes, got {len(session)}. Use new_session()."
        )
    return bytes(session)
