"""Muon: momentum whose matrices are made orthogonal, and AdamW for all other weights."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.optimizers.adamw import (
    NOT_DECAYED,
    AdamW,
    AdamWOptimizer,
    checked_pattern,
    is_found,
)
from pipemesh.layers.optimizers.pieces import (
    Begin,
    Matrix,
    OnWholeWeights,
    Pieces,
    assign,
    matrix_of,
    weight_name,
)
from pipemesh.text import nearest_text

# Heads, norms, biases and embeddings, whose matrices are not hidden ones.
NOT_HIDDEN = rf"{NOT_DECAYED}|(^|/)(\w*softmax\w*|logits|(lm_)?head)(/|$)"
# The polynomial of Jordan, 2024: steep at 0, and within 0.7 to 1.2 after a few steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7
# The factor of an update, by its numbers of inputs and outputs.
UPDATE_SCALES = {
    # Jordan, 2024, as in torch.
    "original": lambda inputs, outputs: math.sqrt(max(1.0, outputs / inputs)),
    # Liu et al., "Muon is scalable for LLM training", 2025, section 2.2: updates are as large as
    # AdamW's, so both have the same learning rate.
    "match_rms_adamw": lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),
}


class Muon(AdamW):
    """Muon (Jordan, 2024): momentum, made nearly orthogonal by Newton-Schulz iterations.

    It updates the weights that layers with named dims list in `Matrices`, with all heads of a
    weight in one matrix, and each expert in its own. Of other layers it updates weights with two
    dims larger than 1, unless `adamw_for` is found in their names. AdamW updates all other weights.
    Its params are those of AdamW; `weight_decay` is for both. Without any matrix it raises
    PipelineError.

    A weight that a layout cuts is gathered on one of its devices. Different weights take turns
    among the devices, and each slice gets its part of the update.

    Example:
        >>> from lingvo.core import learner
        >>> params = Muon.Params().Set(weight_decay=0.1, update_scale="original")
        >>> params = learner.Learner.Params().Set(name="loss", optimizer=params)
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `momentum`, `nesterov`, `newton_schulz_steps`, `update_scale`, `adamw_for`."""
        p = super().Params()
        p.weight_decay = 0.1
        p.Define("momentum", 0.95, "Share of the momentum that a step keeps.")
        p.Define("nesterov", True, "Whether the gradient is added to the momentum once more.")
        p.Define("newton_schulz_steps", 5, "Iterations that make a matrix orthogonal.")
        p.Define(
            "update_scale",
            "match_rms_adamw",
            "Size of updates: 'match_rms_adamw', 0.2 sqrt(max(inputs, outputs)), for the learning "
            "rate of AdamW; or 'original', sqrt(max(1, outputs / inputs)).",
        )
        p.Define(
            "adamw_for",
            NOT_HIDDEN,
            "Regular expression of logical names: AdamW updates weights in whose names it is "
            "found. By default embeddings, heads, norms and biases that no layer lists.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        checked_pattern("adamw_for", p.adamw_for)
        if p.update_scale not in UPDATE_SCALES:
            raise PipelineError(
                f"update_scale={p.update_scale!r} is not supported"
                f"{nearest_text(p.update_scale, UPDATE_SCALES)}"
            )

    def GetOptimizer(self, lr: Any) -> Any:
        """Makes TensorFlow's optimizer; `lr` is the learning rate or a function that returns it."""
        return MuonOptimizer(lr, self.params)


class MuonOptimizer(OnWholeWeights, AdamWOptimizer):
    """TensorFlow's optimizer of `Muon`."""

    def __init__(self, lr: Any, params: Any) -> None:
        super().__init__(lr, params)
        self._params = params
        self._excluded = checked_pattern("adamw_for", params.adamw_for)

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots(var_list)
        if var_list and not any(map(self._takes_whole, var_list)):
            raise PipelineError(
                f"Muon updates matrices of hidden layers, and none of the trained weights, such as "
                f"{weight_name(var_list[0])!r}, is one; use AdamW (--optimizer=adamw), or train a "
                "matrix as well"
            )

    def _takes_whole(self, variable: tf.Variable) -> bool:
        is_excluded = is_found(self._excluded, variable, NOT_HIDDEN)
        return matrix_of(variable) is not None and not is_excluded

    def _zeros_slot(self, var: tf.Variable, slot_name: str, op_name: str) -> Any:
        # Matrices have one slot, in place of Adam's first.
        if not self._takes_whole(var):
            return super()._zeros_slot(var, slot_name, op_name)
        return super()._zeros_slot(var, "momentum", op_name) if slot_name == "m" else None

    def _prepare(self) -> None:
        super()._prepare()
        # Newton-Schulz iterations so far of each device, and the last ones' results.
        self._work: collections.Counter[str] = collections.Counter()
        self._last: dict[str, list[tf.Tensor]] = {}

    def _update(self, name: str, weight: Pieces, grads: Pieces) -> list[Any]:
        p, variable = self._params, weight.values[0]
        matrix, dtype = matrix_of(variable), variable.dtype
        assert matrix is not None
        kept, rate = tf.constant(p.momentum, dtype), tf.cast(self._lr_t, dtype)
        decay = self._decay_of(variable)
        slots = weight.map(lambda v: self.get_slot(v, "momentum"))
        momentum = slots.map(lambda m, grad: m * kept + grad, grads)
        moved = momentum
        if p.nesterov:
            moved = grads.map(lambda grad, m: grad + m * kept, momentum)
        parts = self._orthogonal(moved, matrix)

        def update(v: tf.Variable, part: tf.Tensor) -> Any:
            return v.assign_sub(rate * (part + decay * v if decay else part))

        return assign(slots, momentum) + weight.map(update, parts).values

    def _orthogonal(self, whole: Pieces, matrix: Matrix) -> Pieces:
        """Makes the matrices of a weight orthogonal, each set of them on one device."""
        p, used = self._params, {*matrix.inputs, *matrix.outputs}
        numbers = [axis for axis in range(len(whole.whole)) if axis not in used]
        inputs, outputs = (math.prod(whole.whole[i] for i in dims) for dims in matrix)
        scale = UPDATE_SCALES[p.update_scale](inputs, outputs)
        # Slices of the same matrices.
        sets: dict[Begin, dict[Begin, Any]] = {}
        for begin, part in whole.parts.items():
            first = tuple(b if axis in numbers else 0 for axis, b in enumerate(begin))
            sets.setdefault(first, {})[begin] = part
        results = {}
        for first, parts in sets.items():
            # One after the other on a device, whose memory then holds one.
            device = min(
                (part.beside.device for part in parts.values()), key=self._work.__getitem__
            )
            size = sum(math.prod(static_sizes(part.value)) for part in parts.values())
            self._work[device] += size * min(inputs, outputs)
            with tf.device(device), tf.control_dependencies(self._last.get(device, [])):
                value = joined({begin: part.value for begin, part in parts.items()})
                order = [*numbers, *matrix.inputs, *matrix.outputs]
                sizes = static_sizes(value)
                turned = tf.transpose(value, order)
                flat = tf.reshape(turned, [-1, inputs, outputs])
                flat = scale * orthogonal(flat, p.newton_schulz_steps)
                turned = tf.reshape(flat, [sizes[axis] for axis in order])
                value = tf.transpose(turned, [order.index(axis) for axis in range(len(order))])
                self._last[device] = [value]
                for begin, part in parts.items():
                    offset = [b - f for b, f in zip(begin, first, strict=True)]
                    piece = tf.slice(value, offset, static_sizes(part.value))
                    results[begin] = part._replace(value=piece)
        return Pieces(whole.whole, results)


def joined(parts: Mapping[Begin, tf.Tensor], axis: int = 0) -> tf.Tensor:
    """Joins pieces on a grid to one tensor."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    rows: dict[int, dict[Begin, tf.Tensor]] = {}
    for begin, value in sorted(parts.items()):
        rows.setdefault(begin[axis], {})[begin] = value
    values = [joined(row, axis + 1) for row in rows.values()]
    return tf.concat(values, axis) if len(values) > 1 else values[0]


def orthogonal(matrices: tf.Tensor, steps: int) -> tf.Tensor:
    """Moves the singular values of each matrix towards 1 by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    rows, columns = static_sizes(matrices)[1:]
    x = matrices / tf.maximum(tf.norm(matrices, axis=(1, 2), keepdims=True), _LEAST_NORM)
    # The smaller product.
    is_tall = rows > columns
    for _ in range(steps):
        square = tf.matmul(x, x, transpose_a=is_tall, transpose_b=not is_tall)
        polynomial = b * square + c * tf.matmul(square, square)
        x = a * x + (tf.matmul(x, polynomial) if is_tall else tf.matmul(polynomial, x))
    return x
