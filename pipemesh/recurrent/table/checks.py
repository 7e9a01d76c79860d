"""Checks that losses, outputs and gradients are finite before a pipeline returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor, pin_behind, wait_for
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.stage import Grads, Stage
from pipemesh.recurrent.watch.finite_values import (
    MICROBATCH,
    OF_GRADIENTS,
    Direction,
    Finding,
    Probe,
    all_finite,
    empty_note,
    first_not_finite,
    raise_unless,
)

# For each stage the notes of its replicas.
Notes = Sequence[Sequence[tf.Tensor]]


class Checks:
    """The checks of one run for finite values."""

    def __init__(
        self,
        policy: str,  # one of `finite_values.CHECKS`
        stages: Sequence[TracedStage],
        probes: Mapping[Direction, Sequence[Sequence[Probe]]],
        cutting: Cutting,
    ) -> None:
        self._policy = policy
        self._traced = stages
        self._probes = probes
        self._cutting = cutting
        self._forward: list[tf.Operation] = []
        self._backward: list[tf.Operation] = []
        self._both: list[tf.Operation] = []

    def forward(self, results: Sequence[tf.Tensor], what: str, notes: Notes) -> None:
        """Makes tensors that pass through `after_forward` wait for a check of the results."""
        if self._policy == "off":
            return
        last = self._traced[-1].stage
        with tf.device(last.device):
            is_finite = all_finite([t for t in results if t.dtype.is_floating])
        findings = [
            f for s in range(len(self._traced)) for f in self._findings("forward", s, notes)
        ]
        otherwise = place(last, (), f"forward: {what}")
        slices = self._cutting.num_slices
        self._forward = [raise_unless(is_finite, findings, otherwise, last.device, slices)]

    def after_forward(
        self, tensors: list[MaybeTensor], devices: str | Sequence[str]
    ) -> list[MaybeTensor]:
        """Returns the tensors, on their device or devices, once the check has passed."""
        return pin_behind(self._forward, tensors, devices)

    def after_both(
        self, tensors: list[MaybeTensor], devices: str | Sequence[str]
    ) -> list[MaybeTensor]:
        """Returns the tensors, on which no gradient depends, once all checks have passed."""
        if self._forward and not self._both:
            with tf.control_dependencies(self._forward):
                self._both = [tf.no_op()]
        return pin_behind(self._both, tensors, devices)

    def backward(self, grads: Sequence[Grads], notes: Notes) -> None:
        """Makes tensors that pass through `after_backward` wait for a check of the gradients."""
        # The gradient of an eager function has another graph, which runs after this one.
        graph = tf.compat.v1.get_default_graph()
        before = [op for op in self._forward if op.graph is graph]
        if self._policy in OF_GRADIENTS:
            order = range(len(self._traced) - 1, -1, -1)
            totals = [self._total_finding(s, grads[s]) for s in order]
            findings = [f for s in order for f in self._findings("backward", s, notes)] + totals
            device = self._traced[0].stage.device
            is_finite = tf.reduce_all(tf.stack([total.note for total in totals]) < 0)
            with tf.control_dependencies(before):
                check = raise_unless(
                    is_finite, findings, "a gradient", device, self._cutting.num_slices
                )
            before = [check]
            for guard in self._both:
                if guard.graph is graph:
                    wait_for(guard, check)
        with tf.control_dependencies(before):
            self._backward = [tf.no_op()] if before else []

    def after_backward(self, tensors: Grads, devices: str | Sequence[str]) -> Grads:
        """Returns the tensors, on their device or devices, once the check has passed."""
        return pin_behind(self._backward, tensors, devices)

    def input_grads(self, grads: Grads) -> Grads:
        """Returns checked input gradients; weights' gradients wait for that check, too."""
        first = self._traced[0]
        if self._policy in OF_GRADIENTS and any(grad is not None for grad in grads):
            findings = [
                self._input_finding(number, grad)
                for number, grad in enumerate(grads)
                if grad is not None
            ]
            device, slices = first.stage.device, self._cutting.num_slices
            with tf.device(device):
                is_finite = tf.reduce_all(tf.stack([f.note < 0 for f in findings]))
            check = raise_unless(is_finite, findings, "a gradient", device, slices)
            (guard,) = self._backward
            wait_for(guard, check)
        return self.after_backward(grads, first.stage.device)

    def _findings(self, direction: Direction, number: int, notes: Notes) -> list[Finding]:
        what = "its output" if direction == "forward" else "a gradient"
        rest = f"microbatch {MICROBATCH}, {direction}: {what}"
        stage, probes = self._traced[number].stage, self._probes[direction][number]
        return [
            Finding(note, [place(stage, p.layers, rest, r) for p in probes if p.replica == r])
            for r, note in enumerate(notes[number])
        ]

    def _total_finding(self, number: int, grads: Grads) -> Finding:
        traced = self._traced[number]
        layers = traced.replicas[0].probes.theta_layers
        users = [*layers, *([()] * (len(grads) - len(layers)))]
        present = [(g, u) for g, u in zip(grads, users, strict=True) if g is not None]
        stage = traced.stage
        # The device of each tensor, so that a flag travels instead of a gradient.
        devices = [*stage.theta_devices, *([stage.device] * len(grads))]
        at = [device for device, grad in zip(devices, grads, strict=False) if grad is not None]
        with tf.device(stage.device):
            note = first_not_finite([[g] for g, _ in present], at) if present else empty_note()
        places = [
            place(
                stage,
                user,
                f"backward: a gradient of shape {grad.shape}, summed over the microbatches,",
            )
            for grad, user in present
        ]
        return Finding(note, places)

    def _input_finding(self, number: int, grad: tf.Tensor) -> Finding:
        traced, cutting = self._traced[0], self._cutting
        of_slices = cutting.is_sliced(grad.shape)
        kept = [cutting.batch_dim, *([cutting.sequence_dim] if of_slices else [])]
        rest = [dim for dim in range(grad.shape.rank) if dim not in kept]
        with tf.device(traced.stage.device):
            real = tf.math.abs(grad) if grad.dtype.is_complex else grad
            bad = tf.reduce_any(tf.logical_not(tf.math.is_finite(real)), axis=rest)
            slice_number: tf.Tensor | int = 0
            if of_slices:
                rows = bad if cutting.batch_dim < cutting.sequence_dim else tf.transpose(bad)
                bad = tf.reduce_any(rows, axis=1)
                row = rows[tf.argmax(tf.cast(bad, tf.float32))]
                slice_number = tf.argmax(tf.cast(row, tf.float32)) // cutting.slice_size
            # GPUs have no kernel of `ArgMax` for integers.
            # The number of the part; notes have the same form, `piece * replicas + replica`.
            where = tf.argmax(tf.cast(bad, tf.float32)) // cutting.part_size
            if cutting.num_slices > 1:
                replica = tf.math.floormod(where, cutting.replicas)
                microbatch = where // cutting.replicas
                where = (
                    microbatch * cutting.num_slices + slice_number
                ) * cutting.replicas + replica
            note = tf.where(tf.reduce_any(bad), where, empty_note())
        text = f"microbatch {MICROBATCH}, backward: the gradient of input {number}"
        layers = traced.replicas[0].probes.input_layers[number]
        return Finding(
            note,
            [place(traced.stage, layers, text, replica) for replica in range(cutting.replicas)],
        )


def place(stage: Stage, layers: Sequence[str], rest: str, replica: int = 0) -> str:
    """Returns the names of stage, device and layers."""
    name = ", ".join(stage.of_home.replica(replica))
    device = f" ({name})" if name else ""
    layer = f", layer {' or '.join(map(repr, layers))}" if layers else ""
    return f"stage {stage.name!r}{device}{layer}, {rest}"
