"""Finds the stage, layer and microbatch where a value first became infinite or NaN.

Operations that raise have state, and TensorFlow runs these one after the other, even across
devices. So a stage raises nothing. Each action checks the outputs of its layers (`probes.py`) and
records the first non-finite one as a number, the note of its replica. The note goes from action to
action. One operation outside of the stages reads the notes and raises if the loss or a gradient is
not finite. All results of the pipeline wait for it. A NaN that reaches neither is ignored.

Notes make graphs several times as large, so the default (`results`) has none. A failed step has
changed nothing and can run again with notes, as the trainer of the language model does. A
`PipeliningLayer` that is called eagerly always has notes.
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
# Policies that check the outputs of layers, and so can tell where it began.
LOCATING: dict[Direction, tuple[str, ...]] = {"forward": ("all", "forward"), "backward": ("all",)}
# Policies that check gradients.
OF_GRADIENTS = ("all", "results")
_NOTHING = -1
MICROBATCH = "{microbatch}"


def check_policy(policy: str) -> str:
    """Returns the policy of checks, or raises a PipelineError if it is unknown."""
    if policy in CHECKS:
        return policy
    raise PipelineError(f"check_numerics is {policy!r}; allowed are {', '.join(CHECKS)}")


def empty_note() -> tf.Tensor:
    """Returns the note of a replica whose values are all finite."""
    return tf.constant(_NOTHING, tf.int64)


def write_note(
    note: tf.Tensor,
    microbatch: tf.Tensor,
    groups: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str] | None = None,
) -> tf.Tensor:
    """Returns the note after an action, which keeps the first finding.

    Args:
        note: before the action.
        microbatch: int64 scalar, the index of the microbatch.
        groups: the tensors of each probe.
        devices: of each probe the device of its tensors; by default the current one.

    Returns:
        `microbatch * len(groups) + index` of the first probe that is not finite, int64.
    """
    found = first_not_finite(groups, devices)
    return tf.where((found >= 0) & (note < 0), microbatch * len(groups) + found, note)


def first_not_finite(
    groups: Sequence[Sequence[tf.Tensor]], devices: Sequence[str] | None = None
) -> tf.Tensor:
    """Returns the index of the first group that is not finite, or -1, as an int64 scalar.

    `devices` names the device of each group's tensors; by default the current one.
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
    """Returns True (a bool scalar) if all elements of all tensors are finite."""
    # A complex number is finite if its absolute value is.
    real = [tf.math.abs(t) if t.dtype.is_complex else t for t in tensors]
    flags = [tf.reduce_all(tf.math.is_finite(t)) for t in real]
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


@dataclasses.dataclass(frozen=True)
class Finding:
    """A note with the text for each of its values.

    Attributes:
        note: int64 scalar.
        places: the text of each probe; `{microbatch}` is replaced by the microbatch.
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
    """Returns an operation that raises the first finding unless `is_finite`.

    Args:
        is_finite: bool scalar.
        findings: in order of priority, causes before effects.
        otherwise: name of the non-finite value if there is no finding.
        device: of a stage; the operation runs on the CPU next to it.
        num_slices: number of sequence slices; with several, microbatches are numbers of pieces.
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
