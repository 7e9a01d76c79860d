"""Summaries of TF1 graphs that are made inside of a stage, as a carry of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operation_kinds import SUMMARIES


@dataclasses.dataclass(frozen=True)
class Summaries:
    """The summaries of one stage; each microbatch adds its own to a serialized one.

    Attributes:
        before: what microbatches and replicas before have added; a placeholder in the first one.
        after: with those of this microbatch.
        collections: where the graph outside collects them.
    """

    before: tf.Tensor
    after: tf.Tensor
    collections: Sequence[str]

    @classmethod
    def found(cls, begin: int, earlier: Summaries | None) -> Summaries | None:
        """Those in the function that is being traced; None if there are none.

        Also None where no TF1 graph surrounds the function: there nobody collects them, in a
        plain model either.

        Args:
            begin: the number of operations that are not looked at.
            earlier: those of the replica before.
        """
        graph: Any = tf.compat.v1.get_default_graph()
        if graph.outer_graph.building_function:
            return None
        made = [op.outputs[0] for op in graph.get_operations()[begin:] if op.type in SUMMARIES]
        if not made:
            return None
        if earlier is None:
            before = tf.compat.v1.placeholder(tf.string, [])
        else:
            before = tf.identity(earlier.after)
        names = {tensor.name for tensor in made}
        collections = [
            key
            for key in graph.get_all_collection_keys()
            if any(
                isinstance(item, tf.Tensor) and item.graph is graph and item.name in names
                for item in graph.get_collection(key)
            )
        ]
        return cls(before, tf.raw_ops.MergeSummary(inputs=[before, *made]), collections)

    def collect(self, merged: tf.Tensor) -> None:
        """Hands those of all microbatches to the collections of the current graph."""
        for key in self.collections:
            tf.compat.v1.add_to_collection(key, merged)
