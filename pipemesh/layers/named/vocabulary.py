"""Embeddings of tokens and positions, and the softmax over a vocabulary."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_above_zero, check_choice, check_flags, check_whole
from pipemesh.layers.named.cache import current_cache
from pipemesh.layers.named.named_layer import (
    NamedLayer,
    count_whole,
    split_names,
    whole,
    whole_dims,
    whole_names,
)
from pipemesh.layers.named.norm_and_dropout import Dropout
from pipemesh.layers.named.past import first_position, whole_length
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.costs import operation
from pipemesh.lowering.ops.einsum import products
from pipemesh.lowering.ops.lookup import local_start
from pipemesh.lowering.ops.reduce import extreme
from pipemesh.lowering.ops.rows import with_rows_outside
from pipemesh.mesh import Dim, Shape
from pipemesh.recurrent.stage import current_devices


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Slower rotations, for longer sequences than a model was first trained with.

    Without `length` all rotations are slower (Chen et al., "Position Interpolation", 2023). With
    it, as in Llama 3.1 (Dubey et al., 2024), the number of turns within `length` positions decides.
    Below `low` turns rotations are slower, above `high` turns they are unchanged, and between them
    the change is linear.

    Attributes:
        factor: the factor by which rotations are slower; 1 or more.
        length: the length of the first sequences, in tokens.
        low: see above.
        high: see above; more than `low`.

    Raises:
        PipelineError: a number is out of range.

    Example:
        >>> RotaryScaling(4.0).speeds(1e4, 2).tolist()
        [0.25, 0.25]
        >>> RotaryScaling(4.0, length=64, low=1.0, high=4.0).speeds(1e4, 2).tolist()
        [1.0, 0.25]
    """

    factor: float
    length: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise PipelineError(f"RotaryScaling: factor is {self.factor!r}; it must be 1 or more")
        if self.length is not None and self.length < 1:
            raise PipelineError(f"RotaryScaling: length is {self.length!r}; it must be 1 or more")
        if not 0 < self.low < self.high:
            raise PipelineError(
                f"RotaryScaling: low is {self.low!r} and high {self.high!r}; both must be above 0, "
                "and high the greater one"
            )

    def speeds(self, base: float, number: int) -> np.ndarray:
        """Returns each pair's speed relative to no scaling; `base` as in `rotated`."""
        kept = np.zeros([number])
        if self.length is not None:
            turns = self.length * base ** (-np.arange(number) / number) / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept + (1 - kept) / self.factor


def sinusoids(positions: tf.Tensor, dim: int) -> tf.Tensor:
    """Returns sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.5. `dim` is even.
    """
    angles = _angles(positions, dim // 2, 1e4, max(dim // 2 - 1, 1))
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)


def rotated(
    x: tf.Tensor, positions: tf.Tensor, base: float, scaling: RotaryScaling | None = None
) -> tf.Tensor:
    """Rotates pairs of elements of `[batch, length, heads, dim]` by angles that grow with position.

    Products of two rotated vectors depend on the distance of their positions. Element `i` of the
    first half makes a pair with element `i` of the second one; the longest wavelength is almost
    2 pi times `base`. Source: Su et al., "RoFormer", 2021.
    """
    half = static_sizes(x)[-1] // 2
    angles = tf.expand_dims(_angles(positions, half, base, half), -2)
    if scaling is not None:
        angles *= tf.constant(scaling.speeds(base, half), tf.float32)
    sines, cosines = tf.sin(angles), tf.cos(angles)
    first, second = tf.split(tf.cast(x, tf.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return tf.cast(tf.concat(turned, -1), x.dtype)


def _angles(positions: tf.Tensor, number: int, base: float, steps: int) -> tf.Tensor:
    powers = tf.range(number, dtype=tf.float32) / steps
    return tf.expand_dims(tf.cast(positions, tf.float32), -1) * tf.exp(-math.log(base) * powers)


_VOCAB_MULTIPLE = "Number that the rows of a slice of `vocab` are a multiple of, by padding."
POSITIONS = ("none", "sinusoidal", "learned")


class Embedding(NamedLayer):
    """Looks up the vector of each token, adds those of its position and type, and applies dropout.

    With the rule `vocab:model` each processor has some rows of the table. It looks up the tokens
    among them and has zeros for all others. One all-reduce adds the results. Any number of tokens
    can be split: the last slice is padded in computations.
    """

    takes_slices = True

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `positions` and `dropout_rate`."""
        p = super().Params()
        p.Define("vocab_size", 0, "Size of `vocab`.")
        p.Define("vocab_multiple", 1, _VOCAB_MULTIPLE)
        p.Define("embedding_dim", 0, "Size of `embed`.")
        p.Define("scale_sqrt_depth", False, "Whether vectors are scaled by its square root.")
        p.Define("positions", "none", "'none', 'sinusoidal' or 'learned'.")
        p.Define("max_length", None, "Number of positions that are learned.")
        p.Define("unused_positions", 0, "Rows of learned positions before the first position's.")
        p.Define("num_types", 0, "Number of token types, each with a vector; 0 for none.")
        p.Define("sum_norm_tpl", None, "Of the norm of the sum; None for none.")
        p.Define("dropout_rate", 0.0, "Dropout rate of the sum.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "vocab_size", p.vocab_size, 1)
        check_whole(p.name, "vocab_multiple", p.vocab_multiple, 1)
        check_whole(p.name, "embedding_dim", p.embedding_dim, 1)
        check_flags(p, ["scale_sqrt_depth"])
        check_choice(p.name, "positions", p.positions, POSITIONS)
        if p.positions == "learned":
            check_whole(p.name, "max_length", p.max_length, 1)
        check_whole(p.name, "unused_positions", p.unused_positions, 0)
        check_whole(p.name, "num_types", p.num_types, 0)
        if p.positions == "sinusoidal" and p.embedding_dim % 2:
            raise PipelineError(
                f"{p.name}: embedding_dim is {p.embedding_dim}; sinusoidal positions need an even "
                "one"
            )
        for name, part in self._Last(p).items():
            self.CreateChild(name, part)

    @classmethod
    def _Last(cls, p: Any) -> dict[str, Any]:
        """Returns the params of the parts behind the sum, in order."""
        norm = p.sum_norm_tpl
        parts = {} if norm is None else {"norm": norm.Copy().Set(input_dim=p.embedding_dim)}
        return parts | {"dropout": Dropout.Params().Set(rate=p.dropout_rate)}

    @classmethod
    def PaddedDims(cls, p: Any) -> dict[str, int]:
        """Returns `vocab`."""
        return {"vocab": p.vocab_multiple}

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `table`, `positions` if they are learned, and `types` if there are any."""
        deviation = 1 / math.sqrt(p.embedding_dim) if p.scale_sqrt_depth else 1.0
        init = py_utils.WeightInit.Gaussian(deviation)
        weights = {"table": (f"vocab:{p.vocab_size};embed:{p.embedding_dim}", init)}
        if p.positions == "learned":
            rows = p.max_length + p.unused_positions
            weights["positions"] = (f"positions:{rows};embed:{p.embedding_dim}", init)
        if p.num_types:
            weights["types"] = (f"types:{p.num_types};embed:{p.embedding_dim}", init)
        return weights

    def FProp(
        self, theta: Any, ids: Any, segment_pos: Any = None, token_types: Any = None
    ) -> Tensor:
        """Computes the vectors, `batch;length;embed`, of `batch;length` integers.

        Ids outside of the vocabulary have zeros. `segment_pos` are by default positions in the row,
        and `token_types` 0.
        """
        p = self.params
        table = self.Weight(theta, "table")
        names = whole_names(table.lowering.rules, "vocab")
        ids = whole(self, ids, "batch;length", names)
        # A stage adds rows to its sum. Elsewhere lingvo takes the gradient, whose norm it computes
        # wrong if it is sparse and a row occurs twice.
        sparse = bool(current_devices())
        x = ops.gather(table, ids, "vocab", split_names(names), sparse)
        if p.scale_sqrt_depth:
            x = x * math.sqrt(p.embedding_dim)
        if p.positions != "none":
            x = x + self._Positions(theta, x, segment_pos)
        if p.num_types:
            types = tf.zeros(x.shape.sizes[:2], tf.int32) if token_types is None else token_types
            types = self.Named(types, "batch;length")
            x = x + ops.gather(self.Weight(theta, "types"), types, "types")
        for name in self._Last(p):
            x = self.children[name].FProp(theta[name], x)
        return x

    def _Positions(self, theta: Any, x: Tensor, segment_pos: Any) -> Tensor:
        p, lowering = self.params, x.lowering
        length = x.shape["length"].size
        if segment_pos is None:
            places = self.Named(first_position(length) + tf.range(length), "length")
        else:
            places = self.Named(segment_pos, "batch;length")
        if p.unused_positions:
            places = places + p.unused_positions
        if p.positions == "learned":
            if whole_length(length) > p.max_length:
                raise PipelineError(
                    f"{p.name}: sequences of {whole_length(length)} tokens were given, but "
                    f"max_length is {p.max_length}; make it as large, or the sequences shorter"
                )
            return ops.gather(self.Weight(theta, "positions"), places, "positions")
        embed = Dim("embed", p.embedding_dim)
        shape = Shape((*places.shape, embed))
        start, size = local_start(lowering, embed)

        def local(places: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
            whole = sinusoids(places, p.embedding_dim)
            return tf.gather(whole, start + tf.range(size), axis=-1)

        vectors = Tensor(lowering, lowering.map(local, places.slices, start), shape)
        return ops.cast(vectors, py_utils.FPropDtype(p))

    @classmethod
    def CountCosts(
        cls, p: Any, tally: Tally, ids: Any, segment_pos: Any = None, token_types: Any = None
    ) -> Value:
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
            tally.elementwise(x, tally.gather(weights["positions"], places, "positions"))
        if p.num_types:
            types = x.shape.sizes[:2] if token_types is None else token_types
            types = tally.given(types, "batch;length", tf.int32)
            types = dataclasses.replace(types, differs=token_types is not None)
            tally.elementwise(x, tally.gather(weights["types"], types, "types"))
        for part in cls._Last(p).values():
            x = cls.CountPart(p, part, tally, x)
        return x


@custom_gradient
def _sums(logits: tf.Tensor, labels: tf.Tensor, greatest: tf.Tensor, start: tf.Tensor) -> Any:
    """Returns two sums over a slice of `vocab`: of exponentials, and of the label's logit.

    The gradient is one tensor of the size of the logits, where TensorFlow makes three.
    """
    sizes = static_sizes(logits)
    at = labels - tf.cast(start, labels.dtype)
    is_here = (at >= 0) & (at < sizes[-1])
    at = tf.where(is_here, at, 0)
    raised = tf.exp(logits - tf.expand_dims(greatest, -1))
    right = tf.gather(logits, at, batch_dims=len(sizes) - 1)

    def gradient(grad: tf.Tensor) -> Any:
        grads = raised * tf.expand_dims(grad[0], -1)
        own = tf.gather(grads, at, batch_dims=len(sizes) - 1) + grad[1]
        column = tf.expand_dims(tf.where(is_here, at, -1), -1)
        is_label = tf.equal(tf.range(sizes[-1], dtype=at.dtype), column)
        # Unlike a scatter, it overwrites `grads`.
        return tf.where(is_label, tf.expand_dims(own, -1), grads), None, None, None

    return tf.stack([tf.reduce_sum(raised, -1), tf.where(is_here, right, 0)]), gradient


class SoftmaxCrossEntropy(NamedLayer):
    """Logits of all tokens, and the cross entropy of the labels: the head of a language model.

    With the rule `vocab:model` each processor has the logits of some tokens only. An all-reduce
    finds their maximum, another one the sum of exponentials and the label's logit: three numbers
    per token.
    """

    takes_slices = True

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `norm_tpl`, `use_bias`, `label_smoothing` and `z_loss`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("vocab_size", 0, "Size of `vocab`.")
        p.Define("norm_tpl", None, "Of the norm of inputs; None for none.")
        p.Define("vocab_multiple", 1, _VOCAB_MULTIPLE)
        p.Define("use_bias", True, "Whether a bias is added to the logits.")
        p.Define("logit_scale", 1.0, "Factor of inputs behind the norm, and so of products.")
        p.Define("logit_cap", None, "Limit of logits, by tanh; None for none.")
        p.Define(
            "label_smoothing",
            0.0,
            "Part of each label's probability that all tokens share; 0 or more, less than 1.",
        )
        p.Define(
            "z_loss",
            0.0,
            "In training, weight of the squared logarithm of each token's sum of exponentials, "
            "which is added to its cross entropy (Chowdhery et al., PaLM, 2022, section 5).",
        )
        p.Define("predicts", False, "Whether evaluation returns the most likely tokens, too.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "input_dim", p.input_dim, 1)
        check_whole(p.name, "vocab_size", p.vocab_size, 1)
        check_whole(p.name, "vocab_multiple", p.vocab_multiple, 1)
        check_flags(p, ["use_bias", "predicts"])
        check_above_zero(p.name, "logit_scale", p.logit_scale)
        if p.logit_cap is not None:
            check_above_zero(p.name, "logit_cap", p.logit_cap, ", or None")
        if not isinstance(p.label_smoothing, int | float) or not 0 <= p.label_smoothing < 1:
            raise PipelineError(
                f"{p.name}: label_smoothing is {p.label_smoothing!r}; it is a number from 0 on and "
                "below 1"
            )
        if p.z_loss:
            check_above_zero(p.name, "z_loss", p.z_loss, ", or 0")
        if p.norm_tpl is not None:
            self.CreateChild("norm", p.norm_tpl.Copy().Set(input_dim=p.input_dim))

    @classmethod
    def PaddedDims(cls, p: Any) -> dict[str, int]:
        """Returns `vocab`."""
        return {"vocab": p.vocab_multiple}

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w`, and `b` with `use_bias`."""
        vocab = f"vocab:{p.vocab_size}"
        init = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        weights = {"w": (f"embed:{p.input_dim};{vocab}", init)}
        return weights | ({"b": (vocab, py_utils.WeightInit.Constant(0.0))} if p.use_bias else {})

    def Logits(self, theta: Any, x: Any) -> Tensor:
        """Returns `batch;length;vocab` in float32, for `batch;length;embed`.

        Logits of padding, behind those of the vocabulary, are 0; see `PaddedDims`. If one axis
        splits `length` and `vocab`, each processor has all tokens, and their dim is `tokens`.
        """
        p = self.params
        x = self.Named(x, "batch;length;embed")
        x = x if p.logit_scale == 1 else x * p.logit_scale
        names = whole_names(x.lowering.rules, "vocab")
        dims = [*whole_dims("batch;length", names), "vocab"]
        (logits,) = products(x, [self.Weight(theta, "w")], [dims], names)
        if p.use_bias:
            logits = logits + self.Weight(theta, "b")
        logits = ops.cast(logits, tf.float32)
        return logits if p.logit_cap is None else ops.tanh(logits / p.logit_cap) * p.logit_cap

    def FProp(self, theta: Any, x: Any, labels: Any, weights: Any = None) -> Any:
        """Computes the loss for `batch;length;embed`, and `batch;length` labels and their weights.

        Returns:
            The weighted sum of cross entropies, with `z_loss` in training, the sum of the weights,
            and the cross entropy of each label, `batch;length`: all float32. With `predicts`, in
            evaluation also the most likely token at each place, `batch;length` int32. Inside
            `cache_scope` labels are ignored, and the result is the logits of the next token in
            each row, `batch;vocab` float32.
        """
        p = self.params
        if p.norm_tpl is not None:
            x = self.norm.FProp(theta.norm, self.Named(x, "batch;length;embed"))
        if (cache := current_cache()) is not None:
            return self._Next(theta, x, cache.last)
        logits = self.Logits(theta, x)
        names = whole_names(logits.lowering.rules, "vocab")
        labels = whole(self, labels, "batch;length", names)
        total, right = self._Sums(logits, labels)
        if p.label_smoothing:
            mean = ops.reduce_sum(logits, "vocab") / p.vocab_size
            right = right * (1 - p.label_smoothing) + mean * p.label_smoothing
        xent = total - right
        if weights is None:
            weights = tf.ones(xent.shape.sizes)
        # Stays float32, not the dtype of matmuls, because weights are also summed.
        weights = whole(self, weights, "batch;length", names, tf.float32)
        weights = ops.cast(weights, tf.float32)
        each = ops.rename(xent, split_names(names))
        if p.z_loss and not self.do_eval:
            xent = xent + total * total * p.z_loss
        found = ops.reduce_sum(xent * weights), ops.reduce_sum(weights), each
        if not (p.predicts and self.do_eval):
            return found
        likely = ops.argmax(self._WithoutPadding(logits), "vocab")
        return *found, ops.rename(likely, split_names(names))

    def _WithoutPadding(self, logits: Tensor) -> Tensor:
        """Returns logits that are -inf behind those of the vocabulary."""
        number = self.params.vocab_size
        if logits.shape["vocab"].size == number:
            return logits
        return with_rows_outside(logits, "vocab", 0, number, -math.inf)

    def _Next(self, theta: Any, x: Any, last: Any) -> Tensor:
        """Returns the logits of the token after `last` in each row, `batch;vocab`."""
        x = self.Named(x, "batch;length;embed")
        at = self.Named(last, "batch")
        x = ops.gather(x, at, "length")
        batch, embed = x.shape
        logits = self.Logits(theta, ops.reshape(x, Shape((batch, Dim("length", 1), embed))))
        logits = ops.reshape(logits, Shape((batch, logits.shape["vocab"])))
        if logits.shape["vocab"].size == self.params.vocab_size:
            return logits
        # Under a name without a rule, since it need not divide.
        return ops.slice(
            ops.rename(logits, {"vocab": "tokens"}), "tokens", 0, self.params.vocab_size
        )

    def _Sums(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logarithm of the sum of exponentials and the label's logit, by token."""
        lowering, number = logits.lowering, self.params.vocab_size
        lowering.tensor_layout(logits.shape | labels.shape)
        # Numbers of logits need more than 32 bits.
        labels = ops.cast(labels, tf.int64)
        places = labels.slices
        if logits.shape["vocab"].size != number:
            # So padding has no probability, and is no label.
            logits = self._WithoutPadding(logits)
            places = lowering.map(lambda at: tf.where(at < number, at, -1), places)
        greatest = extreme(logits, ["vocab"], "max")
        start, _ = local_start(lowering, logits.shape["vocab"])
        with operation("softmax", [logits]):
            sums = lowering.map(_sums, logits.slices, places, greatest.slices, start)
        axis = lowering.rules.axis("vocab")
        sums = lowering.all_reduce(sums, [axis] if axis else [])
        total = lowering.map(lambda s, top: tf.math.log(s[0]) + top, sums, greatest.slices)
        right = lowering.map(lambda s: s[1], sums)
        return Tensor(lowering, total, labels.shape), Tensor(lowering, right, labels.shape)

    @classmethod
    def CountCosts(
        cls, p: Any, tally: Tally, x: Any, labels: Any = None, weights: Any = None
    ) -> tuple[Value, Value, Value]:
        """Counts the logits, whose gradient reads exponentials and their sums."""
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        if p.norm_tpl is not None:
            x = cls.CountPart(p, p.norm_tpl.Copy().Set(input_dim=p.input_dim), tally, x)
        own = cls.CountedWeights(p, tally)
        names = whole_names(tally.lowering.rules, "vocab")
        rows = whole_dims("batch;length", names)
        x = x if p.logit_scale == 1 else tally.made(x.shape, x)
        (logits,) = tally.products(x, [own["w"]], [[*rows, "vocab"]], names)
        if p.use_bias:
            tally.elementwise(logits, own["b"])
        logits = tally.made(logits.shape, logits, tf.float32)
        if p.logit_cap is not None:
            tally.keep(logits)
            logits = tally.made(logits.shape, logits)
        labels = x.shape.sizes[:2] if labels is None else labels
        labels = count_whole(tally, labels, "batch;length", tf.int32, names)
        if isinstance(weights, Value):
            count_whole(tally, weights, "batch;length", tf.float32, names)
        # The maximum, then two sums at once; the gradient reads the exponentials, the labels'
        # places, and whether these are here.
        right = tally.reduce(logits, "vocab")
        two = tally.made(Shape((Dim("sums", 2), *right.shape)), right)
        axis = tally.lowering.rules.axis("vocab")
        tally.all_reduce(two, [axis] if axis else [])
        places = (tally.made(labels.shape, labels, dtype) for dtype in (tf.int64, tf.bool))
        tally.keep(tally.made(logits.shape, logits), right, *places)
        if p.label_smoothing:
            tally.reduce(logits, "vocab")
        xent = tally.made(right.shape, right)
        of_labels = tally.made(right.shape, right)
        if p.z_loss:
            # The logarithm of the sum, which is squared.
            tally.keep(tally.made(right.shape, right))
        tally.keep(*[] if weights is None else [xent, of_labels])
        scalar = tally.reduce(xent, rows, times=2)
        return scalar, tally.made(scalar.shape, scalar), tally.rename(xent, split_names(names))
