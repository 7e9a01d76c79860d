"""A block of a Transformer."""

from __future__ import annotations

from typing import Any

from lingvo.core import py_utils

from pipemesh.layers.check_params import check_flags
from pipemesh.layers.named.attention import Attention
from pipemesh.layers.named.feed_forward import Experts, FeedForward
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.norm_and_dropout import Dropout, Norm
from pipemesh.layers.named.tally import Tally


class TransformerBlock(NamedLayer):
    """Attention, then a feed-forward layer, each with normalized inputs and a residual connection.

    With `parallel` both take the same inputs (Wang and Komatsuzaki, "GPT-J", 2021). With
    `output_norms` their outputs are normalized before they are added (Gemma Team, "Gemma 2", 2024).
    Under the rules `heads:model;d_ff:model` each half ends in one all-reduce. With
    `feed_forward_tpl=Experts.Params()` it is a mixture-of-experts block, which also returns the
    balance loss.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> params = TransformerBlock.Params().Set(
        ...     name="block", input_dim=8, num_heads=2, hidden_dim=16)
        >>> params.feed_forward_tpl.activation = "SWIGLU"
        >>> with py_utils.VariableStore():
        ...     block = params.Instantiate()
        >>> block.FPropDefaultTheta(tf.ones([2, 3, 8]))
        Tensor('batch:2;length:3;embed:8', float32)
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `dropout_rate`, and templates of the parts."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("num_heads", 1, "Size of `heads`.")
        p.Define("hidden_dim", 0, "Size of `d_ff`, or of `expert_ff`.")
        p.Define("dropout_rate", 0.0, "Dropout rate of what is added to the inputs.")
        p.Define("parallel", False, "Whether both halves take the inputs of the block.")
        p.Define("output_norms", False, "Whether outputs of both halves are normalized, too.")
        p.Define("norm_tpl", Norm.Params(), "Of all norms.")
        p.Define("attention_tpl", Attention.Params(), "Of the attention.")
        p.Define(
            "feed_forward_tpl", FeedForward.Params(), "Of the feed-forward layer, or of `Experts`."
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        check_flags(self.params, ["parallel", "output_norms"])
        for name, child in self.ChildParams(self.params).items():
            self.CreateChild(name, child)

    @classmethod
    def ChildParams(cls, p: Any) -> dict[str, Any]:
        """Returns the params of the parts, by name."""
        dropout = Dropout.Params().Set(rate=p.dropout_rate)
        norm = p.norm_tpl.Copy().Set(input_dim=p.input_dim)
        attention = p.attention_tpl.Copy().Set(input_dim=p.input_dim, num_heads=p.num_heads)
        feed_forward = p.feed_forward_tpl.Copy()
        after = ("attention_output_norm", "feed_forward_output_norm") if p.output_norms else ()
        return {
            "attention_norm": norm,
            "attention": attention,
            "attention_dropout": dropout,
            "feed_forward_norm": norm.Copy(),
            "feed_forward": feed_forward.Set(input_dim=p.input_dim, hidden_dim=p.hidden_dim),
            "feed_forward_dropout": dropout.Copy(),
            **{name: norm.Copy() for name in after},
        }

    def FProp(
        self,
        theta: Any,
        x: Any,
        segment_ids: Any = None,
        segment_pos: Any = None,
        paddings: Any = None,
    ) -> Any:
        """Computes the block; arguments are those of `Attention.FProp`.

        With experts the result has their balance loss too, `batch`.
        """
        p = self.params
        x = self.Named(x, "batch;length;embed")
        y = self.attention_norm.FProp(theta.attention_norm, x)
        y = self.attention.FProp(theta.attention, y, segment_ids, segment_pos, paddings)
        if p.output_norms:
            y = self.attention_output_norm.FProp(theta.attention_output_norm, y)
        summed = x + self.attention_dropout.FProp(theta.attention_dropout, y)
        y = self.feed_forward_norm.FProp(theta.feed_forward_norm, x if p.parallel else summed)
        if isinstance(self.feed_forward, Experts):
            y, balance = self.feed_forward.FProp(theta.feed_forward, y, paddings)
        else:
            y, balance = self.feed_forward.FProp(theta.feed_forward, y), None
        if p.output_norms:
            y = self.feed_forward_output_norm.FProp(theta.feed_forward_output_norm, y)
        y = summed + self.feed_forward_dropout.FProp(theta.feed_forward_dropout, y)
        return y if balance is None else (y, balance)

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any, *tokens: Any) -> Any:
        """Counts the parts."""
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        parts = cls.ChildParams(p)
        y = cls.CountPart(p, parts["attention_norm"], tally, x)
        y = cls.CountPart(p, parts["attention"], tally, y, *tokens)
        if p.output_norms:
            y = cls.CountPart(p, parts["attention_output_norm"], tally, y)
        y = cls.CountPart(p, parts["attention_dropout"], tally, y)
        summed = tally.made(x.shape, x)
        kept = tally.activation_bytes
        y = cls.CountPart(p, parts["feed_forward_norm"], tally, x if p.parallel else summed)
        if p.parallel:
            # Both norms have the same normalized inputs, and TensorFlow keeps them once.
            tally.activation_bytes = kept
        # Only experts take paddings, which they do not route.
        routed = tokens[2:] if issubclass(parts["feed_forward"].cls, Experts) else ()
        outputs = cls.CountPart(p, parts["feed_forward"], tally, y, *routed)
        y, *balance = outputs if isinstance(outputs, tuple) else (outputs,)
        if p.output_norms:
            y = cls.CountPart(p, parts["feed_forward_output_norm"], tally, y)
        cls.CountPart(p, parts["feed_forward_dropout"], tally, y)
        y = tally.made(x.shape, x)
        return (y, *balance) if balance else y
