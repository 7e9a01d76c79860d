"""A lingvo task with all variables of a run, and the graphs of a step and an evaluation."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip


import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import base_model, cluster_factory, py_utils
from lingvo.core import learner as lingvo_learner

from pipemesh.backend.complete_graphs import (
    pass_variables_as_one,
    place_beside_inputs,
    skip_passing_on,
)
from pipemesh.backend.saved_state import create_slots
from pipemesh.errors import PipemeshError, TrainingError
from pipemesh.hosts.client import note_stages
from pipemesh.layers import PipeliningLayer, mesh_cluster
from pipemesh.layers.named import by_logical_name
from pipemesh.layers.pipeline.weights import with_frozen
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.plan import Plan
from pipemesh.recurrent import LossScale
from pipemesh.training.inputs import made
from pipemesh.training.lingvo_params import (
    check_params,
    filtered,
    take_filters,
    trained_variables,
)
from pipemesh.training.subject import SOURCE


class Squares:
    """Sums of squares of gradients, which are computed once for each gradient."""

    def __init__(self) -> None:
        # By id, gradients that are kept with it, so that no other gets the same id.
        self._halves: dict[int, tuple[Any, tf.Tensor]] = {}

    def total(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Returns the sum over all gradients, 0 without any."""
        halves = [self._half(gradient) for gradient in gradients]
        return 2 * tf.add_n(halves) if halves else tf.constant(0.0)

    def _half(self, gradient: Any) -> tf.Tensor:
        if id(gradient) not in self._halves:
            rows = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            with tf.device(rows.device):
                # One pass over memory, which writes nothing.
                self._halves[id(gradient)] = gradient, tf.nn.l2_loss(rows)
        return self._halves[id(gradient)][1]


@contextlib.contextmanager
def finite_gradients(learner: Any, squares: Squares, is_adjusted: bool = False) -> Iterator[None]:
    """Lets lingvo's learner take for granted that its gradients are finite once they went through
    `all_or_none`, which is given the same `squares`; `is_adjusted` says that it also changes them.

    Gradients are then read twice, to square and to scale them. lingvo's own way is about ten
    operations for each: it also writes the squares, looks twice for values that are not finite, and
    squares all weights. The scaled gradients are the same. Of the learner's metrics only
    `grad_norm/all` is left, and those of its learning rate and regularizers.
    """
    p = learner.params
    # A learner of another class may use what lingvo's adds.
    is_lingvos = type(learner).ScaleGradients is lingvo_learner.Learner.ScaleGradients
    if (
        not is_lingvos
        or p.clip_gradient_single_norm_to_value
        # It keeps an average of norms, which only a finite one may change.
        or p.grad_norm_tracker
        or cluster_factory.Current().add_summary
    ):
        yield
        return
    scales = bool(p.clip_gradient_norm_to_value or p.grad_norm_to_clip_to_zero)

    def scaled(var_grads: Any, gradient_adjuster: Callable[[Any], Any]) -> Any:
        norm = tf.sqrt(squares.total([gradient for _, gradient in var_grads.Flatten()]))
        learner._AddEvalMetric("grad_norm/all", norm, tf.constant(1.0))
        checked = gradient_adjuster(var_grads)
        if not scales and not is_adjusted:
            return py_utils.NestedMap(final_var_grads=checked)
        scale = learner._GetGlobalGradScale(norm, ~tf.math.is_finite(norm))

        def times(pair: Any) -> Any:
            variable, gradient = pair
            with tf.device(variable.device):
                return py_utils.VarGrad(variable, _of_values(gradient, scale_of))

        def scale_of(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(scale, values.dtype) * values

        return py_utils.NestedMap(final_var_grads=checked.Transform(times))

    learner.ScaleGradients = scaled
    try:
        yield
    finally:
        del learner.ScaleGradients


def _of_values(gradient: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns a gradient with other values, of rows if it is one of rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def prepare_optimizer(learner: Any, variables: Sequence[tf.Variable], step: tf.Variable) -> None:
    """Creates the optimizer's variables now.

    A checkpoint can then be restored into them, and TensorFlow traces the training function once.

    Args:
        learner: a lingvo learner.
        variables: the variables that it will update.
        step: the global step.
    """
    lingvo_optimizer = learner.optimizer
    with py_utils.GlobalStepContext(step):
        slots = lingvo_optimizer.GetOptimizer(learner.LearningRate)
    with tf.init_scope():
        create_slots(slots, variables)
    lingvo_optimizer._optimizer = slots


# Texts of the error that ends a step.
NOT_FINITE = "the norm of all gradients is not finite"
LOSS_NOT_FINITE = "the loss is not finite"
OVERFLOWED = "the scaled gradients of a pipeline are not finite"


def all_or_none(
    var_grads: Any,
    loss: tf.Tensor | None = None,
    scales: Sequence[LossScale] = (),
    squares: Squares | None = None,
) -> Any:
    """Holds back all updates until all gradients are known to be finite.

    lingvo checks each gradient separately, so a failed step leaves some weights new and some old;
    its optimizers move weights by momentum even where a gradient is 0.

    Args:
        var_grads: a NestedMap of lingvo's pairs of variable and gradient; pass the function to
            `Learner.Apply(..., gradient_adjuster=all_or_none)`.
        loss: a loss that must be finite as well; None if other code checks it.
        scales: the loss scales of pipelines that compute in float16; these set overflowed gradients
            to 0.
        squares: those of gradients that are already known. Default: of none.

    Returns:
        The same gradients, available only if the norm of all is finite. Otherwise a function that
        is called eagerly raises an error with `NOT_FINITE`, `LOSS_NOT_FINITE` or `OVERFLOWED`, and
        only the scales have changed.

    Example:
        >>> w = tf.Variable([1.0, 2.0])
        >>> pairs = py_utils.NestedMap(w=py_utils.VarGrad(w, tf.constant([3.0, 4.0])))
        >>> all_or_none(pairs).w.grad.numpy().tolist()
        [3.0, 4.0]
    """
    gradients = [gradient for _, gradient in var_grads.Flatten()]
    squared: Any = (squares or Squares()).total(gradients)
    conditions = [(tf.math.is_finite(squared), NOT_FINITE, "all_gradients")]
    if scales:
        # The flags are known once all gradients are.
        with tf.control_dependencies([squared]):
            is_finite = tf.reduce_all(tf.stack([scale.finite for scale in scales]))
        conditions.insert(0, (is_finite, OVERFLOWED, "scaled_gradients"))
    if loss is not None:
        is_finite = tf.reduce_all(tf.math.is_finite(loss))
        conditions.insert(0, (is_finite, LOSS_NOT_FINITE, "loss"))
    # Only the first failed check raises its error.
    checks, is_known = [], tf.constant(False)
    for is_finite, text, name in conditions:
        checks.append(tf.debugging.Assert(is_finite | is_known, [text], name=name))
        is_known |= ~is_finite

    def behind_check(pair: Any) -> Any:
        variable, gradient = pair
        with tf.control_dependencies([check for check in checks if check is not None]):
            return py_utils.VarGrad(variable, _of_values(gradient, _on))

    return var_grads.Transform(behind_check)


def is_not_finite(text: str) -> bool:
    """Returns whether an error reports values that are not finite, whatever raised it."""
    return re.search(r"\bnot finite\b|\b(nan|inf)\b", text, re.IGNORECASE) is not None


def _on(gradient: tf.Tensor) -> tf.Tensor:
    """Returns the gradient on its own device, where the weight is updated."""
    with tf.device(gradient.device or None):
        return tf.identity(gradient)


class TrainedTask:
    """A task, its optimizer if it `learns`, and the moving averages of its weights, if any."""

    def __init__(
        self, params: Any, plan: Plan, device_type: str, seed: int, learns: bool = True
    ) -> None:
        check_params(params, learns)
        params = params.Copy()
        filters = take_filters(params)
        self._plan, self._device_type = plan, device_type
        tf.random.set_seed(seed)
        with self.cluster():
            self.step = py_utils.GetOrCreateGlobalStepVar()
            self.step.assign(0)
            self.skipped = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            # lingvo creates moving averages in the model around the task.
            try:
                self._model = base_model.SingleTaskModel.Params(params).Instantiate()
            except Exception:
                if params.input is not None:
                    # The task creates its input; making it separately gives an error that names the
                    # input.
                    made(params.input)
                raise
            self.task: Any = self._model.GetTask()
            self.pipelines = pipelines_of(self.task)
            # A task without a pipeline runs on the first device.
            homes = [home for stack in self.pipelines for home in stack.StageHomes()]
        self.devices = [home.devices for home in homes]
        note_stages(self.devices)
        self.learners: list[Any] = list(self.task.learners)
        losses = [learner.params.loss_name or learner.params.name for learner in self.learners]
        # All losses that are trained on; the first is the task's.
        self._losses: list[str] = list(dict.fromkeys(tf.nest.flatten(losses)))
        self.loss = self._losses[0]
        # For each source of the data a regular expression of names of the weights that it trains
        # (`bprop_variable_filters`).
        self.filters: Sequence[str] = ()
        # The CPU of the worker on which batches lie; "" for this process.
        self.reader = ""
        # Variables that the step updates outside the optimizer, and their values before the step.
        self._others: list[tf.Variable] = []
        self._before: list[tf.Variable] = []
        self._scales = [s.loss_scale for s in self.pipelines if s.loss_scale is not None]
        self._learns = learns
        # By logical name, the variables of each trained weight; refs of those that are not trained.
        self._learned: dict[str, list[tf.Variable]] = {}
        self._frozen: set[Any] = set()
        # For each learner, the variables that it updates.
        self._trained: list[Any] = []
        if learns:
            weights = trained_variables(self.task).Filter(lambda v: v.trainable)
            named = by_logical_name(self.task, weights.Flatten())
            for learner, patterns in zip(self.learners, filters, strict=True):
                names = filtered(patterns, [*named])
                if twice := [name for name in names if name in self._learned]:
                    raise TrainingError(
                        f"{self.task.params.name}: the learner {learner.params.name!r} trains "
                        f"{twice[0]!r}, which another one trains, too; tell their weights apart by "
                        "bprop_variable_filter or bprop_variable_exclusion"
                    )
                for name in names:
                    parts = getattr(named[name], "parts", [(named[name], None)])
                    self._learned[name] = [part for part, _ in parts]
                kept = {v.ref() for name in names for v in self._learned[name]}
                # Nested, as the learner takes them.
                self._trained.append(weights.Filter(lambda v, kept=kept: v.ref() in kept))
                prepare_optimizer(learner, self._trained[-1].Flatten(), self.step)
            trained = {v.ref() for parts in self._learned.values() for v in parts}
            self._frozen = {v.ref() for v in self.task.vars.Flatten() if v.trainable} - trained
            self._others = [v for v in self.task.vars.Flatten() if not v.trainable]
            self._before = [tf.Variable(v, trainable=False) for v in self._others]

    def cluster(self, do_eval: bool = False) -> Any:
        """Returns the lingvo cluster; enter it around every use of the task."""
        plan = self._plan
        return mesh_cluster(plan.mesh, self._device_type, do_eval, plan.layout, plan.lowering)

    def state(self) -> dict[str, Any]:
        """Returns the variables of a checkpoint, by name."""
        named = functools.partial(by_logical_name, self.task)
        # A run has the scale of a loss in float16; nothing else needs it.
        unused = {v.ref() for s in self._scales if not self._learns for v in s.variables}
        return {
            "global_step": self.step,
            **({"skipped_steps": self.skipped} if self._learns else {}),
            **named([v for v in self.task.vars.Flatten() if v.ref() not in unused]),
            **self._optimizer_state(),
            **named(self.averages()),
        }

    def _optimizer_state(self) -> dict[str, Any]:
        """Returns the optimizers' variables by name."""
        state: dict[str, Any] = {}
        for learner in self.learners if self._learns else ():
            variables = learner.optimizer._optimizer.variables()
            for name, variable in by_logical_name(self.task, variables).items():
                # Optimizers call what they have once alike, such as the power of a beta.
                state[f"{name}/{learner.params.name}" if name in state else name] = variable
        return state

    def frozen(self) -> list[str]:
        """Returns the names in `state` of the weights that are not trained."""
        weights = [v for v in self.task.vars.Flatten() if v.ref() in self._frozen]
        return list(by_logical_name(self.task, weights))

    def weights(self) -> list[str]:
        """Returns the names in `state` that a checkpoint with only weights has."""
        # Others, such as the scale of a loss in float16, are none of the imported model's.
        weights = [v for v in self.task.vars.Flatten() if v.trainable]
        return ["global_step", *by_logical_name(self.task, weights)]

    def begin_averages(self) -> None:
        """Sets the moving averages to the current weights."""
        ema = self.task.ema
        for variable in self.task.vars.Flatten() if ema else []:
            if (average := ema.average(variable)) is not None:
                average.assign(variable)

    def learned(self) -> dict[str, list[tf.Variable]]:
        """Returns the trained weights: by logical name, the variables of each."""
        return {name.removesuffix("/var"): parts for name, parts in self._learned.items()}

    def optimizer_variables(self) -> list[tf.Variable]:
        """Returns the optimizers' variables; none if there is no optimizer."""
        learners = self.learners if self._learns else ()
        return [v for learner in learners for v in learner.optimizer._optimizer.variables()]

    def averages(self) -> list[tf.Variable]:
        """Returns the moving averages of weights, which replace them in evaluation; often none."""
        ema = self.task.ema
        averages = [ema.average(v) for v in self.task.vars.Flatten()] if ema else []
        return [average for average in averages if average is not None]

    def all_devices(self) -> list[str]:
        """Returns the devices of all stages, or the single device."""
        devices = [device for home in self.devices for device in home]
        return devices or [f"/job:localhost/replica:0/task:0/device:{self._device_type}:0"]

    def train(
        self, batch: Any, outcome: Callable[[Any, Any], Any], tells_gradients: bool = False
    ) -> Any:
        """Updates the weights while a graph is built; returns the loss and the learning rate, of
        the first learner if there are several, the norm of all gradients before clipping, the
        result of `outcome`, and gradients before clipping by the names in `learned`.
        """
        # A step that fails, or is not finite, changes only variables that `take_back` restores.
        with tf.control_dependencies(
            [copy.assign(v) for copy, v in zip(self._before, self._others, strict=True)]
        ):
            batch = _nested_map(batch)
        theta = self.task.theta
        if self._frozen:
            theta = with_frozen(self.task, theta, self._frozen)
            # Else a pipeline would send gradients down to the data.
            batch = batch.Transform(lambda t: tf.stop_gradient(t) if t.dtype.is_floating else t)
        mask = self._gradient_mask(batch.pop(SOURCE)) if self.filters else None
        # Each loss of a learner takes its gradients from the tape, which need not record them.
        is_several = len(tf.nest.flatten([x.params.loss_name for x in self.learners])) > 1
        with (
            py_utils.GradientTape(persistent=is_several) as tape,
            py_utils.GlobalStepContext(self.step),
        ):
            py_utils.ResetStepSeed()
            with whole_batch_randomness():
                metrics, per_example = self.task.FPropTower(theta, batch)
            # lingvo identifies graphs by an id that a later graph may reuse.
            self.task._graphs_applied_ema.clear()
            with tape.stop_recording() if is_several else contextlib.nullcontext():
                applied, gradients = self._apply(metrics, mask)
            update = tf.group(*(update for _, update, _ in applied))
            # lingvo's order: averages of updated weights, then updates that depend on them.
            for follow in (
                self.task.PostTrainingStepUpdate,
                self.task.ApplyExponentialMovingAverage,
                self.task.PostEmaUpdate,
            ):
                with tf.control_dependencies([update]):
                    update = tf.group(update, follow())
        # A failed step is not counted.
        with tf.control_dependencies([update]):
            self.step.assign_add(1)
        losses, _, stats = applied[0]
        rate = stats["learning_rate"][0]
        # lingvo computes none if each gradient is clipped by its own.
        norms = [stats.get("grad_norm/all", (None,))[0] for _, _, stats in applied]
        norm = norms[0]
        if len(norms) > 1:
            norm = None if None in norms else tf.norm(tf.stack(norms))
        told = self._gradients_of(gradients) if tells_gradients else {}
        found = outcome(metrics, per_example)
        self._place()
        return losses[0], rate, norm, found, told

    def _place(self) -> None:
        """Lets a call of the current graph, which is complete, send little to devices."""
        graph = tf.compat.v1.get_default_graph()
        if self.reader or any(stack.simd is not None for stack in self.pipelines):
            skip_passing_on(graph)
            place_beside_inputs(graph, self.reader)
        pass_variables_as_one(graph)

    def _apply(self, metrics: Any, mask: Any) -> tuple[list[Any], Any]:
        """Applies all learners, or none if a loss or a gradient of any is not finite; returns what
        each of them returns, and all gradients before clipping.
        """
        losses = [metrics[name][0] for name in self._losses]
        loss = losses[0] if len(losses) == 1 else tf.stack([tf.reduce_sum(x) for x in losses])
        held = py_utils.NestedMap()
        applied: list[Any] = []
        squares = Squares()
        is_adjusted = type(self.task).AdjustGradients is not base_model.BaseTask.AdjustGradients

        def apply(number: int) -> None:
            def adjusted(var_grads: Any) -> Any:
                # A learner that has its gradients waits for those of the others.
                held[f"learner_{number}"] = self.task.AdjustGradients(var_grads)
                if number:
                    apply(number - 1)
                else:
                    held.update(all_or_none(held, loss, self._scales, squares))
                return held[f"learner_{number}"]

            learner = self.learners[number]
            with finite_gradients(learner, squares, is_adjusted):
                applied.append(
                    learner.Apply(
                        metrics,
                        self._trained[number],
                        gradient_mask=mask,
                        gradient_adjuster=adjusted,
                    )
                )

        apply(len(self.learners) - 1)
        return applied, held

    def _gradient_mask(self, source: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns 1 for each variable that the batch's source (a one-hot vector) trains, else 0."""
        return {
            part.name: tf.tensordot(
                tf.constant([float(bool(re.search(f, f"{name}:0"))) for f in self.filters]),
                source,
                1,
            )
            for name, parts in self._learned.items()
            for part in parts
        }

    def _gradients_of(self, var_grads: Any) -> dict[str, list[tf.Tensor]]:
        """Returns gradients by logical name, one for each variable of a weight."""
        gradients = {variable.ref(): gradient for variable, gradient in var_grads.Flatten()}
        return {
            name: [tf.convert_to_tensor(gradients[part.ref()]) for part in parts]
            for name, parts in self.learned().items()
            if all(part.ref() in gradients for part in parts)
        }

    def evaluate(self, batch: Any, outcome: Callable[[Any, Any], Any]) -> Any:
        """Returns the result of `outcome` for a batch, without training."""
        with py_utils.GlobalStepContext(self.step):
            py_utils.ResetStepSeed()
            found = outcome(*self.task.FPropTower(self.task.theta, _nested_map(batch)))
        self._place()
        return found

    def predict(self, batch: Any) -> Any:
        """Returns the task's predictions for a batch as nested tensors, without training."""
        with py_utils.GlobalStepContext(self.step):
            py_utils.ResetStepSeed()
            return self.task.ComputePredictions(self.task.theta, _nested_map(batch))

    def take_back(self, error: tf.errors.OpError) -> str | None:
        """Restores variables that a failed step updated outside the optimizer, such as batch norm
        averages; returns a message if scaled gradients overflowed and the loss scale is halved.
        """
        before = {v.ref(): b for v, b in zip(self._others, self._before, strict=True)}
        halved: list[str] = []
        for scale in self._scales if OVERFLOWED in error.message else ():
            old, now = float(before[scale.variables[0].ref()]), float(scale.value)
            if now < old:
                halved.append(f"{old:g} times the loss overflow float16, {now:g} times from now on")
                for variable in scale.variables:
                    del before[variable.ref()]
        for variable in self._others:
            if variable.ref() in before:
                variable.assign(before[variable.ref()])
        return f"gradients of {'; '.join(halved)}" if halved else None

    def explain(self, error: tf.errors.OpError) -> PipemeshError | None:
        """Returns a one-line error with stage, layer and microbatch; None if no stage failed."""
        errors = (stack.Explain(error) for stack in self.pipelines)
        return next((explained for explained in errors if explained is not None), None)


def pipelines_of(layer: Any) -> list[Any]:
    """Returns the outermost pipelined stacks in a lingvo layer and its children."""
    if isinstance(layer, PipeliningLayer):
        return [layer]
    children: Sequence[Any] = layer.children.Flatten()
    return [stack for child in children for stack in pipelines_of(child)]


def _nested_map(batch: Any) -> Any:
    """Returns a batch in the form that lingvo layers take."""
    return py_utils.NestedMap.FromNestedDict(tf.nest.map_structure(tf.identity, batch))
