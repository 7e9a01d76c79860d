"""Feed-forward layers: one for all tokens, and experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_above_zero, check_choice, check_flags, check_whole
from pipemesh.layers.named.cache import current_cache
from pipemesh.layers.named.named_layer import (
    WHOLE,
    NamedLayer,
    check_whole_dims,
    count_whole,
    split_names,
    whole,
    whole_dims,
    whole_names,
)
from pipemesh.layers.named.norm_and_dropout import Dropout
from pipemesh.layers.named.scope import current_lowering
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Lowering, Tensor, ops
from pipemesh.lowering.ops.einsum import products
from pipemesh.lowering.ops.elementwise import broadcast
from pipemesh.lowering.ops.relayout import NO_NAMES
from pipemesh.mesh import Dim, LayoutRules, Shape


@dataclasses.dataclass(frozen=True)
class Activation:
    """A nonlinearity, and what its gradient reads."""

    # Takes a hidden value, or a hidden value and its gate.
    function: Callable[..., tf.Tensor]
    # The number of tensors of a hidden value's size, without the result.
    read: int = 0
    reads_result: bool = False
    parts: tuple[str, ...] = ("in",)  # the names of the matmuls before it


ACTIVATIONS = {
    "RELU": Activation(tf.nn.relu, reads_result=True),
    "GELU": Activation(tf.nn.gelu, read=3),
    # The tanh approximation, as in GPT-2; the name is lingvo's.
    "GELU_APPROXIMATE": Activation(lambda hidden: tf.nn.gelu(hidden, approximate=True), read=4),
    "SWIGLU": Activation(
        lambda hidden, gate: hidden * tf.nn.silu(gate), read=3, parts=("in", "gate")
    ),
    # The tanh approximation, as in Gemma.
    "GEGLU_APPROXIMATE": Activation(
        lambda hidden, gate: hidden * tf.nn.gelu(gate, approximate=True),
        read=6,
        parts=("in", "gate"),
    ),
}


def _hidden(
    layer: NamedLayer,
    theta: Any,
    x: Tensor,
    dims: Sequence[str],
    names: Mapping[str, str] = NO_NAMES,
) -> Tensor:
    """Computes the matmuls before the nonlinearity, and the nonlinearity."""
    activation = ACTIVATIONS[layer.params.activation]
    parts, has_biases = activation.parts, "b_in" in layer.NamedWeights(layer.params)
    weights = [layer.Weight(theta, f"w_{part}") for part in parts]
    into = products(x, weights, [dims] * len(parts), names)
    pairs = zip(parts, into, strict=True)
    into = [layer.Adapted(theta, f"w_{part}", x, product) for part, product in pairs]
    biases = [layer.Weight(theta, f"b_{part}") for part in parts] if has_biases else []

    def activated(*values: tf.Tensor) -> tf.Tensor:
        into, biases = values[: len(parts)], values[len(parts) :]
        return activation.function(*(map(tf.add, into, biases) if biases else into))

    return broadcast(activated, [*into, *biases])


def _count_hidden(
    p: Any,
    tally: Tally,
    x: Value,
    weights: Mapping[str, Value],
    dims: Sequence[str],
    names: Mapping[str, str] = NO_NAMES,
) -> Value:
    """Counts `_hidden`."""
    parts = ACTIVATIONS[p.activation].parts
    matmuls = [weights[f"w_{part}"] for part in parts]
    into = tally.products(x, matmuls, [dims] * len(parts), names)
    pairs = zip(parts, into, strict=True)
    into = [p.cls.CountAdapted(p, tally, f"w_{part}", x, product) for part, product in pairs]
    biases = [weights[f"b_{part}"] for part in parts] if "b_in" in weights else []
    return count_activation(p.activation, tally, into, biases)


class FeedForward(NamedLayer):
    """Two matmuls with a nonlinearity between them, which may have a gate (Shazeer, 2020).

    With the rule `d_ff:model` each processor has a slice of the hidden values. The first matmul
    needs no communication, and the second ends in one all-reduce (Shoeybi et al., "Megatron-LM",
    2019). With `length:model` beside it, inputs and outputs are split along `length`. Then there is
    one all-gather and one reduce-scatter.
    """

    takes_slices = True

    adaptable = True

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `activation`, `use_bias` and `dropout_rate`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("hidden_dim", 0, "Size of `d_ff`.")
        p.Define("activation", "RELU", f"One of {', '.join(ACTIVATIONS)}.")
        p.Define("use_bias", True, "Whether biases are added to the products.")
        p.Define("dropout_rate", 0.0, "Dropout rate of the hidden values.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "input_dim", p.input_dim, 1)
        check_whole(p.name, "hidden_dim", p.hidden_dim, 1)
        check_flags(p, ["use_bias"])
        check_choice(p.name, "activation", p.activation, ACTIVATIONS)
        self.CreateChild("dropout", Dropout.Params().Set(rate=p.dropout_rate))

    @classmethod
    def PaddedDims(cls, p: Any) -> dict[str, int]:
        """Returns `d_ff`, unless hidden values are dropped: masks depend on their number."""
        return {} if p.dropout_rate else {"d_ff": 1}

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w_in`, `w_gate` if gated, `w_out`, and their biases."""
        embed, hidden = f"embed:{p.input_dim}", f"d_ff:{p.hidden_dim}"
        first = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        second = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.hidden_dim))
        zero = py_utils.WeightInit.Constant(0.0)
        parts = ACTIVATIONS[p.activation].parts
        weights = {f"w_{part}": (f"{embed};{hidden}", first) for part in parts}
        weights["w_out"] = (f"{hidden};{embed}", second)
        biases = {f"b_{part}": (hidden, zero) for part in parts} | {"b_out": (embed, zero)}
        return weights | biases if p.use_bias else weights

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of each matrix."""
        hidden = {f"w_{part}": ("embed", "d_ff") for part in ACTIVATIONS[p.activation].parts}
        return {**hidden, "w_out": ("d_ff", "embed")}

    def FProp(self, theta: Any, x: Any) -> Tensor:
        """Computes the layer on `batch;length;embed`."""
        p = self.params
        x = self.Named(x, "batch;length;embed")
        names = whole_names(x.lowering.rules, "d_ff")
        rows = whole_dims("batch;length", names)
        hidden = _hidden(self, theta, x, [*rows, "d_ff"], names)
        hidden = self.dropout.FProp(theta.dropout, hidden)
        operands = [hidden, self.Weight(theta, "w_out")]
        result = ops.einsum(operands, [*rows, "embed"], split_names(names))
        result = self.Adapted(theta, "w_out", hidden, result)
        return result + self.Weight(theta, "b_out") if p.use_bias else result

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any) -> Value:
        """Counts the matmuls and the tensors that the nonlinearity's gradient reads."""
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        names = whole_names(tally.lowering.rules, "d_ff")
        rows = whole_dims("batch;length", names)
        hidden = _count_hidden(p, tally, x, weights, [*rows, "d_ff"], names)
        hidden = cls.CountPart(p, Dropout.Params().Set(rate=p.dropout_rate), tally, hidden)
        operands = [hidden, weights["w_out"]]
        result = tally.einsum(operands, [*rows, "embed"], names=split_names(names))
        result = cls.CountAdapted(p, tally, "w_out", hidden, result)
        if p.use_bias:
            tally.elementwise(result, weights["b_out"])
        return result


def count_activation(
    name: str, tally: Tally, products: Sequence[Value], biases: Sequence[Value] = ()
) -> Value:
    """Counts the tensors that the gradient of a nonlinearity reads, and returns its result."""
    tally.elementwise(*products, *biases)
    activation = ACTIVATIONS[name]
    *read, result = (tally.made(products[0].shape, products[0]) for _ in range(activation.read + 1))
    tally.keep(*read, *([result] if activation.reads_result else []))
    return result


def places_of(experts: tf.Tensor, skipped: tf.Tensor | None, number: int, room: int) -> tf.Tensor:
    """Gives each choice of each token a slot `expert * room + i` while its expert has one, else -1.

    `experts` is `[batch, length, choices]` int32, `skipped` `[batch, length]` tokens without an
    expert. First choices come before second ones, and earlier tokens before later ones. Rows of a
    batch are independent.
    """
    batch, length, choices = static_sizes(experts)
    # All first choices, then all second ones.
    queue = tf.reshape(tf.transpose(experts, [0, 2, 1]), [batch, choices * length])
    takes = tf.one_hot(queue, number, dtype=tf.int32)
    if skipped is not None:
        real = tf.tile(1 - tf.cast(skipped, tf.int32), [1, choices])
        takes *= tf.expand_dims(real, -1)
    before = tf.reduce_sum(tf.cumsum(takes, 1, exclusive=True) * takes, -1)
    finds = (before < room) & (tf.reduce_sum(takes, -1) > 0)
    places = tf.where(finds, queue * room + before, -1)
    return tf.transpose(tf.reshape(places, [batch, choices, length]), [0, 2, 1])


def tokens_of(places: tf.Tensor, slots: int) -> tf.Tensor:
    """Returns the token in each slot, `[batch, slots]`, -1 for empty slots; inverts `places_of`."""
    batch, length, choices = static_sizes(places)
    rows = tf.broadcast_to(tf.range(batch)[:, None, None], places.shape)
    tokens = tf.broadcast_to(tf.range(length)[None, :, None], places.shape)
    # Tokens without a slot go to an extra slot, which is cut off.
    columns = tf.where(places < 0, slots, places)
    at = tf.reshape(tf.stack([rows, columns], -1), [batch * length * choices, 2])
    empty = tf.fill([batch, slots + 1], -1)
    filled = tf.tensor_scatter_nd_update(empty, at, tf.reshape(tokens, [-1]))
    return filled[:, :slots]


class Experts(NamedLayer):
    """Mixture of experts (Shazeer et al., 2017) with one (Fedus et al., 2021) or two choices.

    A router chooses the experts of the greatest probabilities for each token. An expert takes
    `capacity_factor` times its even share of the choices of each row. Other tokens skip it and get
    zeros. With None all tokens fit, as in Mixtral (Jiang et al., 2024): each expert computes as
    many slots as a row has tokens. Each row is routed independently, so results depend neither on
    the layout nor on microbatches.

    The rule `experts:data` may name the axis of the batch. Then all-to-all moves tokens to their
    experts and back (Lepikhin et al., "GShard", 2020). Over another axis each processor selects its
    experts' tokens from its rows, and gathers the results of all experts.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `num_choices`, `capacity_factor` and `activation`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("hidden_dim", 0, "Size of `expert_ff`, the hidden values of one expert.")
        p.Define("num_experts", 0, "Size of `experts`.")
        p.Define("num_choices", 2, "How many experts a token meets: 1 or 2.")
        p.Define(
            "capacity_factor",
            1.25,
            "Room of an expert, as a multiple of its even share; None for room for all tokens.",
        )
        p.Define("activation", "RELU", f"One of {', '.join(ACTIVATIONS)}.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for field in ("input_dim", "hidden_dim", "num_experts", "num_choices"):
            check_whole(p.name, field, getattr(p, field), 1)
        if p.num_choices > min(2, p.num_experts):
            raise PipelineError(
                f"{p.name}: num_choices is {p.num_choices}; a token meets 1 or 2 of the "
                f"{p.num_experts} experts"
            )
        if p.capacity_factor is not None:
            check_above_zero(p.name, "capacity_factor", p.capacity_factor, ", or None")
        check_choice(p.name, "activation", p.activation, ACTIVATIONS)
        _check_layout(p, current_lowering())

    @classmethod
    def Room(cls, p: Any, length: int) -> int:
        """Returns the number of tokens of a row that an expert takes."""
        if p.capacity_factor is None:
            return length
        # A token goes to an expert at most once, so capacity beyond the tokens would stay empty.
        return min(length, math.ceil(length * p.num_choices * p.capacity_factor / p.num_experts))

    @classmethod
    def PaddedDims(cls, p: Any) -> dict[str, int]:
        """Returns `expert_ff`."""
        return {"expert_ff": 1}

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w_router`, and for all experts `w_in`, `w_gate` if gated, and `w_out`."""
        embed, hidden = f"embed:{p.input_dim}", f"expert_ff:{p.hidden_dim}"
        experts = f"experts:{p.num_experts}"
        first = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        second = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.hidden_dim))
        # Each processor routes to all experts, so the router's dim has another name.
        weights = {"w_router": (f"{embed};router:{p.num_experts}", first)}
        parts = ACTIVATIONS[p.activation].parts
        weights |= {f"w_{part}": (f"{experts};{embed};{hidden}", first) for part in parts}
        weights["w_out"] = (f"{experts};{hidden};{embed}", second)
        return weights

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of each matrix."""
        hidden = {f"w_{part}": ("embed", "expert_ff") for part in ACTIVATIONS[p.activation].parts}
        return {"w_router": ("embed", "router"), **hidden, "w_out": ("expert_ff", "embed")}

    def FProp(self, theta: Any, x: Any, paddings: Any = None) -> tuple[Tensor, Tensor]:
        """Computes the layer on `batch;length;embed`.

        Paddings, `batch;length`, are 1 at positions without a token, which take no capacity.

        Returns:
            `batch;length;embed`, and a balance loss for each row of the batch. It is `num_experts`
            times the sum, over experts, of the share of tokens that choose it first times its mean
            probability: 1 if all experts are chosen equally, and at most their number.
        """
        p = self.params
        _check_layout(p, current_lowering())
        names = {"length": WHOLE}
        x = whole(self, x, "batch;length;embed", names)
        if paddings is not None:
            paddings = ops.greater(whole(self, paddings, "batch;length", names), 0.5)
        logits = ops.einsum([x, self.Weight(theta, "w_router")], ["batch", WHOLE, "router"])
        chances = ops.softmax(ops.cast(logits, tf.float32), "router")
        gates, chosen = ops.top_k(chances, "router", Dim("choice", p.num_choices))
        if p.num_choices > 1:
            gates = gates / ops.reduce_sum(gates, "choice")
        answers = self._Answers(theta, x, chosen, paddings)
        y = ops.einsum([answers, ops.cast(gates, x.dtype)], ["batch", WHOLE, "embed"])
        return ops.rename(y, split_names(names)), self._Balance(chances, chosen, paddings)

    def _Answers(self, theta: Any, x: Tensor, chosen: Tensor, paddings: Tensor | None) -> Tensor:
        """Returns the results of each token's experts: `batch;length;choice;embed`."""
        p, lowering = self.params, x.lowering
        batch, tokens, embed = x.shape
        # With a cache the capacity would depend on which tokens arrive together.
        room = self.Room(p, tokens.size) if current_cache() is None else tokens.size
        slots = p.num_experts * room

        def place(chosen: tf.Tensor, skipped: tf.Tensor | None = None) -> tf.Tensor:
            return places_of(chosen, skipped, p.num_experts, room)

        operands = [chosen.slices] if paddings is None else [chosen.slices, paddings.slices]
        places = Tensor(lowering, lowering.map(place, *operands), chosen.shape)
        taken = lowering.map(
            lambda local: tf.reshape(tokens_of(local, slots), [-1, p.num_experts, room]),
            places.slices,
        )
        each = Shape((batch, Dim("router", p.num_experts), Dim("room", room)))
        given = ops.gather(x, Tensor(lowering, taken, each), WHOLE)
        there = _there(lowering.rules)
        given = ops.rename(given, there)
        dims = given.shape.names[:3]
        hidden = _hidden(self, theta, given, [*dims, "expert_ff"])
        answers = ops.einsum([hidden, self.Weight(theta, "w_out")], [*dims, "embed"])
        answers = ops.rename(answers, split_names(there))
        table = ops.reshape(answers, Shape((batch, Dim("slots", slots), embed)))
        return ops.gather(table, places, "slots")

    def _Balance(self, chances: Tensor, chosen: Tensor, paddings: Tensor | None) -> Tensor:
        """Computes the loss of Fedus et al., 2021, section 2.2, row by row."""
        p, lowering = self.params, chances.lowering
        first = lowering.map(lambda local: tf.one_hot(local[..., 0], p.num_experts), chosen.slices)
        counted = Tensor(lowering, first, chances.shape)
        number = float(chances.shape[WHOLE].size)
        if paddings is None:
            parts = [ops.reduce_sum(part, WHOLE) / number for part in (counted, chances)]
        else:
            real = ops.cast(ops.logical_not(paddings), tf.float32)
            numbers = ops.maximum(ops.reduce_sum(real, WHOLE), 1.0)
            parts = [ops.reduce_sum(part * real, WHOLE) / numbers for part in (counted, chances)]
        return ops.reduce_sum(parts[0] * parts[1], "router") * float(p.num_experts)

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any, paddings: Any = None) -> tuple[Value, Value]:
        """Counts the matmuls of the router, of all slots, even empty ones, and of the mean."""
        _check_layout(p, tally.lowering)
        names = {"length": WHOLE}
        x = count_whole(tally, x, "batch;length;embed", py_utils.FPropDtype(p), names)
        if isinstance(paddings, Value):
            count_whole(tally, paddings, "batch;length", tf.int32, names)
        weights = cls.CountedWeights(p, tally)
        batch, tokens, embed = x.shape
        logits = tally.einsum([x, weights["w_router"]], f"batch;{WHOLE};router")
        raised = tally.made(logits.shape, logits, tf.float32)
        total = tally.reduce(raised, "router")
        chances = tally.made(raised.shape, raised)
        choices = Shape((batch, tokens, Dim("choice", p.num_choices)))
        chosen = tally.made(choices, raised, tf.int32)
        gates = tally.made(choices, chances)
        tally.keep(raised, total, chosen)
        if p.num_choices > 1:
            tally.keep(gates, tally.reduce(gates, "choice"))
            gates = tally.made(choices, gates)
        slots = Shape((batch, Dim("router", p.num_experts), Dim("room", cls.Room(p, tokens.size))))
        given = tally.gather(x, tally.made(slots, chosen), WHOLE)
        there = _there(tally.lowering.rules)
        given = tally.rename(given, there)
        dims = given.shape.names[:3]
        hidden = _count_hidden(p, tally, given, weights, [*dims, "expert_ff"])
        answers = tally.einsum([hidden, weights["w_out"]], [*dims, "embed"])
        answers = tally.rename(answers, split_names(there))
        table = tally.made(
            Shape((batch, Dim("slots", slots.without("batch").size), embed)), answers
        )
        found = tally.gather(table, tally.made(choices, chosen), "slots")
        gates = gates if gates.dtype == x.dtype else tally.made(choices, gates, x.dtype)
        y = tally.einsum([found, gates], f"batch;{WHOLE};embed")
        # The shares of tokens that chose each expert first; with paddings also the mask and the
        # counts.
        tally.keep(tally.reduce(chances, WHOLE))
        if paddings is not None:
            tally.keep(*(tally.made(dims, chances) for dims in (f"batch;{WHOLE}", "batch")))
        return tally.rename(y, split_names(names)), tally.made("batch", chances)


def _check_layout(p: Any, lowering: Lowering) -> None:
    """Checks that each row is routed on one processor."""
    dims = ["length", WHOLE, "router", "choice", "room", "slots"]
    needed = "each processor needs all to give tokens their places"
    ways = "'batch', 'experts', 'expert_ff' or 'embed'"
    check_whole_dims(p, lowering, dims, ["experts", "expert_ff"], needed, ways)


def _there(rules: LayoutRules) -> dict[str, str]:
    """Returns the names of the tokens' dims at the experts."""
    axis = rules.axis("experts")
    # One axis cannot split both, so its split moves from the rows to the experts.
    travels = axis is not None and axis == rules.axis("batch")
    return {"router": "experts", **({"batch": "rows"} if travels else {})}
