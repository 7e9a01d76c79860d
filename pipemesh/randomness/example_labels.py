"""Labels: arrays that say to which example of the batch each element of a tensor belongs.

A label has the rank of its tensor, and size 1 along dims that it does not depend on. Elements of no
example (weights, constants) fit those of any; an element computed from two examples belongs to
several.

Each kind of operation has a rule for the labels of its results. Without a rule the result is
unknown, unless all inputs belong to no example.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes

Label = np.ndarray[Any, Any]

NO_EXAMPLE = -1
SEVERAL = -2
# Fits a tensor of any rank.
NO_EXAMPLES = np.full((), NO_EXAMPLE, np.int32)
# Larger labels are treated as unknown.
_MOST = 1 << 24


class UnknownLabelError(Exception):
    """The label of a tensor is unknown."""


def along(dim: int, rank: int, numbers: Label) -> Label:
    """Returns the label of a tensor whose elements depend on their index in one dim alone."""
    return numbers.astype(np.int32).reshape([-1 if i == dim else 1 for i in range(rank)])


def has_no_example(label: Label) -> bool:
    """Returns whether no element belongs to an example."""
    return bool((label == NO_EXAMPLE).all())


def of_rank(label: Label, rank: int) -> Label:
    """Returns the label with additional dims in front, as TensorFlow broadcasts."""
    if label.ndim > rank:
        raise UnknownLabelError
    return label.reshape([1] * (rank - label.ndim) + list(label.shape))


def whole(label: Label, sizes: Sequence[int]) -> Label:
    """Returns the label in the sizes of its tensor, as a view."""
    try:
        return np.broadcast_to(of_rank(label, len(sizes)), sizes)
    except ValueError as error:
        raise UnknownLabelError from error


def compressed(label: Label) -> Label:
    """Returns the same label, of size 1 along all dims that it does not depend on."""
    for dim, (size, stride) in enumerate(zip(label.shape, label.strides, strict=True)):
        if size == 0:
            raise UnknownLabelError
        if size > 1 and stride == 0:
            label = label.take([0], dim)
    if label.size > _MOST:
        raise UnknownLabelError
    for dim, size in enumerate(label.shape):
        if size > 1:
            first = label.take([0], dim)
            if (label == first).all():
                label = first
    return np.array(label)


def joined(labels: Sequence[Label]) -> Label:
    """Returns the label of a result computed from broadcast elements."""
    result = labels[0]
    for label in labels[1:]:
        rank = max(result.ndim, label.ndim)
        a, b = of_rank(result, rank), of_rank(label, rank)
        try:
            if np.broadcast(a, b).size > _MOST:
                raise UnknownLabelError
        except ValueError as error:
            raise UnknownLabelError from error
        same = np.where(a == b, a, SEVERAL)
        result = np.where(a == NO_EXAMPLE, b, np.where(b == NO_EXAMPLE, a, same)).astype(np.int32)
    return result


def reduced(label: Label, dims: Sequence[int]) -> Label:
    """Returns the label of sums over dims, which stay with size 1."""
    # A sum over several examples is a statistic of the batch and belongs to none.
    for dim in dims:
        if label.shape[dim] == 1:
            continue
        highest = label.max(dim, keepdims=True)
        lowest = np.where(label >= 0, label, np.iinfo(np.int32).max).min(dim, keepdims=True)
        several = (label == SEVERAL).any(dim, keepdims=True)
        alone = np.where(lowest == highest, highest, NO_EXAMPLE)
        label = np.where(several, SEVERAL, np.where(highest < 0, NO_EXAMPLE, alone)).astype(
            np.int32
        )
    return label


def reshaped(label: Label, old: Sequence[int], new: Sequence[int]) -> Label:
    """Returns the label of a reshaped tensor, expanded only along dims that are split or merged."""
    label = of_rank(label, len(old))
    sizes, target = list(label.shape), list(new)
    i = j = 0
    while i < len(old) or j < len(new):
        begin_i, begin_j = i, j
        left, right = 1, 1
        # The shortest run of dims that holds the same elements before and after.
        while i == begin_i or j == begin_j or left != right:
            if (left <= right and i < len(old)) or j == len(new):
                if i == len(old):
                    break
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        if all(size == 1 for size in label.shape[begin_i:i]):
            target[begin_j:j] = [1] * (j - begin_j)
        else:
            sizes[begin_i:i] = old[begin_i:i]
    if np.prod(sizes, dtype=np.int64) > _MOST:
        raise UnknownLabelError
    return whole(label, sizes).reshape(target)


def concatenated(labels: Sequence[Label], sizes: Sequence[Sequence[int]], dim: int) -> Label:
    """Returns the label of tensors of these sizes, concatenated along a dim."""
    rank = len(sizes[0])
    others = [max(label.shape[i] for label in labels) for i in range(rank)]
    parts: list[Label] = []
    for label, shape in zip(labels, sizes, strict=True):
        parts.append(whole(label, [shape[i] if i == dim else others[i] for i in range(rank)]))
    return np.concatenate(parts, dim)


# Takes an operation and the labels of its inputs, of equal ranks, and returns those of its outputs.
# If the rank of an input is unknown, so are the results, except of the kinds in `_OF_ANY_RANK`.
Rule = Callable[[Any, Sequence[Label]], list[Label]]

_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BitwiseAnd
    BitwiseOr BitwiseXor Bitcast Bucketize Cast Ceil CheckNumerics CheckNumericsV2 ClipByValue
    Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu EnsureShape Equal Erf Erfc Erfinv Exp
    Expm1 FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Floor FloorDiv FloorMod Greater
    GreaterEqual Identity Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift
    Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan
    Ndtri Neg NextAfter NotEqual Pow PreventGradient QuantizeAndDequantizeV2
    QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 Real RealDiv Reciprocal Relu Relu6 RightShift
    Rint Round Rsqrt SelectV2 Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt
    Square SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod XlaSharding Xdivy
    Xlog1py Xlogy Zeta
""".split()
_REDUCTIONS = "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum".split()
_NEW = "OnesLike Range Rank Shape ShapeN Size ZerosLike TensorListReserve EmptyTensorList"


def sizes_of(tensor: tf.Tensor) -> list[int]:
    """Returns the static sizes of a tensor."""
    if not tensor.shape.is_fully_defined():
        raise UnknownLabelError
    return static_sizes(tensor)


def _constant(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    if value is None:
        raise UnknownLabelError
    return value


def _dims(tensor: tf.Tensor, rank: int) -> list[int]:
    return [int(dim) % rank for dim in np.reshape(_constant(tensor), [-1])]


def _full(operation: tf.Operation, label: Label, number: int = 0) -> Label:
    return whole(label, sizes_of(operation.inputs[number]))


def _select(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    # The condition may be a vector with an element for each row.
    condition, *values = labels
    rest = [1] * (values[0].ndim - condition.ndim)
    return [joined([condition.reshape([*condition.shape, *rest]), *values])]


def _concat(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    sizes = [sizes_of(tensor) for tensor in operation.inputs[:-1]]
    dim = _dims(operation.inputs[-1], len(sizes[0]))[0]
    return [concatenated(labels[:-1], sizes, dim)]


def _pack(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    sizes = sizes_of(operation.inputs[0])
    dim = operation.get_attr("axis") % (len(sizes) + 1)
    rows = [np.expand_dims(label, dim) for label in labels]
    return [concatenated(rows, [[*sizes[:dim], 1, *sizes[dim:]]] * len(rows), dim)]


def _unpack(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    label = _full(operation, labels[0])
    dim = operation.get_attr("axis") % label.ndim
    return [label.take(i, dim) for i in range(label.shape[dim])]


def _split(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    value, axis = (0, 2) if operation.type == "SplitV" else (1, 0)
    label = _full(operation, labels[value], value)
    dim = _dims(operation.inputs[axis], label.ndim)[0]
    ends = np.cumsum([sizes_of(output)[dim] for output in operation.outputs])
    return [
        label[(slice(None),) * dim + (slice(end - sizes_of(output)[dim], end),)]
        for end, output in zip(ends, operation.outputs, strict=True)
    ]


def _slice(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    label, sizes = _full(operation, labels[0]), sizes_of(operation.outputs[0])
    begin = tf.get_static_value(operation.inputs[1])
    if begin is None:
        # Rows chosen at run time: correct if all rows have the same label.
        begin = [0] * label.ndim
        if any(
            a > 1 and b < c for a, b, c in zip(labels[0].shape, sizes, label.shape, strict=True)
        ):
            raise UnknownLabelError
    return [label[tuple(slice(int(b), int(b) + n) for b, n in zip(begin, sizes, strict=True))]]


def _strided_slice(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    label = _full(operation, labels[0])
    begin, end, strides = (_constant(tensor) for tensor in operation.inputs[1:])
    masks = {
        name: operation.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index: list[Any] = []
    for i, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True)):
        masked = {name for name, bits in masks.items() if bits >> i & 1}
        if "ellipsis" in masked:
            index.append(Ellipsis)
        elif "new_axis" in masked:
            index.append(None)
        elif "shrink_axis" in masked:
            index.append(int(first))
        else:
            first = None if "begin" in masked else int(first)
            last = None if "end" in masked else int(last)
            index.append(slice(first, last, int(stride)))
    return [np.asarray(label[tuple(index)])]


def _tile(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    sizes = zip(_constant(operation.inputs[1]), labels[0].shape, strict=True)
    return [np.tile(labels[0], [times if size > 1 else 1 for times, size in sizes])]


def _pad(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    label, pads = labels[0], _constant(operation.inputs[1])
    # Along dims with equal labels, the padding may have that label, too.
    widths = [pad if size > 1 else (0, 0) for pad, size in zip(pads, label.shape, strict=True)]
    if operation.type == "MirrorPad":
        return [np.pad(label, widths, operation.get_attr("mode").decode().lower())]
    return [np.pad(label, widths, constant_values=NO_EXAMPLE)]


def _gather(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    table, rows = operation.inputs[0], operation.inputs[1]
    label, chosen = labels[:2]
    sizes, batch = sizes_of(table), operation.get_attr("batch_dims")
    dim = _dims(operation.inputs[2], len(sizes))[0]
    indices = tf.get_static_value(rows)
    if indices is not None and batch == 0:
        expanded = [*label.shape[:dim], sizes[dim], *label.shape[dim + 1 :]]
        return [whole(label, expanded).take(indices, dim)]
    if label.shape[dim] > 1:
        # The label depends on the indices.
        raise UnknownLabelError
    inner = chosen.ndim - batch
    label = label.reshape([*label.shape[:dim], *[1] * inner, *label.shape[dim + 1 :]])
    before, behind = [1] * (dim - batch), [1] * (len(sizes) - dim - 1)
    chosen = chosen.reshape([*chosen.shape[:batch], *before, *chosen.shape[batch:], *behind])
    return [joined([label, chosen])]


def _lookup(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    """Returns the label of rows looked up in a table that belongs to no example."""
    rank, label = len(sizes_of(operation.outputs[0])), labels[1]
    return [label.reshape([*label.shape, *[1] * (rank - label.ndim)])]


def _contract(operands: Sequence[str], result: str, labels: Sequence[Label]) -> Label:
    """Returns the label of products, summed over the dims (letters) that the result lacks."""
    letters = result + "".join(sorted({*"".join(operands)} - {*result}))
    placed: list[Label] = []
    for dims, label in zip(operands, labels, strict=True):
        if len({*dims}) < len(dims):
            raise UnknownLabelError
        order = [dims.index(letter) for letter in letters if letter in dims]
        sizes = iter(label.transpose(order).shape)
        shape = [next(sizes) if letter in dims else 1 for letter in letters]
        placed.append(label.transpose(order).reshape(shape))
    label = reduced(joined(placed), range(len(result), len(letters)))
    return label.reshape(label.shape[: len(result)])


def _matmul(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    kind = "transpose_a transpose_b" if operation.type == "MatMul" else "adj_x adj_y"
    flip_a, flip_b = (operation.get_attr(name) for name in kind.split())
    ranks = [tensor.shape.rank for tensor in operation.inputs]
    outer = "abcdefgh"[: max(ranks) - 2]
    outer_a, outer_b = (outer[len(outer) - rank + 2 :] for rank in ranks)
    a = outer_a + ("kx" if flip_a else "xk")
    b = outer_b + ("yk" if flip_b else "ky")
    return [_contract([a, b], outer + "xy", labels)]


def _einsum(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    terms, result = operation.get_attr("equation").decode().replace(" ", "").split("->")
    operands = terms.split(",")
    free = [c for c in string.ascii_letters if c not in terms]
    rank = max(
        (t.shape.rank - len(term) + 3 if "..." in term else 0)
        for t, term in zip(operation.inputs, operands, strict=True)
    )
    for number, (tensor, term) in enumerate(zip(operation.inputs, operands, strict=True)):
        count = tensor.shape.rank - len(term) + 3
        operands[number] = term.replace("...", "".join(free[rank - count : rank]))
    return [_contract(operands, result.replace("...", "".join(free[:rank])), labels)]


def _reduce(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    dims = _dims(operation.inputs[1], labels[0].ndim)
    label = reduced(labels[0], dims)
    if operation.type in ("ArgMax", "ArgMin") or not operation.get_attr("keep_dims"):
        label = label.reshape([n for dim, n in enumerate(label.shape) if dim not in dims])
    return [label]


def _mixed(label: Label, dims: Sequence[int]) -> list[Label]:
    """Returns the label of elements that depend on all others along dims."""
    return [joined([label, reduced(label, dims)])]


def _cross_entropy(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    logits, targets = labels
    label = joined([logits, targets.reshape([-1, 1]) if targets.ndim == 1 else targets])
    return [reduced(label, [1]).reshape([-1]), label]


def _first(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    """Returns the label of the first input, for operations that move no elements."""
    if not all(has_no_example(label) for label in labels[1:]):
        raise UnknownLabelError
    return [labels[0], *[NO_EXAMPLES] * (len(operation.outputs) - 1)]


def _by_rows(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    """Returns the label of convolutions and pooling, which keep only the first dim apart."""
    label = _first(operation, labels)[0]
    return [reduced(label, range(1, label.ndim))]


def _list_of(operation: tf.Operation, labels: Sequence[Label]) -> list[Label]:
    """Returns the label of a list of tensors: that of all its elements."""
    if labels[0].shape[0] > 1:
        raise UnknownLabelError
    return [labels[0][0]]


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, lambda _, labels: [joined(labels)]),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_NEW.split(), lambda operation, _: [NO_EXAMPLES] * len(operation.outputs)),
    **dict.fromkeys(
        ["Reshape", "ExpandDims", "Squeeze"],
        lambda operation, labels: [
            reshaped(labels[0], sizes_of(operation.inputs[0]), sizes_of(operation.outputs[0]))
        ],
    ),
    **dict.fromkeys(["Pad", "PadV2", "MirrorPad"], _pad),
    **dict.fromkeys(["Split", "SplitV"], _split),
    **dict.fromkeys(["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], _matmul),
    **dict.fromkeys(
        ["Softmax", "LogSoftmax"], lambda _, labels: _mixed(labels[0], [labels[0].ndim - 1])
    ),
    **dict.fromkeys(
        ["Cumsum", "Cumprod"],
        lambda operation, labels: _mixed(labels[0], _dims(operation.inputs[1], labels[0].ndim)),
    ),
    **dict.fromkeys(["BiasAdd", "FusedBatchNormV3", "MatrixBandPart"], _first),
    **dict.fromkeys(["Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool"], _by_rows),
    **dict.fromkeys(
        ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"], _cross_entropy
    ),
    **dict.fromkeys(
        ["BroadcastTo", "TensorListGetItem", "TensorListPopBack", "TensorListStack"],
        lambda operation, labels: [labels[0]] * len(operation.outputs),
    ),
    **dict.fromkeys(
        ["TensorListSetItem", "TensorListPushBack"],
        lambda _, labels: [joined([labels[0], labels[-1]])],
    ),
    "ConcatV2": _concat,
    "Einsum": _einsum,
    "Fill": lambda _, labels: [labels[1]],
    "GatherV2": _gather,
    "IdentityN": lambda _, labels: list(labels),
    "OneHot": lambda operation, labels: [np.expand_dims(labels[0], operation.get_attr("axis"))],
    "Pack": _pack,
    "ResourceGather": _lookup,
    "ReverseV2": lambda operation, labels: [
        np.flip(labels[0], tuple(_dims(operation.inputs[1], labels[0].ndim)))
    ],
    "Select": _select,
    "Slice": _slice,
    "StridedSlice": _strided_slice,
    "TensorListFromTensor": _list_of,
    "Tile": _tile,
    "TopKV2": lambda _, labels: [reduced(labels[0], [labels[0].ndim - 1])] * 2,
    "Transpose": lambda operation, labels: [
        np.transpose(labels[0], _constant(operation.inputs[1]))
    ],
    "Unpack": _unpack,
}


# Their rules look at no dim of a label in particular.
_OF_ANY_RANK = frozenset(
    [*_ELEMENTWISE, "IdentityN", *(kind for kind in RULES if kind.startswith("TensorList"))]
) - {"TensorListFromTensor"}


def _aligned(kind: str, label: Label, tensor: tf.Tensor) -> Label:
    """Returns the label with the rank of its tensor; a list has the label of its elements."""
    rank = tensor.shape.rank
    if tensor.dtype == tf.variant or (rank is None and kind in _OF_ANY_RANK):
        return label
    if rank is None:
        raise UnknownLabelError
    return of_rank(label, rank)


def apply_rule(operation: tf.Operation, labels: Sequence[Label | None]) -> list[Label | None]:
    """Returns the labels of an operation's results, None if unknown."""
    count = len(operation.outputs)
    if operation.type in ("ZerosLike", "OnesLike", "Shape", "Size", "Rank"):
        return [NO_EXAMPLES] * count
    known = [label for label in labels if label is not None]
    if len(known) < len(labels):
        return [None] * count
    if all(has_no_example(label) for label in known):
        return [NO_EXAMPLES] * count
    rule = RULES.get(operation.type)
    try:
        if rule is None:
            raise UnknownLabelError
        aligned = [
            _aligned(operation.type, label, tensor)
            for label, tensor in zip(known, operation.inputs, strict=True)
        ]
        return [compressed(label) for label in rule(operation, aligned)]
    except UnknownLabelError:
        return [None] * count
