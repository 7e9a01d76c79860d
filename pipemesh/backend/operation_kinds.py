"""What kinds of operations do: the one list of each."""

from __future__ import annotations

# They check, and change nothing. The last two are lingvo's own.
CHECKS = frozenset(
    ("Assert", "CheckNumerics", "CheckNumericsV2", "AssertShapeMatch", "AssertSameDim0")
)
# Checks that hand on what they check.
CHECK_AND_HAND_ON = frozenset(("CheckNumerics", "CheckNumericsV2"))
# They tell, and change nothing.
TELLS = frozenset(
    (
        *("Print", "PrintV2"),
        *("WriteSummary", "WriteScalarSummary", "WriteHistogramSummary"),
        *("WriteImageSummary", "WriteAudioSummary", "WriteRawProtoSummary"),
    )
)
EFFECTS = CHECKS | TELLS
# Summaries of TF1 graphs, which somebody else writes.
SUMMARIES = frozenset(
    ("AudioSummaryV2", "HistogramSummary", "ImageSummary", "ScalarSummary", "TensorSummaryV2")
)

# TF1's variables that are no resources, whose tensors are references.
REF_VARIABLES = frozenset(("VariableV2", "Variable"))
VARIABLES = REF_VARIABLES | {"VarHandleOp"}
# They have state as far as TensorFlow knows, but give the same whenever they are computed.
READS = VARIABLES | frozenset(
    (
        *("ReadVariableOp", "VariableShape", "VarIsInitializedOp"),
        *("ResourceGather", "ResourceGatherNd", "Empty", "StatelessRandomGetAlg"),
        *("LookupTableFindV2", "LookupTableSizeV2", "AllCandidateSampler"),
    )
)
# Their names begin like this.
WRITES = ("Assign", "ResourceScatter", "ResourceApply", "Scatter", "ResourceStridedSliceAssign")

# They meet those of their group, by a name that they share, and change nothing else.
COLLECTIVES = frozenset(("NcclAllReduce",))
CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))

# They hand on what they are given.
IDENTITIES = frozenset(("Identity", "IdentityN"))
# They give a tensor another shape; the memory is the same.
RESHAPES = frozenset(("Reshape", "ExpandDims", "Squeeze"))
# There is no gradient beyond them.
WITHOUT_GRADIENT = frozenset(("Const", "StopGradient"))

DRAWS_WITH_STATE = frozenset(
    """
    Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle
    RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal UniformCandidateSampler
    LogUniformCandidateSampler FixedUnigramCandidateSampler LearnedUnigramCandidateSampler
    ThreadUnsafeUnigramCandidateSampler
    """.split()
)
DRAWS_WITHOUT_STATE = frozenset(
    """
    StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformV2 StatelessShuffle StatelessTruncatedNormal StatelessTruncatedNormalV2
    """.split()
)
