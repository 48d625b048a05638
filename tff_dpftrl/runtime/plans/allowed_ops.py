"""Operations of TensorFlow that a plan may ask a device to run.

All compute from their inputs. None reads or writes a file, talks to anybody, prints,
calls Python, keeps something under a name that outlives the run, or loads code.
"""

from __future__ import annotations

from collections.abc import Iterable

DRAWS_ANEW = frozenset(
    """
    Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 RandomShuffle
    RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal
    """.split()
)
"""Operations that are allowed for dropout, but draw other numbers in a second run."""

_STRUCTURE = """
    Assert Case Const EnsureShape Fill Identity IdentityN If NoOp OnesLike PartitionedCall
    Placeholder PlaceholderWithDefault PreventGradient Rank Shape ShapeN Size Snapshot
    StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile StopGradient While ZerosLike
"""
_ARRAYS = """
    BatchToSpaceND BroadcastArgs BroadcastGradientArgs BroadcastTo ConcatOffset ConcatV2
    DynamicPartition DynamicStitch ExpandDims Gather GatherNd GatherV2 InvertPermutation LinSpace
    MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV3 MatrixDiagV3 MatrixSetDiagV3 MirrorPad
    MirrorPadGrad OneHot Pack Pad PadV2 ParallelConcat ParallelDynamicStitch Range Reshape
    ResourceGather ResourceScatterAdd Reverse ReverseSequence ReverseV2 Roll ScatterNd Select
    SelectV2 Slice SpaceToBatchND SpaceToDepth DepthToSpace Split SplitV Squeeze StridedSlice
    StridedSliceGrad TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub
    TensorScatterUpdate TensorStridedSliceUpdate Tile Transpose Unique UniqueV2 UniqueWithCounts
    UnravelIndex Unpack Where
"""
_NUMBERS = """
    Abs Acos Acosh Add AddN AddV2 AccumulateNV2 All Any ApproximateEqual ArgMax ArgMin Asin
    Asinh Atan Atan2 Atanh Betainc Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor Bucketize
    Cast Ceil CheckNumerics CheckNumericsV2 ClipByValue Cos Cosh CumulativeLogsumexp Cumprod
    Cumsum DenseBincount Digamma Div DivNoNan Einsum Equal Erf Erfc Erfinv EuclideanNorm Exp
    Expm1 Floor FloorDiv FloorMod Greater GreaterEqual HistogramFixedWidth Igamma Igammac
    InTopKV2 Inv InvGrad Invert IsFinite IsInf IsNan L2Loss LeftShift Less LessEqual Lgamma Log
    Log1p LogicalAnd LogicalNot LogicalOr LowerBound Max Maximum Mean Min Minimum Mod Mul
    MulNoNan Neg Ndtri NextAfter NotEqual PopulationCount Pow Prod RealDiv Reciprocal
    ReciprocalGrad RightShift Rint Round Rsqrt RsqrtGrad SegmentMax SegmentMean SegmentMin
    SegmentProd SegmentSum Sigmoid SigmoidGrad Sign Sin Sinh Softplus Sqrt SqrtGrad Square
    SquaredDifference Sub Sum Tan Tanh TanhGrad TopK TopKV2 TruncateDiv TruncateMod
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum Xdivy Xlog1py
    Xlogy Zeta
"""
_LINEAR_ALGEBRA = """
    BatchMatMul BatchMatMulV2 BatchMatMulV3 Cholesky Complex ComplexAbs Conj Cross Diag DiagPart FFT
    FFT2D IFFT IFFT2D IRFFT Imag MatMul MatrixDeterminant MatrixInverse MatrixSolve
    MatrixTriangularSolve Qr RFFT Real SparseMatMul SparseTensorDenseMatMul Svd
"""
_NETWORKS = """
    AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Conv2D
    Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Elu
    EluGrad FusedBatchNorm FusedBatchNormGrad FusedBatchNormGradV3 FusedBatchNormV3 LRN LRNGrad
    LeakyRelu LeakyReluGrad LogSoftmax MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad MaxPoolGradV2
    MaxPoolV2 Relu Relu6 Relu6Grad ReluGrad ResizeBilinear ResizeNearestNeighbor Selu SeluGrad
    Softmax SoftmaxCrossEntropyWithLogits SoftplusGrad Softsign SoftsignGrad
    SparseSoftmaxCrossEntropyWithLogits
"""
_RANDOM = """
    StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV3 StatelessRandomGetAlg StatelessRandomGetKeyCounter
    StatelessRandomGetKeyCounterAlg StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformV2 StatelessShuffle StatelessTruncatedNormal StatelessTruncatedNormalV2
"""
# Variables, tables and lists of one run: the importer gives each run its own.
_STATE_OF_A_RUN = """
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp DestroyResourceOp EmptyTensorList
    HashTableV2 LookupTableExportV2 LookupTableFindV2 LookupTableImportV2 LookupTableSizeV2
    ReadVariableOp TensorListConcatV2 TensorListElementShape TensorListFromTensor TensorListGather
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack TensorListReserve
    TensorListResize TensorListSetItem TensorListSplit TensorListStack VarHandleOp
    VarIsInitializedOp VariableShape
"""
_DATASETS = """
    AnonymousIteratorV2 AnonymousIteratorV3 AssertCardinalityDataset BatchDatasetV2
    ConcatenateDataset DatasetCardinality DeleteIterator FilterDataset FinalizeDataset
    FlatMapDataset InterleaveDataset IteratorGetNext IteratorGetNextAsOptional IteratorGetNextSync
    MakeIterator MapDataset OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone
    OptionsDataset PaddedBatchDatasetV2 ParallelMapDatasetV2 PrefetchDataset RangeDataset
    ReduceDataset RepeatDataset ScanDataset ShardDataset SkipDataset SlidingWindowDataset
    TakeDataset TakeWhileDataset TensorDataset TensorSliceDataset UnbatchDataset WindowDataset
    ZipDataset
"""
_EXAMPLES_AND_TEXT = """
    AsString DecodeRaw DecodePaddedRaw Fingerprint ParseExampleV2 ParseSingleExample RaggedCross
    RaggedGather RaggedRange RaggedTensorFromVariant RaggedTensorToSparse RaggedTensorToTensor
    RaggedTensorToVariant RegexFullMatch RegexReplace SparseReorder SparseReshape SparseSlice
    SparseToDense StaticRegexFullMatch StaticRegexReplace StringJoin StringLength StringLower
    StringSplit StringSplitV2 StringStrip StringToHashBucketFast StringToHashBucketStrong
    StringToNumber StringUpper Substr UnicodeDecode UnicodeDecodeWithOffsets UnicodeEncode
    UnsortedSegmentJoin
"""

_FIRST = frozenset(
    " ".join(
        [
            _STRUCTURE,
            _ARRAYS,
            _NUMBERS,
            _LINEAR_ALGEBRA,
            _NETWORKS,
            _RANDOM,
            _STATE_OF_A_RUN,
            _DATASETS,
            _EXAMPLES_AND_TEXT,
        ]
    ).split()
)
OPS_SINCE: dict[int, frozenset[str]] = {1: _FIRST | DRAWS_ANEW}
"""Operations by the first runtime version that allows them; later ones allow them too."""

SECURE_AGGREGATION_SINCE = 2
"""First runtime version with secure sums: an older one would send its report in the clear."""

NOISE_PARTIES_SINCE = 3
"""First runtime version with noise parties: an older one would not see that one is missing."""

RUNTIME_VERSION = max(*OPS_SINCE, SECURE_AGGREGATION_SINCE, NOISE_PARTIES_SINCE)
"""Runtime version that a device with this package reports at check-in."""


def allowed(version: int) -> frozenset[str]:
    """Returns the names of the operations that a runtime version allows."""
    return frozenset().union(*(ops for since, ops in OPS_SINCE.items() if since <= version))


def least_version(ops: Iterable[str]) -> int | None:
    """Returns the first runtime version that allows all of the operations; None if none does."""
    ops = set(ops)
    return next((version for version in sorted(OPS_SINCE) if ops <= allowed(version)), None)
