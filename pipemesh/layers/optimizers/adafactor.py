"""Adafactor on weights that a layout cuts into slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import optimizer, py_utils

from pipemesh.backend.saved_state import Slice, mark_slice, slice_of
from pipemesh.backend.static_shape import static_sizes
from pipemesh.layers.optimizers.pieces import OnWholeWeights, Piece, Pieces, assign, weights_of


class Adafactor(optimizer.XLAShardingAdafactor):
    """lingvo's `XLAShardingAdafactor`, with the same results on weights that a layout cuts.

    Its params are the same. Whole weights use lingvo's own code. For weights that are cut, row and
    column statistics are kept in pieces beside the slices. Only row sums, column sums and scalars
    move between devices.

    It computes the decay rate in each step. lingvo's optimizer, when made outside a graph, keeps
    the rate of the step in which it was made.

    Example:
        >>> from lingvo.core import learner
        >>> params = Adafactor.Params().Set(beta1=0.9, decay_exponent_pow=0.8)
        >>> params = learner.Learner.Params().Set(name="loss", optimizer=params)
    """

    right_on_slices = True

    def GetOptimizer(self, lr: Any) -> Any:
        """Makes TensorFlow's optimizer; `lr` is the learning rate or a function that returns it."""
        p = self.params
        return SlicedAdafactorOptimizer(
            learning_rate=lr,
            factored=p.factored,
            clipping_threshold=p.clipping_threshold,
            multiply_by_parameter_scale=p.multiply_by_parameter_scale,
            decay_rate=self.DecayRate,
            beta1=p.beta1,
            min_dim_size_to_factor=p.min_dim_size_to_factor,
            cond_is_finite=p.cond_is_finite,
            name=p.name,
        )

    def DecayRate(self) -> tf.Tensor:
        """Returns the share of its second moments that a step keeps.

        Shazeer and Stern, "Adafactor", 2018, section 7.2: 1 - t**-c with `decay_exponent_pow` c,
        otherwise Adam's rate, including the bias correction. lingvo's own functions of it read a
        step that exists in graphs alone.
        """
        p, counter = self.params, py_utils.GetGlobalStep()
        assert counter is not None, "lingvo's learners need a global step"
        step = tf.cast(counter, tf.float32)
        if p.decay_exponent_pow:
            return 1.0 - tf.pow(step - p.decay_exponent_offset + 1.0, -p.decay_exponent_pow)
        kept, t = p.beta2, step + 1.0
        return kept * (1.0 - tf.pow(kept, t - 1.0)) / (1.0 - tf.pow(kept, t))


class SlicedAdafactorOptimizer(OnWholeWeights, optimizer.XLAShardingAdafactorOptimizer):
    """TensorFlow's optimizer of `Adafactor`; it calls `decay_rate` once for each application."""

    def __init__(self, decay_rate: Callable[[], tf.Tensor], **options: Any) -> None:
        super().__init__(decay_rate=decay_rate, **options)
        self._decay_of_step = decay_rate
        # The pieces of each kind of statistic, by weight.
        self._statistics: dict[str, dict[str, Pieces]] = {}

    def variables(self) -> list[tf.Variable]:
        """Returns all statistics."""
        kinds = [kind for weight in self._statistics.values() for kind in weight.values()]
        pieces = [variable for kind in kinds for variable in kind.values]
        return sorted([*super().variables(), *pieces], key=lambda variable: variable.name)

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots([v for v in var_list if slice_of(v) is None])
        cut = [v for v in var_list if slice_of(v) is not None]
        for name, weight in weights_of(cut, self._name).items():
            if name in self._statistics:
                continue
            dims = self._factored_dims(weight.whole)
            # In lingvo's order, because TensorFlow numbers the names.
            removed: dict[str, int | None] = {"m": None} if self._beta1 else {}
            removed |= {"vr": dims[0], "vc": dims[1]} if dims else {"v": None}
            self._statistics[name] = {
                kind: self._make_statistic(name, weight, dim) for kind, dim in removed.items()
            }

    def _make_statistic(self, name: str, weight: Pieces, removed: int | None) -> Pieces:
        """Makes zeros of the sizes of slices, without one dim, under the whole weight's name."""
        like = weight if removed is None else weight.without(removed)
        parts = {}
        with tf.compat.v1.variable_scope(None, f"{name}/{self._name}") as scope:
            for number, (begin, (beside, variable)) in enumerate(like.parts.items()):
                sizes = static_sizes(variable)
                if removed is not None:
                    del sizes[removed]
                with tf.device(beside.device):
                    made = tf.compat.v1.get_variable(
                        f"slice_{number}",
                        sizes,
                        beside.dtype,
                        tf.compat.v1.zeros_initializer(),
                        trainable=False,
                        use_resource=True,
                    )
                mark_slice(made, scope.name, Slice(tuple(like.whole), begin))
                parts[begin] = Piece(beside, made)
        return Pieces(like.whole, parts)

    def _prepare(self) -> None:
        super()._prepare()
        self._decay_rate = self._decay_of_step()

    def _takes_whole(self, variable: tf.Variable) -> bool:
        return slice_of(variable) is not None

    def _update(self, name: str, weight: Pieces, grads: Pieces) -> list[Any]:
        """Computes lingvo's `_resource_apply_dense` for whole weights."""
        old = self._statistics[name]
        dtype = grads.values[0].dtype
        decay = tf.cast(self._decay_rate, dtype)
        mixing = tf.cast(1.0 - decay, dtype)
        rate: Any = optimizer.GetLrValue(self._learning_rate)
        scale = tf.cast(rate, dtype)
        if self._multiply_by_parameter_scale:
            least = tf.constant(self._epsilon2, dtype)
            scale = tf.maximum(weight.root_mean_square(), least) * scale
        squares = grads.map(lambda grad: tf.square(grad) + tf.cast(self._epsilon1, dtype))

        def moved(kind: str, by: Pieces) -> Pieces:
            return old[kind].map(lambda before, now: before * decay + now * mixing, by)

        dims = self._factored_dims(weight.whole)
        if dims:
            new = {
                "vr": moved("vr", squares.mean(dims[0])),
                "vc": moved("vc", squares.mean(dims[1])),
            }
            # Along the last dim, whichever was reduced, as in lingvo.
            last = len(weight.whole) - 2
            long_term = new["vr"].mean(last).spread(new["vr"], last)
            rows = new["vr"].map(lambda row, mean: tf.math.rsqrt(row / mean), long_term)
            columns = new["vc"].map(tf.math.rsqrt)
            x = grads.map(
                lambda grad, row, column: grad * row * column,
                rows.spread(grads, dims[0]),
                columns.spread(grads, dims[1]),
            )
        else:
            new = {"v": moved("v", squares)}
            x = grads.map(lambda grad, v: grad * tf.math.rsqrt(v), new["v"])
        good = self._finite(None, squares, *new.values())
        updates = [op for kind, pieces in new.items() for op in assign(old[kind], pieces, good)]
        if self._clipping_threshold is not None:
            above = x.root_mean_square() / tf.constant(self._clipping_threshold, dtype)
            denominator = tf.maximum(tf.constant(1.0, dtype), above)
            x = x.map(lambda part: part / denominator)
        step = x.map(lambda part: part * scale)
        if self._beta1:
            kept, rest = (tf.constant(b, dtype) for b in (self._beta1, 1.0 - self._beta1))
            step = old["m"].map(lambda m, now: m * kept + now * rest, step)
            good = self._finite(good, step)
            updates += assign(old["m"], step, good)
        good = self._finite(good, step)
        if good is not None:
            step = step.map(lambda part: tf.where(good, part, tf.zeros_like(part)))
        return updates + weight.map(lambda v, part: v.assign_sub(part), step).values

    def _finite(self, before: tf.Tensor | None, *tensors: Pieces) -> tf.Tensor | None:
        """Returns whether all tensors are finite, or None without `cond_is_finite`."""
        if not self._cond_is_finite:
            return None
        known = [tensor.is_finite() for tensor in tensors]
        return tf.reduce_all(tf.stack(known if before is None else [before, *known]))
