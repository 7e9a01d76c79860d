"""The base of layers with named dims."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lingvo.compat as lingvo_tf
import numpy as np
import tensorflow as tf
from lingvo.core import base_layer, py_utils, tshape

from pipemesh.backend.saved_state import Slice, mark_slice
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.layers.named.scope import current_lowering, is_unnamed
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.named.weight_slices import (
    WeightPart,
    current_replica_cut,
    from_parts,
    from_whole,
    held_by_processors,
    padded,
    weight_parts,
)
from pipemesh.layers.optimizers.checks import check_learners
from pipemesh.layers.optimizers.pieces import Matrix, mark_matrix
from pipemesh.lowering import Lowering, Tensor, ops
from pipemesh.lowering.arguments import as_shape, dim_names
from pipemesh.lowering.variable import Constant, Initializer, Normal, Uniform
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.text import nearest_text

# The dims between `batch` and the channels of sequences, images and volumes, by their number.
SPACE = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_METHODS = ("constant", "gaussian", "uniform")


def initializer_of(init: Any, name: str, random_seed: int | None) -> Initializer:
    """Returns an initializer that makes any block of a weight's initial value.

    Numbers are keyed by the weight's full logical name and a seed, as in lingvo's stateless
    initializers. A seed in `init` replaces `random_seed`.
    """
    if isinstance(init, Given):
        return init
    method = getattr(init, "method", None)
    if method not in _METHODS:
        described = repr(init) if method is None else repr(method)
        raise PipelineError(
            f"weight {name!r}: init is {described}{nearest_text(str(method), _METHODS)}; a named "
            "weight is drawn slice by slice, so write py_utils.WeightInit.Gaussian(stddev), "
            "Uniform(limit) or Constant(value)"
        )
    if method == "constant":
        return Constant(init.scale)
    first = random_seed if init.seed is None else init.seed
    seed = int(first or 0), int(py_utils.GenerateSeedFromName(name))
    if method == "gaussian":
        return Normal(init.scale, seed)
    return Uniform(-init.scale, init.scale, seed)


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """An initializer that cuts blocks out of a whole value."""

    value: np.ndarray

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        del sizes
        where = tuple(slice(a, a + size) for a, size in zip(begin, block, strict=True))
        return tf.cast(self.value[where], dtype)


@dataclasses.dataclass(frozen=True)
class _BlockInit:
    """A TensorFlow initializer that makes one block of a weight."""

    # A dataclass, since lingvo compares its text where a variable is used again.
    initializer: Initializer
    sizes: tuple[int, ...]  # of the whole weight
    begin: tuple[int, ...]

    def __call__(
        self, shape: Any, dtype: Any = tf.float32, partition_info: Any = None
    ) -> tf.Tensor:
        """Makes the block of a shape."""
        del partition_info
        block = static_sizes(tf.TensorSpec(shape))
        return self.initializer(self.sizes, self.begin, block, tf.as_dtype(dtype))


# Activations may be split along `length` over the axis that splits weights. Between matmuls a
# tensor-parallel model computes the same on all processors of the axis. With the rule
# `length:model` beside `heads:model;d_ff:model;vocab:model` each computes some of the tokens there.
# An all-gather before the matmuls and a reduce-scatter after them replace the all-reduce. Both
# together send as much as it did (Korthikanti et al., "Reducing Activation Recomputation in Large
# Transformer Models", 2022, section 4.2.2).

# Ends the name of the adapter of a weight.
ADAPTER = "_lora"
# The name of `length` where each processor has all of it.
WHOLE = "tokens"


def whole_names(rules: LayoutRules, *dims: str) -> dict[str, str]:
    """Returns a new name for `length` if one of `dims` is split over its axis, else nothing."""
    axis = rules.axis("length")
    return {"length": WHOLE} if axis is not None and axis in map(rules.axis, dims) else {}


def split_names(names: Mapping[str, str]) -> dict[str, str]:
    """Inverts `whole_names`."""
    return {new: old for old, new in names.items()}


def whole_dims(dims: str, names: Mapping[str, str]) -> list[str]:
    """Returns the new names of dims."""
    return [names.get(name, name) for name in dims.split(";")]


def whole(
    layer: Any, x: Any, dims: str, names: Mapping[str, str], dtype: tf.DType | None = None
) -> Tensor:
    """Returns an input, plain or with named dims, with all tokens on each processor."""
    if isinstance(x, Tensor):
        return ops.rename(layer.Named(x, dims, dtype), names)
    return layer.Named(x, whole_dims(dims, names), dtype)


def count_whole(
    tally: Tally, x: Any, dims: str, dtype: tf.DType, names: Mapping[str, str]
) -> Value:
    """Counts `whole`; see `Tally.given`."""
    if isinstance(x, Value):
        return tally.rename(tally.given(x, dims, dtype), names)
    return tally.given(x, whole_dims(dims, names), dtype)


@contextlib.contextmanager
def within(layer: Any) -> Iterator[None]:
    """Names the layer in errors of layouts and shapes."""
    try:
        yield
    except (LayoutError, ShapeError) as error:
        raise type(error)(f"layer {layer.params.name!r}: {error}") from error


def check_whole_dims(
    p: Any, lowering: Lowering, dims: Sequence[str], beside: Sequence[str], needed: str, ways: str
) -> None:
    """Checks that processors have all of some dims; `whole` joins `length` beside a split dim."""
    rules = lowering.rules
    for dim in dims:
        axis = rules.axis(dim)
        if axis is None or lowering.mesh.size(axis) == 1 or dim in whole_names(rules, *beside):
            continue
        or_with = f", or add '{beside[0]}:{axis}' to it" if dim == "length" else ""
        raise LayoutError(
            f"{p.name}: the rule '{dim}:{axis}' splits dim {dim!r}, of which {needed}; remove the "
            f"rule{or_with}, or split {ways}"
        )


def _filled(slice_: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Adds zeros behind a slice, to these sizes."""
    more = [size - there for there, size in zip(static_sizes(slice_), sizes, strict=True)]
    return tf.pad(slice_, [[0, number] for number in more]) if any(more) else slice_


class NamedLayer(base_layer.BaseLayer):
    """A lingvo layer that computes with named dims, under any layout and any lowering.

    A subclass defines its weights in `NamedWeights`. Its `FProp` applies `pipemesh.lowering.ops` to
    the results of `Weight` and `Named`. Layout rules alone decide how dims are split.
    `current_lowering()` supplies the rules when the layer is made and when it is called.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers.named import NamedLayer
        >>> from pipemesh.lowering import ops
        >>> class Scale(NamedLayer):
        ...     @classmethod
        ...     def NamedWeights(cls, p):
        ...         return {"scale": ("embed:4", py_utils.WeightInit.Constant(2.0))}
        ...     def FProp(self, theta, x):
        ...         return self.Named(x, "batch;embed") * self.Weight(theta, "scale")
        >>> with py_utils.VariableStore():
        ...     layer = Scale.Params().Set(name="scale").Instantiate()
        >>> layer.FPropDefaultTheta(tf.ones([1, 4])).numpy().tolist()
        [[2.0, 2.0, 2.0, 2.0]]
    """

    # Whether `FProp` gives the products of all `Matrices` to `Adapted`.
    adaptable = False
    # Whether `FProp` can be given a slice of sequences (`pipemesh.recurrent.current_slice`): each
    # position of its results depends on the same one of its inputs, or on its `PastSpecs`.
    takes_slices = False
    # Weights that no optimizer changes, such as moving averages.
    untrained: tuple[str, ...] = ()

    def __init__(self, params: Any) -> None:
        if not params.name:
            kind = type(self).__name__
            raise PipelineError(f"a {kind} has no name; write {kind}.Params().Set(name='...', ...)")
        super().__init__(params)
        # The shape of each whole weight by name, and the slice that each variable holds.
        self._named_shapes: dict[str, Shape] = {}
        self._parts: dict[str, WeightPart] = {}
        for name, adapter in self.AdapterParams(self.params).items():
            self.CreateChild(name + ADAPTER, adapter)

    @classmethod
    def Params(cls) -> Any:
        """Defines `given_weights`."""
        p = super().Params()
        p.Define(
            "given_weights",
            (),
            "Names of weights that it does not make: another layer of a stack does, whose "
            "`tied_weights` says so.",
        )
        p.Define("adapted", (), "Names of weights whose products have adapters; see `LowRank`.")
        p.Define("adapter_tpl", None, "Params of these `LowRank` layers.")
        return p

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, tuple[Shape | str, Any]]:
        """Returns the shape and the initial value of each of the layer's own weights, by name."""
        del p
        return {}

    @classmethod
    def PaddedDims(cls, p: Any) -> dict[str, int]:
        """Returns the dims whose slices may be padded with zeros, each with the number that the
        size of a slice is a multiple of.

        Such a dim need not divide over its axis. `Weight` returns padded weights, and the layer
        must give the same results with them. Variables are not padded.
        """
        del p
        return {}

    def PastSpecs(self, rows: int, length: int) -> list[tf.TensorSpec]:
        """Returns what it hands on, of a slice of `length` positions, to later slices of sequences;
        each processor has it.
        """
        del rows, length
        return []

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of each hidden matrix, by name of the weight.

        Other dims of such a weight number its matrices. `Muon` updates these weights, and AdamW all
        others, such as embeddings.
        """
        del p
        return {}

    @classmethod
    def AdapterParams(cls, p: Any) -> dict[str, Any]:
        """Returns the params of the adapters, by name of the weight."""
        if not p.adapted:
            return {}
        matrices = cls.Matrices(p) if cls.adaptable else {}
        for name in p.adapted:
            if name not in matrices:
                raise PipelineError(
                    f"layer {p.name!r} has no adapter of weight {name!r}"
                    f"{nearest_text(name, matrices)}"
                )
        shapes, padding = cls.NamedWeights(p), cls.PaddedDims(p)
        return {
            name: p.adapter_tpl.Copy().Set(
                weight=str(as_shape(shapes[name][0])),
                num_inputs=len(dim_names(matrices[name][0])),
                padding=padding,
            )
            for name in p.adapted
        }

    @classmethod
    def ParameterBytes(cls, p: Any) -> int:
        """Returns the bytes of the weights that the layer makes, with each slice counted once."""
        weights = cls.NamedWeights(p).items()
        sizes = [as_shape(shape).size for n, (shape, _) in weights if n not in p.given_weights]
        return sum(sizes) * tf.as_dtype(p.dtype).size

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Returns the cost of one forward and one backward pass under the current lowering.

        Args:
            p: params of the layer.
            *shapes: a `tshape.Shape` of each input of `FProp`, or None.

        Returns:
            A NestedMap with these figures, summed over all processors of the lowering. In a
            pipeline these are the processors of one replica.

            * `flops`: those of the matmuls of the forward pass, two for each product of two
              numbers. Attention counts all pairs of blocks, seen or not. Element-wise operations,
              lookups and reductions do not count.
            * `out_shapes`: a `tshape.Shape` of each output.
            * `parameter_bytes`: bytes of the weights, with each slice counted once.
            * `activation_bytes`: bytes that the forward pass keeps for the backward pass, without
              recomputation and with gradients of all inputs and weights. Each tensor counts once if
              gradients read it and it depends on the inputs; so does an input. A tensor that is
              equal on several processors counts once for each. It counts once in all if only the
              gradient of a weight with copies on them reads it, because one of them computes that
              gradient. Weights and their copies do not count.
            * `held_bytes`: those of one processor, without what `fetched_bytes` counts.
            * `communication`: traffic and work of one processor, as `OperationCosts`.
            * `communication_bytes`: bytes that processors send to each other, forward and backward,
              as in `OperationCosts`; 0 on one processor. Whole tensors that enter or leave the
              mesh, and copies of weights, do not count.
            * `fetched_bytes`: 0 outside a `replica_cut_scope`. Inside it, the bytes of weights cut
              over the replicas of a stage that one replica gets from the others: once per step if
              the stage is alone on its devices, else for the forward pass of each microbatch, and
              at most as much for the backward pass.
            * `dims`: the dims that rules may split, with sizes that an axis must divide;
              `weight_dims`: those of weights.

        Raises:
            LayoutError: the rules cannot split a tensor of the layer.
        """
        tally = Tally(current_lowering())
        found = cls.Count(p, tally, *shapes)
        outputs = found if isinstance(found, tuple) else (found,)
        return py_utils.NestedMap(
            flops=tally.flops,
            out_shapes=tuple(tshape.Shape(list(value.shape.sizes)) for value in outputs),
            parameter_bytes=tally.parameter_bytes,
            activation_bytes=tally.activation_bytes,
            communication=tally.costs,
            communication_bytes=tally.communication_bytes,
            fetched_bytes=tally.fetched_bytes,
            held_bytes=tally.held_bytes,
            dims=tally.dims,
            weight_dims=tally.weight_dims,
        )

    @classmethod
    def Count(cls, p: Any, tally: Tally, *shapes: Any) -> Any:
        """Adds all costs of the layer to a tally, and returns a value for each output."""
        tally.parameter_bytes += cls.ParameterBytes(p)
        cut, padding, lowering = current_replica_cut(), cls.PaddedDims(p), tally.lowering
        for weight, _ in cls.NamedWeights(p).values():
            shape = as_shape(weight)
            tally.note_dims(shape, padding)
            tally.weight_dims.update(shape.names)
            computed = padded(shape, padding, lowering.rules, lowering.mesh)
            layout = lowering.rules.tensor_layout(computed, lowering.mesh)
            away = 0
            if cut is not None:
                away = cut.size_elsewhere(padded(shape, padding, cut.rules, cut.mesh))
            tally.fetched_bytes += away * py_utils.FPropDtype(p).size
            parts = lowering.group_size(layout.split_axes)
            tally.held_bytes += (computed.size - away) // parts * p.dtype.size
        return cls.CountCosts(p, tally, *shapes)

    @classmethod
    def CountPart(cls, p: Any, part: Any, tally: Tally, *shapes: Any) -> Any:
        """Counts a layer that is a part of this one, with the dtypes of this layer."""
        part = base_layer.BaseLayer.CopyBaseParams(p, part.Copy())
        return part.cls.Count(part, tally, *shapes)

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, *shapes: Any) -> Any:
        """Repeats `FProp` with values that have only shapes, and counts in a tally.

        A subclass overrides it so that stacks can be cut by cost. `Count` adds `ParameterBytes`.

        Args:
            p: params of the layer.
            tally: the counter.
            *shapes: the sizes of each input of `FProp`, a `Value` or None.

        Returns:
            A `Value`, or a tuple with one for each output.

        Raises:
            NotImplementedError: the class does not override it.
        """
        del p, tally, shapes
        raise NotImplementedError(
            f"{cls.__name__} does not say what it costs; override CountCosts(cls, p, tally, "
            "*shapes)"
        )

    @classmethod
    def CountedWeights(cls, p: Any, tally: Tally) -> dict[str, Value]:
        """Returns the layer's own weights as values, by name, padded as in computations."""
        dtype, lowering, padding = py_utils.FPropDtype(p), tally.lowering, cls.PaddedDims(p)
        shapes = {
            name: padded(as_shape(shape), padding, lowering.rules, lowering.mesh)
            for name, (shape, _) in cls.NamedWeights(p).items()
        }
        return {name: tally.weight(shape, dtype) for name, shape in shapes.items()}

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        p, weights = self.params, self.NamedWeights(self.params)
        for name in p.given_weights:
            if name not in weights:
                raise ShapeError(
                    f"layer {p.name!r} has no weight {name!r} to be given"
                    f"{nearest_text(name, weights)}"
                )
        for name, (shape, init) in weights.items():
            if name not in p.given_weights:
                self._CreateNamedVariable(name, as_shape(shape), init)

    def _CreateNamedVariable(
        self, name: str, shape: Shape, init: Any, dtype: tf.DType | None = None
    ) -> None:
        """Creates the variables of a weight, one for each different slice.

        Initial values are slices of one tensor under every layout. The dtype is by default that of
        the params.
        """
        with within(self):
            parts = weight_parts(current_lowering(), name, shape, self.PaddedDims(self.params))
        matrix = None
        if dims := self.Matrices(self.params).get(name):
            inputs, outputs = (tuple(map(shape.names.index, dim_names(side))) for side in dims)
            matrix = Matrix(inputs, outputs)
        with lingvo_tf.variable_scope(name, auxiliary_name_scope=False) as scope:
            full_name = py_utils.GetVariableName(scope.name)
        initializer = initializer_of(init, full_name, self.params.random_seed)
        for part in parts:
            self._parts[part.name] = part
            block = _BlockInit(initializer, shape.sizes, part.begin)
            weights = py_utils.WeightParams(
                list(part.sizes),
                py_utils.WeightInit.CustomVarInit(block),
                dtype or self.params.dtype,
            )
            with part.placed():
                self.CreateVariable(part.name, weights, trainable=name not in self.untrained)
            made = self._private_vars[part.name]
            mark_matrix(made, matrix)
            if part.sizes != tuple(shape.sizes):
                check_learners()
                before, after = made.name.removesuffix(":0").rsplit(f"/{part.name}/", 1)
                cut = Slice(tuple(shape.sizes), part.begin)
                mark_slice(made, f"{before}/{name}/{after}", cut)
        self._named_shapes[name] = shape

    def parts_of(self, name: str) -> list[WeightPart]:
        """Returns the parts of a weight: a variable for each."""
        return [
            part
            for key, part in self._parts.items()
            if key == name or key.startswith(f"{name}_slice_")
        ]

    def ShareWeight(self, name: str, layer: NamedLayer, weight: str) -> None:
        """Makes a weight of another layer one of this layer, with that layer's order of dims.

        Args:
            name: one of `given_weights`.
            layer: the other layer, made under the same rules.
            weight: the name of the weight in the other layer.

        Raises:
            ShapeError: the other layer has no such weight, or its dims differ.
            LayoutError: the layers were made under rules that split the weight differently.
        """
        p = self.params
        if weight not in layer._named_shapes:
            raise ShapeError(
                f"layer {layer.params.name!r} has no weight {weight!r} to share"
                f"{nearest_text(weight, layer._named_shapes)}"
            )
        shape = layer._named_shapes[weight]
        wanted = as_shape(self.NamedWeights(p)[name][0])
        if set(shape) != set(wanted):
            raise ShapeError(
                f"weight {name!r} of layer {p.name!r} has dims '{wanted}', but {weight!r} of layer "
                f"{layer.params.name!r}, which it is to share, has '{shape}'; give both layers the "
                "same sizes"
            )
        lowering, padding = current_lowering(), self.PaddedDims(p)
        if layer.PaddedDims(layer.params) != padding:
            raise ShapeError(
                f"layers {p.name!r} and {layer.params.name!r} share the weight {weight!r}, but pad "
                f"its dims differently; give both the same multiple"
            )
        for part in weight_parts(lowering, name, shape, padding):
            of = weight + part.name.removeprefix(name)
            if of not in layer._private_theta:
                raise LayoutError(
                    f"weight {weight!r} of layer {layer.params.name!r} is not cut as mesh "
                    f"'{lowering.mesh}' with rules '{lowering.rules}' says; make the "
                    "layers that share it under the same mesh and rules"
                )
            self._parts[part.name] = layer._parts[of]
            self.AddExtraTheta(part.name, layer._private_theta[of])
        self._named_shapes[name] = shape

    def Weight(self, theta: Any, name: str) -> Tensor:
        """Returns a weight as a tensor of the current lowering, in the compute dtype of the layer.

        Gradients reach each variable once, for any number of copies.

        Args:
            theta: the weights of this layer. A weight that is not split is a tensor, a tuple with
                one tensor for each processor, or a tensor with named dims. A slice is a tensor, or
                a tuple with the copies for the processors that hold it.
            name: the logical name.

        Raises:
            ShapeError: there is no such weight, or a tuple has another length.
            LayoutError: the weight was created under rules or a mesh that split it differently.
        """
        if name not in self._named_shapes:
            raise ShapeError(
                f"layer {self.params.name!r} has no weight {name!r}"
                f"{nearest_text(name, self._named_shapes)}"
            )
        lowering, shape = current_lowering(), self._named_shapes[name]
        padding = self.PaddedDims(self.params)
        computed = padded(shape, padding, lowering.rules, lowering.mesh)
        layout = lowering.tensor_layout(computed)
        if name in theta:
            given = theta[name]
            if isinstance(given, Tensor):
                return self._Cast(given)
            if isinstance(given, list | tuple):
                slices = held_by_processors(lowering, given, name)
            else:
                whole = _filled(tf.convert_to_tensor(given), computed.sizes)
                slices = from_whole(lowering, whole, layout)
        else:
            names = [part.name for part in weight_parts(lowering, name, shape, padding)]
            number = sum(key.startswith(f"{name}_slice_") for key in theta)
            if number != len(names):
                raise LayoutError(
                    f"weight {name!r} of layer {self.params.name!r} was created in {number} "
                    f"slices, but on mesh '{lowering.mesh}' with rules '{lowering.rules}' it has "
                    f"{len(names)}; make and call the layer under the same mesh and rules"
                )
            parts = [theta[part] for part in names]
            slices = from_parts(lowering, parts, shape, padding, name)
        if computed != shape:
            filled = functools.partial(_filled, sizes=layout.slice_shape)
            slices = lowering.map(filled, slices)
        return self._Cast(Tensor(lowering, slices, computed))

    def Adapted(self, theta: Any, name: str, x: Tensor, product: Tensor) -> Tensor:
        """Adds the adapter of a weight, if it has one, to the product of `x` with the weight."""
        if name not in self.params.adapted:
            return product
        child = name + ADAPTER
        return self.children[child].FProp(theta[child], x, product)

    @classmethod
    def CountAdapted(cls, p: Any, tally: Tally, name: str, x: Value, product: Value) -> Value:
        """Counts `Adapted`."""
        if name not in p.adapted:
            return product
        return cls.CountPart(p, cls.AdapterParams(p)[name], tally, x, product)

    def Named(self, x: Any, dims: Any, dtype: tf.DType | None = None) -> Tensor:
        """Returns an input as a tensor of the current lowering.

        Args:
            x: a tensor with named dims, or a plain one, which gets the names.
            dims: names, in the order of the result.
            dtype: the dtype of a floating result; by default the one that the layer computes in.

        Raises:
            ShapeError: its dims differ, or TensorFlow does not know their sizes.
            LayoutError: it belongs to another lowering, or the rules cannot split it.
        """
        names, lowering = dim_names(dims), current_lowering()
        if isinstance(x, Tensor):
            if x.lowering is not lowering:
                raise LayoutError(
                    f"layer {self.params.name!r} is called with {x!r} of one lowering, inside of "
                    "the scope of another; call it in the scope that its inputs were made in"
                )
            if is_unnamed(x.shape) and len(names) == len(x.shape):
                x = ops.rename(x, dict(zip(x.shape.names, names, strict=True)))
            if sorted(x.shape.names) != sorted(names):
                raise ShapeError(
                    f"layer {self.params.name!r} takes dims '{';'.join(names)}', but was given "
                    f"'{x.shape}'; ops.rename or ops.reshape it"
                )
            self._CheckWidths(x.shape)
            return self._Cast(ops.transpose(x, names), dtype)
        x = tf.convert_to_tensor(x)
        form = f"layer {self.params.name!r} takes dims '{';'.join(names)}'"
        if x.shape.rank is not None and x.shape.rank != len(names):
            raise ShapeError(
                f"{form}, but was given a tensor of {x.shape.rank} dims, of sizes {x.shape}; "
                "tf.reshape it"
            )
        if not x.shape.is_fully_defined():
            raise ShapeError(
                f"{form} of sizes that are known before the step runs, but was given a tensor of "
                f"sizes {x.shape}"
            )
        shape = Shape.of(**dict(zip(names, x.shape.as_list(), strict=True)))
        self._CheckWidths(shape)
        with within(self):
            slices = from_whole(lowering, x, lowering.tensor_layout(shape))
        return self._Cast(Tensor(lowering, slices, shape), dtype)

    def _CheckWidths(self, shape: Shape) -> None:
        """Checks that dims of an input and of the weights have equal sizes."""
        for name, weight in self._named_shapes.items():
            for dim in weight:
                if dim.name in shape.names and shape[dim.name] != dim:
                    raise ShapeError(
                        f"layer {self.params.name!r} was given '{shape}', but its weight {name!r} "
                        f"is '{weight}'; set the size of {dim.name!r} in the layer's params "
                        f"(input_dim) to {shape[dim.name].size}, or give an input of {dim.size}"
                    )

    def _Cast(self, x: Tensor, dtype: tf.DType | None = None) -> Tensor:
        target: tf.DType = dtype or py_utils.FPropDtype(self.params)
        return ops.cast(x, target) if x.dtype.is_floating and x.dtype != target else x

    @property
    def named_shapes(self) -> dict[str, Shape]:
        """Returns the shapes of the layer's own whole weights, by logical name."""
        return dict(self._named_shapes)

    def padded_shapes(self, rules: LayoutRules, mesh: Mesh) -> dict[str, Shape]:
        """Returns the shapes of the layer's own weights in computations, by logical name."""
        padding = self.PaddedDims(self.params)
        return {
            name: padded(shape, padding, rules, mesh) for name, shape in self._named_shapes.items()
        }

    def weight_parts(self) -> dict[str, WeightPart]:
        """Returns the slice and the holders of each of the layer's own variables."""
        return dict(self._parts)

    def dims(self) -> set[str]:
        """Returns the dims of the layer's own weights and inputs, which rules may split."""
        return {"batch", "length"}.union(*(shape.names for shape in self._named_shapes.values()))
