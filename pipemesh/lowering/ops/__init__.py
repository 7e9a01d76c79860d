"""Operations on tensors with named dims, which give the same result under every legal layout."""

from typing import TYPE_CHECKING

from pipemesh.lowering.differentiate import gradients as gradients
from pipemesh.lowering.ops.convolution import conv1d as conv1d
from pipemesh.lowering.ops.convolution import conv2d as conv2d
from pipemesh.lowering.ops.convolution import conv3d as conv3d
from pipemesh.lowering.ops.convolution import conv_transpose as conv_transpose
from pipemesh.lowering.ops.einsum import einsum as einsum
from pipemesh.lowering.ops.elementwise import *  # noqa: F403
from pipemesh.lowering.ops.lookup import argmax as argmax
from pipemesh.lowering.ops.lookup import cumsum as cumsum
from pipemesh.lowering.ops.lookup import gather as gather
from pipemesh.lowering.ops.lookup import one_hot as one_hot
from pipemesh.lowering.ops.lookup import top_k as top_k
from pipemesh.lowering.ops.pooling import avg_pool as avg_pool
from pipemesh.lowering.ops.pooling import max_pool as max_pool
from pipemesh.lowering.ops.pooling import upsample as upsample
from pipemesh.lowering.ops.random import dropout as dropout
from pipemesh.lowering.ops.random import random_normal as random_normal
from pipemesh.lowering.ops.random import random_uniform as random_uniform
from pipemesh.lowering.ops.reduce import *  # noqa: F403
from pipemesh.lowering.ops.relayout import export_tensor as export_tensor
from pipemesh.lowering.ops.relayout import import_tensor as import_tensor
from pipemesh.lowering.ops.relayout import rename as rename
from pipemesh.lowering.ops.relayout import reshape as reshape
from pipemesh.lowering.ops.relayout import transpose as transpose
from pipemesh.lowering.ops.rows import concat as concat
from pipemesh.lowering.ops.rows import halo_exchange as halo_exchange
from pipemesh.lowering.ops.rows import pad as pad
from pipemesh.lowering.ops.rows import shift as shift
from pipemesh.lowering.ops.rows import slice as slice
from pipemesh.lowering.ops.rows import split as split
from pipemesh.lowering.ops.rows import stack as stack
from pipemesh.lowering.ops.rows import unstack as unstack
from pipemesh.lowering.registry import OPS
from pipemesh.text import did_you_mean

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raises an AttributeError that suggests the nearest operation."""
        raise AttributeError(
            f"ops has no {name!r}; {did_you_mean(name, OPS, 0.8)}pipemesh/lowering/README.md lists "
            "all operations"
        )
