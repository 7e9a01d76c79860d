"""Checks of lingvo's learners, which see each slice of a weight as a variable."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import learner, optimizer

from pipemesh.backend.saved_state import slice_of
from pipemesh.errors import PipelineError

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
    return f"{', '.join(names)} of lingvo, AdamW, Muon, Adafactor of pipemesh.layers.optimizers"
