"""lingvo optimizers that are correct on weights that a layout cuts into slices."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from lingvo.core import learner, optimizer, py_utils

from pipemesh.backend.operations import sum_in_order
from pipemesh.backend.saved_state import Slice, mark_slice, slice_of
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError

__all__ = ["Adafactor", "check_learner"]

# Each slice of a weight is a variable for learners and optimizers, so they must give the same
# results for slices and for whole weights.

# Optimizers that update each element independently. Other classes set `right_on_slices` if they are
# elementwise or support slices.
ELEMENTWISE = (
    optimizer.SGD,
    optimizer.Momentum,
    optimizer.RMSProp,
    optimizer.Adagrad,
    optimizer.AdaDelta,
    optimizer.Adam,
    optimizer.AdamV2,
)
# Optimizers that pass gradients, or sums of them, to another optimizer.
_HANDING_ON = (optimizer.Accumulator, optimizer.DynamicAccumulator)
_CHECKS = "_pipemesh_checks_slices"


def check_learners() -> None:
    """Makes all of lingvo's learners check their variables from now on."""
    apply = learner.Learner.Apply
    if hasattr(apply, _CHECKS):
        return

    @functools.wraps(apply)
    def checked(self: Any, metrics: Any, vmap: Any, *args: Any, **kwargs: Any) -> Any:
        check_learner(self.params, vmap.Flatten())
        return apply(self, metrics, vmap, *args, **kwargs)

    setattr(checked, _CHECKS, True)
    learner.Learner.Apply = checked


def check_learner(p: Any, variables: Sequence[tf.Variable]) -> None:
    """Checks that a learner treats slices as it would treat whole weights.

    Learners call this when they build a step, if a layer with named dims has cut a weight.

    Args:
        p: params of a `lingvo.core.learner.Learner`.
        variables: the variables that the learner updates.

    Raises:
        PipelineError: the learner treats slices differently; the message says what to change.

    Example:
        >>> p = learner.Learner.Params().Set(optimizer=optimizer.DistributedShampoo.Params())
        >>> check_learner(p, [tf.Variable([1.0])])
    """
    # The name of the whole weight, by that of the slice.
    wholes = {v.name: f"{marked[0]}:0" for v in variables if (marked := slice_of(v))}
    if not wholes:
        return
    where = f"learner {p.name!r} is given slices of weights, such as {next(iter(wholes))!r}, but"
    clip, combiner = p.clip_gradient_single_norm_to_value, p.gradient_combiner
    if clip:
        raise PipelineError(
            f"{where} clip_gradient_single_norm_to_value={clip} would clip each slice by its own "
            "norm; use clip_gradient_norm_to_value, or a layout that cuts no weights"
        )
    if p.skip_zero_gradients == "variable":
        raise PipelineError(
            f"{where} skip_zero_gradients='variable' would look at each slice by itself; use "
            "'weight' or None, or a layout that cuts no weights"
        )
    if combiner is not None and not _says_so(combiner):
        raise PipelineError(
            f"{where} gradient_combiner {combiner.cls.__name__} is not known to combine gradients "
            "element by element; set right_on_slices = True in its class if it does, or use a "
            "layout that cuts no weights"
        )
    patterns = [
        ("bprop_variable_filter", p.bprop_variable_filter, re.search),
        ("bprop_variable_exclusion", p.bprop_variable_exclusion, re.search),
    ]
    for used in _optimizers(p.optimizer):
        if used.cls is optimizer.CompositeOptimizer:
            patterns += [("optimizer_map", regex, re.match) for regex in used.optimizer_map]
        elif used.cls not in ELEMENTWISE and not _says_so(used):
            raise PipelineError(
                f"{where} optimizer {used.cls.__name__} would take each of them for a weight of "
                f"its own; use {_instead(used)}, or a layout that cuts no weights. An optimizer of "
                "your own that updates each element by itself has right_on_slices = True in its "
                "class"
            )
    for field, pattern, match in patterns:
        for name, whole in wholes.items() if pattern else ():
            found = bool(match(pattern, name))
            if found != bool(match(pattern, whole)):
                finds, other = (name, whole) if found else (whole, name)
                raise PipelineError(
                    f"{where} {field} {pattern!r} finds {finds!r} and not {other!r}, which is of "
                    "the same weight; write a pattern that finds both or none, such as "
                    r"'w(_slice_\d+)?/var' for 'w/var'"
                )


def _says_so(params: Any) -> bool:
    return getattr(params.cls, "right_on_slices", False)


def _optimizers(p: Any) -> Iterator[Any]:
    """Yields the params of the innermost optimizers, and of those that choose one by name."""
    if p.cls is optimizer.CompositeOptimizer:
        yield p
        for inner, _ in p.optimizer_map.values():
            yield from _optimizers(inner)
    elif p.cls in _HANDING_ON:
        yield from _optimizers(p.optimizer_tpl)
    else:
        yield p


def _instead(p: Any) -> str:
    if issubclass(p.cls, optimizer.XLAShardingAdafactor):
        return "pipemesh.layers.optimizers.Adafactor, whose params are the same"
    names = [cls.__name__ for cls in (*ELEMENTWISE, *_HANDING_ON, optimizer.CompositeOptimizer)]
    return f"{', '.join(names)} of lingvo, pipemesh.layers.optimizers.Adafactor"


# The start of a piece in each dim of the whole tensor.
Begin = tuple[int, ...]


class Piece(NamedTuple):
    """A piece of a tensor."""

    beside: tf.Variable  # the slice of a weight on whose device the piece is
    value: Any


class Pieces:
    """A tensor in pieces on a grid, by the starts of the pieces."""

    def __init__(self, whole: list[int], parts: Mapping[Begin, Piece]) -> None:
        self.whole, self.parts = whole, dict(parts)

    @property
    def values(self) -> list[Any]:
        """Returns the value of each piece."""
        return [part.value for part in self.parts.values()]

    def map(self, function: Callable[..., Any], *others: Pieces) -> Pieces:
        """Applies a function to each piece, and to those of other tensors with the same grid."""
        mapped = {}
        for begin, (beside, value) in self.parts.items():
            with tf.device(beside.device):
                values = [other.parts[begin].value for other in others]
                mapped[begin] = Piece(beside, function(value, *values))
        return Pieces(self.whole, mapped)

    def without(self, axis: int) -> Pieces:
        """Returns the first pieces along a dim, beside which shared values are kept."""
        first = {_without(b, axis): part for b, part in self.parts.items() if not b[axis]}
        return Pieces(_without(self.whole, axis), first)

    def mean(self, axis: int) -> Pieces:
        """Averages over a dim and removes it; each piece sends one sum to the first of its row."""
        sums: dict[Begin, list[tf.Tensor]] = {}
        for begin, part in self.map(lambda value: tf.reduce_sum(value, axis)).parts.items():
            sums.setdefault(_without(begin, axis), []).append(part.value)
        first = self.without(axis)
        means = {begin: Piece(first.parts[begin].beside, sums[begin]) for begin in sums}
        return Pieces(first.whole, means).map(lambda parts: sum_in_order(parts) / self.whole[axis])

    def spread(self, like: Pieces, axis: int) -> Pieces:
        """Gives each piece of `like` the value that it shares along a dim, as a dim of size 1."""
        shared = {begin: self.parts[_without(begin, axis)] for begin in like.parts}
        return like.map(lambda _, part: tf.expand_dims(part, axis), Pieces(like.whole, shared))

    def root_mean_square(self) -> tf.Tensor:
        """Returns the root mean square of all elements, a scalar on the first piece's device."""
        squares = self.map(lambda value: tf.reduce_sum(tf.square(value))).values
        with self._beside_first():
            return tf.sqrt(sum_in_order(squares) / math.prod(self.whole))

    def is_finite(self) -> tf.Tensor:
        """Returns whether all elements are finite, a scalar on the first piece's device."""
        known = self.map(lambda value: tf.reduce_all(tf.math.is_finite(value))).values
        with self._beside_first():
            return tf.reduce_all(tf.stack(known))

    def _beside_first(self) -> Any:
        return tf.device(next(iter(self.parts.values())).beside.device)


def _without(numbers: Any, axis: int) -> Any:
    return numbers[:axis] + numbers[axis + 1 :]


class Adafactor(optimizer.XLAShardingAdafactor):
    """lingvo's `XLAShardingAdafactor`, with the same results on weights that a layout cuts.

    Its params are the same. Whole weights use lingvo's own code. For weights that are cut, row and
    column statistics are kept in pieces beside the slices. Only row sums, column sums and scalars
    move between devices.

    It computes the decay rate in each step. lingvo's optimizer, when made outside a graph, keeps
    the rate of the step in which it was made.

    Example:
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


class SlicedAdafactorOptimizer(optimizer.XLAShardingAdafactorOptimizer):
    """TensorFlow's optimizer of `Adafactor`; it calls `decay_rate` once for each application."""

    def __init__(self, decay_rate: Callable[[], tf.Tensor], **options: Any) -> None:
        super().__init__(decay_rate=decay_rate, **options)
        self._decay_of_step = decay_rate
        # The pieces of each kind of statistic, by weight.
        self._statistics: dict[str, dict[str, Pieces]] = {}
        # Slices with their gradients, until all are available.
        self._gradients: dict[str, tuple[tf.Variable, tf.Tensor]] = {}

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
        self._gradients = {}

    def _resource_apply_dense(self, grad: Any, var: tf.Variable) -> Any:
        if slice_of(var) is None:
            return super()._resource_apply_dense(grad, var)
        # The update of a slice needs the gradients of all slices, which arrive one by one.
        self._gradients[var.name] = var, tf.cast(grad, var.dtype)
        return tf.no_op()

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any:
        updates = []
        weights = weights_of([v for v, _ in self._gradients.values()], self._name)
        for name, weight in weights.items():
            grads = weight.map(lambda variable: self._gradients[variable.name][1])
            updates += self._update(weight, grads, self._statistics[name])
        self._gradients = {}
        return super()._finish([*update_ops, *updates], name_scope)

    def _update(self, weight: Pieces, grads: Pieces, old: dict[str, Pieces]) -> list[Any]:
        """Computes lingvo's `_resource_apply_dense` for whole weights."""
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
        updates = [op for kind, pieces in new.items() for op in _assign(old[kind], pieces, good)]
        if self._clipping_threshold is not None:
            above = x.root_mean_square() / tf.constant(self._clipping_threshold, dtype)
            denominator = tf.maximum(tf.constant(1.0, dtype), above)
            x = x.map(lambda part: part / denominator)
        step = x.map(lambda part: part * scale)
        if self._beta1:
            kept, rest = (tf.constant(b, dtype) for b in (self._beta1, 1.0 - self._beta1))
            step = old["m"].map(lambda m, now: m * kept + now * rest, step)
            good = self._finite(good, step)
            updates += _assign(old["m"], step, good)
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


def _assign(variables: Pieces, new: Pieces, good: tf.Tensor | None) -> list[Any]:
    def assign(variable: tf.Variable, value: tf.Tensor) -> Any:
        return variable.assign(value if good is None else tf.where(good, value, variable))

    return variables.map(assign, new).values


def weights_of(slices: Sequence[tf.Variable], user: str) -> dict[str, Pieces]:
    """Joins slices, in any order, to weights by logical name."""
    weights: dict[str, Pieces] = {}
    for variable in slices:
        marked = slice_of(variable)
        assert marked is not None
        name, part = marked
        parts = weights.setdefault(name, Pieces(list(part.whole), {})).parts
        if part.begin in parts:
            raise PipelineError(
                f"{user}: {variable.name!r} and {parts[part.begin].beside.name!r} are the same "
                f"slice of weight {name!r}; give layers names of their own"
            )
        parts[part.begin] = Piece(variable, variable)
    for name, weight in weights.items():
        size = math.prod(weight.whole)
        updated = sum(math.prod(static_sizes(variable)) for variable in weight.values)
        if updated != size:
            raise PipelineError(
                f"{user}: weight {name!r} has {size} elements, but its slices with gradients have "
                f"{updated}; update all slices of a weight or none"
            )
        weight.parts = dict(sorted(weight.parts.items()))
    return weights
