"""The pipelined stack of stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import lingvo.compat as tf
from lingvo.core import py_utils, tshape

from pipemesh.errors import PipelineError, PlanError
from pipemesh.layers.check_params import check_theta, is_rest
from pipemesh.layers.feature_extraction import is_stage, to_tuple
from pipemesh.layers.named.scope import exported
from pipemesh.layers.pipeline.accumulators import carried, finish_carries, first_carry
from pipemesh.layers.pipeline.alike_stages import shapes_text
from pipemesh.layers.pipeline.losses import (
    carrying,
    check_head,
    check_none_before,
    has_context,
    refused,
    take_out,
)
from pipemesh.layers.pipeline.seq_layer import SeqLayer
from pipemesh.layers.pipeline.simd_stack import SimdStack
from pipemesh.layers.pipeline.slices import PastOfStage, check_takes_slices, row_work
from pipemesh.layers.pipeline.stack_plan import checked_plan, define_pipelining, plan_of, set_plan
from pipemesh.layers.pipeline.stage import StageStructure, StageWeights, handed_over
from pipemesh.layers.pipeline.weights import (
    cast_first,
    compute_dtypes,
    plain_theta,
    uncast_theta,
)
from pipemesh.layers.step_seed import (
    global_step_in,
    keyed_seeds,
    step_of_call,
    whole_batch_randomness,
)
from pipemesh.plan import Plan
from pipemesh.plan.slices import Progress, equal_work_lengths
from pipemesh.recurrent import (
    DeviceMemory,
    Home,
    LossScale,
    Options,
    Stage,
    Transfer,
    pipeline,
    pipeline_loss,
    predict_memory,
    predict_transfers,
)
from pipemesh.recurrent.circular.alike_pipeline import alike_pipeline
from pipemesh.recurrent.options import INITIAL_SCALE, Clock
from pipemesh.recurrent.passes.captures import check_fresh
from pipemesh.recurrent.stage import current_devices
from pipemesh.recurrent.table.run import with_loss
from pipemesh.recurrent.table.validation import (
    cutting_of,
    microbatch_size,
    sequence_length,
)
from pipemesh.recurrent.watch.explain import explain
from pipemesh.schedule import Schedule


class PipeliningLayer(SeqLayer):
    """A stack that runs the stages of `cell_tpl` on their devices, microbatch by microbatch.

    With `fprop_dtype` bfloat16 or float16 the stages compute in it, from weights in float32.
    Gradients are summed over microbatches in float32. A layer with its own `fprop_dtype` gets its
    weights in that dtype. Only the first argument is cast, and no NestedMap. With float16 the
    pipeline scales the loss (`self.loss_scale`).

    It replaces `lingvo.core.gpipe.PipeliningLayer`, with these differences. The outputs, gradients
    and weights are those of the plain stack for any number of microbatches, including dropout. A
    batch that does not divide is an error; it does not reduce the number of microbatches. Tensors
    between stages keep their dtypes. Running needs no `FPropMeta`.

    Example:
        >>> from lingvo.core import layers, tshape
        >>> from pipemesh.layers import PartitionSequentialLayers
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
        >>> stages = PartitionSequentialLayers([dense] * 4, 2, tshape.Shape([8, 4]))
        >>> params = PipeliningLayer.Params().Set(cell_tpl=stages, num_micro_batches=4)
    """

    @classmethod
    def Params(cls) -> Any:
        """Adds params for microbatches, the schedule and recomputation to those of `SeqLayer`."""
        p = super().Params()
        define_pipelining(p)
        return p

    @classmethod
    def ForPlan(cls, plan: Plan, **params: Any) -> Any:
        """Returns params of a stack that runs by a plan.

        The devices come from the cluster, whose mesh is the plan's. If the plan has layout rules,
        the params have its mesh too, for lingvo's own clusters, which have devices but no axes.

        Args:
            plan: the plan, except for its boundaries: these are those of `cell_tpl`.
            **params: values of further params.

        Example:
            >>> from pipemesh.plan import Plan
            >>> params = PipeliningLayer.ForPlan(Plan("layers:2", num_microbatches=4), name="stack")
            >>> params.num_micro_batches, params.schedule
            (4, '1f1b')
        """
        p = cls.Params()
        set_plan(p, plan)
        p.Set(allow_idle=plan.allow_idle)
        if plan.layout.rules:
            p.Set(mesh_shape=str(plan.mesh), layout=str(plan.layout))
        return p.Set(**params)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        # The functions that eager calls have traced.
        self._eager_runs: dict[Any, Any] = {}
        # The lengths of slices of equal work, by the shapes of the inputs.
        self._lengths_by_shapes: dict[str, tuple[int, ...]] = {}
        # Set it to an ActionClock or Marks before a graph is built to time its actions.
        self.clock: Clock | None = None
        # Set it before a graph is built to locate values that are not finite.
        self.locates_errors = False
        # Set it before a graph is built to receive its run; see `pipemesh.recurrent.Options`.
        self.noted_run: Callable[[Any], None] | None = None

    def _create_cells(self, tpls: Sequence[Any], homes: Sequence[Home], pinned: bool) -> None:
        p = self.params
        self.simd: SimdStack | None = None
        if p.pipelined and p.loss_inside and p.lowering == "simd":
            self.simd = SimdStack(self, self.plan, tpls, pinned)
            # These names are no part of the names of variables that are made next.
            self.stage_names, create = self.simd.names, super()._create_cells
            self.simd.create(lambda stages: create(stages, homes, pinned))
        else:
            super()._create_cells(tpls, homes, pinned)

    def _tying(self, homes: Sequence[Home]) -> contextlib.AbstractContextManager[Any]:
        return super()._tying(homes) if self.simd is None else self.simd.made_on()

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        if self.params.fprop_dtype != tf.float16:
            return
        for name, value in (("loss_scale", INITIAL_SCALE), ("good_steps", 0.0), ("finite", 1.0)):
            init = py_utils.WeightInit.Constant(value)
            weight = py_utils.WeightParams([], init, tf.float32)
            self.CreateVariable(name, weight, trainable=False)

    @property
    def loss_scale(self) -> LossScale | None:
        """Returns the dynamic scale of the loss, or None without float16."""
        if self.params.fprop_dtype != tf.float16:
            return None
        return LossScale(self.vars.loss_scale, self.vars.good_steps, self.vars.finite)

    def _InternalGetTheta(self) -> Any:
        # The pipeline casts the weights of stages, and sums their gradients before that.
        theta = super()._InternalGetTheta()
        if self.ema is None or not self.do_eval:
            theta.update({name: uncast_theta(self.children[name]) for name in self.stage_names})
        return theta

    def _places(self) -> Sequence[int]:
        """Returns the position of each stage in the schedule."""
        return self.schedule.stage_devices

    def Explain(self, error: tf.errors.OpError) -> PipelineError | None:
        """Converts an error of a step with this layer to one line with stage, layer and microbatch.

        Returns:
            The error to raise `from` the given one; None if it did not arise in a stage.
        """
        names = [tpl.name for tpl in self.params.cell_tpl]
        return explain(error, dict(zip(names, self.homes or self.StageHomes(), strict=True)))

    @property
    def schedule(self) -> Schedule:
        """Returns the training schedule, checked against the stages."""
        return self._checked_plan.table

    @functools.cached_property
    def _checked_plan(self) -> Plan:
        """Returns the plan on the cluster that the layer was made on."""
        return checked_plan(self.params, self.cluster)

    @property
    def plan(self) -> Plan:
        """Returns the plan of the stack on the current cluster."""
        return plan_of(self.params, self.cluster)

    # AutoGraph fails on it with long warnings.
    @tf.autograph.experimental.do_not_convert
    def FProp(self, theta: Any, *args: Any) -> Any:
        """Runs the stack.

        Arguments are tensors, each cut along `batch_dim`, or None, plain or nested; with
        `nested_map_fprop` one NestedMap of these.

        Returns:
            The results of the last stage for the whole batch, nested in the same way; with
            `loss_inside` the summed loss, the summed weight and the metrics.

        Raises:
            PipelineError: the batch does not divide into `num_micro_batches`. (In evaluation such a
                batch runs through the stages whole.) Shapes are not static, or an output is not cut
                along the batch. With `loss_inside` the last stage does not return a summed loss and
                a summed weight. Eagerly also if a stage failed or a result is not finite.
            DeviceError: with `strict_devices`, an operation of a stage would run on another device.
            ScheduleError: the schedule needs the loss inside the pipeline.
        """
        p = self.params
        check_theta(p.name, theta)
        if self.simd is not None:
            with refused(p):
                return self.simd.run(theta, args)
        alone = self.cluster.num_devices_per_split == 1
        if not p.pipelined or (self.do_eval and (alone or is_rest(p, args, self.StageHomes()))):
            return super().FProp(plain_theta(self, theta, self.stage_names), *cast_first(p, args))
        schedule = self.schedule
        if self.do_eval and p.loss_inside:
            # With the loss outside, the backward pass is built only if a gradient is requested.
            schedule = schedule.only_forward()
        homes = self.StageHomes()
        step = step_of_call(self)
        with tf.device(homes[0].first), whole_batch_randomness(step):
            args = to_tuple(self.FPropBefore(theta, *args))
        check_none_before(p)
        eagerly = tf.executing_eagerly()
        structure, inputs, weights, carries = self._flat(theta, args, homes)

        def build(
            thetas: Any, inputs: Any, carries: Any, step: Any, structures: list[StageStructure]
        ) -> Any:
            stages = self._stages(weights, homes, thetas, carries, structure, structures, inputs)
            options = self._options(args, inputs, eagerly)
            if not p.loss_inside:
                run = alike_pipeline if p.lowering == "simd" else pipeline
                return run(stages, inputs, schedule, step=step, options=options)
            loss, (weights_of_parts, *metrics), carries = pipeline_loss(
                stages, inputs, schedule, step=step, options=options
            )
            with tf.device(weights_of_parts.device):
                weight = tf.reduce_sum(tf.cast(weights_of_parts, loss.dtype))
            return [loss, weight, *metrics], carries

        structures: list[StageStructure] = []
        if eagerly:
            noted = self.clock, self.locates_errors, has_context()
            key = (structure.key, self.do_eval, tuple(homes), *noted)

            def traced(*tensors: Any) -> Any:
                results = build(*tensors, structures=structures)
                check_fresh(p.name, tf.get_default_graph())
                return results

            if key not in self._eager_runs:
                self._eager_runs[key] = tf.function(traced, autograph=False), structures
            run, structures = self._eager_runs[key]
            thetas = [[*map(tf.convert_to_tensor, each.tensors)] for each in weights]
            try:
                outputs, carries = run(thetas, inputs, carries, step)
            except tf.errors.OpError as error:
                explained = self.Explain(error)
                if explained is None:
                    raise
                raise explained from error
        else:
            thetas = [each.tensors for each in weights]
            outputs, carries = build(thetas, inputs, carries, step, structures)
        if not self.do_eval:
            cells = [self.children[name] for name in self.stage_names]
            outputs = finish_carries(cells, carries, outputs)
        return structures[-1].pack(take_out(p, homes[0], structures[-1], outputs))

    def PredictMemory(self, *args: Any) -> list[DeviceMemory]:
        """Predicts the memory of a step on each device, without the temporary memory of an action.

        Nothing runs. Arguments and errors are as for `FProp`; a `tf.TensorSpec` may replace a
        tensor.
        """
        return self._predicted(predict_memory, args)

    def PredictTransfers(self, *args: Any) -> list[Transfer]:
        """Predicts the transfers of a step by kind and pair of devices, as `PredictMemory` does."""
        return self._predicted(predict_transfers, args)

    def _predicted(self, predict: Callable[..., list[Any]], args: Any) -> list[Any]:
        """Traces the stages with these arguments and returns a prediction."""
        p, whole = self.params, self.theta
        if p.lowering == "simd":
            raise PipelineError(
                f"{p.name}: memory is predicted for lowering='placement' only; with 'simd' a "
                "device keeps the inputs of its stages, for each tick those of one microbatch"
            )
        predictions: list[Any] = []

        def trace(flat: Any, args: Any) -> None:
            theta = whole.Pack(flat)
            homes = self.StageHomes()
            with tf.device(homes[0].first), whole_batch_randomness():
                args = to_tuple(self.FPropBefore(theta, *args))
            structure, inputs, weights, carries = self._flat(theta, args, homes)
            thetas = [stage_weights.tensors for stage_weights in weights]
            stages = self._stages(weights, homes, thetas, carries, structure, [], inputs)
            if p.loss_inside:
                stages[-1] = with_loss(stages[-1])
            step = tf.constant(0, tf.int64)
            options = self._options(args, inputs, eagerly=False)
            schedule = self.schedule.only_forward() if self.do_eval else self.schedule
            predictions[:] = predict(stages, inputs, schedule, step=step, options=options)

        def spec(value: Any) -> tf.TensorSpec | None:
            return None if value is None else tf.TensorSpec(value.shape, value.dtype)

        specs = tf.nest.map_structure(spec, (whole.Flatten(), args))
        tf.function(trace, autograph=False).get_concrete_function(*specs)
        return predictions

    def _flat(
        self, theta: Any, args: tuple[Any, ...], homes: list[Home]
    ) -> tuple[StageStructure, Any, list[StageWeights], Any]:
        """Returns the arguments' structure, and flat inputs, weights and carries of each stage."""
        p = self.params
        structure = StageStructure(args, p.nested_map_fprop, p.name, "args")
        inputs = structure.flatten(args)
        names, replicas = structure.leaf_names, homes[0].num_replicas
        size = microbatch_size(inputs, p.num_micro_batches, p.batch_dim, names, replicas)
        if p.micro_batch_size not in (None, size):
            raise PipelineError(
                f"{p.name}: micro_batch_size {p.micro_batch_size} * num_micro_batches "
                f"{p.num_micro_batches} is not the batch size {size * p.num_micro_batches}; leave "
                "micro_batch_size unset to derive it"
            )
        cells = [self.children[name] for name in self.stage_names]
        weights = [
            StageWeights(cell, theta[name], home)
            for cell, name, home in zip(cells, self.stage_names, homes, strict=True)
        ]
        slices = self.schedule.num_slices
        if slices > 1:
            check_takes_slices(p.name, cells, slices)
        # With slices, it begins anew in each microbatch.
        carries = [[] if slices > 1 else first_carry(cell) for cell in cells]
        return structure, inputs, weights, carries

    def _stages(
        self,
        weights: list[StageWeights],
        homes: list[Home],
        thetas: list[Any],
        carries: list[Any],
        structure: StageStructure,
        structures: list[Any],
        inputs: Sequence[tf.Tensor],
    ) -> list[Stage]:
        """Returns the stages as pure functions; their tracing fills `structures`."""
        structures[:] = [structure] + [None] * len(thetas)
        cells = zip(self.stage_names, weights, homes, strict=True)
        pasts = self._pasts(homes, inputs, structure.pack_arguments([*inputs]))
        return [
            Stage(
                name=name,
                forward=self._stage_function(i, stage_weights, structures, home, past),
                theta=thetas[i],
                carry=carries[i] if past is None else past.specs,
                home=home,
                dtypes=stage_weights.spread(compute_dtypes(self.children[name]).Flatten()),
                places=stage_weights.places,
                copies=stage_weights.copies,
                fetched=stage_weights.fetched,
                arrivals=lambda i=i: structures[i].arrivals(),
                recurrent=past is not None and past.is_handed_on,
                takes_slices=past is not None,
                carry_places=None if past is None else past.places,
            )
            for i, ((name, stage_weights, home), past) in enumerate(zip(cells, pasts, strict=True))
        ]

    def _pasts(
        self, homes: Sequence[Home], inputs: Sequence[tf.Tensor], args: tuple[Any, ...]
    ) -> Sequence[PastOfStage | None]:
        """Returns what each stage hands on from slice to slice, None if there are no slices."""
        p = self.params
        if self.schedule.num_slices == 1:
            return [None] * len(homes)
        dims, lengths = (p.batch_dim, self.sequence_dim), self._slice_lengths(args)
        cutting = cutting_of(inputs, self.schedule, *dims, homes[0].num_replicas, lengths)
        sizes = cutting.part_size, cutting.slice_size, cutting.num_slices, bool(cutting.lengths)
        pasts: list[PastOfStage] = []
        for number, (name, home) in enumerate(zip(self.stage_names, homes, strict=True)):
            with self.stage_lowerings[number].on(home.replica(0)):
                pasts.append(PastOfStage(self.children[name], *sizes))
        return pasts

    @property
    def sequence_dim(self) -> int:
        """The dim of positions in the inputs of the stages."""
        return 0 if self.params.batch_dim else 1

    def _slice_lengths(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Returns the positions of each slice if the plan's slices take the same work."""
        p, plan = self.params, self._checked_plan
        if not plan.has_slices_of_equal_work:
            return ()
        # Inputs may be nested, and NumPy's.
        shapes = tf.nest.map_structure(
            lambda t: None if t is None else tshape.Shape(tf.TensorShape(t.shape).as_list()), args
        )
        specs = [tf.TensorSpec(s.ToTensorShape()) for s in tf.nest.flatten(shapes) if s is not None]
        dim = self.sequence_dim
        length = sequence_length(specs, plan.table.num_slices, p.batch_dim, dim)
        if (key := shapes_text(shapes)) not in self._lengths_by_shapes:
            layers = [
                layer for cell in p.cell_tpl for layer in (cell.sub if is_stage(cell) else [cell])
            ]
            work = row_work(p.name, layers, shapes, dim)
            progress = Progress([sum(parts) for parts in zip(*work, strict=True)])
            try:
                found = equal_work_lengths(
                    progress, length, plan.table.num_slices, plan.slice_multiple
                )
            except PlanError as error:
                raise PipelineError(f"{p.name}: {error}") from error
            self._lengths_by_shapes[key] = found
        return self._lengths_by_shapes[key]

    def _options(
        self, args: tuple[Any, ...], inputs: Sequence[tf.Tensor], eagerly: bool
    ) -> Options:
        p, remat = self.params, self._checked_plan.remat
        casts_first = args[0] is not None and not p.nested_map_fprop
        return Options(
            batch_dim=p.batch_dim,
            sequence_dim=self.sequence_dim,
            slice_lengths=self._slice_lengths(args),
            # A plan has no more than the name of a policy that is Python code.
            remat=p.remat if remat.is_custom else remat,
            loop=p.loop,
            compute_dtype=p.fprop_dtype,
            uncast_inputs=frozenset(range(int(casts_first), len(inputs))),
            loss_scale=None if self.do_eval else self.loss_scale,
            clock=None if self.do_eval else self.clock,
            noted_run=None if self.do_eval else self.noted_run,
            check_numerics=self._check_numerics(eagerly),
            strict_devices=p.strict_devices,
            compile=p.compile,
        )

    def _check_numerics(self, eagerly: bool) -> str | None:
        chosen = self.params.check_numerics
        # Eager calls wait for their results, so a precise error matters more than a short build.
        by_itself = eagerly and chosen is None and self.params.lowering == "placement"
        if chosen == "off" or not (self.locates_errors or by_itself):
            return chosen
        return "all" if self.loss_scale is None else "forward"

    def _stage_function(
        self,
        number: int,
        weights: StageWeights,
        structures: list[Any],
        home: Home,
        past: PastOfStage | None,
    ) -> Any:
        """Returns stage `number` as a pure function of flat lists of tensors."""
        p, name, last = self.params, self.stage_names[number], len(self.stage_names) - 1
        cell = self.children[name]

        def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
            del microbatch
            with (
                carried(cell, carry) if past is None else past.scope(carry) as carry_out,
                py_utils.RemoveAssertContext(remove=True),
                keyed_seeds(global_step_in(step)),
                self.stage_lowerings[number].on(current_devices()),
            ):
                outputs = self.FPropCell(
                    weights.pack(theta), name, *structures[number].pack_arguments(inputs)
                )
                outputs = to_tuple(outputs)
                if number == last:
                    outputs = exported(outputs)
                else:
                    outputs = handed_over(outputs, self.stage_lowerings[number + 1].replica_mesh)
                carry = carry_out()
            where = f"{p.name}: stage {name!r}"
            structures[number + 1] = StageStructure(outputs, p.nested_map_fprop, where, "outputs")
            flat = structures[number + 1].flatten(outputs)
            if not flat:
                raise PipelineError(f"{where} returns no tensor; a stage returns at least one")
            if number == last:
                check_head(where, structures[-1].leaf_names, flat, p.loss_inside)
            if p.state_dtype is not None:
                flat = [tf.cast(t, p.state_dtype) if t.dtype.is_floating else t for t in flat]
            return flat, carry

        return carrying(forward, number, p, home, structures)
