"""Vectors of tokens and positions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_choice, check_flags, check_whole
from pipemesh.layers.named.dropout import Dropout
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.positions import sinusoids
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.named.whole_length import count_whole, split_names, whole, whole_names
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.lookup import local_start
from pipemesh.mesh import Dim, Shape

POSITIONS = ("none", "sinusoidal", "learned")


class Embedding(NamedLayer):
    """Looks up the vector of each token, adds that of its position, and applies dropout.

    With the rule `vocab:model` each processor has some rows of the table. It looks up the tokens
    among them and has zeros for all others. One all-reduce adds the results.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `positions` and `dropout_rate`."""
        p = super().Params()
        p.Define("vocab_size", 0, "Size of `vocab`.")
        p.Define("embedding_dim", 0, "Size of `embed`.")
        p.Define("scale_sqrt_depth", False, "Whether vectors are scaled by its square root.")
        p.Define("positions", "none", "'none', 'sinusoidal' or 'learned'.")
        p.Define("max_length", None, "Number of positions that are learned.")
        p.Define("dropout_rate", 0.0, "Dropout rate of the sum.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "vocab_size", p.vocab_size, 1)
        check_whole(p.name, "embedding_dim", p.embedding_dim, 1)
        check_flags(p, ["scale_sqrt_depth"])
        check_choice(p.name, "positions", p.positions, POSITIONS)
        if p.positions == "learned":
            check_whole(p.name, "max_length", p.max_length, 1)
        if p.positions == "sinusoidal" and p.embedding_dim % 2:
            raise PipelineError(
                f"{p.name}: embedding_dim is {p.embedding_dim}; sinusoidal positions need an even "
                "one"
            )
        self.CreateChild("dropout", Dropout.Params().Set(rate=p.dropout_rate))

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `table`, and `positions` if they are learned."""
        deviation = 1 / math.sqrt(p.embedding_dim) if p.scale_sqrt_depth else 1.0
        init = py_utils.WeightInit.Gaussian(deviation)
        weights = {"table": (f"vocab:{p.vocab_size};embed:{p.embedding_dim}", init)}
        if p.positions == "learned":
            weights["positions"] = (f"positions:{p.max_length};embed:{p.embedding_dim}", init)
        return weights

    def FProp(self, theta: Any, ids: Any, segment_pos: Any = None) -> Tensor:
        """Computes the vectors.

        Args:
            theta: weights.
            ids: `batch;length`, integers below `vocab_size`; others have zeros.
            segment_pos: `batch;length`, integers below the length; by default positions in the row.

        Returns:
            `batch;length;embed`.
        """
        p = self.params
        table = self.Weight(theta, "table")
        names = whole_names(table.lowering.rules, "vocab")
        ids = whole(self, ids, "batch;length", names)
        x = ops.gather(table, ids, "vocab", split_names(names))
        if p.scale_sqrt_depth:
            x = x * math.sqrt(p.embedding_dim)
        if p.positions != "none":
            x = x + self._Positions(theta, x, segment_pos)
        return self.dropout.FProp(theta.dropout, x)

    def _Positions(self, theta: Any, x: Tensor, segment_pos: Any) -> Tensor:
        p, lowering = self.params, x.lowering
        length = x.shape["length"].size
        if segment_pos is None:
            places = self.Named(tf.range(length), "length")
        else:
            places = self.Named(segment_pos, "batch;length")
        if p.positions == "learned":
            if length > p.max_length:
                raise PipelineError(
                    f"{p.name}: sequences of {length} tokens were given, but max_length is "
                    f"{p.max_length}; make it as large, or the sequences shorter"
                )
            return ops.gather(self.Weight(theta, "positions"), places, "positions")
        embed = Dim("embed", p.embedding_dim)
        shape = Shape((*places.shape, embed))
        start, size = local_start(lowering, embed)

        def local(places: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
            whole = sinusoids(places, p.embedding_dim)
            return tf.gather(whole, start + tf.range(size), axis=-1)

        found = Tensor(lowering, lowering.map(local, places.slices, start), shape)
        return ops.cast(found, py_utils.FPropDtype(p))

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, ids: Any, segment_pos: Any = None) -> Value:
        """Counts the lookups, whose gradients read the indices."""
        names = whole_names(tally.lowering.rules, "vocab")
        ids = count_whole(tally, ids, "batch;length", tf.int32, names)
        weights = cls.CountedWeights(p, tally)
        x = tally.gather(weights["table"], ids, "vocab", split_names(names))
        if p.positions == "learned":
            dims = "length" if segment_pos is None else "batch;length"
            # Default positions are the same for all inputs.
            places = tally.made(x.shape.select(*dims.split(";")), ids)
            places = dataclasses.replace(places, differs=segment_pos is not None)
            tally.meet(x, tally.gather(weights["positions"], places, "positions"))
        return cls.CountPart(p, Dropout.Params().Set(rate=p.dropout_rate), tally, x)
