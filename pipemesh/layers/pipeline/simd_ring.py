"""Decoding with a stack of alike layers as one program, group by group around a ring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.operations import copied, overwritten, zeros
from pipemesh.backend.static_shape import static_sizes
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.named import KeyValueCache, cache_scope, lowering_scope
from pipemesh.layers.named.cache import SlottedCache
from pipemesh.layers.named.scope import exported
from pipemesh.layers.pipeline.simd_stack import LayerArguments, SimdStack
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.recurrent.circular.simd_pipeline import StackedWeight
from pipemesh.recurrent.circular.tick_loop import Leaves, RingTicks, Tick, TickLoop, put

# The cache of a group: for each layer of a stage, by the path of attention, keys and values,
# `[rounds, rows, heads, length, head_dim]` on each processor.
Kept = tuple[dict[str, tuple[Slices, Slices]], ...]


class _Passed(NamedTuple):
    """The tensors that go from layer to layer, for groups of one size."""

    arguments: LayerArguments  # the last one that goes along is the positions of tokens
    # For each processor a `tf.TensorSpec` of travelling arguments, of those that go along, and of
    # the cache of a layer.
    x: Any
    sides: Any
    kept: Any


class SimdRing:
    """The stages of a `SimdStack`, called with some tokens of each of several groups of rows.

    Make and call it while a graph is built, under the cluster of the stack. `devices` has one for
    each processor of the mesh, `length` is the number of positions in a row, and `args` returns the
    arguments of the stack for `[rows, tokens]` ids and their positions.
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
            # By path the weight of all layers, and the shape of that of one layer.
            self._stacked = {
                path: (StackedWeight(self.lowering, weight.slices), Shape(weight.shape.dims[3:]))
                for path, weight in simd.own_weights(self._weights).items()
            }

    def run(
        self,
        turns: Any,
        tokens: Callable[[tf.Tensor, Any], tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
        chosen: Callable[[Tick, tf.Tensor, tf.Tensor, Any], tuple[Any, tf.Tensor | None]],
        kept: Sequence[Kept] | None,
        groups: int,
        sizes: tuple[int, int],
        state: Any,
    ) -> tuple[list[Kept], Any]:
        """Sends all groups through the stages, and returns the cache of each group and the state.

        `sizes` are the rows of a group and the tokens at a time; `kept` is None for empty caches.
        """
        # `tokens` takes a group and the state, and returns its ids and positions, `[rows, tokens]`
        # int32, and the index of the token that needs logits, `[rows]` int32. `chosen` takes the
        # work of the last core, whether it was the last stage, the logits, `[rows, vocab]`, and the
        # state. It returns the state, and for each row the row that it continues, or None.
        passed = self._passed(*sizes)
        raw_map = self.lowering.raw_map
        timetable = RingTicks(self.lowering.mesh.num_stages, groups, self.rounds, turns)

        def enter(first: Tick, all_: Any) -> tuple[Leaves, Any]:
            sides, kept, state = all_
            group, enters = first.microbatch, first.busy & tf.equal(first.round, 0)
            x, new, _ = self._enter(*tokens(group, state)[:2])
            sides = tuple(
                raw_map(lambda slots, value: put(slots, group, value, enters), *each)
                for each in zip(sides, new, strict=True)
            )
            return x, (sides, kept, state)

        def stage(now: Tick, x: Leaves, all_: Any) -> tuple[Leaves, Any]:
            sides, kept, state = all_
            of_group = [raw_map(lambda slots, g: slots[g], part, now.microbatch) for part in sides]
            slot = raw_map(lambda g, r: g * self.rounds + r, now.microbatch, now.round)
            after = []
            for j, of_layer in enumerate(kept):
                *args, places = self._joined_args(passed, x, of_group)
                cache = SlottedCache(self._length, places, of_layer, slot, now.busy)
                x = self._layer(passed, self._layer_weights(j, now.round), args, cache)
                after.append(cache.kept)
            return x, (sides, tuple(after), state)

        def leave(last: Tick, y: Leaves, all_: Any) -> Any:
            sides, kept, state = all_
            group, leaves = last.microbatch, last.busy & tf.equal(last.round, self.rounds - 1)
            of_group = [raw_map(lambda slots: slots[group], part) for part in sides]
            logits = self._leave(passed, y, of_group, tokens(group, state)[2])
            state, parents = chosen(last, leaves, logits, state)
            if parents is not None:
                kept = self._follow(kept, group, leaves, parents)
            return sides, kept, state

        if kept is None:
            remembered = self._zeros((passed.kept,) * self.layers, groups * self.rounds)
        elif len(kept) == 1:
            # The loop overwrites it.
            remembered = self._map(lambda _, slots: copied(slots), *kept)
        else:
            remembered = self._map(lambda _, *slots: tf.concat(slots, 0), *kept)
        # Returned tensors wait in slots until their group is due at the first core.
        slots = () if self.rounds == 1 else self._zeros(passed.x, groups)
        _, (_, remembered, state) = TickLoop(self.lowering, timetable).run(
            stage,
            (self._zeros(passed.sides, groups), remembered, state),
            self._zeros(passed.x),
            slots,
            enter,
            leave,
        )
        of_groups = [slice(g * self.rounds, (g + 1) * self.rounds) for g in range(groups)]
        return [self._map(lambda _, slots, of=of: slots[of], remembered) for of in of_groups], state

    def followed(self, kept: Kept, parents: tf.Tensor) -> Kept:
        """Returns the cache of rows that continue the rows `parents`, `[new rows]` int32."""
        # Each processor has equally many rows before and after, and no row continues a row of
        # another processor.
        near = self._near(kept, parents)
        return self._map(lambda i, slots: tf.gather(slots, near[i], axis=1), kept)

    def merged(self, new: tf.Tensor, kept: Kept, before: Kept) -> Kept:
        """Returns the rows of `kept` where `new`, `[rows]`, is true, else those of `before`."""
        is_new = [tf.reshape(part, [1, -1, 1, 1, 1]) for part in self._rows_of(new)]
        return self._map(lambda i, slots, old: tf.where(is_new[i], slots, old), kept, before)

    @contextlib.contextmanager
    def _calling(self, cache: KeyValueCache) -> Iterator[None]:
        """Enters the scopes in which layers are called with a cache."""
        with whole_batch_randomness(), lowering_scope(self.lowering), cache_scope(cache):
            yield

    def _enter(self, ids: tf.Tensor, places: tf.Tensor) -> tuple[Leaves, Leaves, LayerArguments]:
        """Returns the inputs of the first stage for a group: travelling and side arguments."""
        with tf.device(self._first), self._calling(KeyValueCache(self._length, places)):
            simd = self._simd
            args = simd.run_before(self._theta, to_tuple(self._args(ids, places)))
            args = to_tuple(simd.call_end(simd.first, self._weights, args, self._theta))
            named = simd.named_args(self.lowering, args)
        rows, number = static_sizes(places)
        # Attention takes the positions from the cache.
        named[len(args)] = ops.import_tensor(
            self.lowering, places, Shape.of(batch=rows, length=number)
        )
        arguments = LayerArguments(len(args) + 1, named)
        travels, along = (
            tuple(named[i].slices for i in numbers)
            for numbers in (arguments.travels, arguments.along)
        )
        return travels, along, arguments

    def _joined_args(self, passed: _Passed, x: Leaves, sides: Sequence[Slices]) -> list[Any]:
        """Returns the arguments of a layer, then the positions of tokens."""
        pairs = zip((*x, *sides), passed.arguments.shapes, strict=True)
        return passed.arguments.join(Tensor(self.lowering, *pair) for pair in pairs)

    def _layer(
        self, passed: _Passed, weights: dict[str, Tensor], args: list[Any], cache: KeyValueCache
    ) -> Leaves:
        with self._calling(cache), py_utils.RemoveAssertContext(remove=True):
            outputs = self._simd.call_alike(weights, args)
        return tuple(outputs[i].slices for i in passed.arguments.travels)

    def _leave(
        self, passed: _Passed, y: Leaves, sides: Sequence[Slices], last: tf.Tensor
    ) -> tf.Tensor:
        """Returns the logits of the next tokens, on the first device."""
        *args, places = self._joined_args(passed, y, sides)
        cache, simd = KeyValueCache(self._length, places, last=last), self._simd
        with tf.device(self._first), self._calling(cache):
            return exported(simd.call_end(simd.last, self._weights, tuple(args), self._theta))

    def _follow(self, kept: Kept, group: tf.Tensor, leaves: tf.Tensor, parents: tf.Tensor) -> Kept:
        """Returns the cache of all groups after the rows of one continue other rows."""
        near = self._near(kept, parents)

        def follow(i: int, slots: tf.Tensor) -> tf.Tensor:
            sizes = static_sizes(slots)
            by_group = tf.reshape(slots, [-1, self.rounds, *sizes[1:]])
            of_group = by_group[group]
            of_group = tf.where(leaves, tf.gather(of_group, near[i], axis=1), of_group)
            return tf.reshape(overwritten(by_group, group[None], of_group[None]), sizes)

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

    def _map(self, function: Callable[..., tf.Tensor], *values: Any) -> Any:
        """Applies a function to the number of each processor and its slices, on its device.

        There are several slices if several values are given, nested alike.
        """
        results: list[tf.Tensor] = []
        for i, parts in enumerate(zip(*map(tf.nest.flatten, values), strict=True)):
            processor = i % self.lowering.num_slices
            with tf.device(self.lowering.devices[processor]):
                results.append(function(processor, *parts))
        return tf.nest.pack_sequence_as(values[0], results)

    def _zeros(self, specs: Any, *front: int) -> Any:
        """Returns zeros on each processor, with further dims in front."""

        def local(_: int, spec: tf.TensorSpec) -> tf.Tensor:
            return zeros(tf.TensorSpec([*front, *spec.shape], spec.dtype))

        return self._map(local, specs)

    def _layer_weights(self, layer: int, rounds: Slices) -> dict[str, Tensor]:
        """Returns the weights of one layer of each processor's current stage."""
        return {
            path: Tensor(self.lowering, stacked.at(layer, rounds), shape)
            for path, (stacked, shape) in self._stacked.items()
        }

    def _passed(self, rows: int, number: int) -> _Passed:
        """Calls a layer once to find the tensors that go from layer to layer."""
        results: list[_Passed] = []

        def once() -> None:
            ids = tf.zeros([rows, number], tf.int32)
            x, sides, arguments = self._enter(ids, ids)
            passed = _Passed(arguments, _specs(x), _specs(sides), {})
            *args, places = self._joined_args(passed, x, sides)
            cache = KeyValueCache(self._length, places)
            weights = self._layer_weights(0, self.lowering.raw_map(lambda: tf.constant(0)))
            self._layer(passed, weights, args, cache)
            results.append(passed._replace(kept=_specs(cache.kept)))

        tf.function(once, autograph=False).get_concrete_function()
        return results[0]


def _specs(tensors: Any) -> Any:
    return tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), tensors)
