"""What a case of an operation is, and the layouts that it is run under."""

from __future__ import annotations

import dataclasses
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
# Where cases marked `thin` run, if layouts are thinned.
THIN_MESHES = MESHES[-1:]
# Of these a case meets one by default, another one under each lowering.
SMALL_MESHES = MESHES[:5]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call an operation.

    Attributes:
        op: the name of the operation.
        inputs: arrays with their named shapes, such as `"x:4;y:2"`.
        call: takes the lowering and the imported inputs.
        reference: plain TensorFlow: takes the inputs as whole tensors.
        out: the names of the dims of the reference's result, in order.
        together: shapes whose dims meet in one tensor or computation; by default all dims of the
            inputs and of `out` do. More dims than those of the inputs are given here.
        thin: where layouts are thinned, one is enough, on the mesh of three axes only:
            other cases cover the same code under more.
        differentiable: which inputs get a gradient; None for all floating ones.
        rtol: relative tolerance; also the absolute one, for values around 1.
        label: tells cases of one operation apart.
    """

    op: str
    inputs: tuple[tuple[np.ndarray, str], ...]
    call: Callable[..., Tensor]
    reference: Callable[..., tf.Tensor]
    out: tuple[str, ...]
    together: tuple[str, ...] = ()
    thin: bool = False
    differentiable: tuple[int, ...] | None = None
    rtol: float = 2e-5
    label: str = ""

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

    def thinned_layouts(self, mesh_text: str, number: int) -> list[LayoutRules]:
        """Of the layouts that split most dims `number`, and one of a thin case."""
        return self.layouts(mesh_text)[: 1 if self.thin else number]

    def run(self, lowering: Lowering, arrays: Sequence[tf.Tensor], cotangent: tf.Tensor) -> Any:
        """The result, and the gradients of all sources."""
        sources = [arrays[i] for i in self.sources]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            imported = [
                ops.import_tensor(lowering, array, shape)
                for array, (_, shape) in zip(arrays, self.inputs, strict=True)
            ]
            result = self.call(lowering, *imported)
            # Reads the tensors at all splits that they have.
            result = ops.transpose(result, self.out)
            value = ops.export_tensor(result)
        return value, _gradients(tape, value, sources, cotangent)

    def expected(self, cotangent: np.ndarray | None = None) -> Any:
        """What plain TensorFlow computes, and a cotangent."""
        arrays = [tf.constant(array) for array, _ in self.inputs]
        sources = [arrays[i] for i in self.sources]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = self.reference(*arrays)
        assert len(value.shape) == len(self.out), f"{self.name}: {value.shape} is not {self.out}"
        seed = np.random.default_rng(_hash(self.name, LayoutRules()))
        cotangent = tf.cast(tf.constant(seed.standard_normal(value.shape)), value.dtype)
        return value, _gradients(tape, value, sources, cotangent), cotangent

    def differences(self, got: Any, expected: Any) -> list[str]:
        """What is not equal; nothing if all is well."""
        found = []
        pairs = [("value", got[0], expected[0])]
        pairs += [
            (f"gradient {i}", g, e)
            for i, g, e in zip(self.sources, got[1], expected[1], strict=True)
        ]
        for what, a, b in pairs:
            if (a is None) != (b is None):
                found.append(f"{what}: {a} is not {b}")
                continue
            if a is None:
                continue
            a, b = np.asarray(a), np.asarray(b)
            if a.shape != b.shape or a.dtype != b.dtype:
                found.append(f"{what}: {a.dtype}{a.shape} is not {b.dtype}{b.shape}")
                continue
            if a.dtype.kind in "biu":
                equal = (a == b).all()
            else:
                a, b = a.astype(np.float64), b.astype(np.float64)
                equal = np.allclose(a, b, rtol=self.rtol, atol=self.rtol, equal_nan=True)
            if not equal:
                found.append(f"{what}: {a.ravel()[:4]}... is not {b.ravel()[:4]}...")
        return found


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


def thinned(cases: Mapping[str, Case], meshes: Sequence[str]) -> list[Any]:
    """Pairs of mesh and name of a case: thin ones on few meshes, and all on these by default."""
    return [
        pytest.param(mesh, name, marks=() if mesh in THIN_MESHES else pytest.mark.exhaustive)
        for mesh in meshes
        for name, case in cases.items()
        if mesh in THIN_MESHES or not case.thin
    ]


def sampled(cases: Mapping[str, Case], mesh: str, shift: int = 0, every: int = 1) -> list[Any]:
    """Pairs of mesh and name of a case, all of them; those beyond the default are `exhaustive`.

    By default every case meets one of the small meshes, together the cases meet all of these, and
    every so many the mesh that is given.

    Args:
        cases: by name.
        mesh: the large one.
        shift: who gives another one meets other small meshes.
        every: how many cases there are to one that meets the large mesh.
    """
    found = []
    for number, name in enumerate(cases):
        default = {SMALL_MESHES[(number + shift) % len(SMALL_MESHES)]}
        if number % every == 0:
            default.add(mesh)
        for other in MESHES:
            marks = () if other in default else pytest.mark.exhaustive
            found.append(pytest.param(other, name, marks=marks))
    return found
