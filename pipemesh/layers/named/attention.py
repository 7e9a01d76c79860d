"""Attention with split heads, to the same tokens or to another sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.check_params import check_above_zero, check_flags, check_whole
from pipemesh.layers.named.block_attention import Blocks, Buckets, Sight, block_attention
from pipemesh.layers.named.cache import KeyValueCache, cached_attention, continues, current_cache
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
from pipemesh.layers.named.past import Past, current_past, first_position, past_length
from pipemesh.layers.named.scope import current_lowering
from pipemesh.layers.named.split_attention import Ring, count_zigzag, ring_attention, zigzag
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.named.vocabulary import RotaryScaling, rotated
from pipemesh.lowering import Lowering, Tensor, ops
from pipemesh.lowering.costs import operation
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.ops.einsum import product_flops, products
from pipemesh.lowering.tensor import union_axes
from pipemesh.mesh import Dim, Shape


class Attention(NamedLayer):
    """Multi-head attention; by default causal: a token sees its segment up to itself.

    Without `causal` a token sees all of its segment. With `cross` tokens see another sequence, the
    memory, whose length is the dim `memory_length`, and which no rule splits along it (Vaswani et
    al., "Attention Is All You Need", 2017).

    With the rule `heads:model` each processor computes some of the heads, and one all-reduce sums
    over the heads (Shoeybi et al., "Megatron-LM", 2019).

    With `num_kv_heads` neighbouring heads share keys and values (Ainslie et al., "GQA", 2023).
    Their dim is then `kv_heads`: split it like `heads`, or leave it whole if there are fewer than
    processors.

    With `window` a token sees itself and the tokens just before it, without `causal` also those
    just after it (Beltagy et al., "Longformer", 2020). With `score_cap` scores are limited by tanh
    (Gemma Team, "Gemma 2", 2024). With `norm_tpl` queries and keys of each head are normalized
    before they are rotated (Dehghani et al., "Scaling Vision Transformers to 22 Billion
    Parameters", 2023).

    With `length:model` beside `heads:model` inputs and outputs are split along `length`. Then there
    is one all-gather and one reduce-scatter. With `length:cp`, an axis that splits no heads, no
    device has a whole sequence (context parallelism). Either processors exchange tokens for heads
    before and after (Jacobs et al., "DeepSpeed-Ulysses", 2023), or keys and values go round in a
    ring (`ring_attention`); `split_length_by` chooses. With `cross` the rule `memory_length:cp`
    beside it splits the memory too.

    Scores are computed in blocks (`block_attention`), so memory grows linearly with the length.
    Inside `cache_scope` inputs continue cached rows: cache positions count, segments and paddings
    do not. With `cross` the first call caches keys, values and segments of the memory; later ones
    need no memory. Without `causal` only the first call of rows is valid, and nothing is cached.
    """

    adaptable = True

    @classmethod
    def Params(cls) -> Any:
        """Defines heads, positions and blocks."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("num_heads", 1, "Size of `heads`.")
        p.Define("num_kv_heads", None, "Size of `kv_heads`, a divisor of num_heads; None for MHA.")
        p.Define("dim_per_head", None, "Size of `head_dim`; None for input_dim / num_heads.")
        p.Define("use_bias", True, "Whether biases are added to the four products.")
        p.Define("use_out_bias", None, "Whether one is added to the last; None for `use_bias`.")
        p.Define("norm_tpl", None, "Of the norms of queries and keys; None for none.")
        p.Define("score_scale", None, "Factor of scores; None for 1 / sqrt(dim_per_head).")
        p.Define("score_cap", None, "Limit of scores, before biases by distance; None for none.")
        p.Define("causal", True, "Whether a token sees no later tokens.")
        p.Define("cross", False, "Whether keys and values are those of a memory; not with causal.")
        p.Define("window", None, "How many tokens one sees on a side, with itself; None for all.")
        p.Define("use_rotary", False, "Whether queries and keys are rotated by their positions.")
        p.Define("rotary_dim", None, "How many first elements of a head rotate; None for all.")
        p.Define("rotary_base", 1e4, "Of the wavelengths of rotations.")
        p.Define("rotary_scaling", None, "A `RotaryScaling`, of slower rotations; None for none.")
        p.Define(
            "relative_buckets", 0, "Number of buckets of a bias by distance and head; 0 for none."
        )
        p.Define("relative_max_distance", 128, "From this distance on, the last bucket is used.")
        p.Define("block_size", 512, "How many queries, and keys, a block has at most.")
        p.Define(
            "split_length_by",
            None,
            "'heads' or 'ring': what processors exchange if they have parts of sequences; None for "
            "heads where their number is divisible.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for field in ("input_dim", "num_heads", "block_size"):
            check_whole(p.name, field, getattr(p, field), 1)
        for field in ("num_kv_heads", "dim_per_head", "window", "rotary_dim"):
            if getattr(p, field) is not None:
                check_whole(p.name, field, getattr(p, field), 1)
        check_whole(p.name, "relative_buckets", p.relative_buckets, 0)
        check_flags(p, ["use_bias", "use_rotary", "causal", "cross"])
        if p.use_out_bias is not None:
            check_flags(p, ["use_out_bias"])
        check_above_zero(p.name, "rotary_base", p.rotary_base)
        for field in ("score_scale", "score_cap"):
            if getattr(p, field) is not None:
                check_above_zero(p.name, field, getattr(p, field), ", or None")
        if p.split_length_by not in (None, *_WAYS):
            raise PipelineError(
                f"{p.name}: split_length_by is {p.split_length_by!r}; it may be "
                f"{', '.join(map(repr, _WAYS))} or None"
            )
        if not isinstance(p.rotary_scaling, RotaryScaling | None):
            raise PipelineError(
                f"{p.name}: rotary_scaling is {p.rotary_scaling!r}; give a RotaryScaling, or None"
            )
        if p.dim_per_head is None and p.input_dim % p.num_heads:
            raise PipelineError(
                f"{p.name}: input_dim {p.input_dim} is no multiple of num_heads {p.num_heads}; "
                "change one of them, or give dim_per_head"
            )
        if _kv_heads(p) and p.num_heads % _kv_heads(p):
            raise PipelineError(
                f"{p.name}: num_heads {p.num_heads} is no multiple of num_kv_heads "
                f"{p.num_kv_heads}; as many heads have to share each key"
            )
        if p.use_rotary and _rotary_dim(p) % 2:
            raise PipelineError(
                f"{p.name}: use_rotary turns pairs of elements, but heads have {_rotary_dim(p)}; "
                f"make {'rotary_dim' if p.rotary_dim else 'dim_per_head'} even"
            )
        if p.rotary_dim is not None and not (p.use_rotary and p.rotary_dim <= _head_dim(p)):
            raise PipelineError(
                f"{p.name}: rotary_dim is {p.rotary_dim}, use_rotary {p.use_rotary}, and a head "
                f"has {_head_dim(p)} elements; give one up to that with use_rotary, or None"
            )
        if p.relative_buckets and not (
            2 <= _buckets(p).of_side < 2 * p.relative_max_distance
            and (p.causal or p.relative_buckets % 2 == 0)
        ):
            raise PipelineError(
                f"{p.name}: relative_buckets is {p.relative_buckets} and relative_max_distance "
                f"{p.relative_max_distance}; give {'2' if p.causal else 'an even number, 4'} or "
                f"more, and a distance above {'half' if p.causal else 'a quarter'} of the number"
            )
        if p.cross and (p.causal or p.window or p.use_rotary or p.relative_buckets):
            raise PipelineError(
                f"{p.name}: cross is True, and tokens have no distance to those of a memory, but "
                f"causal is {p.causal}, window {p.window}, use_rotary {p.use_rotary} and "
                f"relative_buckets {p.relative_buckets}; set causal=False and leave out the others"
            )
        _check_layout(p, current_lowering())
        if p.norm_tpl is not None:
            for name in ("q_norm", "k_norm"):
                self.CreateChild(name, _head_norm(p))

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w_q`, `w_k`, `w_v`, `w_out`, their biases, and `relative_bias`."""
        embed, head_dim = f"embed:{p.input_dim}", f"head_dim:{_head_dim(p)}"
        heads = f"heads:{p.num_heads};{head_dim}"
        keys = f"{_kv_name(p)}:{_kv_heads(p) or p.num_heads};{head_dim}"
        first = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        last = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.num_heads * _head_dim(p)))
        zero = py_utils.WeightInit.Constant(0.0)
        weights: dict[str, Any] = {
            "w_q": (f"{embed};{heads}", first),
            "w_k": (f"{embed};{keys}", first),
            "w_v": (f"{embed};{keys}", first),
            "w_out": (f"{heads};{embed}", last),
        }
        if p.use_bias:
            weights |= {"b_q": (heads, zero), "b_k": (keys, zero), "b_v": (keys, zero)}
        if _has_out_bias(p):
            weights["b_out"] = (embed, zero)
        if p.relative_buckets:
            table = f"buckets:{p.relative_buckets};heads:{p.num_heads}"
            weights["relative_bias"] = (table, zero)
        return weights

    @property
    def takes_slices(self) -> bool:
        """True for causal attention: inside `past_scope` it continues earlier slices."""
        return self.params.causal

    def PastSpecs(self, rows: int, length: int) -> list[tf.TensorSpec]:
        """Returns keys, values and segments, as each processor has them."""
        p, lowering = self.params, current_lowering()
        axis = lowering.rules.axis(_kv_name(p))
        heads = (_kv_heads(p) or p.num_heads) // (1 if axis is None else lowering.mesh.size(axis))
        keys = tf.TensorSpec([rows, length, heads, _head_dim(p)], py_utils.FPropDtype(p))
        return [keys, keys, tf.TensorSpec([rows, length], tf.int32)]

    def dims(self) -> set[str]:
        """Returns the dims that rules may split; a memory has a length of its own."""
        return super().dims() | ({"memory_length"} if self.params.cross else set())

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of each matrix."""
        keys = f"{_kv_name(p)};head_dim"
        return {
            "w_q": ("embed", "heads;head_dim"),
            "w_k": ("embed", keys),
            "w_v": ("embed", keys),
            "w_out": ("heads;head_dim", "embed"),
        }

    def FProp(
        self,
        theta: Any,
        x: Any,
        segment_ids: Any = None,
        segment_pos: Any = None,
        paddings: Any = None,
        memory: Any = None,
        memory_segment_ids: Any = None,
        memory_paddings: Any = None,
    ) -> Tensor:
        """Computes the layer on `batch;length;embed`.

        Args:
            theta: weights.
            x: the tokens.
            segment_ids: `batch;length`, integers from 0 on; tokens see only their own segment, by
                default the row.
            segment_pos: `batch;length`, integers, the positions for rotations; by default those in
                the row.
            paddings: `batch;length`, 1 at positions without a token, and 0 elsewhere; with `cross`
                they change nothing.
            memory: `batch;memory_length;embed`, what tokens see with `cross`.
            memory_segment_ids: `batch;memory_length`, its segments, if tokens have segments.
            memory_paddings: `batch;memory_length`, its paddings.
        """
        p = self.params
        x = self.Named(x, "batch;length;embed")
        _check_layout(p, x.lowering)
        _check_memory(p, segment_ids, memory, memory_segment_ids, memory_paddings)
        cache, past = current_cache(), current_past()
        if not (p.causal or p.cross):
            if continues():
                raise PipelineError(
                    f"{p.name}: causal=False sees both sides, so cached rows cannot be continued; "
                    "set causal=True, or call it only with the first inputs of the rows"
                )
            cache = None
        renamed = whole_names(x.lowering.rules, "heads")
        rows = whole_dims("batch;length", renamed)
        if not p.cross:
            q, *sources = self._Projected(theta, "qkv", x, rows, renamed)
            rows_given = {
                "segments": segment_ids,
                "positions": segment_pos if p.use_rotary else None,
                "paddings": paddings,
            }
            if cache is not None:
                rows_given = {"places": cache.places}
        else:
            q, *sources = self._Projected(theta, "q", x, rows, renamed)
            if memory is not None:
                memory = self.Named(memory, [*_MEMORY, "embed"])
                sources = self._Projected(theta, "kv", memory, _MEMORY, {})
            rows_given = {"segments": segment_ids}
        given = {
            name: whole(self, value, "batch;length", renamed)
            for name, value in rows_given.items()
            if value is not None
        }
        of_memory = {"memory_segments": memory_segment_ids, "memory_paddings": memory_paddings}
        given |= {
            name: self.Named(value, _MEMORY)
            for name, value in of_memory.items()
            if value is not None
        }
        if p.relative_buckets:
            given["table"] = self.Weight(theta, "relative_bias")
        attended = self._Attend(q, sources, given, cache, past)
        operands = [attended, self.Weight(theta, "w_out")]
        product = ops.einsum(operands, [*rows, "embed"], split_names(renamed))
        product = self.Adapted(theta, "w_out", attended, product)
        return product + self.Weight(theta, "b_out") if _has_out_bias(p) else product

    def _Projected(
        self, theta: Any, names: str, x: Tensor, rows: Sequence[str], renamed: Mapping[str, str]
    ) -> list[Tensor]:
        """Returns some of the queries, keys and values of a sequence."""
        p = self.params
        weights = [self.Weight(theta, f"w_{name}") for name in names]
        found = products(x, weights, _projected_dims(p, names, rows), renamed)
        pairs = zip(names, found, strict=True)
        found = [self.Adapted(theta, f"w_{name}", x, product) for name, product in pairs]
        if p.use_bias:
            biases = [self.Weight(theta, f"b_{name}") for name in names]
            found = [a + b for a, b in zip(found, biases, strict=True)]
        if p.norm_tpl is None:
            return found
        norms = [(name, f"{name}_norm") for name in names]
        return [
            self.children[norm].FProp(theta[norm], value) if name != "v" else value
            for (name, norm), value in zip(norms, found, strict=True)
        ]

    def _Attend(
        self,
        q: Tensor,
        sources: list[Tensor],
        given: dict[str, Tensor],
        cache: KeyValueCache | None,
        past: Past | None,
    ) -> Tensor:
        """Attends with each processor's heads, on its device; with a cache also to its tokens.

        With a `past` it attends also to earlier slices.

        `sources` are keys and values; none if the cache has those of the memory.
        """
        p, lowering = self.params, q.lowering
        # Whether a processor with some of the heads has all keys.
        axis = lowering.rules.axis("heads")
        is_cut = axis is not None and lowering.rules.axis(_kv_name(p)) != axis
        # Values that are equal along an axis that splits another operand become varying there.
        axes = union_axes([q, *sources, *given.values()])
        varied = {name: tensor.vary(axes) for name, tensor in given.items()}
        for name in ("", "memory_"):
            paddings = varied.pop(f"{name}paddings", None)
            if paddings is not None:
                ids = varied.get(f"{name}segments")
                operands = [paddings] if ids is None else [paddings, ids]
                varied[f"{name}segments"] = lowering.map(_segments, *operands)
        q, *sources = (Tensor(lowering, x.vary(axes), x.shape) for x in (q, *sources))

        def turned(x: Any, places: Any = None) -> tf.Tensor:
            length = static_sizes(x)[1]
            places = first_position(length) + tf.range(length) if places is None else places
            return _turned(p, x, places)

        along = _length_axis(p, lowering)
        if along is not None and past is not None:
            raise LayoutError(
                f"{p.name}: the schedule cuts sequences into slices, and the rule 'length:{along}' "
                "splits them over an axis, of which attention does one alone; leave out the rule, "
                "or give a schedule without slices, such as 1f1b"
            )
        if along is not None and cache is None:
            if "table" in given and _exchanges_heads(p, lowering, along):
                # Each processor then has some heads of the table, not sums of all.
                varied["table"] = given["table"].vary([axis for axis in axes if axis != along])
            return self._AttendParts(along, q, sources, varied, str(axis) if is_cut else None)
        if cache is not None and p.cross:
            ids, packed = varied.get("memory_segments"), "segments" in varied
            # The empty one marks segments that are paddings alone.
            new_ids = [] if ids is None else [ids] if packed else [ids, ()]
            new = [*(x.slices for x in sources), *new_ids]
            keys, values, *kept_ids = cache.remember(self.path, new)
            if packed != (len(kept_ids) == 1):
                raise PipelineError(
                    f"{p.name}: of the first call of these rows and this one, only "
                    f"{'this' if packed else 'the first'} has segments; give segment_ids to all "
                    "calls or to none"
                )
            varied |= dict(zip(["memory_segments"], kept_ids, strict=False))
        elif cache is not None:
            places = Tensor(lowering, varied["places"], given["places"].shape)
            k, v = sources
            if p.use_rotary:
                q, k = (
                    Tensor(lowering, lowering.map(turned, x.slices, places.slices), x.shape)
                    for x in (q, k)
                )
            keys, values = (x.slices for x in cache.extend(self.path, k, v, places))
        elif past is not None:
            keys, values = (x.slices for x in sources)
            if p.use_rotary:
                of_slice = [varied["positions"]] if "positions" in varied else []
                q = Tensor(lowering, lowering.map(turned, q.slices, *of_slice), q.shape)
                keys = lowering.map(turned, keys, *of_slice)
            ids = [varied["segments"]] if "segments" in varied else []
            keys, values, *ids = past.extend(self.path, keys, values, *ids)
            varied |= dict(zip(["memory_segments"], ids, strict=False))
        else:
            keys, values = (x.slices for x in sources)
        operands = [q.slices, keys, values, *varied.values()]
        if is_cut:
            operands.append(lowering.coordinate(str(axis)))

        def local(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
            named = dict(zip(varied, rest, strict=False))
            if is_cut:
                heads, dim = static_sizes(q)[2], 2 if cache is None else 1
                k, v = (_keys_of(p, x, heads, rest[-1], dim) for x in (k, v))
            scale = tf.cast(p.score_scale or 1 / math.sqrt(_head_dim(p)), q.dtype)
            segments = named.get("segments")
            options: dict[str, Any] = _options(p) | {
                "table": named.get("table"),
                "key_segments": named.get("memory_segments"),
            }
            if cache is not None:
                del options["block_size"]
                return cached_attention(q * scale, k, v, named.get("places"), segments, **options)
            if past is not None:
                options["offset"] = first_position(static_sizes(q)[1])
            elif p.use_rotary:
                q, k = (turned(x, named.get("positions")) for x in (q, k))
            return block_attention(q * scale, k, v, segments, **options)

        length = static_sizes(keys[0])[1 if cache is None else 2]
        begin = past_length() if past is not None else 0
        flops = _attended_flops(p, q.layout.slice_shape, length, cache is not None, begin)
        with operation("attention", [q, *sources]):
            slices = lowering.map(local, *operands, flops=flops)
        return Tensor(lowering, slices, q.shape)

    def _AttendParts(
        self,
        along: str,
        q: Tensor,
        sources: list[Tensor],
        given: dict[str, Slices],
        heads_axis: str | None,
    ) -> Tensor:
        """Attends to sequences that are split over the axis `along`.

        Processors along `heads_axis` have some of the heads, and all keys.
        """
        p, lowering = self.params, q.lowering
        at = lowering.coordinate(along)
        places = given.get("positions", at)
        scale = tf.cast(p.score_scale or 1 / math.sqrt(_head_dim(p)), q.dtype)
        number = q.layout.slice_shape[2]

        def prepared(x: tf.Tensor, places: tf.Tensor, *heads_at: tf.Tensor) -> tf.Tensor:
            x = _keys_of(p, x, number, *heads_at, axis=2) if heads_at else x
            if not p.use_rotary:
                return x
            if "positions" not in given:
                places = places * static_sizes(x)[1] + tf.range(x.shape[1])
            return _turned(p, x, places)

        of_keys = [] if heads_axis is None else [lowering.coordinate(heads_axis)]
        k, v = (x.slices for x in sources)
        inputs = [
            lowering.map(lambda x, at: prepared(x * scale, at), q.slices, places),
            lowering.map(prepared, k, places, *of_keys),
            lowering.map(lambda x, *at: _keys_of(p, x, number, *at, axis=2), v, *of_keys)
            if of_keys
            else v,
        ]
        ids = {
            name: given[of]
            for name, of in (("segments", "segments"), ("key_segments", "memory_segments"))
            if of in given
        }
        table = [given["table"]] if "table" in given else []
        attend = self._AttendInRing
        if _exchanges_heads(p, lowering, along):
            attend = self._AttendForHeads
        return Tensor(lowering, attend(along, q, inputs, ids, table), q.shape)

    def _AttendForHeads(
        self,
        along: str,
        q: Tensor,
        inputs: Sequence[Slices],
        ids: Mapping[str, Slices],
        table: Sequence[Slices],
    ) -> Slices:
        """Attends to whole sequences with some heads of each processor."""
        p, lowering = self.params, q.lowering
        inputs = [lowering.all_to_all(x, along, split_dim=2, concat_dim=1) for x in inputs]
        ids = {name: lowering.all_gather(x, along, 1) for name, x in ids.items()}
        table = [lowering.slice_along(x, along, 1) for x in table]
        names = [*ids, *["table" for _ in table]]

        def local(*tensors: tf.Tensor) -> tf.Tensor:
            q, k, v, *rest = tensors
            named: dict[str, Any] = dict(zip(names, rest, strict=True))
            return block_attention(q, k, v, **named, **_options(p))

        sizes = static_sizes(inputs[0][0])
        flops = _attended_flops(p, sizes, static_sizes(inputs[1][0])[1], False)
        with operation("attention", [q]):
            slices = lowering.map(local, *inputs, *ids.values(), *table, flops=flops)
        return lowering.all_to_all(slices, along, split_dim=1, concat_dim=2)

    def _AttendInRing(
        self,
        along: str,
        q: Tensor,
        inputs: Sequence[Slices],
        ids: Mapping[str, Slices],
        table: Sequence[Slices],
    ) -> Slices:
        """Attends to keys that go round."""
        p, lowering = self.params, q.lowering
        queries, keys = (static_sizes(x[0]) for x in inputs[:2])
        ring = _ring(p, lowering, along, queries, keys[1])
        if ring.is_zigzag:
            inputs = [zigzag(lowering, along, x) for x in inputs]
            ids = {name: zigzag(lowering, along, x) for name, x in ids.items()}
        inputs = [*inputs, *table]
        slices = ring_attention(
            lowering, along, ring, inputs, **ids, cap=p.score_cap, buckets=_buckets(p)
        )
        with operation("attention", [q]):
            lowering.count([*inputs, *ids.values()], slices, _ring_flops(ring, queries))
        return zigzag(lowering, along, slices, back=True) if ring.is_zigzag else slices

    @classmethod
    def CountCosts(
        cls,
        p: Any,
        tally: Tally,
        x: Any,
        segment_ids: Any = None,
        segment_pos: Any = None,
        paddings: Any = None,
        memory: Any = None,
        memory_segment_ids: Any = None,
        memory_paddings: Any = None,
    ) -> Value:
        """Counts the matmuls of weights, and those of all pairs of blocks."""
        _check_layout(p, tally.lowering)
        _check_memory(p, segment_ids, memory, memory_segment_ids, memory_paddings)
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        renamed = whole_names(tally.lowering.rules, "heads")
        rows = whole_dims("batch;length", renamed)
        positions = segment_pos if p.use_rotary else None
        if p.cross:
            memory = tally.given(memory, [*_MEMORY, "embed"], py_utils.FPropDtype(p))
            (q,) = cls._CountProjected(p, tally, weights, "q", x, rows, renamed)
            k, v = cls._CountProjected(p, tally, weights, "kv", memory, _MEMORY, {})
            paddings = None
        else:
            q, k, v = cls._CountProjected(p, tally, weights, "qkv", x, rows, renamed)
        segment_ids, positions, paddings = (
            None if value is None else count_whole(tally, value, "batch;length", tf.int32, renamed)
            for value in (segment_ids, positions, paddings)
        )
        memory_segment_ids, memory_paddings = (
            None if value is None else tally.given(value, _MEMORY, tf.int32)
            for value in (memory_segment_ids, memory_paddings)
        )
        bias = [weights["relative_bias"]] if p.relative_buckets else []
        along = _length_axis(p, tally.lowering)
        if along is not None and _exchanges_heads(p, tally.lowering, along):
            met = tally.meet(q, k, v)
            for table in bias:
                tally.vary(table, [axis for axis in met if axis != along])
        else:
            tally.meet(q, k, v, *bias)
        if positions is not None:
            angles = Shape((*q.shape.select(*rows), Dim("angles", _rotary_dim(p) // 2)))
            tally.keep(*(tally.made(angles, q, tf.float32) for _ in ("sines", "cosines")))
        packed = (segment_ids, paddings), (memory_segment_ids, memory_paddings)
        if along is None:
            attended = cls._CountAttended(p, tally, [q, k, v, *bias], packed)
        else:
            attended = cls._CountParts(p, tally, along, [q, k, v, *bias], packed)
        operands = [attended, weights["w_out"]]
        result = tally.einsum(operands, [*rows, "embed"], names=split_names(renamed))
        result = cls.CountAdapted(p, tally, "w_out", attended, result)
        if _has_out_bias(p):
            tally.elementwise(result, weights["b_out"])
        return result

    @classmethod
    def _CountProjected(
        cls,
        p: Any,
        tally: Tally,
        weights: Mapping[str, Value],
        names: str,
        x: Value,
        rows: Sequence[str],
        renamed: Mapping[str, str],
    ) -> list[Value]:
        """Counts `_Projected`."""
        dims = _projected_dims(p, names, rows)
        found = tally.products(x, [weights[f"w_{name}"] for name in names], dims, renamed)
        pairs = zip(names, found, strict=True)
        found = [cls.CountAdapted(p, tally, f"w_{name}", x, each) for name, each in pairs]
        if p.use_bias:
            for name, product in zip(names, found, strict=True):
                tally.elementwise(product, weights[f"b_{name}"])
        if p.norm_tpl is None:
            return found
        return [
            cls.CountPart(p, _head_norm(p), tally, value) if name != "v" else value
            for name, value in zip(names, found, strict=True)
        ]

    @classmethod
    def _CountAttended(
        cls, p: Any, tally: Tally, operands: Sequence[Value], packed: Sequence[Any]
    ) -> Value:
        """Counts what `block_attention` keeps: its inputs, its output, and a sum for each query.

        `operands` are queries, keys, values and biases; `packed` segments and paddings, or None,
        of tokens and of the memory.
        """
        q, k, v, *_ = operands
        heads = q.shape.dims[2]
        cuts = [Blocks.of(x.shape.dims[1].size, p.block_size) for x in (q, k)]
        # The last block may extend beyond the sequence.
        padded = [
            Shape((x.shape["batch"], Dim(x.shape.names[1], cut.number * cut.size)))
            for x, cut in zip((q, k), cuts, strict=True)
        ]
        attended = tally.made(q.shape, q)
        begin, length = past_length(), tally.slice_sizes(k)[1]
        flops = _attended_flops(p, tally.slice_sizes(q), begin + length, False, begin)
        tally.work("attention", operands, attended, flops)
        sums = tally.made(Shape((*padded[0], heads)), q, tf.float32)
        tally.keep(q, k, v, attended, sums)
        for (ids, paddings), shape in zip(packed, padded, strict=True):
            if paddings is None and cuts[0].number == cuts[1].number == 1:
                # One block is no copy, and layers share it.
                tally.keep(*[] if ids is None else [ids])
            elif ids is not None or paddings is not None:
                tally.keep(tally.made(shape, q, tf.int32))
        return attended

    @classmethod
    def _CountParts(
        cls, p: Any, tally: Tally, along: str, operands: Sequence[Value], packed: Sequence[Any]
    ) -> Value:
        """Counts `_AttendParts`; arguments are those of `_CountAttended`."""
        q, k, v, *table = operands
        mesh, rules, counting = tally.lowering.mesh, tally.lowering.rules, tally.counting
        attended = tally.made(q.shape, q)
        batch, length, heads = q.shape.dims[:3]
        queries, keys = (list(tally.slice_sizes(x)) for x in (q, k))
        # Of all keys, a processor takes those of its heads.
        axis = rules.axis("heads")
        if axis is not None and rules.axis(_kv_name(p)) != axis:
            keys[2] = max(1, queries[2] * p.num_kv_heads // p.num_heads)
            taken = Dim("heads", keys[2] * mesh.size(axis))
            k, v = (tally.made(x.shape.replace("kv_heads", taken), x) for x in (k, v))
        inputs = [tally.slice_of(sizes, q.dtype) for sizes in (queries, keys, keys)]
        has_ids = [any(value is not None for value in pair) for pair in packed]
        ids = [
            tally.slice_of(sizes[:2], tf.int32)
            for sizes, has in zip((queries, keys), has_ids, strict=True)
            if has
        ]
        tally.keep(q, k, v, attended)
        if _exchanges_heads(p, tally.lowering, along):
            inputs = [counting.all_to_all(x, along, split_dim=2, concat_dim=1) for x in inputs]
            sizes, of_keys = (static_sizes(x[0]) for x in inputs[:2])
            flops = _attended_flops(p, sizes, of_keys[1], False)
            counting.all_to_all(inputs[0], along, split_dim=1, concat_dim=2)
            for x in ids:
                counting.all_gather(x, along, 1)
            for x in table:
                counting.slice_along(tally.slices(x), along, 1)
            cuts = [Blocks.of(x[1], p.block_size) for x in (sizes, of_keys)]
            for cut, has in zip(cuts, has_ids, strict=True):
                if has:
                    whole_ids = Shape((batch, Dim(WHOLE, cut.number * cut.size)))
                    tally.keep(tally.made(whole_ids, q, tf.int32))
            tokens = -(-cuts[0].number * cuts[0].size // mesh.size(along)) * mesh.size(along)
            sums = Shape((batch, Dim("length", tokens), heads))
            tally.keep(tally.made(sums, q, tf.float32), tally.made(q.shape, q))
        else:
            ring = _ring(p, tally.lowering, along, queries, keys[1])
            flops = _ring_flops(ring, queries)
            tally.keep(tally.made(Shape((batch, length, heads)), q, tf.float32))
            if ring.is_zigzag:
                count_zigzag(counting, along, [*inputs, *ids, inputs[0]])
                tally.keep(tally.made(q.shape, q))
            ring.count(counting, along, inputs[1:], ids[-1:])
            for (given, paddings), x, has in zip(packed, (q, k), has_ids, strict=True):
                if has:
                    made = ring.is_zigzag or paddings is not None
                    tally.keep(tally.made(Shape(x.shape.dims[:2]), q, tf.int32) if made else given)
        tally.work("attention", operands, attended, flops)
        return attended


def _attended_flops(
    p: Any, queries: Sequence[int], length: int, is_cached: bool, begin: int = 0
) -> int:
    """Returns the flops of scores and means, given sizes of queries and the number of keys.

    The first query is `begin` positions after the first key.
    """
    batch, number, heads, head_dim = queries
    pairs = number * length
    if not is_cached:
        cuts = [Blocks.of(size, p.block_size) for size in (number, length)]
        # A cache of decoding is not cut, and its unseen tokens are computed too.
        met = Sight(p.causal, p.window).pairs(cuts[0], cuts[1], begin)
        pairs = len(met) * cuts[0].size * cuts[1].size
    return 2 * product_flops([batch, heads, pairs, head_dim])


# The dims of a memory, beside those of a token.
_MEMORY = ["batch", "memory_length"]


def _check_memory(p: Any, segment_ids: Any, memory: Any, *of_memory: Any) -> None:
    """Checks that there is a memory if the layer sees one, with segments if tokens have them."""
    if not p.cross and any(value is not None for value in (memory, *of_memory)):
        raise PipelineError(f"{p.name} was given a memory, but has cross=False; set cross=True")
    of_memory_alone = any(value is not None for value in of_memory)
    if p.cross and memory is None and (of_memory_alone or current_cache() is None):
        raise PipelineError(f"{p.name} sees a memory (cross=True), but was given none; give one")
    if p.cross and memory is not None and (segment_ids is None) != (of_memory[0] is None):
        these, those = "tokens", "the memory"
        these, those = (those, these) if segment_ids is None else (these, those)
        raise PipelineError(
            f"{p.name}: {these} were given segments, {those} none; give them to both or to none"
        )


def _projected_dims(p: Any, names: str, rows: Sequence[str]) -> list[list[str]]:
    """Returns the dims of queries, keys and values."""
    return [[*rows, "heads" if name == "q" else _kv_name(p), "head_dim"] for name in names]


def _buckets(p: Any) -> Buckets:
    return Buckets(p.relative_buckets, p.relative_max_distance, both_sides=not p.causal)


# What processors may exchange if they have parts of sequences.
_WAYS = ("heads", "ring")


def _length_axis(p: Any, lowering: Lowering) -> str | None:
    """Returns the axis over which queries, and keys, are split along the sequence, if any."""
    axis = lowering.rules.axis("length")
    if axis is None or lowering.mesh.size(axis) == 1 or whole_names(lowering.rules, "heads"):
        return None
    # Of a memory that is not split, each processor has all keys.
    return axis if not p.cross or lowering.rules.axis("memory_length") == axis else None


def _exchanges_heads(p: Any, lowering: Lowering, along: str) -> bool:
    """Returns whether processors that have parts of sequences exchange them for heads."""
    mesh, rules = lowering.mesh, lowering.rules

    def of_one(name: str, number: int) -> int:
        axis = rules.axis(name)
        return number // (1 if axis is None else mesh.size(axis))

    heads = of_one("heads", p.num_heads)
    # A processor may have all keys, but computes with those of its heads.
    shared = p.num_heads // (_kv_heads(p) or p.num_heads)
    keys = min(max(1, heads // shared), of_one(_kv_name(p), p.num_heads // shared))
    divides = not (heads % mesh.size(along) or keys % mesh.size(along))
    if p.split_length_by == "heads" and not divides:
        raise LayoutError(
            f"{p.name}: split_length_by is 'heads', but a processor has {heads} heads and {keys} "
            f"of keys, which axis {along!r} of mesh '{mesh}' does not divide; set it to 'ring', or "
            "change the axis"
        )
    return divides and p.split_length_by != "ring"


def _ring(p: Any, lowering: Lowering, along: str, queries: Sequence[int], keys: int) -> Ring:
    """Returns the ring of an attention, given the sizes of one processor's queries and keys."""
    sight, biased = Sight(p.causal, p.window), bool(p.relative_buckets)
    return Ring(lowering.mesh.size(along), queries[1], keys, sight, biased, p.block_size)


def _ring_flops(ring: Ring, queries: Sequence[int]) -> int:
    batch, _, heads, head_dim = queries
    return 2 * product_flops([batch, heads, ring.pairs, head_dim])


def _options(p: Any) -> dict[str, Any]:
    """Returns the options of `block_attention` that are the layer's own."""
    return {
        "block_size": p.block_size,
        "buckets": _buckets(p),
        "sight": Sight(p.causal, p.window),
        "cap": p.score_cap,
    }


def _turned(p: Any, x: Any, places: tf.Tensor) -> tf.Tensor:
    """Rotates queries or keys by their positions."""
    first = rotated(x[..., : p.rotary_dim], places, p.rotary_base, p.rotary_scaling)
    rest = static_sizes(x)[-1] - static_sizes(first)[-1]
    return tf.concat([first, x[..., -rest:]], -1) if rest else first


def _check_layout(p: Any, lowering: Lowering) -> None:
    """Checks that each processor has the keys of its heads, and that sequences can be split."""
    rules = lowering.rules
    along = _length_axis(p, lowering)
    needed, ways = "attention needs all on each processor", "'heads' or 'batch'"
    dims = ["head_dim"] if p.cross and along else ["memory_length", "head_dim"]
    check_whole_dims(p, lowering, dims, ["heads"], needed, ways)
    if along is not None:
        _exchanges_heads(p, lowering, along)
    heads_axis, kv_axis = rules.axis("heads"), rules.axis("kv_heads")
    if not _kv_heads(p) or heads_axis == kv_axis:
        return
    if kv_axis is not None:
        raise LayoutError(
            f"{p.name}: the rule 'kv_heads:{kv_axis}' splits keys, but 'heads' "
            + (f"is split over {heads_axis!r}" if heads_axis else "has no rule")
            + f"; heads have to lie with their keys: write 'heads:{kv_axis};kv_heads:{kv_axis}'"
        )
    heads = p.num_heads // lowering.mesh.size(str(heads_axis))
    shared = p.num_heads // p.num_kv_heads
    if heads and heads % shared and shared % heads:
        raise LayoutError(
            f"{p.name}: axis {heads_axis!r} of mesh '{lowering.mesh}' leaves a processor "
            f"{heads} heads, of which {shared} share a key, so groups are cut unevenly; change "
            f"num_kv_heads {p.num_kv_heads} or the size of the axis so that one of both "
            "numbers divides the other"
        )


def _kv_heads(p: Any) -> int | None:
    """Returns the number of groups of heads, or None if each head has its own keys."""
    return None if p.num_kv_heads == p.num_heads else p.num_kv_heads


def _kv_name(p: Any) -> str:
    return "kv_heads" if _kv_heads(p) else "heads"


def _head_dim(p: Any) -> int:
    return p.dim_per_head or p.input_dim // p.num_heads


def _rotary_dim(p: Any) -> int:
    return p.rotary_dim or _head_dim(p)


def _has_out_bias(p: Any) -> bool:
    return p.use_bias if p.use_out_bias is None else p.use_out_bias


def _head_norm(p: Any) -> Any:
    """Returns the params of the norm of queries, or of keys."""
    return p.norm_tpl.Copy().Set(input_dim=_head_dim(p), dim="head_dim")


def _keys_of(p: Any, keys: tf.Tensor, heads: int, at: tf.Tensor, axis: int) -> tf.Tensor:
    """Selects the keys of one processor's heads: the heads `[at * heads, (at + 1) * heads)`."""
    shared = p.num_heads // p.num_kv_heads
    number = max(1, heads // shared)
    return tf.gather(keys, at * heads // shared + tf.range(number), axis=axis)


def _segments(paddings: tf.Tensor, ids: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the segments, with padding as a separate one."""
    ids = tf.zeros(paddings.shape, tf.int32) if ids is None else ids
    return tf.where(paddings > 0.5, tf.cast(-1, ids.dtype), ids)
