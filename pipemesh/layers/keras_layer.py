"""A layer of Keras as a layer of lingvo."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import with_article
from pipemesh.layers.step_seed import GenerateStepSeedPair
from pipemesh.layers.traced_meta import traced_meta

_SEED_STATE = "seed_generator_state"


@dataclasses.dataclass(frozen=True)
class Called:
    """What a call of a Keras layer gave.

    Attributes:
        outputs: what it returned; a list as a tuple.
        changed: by name, the new values of variables that it assigned.
        penalties: scalars that it asks to be added to the loss: those of regularizers and
            `add_loss`.
    """

    outputs: Any
    changed: dict[str, tf.Tensor]
    penalties: list[tf.Tensor]


class KerasLayer(base_layer.BaseLayer):
    """A Keras 3 layer or model with weights of its own, to be used wherever a layer of lingvo is.

    Its weights are variables of lingvo, in `vars` and `theta`, with the initial values that Keras
    draws (with `random_seed`, a function of that and the layer's name), and are trained, cut into
    stages and saved like all others. Their constraints hold after
    each step (`PostTrainingStepUpdate`). Its random numbers are keyed by the layer and the global
    step, so dropout does not depend on the plan. What a layer updates by itself when it trains, as
    the averages of `BatchNormalization`, and what it adds to the loss, as regularizers do, cannot
    be honoured microbatch by microbatch, and is an error; such layers can be evaluated, and
    trained as a whole model by `KerasTask`.

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
            *args: its inputs.

        Returns:
            What it returns.

        Raises:
            PipelineError: it updates state or adds to the loss while it trains, or computes in
                another dtype than `fprop_dtype` says.
        """
        called = self._call(theta, *args)
        if not self.do_eval:
            self._refuse(called)
        return called.outputs

    def _call(self, theta: Any, *args: Any) -> Called:
        """Calls the layer, which changes nothing."""
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
            # Sums of `add_loss` first, as Keras adds them.
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
        """Lets constraints of weights hold.

        Returns:
            An operation; lingvo runs it after the weights of a step have been updated.
        """
        updates = [super().PostTrainingStepUpdate()]
        for name, variable in self._kept.items():
            if variable.trainable and variable.constraint is not None:
                updates.append(self.vars[name].assign(variable.constraint(self.vars[name].value())))
        return tf.group(*updates)

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


@contextlib.contextmanager
def _keras_seeded(p: Any) -> Iterator[None]:
    """Inside, Keras draws initial values by `random_seed`: it takes seeds from Python's numbers."""
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
    paths = _renumbered([variable.path.split("/") for variable in variables])
    for length in range(1, 1 + max(map(len, paths), default=0)):
        names = ["_".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'_'.join(path)}_{number}" for number, path in enumerate(paths)]


def _renumbered(paths: list[list[str]]) -> list[list[str]]:
    """Paths whose parts are numbered within the model: `dense_7`, `dense_8` as `dense`, `dense_1`.

    Keras numbers layers without a name by how many of their kind the process has made, which a
    checkpoint cannot know.
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
