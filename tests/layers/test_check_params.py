"""Params that can be wrong are errors that say what to write."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, hyperparams, layers

from pipemesh.errors import PipelineError
from pipemesh.layers import check_params as check

WHAT = r"a list of layers' Params, one each"


def fetch(name):
    return layers.FetchLayer.Params().Set(name=name)


def fields(**values):
    p = hyperparams.Params()
    for name, value in {"name": "stack", **values}.items():
        p.Define(name, value, "")
    return p


@pytest.mark.parametrize("value", [[], (), [fetch("a"), fetch("b-1.x_/>Y")], (fetch("a"),)])
def test_lists_of_layers_with_names_of_their_own_are_right(value):
    check.check_layers("stack", "sub", value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (fetch("a"), rf"is the Params of one layer; it must be {WHAT}: \[params\]"),
        (None, f"is None; it must be {WHAT}"),
        ({"a": 1}, rf"is {{'a': 1}}; it must be {WHAT}"),
        ("x" * 60, f"is a str; it must be {WHAT}"),
        ([fetch("a"), 3], r"\[1\] is 3, not the Params of a layer; write SomeLayer.Params"),
        ([fetch("a"), fetch("")], r"\[1\], a FetchLayer, has no name; .*\.Set\(name="),
        ([fetch("1a")], r"\[0\] is named '1a'; a name has letters.* begins with a letter"),
        ([fetch("a b")], r"\[0\] is named 'a b'"),
        ([fetch("keys")], r"\[0\] is named 'keys'; .* none of NestedMap's own attributes"),
        (
            [fetch("a"), fetch("b"), fetch("a")],
            r"\[0\] and \[2\] are both named 'a'; give each a name of its own",
        ),
    ],
)
def test_other_lists_are_errors(value, message):
    with pytest.raises(PipelineError, match=f"^stack: sub ?{message}"):
        check.check_layers("stack", "sub", value)


def test_layers_of_several_fields_have_different_names():
    check.check_distinct("stack", before=[fetch("a")], cells=[fetch("b")], after=[])
    with pytest.raises(PipelineError, match=r"^stack: before and after both have .* 'a'; rename"):
        check.check_distinct("stack", before=[fetch("a")], cells=[fetch("b")], after=[fetch("a")])


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ([fetch("a")], r"a list, .* make the list one layer: FeatureExtractionLayer\.Params"),
        (layers.FetchLayer, r"FetchLayer.*; write FetchLayer\.Params\(\)"),
        (hyperparams.Params(), r"; write SomeLayer\.Params\(\)"),
        (hyperparams.InstantiableParams(None), r"; write SomeLayer\.Params\(\)"),
    ],
)
def test_what_is_no_layers_params_is_an_error(value, advice):
    check.check_layer("here", base_layer.BaseLayer.Params())
    with pytest.raises(PipelineError, match=f"^(?s:here is .*{advice})"):
        check.check_layer("here", value)


@pytest.mark.parametrize("value", [2, np.int64(3), np.array(2)])
def test_whole_numbers_are_right_from_the_least_on(value):
    check.check_whole("stack", "n", value, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "is 1; it must be at least 2"),
        (True, "is True; it must be a whole number, 2 or more"),
        (np.True_, "is .*True.*; it must be a whole number"),
        (2.0, r"is 2\.0; it must be a whole number"),
        ("2", "is '2'; it must be a whole number"),
        (None, "is None; it must be a whole number"),
    ],
)
def test_other_numbers_are_errors(value, message):
    with pytest.raises(PipelineError, match=f"^stack: n {message}"):
        check.check_whole("stack", "n", value, 2)


def test_numbers_above_zero():
    for value in (1e-6, 2, np.float32(0.5)):
        check.check_above_zero("stack", "x", value)
    for value in (0, -1.0, float("nan"), float("inf"), True, "1", None):
        with pytest.raises(PipelineError, match=r"^stack: x is .*; it must be a number above 0$"):
            check.check_above_zero("stack", "x", value)
    with pytest.raises(PipelineError, match=r"a number above 0, or None$"):
        check.check_above_zero("stack", "x", 0, ", or None")


def test_flags_are_true_or_false_and_some_may_be_none():
    check.check_flags(fields(a=True, b=np.False_, c=None), ["a", "b"], or_none=["c"])
    with pytest.raises(PipelineError, match=r"^stack: a is None; it must be True or False$"):
        check.check_flags(fields(a=None, c=None), ["a"], or_none=["c"])
    with pytest.raises(PipelineError, match=r"^stack: c is 'no'; it must be True, False or None$"):
        check.check_flags(fields(a=True, c="no"), ["a"], or_none=["c"])
    with pytest.raises(PipelineError, match=r"^stack: a is 1; "):
        check.check_flags(fields(a=1), ["a"])


def test_the_dim_of_the_batch_counts_from_the_first():
    check.check_batch_dim(fields(batch_dim=0))
    with pytest.raises(PipelineError, match=r"^stack: batch_dim is -1; .* 0 if the batch comes"):
        check.check_batch_dim(fields(batch_dim=-1))


@pytest.mark.parametrize("dtype", [None, tf.bfloat16, "float32", np.float16])
def test_floating_dtypes_are_right(dtype):
    check.check_floating("stack", "d", dtype)


@pytest.mark.parametrize("dtype", [tf.int32, "flaot32", 7.5, tf.complex64])
def test_other_dtypes_are_errors(dtype):
    with pytest.raises(PipelineError, match=r"^stack: d is .*; it must be a floating dtype"):
        check.check_floating("stack", "d", dtype)
