"""Finds the stage, layer and microbatch in which a value ceased to be finite.

Operations that raise have state, and TensorFlow executes those one after the other, across
devices too. So a stage raises nothing. Each action looks at what its layers give (`probes.py`) and
notes the first place that it finds in a number, its replica's note, which goes from action to
action. One operation outside of the stages reads the notes and raises, if the loss or a gradient
is not finite; whatever the pipeline returns waits for it. A NaN that reaches neither is none of
its business.

Notes make graphs several times as large, so by default there are none (`results`): a step that
fails has changed nothing, and can be run once more with them, as the trainer of the language model
does. A `PipeliningLayer` that is called eagerly always has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from pipemesh.errors import PipelineError

Direction = Literal["forward", "backward"]
CHECKS = ("all", "forward", "results", "loss", "off")
# Those that look at what layers give, and so can tell where it began.
LOCATING: dict[Direction, tuple[str, ...]] = {"forward": ("all", "forward"), "backward": ("all",)}
# Those that look at gradients.
OF_GRADIENTS = ("all", "results")
_NOTHING = -1
MICROBATCH = "{microbatch}"


def check_policy(policy: str) -> str:
    """Returns the policy of checking if there is such a one.

    Raises:
        PipelineError: there is not.
    """
    if policy in CHECKS:
        return policy
    raise PipelineError(f"check_numerics is {policy!r}; allowed are {', '.join(CHECKS)}")


def empty_note() -> tf.Tensor:
    """The note of a replica that has found nothing."""
    return tf.constant(_NOTHING, tf.int64)


def write_note(
    note: tf.Tensor,
    microbatch: tf.Tensor,
    groups: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str] | None = None,
) -> tf.Tensor:
    """The note after an action; the first one that found something stays.

    Args:
        note: before the action.
        microbatch: int64 scalar, the index of the microbatch.
        groups: the tensors of each probe.
        devices: of each probe where its tensors lie; by default here.

    Returns:
        `microbatch * len(groups) + index` of the first probe that is not finite, int64.
    """
    found = first_not_finite(groups, devices)
    return tf.where((found >= 0) & (note < 0), microbatch * len(groups) + found, note)


def first_not_finite(
    groups: Sequence[Sequence[tf.Tensor]], devices: Sequence[str] | None = None
) -> tf.Tensor:
    """The index of the first group of tensors that is not finite; -1 if all are; int64 scalar.

    Args:
        groups: at least one.
        devices: of each group where its tensors lie; by default here.
    """
    flags = []
    for tensors, device in zip(groups, devices or [None] * len(groups), strict=True):
        with contextlib.nullcontext() if device is None else tf.device(device):
            flags.append(all_finite(tensors))
    if len(flags) == 1:
        return -tf.cast(flags[0], tf.int64)
    bad = tf.logical_not(tf.stack(flags))
    return tf.where(tf.reduce_any(bad), tf.argmax(tf.cast(bad, tf.int32)), _NOTHING)


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all elements of all tensors are finite; bool scalar."""
    # A complex number is as finite as its absolute value.
    real = [tf.math.abs(t) if t.dtype.is_complex else t for t in tensors]
    flags = [tf.reduce_all(tf.math.is_finite(t)) for t in real]
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


@dataclasses.dataclass(frozen=True)
class Finding:
    """A note and how to read it.

    Attributes:
        note: int64 scalar.
        places: what each probe says; `{microbatch}` stands for the microbatch.
    """

    note: tf.Tensor
    places: Sequence[str]


def raise_unless(
    is_finite: tf.Tensor,
    findings: Sequence[Finding],
    otherwise: str,
    device: str,
    num_slices: int = 1,
) -> tf.Operation:
    """An operation that raises what was found unless `is_finite`.

    Args:
        is_finite: bool scalar.
        findings: what to say, causes before effects.
        otherwise: what is not finite if nothing was found.
        device: of a stage; the operation lies on the CPU next to it.
        num_slices: into how many sequences are cut; microbatches are numbers of pieces then.
    """
    findings = [
        *(finding for finding in findings if finding.places),
        Finding(tf.zeros([], tf.int64), [otherwise]),
    ]
    sizes = [len(finding.places) for finding in findings]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    texts = [f"{place} is not finite (NaN or infinite)" for f in findings for place in f.places]
    host = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
    with tf.device(host.to_string()):
        notes = tf.stack([finding.note for finding in findings])
        first = tf.argmax(tf.cast(notes >= 0, tf.int32))
        note, size = notes[first], tf.constant(sizes, tf.int64)[first]
        text = tf.constant(texts)[tf.constant(starts, tf.int64)[first] + note % size]
        piece = note // size
        microbatch = tf.strings.as_string(piece // num_slices)
        if num_slices > 1:
            own = tf.strings.as_string(piece % num_slices)
            microbatch = tf.strings.join([microbatch, ", slice ", own])
        message = tf.strings.regex_replace(text, MICROBATCH.replace("{", r"\{"), microbatch)
        return tf.raw_ops.Assert(condition=is_finite, data=[message], summarize=1)
