"""Cases of einsum, lookups, other shapes, random numbers and transfers."""

import operator

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.ops.einsum import products
from pipemesh.mesh import Dim, Shape
from tests.lowering.cases.case import Case, integers, numbers

SEED = np.array([3, 7], np.int32)


def _einsum(inputs, out, equation, **more):
    return Case(
        "einsum",
        tuple((numbers(shape, i), shape) for i, shape in enumerate(inputs)),
        lambda _, *x: ops.einsum(x, out),
        lambda *x: tf.einsum(equation, *x),
        out,
        **more,
    )


CASES = [
    _einsum(["b:8;h:8", "h:8;o:4"], ("b", "o"), "bh,ho->bo", label="product of matrices"),
    _einsum(["b:4;h:2;d:8", "k:4;h:2;d:8"], ("b", "h", "k"), "bhd,khd->bhk", label="attention"),
    _einsum(["b:8;h:4", "h:4", "o:2;h:4"], ("o", "b"), "bh,h,oh->ob", label="three operands"),
    _einsum(["b:8;h:4"], ("h",), "bh->h", label="one operand"),
    _einsum(["b:8;h:4", "o:2"], (), "bh,o->", label="to a number"),
    Case(
        "einsum",
        ((numbers("b:8;h:8"), "b:8;h:8"), (numbers("h:8;o:4", 1), "h:8;o:4")),
        lambda _, *x: ops.einsum(x, ["b", "o"], {"b": "s"}),
        tf.matmul,
        ("s", "o"),
        together=("b:8;h:8;o:4", "s:8;o:4"),
        label="a sum of which each has a slice",
    ),
    Case(
        "einsum",
        (
            (numbers("t:8;h:4"), "t:8;h:4"),
            (numbers("h:4;o:8", 1), "h:4;o:8"),
            (numbers("h:4;o:8", 2), "h:4;o:8"),
        ),
        lambda _, x, *w: operator.mul(*products(x, w, [["b", "o"]] * 2, {"t": "b"})),
        lambda x, w, v: tf.matmul(x, w) * tf.matmul(x, v),
        ("b", "o"),
        together=("t:8;h:4", "b:8;h:4;o:8"),
        label="products of a gathered operand",
    ),
    Case(
        "gather",
        ((numbers("v:8;d:4"), "v:8;d:4"), (integers("b:4;t:8", 0, 8), "b:4;t:8")),
        lambda _, table, at: ops.gather(table, at, "v", {"t": "s"}),
        tf.gather,
        ("b", "s", "d"),
        together=("v:8;d:4;b:4;t:8", "b:4;s:8;d:4"),
        label="rows of which each has a slice",
    ),
    Case(
        "one_hot",
        ((integers("b:4;t:2", -1, 9), "b:4;t:2"),),
        lambda _, x: ops.one_hot(x, Dim("v", 8)),
        lambda x: tf.one_hot(x, 8),
        ("b", "t", "v"),
        together=("b:4;t:2;v:8",),
    ),
    Case(
        "gather",
        ((numbers("v:8;d:4"), "v:8;d:4"), (integers("b:4;t:2", 0, 8), "b:4;t:2")),
        lambda _, table, at: ops.gather(table, at, "v"),
        tf.gather,
        ("b", "t", "d"),
    ),
    Case(
        "gather",
        ((numbers("d:2;v:8;b:4"), "d:2;v:8;b:4"), (integers("t:2;b:4", 0, 8), "t:2;b:4")),
        lambda _, table, at: ops.gather(table, at, "v"),
        lambda table, at: tf.transpose(
            tf.gather(tf.transpose(table, [2, 1, 0]), tf.transpose(at), batch_dims=1), [1, 0, 2]
        ),
        ("t", "b", "d"),
        label="shared dim",
        thin=True,
    ),
    Case(
        "transpose",
        ((numbers("x:4;y:8;z:2"), "x:4;y:8;z:2"),),
        lambda _, x: ops.transpose(x, ["z", "x", "y"]),
        lambda x: tf.transpose(x, [2, 0, 1]),
        ("z", "x", "y"),
    ),
    Case(
        "rename",
        ((numbers("x:8;y:8"), "x:8;y:8"),),
        lambda _, x: ops.rename(x, {"x": "u", "y": "v"}),
        tf.identity,
        ("u", "v"),
        together=("x:8;y:8", "u:8;v:8"),
    ),
    Case(
        "rename",
        ((integers("x:8;y:8", 0, 2).astype(bool), "x:8;y:8"),),
        lambda _, x: ops.rename(x, {"x": "u"}),
        tf.identity,
        ("u", "y"),
        together=("x:8;y:8", "u:8;y:8"),
        label="booleans",
        thin=True,
    ),
    Case(
        "reshape",
        ((numbers("x:8;y:4"), "x:8;y:4"),),
        lambda _, x: ops.reshape(x, "p:32"),
        lambda x: tf.reshape(x, [32]),
        ("p",),
        together=("x:8;y:4", "p:32"),
        label="merge",
    ),
    Case(
        "reshape",
        ((numbers("x:8;p:8"), "x:8;p:8"),),
        lambda _, x: ops.reshape(x, "q:1;x:8;h:2;d:4"),
        lambda x: tf.reshape(x, [1, 8, 2, 4]),
        ("q", "x", "h", "d"),
        together=("x:8;p:8", "q:1;x:8;h:2;d:4"),
        label="split",
        thin=True,
    ),
    Case(
        "reshape",
        ((numbers("x:4;y:6"), "x:4;y:6"),),
        lambda _, x: ops.reshape(x, "u:8;v:3"),
        lambda x: tf.reshape(x, [8, 3]),
        ("u", "v"),
        together=("x:4;y:6", "u:8;v:3"),
        label="across",
    ),
    Case(
        "reshape",
        ((numbers("x:4;e:0"), "x:4;e:0"),),
        lambda _, x: ops.reshape(x, "e:0;u:2"),
        lambda x: tf.reshape(x, [0, 2]),
        ("e", "u"),
        together=("x:4;e:0", "e:0;u:2"),
        label="of nothing",
        thin=True,
    ),
    Case(
        "import_tensor",
        ((numbers("x:8;y:4"), "x:8;y:4"),),
        lambda _, x: x,
        tf.identity,
        ("x", "y"),
    ),
    Case(
        "export_tensor",
        ((numbers("x:8;y:4"), "x:8;y:4"),),
        lambda lowering, x: ops.import_tensor(lowering, ops.export_tensor(x) ** 2, "y:8;z:4"),
        tf.square,
        ("y", "z"),
        together=("x:8;y:4", "y:8;z:4"),
    ),
    Case(
        "random_uniform",
        (),
        lambda lowering: ops.random_uniform(lowering, "x:4;y:8;z:2", seed=SEED),
        lambda: tf.random.stateless_uniform([4, 8, 2], SEED, alg="philox"),
        ("x", "y", "z"),
        together=("x:4;y:8;z:2",),
    ),
    Case(
        "random_uniform",
        (),
        lambda lowering: ops.random_uniform(lowering, "x:8;y:3", seed=SEED),
        lambda: tf.random.stateless_uniform([8, 3], SEED, alg="philox"),
        ("x", "y"),
        together=("x:8;y:3",),
        label="odd rows",
    ),
    Case(
        "random_normal",
        (),
        lambda lowering: ops.random_normal(lowering, "x:4;y:8", seed=SEED, dtype=tf.float64),
        lambda: tf.random.stateless_normal([4, 8], SEED, dtype=tf.float64, alg="philox"),
        ("x", "y"),
        together=("x:4;y:8",),
        label="double",
        thin=True,
    ),
    Case(
        "random_normal",
        (),
        lambda lowering: ops.random_normal(lowering, "x:8;y:3", seed=SEED),
        lambda: tf.random.stateless_normal([8, 3], SEED, alg="philox"),
        ("x", "y"),
        together=("x:8;y:3",),
    ),
    Case(
        "dropout",
        ((numbers("x:4;y:8;z:2"), "x:4;y:8;z:2"),),
        lambda _, x: ops.dropout(x, rate=0.4, seed=SEED),
        lambda x: tf.nn.experimental.stateless_dropout(x, 0.4, SEED, rng_alg="philox"),
        ("x", "y", "z"),
    ),
    Case(
        "dropout",
        ((numbers("x:4;y:8;z:2"), "x:4;y:8;z:2"),),
        lambda _, x: ops.dropout(x, rate=0.4, seed=SEED, noise_dims=Shape.of(x=4, z=2)),
        lambda x: tf.nn.experimental.stateless_dropout(
            x, 0.4, SEED, noise_shape=[4, 1, 2], rng_alg="philox"
        ),
        ("x", "y", "z"),
        label="noise dims",
        thin=True,
    ),
]
