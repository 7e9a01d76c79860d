"""Checks of the arguments and results of a core's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.lowering.arguments import described
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.lowering.tensor import Tensor


def check_program(program: Any) -> None:
    """Raises a LayoutError unless the program is a function."""
    if not callable(program):
        raise LayoutError(
            f"program is {program!r}, which is no function; write a function of a lowering and the "
            "arguments of a core"
        )


def check_args(args: Any, devices: Sequence[str]) -> None:
    """Raises a ShapeError unless there is one list of arguments per core of this process."""
    form = "give a list with a list of arguments for each core, as in [[x0], [x1]]"
    if not isinstance(args, list | tuple):
        raise ShapeError(f"the arguments of the cores are {described(args)}; {form}")
    if len(args) != len(devices):
        raise ShapeError(
            f"arguments for {len(args)} cores were given; this process has {len(devices)}: "
            f"{', '.join(devices)}"
        )
    for core, given in enumerate(args):
        if not isinstance(given, list | tuple):
            raise ShapeError(f"the arguments of core {core} are {described(given)}; {form}")


def check_specs(core: int, given: Sequence[Any], specs: Sequence[tf.TypeSpec]) -> None:
    """Raises a ShapeError unless a core's arguments have the traced specs.

    The traced program would use only a part of larger slices.
    """
    for position, value in enumerate(given):
        if isinstance(value, Tensor):
            raise ShapeError(
                f"argument {position} of core {core} is {value!r}; give the core its slice, and "
                "name its dims in the program: Tensor(lowering, (slice,), shape)"
            )
    try:
        tf.nest.assert_same_structure(tuple(given), specs)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"core {core} was given {len(given)} arguments; the program was built for "
            f"{len(specs)}: {', '.join(map(str, specs))}"
        ) from error
    flat = zip(tf.nest.flatten(tuple(given)), tf.nest.flatten(specs), strict=True)
    for position, (tensor, spec) in enumerate(flat):
        if not isinstance(spec, tf.TensorSpec):
            continue
        sizes = tensor.shape if isinstance(tensor, tf.Tensor) else np.shape(tensor)
        dtype = tensor.dtype if isinstance(tensor, tf.Tensor) else spec.dtype
        if dtype != spec.dtype or not spec.shape.is_compatible_with(sizes):
            raise ShapeError(
                f"argument {position} of core {core} is {dtype.name} of sizes "
                f"{sizes}, but the program was built for {spec.dtype.name} of sizes "
                f"{spec.shape}; give it slices of these sizes, or build a function for others"
            )


def run_program(
    program: Callable[..., Any], lowering: SimdLowering, args: Sequence[Any], warns: bool = True
) -> Any:
    """Calls the program of a core and rejects results with named dims: their lowering has ended."""
    result = program(lowering, *args)
    if warns:
        lowering.warn_of_misspelt_rules()
    todo = [result]
    for part in todo:
        if isinstance(part, Tensor):
            raise ShapeError(
                f"the program of a core returns {part!r}; return the whole, ops.export_tensor(x), "
                "or the core's slice, x.slices[0]"
            )
        if isinstance(part, list | tuple | Mapping):
            todo += part.values() if isinstance(part, Mapping) else part
    return result
