"""Decoding with a stack of alike layers as one program, group by group around a ring."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import static_sizes
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.named import KeyValueCache, cache_scope, lowering_scope
from pipemesh.layers.named.cache import SlottedCache, overwritten
from pipemesh.layers.named.scope import exported
from pipemesh.layers.pipeline.simd_stack import SimdStack
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.recurrent.circular.ring import Beat, Ring
from pipemesh.recurrent.circular.tick_loop import Leaves

# The cache of a group: for each layer of a stage, by the path of attention, keys and values,
# `[rounds, rows, heads, length, head_dim]` on each processor.
Kept = tuple[dict[str, tuple[Slices, Slices]], ...]
# The number of arguments, and the shapes of travelling and of side arguments, by number.
_Named = tuple[int, dict[int, Shape], dict[int, Shape]]


@dataclasses.dataclass(frozen=True)
class _Passed:
    """The tensors that go from layer to layer, for groups of one size.

    Attributes:
        number: the number of arguments.
        travels: the shapes of floating arguments, by number.
        along: the shapes of the others, then of the positions of tokens.
        x: a `tf.TensorSpec` of the travelling arguments for each processor.
        sides: the same for the side arguments.
        kept: the same for the cache of a layer.
    """

    number: int
    travels: Mapping[int, Shape]
    along: Mapping[int, Shape]
    x: Any
    sides: Any
    kept: Any


class SimdRing:
    """The stages of a `SimdStack`, called with some tokens of each of several groups of rows.

    Make and call it while a graph is built, under the cluster of the stack.

    Args:
        simd: the stack as one program.
        theta: its weights.
        devices: one for each processor of its mesh.
        length: the number of positions in a row.
        args: returns the arguments of the stack for `[rows, tokens]` ids and their positions.

    Attributes:
        lowering: the lowering of the whole mesh.
        rounds: the number of stages per core.
        layers: the number of alike layers per stage.
    """

    def __init__(
        self,
        simd: SimdStack,
        theta: Any,
        devices: Sequence[str],
        length: int,
        args: Callable[[tf.Tensor, tf.Tensor], Any],
    ) -> None:
        self._simd, self._length, self._args = simd, length, args
        # Tokens come one by one, so no rule splits `length`.
        rules = tuple(rule for rule in simd.rules.rules if rule[0] != "length")
        self.lowering = PlacementLowering(simd.pipeline.mesh, LayoutRules(rules), devices)
        self._first = self.lowering.devices[0]
        self.rounds = simd.pipeline.num_virtual_stages
        self.layers = simd.pipeline.layers_per_stage
        with tf.device(self._first):
            self._theta = simd.computed_theta(theta)
            self._weights = simd.weights(self.lowering, self._theta)
            self._own = {
                path: self._by_layer(weight)
                for path, weight in simd.own_weights(self._weights).items()
            }

    def run(
        self,
        turns: Any,
        tokens: Callable[[tf.Tensor, Any], tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
        chosen: Callable[[Beat, tf.Tensor, tf.Tensor, Any], tuple[Any, tf.Tensor | None]],
        kept: Sequence[Kept] | None,
        groups: int,
        sizes: tuple[int, int],
        state: Any,
    ) -> tuple[list[Kept], Any]:
        """Sends all groups through the stages, and returns the cache of each group and the state.

        Args:
            turns: int32 scalar, the number of turns.
            tokens: takes the number of a group and the state; returns its ids and positions,
                `[rows, tokens]` int32, and the index of the token that needs logits, `[rows]`
                int32.
            chosen: takes the group behind the last core, whether it passed its last stage, the
                logits, `[rows, vocab]`, and the state. It returns the state, and for each row the
                row that it continues, or None if rows continue themselves.
            kept: the cache of each group; None for empty caches.
            groups: the number of groups.
            sizes: the rows of a group, and the tokens at a time.
            state: nested tensors of the caller.
        """
        passed = self._passed(*sizes)
        each = self.lowering.raw_map
        ring = Ring(self.lowering, groups, self.rounds)

        def enter(beat: Beat, enters: tf.Tensor, all_: Any) -> tuple[Leaves, Any]:
            sides, kept, state = all_
            x, new = self._enter(*tokens(beat.group, state)[:2])[:2]

            def put(slots: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
                value = tf.where(enters, value, slots[beat.group])
                return tf.tensor_scatter_nd_update(slots, [[beat.group]], [value])

            return x, (tuple(map(functools.partial(each, put), sides, new)), kept, state)

        def stage(beat: Beat, x: Leaves, all_: Any) -> tuple[Leaves, Any]:
            sides, kept, state = all_
            own = [each(lambda slots, group: slots[group], part, beat.group) for part in sides]
            x, kept = self._stage(passed, beat, x, own, kept)
            return x, (sides, kept, state)

        def leave(beat: Beat, leaves: tf.Tensor, y: Leaves, all_: Any) -> Any:
            sides, kept, state = all_
            own = [each(lambda slots: slots[beat.group], part) for part in sides]
            logits = self._leave(passed, y, own, tokens(beat.group, state)[2])
            state, parents = chosen(beat, leaves, logits, state)
            if parents is not None:
                kept = self._follow(kept, beat.group, leaves, parents)
            return sides, kept, state

        if kept is None:
            remembered = self._zeros((passed.kept,) * self.layers, groups * self.rounds)
        else:
            remembered = self._joined(kept)
        begin = self._zeros(passed.sides, groups), remembered, state
        _, remembered, state = ring.run(turns, enter, stage, leave, begin, self._zeros(passed.x))
        found = [
            self._map(
                lambda slots, _, g=g: slots[g * self.rounds : (g + 1) * self.rounds], remembered
            )
            for g in range(groups)
        ]
        return found, state

    def followed(self, kept: Kept, parents: tf.Tensor) -> Kept:
        """Returns the cache of rows that continue other rows of a group.

        `parents` is `[new rows]` int32, the row that each continues. Each processor must have
        equally many rows before and after, and no row may continue a row of another processor.
        """
        near = self._near(kept, parents)
        return self._map(lambda slots, i: tf.gather(slots, near[i], axis=1), kept)

    def merged(self, new: tf.Tensor, kept: Kept, before: Kept) -> Kept:
        """Takes the rows that `new` (`[rows]`, bool) selects from `kept`, the others from
        `before`.
        """
        old = iter(tf.nest.flatten(before))
        is_new = [tf.reshape(part, [1, -1, 1, 1, 1]) for part in self._rows_of(new)]
        return self._map(lambda slots, i: tf.where(is_new[i], slots, next(old)), kept)

    def _enter(self, ids: tf.Tensor, places: tf.Tensor) -> tuple[Leaves, Leaves, _Named]:
        """Returns the inputs of the first stage for a group: travelling and side arguments."""
        with (
            tf.device(self._first),
            whole_batch_randomness(),
            lowering_scope(self.lowering),
            cache_scope(KeyValueCache(self._length, places)),
        ):
            args = self._simd.before(self._theta, to_tuple(self._args(ids, places)))
            args = self._simd.call_first(self._weights, args, self._theta)
            named = self._simd.named_args(self.lowering, args)
        rows, number = static_sizes(places)
        # Attention takes the positions from the cache.
        named[len(args)] = ops.import_tensor(
            self.lowering, places, Shape.of(batch=rows, length=number)
        )
        travels = {i: arg for i, arg in named.items() if arg.dtype.is_floating}
        along = {i: arg for i, arg in named.items() if i not in travels}
        shapes = [{i: arg.shape for i, arg in of.items()} for of in (travels, along)]
        return (
            tuple(arg.slices for arg in travels.values()),
            tuple(arg.slices for arg in along.values()),
            (len(args), shapes[0], shapes[1]),
        )

    def _given(self, passed: _Passed, x: Leaves, sides: Sequence[Slices]) -> list[Any]:
        """Returns the arguments of a layer, then the positions of tokens."""
        given: list[Any] = [None] * (passed.number + 1)
        for shapes, leaves in ((passed.travels, x), (passed.along, sides)):
            for (i, shape), slices in zip(shapes.items(), leaves, strict=True):
                given[i] = Tensor(self.lowering, slices, shape)
        return given

    def _stage(
        self, passed: _Passed, beat: Beat, x: Leaves, sides: Sequence[Slices], kept: Kept
    ) -> tuple[Leaves, Kept]:
        each = self.lowering.raw_map
        slot = each(lambda g, r: g * self.rounds + r, beat.group, beat.round)
        after = []
        for j, own in enumerate(kept):
            *args, places = self._given(passed, x, sides)
            cache = SlottedCache(self._length, places, own, slot, beat.busy)
            x = self._layer(passed, self._chosen(j, beat.round), args, cache)
            after.append(cache.kept)
        return x, tuple(after)

    def _layer(
        self, passed: _Passed, weights: dict[str, Tensor], args: list[Any], cache: KeyValueCache
    ) -> Leaves:
        with (
            whole_batch_randomness(),
            lowering_scope(self.lowering),
            py_utils.RemoveAssertContext(remove=True),
            cache_scope(cache),
        ):
            outputs = self._simd.call_alike(weights, args)
        return tuple(outputs[i].slices for i in passed.travels)

    def _leave(
        self, passed: _Passed, y: Leaves, sides: Sequence[Slices], last: tf.Tensor
    ) -> tf.Tensor:
        """Returns the logits of the next tokens, on the first device."""
        *args, places = self._given(passed, y, sides)
        with (
            tf.device(self._first),
            whole_batch_randomness(),
            lowering_scope(self.lowering),
            cache_scope(KeyValueCache(self._length, places, last=last)),
        ):
            found = self._simd.call_last(self._weights, tuple(args), self._theta)
            return exported(found)

    def _follow(self, kept: Kept, group: tf.Tensor, leaves: tf.Tensor, parents: tf.Tensor) -> Kept:
        """Returns the cache of all groups after the rows of one continue other rows."""
        near = self._near(kept, parents)

        def follow(slots: tf.Tensor, i: int) -> tf.Tensor:
            sizes = static_sizes(slots)
            by_group = tf.reshape(slots, [-1, self.rounds, *sizes[1:]])
            own = by_group[group]
            own = tf.where(leaves, tf.gather(own, near[i], axis=1), own)
            return tf.reshape(overwritten(by_group, group[None], own[None]), sizes)

        return self._map(follow, kept)

    def _near(self, kept: Kept, parents: tf.Tensor) -> Slices:
        """Returns the local indices of parent rows on each processor."""
        axis = self.lowering.rules.axis("batch")
        parts = self._rows_of(parents)
        if axis is None or self.lowering.mesh.size(axis) == 1:
            return parts
        rows = tf.nest.flatten(kept)[0].shape[1]
        return self.lowering.raw_map(
            lambda part, at: part - at * rows, parts, self.lowering.coordinate(axis)
        )

    def _rows_of(self, values: tf.Tensor) -> Slices:
        """Returns the slice of `[rows]` for the rows in each processor's cache."""
        (rows,) = static_sizes(values)
        return ops.import_tensor(self.lowering, values, Shape.of(batch=rows)).slices

    def _map(self, function: Callable[[tf.Tensor, int], tf.Tensor], kept: Kept) -> Kept:
        """Applies a function to each slice and the number of its processor, on its device."""
        found: list[tf.Tensor] = []
        for i, part in enumerate(tf.nest.flatten(kept)):
            processor = i % self.lowering.num_slices
            with tf.device(self.lowering.devices[processor]):
                found.append(function(part, processor))
        return tf.nest.pack_sequence_as(kept, found)

    def _joined(self, kept: Sequence[Kept]) -> Kept:
        """Joins the caches of all groups into a copy, which the loop overwrites."""
        others = iter(zip(*map(tf.nest.flatten, kept), strict=True))

        def join(part: tf.Tensor, _: int) -> tf.Tensor:
            parts = next(others)
            return tf.raw_ops.DeepCopy(x=part) if len(kept) == 1 else tf.concat(parts, 0)

        return self._map(join, kept[0])

    def _zeros(self, specs: Any, slots: int | None = None) -> Any:
        """Returns zeros on each processor, with a dim of `slots` if given."""
        front = [] if slots is None else [slots]
        # One op for each: TensorFlow merges equal constants, and overwriting one would change all.
        return self._map(
            lambda spec, _: tf.raw_ops.Empty(
                shape=[*front, *spec.shape], dtype=spec.dtype, init=True
            ),
            specs,
        )

    def _chosen(self, layer: int, rounds: Slices) -> dict[str, Tensor]:
        """Returns the weights of one layer of each processor's current stage."""
        if self.rounds == 1:
            return {path: parts[layer] for path, parts in self._own.items()}
        each, found = self.lowering.raw_map, {}
        for path, parts in self._own.items():
            tensor = parts[layer]
            slices = each(lambda w, r: w[r], tensor.slices, rounds)
            found[path] = Tensor(self.lowering, slices, Shape(tensor.shape.dims[1:]))
        return found

    def _by_layer(self, weight: Tensor) -> list[Tensor]:
        """Splits weights by layer of a stage, with a dim for several rounds."""
        each, found = self.lowering.raw_map, []
        rounds, _, _, *dims = weight.shape.dims
        for j in range(self.layers):
            part = each(lambda w, j=j: w[:, 0, j], weight.slices)
            if self.rounds == 1:
                part = each(lambda w: w[0], part)
            shape = Shape((rounds, *dims) if self.rounds > 1 else tuple(dims))
            found.append(Tensor(self.lowering, part, shape))
        return found

    def _passed(self, rows: int, number: int) -> _Passed:
        """Calls a layer once to find the tensors that go from layer to layer."""
        found: list[_Passed] = []

        def once() -> None:
            ids = tf.zeros([rows, number], tf.int32)
            x, sides, (count, travels, along) = self._enter(ids, ids)
            passed = _Passed(count, travels, along, _specs(x), _specs(sides), {})
            *args, places = self._given(passed, x, sides)
            cache = KeyValueCache(self._length, places)
            weights = self._chosen(0, self.lowering.raw_map(lambda: tf.constant(0)))
            self._layer(passed, weights, args, cache)
            found.append(dataclasses.replace(passed, kept=_specs(cache.kept)))

        tf.function(once, autograph=False).get_concrete_function()
        return found[0]


def _specs(tensors: Any) -> Any:
    return tf.nest.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), tensors)
