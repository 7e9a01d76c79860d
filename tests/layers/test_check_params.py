"""Params that can be wrong are errors that say what to write."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, hyperparams, layers

from pipemesh.errors import PipelineError
from pipemesh.layers import check_params as check

LIST = r"it must be a list of layers' Params, one each"
FLOATING = "is .*; it must be a floating dtype"


def fetch(name):
    return layers.FetchLayer.Params().Set(name=name)


A, B = fetch("a"), fetch("b")


def fields(**values):
    p = hyperparams.Params()
    for name, value in {"name": "stack", **values}.items():
        p.Define(name, value, "")
    return p


def two_or_more(owner, field, value):
    check.check_whole(owner, field, value, 2)


def test_what_is_right_passes():
    for layers_ in ([], (), [A, fetch("b-1.x_/>Y")], (A,)):
        check.check_layers("stack", "p", layers_)
    check.check_distinct("stack", before=[A], cells=[B], after=[])
    check.check_layer("here", base_layer.BaseLayer.Params())
    for number in (2, np.int64(3), np.array(2)):
        two_or_more("stack", "p", number)
    for number in (1e-6, 2, np.float32(0.5)):
        check.check_above_zero("stack", "p", number)
    check.check_flags(fields(a=True, b=np.False_, c=None), ["a", "b"], or_none=["c"])
    check.check_batch_dim(fields(batch_dim=0))
    for dtype in (None, tf.bfloat16, "float32", np.float16):
        check.check_floating("stack", "p", dtype)


@pytest.mark.parametrize(
    ("function", "value", "message"),
    [
        (check.check_layers, A, rf"is the Params of one layer; {LIST}: \[params\]"),
        (check.check_layers, None, f"is None; {LIST}"),
        (check.check_layers, {"a": 1}, rf"is {{'a': 1}}; {LIST}"),
        (check.check_layers, "x" * 60, f"is a str; {LIST}"),
        (check.check_layers, [A, 3], r"\[1\] is 3, not the Params of a layer; write SomeLayer.P"),
        (check.check_layers, [hyperparams.Params()], r"\[0\] .*; write SomeLayer\.Params\(\)"),
        (check.check_layers, [hyperparams.InstantiableParams(None)], r"\[0\] .*; write SomeLayer"),
        (check.check_layers, [A, fetch("")], r"\[1\], a FetchLayer, has no name; .*\.Set\(name="),
        (check.check_layers, [fetch("1a")], r"\[0\] is named '1a'; .* begins with a letter"),
        (check.check_layers, [fetch("a b")], r"\[0\] is named 'a b'"),
        (check.check_layers, [fetch("keys")], r"\[0\] is named 'keys'; .* none of NestedMap's own"),
        (check.check_layers, [A, B, A], r"\[0\] and \[2\] are both named 'a'; give each a name of"),
        (two_or_more, 1, "is 1; it must be at least 2"),
        (two_or_more, True, "is True; it must be a whole number, 2 or more"),
        (two_or_more, np.True_, "is .*True.*; it must be a whole number"),
        (two_or_more, 2.0, r"is 2\.0; it must be a whole number"),
        (two_or_more, "2", "is '2'; it must be a whole number"),
        (two_or_more, None, "is None; it must be a whole number"),
        (check.check_floating, tf.int32, FLOATING),
        (check.check_floating, "flaot32", FLOATING),
        (check.check_floating, 7.5, FLOATING),
        (check.check_floating, tf.complex64, FLOATING),
        *(
            (check.check_above_zero, value, r"is .*; it must be a number above 0$")
            for value in (0, -1.0, float("nan"), float("inf"), True, "1", None)
        ),
    ],
)
def test_what_is_wrong_is_an_error(function, value, message):
    with pytest.raises(PipelineError, match=f"^stack: p ?{message}"):
        function("stack", "p", value)
