"""A pipeline of identical stages, as one program that every core runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, is_recorded, unrecorded
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import GradientError, LayoutError, PipelineError
from pipemesh.lowering.arguments import as_shape, as_tensor, described
from pipemesh.lowering.differentiate import lost_in_layer
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.tensor import Tensor, union_axes
from pipemesh.mesh import Dim, Mesh, Shape
from pipemesh.mesh.checks import whole_number
from pipemesh.mesh.mesh import LAYERS_AXIS, check_mesh
from pipemesh.recurrent.circular.named_stage import (
    Activations,
    LayerFunction,
    LoopWeight,
    NamedStage,
)
from pipemesh.recurrent.circular.tick_loop import TickLoop
from pipemesh.schedule import Schedule, looped_bfs

VIRTUAL_DIM = "virtual_stages"
LAYERS_DIM = "layers"
INNER_DIM = "layers_of_stage"
STACK_DIMS = (VIRTUAL_DIM, LAYERS_DIM, INNER_DIM)


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
        >>> print(pipeline.schedule)
        0: 0F0 0F1 0F2 0B2 0B1 0B0
        1: 1F0 1F1 1F2 1B2 1B1 1B0
        >>> str(pipeline.stacked("io:1"))
        'virtual_stages:1;layers:2;layers_of_stage:2;io:1'
        >>> def layer(x, weights, position):
        ...     return x + weights["w"]
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> x = ops.import_tensor(lowering, tf.zeros([6, 1]), "batch:6;io:1")
        >>> w = tf.reshape(tf.constant([1.0, 2.0, 3.0, 4.0]), [1, 2, 2, 1])
        >>> w = ops.import_tensor(lowering, w, pipeline.stacked("io:1"))
        >>> ops.export_tensor(pipeline(layer, x, {"w": w}))[0].numpy().tolist()
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
            as_tensor(leaf, "x")
        if not leaves:
            raise PipelineError("x is an empty tuple; a pipeline needs activations")
        if not isinstance(weights, Mapping):
            raise PipelineError(f"weights are {described(weights)}; give a dict of tensors by name")
        for name, weight in weights.items():
            as_tensor(weight, f"weight {name!r}")
        for tensor in along:
            as_tensor(tensor, "what goes along")
        lowering = leaves[0].lowering
        shapes = tuple(map(self._check_activations, leaves))
        sides = [(self._check_input(tensor), self._cut(tensor)) for tensor in along]
        known = [self._describe(name, weight, leaves) for name, weight in weights.items()]
        stage = NamedStage(
            lowering,
            layer,
            self.layers_per_stage,
            shapes if isinstance(x, tuple) else shapes[0],
            leaves[0].shape[self.batch_dim],
            known,
            sides,
        )
        loop = TickLoop(self.schedule, lowering, stage, [True] * len(leaves))
        streams = [lowering.vary(self._cut(leaf), self._layers_axes) for leaf in leaves]
        parts = [
            lowering.vary(weight.slices, about.summed_later)
            for weight, about in zip(weights.values(), known, strict=True)
        ]
        outputs = tuple(
            Tensor(
                lowering,
                self._join(lowering, lowering.all_reduce(slices, self._layers_axes), leaf),
                leaf.shape,
            )
            for slices, leaf in zip(_run(lowering, loop, streams, parts), leaves, strict=True)
        )
        return outputs if isinstance(x, tuple) else outputs[0]

    @property
    def _layers_axes(self) -> list[str]:
        return [LAYERS_AXIS] if self.mesh.num_stages > 1 else []

    def _check_activations(self, x: Tensor) -> Shape:
        """Checks the activations and returns the shape of a microbatch."""
        shape = self._check_input(x)
        if not x.dtype.is_floating:
            raise PipelineError(
                f"the input has dtype {x.dtype.name}; activations are floating, and other tensors "
                "go along"
            )
        return shape

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
        return LoopWeight(name, shape, stacked, tuple(later))

    def _cut(self, x: Tensor) -> Slices:
        """Moves microbatches to the first dim; each processor splits its own part of the batch."""
        at = x.shape.index(self.batch_dim)
        return x.lowering.map(
            lambda slice_: _split_to_front(slice_, at, self.num_microbatches), x.slices
        )

    def _join(self, lowering: Lowering, outputs: Slices, x: Tensor) -> Slices:
        at, sizes = x.shape.index(self.batch_dim), x.layout.slice_shape

        def join(slots: tf.Tensor) -> tf.Tensor:
            order = [*range(1, at + 1), 0, *range(at + 1, len(sizes) + 1)]
            return tf.reshape(tf.transpose(slots, order), sizes)

        return lowering.map(join, outputs)


def _split_to_front(slice_: tf.Tensor, at: int, parts: int) -> tf.Tensor:
    sizes = static_sizes(slice_)
    cut = tf.reshape(slice_, [*sizes[:at], parts, sizes[at] // parts, *sizes[at + 1 :]])
    return tf.transpose(cut, [at, *range(at), *range(at + 1, len(sizes) + 1)])


def _no_second(_: Any) -> list[tf.Tensor]:
    raise GradientError(
        "second derivatives of a SimdPipeline do not exist: its gradient is a loop that keeps "
        "nothing to be differentiated by; apply the layers one after the other, or differentiate "
        "once"
    )


def _run(
    lowering: Lowering, loop: TickLoop, streams: Sequence[Slices], weights: list[Slices]
) -> list[Slices]:
    """Runs the loop with a custom gradient."""
    n = lowering.num_slices
    with unrecorded():
        if not tf.executing_eagerly():
            outputs, saved = loop.forward(tuple(streams), weights)
        else:
            # No tape watches copies: the watched tensors are the outer ones.
            copies = [lowering.raw_map(tf.identity, part) for part in (*streams, *weights)]
    if tf.executing_eagerly():
        outputs, saved = loop.forward(tuple(copies[: len(streams)]), copies[len(streams) :])
        if is_recorded([part for leaf in outputs for part in leaf]):
            raise lost_in_layer("a tensor")

    inputs = [part for parts in (*streams, *weights) for part in parts]
    # Keeps whole-graph differentiation out of the loop.
    saved = tuple(lowering.raw_map(tf.stop_gradient, leaf) for leaf in saved)

    def backward(grads: Any) -> list[tf.Tensor]:
        of_streams, sums = loop.backward(_by_number(grads, n), saved, weights)
        grad_weights = [
            lowering.raw_map(lambda sum_, part: tf.cast(sum_, part.dtype), *pair)
            for pair in zip(sums, weights, strict=True)
        ]
        found = [part for parts in (*of_streams, *grad_weights) for part in parts]
        return attach_gradient(found, [*grads, *inputs], _no_second, across_devices=n > 1)

    flat = [part for leaf in outputs for part in leaf]
    return list(_by_number(attach_gradient(flat, inputs, backward, across_devices=n > 1), n))


def _by_number(flat: Sequence[tf.Tensor], number: int) -> tuple[Slices, ...]:
    """Groups a flat list into tuples of the given length."""
    return tuple(tuple(flat[i : i + number]) for i in range(0, len(flat), number))
