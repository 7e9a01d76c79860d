"""Params of lingvo tasks: the supported ones, and learning rates that grow from step to step."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip


import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import (
    base_input_generator,
    base_layer,
    base_model,
    datasource,
    distillation_task,
    learner,
    optimizer,
    schedule,
)

from pipemesh.errors import TrainingError

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


@dataclasses.dataclass(frozen=True)
class Rule:
    """The treatment of some params.

    Attributes:
        names: their names; the first word of each is the owner.
        told: the treatment, for the table.
        refused: tells from a value and the task's params whether the value is refused; None if no
            value is.
        advice: a remedy.
    """

    names: str
    told: str
    refused: Callable[[Any, Any], bool] | None = None
    advice: str = ""


def _is_given(value: Any, task: Any) -> bool:
    del task
    return bool(value)


def _holds(params: Any, kinds: tuple[type, ...]) -> bool:
    """Returns whether params contain, at any depth, an instance of a class."""
    found: list[bool] = []

    def enter(_: str, value: Any) -> bool:
        kind = getattr(value, "cls", None)
        found.append(inspect.isclass(kind) and issubclass(kind, kinds))
        return True

    params.Visit(lambda *_: None, enter_fn=enter)
    return any(found)


RULES = (
    Rule("task.input", "the input of the dataset that is trained on, or judged by"),
    Rule("task.encoder task.online_encoder task.decoder", "the task's own"),
    Rule(
        "task.task_global_step",
        "refused",
        _is_given,
        "there is one global step; leave it out",
    ),
    Rule(
        "task.defer_global_step_update",
        "refused",
        _is_given,
        "each step updates the weights; leave it out (more microbatches accumulate gradients)",
    ),
    Rule("task.ml_perf", "nothing is logged for that benchmark"),
    Rule("task.train task.eval", "see below"),
    Rule("train.max_steps", "the default of `--steps`, where it is not lingvo's own"),
    Rule(
        "train.early_stop",
        "refused with a `window`; `--early_stop` instead",
        lambda value, _: bool(value and value.window > 0),
        "give --early_stop=N, for N evaluations without a better one, and leave its window 0",
    ),
    Rule(
        "train.vn_std train.vn_start_step",
        "honoured; refused with `p.vn.per_step_vn`, which would be in evaluations, too",
        lambda value, task: bool(task.train.vn_std > 0 and task.vn and task.vn.per_step_vn),
        "leave p.vn.per_step_vn out, whose noise would be in evaluations, too",
    ),
    Rule("train.ema_decay train.ema_decay_moving_vars train.ema_schedule", "honoured"),
    Rule(
        "train.init_from_checkpoint_rules train.init_from_checkpoint_override",
        "refused; `pipemesh checkpoint convert` instead",
        _is_given,
        "it is for lingvo's trainer; put the checkpoint into the log directory instead (pipemesh "
        "checkpoint convert), and leave it out",
    ),
    Rule(
        "train.pruning_hparams_dict",
        "refused",
        _is_given,
        "weights are not pruned here; leave it out",
    ),
    Rule(
        "train.enqueue_max_steps",
        "refused",
        lambda value, _: value is not None and value >= 0,
        "data without end is read; leave it out",
    ),
    Rule(
        "train.save_interval_seconds train.save_interval_steps train.save_max_to_keep "
        "train.save_keep_checkpoint_every_n_hours train.async_checkpointing "
        "train.checkpoint_finite_check",
        "`--save_every`, `--max_to_keep` and `--keep_best` instead; all checkpoints are finite",
    ),
    Rule("train.summary_interval_steps", "each step is recorded"),
    Rule("train.keep_per_example_loss", "metrics are those that `ComputeLoss` returns"),
    Rule(
        "train.start_up_delay_steps train.tpu_steps_per_loop train.tpu_device_order_mode "
        "train.tpu_computation_shape",
        "of no matter without asynchronous replicas and loops on TPUs",
    ),
    Rule(
        "train.learner",
        "one; a list of several is refused",
        lambda value, _: isinstance(value, list | tuple) and len(value) != 1,
        "several, or none, could fail one by one; give it one",
    ),
    Rule(
        "learner.loss_name",
        "one; a list is refused",
        lambda value, _: isinstance(value, list | tuple),
        "let ComputeLoss add the losses up to one, and give its name",
    ),
    Rule(
        "learner.gradient_combiner",
        "refused",
        _is_given,
        "there is one loss; let ComputeLoss add several up, and leave it out",
    ),
    Rule(
        "learner.scale_gradients",
        "refused if False",
        lambda value, _: not value,
        "gradients that are not finite would be applied; leave it True",
    ),
    Rule(
        "learner.optimizer",
        "honoured; refused where its state spans steps (`Accumulator` and the like)",
        lambda value, _: issubclass(value.cls, _WRAPPING),
        "it keeps its state in steps that are not one, so it cannot be saved between them; use "
        "one that updates all weights in each step (more microbatches accumulate gradients, too)",
    ),
    Rule(
        "learner.lr_schedule",
        "honoured; refused with a `DevBasedSchedule`",
        lambda value, _: _holds(value, (schedule.DevBasedSchedule,)),
        "a DevBasedSchedule reads what lingvo's evaler writes; give one that depends on the step",
    ),
    Rule(
        "learner.learning_rate learner.l1_regularizer_weight learner.l2_regularizer_weight "
        "learner.clip_gradient_norm_to_value learner.clip_gradient_single_norm_to_value "
        "learner.grad_norm_to_clip_to_zero learner.grad_norm_tracker "
        "learner.bprop_variable_filter learner.bprop_variable_exclusion "
        "learner.skip_zero_gradients learner.learner_use_variable_scope",
        "honoured, in the learner or in `p.train`",
    ),
    Rule(
        "learner.grad_aggregation_method learner.gate_gradients "
        "learner.colocate_gradients_with_ops",
        "of no matter, as in lingvo's eager mode",
    ),
    Rule(
        "eval.samples_per_summary eval.decoder_samples_per_summary eval.load_checkpoint_from "
        "eval.start_eval_after eval.start_decoder_after eval.eval_all_checkpoints "
        "eval.decode_all_checkpoints",
        "`--eval_every`, `--eval_batches` and `pipemesh evaluate` instead",
    ),
    Rule(
        "input.batch_size input.file_datasource input.file_pattern input.file_random_seed "
        "input.file_buffer_size input.file_buffer_size_in_seconds input.file_parallelism "
        "input.flush_every_n input.num_batcher_threads input.repeat_count "
        "input.use_within_batch_mixing input.batch_mixing_partition_boundaries "
        "input.all_zero_source_id_without_within_batch_mixing input.bucket_upper_bound "
        "input.bucket_batch_limit input.bucket_adjust_every_n input.source_max_length "
        "input.target_max_length input.pad_to_max_seq_length input.tokenizer "
        "input.tokenizer_dict input.resettable",
        "honoured by the input itself",
    ),
    Rule("input.num_samples", "says how long an epoch of held-out data is, where it has no end"),
    Rule(
        "input.eval_samples_per_summary input.decoder_samples_per_summary",
        "`--eval_batches` instead",
    ),
    Rule(
        "input.filter_sparse_tensors input.use_per_host_infeed input.use_per_core_infeed "
        "input.tpu_infeed_parallelism input.use_partitioned_infeed_queue input.num_partitions "
        "input.remote input.input_stats_summary_interval_steps input.tpu_embedding_mode "
        "input.use_tpu_embedding_v2 input.cpu_passthrough_keys input.outfeed_in_logical_order "
        "input.use_tf_data_service",
        "of no matter without infeeds, remote inputs and embeddings of TPUs",
    ),
    Rule(
        "source.bprop_variable_filters",
        "honoured: gradients of weights that the chosen source does not train are 0",
    ),
    Rule(
        "source.boundaries",
        "refused: a `CurriculumDataSource` goes by the global step, which data that is read ahead "
        "does not know",
    ),
    Rule(
        "source.sub source.weights source.file_pattern source.file_pattern_prefix "
        "source.file_type source.source_id_offset source.fn source.kwargs source.sentinel_key "
        "source.sentinel_value source.load_fn source.shuffle_buffer_size source.seqlen_fn "
        "source.input_shape_fn source.input_padding_fn source.bucket_upper_bound "
        "source.bucket_batch_limit source.buffer_size source.broadcast_dataset_structures "
        "source.processing_mode",
        "honoured by the source itself",
    ),
)


def check_params(task: Any, learns: bool = True) -> None:
    """Raises TrainingError if a task has params that cannot be honoured.

    If `learns` is False, only params that matter for evaluation are checked.
    """
    if task.train is None:
        raise TrainingError(f"{task.name}: p.train is None; give it a learner")
    for name in _NOT_CALLED:
        if (found := getattr(task.cls, name)).__module__ not in _KNOWN:
            raise TrainingError(
                f"{task.name}: its {found.__qualname__} is not called here, but FPropTower and the "
                "learner are; override ComputePredictions, ComputeLoss or AdjustGradients instead"
            )
    owners = {"task": task, "train": task.train, "learner": _learner_of(task)}
    for rule in RULES:
        for path in rule.names.split():
            owner, _, name = path.partition(".")
            holder = owners.get(owner)
            is_judged = path in ("train.learner", "learner.loss_name", "learner.gradient_combiner")
            if rule.refused is None or holder is None or name not in holder:
                continue
            if (learns or is_judged) and rule.refused(holder.Get(name), task):
                whose = "of its learner " if owner == "learner" else ""
                shown = name if owner == "learner" else f"p.{path.removeprefix('task.')}"
                given = _text(holder.Get(name))
                raise TrainingError(f"{task.name}: {whose}{shown}{given}: {rule.advice}")


def trained_variables(task: Any) -> Any:
    """Returns the variables of a task, nested, that its learner may update."""
    is_distilled = isinstance(task, distillation_task.DistillationTask)
    return task.student.vars if is_distilled and not task.params.train_teacher else task.vars


def _text(value: Any) -> str:
    """Returns a value as text, if it is short."""
    if inspect.isclass(kind := getattr(value, "cls", None)):
        return f"={kind.__name__}"
    text = f"={value!r}"
    return text if len(text) <= _LONGEST and "\n" not in text else ""


def _learner_of(task: Any) -> Any:
    """Returns the params that define a task's learner: its own, or those of `p.train`."""
    found = task.train.learner
    if isinstance(found, list | tuple):
        return found[0] if found else None
    return found or task.train


def lingvo_names() -> set[str]:
    """Returns the names of all lingvo params that the table covers."""
    of_layers = set(dict(base_layer.BaseLayer.Params().IterParams()))
    task = base_model.BaseTask.Params()
    of_learner = set(dict(learner.Learner.Params().IterParams())) - of_layers
    sources = [
        each.Params()
        for each in vars(datasource).values()
        if inspect.isclass(each) and issubclass(each, datasource.DataSource)
    ]
    inputs = [base_input_generator.BaseSequenceInputGenerator.Params()]
    inputs.append(base_input_generator.BaseInputGeneratorFromFiles.Params())
    groups = {"task": [task], "eval": [task.eval], "input": inputs, "source": sources}
    return {
        *(f"train.{name}" for name, _ in task.train.IterParams() if name not in of_learner),
        *(f"learner.{name}" for name in of_learner),
        *(
            f"{owner}.{name}"
            for owner, holders in groups.items()
            for holder in holders
            for name, _ in holder.IterParams()
            if name not in of_layers
        ),
    }


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| param | |"
    yield "|---|---|"
    for rule in RULES:
        yield f"| {', '.join(f'`{name}`' for name in rule.names.split())} | {rule.told} |"


if __name__ == "__main__":
    print("\n".join(table()))

# The default lowest and highest rate of a ramp.
LOW, HIGH = 1e-7, 10.0
# Number of samples of a schedule, evenly by step and by its logarithm, and again around the
# maximum.
_PLACES = 200


class Ramp(schedule.BaseSchedule):
    """A schedule of learning rates that grow by the same factor each step.

    Attributes:
        first_step: the step with the lowest rate.

    Example:
        >>> from lingvo.core import py_utils
        >>> py_utils.SetEagerMode(True, test_mode=True)
        >>> ramp = Ramp.Params().Set(steps=3, low=0.01, high=1.0).Instantiate()
        >>> ramp.first_step = 10
        >>> [round(float(ramp.Value(tf.constant(step))), 4) for step in (10, 11, 12)]
        [0.01, 0.1, 1.0]
        >>> py_utils.SetEagerMode(False, test_mode=True)
    """

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


def ramped(task: Any, steps: int) -> Any:
    """Returns a copy of a task's params with a `Ramp` as learning rate; unchanged without a
    learner.
    """
    copy = task.Copy()
    rates, _ = _rates_of(copy)
    if rates is not None:
        ramp = Ramp.Params().Set(name="ramp", steps=steps)
        rates.Set(learning_rate=1.0, lr_schedule=ramp)
    return copy


def has_state(task: Any) -> bool:
    """Returns whether the task's learning rate schedule has variables."""
    rates, _ = _rates_of(task)
    return rates is not None and bool(rates.lr_schedule.Instantiate().vars.Flatten())


def peak_rate(task: Any, steps: int) -> tuple[str, float, float] | None:
    """Returns the largest learning rate of a task's own schedule between step 0 and `steps`.

    The result is the name of the base rate, its value, and the largest product with the schedule at
    many sampled steps. It is None if the schedule gives no value.
    """
    rates, name = _rates_of(task)
    last = max(steps - 1, 0)

    def value(step: int) -> float:
        return float(own.Value(tf.constant(step, tf.int64)))

    try:
        own = rates.lr_schedule.Instantiate()
        if own.vars.Flatten():
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


def name_of_rate(task: Any) -> str:
    """Returns the name of the param that sets a task's learning rate."""
    return _rates_of(task)[1]


def _rates_of(task: Any) -> tuple[Any, str]:
    """Returns the params with the learning rate, of the learner or the task, and its name."""
    train = task.train
    learner = None if train is None else train.learner
    if isinstance(learner, list | tuple):
        # Without exactly one learner, other code raises an error.
        return (learner[0] if learner else None), "p.train.learner[0].learning_rate"
    if learner is not None:
        return learner, "p.train.learner.learning_rate"
    return train, "p.train.learning_rate"
