"""A small transformer language model.

Heads, feed-forward layers and vocabulary can be split; the embedding is used before and after the
stack, and one weight in all layers.
"""

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.recurrent.circular.layer_position import layer_seed
from tests.recurrent.circular.pipelined.model import Model

LENGTH, VOCAB, RATE = 3, 8, 0.2
_tokens = np.random.default_rng(1).integers(0, VOCAB, (16, LENGTH + 1)).astype(np.int32)
CAUSAL = np.tril(np.ones([LENGTH, LENGTH], bool))


def plain_norm(x, scale):
    return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True)) * scale


def plain_layer(x, w, step, layer):
    def dropout(value, draw):
        seed = layer_seed(tf.stack([step, draw]), layer)
        return tf.nn.experimental.stateless_dropout(value, RATE, seed=seed, rng_alg="philox")

    normed = plain_norm(x, w["norm"])
    q, k, v = (tf.einsum("bld,dhk->blhk", normed, w[name]) for name in "qkv")
    scores = tf.einsum("blhk,bmhk,h->bhlm", q, k, w["sharpness"])
    probs = dropout(tf.nn.softmax(tf.where(CAUSAL, scores, -1e9)), 1)
    x += tf.einsum("bhlm,bmhk,hkd->bld", probs, v, w["out"])
    hidden = tf.nn.gelu(plain_norm(x, w["norm2"]) @ w["wi"] + w["bias"])
    return x + dropout(hidden, 2) @ w["wo"]


def plain(step, inputs, params):
    y = tf.gather(params["embedding"], inputs["ids"])
    for layer in range(TRANSFORMER.layers):
        own = {name: params[name][layer] for name in TRANSFORMER.own}
        y = plain_layer(y, own | {"sharpness": params["sharpness"]}, step, layer)
    logits = plain_norm(y, params["norm3"]) @ tf.transpose(params["embedding"])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(inputs["labels"], logits)
    return tf.reduce_mean(losses), y


def norm(x, scale):
    return x * ops.rsqrt(ops.reduce_mean(x * x, "d_model")) * scale


def mesh_layer(x, w, position, step):
    normed = norm(x, w["norm"])
    q, k, v = (ops.einsum([normed, w[n]], ["batch", "length", "heads", "d_kv"]) for n in "qkv")
    k, v = (ops.rename(t, {"length": "memory"}) for t in (k, v))
    scores = ops.einsum([q, k, w["sharpness"]], ["batch", "heads", "length", "memory"])
    mask = ops.import_tensor(x.lowering, CAUSAL, f"length:{LENGTH};memory:{LENGTH}")
    masked = ops.transpose(ops.where(mask, scores, -1e9), scores.shape.names)
    probs = position.dropout(ops.softmax(masked, "memory"), rate=RATE, seed=tf.stack([step, 1]))
    x += ops.einsum([probs, v, w["out"]], ["batch", "length", "d_model"])
    hidden = ops.einsum([norm(x, w["norm2"]), w["wi"]], ["batch", "length", "d_ff"])
    hidden = ops.gelu(hidden + w["bias"])
    hidden = position.dropout(hidden, rate=RATE, seed=tf.stack([step, 2]))
    return x + ops.einsum([hidden, w["wo"]], ["batch", "length", "d_model"])


def meshed(pipeline, step, inputs, params):
    y = ops.gather(params["embedding"], inputs["ids"], "vocab")
    weights = TRANSFORMER.in_layers(params)
    y = pipeline(lambda x, w, at: mesh_layer(x, w, at, step), y, weights)
    last = norm(y, params["norm3"])
    logits = ops.einsum([last, params["embedding"]], ["batch", "length", "vocab"])
    wanted = ops.one_hot(inputs["labels"], logits.shape["vocab"])
    log_probs = ops.reduce_sum(ops.log_softmax(logits, "vocab") * wanted, "vocab")
    return -ops.reduce_mean(log_probs), y


TRANSFORMER = Model(
    name="transformer",
    layers=4,
    own={
        "norm": "d_model:4",
        "q": "d_model:4;heads:2;d_kv:2",
        "k": "d_model:4;heads:2;d_kv:2",
        "v": "d_model:4;heads:2;d_kv:2",
        "out": "heads:2;d_kv:2;d_model:4",
        "norm2": "d_model:4",
        "wi": "d_model:4;d_ff:6",
        "bias": "d_ff:6",
        "wo": "d_ff:6;d_model:4",
    },
    shared={"sharpness": "heads:2"},
    outside={"embedding": "vocab:8;d_model:4", "norm3": "d_model:4"},
    inputs={
        "ids": (_tokens[:, :-1], f"batch:16;length:{LENGTH}"),
        "labels": (_tokens[:, 1:], f"batch:16;length:{LENGTH}"),
    },
    output=f"batch:16;length:{LENGTH};d_model:4",
    plain=plain,
    meshed=meshed,
    ones=("norm", "norm2", "norm3", "sharpness"),
)
