"""Finds the stage, layer and microbatch where a value first became infinite or NaN.

Operations that raise have state, and TensorFlow runs these one after the other, even across
devices. So a stage raises nothing. Each action checks the outputs of its layers (`StageProbes`) and
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
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import tensorflow as tf

from pipemesh.randomness.scope import LayerSpan

# The dtypes that tf.math.is_finite supports.
_CHECKED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Probe:
    """Tensors that are checked together."""

    layers: tuple[str, ...]  # that may have caused a non-finite value; empty outside of layers
    tensors: tuple[str, ...]
    replica: int = 0


class StageProbes:
    """The tensors of one stage that are checked, found while its graph has only the forward pass.

    Forward probes check the outputs of each layer; backward probes check the gradients of these
    outputs and of the stage's inputs. The gradient of the pipeline's own inputs may be unused. So
    the first stage checks the gradients where the weights of its first layer meet data instead.
    """

    def __init__(
        self,
        spans: Sequence[LayerSpan],
        theta: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],  # each an identity
    ) -> None:
        operations = tf.compat.v1.get_default_graph().get_operations()
        parts = [(span.layer, operations[span.begin : span.end]) for span in spans]
        self._layers = {op: layer for layer, part in parts for op in part}
        returned = [(layer, _returned(part)) for layer, part in parts]
        input_refs = {t.ref() for t in inputs}
        loose = [
            t
            for t in (output.op.inputs[0] for output in outputs)
            if t.dtype in _CHECKED
            and t.op not in self._layers
            and t.op.type != "StopGradient"
            and t.ref() not in input_refs
        ]
        groups = [*(((layer,), tensors) for layer, tensors in returned), ((), loose)]
        self._forward = [Probe(layers, tuple(t.name for t in group)) for layers, group in groups]
        self.theta_layers = [self._users([t]) for t in theta]
        self.input_layers = [self._users([t]) for t in inputs]
        inner = [(self._users(tensors), tensors) for _, tensors in reversed(returned)]
        first = parts[0][1] if parts else operations
        entries = _where_weights_meet_data(operations, first, {t.op for t in theta})
        entry = (((parts[0][0],) if parts else ()), entries)
        self._groups = [(users, tensors) for users, tensors in [*inner, entry] if tensors]
        self.sources = [t for _, tensors in self._groups for t in tensors]
        # Names of the gradients of `sources` and inputs, which `backward` needs; None for none.
        self.gradients: list[str | None] = []
        self.of_inputs: list[str | None] = []
        self._num_inner = sum(bool(tensors) for _, tensors in inner)
        self.names = [name for probe in self._forward for name in probe.tensors]

    def forward(self, is_computed: Callable[[str], bool]) -> list[Probe]:
        """Returns the probes of the forward pass, first layer first, if computed anyway."""
        return _present((p.layers, filter(is_computed, p.tensors)) for p in self._forward)

    def backward(self, is_first: bool, is_computed: Callable[[str], bool]) -> list[Probe]:
        """Returns the probes of the backward pass, last layer first, if computed anyway."""
        names = iter(self.gradients)
        probes = [(users, [next(names) for _ in tensors]) for users, tensors in self._groups]
        if not is_first:
            del probes[self._num_inner :]
            probes += [
                (users, [name])
                for users, name in zip(self.input_layers, self.of_inputs, strict=True)
            ]
        return _present(
            (users, (n for n in group if n is not None and is_computed(n)))
            for users, group in probes
        )

    def _users(self, tensors: Iterable[tf.Tensor]) -> tuple[str, ...]:
        """Returns the names of the layers, except their own, that use the tensors."""
        users = [
            self._layers[op]
            for t in tensors
            for op in t.consumers()
            if op in self._layers and self._layers[op] != self._layers.get(t.op)
        ]
        return tuple(dict.fromkeys(users))


def _present(groups: Iterable[tuple[tuple[str, ...], Iterable[str]]]) -> list[Probe]:
    """Returns the probes of the groups that have a tensor."""
    probes = [Probe(layers, tuple(tensors)) for layers, tensors in groups]
    return [probe for probe in probes if probe.tensors]


def _returned(operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """Returns the results of a layer's operations that other operations use, except monitoring."""
    inside = set(operations)
    return [
        t
        for op in operations
        for t in op.outputs
        if t.dtype in _CHECKED
        and any(c not in inside and c.type != "StopGradient" for c in t.consumers())
    ]


def _where_weights_meet_data(
    operations: Sequence[tf.Operation], chosen: Iterable[tf.Operation], theta: set[tf.Operation]
) -> list[tf.Tensor]:
    """Returns results of `chosen` operations on both weights (or functions of them) and data."""
    of_weights, of_data = set(theta), set()
    for op in operations:
        sources = {t.op for t in op.inputs}
        if (op.type == "Placeholder" and op not in theta) or sources & of_data:
            of_data.add(op)
        elif sources & of_weights:
            of_weights.add(op)
    return [
        t
        for op in chosen
        if op in of_data and any(s.op in of_weights for s in op.inputs)
        for t in op.outputs
        if t.dtype in _CHECKED
    ]


Direction = Literal["forward", "backward"]
CHECKS = ("all", "forward", "results", "loss", "off")
# Policies that check the outputs of layers, and so can tell where it began.
LOCATING: dict[Direction, tuple[str, ...]] = {"forward": ("all", "forward"), "backward": ("all",)}
# Policies that check gradients.
OF_GRADIENTS = ("all", "results")
_NOTHING = -1
MICROBATCH = "{microbatch}"


def empty_note() -> tf.Tensor:
    """Returns the note of a replica whose values are all finite."""
    return tf.constant(_NOTHING, tf.int64)


def write_note(
    note: tf.Tensor,
    microbatch: tf.Tensor,
    groups: Sequence[Sequence[tf.Tensor]],  # the tensors of each probe
) -> tf.Tensor:
    """Returns the note after an action, which keeps the first finding.

    A finding is `microbatch * len(groups) + index` of the first probe that is not finite, int64.
    """
    first = first_not_finite(groups)
    return tf.where((first >= 0) & (note < 0), microbatch * len(groups) + first, note)


def first_not_finite(
    groups: Sequence[Sequence[tf.Tensor]], devices: Sequence[str] | None = None
) -> tf.Tensor:
    """Returns the index of the first group that is not finite, or -1, as an int64 scalar."""
    flags = []
    for tensors, device in zip(groups, devices or [None] * len(groups), strict=True):
        with contextlib.nullcontext() if device is None else tf.device(device):
            flags.append(all_finite(tensors))
    if len(flags) == 1:
        return -tf.cast(flags[0], tf.int64)
    bad = tf.logical_not(tf.stack(flags))
    # GPUs have no kernel of `ArgMax` for integers.
    return tf.where(tf.reduce_any(bad), tf.argmax(tf.cast(bad, tf.float32)), _NOTHING)


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
    """A note with the text for each of its values."""

    note: tf.Tensor  # int64 scalar
    places: Sequence[str]  # `{microbatch}` is replaced by the microbatch


def raise_unless(
    is_finite: tf.Tensor,
    findings: Sequence[Finding],  # causes before effects
    otherwise: str,  # the non-finite value if there is no finding
    device: str,  # of a stage; the operation runs on the CPU next to it
    num_slices: int = 1,  # with several, microbatches are numbers of pieces
) -> tf.Operation:
    """Returns an operation that raises the first finding unless `is_finite`."""
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
            slice_number = tf.strings.as_string(piece % num_slices)
            microbatch = tf.strings.join([microbatch, ", slice ", slice_number])
        message = tf.strings.regex_replace(text, MICROBATCH.replace("{", r"\{"), microbatch)
        return tf.raw_ops.Assert(condition=is_finite, data=[message], summarize=1)
