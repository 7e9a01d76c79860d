"""Passes whose operations XLA compiles, with random numbers and checks outside of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.compiled import fingerprint, has_compiled_kernel, why_not_compiled
from pipemesh.backend.devices import agree
from pipemesh.backend.labels import labelled
from pipemesh.backend.operation_kinds import (
    CHECK_AND_HAND_ON,
    DRAWS_WITHOUT_STATE,
    EFFECTS,
    IDENTITIES,
    READS,
)
from pipemesh.backend.operations import Call
from pipemesh.recurrent.passes.graph_cut import GraphCut, node_of
from pipemesh.recurrent.passes.traced_stage import TracedStage

# XLA draws other random numbers from the same key, drops checks, and would lock variables.
_APART = DRAWS_WITHOUT_STATE | EFFECTS | READS


def _type_of(device: str) -> str:
    return tf.DeviceSpec.from_string(device).device_type or "CPU"


@functools.cache
def _can_lie_on(pinned: str, device: str) -> bool:
    return agree(tf.DeviceSpec.from_string(pinned), tf.DeviceSpec.from_string(device))


class _NotCompiledError(Exception):
    """The reason why a pass stays as it is."""


class Wanted(NamedTuple):
    """The results and side effects of a pass."""

    fetches: Sequence[str]  # the tensors that it computes
    effects: Sequence[str]  # the nodes that check or print
    checked: Container[str]  # the nodes whose input is not checked
    maybe: Sequence[str]  # the fetches that are computed only if somebody takes them


class Core(NamedTuple):
    """The part of a pass that XLA computes.

    Before it are random numbers, reads of variables, and other operations that XLA does not take,
    as far as they depend on neither weights nor activations, with what they need. After it are
    checks, prints and summaries.
    """

    call: Call
    arguments: list[str]  # tensors that it starts from
    results: list[str]  # tensors that it leaves
    checks: list[str]  # nodes in it that check their input, which XLA does not

    def run(
        self, cut: GraphCut, values: dict[str, tf.Tensor], due: tf.Tensor | None
    ) -> dict[str, tf.Tensor]:
        """Returns the values and the results."""
        given = cut.paste(values, self.arguments, due=due)
        return values | dict(zip(self.results, self.call(given), strict=True))


class Compiler:
    """Makes the XLA computations of passes; those that are the same are one function.

    TensorFlow compiles a function at its first call, once for each device. What XLA does not take
    is named in a warning, and stays as it is.
    """

    def __init__(self) -> None:
        # By fingerprint and type of device.
        self._made: dict[tuple[str, str], Call | str] = {}
        # Stages with the kind of their actions.
        self._warned: set[tuple[str, str]] = set()

    def core(
        self,
        traced: TracedStage,
        kind: str,
        device: str,  # of the replica
        given: Sequence[str],  # the tensors that the pass starts from
        wanted: Wanted,
    ) -> Core | None:
        """Returns what XLA computes of a pass; None if it takes nothing of it."""
        try:
            return self._core(traced, device, given, wanted)
        except _NotCompiledError as error:
            key = traced.stage.name, kind
            if key not in self._warned:
                self._warned.add(key)
                warnings.warn(
                    f"stage {key[0]!r}: its pass {kind} is not compiled, but runs operation by "
                    f"operation: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None

    def _core(
        self,
        traced: TracedStage,
        device: str,
        given: Sequence[str],
        wanted: Wanted,
    ) -> Core | None:
        cut, fetches = traced.cut, wanted.fetches
        if traced.stage.of_home.group > 1:
            raise _NotCompiledError(
                f"a replica lies on {traced.stage.of_home.group} devices, and a computation of XLA "
                "on one"
            )
        floats = [name for name in given if traced.spec(name).dtype.is_floating]
        given = [*given, *cut.captured]
        effects = [f"{name}:0" for name in wanted.effects]
        needed = cut.ancestors([*fetches, *effects], given)
        surely = [name for name in fetches if name not in wanted.maybe]
        constants = {name for name in needed if cut.kinds(name) == {"Const"}}
        apart = {name for name in needed if self._is_apart(cut, name, device)}
        heavy = cut.reached(floats, needed, given)
        before = cut.ancestors([f"{name}:0" for name in apart - heavy], given)
        # What depends on weights or activations and is not for XLA has to be an end.
        ends = apart & heavy
        after = ends | cut.reached([*cut.results_of(ends)], needed, given)
        for name in map(node_of, surely):
            if name in after and traced.spec(f"{name}:0").dtype != tf.string:
                raise _NotCompiledError(self._why(cut, ends, name, device))
        after |= needed - cut.ancestors([*surely, *effects], given)
        inside = needed - before - after - constants
        results = [f for f in surely if not self._is_passed_on(cut, f, inside, given)]
        checks = [
            name
            for name in sorted(inside)
            if cut.kinds(name) & CHECK_AND_HAND_ON and name not in wanted.checked
        ]
        results += [source for name in [*after, *checks] for source in cut.sources(name)]
        results = cut.in_order(cut.frontier(results, inside - {*checks}, given))
        arguments = cut.begins(results, before - constants, {*given})
        if not results:
            return None
        return Core(
            self._call(traced, _type_of(device), arguments, results), arguments, results, checks
        )

    def _is_passed_on(
        self, cut: GraphCut, tensor: str, inside: set[str], given: Sequence[str]
    ) -> bool:
        """Returns whether a result is one of `given`; it is sent only if somebody takes it."""
        needed = cut.ancestors([tensor], given) & inside
        return all(cut.kinds(name) <= IDENTITIES for name in needed)

    def _is_apart(self, cut: GraphCut, name: str, device: str) -> bool:
        """Returns whether a node is not for XLA."""
        kinds = cut.kinds(name)
        if not all(_can_lie_on(own, device) for own in cut.devices(name)):
            return True
        if len(kinds) == 1 and kinds <= CHECK_AND_HAND_ON:
            return False
        return any(op in _APART or not has_compiled_kernel(op, _type_of(device)) for op in kinds)

    def _why(self, cut: GraphCut, ends: set[str], result: str, device: str) -> str:
        """Returns why a result that depends on `ends` is not computed by XLA."""
        name = cut.in_order(ends & cut.ancestors([f"{result}:0"]) or ends)[0]
        kinds, type_of = sorted(cut.kinds(name)), _type_of(device)
        ops = [op for op in kinds if op in _APART]
        ops = ops or [op for op in kinds if not has_compiled_kernel(op, type_of)] or kinds
        layer = labelled("layer", name)
        where = f" of layer {layer!r}" if layer is not None else ""
        if elsewhere := [own for own in cut.devices(name) if not _can_lie_on(own, device)]:
            why = f"is pinned to {elsewhere[0]}, but a computation of XLA is on {device}"
        elif ops[0] in DRAWS_WITHOUT_STATE:
            why = "draws random numbers in a loop or branch, or of a shape that is not known before"
        elif ops[0] in EFFECTS:
            why = "checks or prints in the middle of it"
        else:
            why = "has no kernel of XLA"
        return f"operation {name!r} ({ops[0]}){where} {why}"

    def _call(
        self, traced: TracedStage, device_type: str, arguments: Sequence[str], results: list[str]
    ) -> Call:
        """Returns the call of a function that XLA compiles, which passes that are alike share."""

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            values: Mapping[str, Any] = dict(zip(arguments, tensors, strict=True))
            return traced.cut.paste(values, results, compiles=True)

        with tf.device(None):
            function = tf.function(run, autograph=False).get_concrete_function(
                *map(traced.spec, arguments)
            )
        key = fingerprint(function), device_type
        if key not in self._made:
            why = why_not_compiled(function, device_type)
            self._made[key] = why or Call(function, compiles=True)
        made = self._made[key]
        if isinstance(made, str):
            raise _NotCompiledError(made)
        return made
