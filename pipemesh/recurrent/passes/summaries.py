"""TF1 summaries made inside a stage, passed on as part of its carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operation_kinds import SUMMARIES


@dataclasses.dataclass(frozen=True)
class Summaries:
    """The summaries of one stage; each microbatch adds its own to a serialized summary.

    Attributes:
        before: the summary of earlier microbatches and replicas; a placeholder in the first one.
        after: the summary with those of this microbatch.
        collections: the collections of the outer graph that get it.
    """

    before: tf.Tensor
    after: tf.Tensor
    collections: Sequence[str]

    @classmethod
    def found(cls, begin: int, earlier: Summaries | None) -> Summaries | None:
        """Returns the summaries of the function that is being traced; None if there are none.

        It also returns None outside of a TF1 graph, where nothing collects summaries, as in a plain
        model. The first `begin` operations are ignored; `earlier` are the summaries of the previous
        replica.
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
        """Adds the summaries of all microbatches to the collections of the current graph."""
        for key in self.collections:
            tf.compat.v1.add_to_collection(key, merged)
