"""A layer of Keras as a layer of lingvo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import with_article
from pipemesh.layers.step_seed import GenerateStepSeedPair
from pipemesh.layers.traced_meta import traced_meta

_SEED_STATE = "seed_generator_state"


class KerasLayer(base_layer.BaseLayer):
    """A Keras 3 layer or model with weights of its own, to be used wherever a layer of lingvo is.

    Its weights are variables of lingvo, in `vars` and `theta`, with the initial values that Keras
    draws, and are trained, cut into stages and saved like all others. Its random numbers are keyed
    by the layer and the global step, so dropout does not depend on the plan. What a layer updates
    by itself when it trains, as the averages of `BatchNormalization`, cannot be honoured microbatch
    by microbatch, and is an error; such layers can be evaluated.

    It needs TensorFlow 2's behaviour, as Keras does.

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
        p.Define(
            "flops",
            None,
            "Flops of the forward pass for a whole input, as a function of the inputs' shapes; by "
            "default those of the products of matrices and convolutions.",
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
            *args: its inputs.

        Returns:
            What it returns.

        Raises:
            PipelineError: it updates state while it trains, or computes in another dtype than
                `fprop_dtype` says.
        """
        p = self.params
        self._check_dtype()
        mapping = [(variable, theta[name]) for name, variable in self._kept.items()]
        for number, variable in enumerate(self._seeds):
            seed = GenerateStepSeedPair(p, op_seed=number)
            mapping.append((variable, tf.cast(seed, variable.dtype)))
        with keras.StatelessScope(mapping) as scope:
            before = {name: scope.get_current_value(v) for name, v in self._kept.items()}
            outputs = self._layer(*args, training=not self.do_eval)
            changed = [
                name
                for name, variable in self._kept.items()
                if scope.get_current_value(variable) is not before[name]
            ]
        if changed and not self.do_eval:
            raise PipelineError(
                f"{p.name}: {with_article(type(self._layer).__name__)} updates {changed[0]!r} "
                "while it trains, which would be done once a microbatch instead of once a step, "
                "and again where it is computed again; freeze it (trainable=False), or use a "
                "layer without such state, such as LayerNormalization"
            )
        return tuple(outputs) if isinstance(outputs, list) else outputs

    def _check_dtype(self) -> None:
        wanted, own = py_utils.FPropDtype(self.params), tf.as_dtype(self._layer.compute_dtype)
        if wanted != own:
            raise PipelineError(
                f"{self.params.name}: the layer computes in {own.name}, but fprop_dtype is "
                f"{wanted.name}; make it with dtype='mixed_{wanted.name}', or set its fprop_dtype"
            )

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Flops, by default two for each product of a matrix or convolution, and output shapes."""
        sizes = [shape.ToTensorShape().as_list() for shape in shapes]
        # Keras knows the shapes of the outputs without a weight's value.
        layer = _built(p)
        specs = [tf.TensorSpec(size, layer.compute_dtype) for size in sizes]
        meta = traced_meta(lambda *x: layer(*x, training=False), specs)
        if p.flops is not None:
            meta.flops = p.flops(*shapes)
        number = sum(math.prod(v.shape) for v in layer.trainable_variables)
        meta.parameter_bytes = number * tf.as_dtype(layer.variable_dtype).size
        return meta


def _built(p: Any) -> Any:
    """A layer of one's own, with its variables."""
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
    """The shapes that a layer was built with, if it was."""
    config = layer.get_build_config() if layer.built else None
    if not config:
        return None
    if "input_shape" in config:
        return [config["input_shape"]]
    shapes = [shape for _, shape in sorted((config.get("shapes_dict") or {}).items())]
    return shapes or None


def _names(variables: Sequence[Any]) -> list[str]:
    """A name for each variable, none of them twice: the shortest ends of their paths that do."""
    paths = [variable.path.split("/") for variable in variables]
    for length in range(1, 1 + max(map(len, paths), default=0)):
        names = ["_".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'_'.join(path)}_{number}" for number, path in enumerate(paths)]


def _is_seed(variable: Any) -> bool:
    return variable.path.rpartition("/")[2] == _SEED_STATE
