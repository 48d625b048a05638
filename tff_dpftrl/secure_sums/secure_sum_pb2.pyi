from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToServer(_message.Message):
    __slots__ = ("key_advertisement", "shares", "masked_vector", "survivors_signature", "revealed_shares", "noise_party_keys")
    KEY_ADVERTISEMENT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    MASKED_VECTOR_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REVEALED_SHARES_FIELD_NUMBER: _ClassVar[int]
    NOISE_PARTY_KEYS_FIELD_NUMBER: _ClassVar[int]
    key_advertisement: KeyAdvertisement
    shares: Shares
    masked_vector: MaskedVector
    survivors_signature: SurvivorsSignature
    revealed_shares: RevealedShares
    noise_party_keys: NoisePartyKeys
    def __init__(self, key_advertisement: _Optional[_Union[KeyAdvertisement, _Mapping]] = ..., shares: _Optional[_Union[Shares, _Mapping]] = ..., masked_vector: _Optional[_Union[MaskedVector, _Mapping]] = ..., survivors_signature: _Optional[_Union[SurvivorsSignature, _Mapping]] = ..., revealed_shares: _Optional[_Union[RevealedShares, _Mapping]] = ..., noise_party_keys: _Optional[_Union[NoisePartyKeys, _Mapping]] = ...) -> None: ...

class ToDevice(_message.Message):
    __slots__ = ("directory", "received_shares", "survivors", "survivors_signatures", "noise_request")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SHARES_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    NOISE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    directory: Directory
    received_shares: ReceivedShares
    survivors: Survivors
    survivors_signatures: SurvivorsSignatures
    noise_request: NoiseRequest
    def __init__(self, directory: _Optional[_Union[Directory, _Mapping]] = ..., received_shares: _Optional[_Union[ReceivedShares, _Mapping]] = ..., survivors: _Optional[_Union[Survivors, _Mapping]] = ..., survivors_signatures: _Optional[_Union[SurvivorsSignatures, _Mapping]] = ..., noise_request: _Optional[_Union[NoiseRequest, _Mapping]] = ...) -> None: ...

class KeyAdvertisement(_message.Message):
    __slots__ = ("encryption_key", "mask_key", "identity_key", "identity_proof", "signature")
    ENCRYPTION_KEY_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_KEY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_PROOF_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    encryption_key: bytes
    mask_key: bytes
    identity_key: bytes
    identity_proof: bytes
    signature: bytes
    def __init__(self, encryption_key: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., identity_key: _Optional[bytes] = ..., identity_proof: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Directory(_message.Message):
    __slots__ = ("index", "num_devices", "threshold", "members", "noise_parties")
    class Member(_message.Message):
        __slots__ = ("index", "keys")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        KEYS_FIELD_NUMBER: _ClassVar[int]
        index: int
        keys: KeyAdvertisement
        def __init__(self, index: _Optional[int] = ..., keys: _Optional[_Union[KeyAdvertisement, _Mapping]] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NOISE_PARTIES_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_devices: int
    threshold: int
    members: _containers.RepeatedCompositeFieldContainer[Directory.Member]
    noise_parties: _containers.RepeatedCompositeFieldContainer[NoisePartyKeys]
    def __init__(self, index: _Optional[int] = ..., num_devices: _Optional[int] = ..., threshold: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Directory.Member, _Mapping]]] = ..., noise_parties: _Optional[_Iterable[_Union[NoisePartyKeys, _Mapping]]] = ...) -> None: ...

class NoisePartyKeys(_message.Message):
    __slots__ = ("party", "mask_key", "signature")
    PARTY_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    party: bytes
    mask_key: bytes
    signature: bytes
    def __init__(self, party: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class NoiseRequest(_message.Message):
    __slots__ = ("devices",)
    class Device(_message.Message):
        __slots__ = ("index", "encryption_key")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        ENCRYPTION_KEY_FIELD_NUMBER: _ClassVar[int]
        index: int
        encryption_key: bytes
        def __init__(self, index: _Optional[int] = ..., encryption_key: _Optional[bytes] = ...) -> None: ...
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[NoiseRequest.Device]
    def __init__(self, devices: _Optional[_Iterable[_Union[NoiseRequest.Device, _Mapping]]] = ...) -> None: ...

class Ciphertext(_message.Message):
    __slots__ = ("index", "content")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    index: int
    content: bytes
    def __init__(self, index: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class Shares(_message.Message):
    __slots__ = ("ciphertexts", "self_mask_commitment")
    CIPHERTEXTS_FIELD_NUMBER: _ClassVar[int]
    SELF_MASK_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    ciphertexts: _containers.RepeatedCompositeFieldContainer[Ciphertext]
    self_mask_commitment: bytes
    def __init__(self, ciphertexts: _Optional[_Iterable[_Union[Ciphertext, _Mapping]]] = ..., self_mask_commitment: _Optional[bytes] = ...) -> None: ...

class ReceivedShares(_message.Message):
    __slots__ = ("ciphertexts",)
    CIPHERTEXTS_FIELD_NUMBER: _ClassVar[int]
    ciphertexts: _containers.RepeatedCompositeFieldContainer[Ciphertext]
    def __init__(self, ciphertexts: _Optional[_Iterable[_Union[Ciphertext, _Mapping]]] = ...) -> None: ...

class MaskedVector(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class Survivors(_message.Message):
    __slots__ = ("bitmap",)
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    bitmap: bytes
    def __init__(self, bitmap: _Optional[bytes] = ...) -> None: ...

class SurvivorsSignature(_message.Message):
    __slots__ = ("signature",)
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signature: bytes
    def __init__(self, signature: _Optional[bytes] = ...) -> None: ...

class SurvivorsSignatures(_message.Message):
    __slots__ = ("signatures",)
    class Signature(_message.Message):
        __slots__ = ("index", "signature")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        SIGNATURE_FIELD_NUMBER: _ClassVar[int]
        index: int
        signature: bytes
        def __init__(self, index: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    signatures: _containers.RepeatedCompositeFieldContainer[SurvivorsSignatures.Signature]
    def __init__(self, signatures: _Optional[_Iterable[_Union[SurvivorsSignatures.Signature, _Mapping]]] = ...) -> None: ...

class RevealedShares(_message.Message):
    __slots__ = ("of_self_masks", "of_mask_keys")
    class Share(_message.Message):
        __slots__ = ("index", "share")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        SHARE_FIELD_NUMBER: _ClassVar[int]
        index: int
        share: bytes
        def __init__(self, index: _Optional[int] = ..., share: _Optional[bytes] = ...) -> None: ...
    OF_SELF_MASKS_FIELD_NUMBER: _ClassVar[int]
    OF_MASK_KEYS_FIELD_NUMBER: _ClassVar[int]
    of_self_masks: _containers.RepeatedCompositeFieldContainer[RevealedShares.Share]
    of_mask_keys: _containers.RepeatedCompositeFieldContainer[RevealedShares.Share]
    def __init__(self, of_self_masks: _Optional[_Iterable[_Union[RevealedShares.Share, _Mapping]]] = ..., of_mask_keys: _Optional[_Iterable[_Union[RevealedShares.Share, _Mapping]]] = ...) -> None: ...
