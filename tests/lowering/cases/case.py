"""A case of an operation, and the layouts that it is run under."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Mesh, Shape

# One, two, four and eight devices; one, two and three axes.
MESHES = ("a:1", "a:2", "a:4", "a:2;b:2", "a:8", "a:2;b:4", "a:2;b:2;c:2")
LARGE_MESH = MESHES[-1]
# A case meets one of these by default, another one under each lowering.
SMALL_MESHES = MESHES[:5]
GRAPH_MESH = "a:2;b:2"


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call an operation."""

    op: str
    # Arrays with their named shapes, such as "x:4;y:2"; a shape alone has random numbers.
    inputs: Sequence[Any]
    # Takes the lowering and the imported inputs.
    call: Callable[..., Tensor]
    # Plain TensorFlow on the whole inputs.
    reference: Callable[..., tf.Tensor]
    # The names of the dims of the reference's result, in order, with blanks between.
    out: str
    # Shapes whose dims meet in one tensor or computation, also dims that only results have; by
    # default all dims of the inputs meet.
    together: tuple[str, ...] = ()
    # Other cases run the same code: eagerly on a small mesh is enough.
    thin: bool = False
    # The inputs that get a gradient; None for all floating ones.
    differentiable: tuple[int, ...] | None = None
    # Also the absolute tolerance, for values around 1.
    rtol: float = 2e-5
    label: str = ""

    def __post_init__(self) -> None:
        inputs = [
            (numbers(given, i), given) if isinstance(given, str) else given
            for i, given in enumerate(self.inputs)
        ]
        object.__setattr__(self, "inputs", inputs)

    @property
    def name(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op

    @property
    def sources(self) -> tuple[int, ...]:
        """The inputs that get a gradient."""
        if self.differentiable is not None:
            return self.differentiable
        return tuple(i for i, (a, _) in enumerate(self.inputs) if a.dtype.kind == "f")

    def layouts(self, mesh_text: str) -> list[LayoutRules]:
        """All legal rules, without those that differ by exchanging axes of one size only."""
        mesh = Mesh.from_text(mesh_text)
        inputs = [Shape.from_text(shape) for _, shape in self.inputs]
        groups = [Shape.from_text(text) for text in self.together]
        # One name may have several sizes, in the inputs and in the result.
        dims = tuple(dict.fromkeys(dim for shape in (*groups, *inputs) for dim in shape))
        names = tuple(dict.fromkeys(dim.name for dim in dims))
        meeting = [group.names for group in groups] or [names]
        chosen: dict[Any, LayoutRules] = {}
        for axes in itertools.product((None, *mesh.axis_names), repeat=len(names)):
            given = {name: axis for name, axis in zip(names, axes, strict=True) if axis}
            if any(d.size % mesh.size(given[d.name]) for d in dims if d.name in given):
                continue
            used = [[given[n] for n in group if n in given] for group in meeting]
            if any(len(set(u)) < len(u) for u in used):
                continue
            rules = LayoutRules(tuple(given.items()))
            orbit = _orbit_key(axes, mesh)
            # A different one of each kind is taken for each case.
            if orbit not in chosen or _hash(self.name, rules) < _hash(self.name, chosen[orbit]):
                chosen[orbit] = rules
        return sorted(chosen.values(), key=lambda r: (-len(r.rules), _hash(self.name, r)))

    def value(self, lowering: Lowering, arrays: Sequence[tf.Tensor]) -> tf.Tensor:
        """The whole result."""
        imported = [
            ops.import_tensor(lowering, array, shape)
            for array, (_, shape) in zip(arrays, self.inputs, strict=True)
        ]
        result = self.call(lowering, *imported)
        # Reads the tensors at all splits that they have.
        return ops.export_tensor(ops.transpose(result, self.out.split()))

    def run(self, lowering: Lowering, arrays: Sequence[tf.Tensor], cotangent: tf.Tensor) -> Any:
        """The result, and the gradients of all sources."""
        sources = [arrays[i] for i in self.sources]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = self.value(lowering, arrays)
        return value, _gradients(tape, value, sources, cotangent)

    @functools.cached_property
    def expected(self) -> Any:
        """The results of plain TensorFlow, and a cotangent."""
        arrays = [tf.constant(array) for array, _ in self.inputs]
        sources = [arrays[i] for i in self.sources]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = self.reference(*arrays)
        seed = np.random.default_rng(_hash(self.name, LayoutRules()))
        cotangent = tf.cast(tf.constant(seed.standard_normal(value.shape)), value.dtype)
        return value, _gradients(tape, value, sources, cotangent), cotangent

    def differences(self, got: Any, expected: Any) -> list[str]:
        """Describes the results that differ."""
        pairs = [("value", got[0], expected[0])]
        pairs += [
            (f"gradient {i}", g, e)
            for i, g, e in zip(self.sources, got[1], expected[1], strict=True)
        ]
        return [
            f"{what}: {str(a)[:200]} is not {str(b)[:200]}"
            for what, a, b in pairs
            if not self._is_close(a, b)
        ]

    def _is_close(self, a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype.kind in "biu":
            return bool((a == b).all())
        a, b = a.astype(np.float64), b.astype(np.float64)
        return np.allclose(a, b, rtol=self.rtol, atol=self.rtol, equal_nan=True)


def _gradients(tape: Any, value: Any, sources: Any, cotangent: Any) -> Any:
    if not sources or not value.dtype.is_floating:
        return [None] * len(sources)
    grads = tape.gradient(value, sources, cotangent)
    # Those of lookups are sparse.
    return [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]


def _orbit_key(axes: Sequence[str | None], mesh: Mesh) -> Any:
    """Equal for layouts that differ by exchanging axes of one size."""
    number: dict[str, tuple[int, int]] = {}
    for axis in axes:
        if axis is not None and axis not in number:
            number[axis] = (mesh.size(axis), len(number))
    return tuple(None if axis is None else number[axis] for axis in axes)


def _hash(name: str, rules: LayoutRules) -> int:
    return zlib.crc32(f"{name} {rules}".encode())


def numbers(shape: str, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Uniform float32 numbers."""
    sizes = Shape.from_text(shape).sizes
    return np.random.default_rng(seed).uniform(low, high, sizes).astype(np.float32)


def integers(shape: str, low: int, high: int, seed: int = 0) -> np.ndarray:
    """Uniform int32 numbers below `high`."""
    sizes = Shape.from_text(shape).sizes
    return np.random.default_rng(seed).integers(low, high, sizes).astype(np.int32)


def booleans(shape: str, seed: int = 0, share: float = 0.5) -> np.ndarray:
    """True with probability `share`."""
    sizes = Shape.from_text(shape).sizes
    return np.random.default_rng(seed).random(sizes) < share


def not_thin(cases: Mapping[str, Case], part: slice = slice(None)) -> list[Any]:
    """pytest's params: names of cases; those beyond a part of those not thin are `exhaustive`."""
    chosen = [name for name, case in cases.items() if not case.thin][part]
    return [
        pytest.param(name, marks=() if name in chosen else pytest.mark.exhaustive) for name in cases
    ]


def sampled(
    cases: Mapping[str, Case], mesh: str, shift: int = 0, every: int = 1, thin: bool = True
) -> list[Any]:
    """pytest's params: all pairs of mesh and name of a case; those beyond the default are
    `exhaustive`.

    By default every case meets one of the small meshes, and each `every`th that is not thin the
    given mesh. Another `shift` lets each case meet another small mesh. `thin` says whether thin
    cases run by default.
    """
    params = []
    for number, (name, case) in enumerate(cases.items()):
        default = set()
        if thin or not case.thin:
            default.add(SMALL_MESHES[(number + shift) % len(SMALL_MESHES)])
        if number % every == 0 and not case.thin:
            default.add(mesh)
        for other in MESHES:
            marks = () if other in default else pytest.mark.exhaustive
            params.append(pytest.param(other, name, marks=marks))
    return params
