"""Random programs on named dims: the same numbers under any mesh, layout and lowering.

A program has random operations on tensors of random dims (sizes 0 to 12) and dtypes, with loops,
branches and functions in it. Its values, gradients and second gradients are compared with those of
the same program on one device. Run many with

    python -m tests.lowering.random_programs --programs=500 --seed=0

A seed that fails prints its program; `--programs=1 --seed=<seed>` runs it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipemeshError
from pipemesh.lowering import Cores, Lowering, PlacementLowering, Tensor, ops
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape

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
        self.one = PlacementLowering(Mesh.from_text("m:1"), LayoutRules(), ["CPU:0"])
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
        wanted, tries = draw.randint(4, 14), 0
        while len(self.steps) < wanted and tries < 300:
            tries += 1
            try:
                step = draw.choice(MAKERS)(self)
                self._add(step)
            except (Unfit, PipemeshError):
                continue

    def _add(self, step: Step) -> None:
        value = step.call(self.one, *(self.values[i] for i in step.sources))
        small = value.shape.size <= self.most and len(value.shape) <= 4
        if not self.fits(value.shape) or not small:
            raise Unfit
        self.steps.append(step)
        self.values.append(value)
        self.exact.append(
            (step.exact or not value.dtype.is_floating) and all(self.exact[i] for i in step.sources)
        )

    def fits(self, *shapes: Shape) -> bool:
        """True if the rules can split all dims of these shapes together."""
        try:
            union = Shape()
            for shape in shapes:
                union |= shape
            self.rules.tensor_layout(union, self.mesh)
        except PipemeshError:
            return False
        return True

    def pick(self, fits: Callable[[Tensor], bool] = lambda x: True, exact: bool = False) -> int:
        """The number of a random value, mostly a late one."""
        found = [i for i, x in enumerate(self.values) if fits(x) and (self.exact[i] or not exact)]
        if not found:
            raise Unfit
        return found[max(self.draw.randrange(len(found)), self.draw.randrange(len(found)))]

    def pick_dim(self, x: Tensor, least: int = 0) -> Dim:
        """A random dim of a value."""
        dims = [dim for dim in x.shape if dim.size >= least]
        if not dims:
            raise Unfit
        return self.draw.choice(dims)

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
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total

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


# Makers of steps.


def _floating(x: Tensor) -> bool:
    return x.dtype.is_floating


def _numbers(x: Tensor) -> bool:
    return not x.dtype.is_bool


def _smooth(g: Program) -> Step:
    name = g.draw.choice(
        ("tanh", "sigmoid", "sin", "cos", "square", "softplus", "erf", "silu", "negative")
    )
    return Step(name, (g.pick(_floating),), lambda low, x: OPS[name](x), exact=name == "negative")


def _kinked(g: Program) -> Step:
    name = g.draw.choice(("abs", "relu", "sign", "round", "floor", "is_nan", "logical_not"))
    fits = _floating
    if name == "logical_not":
        fits = lambda x: x.dtype.is_bool  # noqa: E731
    return Step(name, (g.pick(fits, exact=True),), lambda low, x: OPS[name](x))


def _pair(g: Program, fits: Callable[[Tensor], bool], exact: bool = False) -> tuple[int, int]:
    i = g.pick(fits, exact)
    j = g.pick(lambda x: fits(x) and x.dtype == g.values[i].dtype, exact)
    if not g.fits(g.values[i].shape, g.values[j].shape):
        raise Unfit
    return i, j


def _binary(g: Program) -> Step:
    name = g.draw.choice(("add", "subtract", "multiply", "squared_difference"))
    return Step(name, _pair(g, _numbers), lambda low, x, y: OPS[name](x, y))


def _compared(g: Program) -> Step:
    name = g.draw.choice(("maximum", "minimum", "equal", "less", "greater_equal", "not_equal"))
    return Step(name, _pair(g, _numbers, exact=True), lambda low, x, y: OPS[name](x, y))


def _where(g: Program) -> Step:
    i, j = _pair(g, _numbers)
    k = g.pick(lambda x: x.dtype.is_bool)
    if not g.fits(*(g.values[n].shape for n in (i, j, k))):
        raise Unfit
    return Step("where", (k, i, j), lambda low, c, x, y: ops.where(c, x, y))


def _cast(g: Program) -> Step:
    i = g.pick(exact=True)
    dtype = g.draw.choice((g.float, g.float, tf.int32, tf.int64, tf.bool))
    if dtype.is_integer and _floating(g.values[i]) and not np.isfinite(g.values[i].numpy()).all():
        raise Unfit
    return Step(f"cast to {dtype.name}", (i,), lambda low, x: ops.cast(x, dtype))


def _reduced(g: Program) -> Step:
    i = g.pick(_numbers)
    dims = g.draw.sample(g.values[i].shape.names, g.draw.randint(0, len(g.values[i].shape)))
    names = ["reduce_sum"]
    if _floating(g.values[i]):
        names += ["reduce_mean", "reduce_logsumexp"]
    if g.exact[i]:
        names += ["reduce_max", "reduce_min"]
    name = g.draw.choice(names)
    exact = name in ("reduce_max", "reduce_min")
    return Step(f"{name} {dims}", (i,), lambda low, x: OPS[name](x, dims), exact)


def _reduced_bools(g: Program) -> Step:
    i = g.pick(lambda x: x.dtype.is_bool)
    dims = g.draw.sample(g.values[i].shape.names, g.draw.randint(0, len(g.values[i].shape)))
    name = g.draw.choice(("reduce_all", "reduce_any"))
    return Step(f"{name} {dims}", (i,), lambda low, x: OPS[name](x, dims))


def _softmax(g: Program) -> Step:
    i = g.pick(_floating)
    dim = g.pick_dim(g.values[i]).name
    name = g.draw.choice(("softmax", "log_softmax"))
    return Step(f"{name} {dim}", (i,), lambda low, x: OPS[name](x, dim), exact=False)


def _einsum(g: Program) -> Step:
    pair = _pair(g, _floating)
    union = g.values[pair[0]].shape | g.values[pair[1]].shape
    dims = g.draw.sample(union.names, g.draw.randint(0, len(union)))
    return Step(f"einsum to {dims}", pair, lambda low, x, y: ops.einsum([x, y], dims), exact=False)


def _transpose(g: Program) -> Step:
    i = g.pick()
    names = g.draw.sample(g.values[i].shape.names, len(g.values[i].shape))
    return Step(f"transpose to {names}", (i,), lambda low, x: ops.transpose(x, names))


def _rename(g: Program) -> Step:
    i = g.pick()
    old = g.pick_dim(g.values[i]).name
    new = g.new_name(g.values[i].shape)
    return Step(f"rename {old} to {new}", (i,), lambda low, x: ops.rename(x, {old: new}))


def _reshape(g: Program) -> Step:
    i = g.pick(lambda x: len(x.shape) >= 1 and x.shape.size > 0)
    shape = g.values[i].shape
    at = g.draw.randrange(len(shape))
    dims = list(shape.dims)
    if at + 1 < len(dims) and g.draw.random() < 0.5:
        name = g.draw.choice((dims[at].name, g.new_name(shape)))
        dims[at : at + 2] = [Dim(name, dims[at].size * dims[at + 1].size)]
    else:
        first = g.draw.choice([n for n in range(1, 13) if not dims[at].size % n])
        names = [dims[at].name, g.new_name(shape)]
        g.draw.shuffle(names)
        dims[at : at + 1] = [Dim(names[0], first), Dim(names[1], dims[at].size // first)]
    wanted = Shape(tuple(dims))
    return Step(f"reshape to '{wanted}'", (i,), lambda low, x: ops.reshape(x, wanted))


def _broadcast(g: Program) -> Step:
    i = g.pick()
    name = g.new_name(g.values[i].shape)
    dims = [*g.values[i].shape.dims, Dim(name, g.sizes[name])]
    g.draw.shuffle(dims)
    shape = Shape(tuple(dims))
    return Step(f"broadcast_to '{shape}'", (i,), lambda low, x: ops.broadcast_to(x, shape))


def _rows(g: Program) -> Step:
    i = g.pick()
    dim = g.pick_dim(g.values[i])
    begin = g.draw.randint(0, dim.size)
    size = g.draw.randint(0, dim.size - begin)
    if g.draw.random() < 0.5:
        before, after = g.draw.randint(0, 3), g.draw.randint(0, 3)
        if g.values[i].dtype.is_bool:
            raise Unfit
        text = f"pad {dim.name} {before} {after}"
        return Step(text, (i,), lambda low, x: ops.pad(x, dim.name, before, after, 1))
    text = f"slice {dim.name} {begin} {size}"
    return Step(text, (i,), lambda low, x: ops.slice(x, dim.name, begin, size))


def _joined(g: Program) -> Step:
    i = g.pick()
    x = g.values[i]
    if g.draw.random() < 0.5:
        dim = g.pick_dim(x).name
        text, call = f"concat {dim}", lambda low, x, y: ops.concat([x, y], dim)
    else:
        name = g.new_name(x.shape)
        at = g.draw.randint(0, len(x.shape))
        text = f"stack {name} {at}"

        def call(low: Lowering, x: Tensor, y: Tensor) -> Tensor:
            return ops.stack([x, y], name, at)

    j = g.pick(lambda y: y.dtype == x.dtype and set(y.shape.names) == set(x.shape.names))
    return Step(text, (i, j), call)


def _parted(g: Program) -> Step:
    i = g.pick()
    dim = g.pick_dim(g.values[i], 1)
    at = g.draw.randrange(dim.size)
    if g.draw.random() < 0.5:
        text = f"unstack {dim.name} {at}"
        return Step(text, (i,), lambda low, x: ops.unstack(x, dim.name)[at])
    sizes = [at, dim.size - at]
    return Step(f"split {dim.name} {sizes}", (i,), lambda low, x: ops.split(x, dim.name, sizes)[1])


def _along(g: Program) -> Step:
    i = g.pick(_numbers)
    dim = g.pick_dim(g.values[i], 1).name
    if g.draw.random() < 0.5:
        flags = {"exclusive": g.draw.random() < 0.5, "reverse": g.draw.random() < 0.5}
        text = f"cumsum {dim} {flags}"
        return Step(text, (i,), lambda low, x: ops.cumsum(x, dim, **flags), exact=False)
    offset, wrap = g.draw.randint(-4, 4), g.draw.random() < 0.5
    text = f"shift {dim} {offset} {wrap}"
    return Step(text, (i,), lambda low, x: ops.shift(x, dim, offset, wrap=wrap))


def _ordered(g: Program) -> Step:
    i = g.pick(_numbers, exact=True)
    dim = g.pick_dim(g.values[i], 1)
    if g.draw.random() < 0.4:
        return Step(f"argmax {dim.name}", (i,), lambda low, x: ops.argmax(x, dim.name))
    name = g.draw.choice((dim.name, g.new_name(g.values[i].shape)))
    k = Dim(name, g.draw.randint(1, dim.size))
    which = g.draw.randrange(2)
    text = f"top_k {dim.name} '{k}' [{which}]"
    return Step(text, (i,), lambda low, x: ops.top_k(x, dim.name, k)[which])


def _looked_up(g: Program) -> Step:
    i = g.pick(lambda x: x.dtype.is_integer)
    at = g.values[i]
    if g.draw.random() < 0.3:
        name = g.new_name(at.shape)
        dim = Dim(name, g.sizes[name])
        return Step(f"one_hot '{dim}'", (i,), lambda low, x: ops.one_hot(x, dim, g.float))
    j = g.pick(lambda x: any(dim.name not in at.shape.names for dim in x.shape))
    dim = g.draw.choice([d.name for d in g.values[j].shape if d.name not in at.shape.names])
    if not g.fits(g.values[j].shape, at.shape):
        raise Unfit
    return Step(f"gather {dim}", (j, i), lambda low, table, at: ops.gather(table, at, dim))


def _convolved(g: Program) -> Step:
    i = g.pick(lambda x: _floating(x) and len(x.shape) == 3 and x.shape.size > 0)
    j = g.pick(lambda x: x.dtype == g.values[i].dtype and len(x.shape) == 3 and x.shape.size > 0)
    shape, filters = g.values[i].shape, g.values[j].shape
    shared = [name for name in shape.names if name in filters.names]
    rows = [name for name in shape.names if name not in shared]
    windows = [name for name in filters.names if name not in shared]
    if len(shared) != 1 or not g.fits(shape, filters):
        raise Unfit
    pairs, strides = {rows[0]: windows[0]}, g.draw.randint(1, 2)
    padding = g.draw.choice(("SAME", "VALID"))
    text = f"conv1d {pairs} {padding} strides={strides}"
    return Step(
        text,
        (i, j),
        lambda low, x, w: ops.conv1d(x, w, pairs, padding=padding, strides=strides),
        exact=False,
    )


def _drawn(g: Program) -> Step:
    i = g.pick(_floating)
    seed = [g.draw.randrange(1000), g.draw.randrange(1000)]
    if g.draw.random() < 0.5:
        return Step("dropout", (i,), lambda low, x: ops.dropout(x, rate=0.3, seed=seed))
    shape = g.values[i].shape
    return Step(
        "+ random_normal",
        (i,),
        lambda low, x: x + ops.random_normal(low, shape, seed=seed, dtype=x.dtype),
        exact=False,
    )


def _alike(g: Program, x: Tensor) -> tuple[str, Callable[[Tensor], Tensor]]:
    """A function that keeps the shape and dtype of a floating value."""
    found: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("tanh", ops.tanh),
        ("sin", ops.sin),
        ("half", lambda y: 0.5 * y),
        ("less mean", lambda y: y - ops.reduce_mean(y) if y.shape.size else y),
    ]
    for dim in x.shape:
        if not dim.size:
            continue
        n = dim.name
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


def _looped(g: Program) -> Step:
    i = g.pick(_floating)
    text, function = _alike(g, g.values[i])
    turns = g.draw.randint(0, 3)

    def call(low: Lowering, x: Tensor) -> Tensor:
        counted = (tf.constant(0), x)
        return tf.while_loop(
            lambda n, y: n < turns, lambda n, y: (n + 1, function(y)), counted
        )[1]  # fmt: skip

    return Step(f"{turns} times ({text})", (i,), call, exact=False)


def _branched(g: Program) -> Step:
    i = g.pick(_floating)
    j = g.pick(lambda x: x.dtype.is_bool)
    texts, functions = zip(*(_alike(g, g.values[i]) for _ in range(2)), strict=True)

    def call(low: Lowering, x: Tensor, condition: Tensor) -> Tensor:
        first = ops.reduce_any(condition).slices[0]
        return tf.cond(first, lambda: functions[0](x), lambda: functions[1](x))

    return Step(f"if any ({texts[0]}) else ({texts[1]})", (i, j), call, exact=False)


def _in_function(g: Program) -> Step:
    i = g.pick(_floating)
    text, function = _alike(g, g.values[i])
    traced = {}

    def call(low: Lowering, x: Tensor) -> Tensor:
        # One for each lowering: that of a core is traced by all cores where they run eagerly.
        wrapped = traced.setdefault(id(low), tf.function(lambda y: function(y), autograph=False))
        return wrapped(x)

    return Step(f"function ({text})", (i,), call, exact=False)


OPS = {name: getattr(ops, name) for name in dir(ops) if not name.startswith("_")}
MAKERS = (
    *[_smooth, _kinked, _binary, _compared, _where, _cast, _reduced, _reduced_bools, _softmax],
    *[_einsum, _transpose, _rename, _reshape, _broadcast, _rows, _joined, _parted, _along],
    *[_ordered, _looked_up, _convolved, _drawn, _looped, _branched, _in_function],
    *[_einsum, _rename, _reshape, _binary, _looped, _branched],
)


def compute(program: Program) -> list[Any]:
    """Runs a program under its mesh, rules and lowering."""
    mesh, rules = program.mesh, program.rules
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    arrays = [tf.constant(array) for array, _ in program.inputs]
    if program.mode in ("eager", "function"):
        lowering = PlacementLowering(mesh, rules, devices)

        def run(*given: tf.Tensor) -> list[Any]:
            return program.whole(lowering, given)

        return (
            run(*arrays) if program.mode == "eager" else tf.function(run, autograph=False)(*arrays)
        )
    cores = Cores(mesh, devices, time_limit_s=120.0)

    def of_core(lowering: Lowering, *given: tf.Tensor) -> list[Any]:
        return program.whole(lowering, given)

    args = [arrays] * mesh.num_devices
    if program.mode == "cores":
        specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
        found = cores.function(of_core, rules, *specs)(args)
    else:
        found = cores.run_eagerly(of_core, rules, args)
    return found[-1]


def differences(program: Program) -> list[str]:
    """Describes the values that differ from those on one device."""
    arrays = [tf.constant(array) for array, _ in program.inputs]
    want = program.whole(program.one, arrays)
    got = compute(program)
    number = len(program.steps)
    sources = [i for i, array in enumerate(arrays) if array.dtype.is_floating]
    labels = [f"v{i + len(arrays)}" for i in range(number)]
    labels += [f"{kind} gradient of v{i}" for kind in ("first", "second") for i in sources]
    found = []
    for label, a, b in zip(labels, got, want, strict=False):
        if (a is None) != (b is None):
            found.append(f"{label}: {a} is not {b}")
        elif a is not None and not _close(a, b, TOLERANCES[program.float]):
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
