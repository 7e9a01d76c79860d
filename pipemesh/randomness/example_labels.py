"""Labels: arrays that say to which example of the batch each element of a tensor belongs.

A label has the rank of its tensor, and size 1 along dims that it does not depend on. Elements of no
example (weights, constants) fit those of any; an element computed from two examples belongs to
several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
    labels = [of_rank(label, rank) for label in labels]
    others = [max(label.shape[i] for label in labels) for i in range(rank)]
    parts: list[Label] = []
    for label, shape in zip(labels, sizes, strict=True):
        parts.append(whole(label, [shape[i] if i == dim else others[i] for i in range(rank)]))
    return np.concatenate(parts, dim)
