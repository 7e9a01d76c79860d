"""Cases of einsum, lookups, other shapes, random numbers and transfers."""

import operator

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.ops.einsum import products
from pipemesh.mesh import Dim, Shape
from tests.lowering.cases.case import Case, integers

SEED = np.array([3, 7], np.int32)


def _einsum(inputs, out, equation, **more):
    def reference(*x):
        return tf.einsum(equation, *x)

    return Case("einsum", inputs, lambda _, *x: ops.einsum(x, out.split()), reference, out, **more)


def _at(shape, low, high):
    return integers(shape, low, high), shape


def _random(op, shape, label="", dtype=tf.float32, thin=False):
    sizes = Shape.from_text(shape).sizes
    plain = getattr(tf.random, op.replace("random", "stateless"))
    return Case(
        op,
        (),
        lambda lowering: getattr(ops, op)(lowering, shape, seed=SEED, dtype=dtype),
        lambda: plain(sizes, SEED, dtype=dtype, alg="philox"),
        " ".join(Shape.from_text(shape).names),
        together=(shape,),
        label=label,
        thin=thin,
    )


def _reshape(old, new, label, thin=False):
    shape = Shape.from_text(new)
    return Case(
        "reshape",
        [old],
        lambda _, x: ops.reshape(x, new),
        lambda x: tf.reshape(x, shape.sizes),
        " ".join(shape.names),
        together=(old, new),
        label=label,
        thin=thin,
    )


CASES = [
    _einsum(["b:8;h:8", "h:8;o:4"], "b o", "bh,ho->bo", label="product of matrices"),
    _einsum(["b:4;h:2;d:8", "k:4;h:2;d:8"], "b h k", "bhd,khd->bhk", label="attention"),
    _einsum(["b:8;h:4", "h:4", "o:2;h:4"], "o b", "bh,h,oh->ob", label="three operands"),
    _einsum(["b:8;h:4"], "h", "bh->h", label="one operand"),
    _einsum(["b:8;h:4", "o:2"], "", "bh,o->", label="to a number"),
    Case(
        "einsum",
        ["b:8;h:8", "h:8;o:4"],
        lambda _, *x: ops.einsum(x, ["b", "o"], {"b": "s"}),
        tf.matmul,
        "s o",
        together=("b:8;h:8;o:4", "s:8;o:4"),
        label="a sum of which each has a slice",
    ),
    Case(
        "einsum",
        ["t:8;h:4", "h:4;o:8", "h:4;o:8"],
        lambda _, x, *w: operator.mul(*products(x, w, [["b", "o"]] * 2, {"t": "b"})),
        lambda x, w, v: tf.matmul(x, w) * tf.matmul(x, v),
        "b o",
        together=("t:8;h:4", "b:8;h:4;o:8"),
        label="products of a gathered operand",
    ),
    Case(
        "gather",
        ["v:8;d:4", _at("b:4;t:8", 0, 8)],
        lambda _, table, at: ops.gather(table, at, "v", {"t": "s"}),
        tf.gather,
        "b s d",
        together=("v:8;d:4;b:4;t:8", "b:4;s:8;d:4"),
        label="rows of which each has a slice",
    ),
    Case(
        "one_hot",
        [_at("b:4;t:2", -1, 9)],
        lambda _, x: ops.one_hot(x, Dim("v", 8)),
        lambda x: tf.one_hot(x, 8),
        "b t v",
        together=("b:4;t:2;v:8",),
    ),
    Case(
        "gather",
        ["v:8;d:4", _at("b:4;t:2", 0, 8)],
        lambda _, table, at: ops.gather(table, at, "v"),
        tf.gather,
        "b t d",
    ),
    Case(
        "gather",
        ["d:2;v:8;b:4", _at("t:2;b:4", 0, 8)],
        lambda _, table, at: ops.gather(table, at, "v"),
        lambda table, at: tf.transpose(
            tf.gather(tf.transpose(table, [2, 1, 0]), tf.transpose(at), batch_dims=1), [1, 0, 2]
        ),
        "t b d",
        label="shared dim",
        thin=True,
    ),
    Case(
        "transpose",
        ["x:4;y:8;z:2"],
        lambda _, x: ops.transpose(x, ["z", "x", "y"]),
        lambda x: tf.transpose(x, [2, 0, 1]),
        "z x y",
    ),
    Case(
        "rename",
        ["x:8;y:8"],
        lambda _, x: ops.rename(x, {"x": "u", "y": "v"}),
        tf.identity,
        "u v",
        together=("x:8;y:8", "u:8;v:8"),
    ),
    Case(
        "rename",
        [(integers("x:8;y:8", 0, 2).astype(bool), "x:8;y:8")],
        lambda _, x: ops.rename(x, {"x": "u"}),
        tf.identity,
        "u y",
        together=("x:8;y:8", "u:8;y:8"),
        label="booleans",
        thin=True,
    ),
    _reshape("x:8;y:4", "p:32", "merge"),
    _reshape("x:8;p:8", "q:1;x:8;h:2;d:4", "split", thin=True),
    _reshape("x:4;y:6", "u:8;v:3", "across"),
    _reshape("x:4;e:0", "e:0;u:2", "of nothing", thin=True),
    Case("import_tensor", ["x:8;y:4"], lambda _, x: x, tf.identity, "x y"),
    Case(
        "export_tensor",
        ["x:8;y:4"],
        lambda lowering, x: ops.import_tensor(lowering, ops.export_tensor(x) ** 2, "y:8;z:4"),
        tf.square,
        "y z",
        together=("x:8;y:4", "y:8;z:4"),
    ),
    _random("random_uniform", "x:4;y:8;z:2"),
    _random("random_uniform", "x:8;y:3", "odd rows"),
    _random("random_normal", "x:4;y:8", "double", tf.float64, thin=True),
    _random("random_normal", "x:8;y:3"),
    Case(
        "dropout",
        ["x:4;y:8;z:2"],
        lambda _, x: ops.dropout(x, rate=0.4, seed=SEED),
        lambda x: tf.nn.experimental.stateless_dropout(x, 0.4, SEED, rng_alg="philox"),
        "x y z",
    ),
    Case(
        "dropout",
        ["x:4;y:8;z:2"],
        lambda _, x: ops.dropout(x, rate=0.4, seed=SEED, noise_dims=Shape.of(x=4, z=2)),
        lambda x: tf.nn.experimental.stateless_dropout(
            x, 0.4, SEED, noise_shape=[4, 1, 2], rng_alg="philox"
        ),
        "x y z",
        label="noise dims",
        thin=True,
    ),
]
