"""The networks that are timed, written once for each library; all compute the same numbers."""

from __future__ import annotations

import math

import numpy as np

from pipemesh.mesh import LayoutRules, Mesh, Shape

# Shapes by name; "x" goes in, all others are weights.
SHAPES = {
    "mlp": {
        "x": "batch:1024;io:512",
        "w1": "io:512;hidden:2048",
        "w2": "hidden:2048;io:512",
    },
    "block": {
        "x": "batch:8;length:128;io:512",
        "wq": "io:512;heads:8;kv:64",
        "wk": "io:512;heads:8;kv:64",
        "wv": "io:512;heads:8;kv:64",
        "wo": "heads:8;kv:64;io:512",
        "w1": "io:512;hidden:2048",
        "w2": "hidden:2048;io:512",
    },
}
LAYOUTS = {"model": "heads:model;hidden:model", "data": "batch:data"}
TITLES = {
    "mlp": "two-layer MLP, 1,024 rows, 512 -> 2,048 -> 512",
    "block": "transformer block, 8 x 128 tokens of 512, 8 heads, hidden layer of 2,048",
}
EPSILON = 1e-6
# Voxels of a volume along each dim, and layouts of the U-Net of `models.unet` by mesh.
SIDE = 32
SPLIT_VOLUMES = {
    "y:1": "rows:y",
    "y:2": "rows:y",
    "y:2;x:2": "rows:y;cols:x",
    "z:2;y:2;x:2": "depth:z;rows:y;cols:x",
    "y:8": "rows:y",
}


def shapes(network: str) -> dict[str, Shape]:
    return {name: Shape.from_text(text) for name, text in SHAPES[network].items()}


def plan(mesh_text: str) -> tuple[Mesh, LayoutRules]:
    """The mesh and the rules for it; no mesh means one device."""
    mesh = Mesh.from_text(mesh_text)
    return mesh, LayoutRules.from_text(LAYOUTS[mesh.axis_names[0]])


def arrays(network: str) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    values = {}
    for name, shape in shapes(network).items():
        fan_in = shape.size // shape.sizes[-1] if name == "wo" else shape.sizes[0]
        scale = 1.0 if name == "x" else 1 / math.sqrt(fan_in)
        values[name] = (scale * draw.standard_normal(shape.sizes)).astype(np.float32)
    return values


def tensorflow_loss(network: str, x, *weights):
    """In plain TensorFlow; DTensor runs the same program."""
    import tensorflow as tf

    def layer_norm(x):
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        return centred * tf.math.rsqrt(variance + EPSILON)

    *attention, w1, w2 = weights
    if network == "mlp":
        return tf.reduce_mean(tf.square(tf.matmul(tf.nn.relu(tf.matmul(x, w1)), w2)))
    wq, wk, wv, wo = attention
    y = layer_norm(x)
    q, k, v = (tf.einsum("bli,ihk->blhk", y, w) for w in (wq, wk, wv))
    scores = tf.einsum("blhk,bmhk->bhlm", q, k) * wq.shape[-1] ** -0.5
    x += tf.einsum("blhk,hki->bli", tf.einsum("bhlm,bmhk->blhk", tf.nn.softmax(scores), v), wo)
    hidden = tf.nn.relu(tf.einsum("bli,ih->blh", layer_norm(x), w1))
    return tf.reduce_mean(tf.square(x + tf.einsum("blh,hi->bli", hidden, w2)))


def pipemesh_loss(network: str, x, *weights):
    from pipemesh.lowering import ops

    def layer_norm(x):
        centred = x - ops.reduce_mean(x, "io")
        variance = ops.reduce_mean(ops.square(centred), "io")
        return centred * ops.rsqrt(variance + EPSILON)

    *attention, w1, w2 = weights
    if network == "mlp":
        hidden = ops.relu(ops.einsum([x, w1], ["batch", "hidden"]))
        return ops.reduce_mean(ops.square(ops.einsum([hidden, w2], ["batch", "io"])))
    wq, wk, wv, wo = attention
    split, tokens = ["batch", "length", "heads", "kv"], ["batch", "length", "io"]
    y = layer_norm(x)
    q, k, v = (ops.einsum([y, w], split) for w in (wq, wk, wv))
    k, v = (ops.rename(part, {"length": "memory"}) for part in (k, v))
    scores = (
        ops.einsum([q, k], ["batch", "heads", "length", "memory"]) * wq.shape["kv"].size ** -0.5
    )
    mixed = ops.einsum([ops.softmax(scores, "memory"), v], split)
    x = x + ops.einsum([mixed, wo], tokens)
    hidden = ops.relu(ops.einsum([layer_norm(x), w1], ["batch", "length", "hidden"]))
    return ops.reduce_mean(ops.square(x + ops.einsum([hidden, w2], tokens)))


def mesh_tensorflow_loss(network: str, mtf, x, *weights):
    """`mtf` is the module mesh_tensorflow."""
    dims = {dim.name: dim for tensor in (x, *weights) for dim in tensor.shape.dims}

    def shape(*names):
        return mtf.Shape([dims[name] for name in names])

    def layer_norm(x):
        centred = x - mtf.reduce_mean(x, reduced_dim=dims["io"])
        variance = mtf.reduce_mean(mtf.square(centred), reduced_dim=dims["io"])
        return centred * mtf.rsqrt(variance + EPSILON)

    *attention, w1, w2 = weights
    if network == "mlp":
        hidden = mtf.relu(mtf.einsum([x, w1], shape("batch", "hidden")))
        return mtf.reduce_mean(mtf.square(mtf.einsum([hidden, w2], shape("batch", "io"))))
    wq, wk, wv, wo = attention
    dims["memory"] = mtf.Dimension("memory", dims["length"].size)
    split, tokens = shape("batch", "length", "heads", "kv"), shape("batch", "length", "io")
    y = layer_norm(x)
    q, k, v = (mtf.einsum([y, w], split) for w in (wq, wk, wv))
    k, v = (mtf.rename_dimension(part, "length", "memory") for part in (k, v))
    scores = mtf.einsum([q, k], shape("batch", "heads", "length", "memory"))
    scores *= dims["kv"].size ** -0.5
    mixed = mtf.einsum([mtf.softmax(scores, dims["memory"]), v], split)
    x += mtf.einsum([mixed, wo], tokens)
    hidden = mtf.relu(mtf.einsum([layer_norm(x), w1], shape("batch", "length", "hidden")))
    return mtf.reduce_mean(mtf.square(x + mtf.einsum([hidden, w2], tokens)))
