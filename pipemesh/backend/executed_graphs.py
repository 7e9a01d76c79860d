"""The graphs that TensorFlow executes, and the kernels that it has for them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# The registry of kernels is not public; TensorFlow's version is pinned.
from tensorflow.python.framework import kernels

from pipemesh.backend.eager_context import eager_context


@contextlib.contextmanager
def collected_graphs() -> Iterator[Any]:
    """Collects the graphs of TF2 functions that run for the first time inside.

    Yields:
        A `RunMetadata`, which is filled when the context ends.
    """
    metadata = tf.compat.v1.RunMetadata()
    eager = eager_context()
    eager.ensure_initialized()
    eager.enable_graph_collection()
    # What was collected before is none of ours.
    eager.export_run_metadata()
    try:
        yield metadata
        metadata.MergeFrom(eager.export_run_metadata())
    finally:
        eager.disable_graph_collection()


@functools.cache
def registered_kernels(kind: str) -> Sequence[Any]:
    """The `KernelDef` of each kernel of a kind of operations."""
    return list(kernels.get_registered_kernels_for_op(kind).kernel)
