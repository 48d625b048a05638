from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TRAINING: _ClassVar[TaskKind]
    EVALUATION: _ClassVar[TaskKind]

class SeedPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEED_POLICY_UNSPECIFIED: _ClassVar[SeedPolicy]
    NO_SEED: _ClassVar[SeedPolicy]
    DEVICE_DRAWS: _ClassVar[SeedPolicy]
TASK_KIND_UNSPECIFIED: TaskKind
TRAINING: TaskKind
EVALUATION: TaskKind
SEED_POLICY_UNSPECIFIED: SeedPolicy
NO_SEED: SeedPolicy
DEVICE_DRAWS: SeedPolicy

class Tensor(_message.Message):
    __slots__ = ("name", "label", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    label: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., label: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("graph_def", "inputs", "outputs")
    GRAPH_DEF_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    graph_def: bytes
    inputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    outputs: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, graph_def: _Optional[bytes] = ..., inputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("collection", "max_examples", "max_age_hours")
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    MAX_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_HOURS_FIELD_NUMBER: _ClassVar[int]
    collection: str
    max_examples: int
    max_age_hours: float
    def __init__(self, collection: _Optional[str] = ..., max_examples: _Optional[int] = ..., max_age_hours: _Optional[float] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("memory_bytes", "seconds", "upload_bytes")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    seconds: float
    upload_bytes: int
    def __init__(self, memory_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., upload_bytes: _Optional[int] = ...) -> None: ...

class Participation(_message.Message):
    __slots__ = ("min_sep_rounds", "min_sep_hours", "stride_edges", "times_edges")
    MIN_SEP_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SEP_HOURS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_EDGES_FIELD_NUMBER: _ClassVar[int]
    TIMES_EDGES_FIELD_NUMBER: _ClassVar[int]
    min_sep_rounds: int
    min_sep_hours: float
    stride_edges: _containers.RepeatedScalarFieldContainer[int]
    times_edges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, min_sep_rounds: _Optional[int] = ..., min_sep_hours: _Optional[float] = ..., stride_edges: _Optional[_Iterable[int]] = ..., times_edges: _Optional[_Iterable[int]] = ...) -> None: ...

class SecureSum(_message.Message):
    __slots__ = ("modulus", "largest_entry")
    MODULUS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    modulus: int
    largest_entry: int
    def __init__(self, modulus: _Optional[int] = ..., largest_entry: _Optional[int] = ...) -> None: ...

class SecureAggregation(_message.Message):
    __slots__ = ("threat_model", "least_devices", "most_devices", "least_neighbours", "noise_parties", "noised_plans")
    class ThreatModel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        THREAT_MODEL_UNSPECIFIED: _ClassVar[SecureAggregation.ThreatModel]
        HONEST_BUT_CURIOUS: _ClassVar[SecureAggregation.ThreatModel]
        ACTIVE_SERVER: _ClassVar[SecureAggregation.ThreatModel]
    THREAT_MODEL_UNSPECIFIED: SecureAggregation.ThreatModel
    HONEST_BUT_CURIOUS: SecureAggregation.ThreatModel
    ACTIVE_SERVER: SecureAggregation.ThreatModel
    THREAT_MODEL_FIELD_NUMBER: _ClassVar[int]
    LEAST_DEVICES_FIELD_NUMBER: _ClassVar[int]
    MOST_DEVICES_FIELD_NUMBER: _ClassVar[int]
    LEAST_NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    NOISE_PARTIES_FIELD_NUMBER: _ClassVar[int]
    NOISED_PLANS_FIELD_NUMBER: _ClassVar[int]
    threat_model: SecureAggregation.ThreatModel
    least_devices: int
    most_devices: int
    least_neighbours: int
    noise_parties: _containers.RepeatedScalarFieldContainer[bytes]
    noised_plans: bytes
    def __init__(self, threat_model: _Optional[_Union[SecureAggregation.ThreatModel, str]] = ..., least_devices: _Optional[int] = ..., most_devices: _Optional[int] = ..., least_neighbours: _Optional[int] = ..., noise_parties: _Optional[_Iterable[bytes]] = ..., noised_plans: _Optional[bytes] = ...) -> None: ...

class PartyNoise(_message.Message):
    __slots__ = ("round_seed", "vector", "count", "count_stddev", "scaled_clip_norm", "rejection_bound", "noise_ratio")
    ROUND_SEED_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNT_STDDEV_FIELD_NUMBER: _ClassVar[int]
    SCALED_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    REJECTION_BOUND_FIELD_NUMBER: _ClassVar[int]
    NOISE_RATIO_FIELD_NUMBER: _ClassVar[int]
    round_seed: str
    vector: str
    count: str
    count_stddev: float
    scaled_clip_norm: float
    rejection_bound: float
    noise_ratio: float
    def __init__(self, round_seed: _Optional[str] = ..., vector: _Optional[str] = ..., count: _Optional[str] = ..., count_stddev: _Optional[float] = ..., scaled_clip_norm: _Optional[float] = ..., rejection_bound: _Optional[float] = ..., noise_ratio: _Optional[float] = ...) -> None: ...

class ReportBound(_message.Message):
    __slots__ = ("tensors", "entries", "norm", "counts_once", "noised")
    class Entries(_message.Message):
        __slots__ = ("least", "largest")
        LEAST_FIELD_NUMBER: _ClassVar[int]
        LARGEST_FIELD_NUMBER: _ClassVar[int]
        least: float
        largest: float
        def __init__(self, least: _Optional[float] = ..., largest: _Optional[float] = ...) -> None: ...
    class Norm(_message.Message):
        __slots__ = ("largest", "centre", "times")
        LARGEST_FIELD_NUMBER: _ClassVar[int]
        CENTRE_FIELD_NUMBER: _ClassVar[int]
        TIMES_FIELD_NUMBER: _ClassVar[int]
        largest: float
        centre: float
        times: str
        def __init__(self, largest: _Optional[float] = ..., centre: _Optional[float] = ..., times: _Optional[str] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ONCE_FIELD_NUMBER: _ClassVar[int]
    NOISED_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedScalarFieldContainer[int]
    entries: ReportBound.Entries
    norm: ReportBound.Norm
    counts_once: bool
    noised: bool
    def __init__(self, tensors: _Optional[_Iterable[int]] = ..., entries: _Optional[_Union[ReportBound.Entries, _Mapping]] = ..., norm: _Optional[_Union[ReportBound.Norm, _Mapping]] = ..., counts_once: bool = ..., noised: bool = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("label", "edges")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    label: str
    edges: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, label: _Optional[str] = ..., edges: _Optional[_Iterable[float]] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("package_version", "package", "build_file", "build", "builder")
    class Commit(_message.Message):
        __slots__ = ("name", "is_dirty")
        NAME_FIELD_NUMBER: _ClassVar[int]
        IS_DIRTY_FIELD_NUMBER: _ClassVar[int]
        name: str
        is_dirty: bool
        def __init__(self, name: _Optional[str] = ..., is_dirty: bool = ...) -> None: ...
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FILE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    BUILDER_FIELD_NUMBER: _ClassVar[int]
    package_version: str
    package: Provenance.Commit
    build_file: str
    build: Provenance.Commit
    builder: str
    def __init__(self, package_version: _Optional[str] = ..., package: _Optional[_Union[Provenance.Commit, _Mapping]] = ..., build_file: _Optional[str] = ..., build: _Optional[_Union[Provenance.Commit, _Mapping]] = ..., builder: _Optional[str] = ...) -> None: ...

class DevicePlan(_message.Message):
    __slots__ = ("population", "task", "kind", "least_runtime_version", "graph", "secure_sums", "ops", "selection", "batch_size", "epochs", "seed_policy", "limits", "participation", "secure_aggregation", "tested_tensorflow", "rounded", "seconds", "provenance")
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LEAST_RUNTIME_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUMS_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SEED_POLICY_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATION_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    TESTED_TENSORFLOW_FIELD_NUMBER: _ClassVar[int]
    ROUNDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    population: str
    task: str
    kind: TaskKind
    least_runtime_version: int
    graph: Graph
    secure_sums: _containers.RepeatedCompositeFieldContainer[SecureSum]
    ops: _containers.RepeatedScalarFieldContainer[str]
    selection: Selection
    batch_size: int
    epochs: int
    seed_policy: SeedPolicy
    limits: Limits
    participation: Participation
    secure_aggregation: SecureAggregation
    tested_tensorflow: _containers.RepeatedScalarFieldContainer[str]
    rounded: _containers.RepeatedScalarFieldContainer[int]
    seconds: Histogram
    provenance: Provenance
    def __init__(self, population: _Optional[str] = ..., task: _Optional[str] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., least_runtime_version: _Optional[int] = ..., graph: _Optional[_Union[Graph, _Mapping]] = ..., secure_sums: _Optional[_Iterable[_Union[SecureSum, _Mapping]]] = ..., ops: _Optional[_Iterable[str]] = ..., selection: _Optional[_Union[Selection, _Mapping]] = ..., batch_size: _Optional[int] = ..., epochs: _Optional[int] = ..., seed_policy: _Optional[_Union[SeedPolicy, str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., participation: _Optional[_Union[Participation, _Mapping]] = ..., secure_aggregation: _Optional[_Union[SecureAggregation, _Mapping]] = ..., tested_tensorflow: _Optional[_Iterable[str]] = ..., rounded: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Union[Histogram, _Mapping]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ...) -> None: ...

class ServerPlan(_message.Message):
    __slots__ = ("population", "task", "kind", "initialize", "prepare", "zero", "accumulate", "merge", "finish", "update", "secure_sums", "get_weights", "set_weights", "device_plans", "participation", "secure_aggregation", "skip", "report_bounds", "party_noise", "rounded", "histograms", "provenance")
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ZERO_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUMS_FIELD_NUMBER: _ClassVar[int]
    GET_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SET_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PLANS_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATION_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    REPORT_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    PARTY_NOISE_FIELD_NUMBER: _ClassVar[int]
    ROUNDED_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    population: str
    task: str
    kind: TaskKind
    initialize: Graph
    prepare: Graph
    zero: Graph
    accumulate: Graph
    merge: Graph
    finish: Graph
    update: _containers.RepeatedCompositeFieldContainer[Tensor]
    secure_sums: _containers.RepeatedCompositeFieldContainer[SecureSum]
    get_weights: Graph
    set_weights: Graph
    device_plans: _containers.RepeatedScalarFieldContainer[bytes]
    participation: Participation
    secure_aggregation: SecureAggregation
    skip: Graph
    report_bounds: _containers.RepeatedCompositeFieldContainer[ReportBound]
    party_noise: PartyNoise
    rounded: _containers.RepeatedScalarFieldContainer[int]
    histograms: _containers.RepeatedCompositeFieldContainer[Histogram]
    provenance: Provenance
    def __init__(self, population: _Optional[str] = ..., task: _Optional[str] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., initialize: _Optional[_Union[Graph, _Mapping]] = ..., prepare: _Optional[_Union[Graph, _Mapping]] = ..., zero: _Optional[_Union[Graph, _Mapping]] = ..., accumulate: _Optional[_Union[Graph, _Mapping]] = ..., merge: _Optional[_Union[Graph, _Mapping]] = ..., finish: _Optional[_Union[Graph, _Mapping]] = ..., update: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., secure_sums: _Optional[_Iterable[_Union[SecureSum, _Mapping]]] = ..., get_weights: _Optional[_Union[Graph, _Mapping]] = ..., set_weights: _Optional[_Union[Graph, _Mapping]] = ..., device_plans: _Optional[_Iterable[bytes]] = ..., participation: _Optional[_Union[Participation, _Mapping]] = ..., secure_aggregation: _Optional[_Union[SecureAggregation, _Mapping]] = ..., skip: _Optional[_Union[Graph, _Mapping]] = ..., report_bounds: _Optional[_Iterable[_Union[ReportBound, _Mapping]]] = ..., party_noise: _Optional[_Union[PartyNoise, _Mapping]] = ..., rounded: _Optional[_Iterable[int]] = ..., histograms: _Optional[_Iterable[_Union[Histogram, _Mapping]]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ...) -> None: ...

class Approvals(_message.Message):
    __slots__ = ("terms", "server_plan", "device_plans", "approvals")
    class Approval(_message.Message):
        __slots__ = ("key", "signature")
        KEY_FIELD_NUMBER: _ClassVar[int]
        SIGNATURE_FIELD_NUMBER: _ClassVar[int]
        key: bytes
        signature: bytes
        def __init__(self, key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
    TERMS_FIELD_NUMBER: _ClassVar[int]
    SERVER_PLAN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PLANS_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    terms: bytes
    server_plan: bytes
    device_plans: _containers.RepeatedScalarFieldContainer[bytes]
    approvals: _containers.RepeatedCompositeFieldContainer[Approvals.Approval]
    def __init__(self, terms: _Optional[bytes] = ..., server_plan: _Optional[bytes] = ..., device_plans: _Optional[_Iterable[bytes]] = ..., approvals: _Optional[_Iterable[_Union[Approvals.Approval, _Mapping]]] = ...) -> None: ...

class SignedPlan(_message.Message):
    __slots__ = ("plan", "sha256", "key", "signature", "approvals")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    sha256: bytes
    key: bytes
    signature: bytes
    approvals: Approvals
    def __init__(self, plan: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., approvals: _Optional[_Union[Approvals, _Mapping]] = ...) -> None: ...

class SignedTask(_message.Message):
    __slots__ = ("server", "devices")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    server: SignedPlan
    devices: _containers.RepeatedCompositeFieldContainer[SignedPlan]
    def __init__(self, server: _Optional[_Union[SignedPlan, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[SignedPlan, _Mapping]]] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ("values",)
    class Value(_message.Message):
        __slots__ = ("dtype", "shape", "content")
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        dtype: str
        shape: _containers.RepeatedScalarFieldContainer[int]
        content: bytes
        def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., content: _Optional[bytes] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Values.Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Values.Value, _Mapping]]] = ...) -> None: ...
