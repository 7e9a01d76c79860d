"""Plain functions and Keras layers as layers of lingvo."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from lingvo.core import base_layer, hyperparams, py_utils, tshape

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_no_live_layer, is_live_layer, with_article
from pipemesh.layers.step_seed import GenerateStepSeedPair


def traced_meta(function: Callable[..., Any], specs: Sequence[tf.TensorSpec | None]) -> Any:
    """Traces a function; flops are two for each product in matmuls and convolutions."""
    tensor_specs = [spec for spec in specs if spec is not None]

    def call(*tensors: tf.Tensor) -> Any:
        rest = iter(tensors)
        return function(*(None if spec is None else next(rest) for spec in specs))

    graph: Any = tf.function(call, autograph=False).get_concrete_function(*tensor_specs).graph
    outputs = [t for t in tf.nest.flatten(graph.structured_outputs) if t is not None]
    return py_utils.NestedMap(
        flops=_products(graph),
        out_shapes=tuple(tshape.Shape(t.shape.as_list()) for t in outputs),
    )


def _products(graph: Any) -> int:
    """Returns the flops of the matmuls and convolutions of a graph with static shapes."""
    return sum(_flops(op) for op in graph.get_operations())


def _flops(op: tf.Operation) -> int:
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


def _define_flops(p: Any) -> None:
    """Defines the param by which a user gives the costs of a layer."""
    p.Define(
        "flops",
        None,
        "Flops of the forward pass for a whole input, as a function of the inputs' shapes; by "
        "default those of the products of matrices and convolutions.",
    )


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

    The function may be any callable: a `tf.Module`, a bound method, a `functools.partial`. It is
    never copied, so the variables that it reads get gradients. They are not in `vars`: lingvo's
    learners and checkpoints skip them. Update and save them yourself, or write a layer with
    weights.

    Random numbers that the function draws are the same under every plan. A list of layers for
    `PartitionSequentialLayers` may contain plain functions. lingvo and Keras layers are errors
    here: they have their own params.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers import FunctionLayer
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
        _define_flops(p)
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
        """Returns flops and output shapes; by default flops are those of matmuls and convolutions.

        Inputs count as tensors of the dtype that the layer computes in.
        """
        dtype = py_utils.FPropDtype(p)
        specs = [
            None if shape is None else tf.TensorSpec(shape.ToTensorShape().as_list(), dtype)
            for shape in shapes
        ]
        meta = traced_meta(p.function, specs)
        if p.flops is not None:
            meta.flops = p.flops(*shapes)
        return meta


def as_layer(value: Any) -> Any:
    """Returns params of a layer for a plain function; returns other values unchanged."""
    has_params = isinstance(value, type) or hasattr(value, "Instantiate") or is_live_layer(value)
    if callable(value) and not has_params:
        name = getattr(value, "__name__", type(value).__name__).strip("<>_") or "function"
        return FunctionLayer.Params().Set(name=name, function=value)
    return value


_SEED_STATE = "seed_generator_state"


@dataclasses.dataclass(frozen=True)
class Called:
    """The results of a call of a Keras layer."""

    outputs: Any  # a list as a tuple
    changed: dict[str, tf.Tensor]  # new values of assigned variables
    penalties: list[tf.Tensor]  # scalars from regularizers and `add_loss`


class KerasLayer(base_layer.BaseLayer):
    """A Keras 3 layer or model with its own weights, for use in place of any lingvo layer.

    Its weights are lingvo variables, in `vars` and `theta`. They are trained, cut into stages and
    saved like all others. Keras draws their initial values; with `random_seed` these depend on the
    seed and the layer's name. Constraints are applied after each step (`PostTrainingStepUpdate`).
    Random numbers are keyed by the layer and the global step, so dropout does not depend on the
    plan.

    Two things are errors while training. The layer must not update itself, as the averages of
    `BatchNormalization` do, and must not add to the loss, as regularizers do. Neither is possible
    microbatch by microbatch. Such layers can be evaluated, and `KerasTask` trains them as a whole
    model.

    The layer needs TensorFlow 2 behaviour, as Keras does.

    Example:
        >>> import keras
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers import KerasLayer
        >>> params = KerasLayer.Params().Set(
        ...     name="dense", layer=keras.layers.Dense(3), input_shapes=[[None, 2]])
        >>> with py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> sorted(layer.vars), layer.FPropDefaultTheta(tf.ones([4, 2])).shape.as_list()
        (['bias', 'kernel'], [4, 3])
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `layer`, `input_shapes` and `flops`."""
        p = super().Params()
        p.Define(
            "layer",
            None,
            "A Keras layer, which is copied by its config, or a function that makes a new one.",
        )
        p.Define(
            "input_shapes",
            None,
            "A shape for each input, such as [[None, 3, 4]]; None for a layer that is built.",
        )
        _define_flops(p)
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

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        self._seeds = [v for v in self._layer.non_trainable_variables if _is_seed(v)]
        kept = [*self._layer.trainable_variables]
        kept += [v for v in self._layer.non_trainable_variables if not _is_seed(v)]
        self._kept = dict(zip(_names(kept), kept, strict=True))
        for name, variable in self._kept.items():
            value = variable.numpy()
            init = py_utils.WeightInit.CustomVarInit(
                lambda shape, dtype, partition_info=None, value=value: tf.cast(value, dtype)
            )
            weight = py_utils.WeightParams(list(value.shape), init, tf.as_dtype(value.dtype))
            self.CreateVariable(name, weight, trainable=variable.trainable)

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Calls the layer.

        Args:
            theta: weights.
            *args: inputs of the layer.

        Returns:
            The outputs of the layer.

        Raises:
            PipelineError: the layer updates state or adds to the loss while it trains, or computes
                in another dtype than `fprop_dtype`.
        """
        called = self._call(theta, *args)
        if not self.do_eval:
            self._refuse(called)
        return called.outputs

    def _call(self, theta: Any, *args: Any) -> Called:
        """Calls the layer without changing a variable."""
        self._check_dtype()
        mapping = [(variable, theta[name]) for name, variable in self._kept.items()]
        for number, variable in enumerate(self._seeds):
            seed = GenerateStepSeedPair(self.params, op_seed=number)
            mapping.append((variable, tf.cast(seed, variable.dtype)))
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = {name: scope.get_current_value(v) for name, v in self._kept.items()}
            outputs = self._layer(*args, training=not self.do_eval)
            after: dict[str, Any] = {
                name: scope.get_current_value(v) for name, v in self._kept.items()
            }
            # Losses of `add_loss` come first, as in Keras.
            penalties = [tf.reduce_sum(loss) for loss in scope.losses]
            for name, variable in self._kept.items():
                if variable.trainable and variable.regularizer is not None:
                    penalties.append(variable.regularizer(before[name]))
        changed = {name: value for name, value in after.items() if value is not before[name]}
        return Called(tuple(outputs) if isinstance(outputs, list) else outputs, changed, penalties)

    def _refuse(self, called: Called) -> None:
        name, kind = self.params.name, with_article(type(self._layer).__name__)
        if called.changed:
            raise PipelineError(
                f"{name}: {kind} updates {next(iter(called.changed))!r} "
                "while it trains, which would be done once a microbatch instead of once a step, "
                "and again where it is computed again; freeze it (trainable=False), use a "
                "layer without such state, such as LayerNormalization, or train the whole model "
                "as a KerasTask, without a pipeline"
            )
        if called.penalties:
            raise PipelineError(
                f"{name}: {kind} adds to the loss (a regularizer, or add_loss), which would be "
                "lost, for a stage hands on its outputs alone; leave that out and set "
                "l2_regularizer_weight of the learner, or train the whole model as a KerasTask, "
                "without a pipeline"
            )

    def PostTrainingStepUpdate(self) -> Any:
        """Returns an operation that applies the constraints of weights after the step's updates."""
        updates = [super().PostTrainingStepUpdate()]
        for name, variable in self._kept.items():
            if variable.trainable and variable.constraint is not None:
                updates.append(self.vars[name].assign(variable.constraint(self.vars[name].value())))
        return tf.group(*updates)

    def _check_dtype(self) -> None:
        requested = py_utils.FPropDtype(self.params)
        supported = tf.as_dtype(self._layer.compute_dtype)
        if requested != supported:
            raise PipelineError(
                f"{self.params.name}: the layer computes in {supported.name}, but fprop_dtype is "
                f"{requested.name}; make it with dtype='mixed_{requested.name}', or set its "
                "fprop_dtype"
            )

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Returns output shapes and flops, by default those of matmuls and convolutions."""
        sizes = [shape.ToTensorShape().as_list() for shape in shapes]
        # Keras computes output shapes without the values of weights.
        layer = _built(p)
        specs = [tf.TensorSpec(size, layer.compute_dtype) for size in sizes]
        meta = traced_meta(lambda *x: layer(*x, training=False), specs)
        if p.flops is not None:
            meta.flops = p.flops(*shapes)
        number = sum(math.prod(v.shape) for v in layer.trainable_variables)
        meta.parameter_bytes = number * tf.as_dtype(layer.variable_dtype).size
        return meta


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


def _shapes_of(layer: Any) -> list[Any] | None:
    """Returns the shapes that a layer was built with, or None if it was not built."""
    config = layer.get_build_config() if layer.built else None
    if not config:
        return None
    if "input_shape" in config:
        return [config["input_shape"]]
    shapes = [shape for _, shape in sorted((config.get("shapes_dict") or {}).items())]
    return shapes or None


def _names(variables: Sequence[Any]) -> list[str]:
    """Returns a unique name for each variable: the shortest unique ends of their paths."""
    paths = _renumbered([variable.path.split("/") for variable in variables])
    for length in range(1, 1 + max(map(len, paths), default=0)):
        names = ["_".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'_'.join(path)}_{number}" for number, path in enumerate(paths)]


def _renumbered(paths: list[list[str]]) -> list[list[str]]:
    """Renumbers parts of paths within the model: `dense_7`, `dense_8` become `dense`, `dense_1`.

    Keras numbers unnamed layers over the whole process, and a checkpoint must not depend on that.
    """
    siblings: dict[tuple[str, ...], dict[str, str]] = {}
    renumbered = []
    for path in paths:
        new: list[str] = []
        for part in path[:-1]:
            known = siblings.setdefault(tuple(new), {})
            if part not in known:
                base = re.sub(r"_\d+$", "", part)
                wanted = [base, *(f"{base}_{number}" for number in range(1, len(known) + 1))]
                known[part] = next(name for name in wanted if name not in known.values())
            new.append(known[part])
        renumbered.append([*new, path[-1]])
    return renumbered


def _is_seed(variable: Any) -> bool:
    return variable.path.rpartition("/")[2] == _SEED_STATE
