"""The tensors of a stage that are checked for finite values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from pipemesh.randomness.scope import LayerSpan

# The dtypes that tf.math.is_finite supports.
_CHECKED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Probe:
    """Tensors that are checked together.

    Attributes:
        layers: names of the layers that may have caused a non-finite value; empty if the operations
            belong to no layer.
        tensors: names of the tensors.
        replica: the number of their replica.
    """

    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    replica: int = 0


class StageProbes:
    """The probes of one stage, made while its graph has only the forward pass.

    Forward probes check the outputs of each layer; backward probes check the gradients of these
    outputs and of the stage's inputs. The gradient of the pipeline's own inputs may be unused. So
    the first stage checks the gradients where the weights of its first layer meet data instead.

    Args:
        spans: the operations of the layers.
        theta: the weights.
        inputs: the inputs of the stage.
        outputs: the outputs of the stage, each an identity.

    Attributes:
        names: of the tensors that the forward pass checks.
        sources: tensors whose gradients `backward` needs.
        theta_layers: for each weight the layers that use it.
        input_layers: for each input the layers that use it.
    """

    def __init__(
        self,
        spans: Sequence[LayerSpan],
        theta: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
    ) -> None:
        operations = tf.compat.v1.get_default_graph().get_operations()
        parts = [(span.layer, operations[span.begin : span.end]) for span in spans]
        self._layers = {op: layer for layer, part in parts for op in part}
        returned = [(layer, _returned(part)) for layer, part in parts]
        given = {t.ref() for t in inputs}
        loose = [t.op.inputs[0] for t in outputs]
        loose = [
            t
            for t in loose
            if t.op not in self._layers and t.op.type != "StopGradient" and t.ref() not in given
        ]
        self._forward = [
            Probe((layer,), tuple(t.name for t in tensors)) for layer, tensors in returned
        ]
        self._forward.append(Probe((), tuple(t.name for t in loose if t.dtype in _CHECKED)))
        self.theta_layers = [self._users([t]) for t in theta]
        self.input_layers = [self._users([t]) for t in inputs]
        inner = [(self._users(tensors), tensors) for _, tensors in reversed(returned)]
        first = parts[0][1] if parts else operations
        entries = _where_weights_meet_data(operations, first, {t.op for t in theta})
        entry = (((parts[0][0],) if parts else ()), entries)
        self._groups = [(users, tensors) for users, tensors in [*inner, entry] if tensors]
        self.sources = [t for _, tensors in self._groups for t in tensors]
        self._num_inner = sum(bool(tensors) for _, tensors in inner)
        self.names = [name for probe in self._forward for name in probe.tensors]

    def forward(self, is_computed: Callable[[str], bool]) -> list[Probe]:
        """Returns the probes of the forward pass, first layer first.

        `is_computed` returns True for a tensor that is computed anyway.
        """
        return _present((p.layers, filter(is_computed, p.tensors)) for p in self._forward)

    def backward(
        self,
        gradients: Sequence[str | None],
        of_inputs: Sequence[str | None],
        is_first: bool,
        is_computed: Callable[[str], bool],
    ) -> list[Probe]:
        """Returns the probes of the backward pass, last layer first.

        Args:
            gradients: names of the gradients of `sources`, None where there is none.
            of_inputs: names of the gradients of the inputs.
            is_first: True for the first stage.
            is_computed: returns True for a gradient that is computed anyway.
        """
        names = iter(gradients)
        probes = [(users, [next(names) for _ in tensors]) for users, tensors in self._groups]
        if not is_first:
            del probes[self._num_inner :]
            probes += [
                (users, [name]) for users, name in zip(self.input_layers, of_inputs, strict=True)
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
    own = set(operations)
    return [
        t
        for op in operations
        for t in op.outputs
        if t.dtype in _CHECKED
        and any(c not in own and c.type != "StopGradient" for c in t.consumers())
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
