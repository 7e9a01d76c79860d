"""Layers with named dims: layout rules split their weights and activations over the mesh.

Example:
    >>> import tensorflow as tf
    >>> from lingvo.core import py_utils
    >>> from pipemesh.layers.named import FeedForward, lowering_scope
    >>> from pipemesh.lowering import PlacementLowering, ops
    >>> from pipemesh.mesh import LayoutRules, Mesh
    >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("d_ff:model")
    >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
    >>> params = FeedForward.Params().Set(name="feed_forward", input_dim=4, hidden_dim=8)
    >>> with lowering_scope(lowering), py_utils.VariableStore():
    ...     layer = params.Instantiate()
    ...     y = layer.FPropDefaultTheta(tf.ones([2, 3, 4]))
    >>> y
    Tensor('batch:2;length:3;embed:4', float32)
    >>> layer.vars.w_in_slice_0.shape.as_list(), lowering.costs.calls("all_reduce")
    ([4, 4], 1)
"""

from pipemesh.layers.named.attention import Attention
from pipemesh.layers.named.cache import KeyValueCache, cache_scope, current_cache
from pipemesh.layers.named.convolution import Convolution
from pipemesh.layers.named.encoder_decoder import encoder_decoder_layers
from pipemesh.layers.named.feed_forward import Experts, FeedForward
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.norm_and_dropout import BatchNorm, Dropout, Norm
from pipemesh.layers.named.scope import current_lowering, lowering_scope
from pipemesh.layers.named.transformer_block import TransformerBlock
from pipemesh.layers.named.vocabulary import Embedding, RotaryScaling, SoftmaxCrossEntropy
from pipemesh.layers.named.weight_slices import ReplicaCut, by_logical_name, replica_cut_scope

__all__ = [
    "Attention",
    "BatchNorm",
    "Convolution",
    "Dropout",
    "Embedding",
    "Experts",
    "FeedForward",
    "KeyValueCache",
    "NamedLayer",
    "Norm",
    "ReplicaCut",
    "RotaryScaling",
    "SoftmaxCrossEntropy",
    "TransformerBlock",
    "by_logical_name",
    "cache_scope",
    "current_cache",
    "current_lowering",
    "encoder_decoder_layers",
    "lowering_scope",
    "replica_cut_scope",
]
