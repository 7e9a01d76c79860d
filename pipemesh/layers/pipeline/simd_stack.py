"""A stack of layers with named dims as one program that all devices run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh import randomness
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import all_layers, to_tuple
from pipemesh.layers.mesh_cluster import mesh_devices
from pipemesh.layers.named import NamedLayer, lowering_scope
from pipemesh.layers.named.scope import exported, unnamed
from pipemesh.layers.pipeline.alike_stages import simd_split
from pipemesh.layers.pipeline.losses import check_head, has_context
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


class LayerArguments:
    """The arguments of alike layers: floating ones travel, others go along, some are None."""

    def __init__(self, count: int, named: Mapping[int, Tensor]) -> None:
        self.count = count
        self.travels = [i for i, arg in named.items() if arg.dtype.is_floating]
        self.along = [i for i in named if i not in self.travels]
        self.shapes = [named[i].shape for i in (*self.travels, *self.along)]

    def join(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Returns all arguments in their order; given are those that travel, then the others."""
        args: list[Any] = [None] * self.count
        for i, tensor in zip((*self.travels, *self.along), tensors, strict=True):
            args[i] = tensor
        return args


class SimdStack:
    """The layers before the alike ones, the alike ones in a `SimdPipeline`, and the layers behind.

    All devices compute the layers before and behind together, each its slices, on the whole batch.
    """

    def __init__(self, stack: Any, plan: Plan, tpls: Sequence[Any], pinned: bool) -> None:
        before, stages, behind = simd_split(stack.params, tpls)
        self._stack, self._pinned = stack, pinned
        # Not the stack's: TensorFlow tracks what a layer holds, and saves no functions.
        self._eager_runs: dict[Any, Callable[..., Any]] = {}
        self._tpls = stages
        self._ends = [tpl for tpl in (before, behind) if tpl is not None]
        # The names of the cells before and behind the alike layers; None without such layers.
        self.first, self.last = before and before.name, behind and behind.name
        self._stages = tuple(stage.name for stage in stages)
        self.names = [name for name in (self.first, *self._stages, self.last) if name is not None]
        mesh = plan.mesh
        layers_rule = ((LAYERS_AXIS, LAYERS_AXIS),) if LAYERS_AXIS in mesh.axis_names else ()
        self.rules = LayoutRules((*layers_rule, *plan.layout.rules))
        self.pipeline = SimdPipeline(
            mesh,
            sum(len(stage.sub) for stage in stages),
            plan.num_microbatches,
            len(stages) // mesh.num_stages,
        )

    def create(self, create_stages: Callable[[Sequence[Any]], None]) -> None:
        """Makes the cells; `create_stages` makes those with alike layers, each on its home."""
        for tpl in self._ends:
            with self.made_on():
                self._stack.CreateChild(tpl.name, tpl)
        create_stages(self._tpls)
        for name in self.names:
            if self._stack.children[name].accumulators.Flatten():
                raise PipelineError(
                    f"{self._stack.params.name}: {name!r} has accumulators, such as the averages "
                    "of batch normalization, which lowering='simd' does not carry; use "
                    "lowering='placement'"
                )
        self._alike = [layer for name in self._stages for layer in self._layers(name)]
        self._prefix = self._alike[0].params.name
        for layer in all_layers(self._alike[0]):
            named = layer.weight_parts() if isinstance(layer, NamedLayer) else {}
            for name in layer.vars:
                if name not in layer.children and name not in named:
                    raise PipelineError(
                        f"{self._stack.params.name}: weight {name!r} of {layer.path!r}, a "
                        f"{type(layer).__name__} in the alike layers, has no named dims, so "
                        "lowering='simd' cannot stack it; make it by NamedWeights of a NamedLayer, "
                        "or use lowering='placement'"
                    )

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
    def shapes(self) -> dict[str, Shape]:
        """Returns the shapes of whole weights in computations, by layer and path, such as
        `block0.norm.scale`.
        """
        # The weights of the alike layers are stacked, under the name of the first one. A shared
        # weight occurs once, under the layer that makes it.
        shapes = {}
        for tpl in self._ends:
            shapes |= self._shapes_of(self._stack.children[tpl.name], "")
        for name in self._stack.params.tied_weights:
            del shapes[name]
        layer_shapes = self._shapes_of(self._alike[0], self._prefix)
        return shapes | {path: self.pipeline.stacked(shape) for path, shape in layer_shapes.items()}

    def _shapes_of(self, layer: Any, path: str) -> dict[str, Shape]:
        """Returns the shapes of a layer's weights by path, which begins with the given one."""
        mesh = self.pipeline.mesh
        return {
            at: owner.padded_shapes(self.rules, mesh)[name]
            for at, owner, name, _ in _named(layer, None, path)
        }

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

        def traced(flat: Any, args: Any, step: Any) -> Any:
            return self._placed(theta.Pack(flat), args, devices, step)

        if key not in self._eager_runs:
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
            args = self.run_before(theta, args)
            theta = self.computed_theta(theta)
            results = self(lowering, self.weights(lowering, theta), args, step, theta)
            outputs = to_tuple(exported(results))
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
        shapes, weights, mesh = self.shapes, {}, lowering.mesh
        with lowering_scope(lowering):
            for tpl in self._ends:
                weights |= _named_weights(self._stack.children[tpl.name], theta[tpl.name], "")
        weights = {path: tensor for path, tensor in weights.items() if path in shapes}
        inner = LayoutRules(tuple(rule for rule in lowering.rules.rules if rule[1] != LAYERS_AXIS))
        # The weights of the alike layers at each position along the axis `layers`, by path.
        held: list[list[dict[str, Tensor]]] = [[] for _ in range(mesh.num_stages)]
        for number, cell in enumerate(self._stages):
            position = number % mesh.num_stages
            devices = [lowering.devices[i] for i in mesh.stage_processors(position)]
            with lowering_scope(PlacementLowering(mesh.stage_mesh, inner, devices)):
                held[position] += [
                    _named_weights(layer, theta[cell][layer.params.name], self._prefix)
                    for layer in self._layers(cell)
                ]
        for path in held[0][0]:
            # Each is stacked where its layers are.
            sizes = lowering.tensor_layout(shapes[path]).slice_shape
            slices: dict[int, tf.Tensor] = {}
            for position, layers in enumerate(held):
                for i, processor in enumerate(mesh.stage_processors(position)):
                    with tf.device(lowering.devices[processor]):
                        stacked = tf.stack([layer[path].slices[i] for layer in layers])
                        slices[processor] = tf.reshape(stacked, sizes)
            in_order = tuple(slices[i] for i in sorted(slices))
            weights[path] = Tensor(lowering, in_order, shapes[path])
        return weights

    def __call__(
        self,
        lowering: Lowering,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        step: tf.Tensor | None,
        theta: Any = None,
    ) -> Any:
        """Computes the stack on the whole batch, for a placement or as the program of a core.

        `step` is the key of random numbers; enter `whole_batch_randomness` with it. `theta` is
        needed if layers before or behind have weights without named dims.
        """
        stack = self._stack
        names: list[str] = []
        for cell in self._stages:
            p = stack.children[cell].params
            names += [p.random_names.get(sub.name, sub.name) for sub in p.sub]

        def layer(
            x: tuple[Tensor, ...], weights: Mapping[str, Tensor], _: Any, *sides: Tensor
        ) -> tuple[Tensor, ...]:
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
                outputs = self.call_alike(weights, arguments.join((*x, *sides)))
            return tuple(outputs[i] for i in arguments.travels)

        with lowering_scope(lowering):
            args = to_tuple(self.call_end(self.first, weights, args, theta))
            named = self.named_args(lowering, args)
            arguments = LayerArguments(len(args), named)
            travels = tuple(named[i] for i in arguments.travels)
            along = tuple(named[i] for i in arguments.along)
            results = list(args)
            outputs = self.pipeline(layer, travels, self.own_weights(weights), along)
            for i, tensor in zip(arguments.travels, outputs, strict=True):
                results[i] = tensor
            return self.call_end(self.last, weights, tuple(results), theta)

    def run_before(self, theta: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs the layers before all stages on the stack's inputs, on the current device."""
        return cast_first(self._stack.params, to_tuple(self._stack.FPropBefore(theta, *args)))

    def computed_theta(self, theta: Any) -> Any:
        """Returns weights in the dtypes of the layers before and behind the alike ones."""
        return plain_theta(self._stack, theta, [tpl.name for tpl in self._ends])

    def call_end(
        self,
        cell: str | None,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        theta: Any = None,
    ) -> Any:
        """Calls the layers of `first` or `last`, if there are any; arguments as in `__call__`."""
        if cell is None:
            return args
        tied, rest = self._stack.params.tied_weights, None if theta is None else theta[cell]
        layer = self._stack.children[cell]
        cell_theta = _theta_of(layer, lambda path: weights[tied.get(path, path)], rest, "")
        return self._stack.FPropCell(cell_theta, cell, *args)

    def call_alike(self, weights: Mapping[str, Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        """Calls one of the alike layers, and returns the arguments of the next one."""
        theta = _theta_of(self._alike[0], weights.__getitem__, None, self._prefix)
        outputs = to_tuple(self._alike[0].FProp(theta, *args))
        name = f"{self._stack.params.name}: layer {self._prefix!r}"
        if len(outputs) != len(args):
            raise PipelineError(
                f"{name} takes {len(args)} arguments and returns {len(outputs)}; under "
                "lowering='simd' the same go from layer to layer"
            )
        for i, value in enumerate(outputs):
            travels = args[i] is not None and args[i].dtype.is_floating
            if not travels and value is not args[i]:
                raise PipelineError(
                    f"{name} returns {value!r} for argument {i}, {args[i]!r}; under "
                    "lowering='simd' layers hand on what is not floating as it is"
                )
        return outputs

    def own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the stacked weights of the alike layers."""
        prefix = f"{self._prefix}."
        return {path: tensor for path, tensor in weights.items() if path.startswith(prefix)}

    def named_args(self, lowering: Lowering, args: Sequence[Any]) -> dict[int, Tensor]:
        """Returns the alike layers' arguments with named dims, by number, without None.

        Layers name the dims of arguments that have no named ones.
        """
        p = self._stack.params
        named: dict[int, Tensor] = {}
        for number, arg in enumerate(args):
            if arg is None:
                continue
            if not isinstance(arg, Tensor):
                try:
                    tensor = tf.convert_to_tensor(arg)
                except (TypeError, ValueError) as error:
                    raise PipelineError(
                        f"{p.name}: argument {number} of the alike layers is {arg!r}; under "
                        "lowering='simd' these take tensors and None, one by one, not nested"
                    ) from error
                shape = unnamed(static_sizes(tensor), p.batch_dim)
                arg = ops.import_tensor(lowering, tensor, shape)
            named[number] = arg
        return named


def _named(layer: Any, theta: Any, path: str) -> Iterator[tuple[str, NamedLayer, str, Any]]:
    """Yields the weights with named dims of a layer or a list: path, layer, name and its theta."""
    if isinstance(layer, list | tuple):
        parts = {f"[{number}]": (part, number) for number, part in enumerate(layer)}
    else:
        for name in layer.named_shapes if isinstance(layer, NamedLayer) else ():
            yield f"{path}.{name}", layer, name, theta
        parts = {f".{name}": (child, name) for name, child in layer.children.items()}
    for end, (part, key) in parts.items():
        part_theta = None if theta is None else theta[key]
        yield from _named(part, part_theta, (path + end).removeprefix("."))


def _named_weights(layer: Any, theta: Any, path: str) -> dict[str, Tensor]:
    """Returns the weights by path, which begins with the given one, under the current lowering."""
    weights = _named(layer, theta, path)
    return {at: owner.Weight(own_theta, name) for at, owner, name, own_theta in weights}


def _theta_of(layer: Any, weight: Callable[[str], Tensor], theta: Any, path: str) -> Any:
    """Builds a layer's theta from the weights by path, and `theta` of those without named dims."""
    if isinstance(layer, list | tuple):
        thetas = [None] * len(layer) if theta is None else theta
        return [
            _theta_of(part, weight, part_theta, f"{path}[{number}]")
            for number, (part, part_theta) in enumerate(zip(layer, thetas, strict=True))
        ]
    nested: dict[str, Any]
    if isinstance(layer, NamedLayer):
        nested = {name: weight(f"{path}.{name}") for name in layer.named_shapes}
    else:
        nested = {k: v for k, v in (theta or {}).items() if k not in layer.children}
    for name, child in layer.children.items():
        child_theta = None if theta is None else theta[name]
        nested[name] = _theta_of(child, weight, child_theta, f"{path}.{name}".removeprefix("."))
    return py_utils.NestedMap(nested)
