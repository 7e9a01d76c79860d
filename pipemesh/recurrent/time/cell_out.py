"""A function from a cell's state to the inputs of the layer above, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.structure import Gradient, Structure, is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.randomness import loop_scope
from pipemesh.recurrent.time.rows import Rows
from pipemesh.recurrent.time.traced_function import TracedFunction

_TIME = tf.TensorSpec([], tf.int32)


class CellOutGradients(NamedTuple):
    """Gradients of the inputs of the function, flat; None where there is none."""

    state: list[tf.Tensor | None]
    captures: list[Gradient]


class CellOut:
    """A function of the state of one time step, called once, with symbolic tensors.

    Args:
        name: names it in errors.
        forward: takes the state, returns nested tensors.
        gradient: takes the gradient of these, returns the gradient of the state; or None.
        state: structure of the state.
        specs: shapes and dtypes of the state's tensors.
        device: its device.

    Attributes:
        name: as given.
        gradient: as given.
        state: as given.
        state_specs: as given.
        device: as given.
        structure: of its results.
        specs: shapes and dtypes of its results.
        captures: the outside tensors that it uses.

    Raises:
        PipelineError: it has side effects, reads variables, returns no tensor or one without a
            static shape, or captures tensors although it has a user-defined gradient.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Any], Any],
        gradient: Callable[[Any], Any] | None,
        state: Structure,
        specs: Sequence[tf.TensorSpec],
        device: str,
    ) -> None:
        self.name, self.gradient, self.device = name, gradient, device
        self.state, self.state_specs = state, specs
        self.structure = Structure((), name)
        keyed_by: list[tf.Tensor] = []

        def run(t: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(device), loop_scope(tf.cast(t, tf.int64)) as outside:
                keyed_by[:] = outside
                outputs = forward(state.pack(flat))
                self.structure = Structure(outputs, f"what {name} returned")
                # An output that is an input gets its own name.
                return [tf.identity(x) for x in self.structure.tensors(outputs)]

        self._function = TracedFunction(run, [_TIME, *specs], name)
        self._function.check_pure(name)
        self.captures = self._function.captures
        self.specs = [tf.TensorSpec(x.shape, x.dtype) for x in self._function.results]
        if not self.specs:
            raise PipelineError(f"{name} returned no tensor; the layer above needs inputs")
        for spec, leaf in zip(self.specs, self.structure.leaf_names, strict=True):
            if not spec.shape.is_fully_defined():
                raise PipelineError(
                    f"{leaf} has shape {spec.shape}; layers need inputs of static shapes: set it "
                    "with tf.ensure_shape"
                )
        captured = [x for x in self.captures if not any(x is key for key in keyed_by)]
        if gradient is not None and captured:
            names = ", ".join(self._function.name_of(x) for x in captured)
            raise PipelineError(
                f"{name} uses tensors that it was not given: {names}; they would get no gradient, "
                "since the gradient is given by hand; leave it out or put them in the state"
            )

    def __call__(
        self, t: tf.Tensor, state: Sequence[tf.Tensor], captures: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Computes the function for time `t` (int32 scalar)."""
        return self._function(t, *state, captures=captures)

    def rows(self, size: tf.Tensor) -> list[Rows]:
        """Returns storage for its results over time."""
        return [
            Rows(np.array(spec.shape.as_list(), np.int32), spec.shape, spec.dtype, size)
            for spec in self.specs
        ]


class CellOutGradient:
    """The gradient of a `CellOut`, for one time step.

    Args:
        out: the function.

    Attributes:
        found: symbolic gradients, None where there is none.
        reads_state: True if it reads the state.

    Raises:
        PipelineError: the user's gradient returns an invalid structure or has side effects.
    """

    def __init__(self, out: CellOut) -> None:
        captures = [tf.TensorSpec(x.shape, x.dtype) for x in out.captures]
        d_specs = [spec for spec in out.specs if is_differentiable(spec)]
        num_state, num_captures = len(out.state_specs), len(captures)

        def run(t: tf.Tensor, *flat: tf.Tensor) -> CellOutGradients:
            state, rest = flat[:num_state], flat[num_state:]
            captured, d_outputs = rest[:num_captures], rest[num_captures:]
            with tf.device(out.device), loop_scope(tf.cast(t, tf.int64)):
                if out.gradient is not None:
                    return CellOutGradients(_by_user(out, d_outputs), [None] * num_captures)
                ys = [y for y in out(t, state, captured) if is_differentiable(y)]
                sources = [*state, *captured]
                grads = _derived(ys, sources, d_outputs)
                of_state = [
                    None if g is None else tf.convert_to_tensor(g) for g in grads[:num_state]
                ]
                return CellOutGradients(of_state, grads[num_state:])

        what = f"the gradient of {out.name}"
        self._function = TracedFunction(run, [_TIME, *out.state_specs, *captures, *d_specs], what)
        self._function.check_pure(what)
        self.found: CellOutGradients = self._function.results
        self.reads_state = any(n <= num_state for n in self._function.used_arguments() if n > 0)

    def __call__(
        self,
        t: tf.Tensor,
        state: Sequence[tf.Tensor],
        captures: Sequence[tf.Tensor],
        d_outputs: Sequence[tf.Tensor],
    ) -> CellOutGradients:
        """Computes the gradients for time `t` (int32 scalar).

        `d_outputs` are the gradients of the differentiable outputs.
        """
        return self._function(t, *state, *captures, *d_outputs)


def _derived(
    ys: list[tf.Tensor], sources: Sequence[tf.Tensor], d_ys: Sequence[tf.Tensor]
) -> list[Gradient]:
    xs = [x for x in sources if is_differentiable(x)]
    grads = iter(tf.gradients(ys, xs, list(d_ys)) if ys and xs else [None] * len(xs))
    return [next(grads) if is_differentiable(x) else None for x in sources]


def _by_user(out: CellOut, d_outputs: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    assert out.gradient is not None
    given = iter(d_outputs)
    full = [
        next(given) if is_differentiable(spec) else tf.zeros(spec.shape, spec.dtype)
        for spec in out.specs
    ]
    returned = out.gradient(out.structure.pack(full))
    what = f"what the gradient of {out.name} returned"
    grads = out.state.gradients(out.state_specs, returned, what)
    return [None if g is None else tf.convert_to_tensor(g) for g in grads]
