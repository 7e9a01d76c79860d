"""A stack of layers with named dims as one program that all devices run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh import randomness
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.mesh_cluster import mesh_devices
from pipemesh.layers.named import lowering_scope
from pipemesh.layers.named.scope import exported, unnamed
from pipemesh.layers.pipeline.all_weights import (
    check_named,
    named_shapes,
    named_weights,
    theta_of,
)
from pipemesh.layers.pipeline.losses import check_head, has_context
from pipemesh.layers.pipeline.place_weights import alike_weights
from pipemesh.layers.pipeline.simd_cut import simd_cut
from pipemesh.layers.pipeline.stage import StageStructure
from pipemesh.layers.pipeline.weights import cast_first, plain_theta
from pipemesh.layers.step_seed import (
    global_step_in,
    keyed_seeds,
    name_in_task,
    step_of_call,
    whole_batch_randomness,
)
from pipemesh.lowering import Lowering, PlacementLowering, Tensor, ops
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import Plan
from pipemesh.randomness.scope import alike_layers_scope, layer_aliases
from pipemesh.recurrent.circular import SimdPipeline
from pipemesh.recurrent.watch.finite_values import all_finite, raise_unless


class SimdStack:
    """The layers before the alike ones, the alike ones in a `SimdPipeline`, and the layers behind.

    All devices compute the layers before and behind together, each its slices, on the whole batch.

    Args:
        stack: the layer that has the cells.
        plan: its plan.
        tpls: params of its stages.
        pinned: whether variables are placed on particular devices.
        call_before: calls the layers before all stages, with theta and inputs of the stack.
        call_cell: calls a cell, with its theta, its name and its inputs.

    Attributes:
        names: the names of all cells, in order.
        pipeline: runs the alike layers.
        rules: the rules of the lowering that it is called with.
    """

    def __init__(
        self,
        stack: Any,
        plan: Plan,
        tpls: Sequence[Any],
        pinned: bool,
        call_before: Callable[..., Any],
        call_cell: Callable[..., Any],
    ) -> None:
        before, stages, behind = simd_cut(stack.params).split(tpls)
        self._stack, self._pinned = stack, pinned
        self._call_before, self._call_cell = call_before, call_cell
        self._tpls = stages
        self._ends = [tpl for tpl in (before, behind) if tpl is not None]
        self._before, self._behind = before and before.name, behind and behind.name
        self._stages = tuple(stage.name for stage in stages)
        names = self._before, *self._stages, self._behind
        self.names = [name for name in names if name is not None]
        mesh = plan.mesh
        own = ((LAYERS_AXIS, LAYERS_AXIS),) if LAYERS_AXIS in mesh.axis_names else ()
        self.rules = LayoutRules((*own, *plan.layout.rules))
        self.pipeline = SimdPipeline(
            mesh,
            sum(len(stage.sub) for stage in stages),
            plan.num_microbatches,
            len(stages) // mesh.num_stages,
        )
        self._eager_runs: dict[Any, Callable[..., Any]] = {}

    def create(self, create_stages: Callable[[Sequence[Any]], None]) -> None:
        """Makes the cells; `create_stages` makes those with alike layers, each on its home.

        Raises:
            PipelineError: an alike layer has weights without named dims.
        """
        for tpl in self._ends:
            with self.made_on():
                self._stack.CreateChild(tpl.name, tpl)
        create_stages(self._tpls)
        check_named(self._stack.params.name, self._alike[0])

    @contextlib.contextmanager
    def made_on(self) -> Iterator[None]:
        """Enters the scope in which layers that all devices compute together are made."""
        mesh, stack = self.pipeline.mesh, self._stack
        devices = [""] * mesh.num_devices
        if self._pinned:
            devices = mesh_devices(stack.cluster, mesh, stack.params)
        lowering = PlacementLowering(mesh, self.rules, devices)
        with tf.device(lowering.devices[0]), lowering_scope(lowering):
            yield

    def _layers(self, name: str) -> list[Any]:
        """Returns the layers of a cell."""
        cell = self._stack.children[name]
        return [cell.children[sub.name] for sub in cell.params.sub]

    @property
    def _alike(self) -> list[Any]:
        """Returns the alike layers."""
        return [layer for name in self._stages for layer in self._layers(name)]

    @property
    def _others(self) -> list[Any]:
        """Returns the layers before and behind the alike ones."""
        return [layer for tpl in self._ends for layer in self._layers(tpl.name)]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Returns the shapes of all whole weights, by layer and path, such as `block0.norm.scale`.

        The weights of the alike layers are stacked, under the name of the first one. A shared
        weight occurs once, under the layer that makes it.
        """
        found = {}
        for layer in self._others:
            found |= named_shapes(layer, f"{layer.params.name}.")
        for name in self._stack.params.tied_weights:
            del found[name]
        first = self._alike[0]
        own = named_shapes(first, f"{first.params.name}.")
        return found | {path: self.pipeline.stacked(shape) for path, shape in own.items()}

    def run(self, theta: Any, args: tuple[Any, ...]) -> Any:
        """Runs the stack on the devices of the current cluster; see `PipeliningLayer.FProp`."""
        stack, mesh = self._stack, self.pipeline.mesh
        if stack.clock is not None and not stack.do_eval:
            raise PipelineError(
                f"{stack.params.name}: a clock is set, which lowering='simd' gives no actions"
            )
        devices = mesh_devices(stack.cluster, mesh, stack.params)
        step = step_of_call(stack)
        if not tf.executing_eagerly():
            return self._placed(theta, args, devices, step)
        key = (stack.do_eval, has_context(), *devices, str(theta.Transform(lambda _: None)))
        if key not in self._eager_runs:

            def traced(flat: Any, args: Any, step: Any) -> Any:
                return self._placed(theta.Pack(flat), args, devices, step)

            self._eager_runs[key] = tf.function(traced, autograph=False)
        flat = [tf.convert_to_tensor(weight) for weight in theta.Flatten()]
        args = tf.nest.map_structure(lambda t: None if t is None else tf.convert_to_tensor(t), args)
        return self._eager_runs[key](flat, args, step)

    def _placed(
        self, theta: Any, args: tuple[Any, ...], devices: Sequence[str], step: tf.Tensor | None
    ) -> Any:
        """Builds all devices' programs in one graph."""
        p = self._stack.params
        lowering = PlacementLowering(self.pipeline.mesh, self.rules, devices)
        with tf.device(lowering.devices[0]), whole_batch_randomness(step):
            args = self.before(theta, args)
            theta = self.computed_theta(theta)
            found = self(lowering, self.weights(lowering, theta), args, step, theta)
            outputs = to_tuple(exported(found))
            where = f"{p.name}: stage {self.names[-1]!r}"
            structure = StageStructure(outputs, False, where, "outputs")
            flat = structure.flatten(outputs)
            check_head(where, structure.leaf_names, flat, p.loss_inside)
            loss, weight, *metrics = flat
            if p.check_numerics != "off":
                first = lowering.devices[0]
                check = raise_unless(all_finite([loss]), [], f"{p.name}: the loss", first)
                with tf.control_dependencies([check]):
                    loss = tf.identity(loss)
            return structure.pack([loss, tf.cast(weight, loss.dtype), *metrics])

    def weights(self, lowering: PlacementLowering, theta: Any) -> dict[str, Tensor]:
        """Returns all weights with the shapes `shapes`, on the devices that compute with them."""
        shapes, found = self.shapes, {}
        with lowering_scope(lowering):
            for tpl in self._ends:
                for layer in self._layers(tpl.name):
                    name = layer.params.name
                    own = named_weights(layer, theta[tpl.name][name], f"{name}.")
                    found |= {path: tensor for path, tensor in own.items() if path in shapes}
        cells = [(theta[cell], self._layers(cell)) for cell in self._stages]
        return found | alike_weights(lowering, cells, shapes, f"{self._alike[0].params.name}.")

    def __call__(
        self,
        lowering: Lowering,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        step: tf.Tensor | None,
        theta: Any = None,
    ) -> Any:
        """Computes the stack, for a placement or as the program of a core.

        Args:
            lowering: the lowering of the whole mesh, with the rules `rules`.
            weights: weights with the shapes `shapes`, tensors of `lowering`.
            args: arguments of the first layer, for the whole batch.
            step: the key of random numbers; enter `whole_batch_randomness` with it.
            theta: the theta of the stack, if layers before or behind have weights without named
                dims.

        Returns:
            The results of the last layer; tensors with named dims belong to `lowering`.

        Raises:
            PipelineError: values between layers cannot go through a loop over ticks.
        """
        with lowering_scope(lowering):
            args = self.call_first(weights, args, theta)
            return self.call_last(weights, self._run(lowering, weights, args, step), theta)

    def before(self, theta: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs the layers before all stages on the stack's inputs, on the current device."""
        return cast_first(self._stack.params, to_tuple(self._call_before(theta, *args)))

    def computed_theta(self, theta: Any) -> Any:
        """Returns weights in the dtypes of the layers before and behind the alike ones."""
        return plain_theta(self._stack, theta, [tpl.name for tpl in self._ends])

    def call_first(
        self, weights: Mapping[str, Tensor], args: tuple[Any, ...], theta: Any = None
    ) -> tuple[Any, ...]:
        """Calls the layers before the alike ones; arguments as in `__call__`."""
        if self._before is None:
            return args
        own = self._theta(self._before, weights, theta)
        return to_tuple(self._call_cell(own, self._before, *args))

    def call_last(
        self, weights: Mapping[str, Tensor], args: tuple[Any, ...], theta: Any = None
    ) -> Any:
        """Calls the layers behind the alike ones; arguments as in `__call__`."""
        if self._behind is None:
            return args
        return self._call_cell(self._theta(self._behind, weights, theta), self._behind, *args)

    def call_alike(self, weights: Mapping[str, Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        """Calls one of the alike layers, and returns the arguments of the next one.

        Raises:
            PipelineError: the next layer cannot take its results.
        """
        first = self._alike[0]
        theta = theta_of(first, weights.__getitem__, None, f"{first.params.name}.")
        outputs = to_tuple(first.FProp(theta, *args))
        self._check(args, outputs)
        return outputs

    def own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the stacked weights of the alike layers."""
        prefix = f"{self._alike[0].params.name}."
        return {path: tensor for path, tensor in weights.items() if path.startswith(prefix)}

    def named_args(self, lowering: Lowering, args: Sequence[Any]) -> dict[int, Tensor]:
        """Returns the alike layers' arguments with named dims, by number, without None."""
        return {
            i: self._as_named(lowering, i, arg) for i, arg in enumerate(args) if arg is not None
        }

    def _theta(self, cell: str, weights: Mapping[str, Tensor], theta: Any) -> Any:
        """Returns the theta of a cell before or behind the alike layers."""
        tied = self._stack.params.tied_weights
        return py_utils.NestedMap(
            {
                layer.params.name: theta_of(
                    layer,
                    lambda path: weights[tied.get(path, path)],
                    None if theta is None else theta[cell][layer.params.name],
                    f"{layer.params.name}.",
                )
                for layer in self._layers(cell)
            }
        )

    def _run(
        self,
        lowering: Lowering,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        step: tf.Tensor | None,
    ) -> tuple[Any, ...]:
        """Runs the alike layers."""
        named = self.named_args(lowering, args)
        travels = [i for i, arg in named.items() if arg.dtype.is_floating]
        along = [i for i in named if i not in travels]
        stack, own = self._stack, self.own_weights(weights)
        names = [name for cell in self._stages for name in self._random_names(cell)]

        def layer(
            x: tuple[Tensor, ...], weights: Mapping[str, Tensor], _: Any, *sides: Tensor
        ) -> tuple[Tensor, ...]:
            given: list[Any] = [None] * len(args)
            for numbers, tensors in ((travels, x), (along, sides)):
                for i, tensor in zip(numbers, tensors, strict=True):
                    given[i] = tensor
            # The loop may be traced again for gradients, outside all scopes.
            with (
                stack.cluster,
                lowering_scope(lowering),
                py_utils.RemoveAssertContext(remove=True),
                randomness.plan_free_randomness(step),
                keyed_seeds(global_step_in(step)),
                layer_aliases({}, name_in_task(stack)),
                alike_layers_scope(names),
            ):
                outputs = self.call_alike(weights, given)
            return tuple(outputs[i] for i in travels)

        found = self.pipeline(
            layer, tuple(named[i] for i in travels), own, [named[i] for i in along]
        )
        results = list(args)
        for i, tensor in zip(travels, found, strict=True):
            results[i] = tensor
        return tuple(results)

    def _random_names(self, cell: str) -> list[str]:
        p = self._stack.children[cell].params
        return [p.random_names.get(sub.name, sub.name) for sub in p.sub]

    def _as_named(self, lowering: Lowering, number: int, arg: Any) -> Tensor:
        """Returns an argument of the alike layers with named dims; layers name unnamed ones."""
        if isinstance(arg, Tensor):
            return arg
        p = self._stack.params
        try:
            tensor = tf.convert_to_tensor(arg)
        except (TypeError, ValueError) as error:
            raise PipelineError(
                f"{p.name}: argument {number} of the alike layers is {arg!r}; under "
                "lowering='simd' these take tensors and None, one by one, not nested"
            ) from error
        return ops.import_tensor(lowering, tensor, unnamed(static_sizes(tensor), p.batch_dim))

    def _check(self, given: Sequence[Any], outputs: tuple[Any, ...]) -> None:
        """Checks that the next layer can take the results of a layer."""
        name = f"{self._stack.params.name}: layer {self._alike[0].params.name!r}"
        if len(outputs) != len(given):
            raise PipelineError(
                f"{name} takes {len(given)} arguments and returns {len(outputs)}; under "
                "lowering='simd' the same go from layer to layer"
            )
        for i, value in enumerate(outputs):
            travels = given[i] is not None and given[i].dtype.is_floating
            if not travels and value is not given[i]:
                raise PipelineError(
                    f"{name} returns {value!r} for argument {i}, {given[i]!r}; under "
                    "lowering='simd' layers hand on what is not floating as it is"
                )
