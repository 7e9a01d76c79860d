"""Plain functions and Keras layers as layers of lingvo."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from lingvo.core import base_layer, hyperparams, py_utils, tshape

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_no_live_layer, is_live_layer, with_article
from pipemesh.layers.keras_dims import NAMELESS, paths_of, weight_shapes
from pipemesh.layers.named import NamedLayer, current_lowering
from pipemesh.layers.named.named_layer import Given
from pipemesh.layers.named.scope import exported, map_kind, unnamed
from pipemesh.layers.named.weight_slices import from_whole
from pipemesh.layers.step_seed import GenerateStepSeedPair
from pipemesh.lowering import Tensor
from pipemesh.lowering.split_graph import SplitGraph


def _traced_meta(p: Any, function: Callable[..., Any], dtype: Any, shapes: Sequence[Any]) -> Any:
    """Traces a function; flops are those of the param, or of the matmuls and convolutions."""
    specs = [None if s is None else tf.TensorSpec(s.ToTensorShape(), dtype) for s in shapes]
    traced: Any = tf.function(lambda *args: function(*args), autograph=False)
    graph = traced.get_concrete_function(*specs).graph
    outputs = tf.nest.flatten(graph.structured_outputs)
    return py_utils.NestedMap(
        flops=sum(map(flops_of, graph.get_operations())) if p.flops is None else p.flops(*shapes),
        out_shapes=tuple(None if t is None else tshape.Shape(t.shape.as_list()) for t in outputs),
    )


def flops_of(op: tf.Operation) -> int:
    """Returns two flops for each product of two numbers that an operation sums."""
    if op.type in ("MatMul", "BatchMatMulV2"):
        name = "transpose_a" if op.type == "MatMul" else "adj_x"
        inner = static_sizes(op.inputs[0])[-2 if op.get_attr(name) else -1]
        return 2 * inner * math.prod(static_sizes(op.outputs[0]))
    if op.type == "Einsum":
        operands, result = op.get_attr("equation").decode().split("->")
        names = operands.split(",")
        # An ellipsis can only come first.
        sizes = {
            letter: size
            for text, tensor in zip(names, op.inputs, strict=True)
            for letter, size in zip(reversed(text), reversed(static_sizes(tensor)), strict=False)
            if letter not in f"{result}."
        }
        summed = math.prod(sizes.values()) * math.prod(static_sizes(op.outputs[0]))
        return 2 * summed if len(names) > 1 else 0
    if op.type in ("Conv2D", "Conv3D"):
        window = static_sizes(op.inputs[1])
        return 2 * math.prod(window[:-1]) * math.prod(static_sizes(op.outputs[0]))
    return 0


class FunctionParams(hyperparams.InstantiableParams):
    """The params of a `FunctionLayer`; copies share the function, and so its variables."""

    def Copy(self) -> FunctionParams:
        """Copies all params but the function."""
        copied: Any = self.cls.Params()
        for name, value in self.IterParams():
            if name not in copied:
                copied.Define(name, None, "")
            copied.Set(**{name: value if name == "function" else copy.deepcopy(value)})
        return copied


class FunctionLayer(base_layer.BaseLayer):
    """A layer that calls a function of tensors, for use in place of any lingvo layer.

    The function may be any callable, also a `tf.Module`. It is never copied, so the variables that
    it reads get gradients. They are not in `vars`: update and save them yourself.

    Random numbers that the function draws are the same under every plan. A list of layers for
    `PartitionSequentialLayers` may contain plain functions.

    Example:
        >>> params = FunctionLayer.Params().Set(name="halve", function=lambda x: x / 2)
        >>> with py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> layer.FPropDefaultTheta(tf.ones([3])).numpy().tolist()
        [0.5, 0.5, 0.5]
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `function` and `flops`."""
        p: Any = super().Params()
        # Params would treat any other attribute as a param.
        object.__setattr__(p, "__class__", FunctionParams)
        p.Define("function", None, "Takes tensors or None, returns one or several.")
        p.Define("flops", None, "A function from input shapes to flops; default: of the products.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_no_live_layer(f"{p.name}: function", p.function)
        if not callable(p.function):
            raise PipelineError(
                f"{p.name}: function is {p.function!r}; give a function of tensors, such as "
                "tf.nn.relu"
            )

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Calls the function with `args`; a list of outputs becomes a tuple."""
        del theta
        outputs = self.params.function(*args)
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Returns flops and output shapes for inputs of the dtype that the layer computes in."""
        return _traced_meta(p, p.function, py_utils.FPropDtype(p), shapes)


def as_layer(value: Any) -> Any:
    """Returns params of a layer for a plain function; returns other values unchanged."""
    has_params = isinstance(value, type) or hasattr(value, "Instantiate") or is_live_layer(value)
    if callable(value) and not has_params:
        name = getattr(value, "__name__", type(value).__name__).strip("<>_") or "function"
        return FunctionLayer.Params().Set(name=name, function=value)
    return value


class KerasLayer(NamedLayer):
    """A Keras 3 layer or model with its own weights, for use in place of any lingvo layer.

    Its weights are lingvo variables, in `vars` and `theta`. Keras draws their initial values; with
    `random_seed` these depend on the seed and the layer's name. Constraints are applied after each
    step (`PostTrainingStepUpdate`). Dropout does not depend on the plan.

    A layer in training that updates itself, as `BatchNormalization` does, or adds to the loss, as
    regularizers do, is an error: that is impossible microbatch by microbatch. `KerasTask` trains
    such layers as a whole model.

    The rules of a layout split its weights by the names of their dims, as those of layers with
    named dims: `vocab` and `embed` of an `Embedding`; `d_ff`, the larger side of a `Dense` layer,
    and `embed`, the other one (`inputs` and `outputs` if both are equal); `heads` and `head_dim` of
    attention, `kv_heads` where keys and values have fewer; `channels` and `features` of a
    convolution. An `EinsumDense` layer has the names of a `Dense` layer or of attention. `dims`
    gives weights other names. Products of split weights are split, and what follows stays so as far
    as its operations allow (Xu et al., "GSPMD", 2021). A warning names layers that join a split
    tensor. Inputs and outputs of the layer are whole.

    The layer needs TensorFlow 2 behaviour, as Keras does.

    Example:
        >>> params = KerasLayer.Params().Set(
        ...     name="dense", layer=keras.layers.Dense(3), input_shapes=[[None, 2]])
        >>> with py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> sorted(layer.vars), layer.FPropDefaultTheta(tf.ones([4, 2])).shape.as_list()
        (['bias', 'kernel'], [4, 3])
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `layer`, `input_shapes`, `flops` and `dims`."""
        p = super().Params()
        p.Define(
            "layer", None, "A Keras layer, copied by its config, or a function that makes one."
        )
        p.Define("input_shapes", None, "Such as [[None, 3, 4]]; None for a layer that is built.")
        p.Define("flops", None, "As for a FunctionLayer.")
        p.Define(
            "dims",
            {},
            "Names of the dims of weights whose path a pattern matches, as {'query/kernel': "
            "'embed;heads;head_dim'}; the first pattern counts, and '' keeps a weight whole.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise PipelineError(
                f"{p.name}: layers of Keras need TensorFlow 2's behaviour; call "
                "py_utils.SetEagerMode(True) before layers are made"
            )
        with _keras_seeded(p):
            self._layer = _built(p)
        self._has_warned = False

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        kept = [*self._layer.trainable_variables]
        self._seeds = []
        for variable in self._layer.non_trainable_variables:
            is_seed = variable.path.split("/")[-1] == "seed_generator_state"
            (self._seeds if is_seed else kept).append(variable)
        paths = paths_of(kept)
        self._kept = dict(zip(_names(paths), kept, strict=True))
        self.untrained = tuple(n for n, variable in self._kept.items() if not variable.trainable)
        shapes = weight_shapes(self.params.name, self._layer, kept, paths, self.params.dims)
        for (name, variable), shape in zip(self._kept.items(), shapes, strict=True):
            value = variable.numpy()
            self._CreateNamedVariable(name, shape, Given(value), tf.as_dtype(value.dtype))
            if variable.trainable and variable.constraint is not None and name not in self.vars:
                raise PipelineError(
                    f"{self.params.name}: the weight {name!r} has a constraint, "
                    f"{type(variable.constraint).__name__}, which needs all of it, but the layout "
                    f"splits '{shape}'; leave out the constraint, or keep the weight whole by "
                    f"dims={{'{'/'.join(paths[len(self.named_shapes) - 1])}': ''}}"
                )

    def dims(self) -> set[str]:
        """Returns the named dims of its weights, which rules may split."""
        names = {name for shape in self.named_shapes.values() for name in shape.names}
        return {name for name in names if not name.startswith(NAMELESS)}

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Calls the layer; a layer that changes itself or adds to the loss cannot be trained."""
        if current_lowering().mesh.num_devices == 1:
            return self._checked_call(theta, *exported(args))
        if tf.executing_eagerly():
            return tf.function(self._split_call, autograph=False)(theta, *args)
        return self._split_call(theta, *args)

    def _split_call(self, theta: Any, *args: Any) -> Any:
        """Calls the layer on slices of its weights."""
        lowering = current_lowering()
        operands = [self.Weight(theta, name) for name in self._kept]
        number = len(operands)

        def note(value: Any) -> _Operand:
            if not isinstance(value, Tensor):
                shape = unnamed(static_sizes(value), 0)
                slices = from_whole(lowering, value, lowering.tensor_layout(shape))
                value = Tensor(lowering, slices, shape)
            operands.append(value)
            return _Operand(len(operands) - 1)

        noted_args = map_kind((Tensor, tf.Tensor), note, args)

        def call(*tensors: tf.Tensor) -> Any:
            theta = dict(zip(self._kept, tensors[:number], strict=True))
            return self._checked_call(
                theta, *map_kind(_Operand, lambda operand: tensors[operand.number], noted_args)
            )

        graph = SplitGraph(lowering, self.params.name)
        outputs = graph.run(call, operands, lambda sizes: unnamed(sizes, 0))
        if graph.gathering and not self._has_warned:
            self._has_warned = True
            joining = [f"{n} ({', '.join(sorted(k))})" for n, k in sorted(graph.gathering.items())]
            warnings.warn(
                f"{self.params.name}: these layers join a split tensor, and each device computes "
                f"all of it: {'; '.join(joining)}",
                stacklevel=2,
            )
        return outputs

    def _checked_call(self, theta: Any, *args: Any) -> Any:
        """Calls the layer, and checks that it has outputs alone."""
        outputs, changed, penalties = self._call(theta, *args)
        name = self.params.name
        kind = with_article(getattr(self._layer, "kind", type(self._layer).__name__))
        if changed and not self.do_eval:
            raise PipelineError(
                f"{name}: {kind} updates {next(iter(changed))!r} "
                "while it trains, which would be done once a microbatch instead of once a step, "
                "and again where it is computed again; freeze it (trainable=False), use a "
                "layer without such state, such as LayerNormalization, or train the whole model "
                "as a KerasTask, without a pipeline"
            )
        if penalties and not self.do_eval:
            raise PipelineError(
                f"{name}: {kind} adds to the loss (a regularizer, or add_loss), which would be "
                "lost, for a stage hands on its outputs alone; leave that out and set "
                "l2_regularizer_weight of the learner, or train the whole model as a KerasTask, "
                "without a pipeline"
            )
        return outputs

    def _call(self, theta: Any, *args: Any) -> tuple[Any, dict[str, tf.Tensor], list[tf.Tensor]]:
        """Calls the layer without changing a variable.

        Returns the outputs, the new values of assigned variables, and the scalars from regularizers
        and `add_loss`.
        """
        requested = py_utils.FPropDtype(self.params)
        supported = tf.as_dtype(self._layer.compute_dtype)
        # Parts of a mixed model cast their weights themselves, if they get them as they are.
        whole_weights = tf.as_dtype(self._layer.variable_dtype)
        if requested != supported and (self._layer.autocast or requested != whole_weights):
            policy = requested.name if requested.size >= 4 else f"mixed_{requested.name}"
            raise PipelineError(
                f"{self.params.name}: the layer computes in {supported.name}, but fprop_dtype is "
                f"{requested.name}; make it with dtype={policy!r}, or set its fprop_dtype"
            )
        mapping = [
            (variable, theta[name] if name in theta else self.Weight(theta, name).slices[0])
            for name, variable in self._kept.items()
        ]
        for number, variable in enumerate(self._seeds):
            seed = GenerateStepSeedPair(self.params, op_seed=number)
            if seed.shape.rank != 1:
                raise PipelineError(
                    f"{self.params.name}: {variable.path!r} draws random numbers, for which one "
                    "program of several Keras layers has no seed; set lowering='placement', or "
                    "leave out dropout"
                )
            mapping.append((variable, tf.cast(seed, variable.dtype)))
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = {name: scope.get_current_value(v) for name, v in self._kept.items()}
            outputs = self._layer(*args, training=not self.do_eval)
            # Losses of `add_loss` come first, as in Keras.
            penalties = [tf.reduce_sum(loss) for loss in scope.losses]
            changed: dict[str, Any] = {}
            for name, variable in self._kept.items():
                if variable.trainable and variable.regularizer is not None:
                    penalties.append(variable.regularizer(before[name]))
                value = scope.get_current_value(variable)
                if value is not before[name]:
                    changed[name] = value
        return tuple(outputs) if isinstance(outputs, list) else outputs, changed, penalties

    def PostTrainingStepUpdate(self) -> Any:
        """Returns an operation that applies the constraints of weights after the step's updates."""
        updates = [super().PostTrainingStepUpdate()]
        for name, variable in self._kept.items():
            if variable.trainable and variable.constraint is not None:
                updates.append(self.vars[name].assign(variable.constraint(self.vars[name].value())))
        return tf.group(*updates)

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Returns output shapes, flops, and the bytes of weights."""
        # Keras computes output shapes without the values of weights.
        layer = _built(p)
        call = functools.partial(layer, training=False)
        meta = _traced_meta(p, call, layer.compute_dtype, shapes)
        number = sum(math.prod(v.shape) for v in layer.trainable_variables)
        meta.parameter_bytes = number * tf.as_dtype(layer.variable_dtype).size
        return meta


class _Operand(NamedTuple):
    """Stands for a tensor among the arguments."""

    number: int


@contextlib.contextmanager
def _keras_seeded(p: Any) -> Iterator[None]:
    """Makes Keras draw initial values by `random_seed`: it takes seeds from Python's `random`."""
    if p.random_seed is None:
        yield
        return
    state = random.getstate()
    random.seed(f"{p.random_seed} {p.name}")
    try:
        yield
    finally:
        random.setstate(state)


def _built(p: Any) -> Any:
    """Returns a new layer with its variables."""
    if isinstance(p.layer, keras.Layer):
        layer = type(p.layer).from_config(p.layer.get_config())
        shapes = p.input_shapes or _shapes_of(p.layer)
    elif callable(p.layer):
        layer, shapes = p.layer(), p.input_shapes
    else:
        raise PipelineError(
            f"{p.name}: layer is {p.layer!r}; give a Keras layer, or a function that makes one"
        )
    if not isinstance(layer, keras.Layer):
        raise PipelineError(f"{p.name}: layer() returned {layer!r}, which is no Keras layer")
    if not layer.built:
        if not shapes:
            raise PipelineError(
                f"{p.name}: {with_article(type(layer).__name__)} makes its weights when it knows "
                "the shape of its input; set input_shapes, for example [[None, 3, 4]]"
            )
        with tf.init_scope():
            layer.build(*shapes) if len(shapes) > 1 else layer.build(tuple(shapes[0]))
    return layer


def _shapes_of(layer: Any) -> list[Any]:
    """Returns the shapes that a layer was built with, none if it was not built."""
    config = (layer.get_build_config() if layer.built else None) or {}
    if "input_shape" in config:
        return [config["input_shape"]]
    return [shape for _, shape in sorted((config.get("shapes_dict") or {}).items())]


def _names(paths: Sequence[Sequence[str]]) -> list[str]:
    """Returns a unique name for each variable: the shortest unique ends of their paths."""
    for length in range(1, 1 + max(map(len, paths), default=0)):
        names = ["_".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'_'.join(path)}_{number}" for number, path in enumerate(paths)]
