"""A pipeline of identical layers with named dims, as one program that every core runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, first_only, is_recorded, unrecorded
from pipemesh.backend.operations import zeros
from pipemesh.backend.static_shape import join_from_front, split_to_front, static_sizes
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.lowering.arguments import as_shape, as_tensor, described
from pipemesh.lowering.differentiate import call_alone, check_no_layers_axis, lost_in_layer
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.tensor import Tensor, union_axes
from pipemesh.mesh import Dim, Mesh, Shape
from pipemesh.mesh.checks import whole_number
from pipemesh.mesh.mesh import LAYERS_AXIS, check_mesh
from pipemesh.recurrent.circular.layer_position import LayerPosition
from pipemesh.recurrent.circular.tick_loop import Leaves, RingTicks, Sums, Tick, TickLoop, keep
from pipemesh.recurrent.options import sum_dtype
from pipemesh.recurrent.passes.captures import is_stopped
from pipemesh.schedule import Schedule, looped_bfs

VIRTUAL_DIM = "virtual_stages"
LAYERS_DIM = "layers"
INNER_DIM = "layers_of_stage"
STACK_DIMS = (VIRTUAL_DIM, LAYERS_DIM, INNER_DIM)

# Takes and returns activations, one tensor or a tuple. Its arguments are the activations, the
# weights, the position, and the tensors of `along`, if any.
Activations = Tensor | tuple[Tensor, ...]
LayerFunction = Callable[..., Activations]


@dataclasses.dataclass(frozen=True)
class SimdPipeline:
    """Runs a stack of identical layers over the mesh axis `layers`.

    All cores run the same loop: at each tick a core applies its stage to the activations from its
    neighbour and sends the result on (GSPMD's pipelining: Xu et al., 2021). Gradients run the same
    loop in the other direction. Each tick recomputes its stage, so the forward pass keeps only the
    stages' inputs. Results do not depend on any of the numbers below.

    The weights of all layers are stacked in three dims: `virtual_stages` (V), `layers` (S, split
    over the axis) and `layers_of_stage`. That is the plain stack of `num_layers` weights, reshaped:
    core s holds the stages s, s + S, ..., each of consecutive layers.

    Attributes:
        mesh: its axis `layers`, if any, has S cores.
        num_layers: a multiple of S * V.
        num_microbatches: M; it divides the batch, also on each processor.
        num_virtual_stages: V, the number of stages per core. A larger V reduces the bubble and adds
            communication.
        batch_dim: the name of the dim that is split into microbatches.

    Raises:
        PipelineError: a number is below 1, or S * V does not divide the number of layers.

    Example:
        >>> from pipemesh.lowering import PlacementLowering, ops
        >>> from pipemesh.mesh import LayoutRules
        >>> mesh, rules = Mesh.from_text("layers:2"), LayoutRules.from_text("layers:layers")
        >>> pipeline = SimdPipeline(mesh, num_layers=4, num_microbatches=3)
        >>> str(pipeline.stacked("io:1"))
        'virtual_stages:1;layers:2;layers_of_stage:2;io:1'
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> x = ops.import_tensor(lowering, tf.zeros([6, 1]), "batch:6;io:1")
        >>> w = tf.reshape(tf.constant([1.0, 2.0, 3.0, 4.0]), [1, 2, 2, 1])
        >>> w = ops.import_tensor(lowering, w, pipeline.stacked("io:1"))
        >>> y = pipeline(lambda x, weights, position: x + weights["w"], x, {"w": w})
        >>> ops.export_tensor(y)[0].numpy().tolist()
        [10.0]
    """

    mesh: Mesh
    num_layers: int
    num_microbatches: int
    num_virtual_stages: int = 1
    batch_dim: str = "batch"

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        for name in ("num_layers", "num_microbatches", "num_virtual_stages"):
            number = whole_number(getattr(self, name))
            if number is None or number < 1:
                raise PipelineError(
                    f"{name} is {getattr(self, name)!r}; it must be a whole number, at least 1"
                )
        stages = self.mesh.num_stages * self.num_virtual_stages
        if self.num_layers % stages:
            raise PipelineError(
                f"{self.num_layers} layers cannot be dealt out evenly to {self.mesh.num_stages} "
                f"cores with {self.num_virtual_stages} virtual stages each; make num_layers a "
                f"multiple of {stages}, or change num_virtual_stages or axis {LAYERS_AXIS!r} of "
                f"mesh '{self.mesh}'"
            )

    @property
    def schedule(self) -> Schedule:
        """The order of stages and microbatches on each core."""
        return looped_bfs(self.mesh.num_stages, self.num_microbatches, self.num_virtual_stages)

    @property
    def layers_per_stage(self) -> int:
        """The number of layers that a core computes in one tick."""
        return self.num_layers // (self.mesh.num_stages * self.num_virtual_stages)

    def stacked(self, shape: Shape | str) -> Shape:
        """Returns the shape of a weight of all layers.

        Args:
            shape: of the weight of one layer.

        Raises:
            ShapeError: it has one of the stack's dims.
        """
        shape = as_shape(shape)
        sizes = (self.num_virtual_stages, self.mesh.num_stages, self.layers_per_stage)
        return Shape((*map(Dim, STACK_DIMS, sizes), *shape.dims))

    def __call__(
        self,
        layer: LayerFunction,
        x: Activations,
        weights: Mapping[str, Tensor],
        along: Sequence[Tensor] = (),
    ) -> Any:
        """Applies all layers.

        Args:
            layer: takes the activations of a microbatch, a dict of one layer's weights, a
                `LayerPosition` for random numbers, and the tensors of `along`; returns activations
                of the same shapes. It must compute each example independently. It may use outside
                floating tensors only if they are constants or come from `stop_gradient`, and must
                not read trainable variables.
            x: floating, the activations of the whole batch; one tensor, or a tuple.
            weights: floating. Weights of shape `stacked(...)` belong to one layer each; weights
                without the stack's dims are shared by all layers.
            along: other inputs of all layers, such as the segments of tokens; not floating. Each
                processor has its part, so nothing is sent.

        Returns:
            The activations after the last layer, in the form of `x`, equal along the axis `layers`.
            They have first derivatives only.

        Raises:
            GradientError: later, if a gradient is differentiated.
            PipelineError: the batch does not divide, a weight is stacked differently, or the layer
                function breaks a rule above.
            LayoutError: the rules do not split the stack over the axis `layers`, or they split
                another dim over it.
            ShapeError: `x`, or a tensor of `along`, has no batch dim.
        """
        if not callable(layer):
            raise PipelineError(f"layer is {layer!r}, which is no function")
        leaves = x if isinstance(x, tuple) else (x,)
        for leaf in leaves:
            if not as_tensor(leaf, "x").dtype.is_floating:
                raise PipelineError(
                    f"the input has dtype {leaf.dtype.name}; activations are floating, and other "
                    "tensors go along"
                )
        if not leaves:
            raise PipelineError("x is an empty tuple; a pipeline needs activations")
        if not isinstance(weights, Mapping):
            raise PipelineError(f"weights are {described(weights)}; give a dict of tensors by name")
        for name, weight in weights.items():
            as_tensor(weight, f"weight {name!r}")
        for tensor in along:
            as_tensor(tensor, "what goes along")
        lowering = leaves[0].lowering
        shapes = tuple(map(self._check_input, leaves))
        sides = [(self._check_input(tensor), self._cut(tensor)) for tensor in along]
        known = [self._describe(name, weight, leaves) for name, weight in weights.items()]
        make_stage = functools.partial(
            NamedStage,
            lowering,
            layer,
            self.layers_per_stage,
            shapes,
            isinstance(x, tuple),
            leaves[0].shape[self.batch_dim],
            known,
            sides,
        )
        sizes = self.mesh.num_stages, self.num_microbatches, self.num_virtual_stages
        loop = TickLoop(lowering, RingTicks(*sizes))
        streams = [lowering.vary(self._cut(leaf), self._layers_axes) for leaf in leaves]
        weight_slices = [
            lowering.vary(weight.slices, about.summed_later)
            for weight, about in zip(weights.values(), known, strict=True)
        ]
        trained = [i for i, about in enumerate(known) if about.is_trained]
        results = _run(lowering, loop, make_stage, streams, weight_slices, trained)
        outputs = tuple(
            Tensor(
                lowering,
                lowering.map(
                    functools.partial(join_from_front, dim=leaf.shape.index(self.batch_dim)),
                    lowering.all_reduce(slices, self._layers_axes),
                ),
                leaf.shape,
            )
            for slices, leaf in zip(results, leaves, strict=True)
        )
        return outputs if isinstance(x, tuple) else outputs[0]

    @property
    def _layers_axes(self) -> list[str]:
        return [LAYERS_AXIS] if self.mesh.num_stages > 1 else []

    def _check_input(self, x: Tensor) -> Shape:
        """Checks one input and returns its shape for a microbatch."""
        lowering = x.lowering
        if lowering.mesh != self.mesh:
            raise LayoutError(
                f"the pipeline was made for mesh '{self.mesh}', but its input is on mesh "
                f"'{lowering.mesh}'; give both the same one"
            )
        if self.mesh.num_stages > 1 and lowering.rules.axis(LAYERS_DIM) != LAYERS_AXIS:
            raise LayoutError(
                f"the layout rules '{lowering.rules}' do not split the layers over axis "
                f"{LAYERS_AXIS!r} of mesh '{self.mesh}'; add the rule '{LAYERS_DIM}:{LAYERS_AXIS}'"
            )
        self._check_not_over_layers("the input", x.shape, lowering)
        batch = x.shape[self.batch_dim]
        here = x.layout.slice_shape[x.shape.index(self.batch_dim)]
        if here % self.num_microbatches or not here:
            raise PipelineError(
                f"a batch of {batch.size} examples, {here} on each processor, cannot be cut into "
                f"{self.num_microbatches} equal microbatches; make {self.batch_dim!r} a multiple "
                f"of {self.num_microbatches * batch.size // max(here, 1)}, or change "
                "num_microbatches"
            )
        micro = Dim(batch.name, batch.size // self.num_microbatches)
        return x.shape.replace(batch.name, micro)

    def _check_not_over_layers(self, what: str, shape: Shape, lowering: Lowering) -> None:
        for dim in shape.names:
            if dim in STACK_DIMS or lowering.rules.axis(dim) == LAYERS_AXIS:
                raise LayoutError(
                    f"{what} of shape '{shape}' has the dim {dim!r}, which belongs to the stack of "
                    f"layers or is split over axis {LAYERS_AXIS!r}; rename it or remove its rule"
                )

    def _describe(self, name: str, weight: Tensor, leaves: Sequence[Tensor]) -> LoopWeight:
        if weight.lowering is not leaves[0].lowering or not weight.dtype.is_floating:
            raise PipelineError(
                f"weight {name!r} is {weight!r}; weights are floating tensors of the lowering of "
                "the input"
            )
        stacked = any(dim in STACK_DIMS for dim in weight.shape.names)
        shape = Shape(weight.shape.dims[len(STACK_DIMS) :]) if stacked else weight.shape
        if stacked and weight.shape != self.stacked(shape):
            raise PipelineError(
                f"weight {name!r} has the shape '{weight.shape}'; the weights of all layers begin "
                f"with the dims '{self.stacked('')}'"
            )
        self._check_not_over_layers(f"weight {name!r}", shape, weight.lowering)
        # Along these axes the copies of the weight meet different activations.
        axes = [axis for axis in union_axes(leaves) if axis not in weight.split_axes]
        later = [*([] if stacked else self._layers_axes), *axes]
        is_trained = not all(map(is_stopped, weight.slices))
        return LoopWeight(name, shape, stacked, tuple(later), is_trained)

    def _cut(self, x: Tensor) -> Slices:
        """Moves microbatches to the first dim; each processor splits its own part of the batch."""
        at = x.shape.index(self.batch_dim)
        return x.lowering.map(
            lambda slice_: split_to_front(slice_, at, self.num_microbatches), x.slices
        )


def _run(
    lowering: Lowering,
    loop: TickLoop,
    make_stage: Callable[[Sequence[Slices]], NamedStage],
    streams: Sequence[Slices],
    weights: Sequence[Slices],
    trained: Sequence[int],
) -> list[Slices]:
    """Runs the loop with a custom gradient; `make_stage` takes the slices of weights."""
    sources = [weights[i] for i in trained]
    n = lowering.num_slices
    with unrecorded():
        if not tf.executing_eagerly():
            outputs, saved = loop.forward(make_stage(weights), tuple(streams))
        else:
            # No tape watches copies: the watched tensors are the outer ones.
            copies = [lowering.raw_map(tf.identity, part) for part in (*streams, *weights)]
    if tf.executing_eagerly():
        stage = make_stage(copies[len(streams) :])
        outputs, saved = loop.forward(stage, tuple(copies[: len(streams)]))
        if is_recorded([part for leaf in outputs for part in leaf]):
            raise lost_in_layer("a tensor")

    inputs = [part for parts in (*streams, *sources) for part in parts]
    # Keeps whole-graph differentiation out of the loop.
    saved = tuple(lowering.raw_map(tf.stop_gradient, leaf) for leaf in saved)

    def backward(grads: Any) -> list[tf.Tensor]:
        grad_streams, sums = loop.backward(make_stage(weights), _by_number(grads, n), saved)
        grad_weights = [
            lowering.raw_map(lambda sum_, part: tf.cast(sum_, part.dtype), *pair)
            for pair in zip(sums, sources, strict=True)
        ]
        results = [part for parts in (*grad_streams, *grad_weights) for part in parts]
        instead = "apply the layers one after the other"
        return first_only(results, [*grads, *inputs], "a SimdPipeline", instead)

    flat = [part for leaf in outputs for part in leaf]
    return list(_by_number(attach_gradient(flat, inputs, backward, across_devices=n > 1), n))


def _by_number(flat: Sequence[tf.Tensor], number: int) -> tuple[Slices, ...]:
    """Groups a flat list into tuples of the given length."""
    return tuple(tuple(flat[i : i + number]) for i in range(0, len(flat), number))


@dataclasses.dataclass(frozen=True)
class LoopWeight:
    """A loop's description of a weight."""

    name: str
    shape: Shape  # of the weight of one layer
    # Each layer has its own weight; slices begin with the dims virtual stage, core (of size 1) and
    # layer within the stage.
    stacked: bool
    summed_later: tuple[str, ...]  # axes over which the loop's gradients must still be summed
    is_trained: bool = True  # False if no layer's weight gets a gradient

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of `summed_later` along which all copies compute the same layer."""
        return tuple(axis for axis in self.summed_later if axis != LAYERS_AXIS)


class StackedWeight:
    """A core's slices `[V, 1, L, ...]` of a stacked weight, read layer by layer.

    Make it before the loop. It reads rows along the first dim, which share memory with the slices,
    so a tick copies nothing.
    """

    def __init__(self, lowering: Lowering, slices: Slices) -> None:
        self._lowering = lowering
        rounds, _, self._num_layers, *sizes = static_sizes(slices[0])
        self._one_round = rounds == 1
        self._rows = lowering.raw_map(lambda part: tf.reshape(part, [-1, *sizes]), slices)

    def at(self, layer: int, rounds: Slices) -> Slices:
        """Returns the weights of a layer of each processor's stage, by the stage's round."""
        if self._one_round:
            return self._lowering.raw_map(lambda rows: rows[layer], self._rows)
        return self._lowering.raw_map(
            lambda rows, round_: rows[round_ * self._num_layers + layer], self._rows, rounds
        )


@dataclasses.dataclass
class NamedStage:
    """The computation of one tick of a `SimdPipeline`: some layers, one after the other.

    At ticks without work a core computes with whatever its buffer holds.
    """

    lowering: Lowering
    layer: LayerFunction
    layers_per_stage: int
    shapes: tuple[Shape, ...]  # of the activations of one microbatch
    takes_tuple: bool  # else the layer takes and returns one tensor
    batch: Dim  # of the whole batch
    weights: Sequence[LoopWeight]
    # The layer's other inputs: their shapes for a microbatch, and slices of all microbatches.
    along: Sequence[tuple[Shape, Slices]]
    slices: dataclasses.InitVar[Sequence[Slices]]  # of the weights

    def __post_init__(self, slices: Sequence[Slices]) -> None:
        lowering = self.lowering
        self._trained = [i for i, weight in enumerate(self.weights) if weight.is_trained]
        self._slices = [lowering.raw_map(tf.identity, part) for part in slices]
        self._stacked = [
            StackedWeight(lowering, part) if weight.stacked else None
            for weight, part in zip(self.weights, self._slices, strict=True)
        ]

    def forward(self, now: Tick, x: Leaves) -> Leaves:
        """Returns the activations after the stage."""
        weights = self._layer_weights(now)
        return self._stage(now, x, weights, weights)

    def zero_sums(self) -> Sums:
        """Returns the sums of gradients before the first tick, at least in 32 bits."""
        return tuple(
            self.lowering.raw_map(lambda w: zeros(tf.TensorSpec(w.shape, sum_dtype(w.dtype))), part)
            for part in map(self._slices.__getitem__, self._trained)
        )

    def backward(self, now: Tick, x: Leaves, grad_y: Leaves, sums: Sums) -> tuple[Leaves, Sums]:
        """Recomputes the stage; returns the gradient of its input, and the new sums."""
        grad_x, grad_weights = self._gradient(now, x, grad_y)
        new_sums = tuple(
            self._add(self.weights[i], now, sum_, grad)
            for i, sum_, grad in zip(self._trained, sums, grad_weights, strict=True)
        )
        return grad_x, new_sums

    def _layer_weights(self, now: Tick) -> list[list[Slices]]:
        """Returns the weights of each layer of the stage."""
        return [
            [
                # A separate tensor for each use, so that their gradients stay separate.
                self.lowering.raw_map(tf.identity, part)
                if stacked is None
                else stacked.at(j, now.round)
                for stacked, part in zip(self._stacked, self._slices, strict=True)
            ]
            for j in range(self.layers_per_stage)
        ]

    def _stage(
        self,
        now: Tick,
        x: Leaves,
        whole: Sequence[Sequence[Slices]],
        partial: Sequence[Sequence[Slices]],
    ) -> Leaves:
        lowering = self.lowering
        along = [
            Tensor(lowering, lowering.raw_map(tf.gather, slots, now.microbatch), shape)
            for shape, slots in self.along
        ]
        for j, (of_layer, shared) in enumerate(zip(whole, partial, strict=True)):
            numbers = lowering.raw_map(
                lambda stage, j=j: stage * self.layers_per_stage + j, now.stage
            )
            size = self.shapes[0][self.batch.name].size
            position = LayerPosition(lowering, numbers, now.microbatch, self.batch, size)
            weights = {
                weight.name: StageWeight(lowering, a, weight.shape, b, weight.batch_axes)
                for weight, a, b in zip(self.weights, of_layer, shared, strict=True)
            }
            x_in = tuple(
                Tensor(lowering, leaf, shape) for leaf, shape in zip(x, self.shapes, strict=True)
            )
            inputs = [part for parts in (*x, *of_layer, *shared) for part in parts]
            with check_no_layers_axis(lowering), position.entered():
                y = call_alone(
                    functools.partial(self._call_layer, x_in, weights, position, along),
                    inputs,
                    lambda y: [part for leaf in y for part in leaf.slices],
                    lost_in_layer,
                )
            x = tuple(leaf.slices for leaf in y)
        return x

    def _call_layer(
        self,
        x: tuple[Tensor, ...],
        weights: Mapping[str, Tensor],
        position: LayerPosition,
        along: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        activations = x if self.takes_tuple else x[0]
        y: Any = self.layer(activations, weights, position, *along)
        leaves = y if self.takes_tuple else (y,)
        if not isinstance(leaves, tuple) or not _are_alike(leaves, x):
            raise PipelineError(
                f"the layer function returned {y!r} for {activations!r}; all layers are alike, so "
                "its result has the shape and dtype of its input, dims in the same order"
            )
        return leaves

    def _gradient(self, now: Tick, x: Leaves, grad_y: Leaves) -> tuple[Leaves, list[list[Slices]]]:
        """Recomputes a stage; returns gradients of its input and of each layer's weights."""
        raw_map = self.lowering.raw_map
        whole = self._layer_weights(now)
        partial = [[raw_map(tf.identity, part) for part in row] for row in whole]
        sources = [[[row[i] for i in self._trained] for row in of] for of in (whole, partial)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x, *sources])
            y = self._stage(now, x, whole, partial)
        # Nested like the sources of the gradient, which types cannot express.
        grads: Any = tape.gradient(
            [part for leaf in y for part in leaf],
            [x, *sources],
            output_gradients=[part for leaf in grad_y for part in leaf],
        )
        grad_x, grad_whole, grad_partial = grads
        results: list[list[Slices]] = []
        for at, i in enumerate(self._trained):
            copies = self.lowering.group_size(self.weights[i].batch_axes)
            results.append(
                [
                    self._join(part[i], a[at], b[at], copies)
                    for part, a, b in zip(whole, grad_whole, grad_partial, strict=True)
                ]
            )
        of_x = tuple(self._or_zeros(*pair) for pair in zip(grad_x, x, strict=True))
        return of_x, results

    def _or_zeros(self, grads: Sequence[Any], like: Slices) -> Slices:
        if any(grad is None for grad in grads):
            return self.lowering.raw_map(tf.zeros_like, like)
        # Gradients of lookups are sparse.
        return self.lowering.raw_map(tf.convert_to_tensor, tuple(grads))

    def _join(self, part: Slices, whole: Any, partial: Any, copies: int) -> Slices:
        """Adds a copy's contribution to a sum and its share of a tensor that copies have whole."""
        if any(grad is None for grad in whole):
            return self._or_zeros(partial, part)
        share = self.lowering.raw_map(
            lambda grad: tf.convert_to_tensor(grad) / tf.cast(copies, grad.dtype), tuple(whole)
        )
        if any(grad is None for grad in partial):
            return share
        return self.lowering.raw_map(tf.add, share, self._or_zeros(partial, part))

    def _add(self, weight: LoopWeight, now: Tick, sums: Slices, grads: Sequence[Slices]) -> Slices:
        """Adds one tick's gradients of a weight."""

        def add(sum_: tf.Tensor, busy: tf.Tensor, which: tf.Tensor, *parts: Any) -> tf.Tensor:
            wide = [tf.cast(part, sum_.dtype) for part in parts]
            if not weight.stacked:
                return sum_ + keep(busy, tf.add_n(wide))
            grad = keep(busy, tf.stack(wide))
            if sum_.shape[0] == 1:
                return sum_ + grad[None, None]
            return tf.tensor_scatter_nd_add(sum_, [[which]], grad[None, None])

        return self.lowering.raw_map(add, sums, now.busy, now.round, *grads)


def _are_alike(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
    return len(outputs) == len(inputs) and all(
        isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype
        for y, x in zip(outputs, inputs, strict=True)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class StageWeight(Tensor):
    """A weight that is equal along axes and sums its gradient over them once, after a loop.

    Data-parallel copies of a weight sum their gradients wherever the weight meets activations. In a
    loop that would be one all-reduce per tick. Here `vary` returns a tensor made from `partial`,
    whose gradient is one processor's contribution to the sum. Uses that do not vary, such as a norm
    of the weight, read `slices`, whose gradient is complete on each processor.
    """

    partial: Slices  # the same values as `slices`
    summed_later: tuple[str, ...]  # axes

    def vary(self, axes: Sequence[str]) -> Slices:
        """Returns the slices, marked as different along all of `axes` (see `Lowering.vary`)."""
        lacking = [axis for axis in axes if axis not in self.split_axes]
        if self.summed_later and set(self.summed_later) <= set(lacking):
            rest = [axis for axis in lacking if axis not in self.summed_later]
            return self.lowering.vary(self.partial, rest)
        return self.lowering.vary(self.slices, lacking)
