"""Checks of params, made before layers are built from them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from lingvo.core import base_layer, hyperparams, py_utils

from pipemesh.errors import PipelineError
from pipemesh.mesh.checks import whole_number
from pipemesh.text import nearest_text

# Names that are valid in NestedMap and in TensorFlow's name scopes.
_SCOPE = re.compile(r"[A-Za-z][A-Za-z0-9_./>-]*")
_LIST = "a list of layers' Params, one each"


def check_layers(owner: str, field: str, layers: Any) -> None:
    """Checks that a field is a list of layers' params with different names."""
    where = f"{owner}: {field}"
    if isinstance(layers, hyperparams.Params):
        raise PipelineError(f"{where} is the Params of one layer; it must be {_LIST}: [params]")
    if not isinstance(layers, (list, tuple)):
        raise PipelineError(f"{where} is {_short(layers)}; it must be {_LIST}")
    seen: dict[str, int] = {}
    for number, layer in enumerate(layers):
        check_layer(f"{where}[{number}]", layer)
        name = layer.name
        if not name:
            raise PipelineError(
                f"{where}[{number}], a {layer.cls.__name__}, has no name; give it one with "
                ".Set(name=...)"
            )
        try:
            py_utils.NestedMap()[name] = layer
            if not _SCOPE.fullmatch(name):
                raise ValueError(name)
        except (ValueError, AssertionError) as error:
            raise PipelineError(
                f"{where}[{number}] is named {name!r}; a name has letters, digits, _, - and ., "
                "begins with a letter, and is none of NestedMap's own attributes"
            ) from error
        if name in seen:
            raise PipelineError(
                f"{where}[{seen[name]}] and [{number}] are both named {name!r}; give each a name "
                "of its own with .Set(name=...)"
            )
        seen[name] = number


def check_distinct(owner: str, **fields: Sequence[Any]) -> None:
    """Checks that the layers of several fields have different names."""
    first: dict[str, str] = {}
    for field, layers in fields.items():
        for layer in layers:
            if first.setdefault(layer.name, field) != field:
                raise PipelineError(
                    f"{owner}: {first[layer.name]} and {field} both have a layer named "
                    f"{layer.name!r}; rename one with .Set(name=...)"
                )


def check_layer(where: str, layer: Any) -> None:
    """Checks that a value is the params of a layer."""
    if isinstance(layer, hyperparams.InstantiableParams) and layer.cls is not None:
        check_floating(where, "fprop_dtype", getattr(layer, "fprop_dtype", None))
        return
    check_no_live_layer(where, layer)
    if isinstance(layer, (list, tuple)):
        way_out = (
            "make the list one layer: FeatureExtractionLayer.Params().Set(name=..., sub=[...])"
        )
    elif isinstance(layer, type):
        way_out = f"write {layer.__name__}.Params()"
    elif callable(layer):
        way_out = "write FunctionLayer.Params().Set(name=..., function=...)"
    else:
        way_out = "write SomeLayer.Params()"
    raise PipelineError(f"{where} is {_short(layer)}, not the Params of a layer; {way_out}")


def is_live_layer(value: Any) -> bool:
    """Returns whether a value is an instance of a lingvo or Keras layer."""
    return isinstance(value, base_layer.BaseLayer | keras.Layer)


def check_no_live_layer(where: str, value: Any) -> None:
    """Checks that a value is no layer: its copy in params would have new, untrained weights."""
    if not is_live_layer(value):
        return
    kind = type(value).__name__
    give = f"{kind}.Params()"
    if isinstance(value, keras.Layer):
        give = f"KerasLayer.Params().Set(name=..., layer={kind}(...), input_shapes=[...])"
    raise PipelineError(
        f"{where} is {with_article(kind)}, a layer that exists already, not the Params of a layer; "
        f"give {give}"
    )


def check_whole(owner: str, field: str, value: Any, least: int) -> None:
    """Checks that a field is a whole number of at least `least`."""
    number = whole_number(value)
    if number is None:
        raise PipelineError(
            f"{owner}: {field} is {value!r}; it must be a whole number, {least} or more"
        )
    if number < least:
        raise PipelineError(f"{owner}: {field} is {number}; it must be at least {least}")


def check_above_zero(owner: str, field: str, value: Any, or_else: str = "") -> None:
    """Checks that a field is a finite number above 0; `or_else` extends the message."""
    known = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not known or not 0 < value < float("inf"):
        raise PipelineError(
            f"{owner}: {field} is {_short(value)}; it must be a number above 0{or_else}"
        )


def check_choice(owner: str, field: str, value: Any, choices: Collection[str]) -> None:
    """Checks that a param is one of several names; the error suggests the nearest one."""
    if value not in choices:
        # Names in capitals also match in small letters.
        near = str(value).upper() if all(map(str.isupper, choices)) else str(value)
        raise PipelineError(f"{owner}: {field} is {value!r}{nearest_text(near, choices)}")


def check_flags(p: Any, fields: Sequence[str], or_none: Sequence[str] = ()) -> None:
    """Checks that fields are True or False, or None if in `or_none`; 'no' would count as True."""
    for field in [*fields, *or_none]:
        value = getattr(p, field)
        if isinstance(value, (bool, np.bool_)) or (value is None and field in or_none):
            continue
        allowed = "True, False or None" if field in or_none else "True or False"
        raise PipelineError(f"{p.name}: {field} is {value!r}; it must be {allowed}")


def is_rest(p: Any, args: Any, homes: Sequence[Any]) -> bool:
    """Returns whether the batch does not divide into microbatches; False for other errors in it."""
    shapes = [tf.TensorShape(getattr(leaf, "shape", ())) for leaf in tf.nest.flatten(args)]
    ranked = [shape.as_list() for shape in shapes if shape.rank is not None]
    sizes = {sizes[p.batch_dim] for sizes in ranked if len(sizes) > p.batch_dim}
    if len(sizes) != 1 or None in sizes:
        return False
    return sizes.pop() % (p.num_micro_batches * homes[0].num_replicas) != 0


def check_theta(name: str, theta: Any) -> None:
    """Checks that the first argument of a stack's `FProp` is theta."""
    if not isinstance(theta, Mapping):
        raise PipelineError(
            f"{name}: the first argument of FProp is {with_article(type(theta).__name__)}, not "
            "theta; call FPropDefaultTheta(x), or FProp(stack.theta, x)"
        )


def check_batch_dim(p: Any) -> None:
    """Checks that `batch_dim` counts from the first dim."""
    try:
        check_whole(p.name, "batch_dim", p.batch_dim, 0)
    except PipelineError as error:
        raise PipelineError(
            f"{error}, the number of the dim counted from the first, because inputs may have "
            "several ranks: 0 if the batch comes first, 1 if time does"
        ) from error


def check_floating(owner: str, field: str, dtype: Any) -> None:
    """Checks that a field is a floating dtype or None."""
    if dtype is None:
        return
    try:
        known = tf.as_dtype(dtype).is_floating
    except TypeError:
        known = False
    if not known:
        raise PipelineError(
            f"{owner}: {field} is {_short(dtype)}; it must be a floating dtype, such as "
            "tf.float32 or tf.bfloat16, or None"
        )


def _short(value: Any) -> str:
    """Returns the text of a value on one line, or its type if the text is long."""
    text = repr(value)
    if len(text) <= 60 and "\n" not in text:
        return text
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Returns a noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"
