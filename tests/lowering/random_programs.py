"""Random programs on named dims: the same numbers under any mesh, layout and lowering.

A program has random operations of the registry on tensors of random dims (sizes 0 to 12) and
dtypes, with loops, branches and functions in it. Its values, gradients and second gradients are
compared with those of the same program on one device. Run many with

    python -m tests.lowering.random_programs --programs=500 --seed=0

A seed that fails prints its program; `--programs=1 --seed=<seed>` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipemeshError
from pipemesh.lowering import Cores, Lowering, PlacementLowering, Tensor, ops
from pipemesh.lowering.registry import OPS, Op
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape
from tests.devices import device_name

MAX_DEVICES = 8
NAMES = "abcdef"
# Sums are rounded in another order under another layout; loops and gradients add it up.
TOLERANCES = {tf.float64: 1e-8, tf.float32: 5e-3, tf.bfloat16: 0.25, tf.float16: 0.1}
MODES = ("eager", "eager", "eager", "function", "cores", "cores eagerly")


class Unfit(Exception):
    """A step cannot be made of the values so far."""


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation of a program."""

    text: str
    sources: tuple[int, ...]  # the numbers of the values that it takes
    call: Callable[..., Tensor]  # takes a lowering and these values
    # If each bit of the sources is the same under every layout, so is each bit of the result.
    # Operations that jump, such as comparisons, take exact values only.
    exact: bool = True


class Program:
    """Random steps that are legal under a mesh and layout rules."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        draw = self.draw
        sizes = [1, 1]
        while not 1 < np.prod(sizes) <= MAX_DEVICES:
            sizes = [draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(1, 3))]
        self.mesh = Mesh(tuple((f"m{i}", size) for i, size in enumerate(sizes)))
        self.sizes = {name: draw.choice((0, 1, 2, 3, 4, 6, 6, 8, 12, 12, 12, 12)) for name in NAMES}
        self.rules = LayoutRules(
            tuple(
                (name, axis)
                for name in NAMES
                if not self.sizes[name] % self.mesh.size(axis := draw.choice(self.mesh.axis_names))
                and draw.random() < 0.8
            )
        )
        self.mode = draw.choice(MODES)
        self.float = draw.choice((tf.float64,) * 5 + (tf.float32, tf.bfloat16, tf.float16))
        # The most elements: long sums of half precision are mostly round-off.
        self.most = 4000 if self.float.size > 2 else 150
        self.one = PlacementLowering(Mesh.from_text("m:1"), LayoutRules(), [device_name(0)])
        self.inputs: list[tuple[np.ndarray, Shape]] = []
        self.steps: list[Step] = []
        # What the steps give on one device, and whether they are exact.
        self.values: list[Tensor] = []
        self.exact: list[bool] = []
        self._fill()

    def _fill(self) -> None:
        draw = self.draw
        numbers = np.random.default_rng(self.seed)
        odd = draw.choice((self.float, tf.int32, tf.int64, tf.int16, tf.int8, tf.uint8, tf.bool))
        dtypes = [self.float, self.float, self.float, odd]
        while len(self.inputs) < len(dtypes):
            # Few names, so that tensors meet.
            names = draw.sample(NAMES[:4], draw.choice((0, 1, 1, 2, 2, 3)))
            shape = Shape(tuple(Dim(name, self.sizes[name]) for name in names))
            if not self.fits(shape) or shape.size > self.most:
                continue
            dtype = dtypes[len(self.inputs)]
            whole = numbers.uniform(-2, 2, shape.sizes)
            if not dtype.is_floating:
                whole = numbers.integers(0, 2 if dtype.is_bool else 9, shape.sizes)
            self.inputs.append((tf.cast(whole, dtype).numpy(), shape))
        self.values = [ops.import_tensor(self.one, *pair) for pair in self.inputs]
        self.exact = [True] * len(self.values)
        for maker in draw.choices(MAKERS, k=draw.randint(4, 14)):
            for _ in range(100):
                # A tuple of results may be empty.
                with contextlib.suppress(Unfit, PipemeshError, ZeroDivisionError):
                    self._add(maker(self))
                    break

    def _add(self, step: Step) -> None:
        value = step.call(self.one, *(self.values[i] for i in step.sources))
        small = value.shape.size <= self.most and len(value.shape) <= 4
        if not self.fits(value.shape) or not small:
            raise Unfit
        # One that is not finite would leave all gradients without a number.
        if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value.numpy())):
            raise Unfit
        self.steps.append(step)
        self.values.append(value)
        self.exact.append(
            (step.exact or not value.dtype.is_floating) and all(self.exact[i] for i in step.sources)
        )

    def fits(self, shape: Shape) -> bool:
        """True if the rules can split a tensor of this shape."""
        try:
            self.rules.tensor_layout(shape, self.mesh)
        except PipemeshError:
            return False
        return True

    def pick(self, fits: Callable[[Tensor], bool] = lambda x: True, exact: bool = False) -> int:
        """The number of a random value, mostly a late one."""
        found = [i for i, x in enumerate(self.values) if fits(x) and (self.exact[i] or not exact)]
        if not found:
            raise Unfit
        return found[max(self.draw.randrange(len(found)), self.draw.randrange(len(found)))]

    def new_name(self, *shapes: Shape) -> str:
        """A name that none of the shapes has."""
        free = [name for name in NAMES if not any(name in shape.names for shape in shapes)]
        if not free:
            raise Unfit
        return self.draw.choice(free)

    def run(self, lowering: Lowering, inputs: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """All values of the steps, and gradients of a loss of the floating ones."""
        differentiable = [x for x in inputs if x.dtype.is_floating]

        def losses(values: Sequence[Tensor]) -> Tensor:
            parts = [
                # Slowly, so that the round-off of a large sum does not change its slope.
                ops.reduce_sum(ops.sin(ops.cast(x, tf.float64) * 0.1)) * (5.0 + 10 * i)
                for i, x in enumerate(values)
                if x is not None and x.dtype.is_floating
            ]
            return functools.reduce(operator.add, parts)

        with tf.GradientTape() as outer:
            outer.watch(differentiable)
            with tf.GradientTape() as tape:
                tape.watch(differentiable)
                values = list(inputs)
                for step in self.steps:
                    values.append(step.call(lowering, *(values[i] for i in step.sources)))
                loss = losses(values)
            first = ops.gradients(loss, differentiable, tape)
            slope = losses(first)
        # Second gradients of half precision are mostly round-off.
        second = ops.gradients(slope, differentiable, outer) if self.float.size > 2 else []
        return values[len(inputs) :], [*first, *second]

    def whole(self, lowering: Lowering, arrays: Sequence[Any]) -> list[Any]:
        """The results of `run` as whole tensors of TensorFlow."""
        inputs = [
            ops.import_tensor(lowering, array, shape)
            for array, (_, shape) in zip(arrays, self.inputs, strict=True)
        ]
        values, grads = self.run(lowering, inputs)
        return [None if x is None else ops.export_tensor(x) for x in (*values, *grads)]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: mesh '{self.mesh}', rules '{self.rules}', {self.mode}"]
        lines += [
            f"  v{i} = {array.dtype} '{shape}'" for i, (array, shape) in enumerate(self.inputs)
        ]
        for i, step in enumerate(self.steps, len(self.inputs)):
            given = ", ".join(f"v{j}" for j in step.sources)
            value = self.values[i]
            lines.append(f"  v{i} = {step.text} of {given}: {value.dtype.name} '{value.shape}'")
        return "\n".join(lines)


# The values of parameters, by their annotations; each is drawn for the tensors and the other values
# that the operation got so far. What is not legal is drawn anew.


def _name(g: Program, known: list[Tensor], given: dict[str, Any]) -> str:
    """A dim of the tensors, or a new one."""
    names = {name: None for x in known for name in x.shape.names if name not in given.values()}
    return g.draw.choice([*names] * 3 + [g.new_name(*(x.shape for x in known))])


def _names(g: Program, known: list[Tensor], given: dict[str, Any]) -> list[str]:
    names = list({name: None for x in known for name in x.shape.names})
    return g.draw.sample(names, g.draw.choice((len(names), g.draw.randint(0, len(names)))))


def _dim(g: Program, known: list[Tensor], given: dict[str, Any]) -> Dim:
    name = _name(g, known, {})
    return Dim(name, g.draw.choice((g.sizes[name], g.draw.randint(0, 4))))


def _shape(g: Program, known: list[Tensor], given: dict[str, Any]) -> Shape:
    """The dims of a tensor with two of them merged, with one cut into two, or with one more."""
    shape = known[0].shape
    dims, at = list(shape.dims), g.draw.randint(0, len(shape))
    new = g.new_name(shape)
    kind = g.draw.choice(("merge", "cut", "more"))
    if kind == "more" or at == len(dims):
        dims.insert(at, Dim(new, g.sizes[new]))
    elif kind == "merge":
        merged = math.prod(dim.size for dim in dims[at : at + 2])
        dims[at : at + 2] = [Dim(g.draw.choice((dims[at].name, new)), merged)]
    else:
        first = g.draw.choice([n for n in range(1, 13) if not dims[at].size % n])
        names = g.draw.sample((dims[at].name, new), 2)
        sizes = first, dims[at].size // first
        dims[at : at + 1] = map(Dim, names, sizes)
    return Shape(tuple(dims))


def _renaming(g: Program, known: list[Tensor], given: dict[str, Any]) -> dict[str, str]:
    """Of dims of the first tensor; for a convolution to those of the filters."""
    number = g.draw.choice((1, 1, 1, 2, 3))
    return {_name(g, known[:1], {}): _name(g, known[1:] or known, {}) for _ in range(number)}


def _counts(g: Program, known: list[Tensor], given: dict[str, Any]) -> dict[str, int]:
    """Sizes of a window, or numbers of times, of one dim or two."""
    return {_name(g, known, {}): g.draw.randint(1, 4) for _ in range(g.draw.randint(1, 2))}


def _sizes(g: Program, known: list[Tensor], given: dict[str, Any]) -> list[int]:
    """Of two pieces of a dim."""
    size = known[0].shape[given["dim"]].size
    at = g.draw.randint(0, size)
    return [at, size - at]


DRAWN: dict[str, Callable[[Program, list[Tensor], dict[str, Any]], Any]] = {
    "str": _name,
    "Sequence[str]": _names,
    "Dims": _names,
    "Dim": _dim,
    "Shape": _shape,
    "Shape | str": _shape,
    "Shape | None": lambda g, known, _: g.draw.choice((None, known[0].shape)),
    "Mapping[str, str]": _renaming,
    "Mapping[str, int]": _counts,
    "Steps | None": lambda g, *_: g.draw.randint(1, 3),
    "Steps": lambda g, *_: g.draw.randint(1, 2),
    "int": lambda g, *_: g.draw.randint(-4, 6),
    "int | Sequence[int]": _sizes,
    "bool": lambda g, *_: g.draw.random() < 0.5,
    "float": lambda g, *_: g.draw.choice((0.0, 0.3)),
    "tf.DType": lambda g, *_: g.draw.choice((g.float, g.float, tf.int32, tf.int64, tf.bool)),
    "tf.Tensor": lambda g, *_: [g.draw.randrange(1000), g.draw.randrange(1000)],
    "Padding": lambda g, *_: g.draw.choice(("SAME", "VALID")),
}
# What is not finite everywhere, takes no named tensor, or repeats another one.
LEFT_OUT = (
    "ceil divide exp floor_divide floor_mod gelu is_finite log log1p power reciprocal rsqrt sqrt "
    "export_tensor import_tensor random_normal random_uniform"
).split()
# Round-off in what these are given makes them jump, so they get exact values only.
JUMPS = (
    "abs argmax cast equal floor greater greater_equal is_nan less less_equal max_pool maximum "
    "minimum not_equal reduce_max reduce_min relu round sign top_k"
).split()
# The last bits of these depend on the layout.
ROUNDED = (
    "avg_pool conv1d conv2d conv3d conv_transpose cos cumsum einsum erf log_softmax "
    "reduce_logsumexp reduce_mean reduce_sum sigmoid silu sin softmax softplus tanh"
).split()


def _operation(op: Op, g: Program) -> Step:
    sources: dict[str, Any] = {}
    known: list[Tensor] = []
    given: dict[str, Any] = {}
    operands: list[Tensor] = []

    def pick(like: list[Tensor]) -> int:
        i = g.pick(lambda x: all(x.dtype == y.dtype for y in like), op.name in JUMPS)
        known.append(g.values[i])
        return i

    for parameter in inspect.signature(op.function).parameters.values():
        if parameter.annotation == "Tensor":
            sources[parameter.name] = pick([])
        elif parameter.annotation in ("Operand", "Sequence[Tensor]"):
            number = g.draw.randint(1, 3) if parameter.annotation != "Operand" else 1
            several = [pick(operands)]
            operands.append(known[-1])
            several += [pick(operands) for _ in range(number - 1)]
            sources[parameter.name] = several if parameter.annotation != "Operand" else several[0]
        elif parameter.default is parameter.empty or g.draw.random() < 0.3:
            value = DRAWN[str(parameter.annotation)](g, known, given)
            given[parameter.name] = value
    # The rules split all dims of several tensors together.
    together = {dim.name: dim for x in known for dim in x.shape}
    if len(known) > 1 and not g.fits(Shape(tuple(together.values()))):
        raise Unfit
    which = g.draw.randrange(12)

    def call(lowering: Lowering, *tensors: Tensor) -> Tensor:
        packed = tf.nest.pack_sequence_as(sources, range(len(tensors)))
        result = op.function(**tf.nest.map_structure(lambda i: tensors[i], packed), **given)
        return result[which % len(result)] if isinstance(result, tuple) else result

    text = ", ".join([op.name, *(f"{name}={value}" for name, value in given.items())])
    return Step(text, tuple(tf.nest.flatten(sources)), call, op.name not in ROUNDED)


def _convolution(g: Program) -> Step:
    """A convolution of a value with rows of itself: others rarely fit."""
    i = g.pick(lambda x: x.dtype.is_floating and len(x.shape) > 1 and x.shape.size > 0)
    shape = g.values[i].shape
    names = g.draw.sample(shape.names, len(shape))
    number = g.draw.randint(1, min(3, len(names) - 1))
    free = [name for name in NAMES if name not in names]
    if len(free) < number:
        raise Unfit
    window = dict(zip(names, g.draw.sample(free, number), strict=False))
    sizes = {name: g.draw.randint(1, 3) for name in window.values()}
    # The shapes on the way from the value to the filters.
    filters = Shape(tuple(Dim(window.get(dim.name, dim.name), dim.size) for dim in shape))
    shapes = [filters]
    for name, size in sizes.items():
        filters = filters.replace(name, Dim(name, size))
        shapes.append(filters)
    if not all(map(g.fits, shapes)):
        raise Unfit
    batch = names[g.draw.randint(number + 1, len(names)) :]
    op = g.draw.choice((f"conv{number}d", "conv_transpose"))
    given = {
        "padding": g.draw.choice(("SAME", "VALID")),
        "strides": {name: g.draw.randint(1, 3) for name in window},
        "dilations": {name: g.draw.randint(1, 2) for name in window},
    }

    def call(lowering: Lowering, x: Tensor) -> Tensor:
        filters = ops.reduce_sum(ops.rename(x, window), batch) * 0.3
        for name, size in sizes.items():
            filters = ops.slice(filters, name, 0, size)
        return OPS[op].function(x, filters, window, **given)

    return Step(f"{op}, {window}, {sizes}, batch={batch}, {given}", (i,), call, exact=False)


def _alike(g: Program, x: Tensor) -> tuple[str, Callable[[Tensor], Tensor]]:
    """A function that keeps the shape and dtype of a floating value."""
    found: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("tanh", ops.tanh),
        ("sin", ops.sin),
        ("half", lambda y: 0.5 * y),
        ("less mean", lambda y: y - ops.reduce_mean(y) if y.shape.size else y),
    ]
    for n in [dim.name for dim in x.shape if dim.size]:
        found += [
            (f"softmax {n}", lambda y, n=n: ops.softmax(y, n)),
            (f"shift {n}", lambda y, n=n: ops.shift(y, n, 1, wrap=True)),
            (f"cumsum {n}", lambda y, n=n: ops.tanh(ops.cumsum(y, n))),
            (f"sum {n}", lambda y, n=n: y + 0.1 * ops.reduce_sum(y, n)),
        ]
    chosen = [g.draw.choice(found) for _ in range(g.draw.randint(1, 3))]

    def function(y: Tensor) -> Tensor:
        for _, part in chosen:
            y = part(y)
        return ops.transpose(y, x.shape.names)

    return " then ".join(text for text, _ in chosen), function


def _nested(kind: str, g: Program) -> Step:
    """A loop, a branch or a function."""
    i = g.pick(lambda x: x.dtype.is_floating)
    j = g.pick(lambda x: x.dtype.is_bool) if kind == "if any" else i
    text, function = _alike(g, g.values[i])
    other_text, other = _alike(g, g.values[i])
    turns = g.draw.randint(0, 3)
    traced = {}

    def call(lowering: Lowering, x: Tensor, condition: Tensor) -> Tensor:
        if kind == "times":
            counted = (tf.constant(0), x)
            return tf.while_loop(
                lambda n, y: n < turns, lambda n, y: (n + 1, function(y)), counted
            )[1]  # fmt: skip
        if kind == "if any":
            first = ops.reduce_any(condition).slices[0]
            return tf.cond(first, lambda: function(x), lambda: other(x))
        # One for each lowering: that of a core is traced by all cores where they run eagerly.
        wrapped = tf.function(lambda y: function(y), autograph=False)
        return traced.setdefault(id(lowering), wrapped)(x)

    text = {"times": f"{turns} times ({text})", "if any": f"if any ({text}) else ({other_text})"}
    return Step(text.get(kind, f"function {text}"), (i, j), call, exact=False)


MAKERS = [
    *(functools.partial(_operation, op) for op in OPS.values() if op.name not in LEFT_OUT),
    *[_convolution] * 4,
    *(functools.partial(_nested, kind) for kind in ("times", "if any", "function") * 2),
]


def compute(program: Program) -> list[Any]:
    """Runs a program under its mesh, rules and lowering."""
    mesh, rules = program.mesh, program.rules
    devices = [device_name(i) for i in range(mesh.num_devices)]
    arrays = [tf.constant(array) for array, _ in program.inputs]
    if program.mode in ("eager", "function"):
        run = functools.partial(program.whole, PlacementLowering(mesh, rules, devices))
        return (run if program.mode == "eager" else tf.function(run, autograph=False))(arrays)
    cores, args = Cores(mesh, devices, time_limit_s=120.0), [arrays] * mesh.num_devices

    def of_core(lowering: Lowering, *given: tf.Tensor) -> list[Any]:
        return program.whole(lowering, given)

    if program.mode == "cores eagerly":
        return cores.run_eagerly(of_core, rules, args)[-1]
    specs = [tf.TensorSpec.from_tensor(array) for array in arrays]
    return cores.function(of_core, rules, *specs)(args)[-1]


def differences(program: Program) -> list[str]:
    """Describes the values that differ from those on one device."""
    arrays = [tf.constant(array) for array, _ in program.inputs]
    want = program.whole(program.one, arrays)
    got = compute(program)
    sources = [i for i, array in enumerate(arrays) if array.dtype.is_floating]
    labels = [f"v{i + len(arrays)}" for i in range(len(program.steps))]
    labels += [f"{kind} gradient of v{i}" for kind in ("first", "second") for i in sources]
    # Some operations make float32 in a program of float64.
    tolerance = max(TOLERANCES[x.dtype] for x in program.values if x.dtype.is_floating)
    found = []
    for label, a, b in zip(labels, got, want, strict=False):
        if (a is None) != (b is None):
            found.append(f"{label}: {a} is not {b}")
        elif a is not None and not _close(a, b, tolerance):
            found.append(f"{label}: {_shown(a)} is not {_shown(b)}")
    return found


def _close(a: tf.Tensor, b: tf.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating:
        return bool(np.array_equal(a, b))
    x, y = np.asarray(tf.cast(a, tf.float64)), np.asarray(tf.cast(b, tf.float64))
    finite = np.isfinite(y)
    scale = max(1.0, np.abs(y[finite]).max(initial=0.0))
    # An overflow of half precision depends on the order of a sum.
    finite &= np.isfinite(x) | (tolerance < 1e-2)
    return bool(np.allclose(x[finite], y[finite], rtol=tolerance, atol=tolerance * scale))


def _shown(tensor: tf.Tensor) -> str:
    values = np.ravel(tensor.numpy())
    return f"{tensor.dtype.name}{list(tensor.shape)} {values[:6]}"


def check(seed: int) -> str | None:
    """Makes and runs the program of a seed; returns what is wrong, or None."""
    program = Program(seed)
    try:
        found = differences(program)
    except Exception as error:
        found = traceback.format_exception(error, limit=-8)
    return "\n".join([str(program), *found]) if found else None


def main(args: Sequence[str] | None = None) -> int:
    """Runs programs; returns the number of those that fail."""
    from pipemesh.backend.devices import start_cpu_devices

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    given = parser.parse_args(args)
    start_cpu_devices(MAX_DEVICES)
    failed = 0
    for seed in range(given.seed, given.seed + given.programs):
        wrong = check(seed)
        if wrong:
            failed += 1
            print(wrong, flush=True)
    print(f"{given.programs - failed} of {given.programs} programs agree with one device")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
