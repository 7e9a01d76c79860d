"""Params of lingvo tasks: the refused ones, and learning rates that grow from step to step."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip


import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import base_model, distillation_task, optimizer, schedule

from pipemesh.errors import TrainingError
from pipemesh.text import nearest

# Optimizers that wrap others.
_WRAPPING = (
    optimizer.Accumulator,
    optimizer.CompositeOptimizer,
    optimizer.DistributedShampoo,
    optimizer.DynamicAccumulator,
)

# Methods of a task that lingvo's trainers call and this trainer does not.
_NOT_CALLED = (
    *("BProp", "_BPropForVariables", "_BPropGenTrainOps"),
    *("FProp", "FPropDefaultTheta", "_FPropSplitInputBatch"),
)
# Classes whose overrides are harmless: UniTransformer reports metrics, and `trained_variables`
# handles DistillationTask.
_KNOWN = (base_model.__name__, "lingvo.core.gshard_builder", distillation_task.__name__)
# Longer values are not shown in errors.
_LONGEST = 60


def _is_given(value: Any, task: Any) -> bool:
    del task
    return bool(value)


# The README lists all params; these are refused: their names, each after its owner, a function that
# takes a value and the task's params, and the remedy.
RULES: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("task.task_global_step", _is_given, "there is one global step; leave it out"),
    (
        "task.defer_global_step_update",
        _is_given,
        "each step updates the weights; leave it out (more microbatches accumulate gradients)",
    ),
    (
        "train.early_stop",
        lambda value, _: bool(value and value.window > 0),
        "give --early_stop=N, for N evaluations without a better one, and leave its window 0",
    ),
    (
        "train.vn_std train.vn_start_step",
        lambda value, task: bool(task.train.vn_std > 0 and task.vn and task.vn.per_step_vn),
        "leave p.vn.per_step_vn out, whose noise would be in evaluations, too",
    ),
    (
        "train.init_from_checkpoint_rules train.init_from_checkpoint_override",
        _is_given,
        "it is for lingvo's trainer; put the checkpoint into the log directory instead (pipemesh "
        "checkpoint convert), and leave it out",
    ),
    ("train.pruning_hparams_dict", _is_given, "weights are not pruned here; leave it out"),
    (
        "train.enqueue_max_steps",
        lambda value, _: value is not None and value >= 0,
        "data without end is read; leave it out",
    ),
    (
        "train.learner",
        lambda value, _: isinstance(value, list | tuple) and not value,
        "nothing would be trained; give it a learner, or several with weights of their own",
    ),
    (
        "learner.scale_gradients",
        lambda value, _: not value,
        "gradients that are not finite would be applied; leave it True",
    ),
    (
        "learner.optimizer",
        lambda value, _: issubclass(value.cls, _WRAPPING),
        "it keeps its state in steps that are not one, so it cannot be saved between them; use "
        "one that updates all weights in each step (more microbatches accumulate gradients, too)",
    ),
    (
        "learner.lr_schedule",
        lambda value, _: bool(params_within(value, schedule.DevBasedSchedule)),
        "a DevBasedSchedule reads what lingvo's evaler writes; give one that depends on the step",
    ),
)


def check_params(task: Any, learns: bool = True) -> None:
    """Raises TrainingError if a task has params that cannot be honoured, or that matter for
    evaluation if not `learns`.
    """
    if task.train is None:
        raise TrainingError(f"{task.name}: p.train is None; give it a learner")
    for name in _NOT_CALLED:
        if (method := getattr(task.cls, name)).__module__ not in _KNOWN:
            raise TrainingError(
                f"{task.name}: its {method.__qualname__} is not called here, but FPropTower and "
                "the learner are; override ComputePredictions, ComputeLoss or AdjustGradients "
                "instead"
            )
    owners = {"task": [task], "train": [task.train], "learner": learners_of(task)}
    for names, is_refused, advice in RULES:
        for path in names.split():
            owner, _, name = path.partition(".")
            for holder in owners[owner]:
                if name not in holder or not (learns or path == "train.learner"):
                    continue
                if is_refused(holder.Get(name), task):
                    whose = "of its learner " if owner == "learner" else ""
                    shown = name if owner == "learner" else f"p.{path.removeprefix('task.')}"
                    value_text = _text(holder.Get(name))
                    raise TrainingError(f"{task.name}: {whose}{shown}{value_text}: {advice}")


def params_within(params: Any, kind: type) -> list[Any]:
    """Returns the params of the outermost objects of a class within params, at any depth."""
    matches: list[Any] = []

    def enter(_: str, value: Any) -> bool:
        made_class = getattr(value, "cls", None)
        is_match = inspect.isclass(made_class) and issubclass(made_class, kind)
        if is_match:
            matches.append(value)
        return not is_match

    params.Visit(lambda *_: None, enter_fn=enter)
    return matches


def trained_variables(task: Any) -> Any:
    """Returns the variables of a task, nested, that its learner may update."""
    is_distilled = isinstance(task, distillation_task.DistillationTask)
    return task.student.vars if is_distilled and not task.params.train_teacher else task.vars


# Which weights a learner trains, and which of them it leaves out.
_FILTERS = ("bprop_variable_filter", "bprop_variable_exclusion")


def set_filters(task: Any, freeze: str | None, train_only: str | None) -> None:
    """Sets the filters of a task's learner to the given regular expressions of names."""
    if freeze is None and train_only is None:
        return
    learner = only_learner(task, "--freeze and --train_only set")
    for field, pattern in zip(_FILTERS, (train_only, freeze), strict=True):
        if pattern and (own := learner.Get(field)):
            raise TrainingError(
                f"{task.name}: its learner has {field} {own!r} already; change that, or leave "
                f"{pattern!r} out"
            )
        if pattern:
            learner.Set(**{field: pattern})


def take_filters(task: Any) -> list[list[str | None]]:
    """Takes the filters of names out of a task's learners, which would apply them to slices."""
    filters: list[list[str | None]] = []
    for learner in learners_of(task):
        filters.append([learner.Get(field) for field in _FILTERS])
        learner.Set(**dict.fromkeys(_FILTERS))
    return filters


def filtered(filters: Sequence[str | None], names: Sequence[str]) -> list[str]:
    """Returns the logical names of the weights that a learner's filters leave to be trained.

    Raises:
        TrainingError: a filter is no regular expression or finds no weight, or none is left.
    """
    kept = set(names)
    for field, pattern in zip(_FILTERS, filters, strict=True):
        if not pattern:
            continue
        try:
            # lingvo's names of variables.
            found = {name for name in names if re.search(pattern, f"{name}:0")}
        except re.error as error:
            raise TrainingError(
                f"{field} {pattern!r} is no regular expression ({error})"
            ) from error
        if not found:
            near = nearest(pattern, names) or next(iter(names), "none")
            raise TrainingError(
                f"{field} {pattern!r} finds none of the {len(names)} weights, such as {near!r}"
            )
        kept = kept & found if field == _FILTERS[0] else kept - found
    if names and not kept:
        raise TrainingError(
            f"bprop_variable_filter {filters[0]!r} and bprop_variable_exclusion {filters[1]!r} "
            "leave no weight to be trained; change them"
        )
    return [name for name in names if name in kept]


def _text(value: Any) -> str:
    """Returns a value as text, if it is short."""
    if inspect.isclass(kind := getattr(value, "cls", None)):
        return f"={kind.__name__}"
    text = f"={value!r}"
    return text if len(text) <= _LONGEST and "\n" not in text else ""


# The default lowest and highest rate of a ramp.
LOW, HIGH = 1e-7, 10.0
# Number of samples of a schedule, evenly by step and by its logarithm, and again around the
# maximum.
_PLACES = 200


class Ramp(schedule.BaseSchedule):
    """A schedule of learning rates that grow by the same factor each step, from `first_step` on."""

    first_step = 0

    @classmethod
    def Params(cls) -> Any:
        """Defines `steps`, `low` and `high`."""
        p = super().Params()
        p.Define("steps", 100, "How many there are; at least 2.")
        p.Define("low", LOW, "The lowest one.")
        p.Define("high", HIGH, "The highest one.")
        return p

    def Value(self, step: Any = None) -> tf.Tensor:
        """Returns the learning rate of a step; after the last step of the ramp the highest rate."""
        p = self.params
        now: Any = self.GetStep(step)
        share = tf.cast(now - self.first_step, p.dtype) / (p.steps - 1)
        share = tf.clip_by_value(share, 0.0, 1.0)
        return p.low * tf.exp(share * math.log(p.high / p.low))


class CosineFall(schedule.BaseSchedule):
    """A schedule from `start` to `limit`, as lingvo's `LinearSchedule`, along half a cosine.

    Loshchilov and Hutter, "SGDR", 2017, equation 5.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `start` and `limit`."""
        p = super().Params()
        p.Define("start", (0, 1.0), "The step and the value at which it begins.")
        p.Define("limit", (1, 0.0), "The step and the value at which it ends.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        (first, _), (last, _) = self.params.start, self.params.limit
        angle = schedule.LinearSchedule.Params().Set(start=(first, 0.0), limit=(last, math.pi))
        self.CreateChild("angle", angle)

    def Value(self, step: Any = None) -> tf.Tensor:
        """Returns the value of a step."""
        (_, first), (_, last) = self.params.start, self.params.limit
        return last + (first - last) * (1 + tf.cos(self.angle.Value(step))) / 2


def ramped(task: Any, steps: int) -> Any:
    """Returns a copy of a task's params with a `Ramp` in place of its schedule, if it has one."""
    copy = task.Copy()
    if learners_of(copy):
        ramp = Ramp.Params().Set(name="ramp", steps=steps)
        rates = only_learner(copy, "--find_learning_rate tries those of")
        rates.Set(learning_rate=1.0, lr_schedule=ramp)
    return copy


def has_state(task: Any) -> bool:
    """Returns whether the task's learning rate schedule has variables."""
    rates, _ = rates_of(task)
    return rates is not None and bool(rates.lr_schedule.Instantiate().vars.Flatten())


def peak_rate(task: Any, steps: int) -> tuple[str, float, float] | None:
    """Returns the name and value of a task's base rate, and its largest product with the schedule
    up to `steps`, by sampling; None if the schedule gives no value.
    """
    rates, name = rates_of(task)
    last = max(steps - 1, 0)

    def value(step: int) -> float:
        return float(own_schedule.Value(tf.constant(step, tf.int64)))

    try:
        own_schedule = rates.lr_schedule.Instantiate()
        if own_schedule.vars.Flatten():
            return None
        evenly = np.linspace(0, last, _PLACES)
        looked_at = np.unique(np.rint([*evenly, *np.geomspace(1, last + 1, _PLACES) - 1]))
        values = [value(int(step)) for step in looked_at]
        at = int(np.argmax(values))
        around = looked_at[max(at - 1, 0)], looked_at[min(at + 1, len(looked_at) - 1)]
        closer = np.unique(np.rint(np.linspace(*around, _PLACES)))
        peak = max(value(int(step)) for step in closer)
    # A user's schedule may raise anything outside of a run.
    except Exception:
        return None
    return name, rates.learning_rate, rates.learning_rate * peak


def rates_of(task: Any) -> tuple[Any, str]:
    """Returns the params with the learning rate, of the learner or of `p.train`, and its name."""
    learner = task.train and task.train.learner
    if isinstance(learner, list | tuple):
        # The loss of the first one is the task's.
        return (learner[0] if learner else None), "p.train.learner[0].learning_rate"
    if learner is not None:
        return learner, "p.train.learner.learning_rate"
    return task.train, "p.train.learning_rate"


def learners_of(task: Any) -> list[Any]:
    """Returns the params of a task's learners; of `p.train` itself, if it has no `learner`."""
    learner = task.train and task.train.learner
    if isinstance(learner, list | tuple):
        return list(learner)
    return [each for each in (learner or task.train,) if each is not None]


def only_learner(task: Any, doing: str) -> Any:
    """Returns the params of the task's learner; raises TrainingError if it has several, which
    begins with `doing`.
    """
    learners = learners_of(task)
    if len(learners) > 1:
        names = ", ".join(learner.name for learner in learners)
        raise TrainingError(
            f"{task.name}: {doing} one learner, but p.train.learner has {names}; change them in "
            "Task()"
        )
    return learners[0] if learners else None
