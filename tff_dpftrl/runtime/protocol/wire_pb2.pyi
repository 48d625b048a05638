from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromServer(_message.Message):
    __slots__ = ("challenge", "come_back", "configuration", "report_answer", "secure_sum", "plan")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    COME_BACK_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    come_back: ComeBack
    configuration: Configuration
    report_answer: ReportAnswer
    secure_sum: bytes
    plan: Plan
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., come_back: _Optional[_Union[ComeBack, _Mapping]] = ..., configuration: _Optional[_Union[Configuration, _Mapping]] = ..., report_answer: _Optional[_Union[ReportAnswer, _Mapping]] = ..., secure_sum: _Optional[bytes] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class FromDevice(_message.Message):
    __slots__ = ("check_in", "report", "update_part", "secure_sum", "plan_wanted")
    CHECK_IN_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_PART_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUM_FIELD_NUMBER: _ClassVar[int]
    PLAN_WANTED_FIELD_NUMBER: _ClassVar[int]
    check_in: CheckIn
    report: Report
    update_part: bytes
    secure_sum: bytes
    plan_wanted: PlanWanted
    def __init__(self, check_in: _Optional[_Union[CheckIn, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., update_part: _Optional[bytes] = ..., secure_sum: _Optional[bytes] = ..., plan_wanted: _Optional[_Union[PlanWanted, _Mapping]] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("challenge", "protocol_versions", "task", "round_index")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    protocol_versions: _containers.RepeatedScalarFieldContainer[int]
    task: str
    round_index: int
    def __init__(self, challenge: _Optional[bytes] = ..., protocol_versions: _Optional[_Iterable[int]] = ..., task: _Optional[str] = ..., round_index: _Optional[int] = ...) -> None: ...

class CheckIn(_message.Message):
    __slots__ = ("population", "protocol_version", "runtime_version", "token", "noise_party")
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NOISE_PARTY_FIELD_NUMBER: _ClassVar[int]
    population: str
    protocol_version: int
    runtime_version: int
    token: bytes
    noise_party: NoiseParty
    def __init__(self, population: _Optional[str] = ..., protocol_version: _Optional[int] = ..., runtime_version: _Optional[int] = ..., token: _Optional[bytes] = ..., noise_party: _Optional[_Union[NoiseParty, _Mapping]] = ...) -> None: ...

class NoiseParty(_message.Message):
    __slots__ = ("key", "task", "next_round", "signature")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROUND_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    task: str
    next_round: int
    signature: bytes
    def __init__(self, key: _Optional[bytes] = ..., task: _Optional[str] = ..., next_round: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ComeBack(_message.Message):
    __slots__ = ("turns", "reason", "finished")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedScalarFieldContainer[float]
    reason: str
    finished: bool
    def __init__(self, turns: _Optional[_Iterable[float]] = ..., reason: _Optional[str] = ..., finished: bool = ...) -> None: ...

class Configuration(_message.Message):
    __slots__ = ("attempt", "task", "round_index", "plan", "broadcast", "secure_sum_session", "plan_sha256")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUM_SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHA256_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    task: str
    round_index: int
    plan: bytes
    broadcast: bytes
    secure_sum_session: bytes
    plan_sha256: bytes
    def __init__(self, attempt: _Optional[str] = ..., task: _Optional[str] = ..., round_index: _Optional[int] = ..., plan: _Optional[bytes] = ..., broadcast: _Optional[bytes] = ..., secure_sum_session: _Optional[bytes] = ..., plan_sha256: _Optional[bytes] = ...) -> None: ...

class PlanWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Plan(_message.Message):
    __slots__ = ("deflated",)
    DEFLATED_FIELD_NUMBER: _ClassVar[int]
    deflated: bytes
    def __init__(self, deflated: _Optional[bytes] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("attempt", "update", "strides", "times", "scales")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    update: bytes
    strides: _containers.RepeatedScalarFieldContainer[int]
    times: _containers.RepeatedScalarFieldContainer[int]
    scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, attempt: _Optional[str] = ..., update: _Optional[bytes] = ..., strides: _Optional[_Iterable[int]] = ..., times: _Optional[_Iterable[int]] = ..., scales: _Optional[_Iterable[float]] = ...) -> None: ...

class ReportAnswer(_message.Message):
    __slots__ = ("accepted", "reason", "turns")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    turns: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., turns: _Optional[_Iterable[float]] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("population", "shape", "seconds", "peak_memory_bytes", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    population: str
    shape: str
    seconds: float
    peak_memory_bytes: int
    versions: _containers.ScalarMap[str, str]
    def __init__(self, population: _Optional[str] = ..., shape: _Optional[str] = ..., seconds: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
