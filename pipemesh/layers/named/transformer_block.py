"""A block of a Transformer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_flags
from pipemesh.layers.named.attention import Attention
from pipemesh.layers.named.feed_forward import Experts, FeedForward
from pipemesh.layers.named.named_layer import NamedLayer, whole_names
from pipemesh.layers.named.norm_and_dropout import Dropout, Norm
from pipemesh.layers.named.tally import Tally


class TransformerBlock(NamedLayer):
    """Attention, then a feed-forward layer, each with normalized inputs and a residual connection.

    With `post_norm` norms come after the residual connections (Vaswani et al., "Attention Is All
    You Need", 2017). With `cross_attention_tpl` there is attention to a memory between them, as in
    a decoder; the block of an encoder has an `attention_tpl` with `causal=False`. With `parallel`
    attention and the feed-forward layer take the same inputs (Wang and Komatsuzaki, "GPT-J", 2021).
    With `output_norms` their outputs are normalized before they are added (Gemma Team, "Gemma 2",
    2024).
    Under the rules `heads:model;d_ff:model` each ends in one all-reduce. With
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

    takes_slices = True

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `dropout_rate`, and templates of the parts."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("num_heads", 1, "Size of `heads`.")
        p.Define("hidden_dim", 0, "Size of `d_ff`, or of `expert_ff`.")
        p.Define("dropout_rate", 0.0, "Dropout rate of what is added to the inputs.")
        p.Define("parallel", False, "Whether the feed-forward layer takes the block's inputs.")
        p.Define("output_norms", False, "Whether outputs of the parts are normalized, too.")
        p.Define("post_norm", False, "Whether sums are normalized, not inputs of the parts.")
        p.Define("norm_tpl", Norm.Params(), "Of all norms.")
        p.Define("attention_tpl", Attention.Params(), "Of the attention.")
        p.Define("cross_attention_tpl", None, "Of the attention to a memory; None for none.")
        p.Define(
            "feed_forward_tpl", FeedForward.Params(), "Of the feed-forward layer, or of `Experts`."
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_flags(p, ["parallel", "output_norms", "post_norm"])
        if p.post_norm and (p.parallel or p.output_norms):
            raise PipelineError(
                f"{p.name}: post_norm normalizes the sum behind each part, but parallel is "
                f"{p.parallel} and output_norms {p.output_norms}; set one of the three alone"
            )
        for name, child in self.ChildParams(self.params).items():
            self.CreateChild(name, child)

    @classmethod
    def ChildParams(cls, p: Any) -> dict[str, Any]:
        """Returns the params of the parts, by name."""
        dropout = Dropout.Params().Set(rate=p.dropout_rate)
        norm = p.norm_tpl.Copy().Set(input_dim=p.input_dim)
        sizes = {"input_dim": p.input_dim, "num_heads": p.num_heads}
        main = {"attention": p.attention_tpl.Copy().Set(**sizes)}
        if p.cross_attention_tpl is not None:
            cross = p.cross_attention_tpl.Copy().Set(**sizes, causal=False, cross=True)
            main["cross_attention"] = cross
        feed_forward = p.feed_forward_tpl.Copy()
        main["feed_forward"] = feed_forward.Set(input_dim=p.input_dim, hidden_dim=p.hidden_dim)
        parts = {}
        for name, part in main.items():
            parts |= {f"{name}_norm": norm.Copy(), name: part, f"{name}_dropout": dropout.Copy()}
            if p.output_norms:
                parts[f"{name}_output_norm"] = norm.Copy()
        return parts

    def FProp(
        self,
        theta: Any,
        x: Any,
        segment_ids: Any = None,
        segment_pos: Any = None,
        paddings: Any = None,
        *memory: Any,
    ) -> Any:
        """Computes the block; arguments are those of `Attention.FProp`.

        With experts the result has their balance loss too, `batch`.
        """
        p = self.params
        x = self.Named(x, "batch;length;embed")
        tokens = (segment_ids, segment_pos, paddings)
        summed, balance = x, []
        for name, inputs in self._Inputs(p, tokens, memory).items():
            y = x if p.parallel and name == "feed_forward" else summed
            for part in _steps(p, name, self.children):
                own = inputs if part == name else ()
                y = self.children[part].FProp(theta[part], y, *own)
                if isinstance(y, tuple):
                    y, *balance = y
            summed = summed + y
            if p.post_norm:
                norm = f"{name}_norm"
                summed = self.children[norm].FProp(theta[norm], summed)
        return (summed, *balance) if balance else summed

    @classmethod
    def _Inputs(cls, p: Any, tokens: Sequence[Any], memory: Sequence[Any]) -> dict[str, Any]:
        """Returns the inputs of each main part after the first."""
        attentions = [name for name in cls.ChildParams(p) if name.endswith("attention")]
        inputs = dict.fromkeys(attentions, tokens)
        inputs[attentions[-1]] = (*tokens, *memory)
        # Only experts take paddings, which they do not route.
        inputs["feed_forward"] = tokens[2:] if issubclass(p.feed_forward_tpl.cls, Experts) else ()
        return inputs

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any, *tokens: Any) -> Any:
        """Counts the parts."""
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        parts = cls.ChildParams(p)
        (ids, *rest), memory = [*tokens, None, None, None][:3], tokens[3:]
        if ids is not None and not whole_names(tally.lowering.rules, "heads"):
            # Both attentions keep these segments.
            ids = tally.given(ids, "batch;length", tf.int32)
        summed, balance = x, []
        for name, inputs in cls._Inputs(p, (ids, *rest), memory).items():
            y = x if p.parallel and name == "feed_forward" else summed
            for part in _steps(p, name, parts):
                kept = tally.activation_bytes
                own = inputs if part == name else ()
                y = cls.CountPart(p, parts[part], tally, y, *own)
                if part == "feed_forward_norm" and p.parallel:
                    # Two norms have the same normalized inputs, and TensorFlow keeps them once.
                    tally.activation_bytes = kept
                if isinstance(y, tuple):
                    y, *balance = y
            summed = tally.made(x.shape, x)
            if p.post_norm:
                summed = cls.CountPart(p, parts[f"{name}_norm"], tally, summed)
        return (summed, *balance) if balance else summed


def _steps(p: Any, name: str, parts: Collection[str]) -> list[str]:
    """Returns the parts of a residual branch, in order."""
    before = () if p.post_norm else (f"{name}_norm",)
    steps = (*before, name, f"{name}_output_norm", f"{name}_dropout")
    return [step for step in steps if step in parts]
