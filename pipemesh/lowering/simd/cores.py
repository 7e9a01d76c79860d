"""Runs the program of one core on the devices of a mesh, as one graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.gradients import outside_graphs
from pipemesh.backend.operations import on_each
from pipemesh.backend.static_shape import stand_for_alike
from pipemesh.errors import DeviceError, LayoutError, ShapeError
from pipemesh.lowering.arguments import described
from pipemesh.lowering.lowering import check_rules, devices_of
from pipemesh.lowering.simd.collectives import GroupKeys, TfLowering, eager_instance_keys
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import check_mesh

# Time limit for the other cores to end by themselves after one has failed.
_PATIENCE_SECONDS = 5.0


class Cores:
    """The devices of a mesh as cores, which run the program of one core.

    The devices are those of this process, or of workers that it drives
    (`pipemesh.backend.cluster.connect_workers`).

    Args:
        mesh: the mesh.
        devices: one device per core, in the order of the core numbers; each once.
        time_limit_s: limit for `run_eagerly`; None for no limit.

    Raises:
        DeviceError: the number of devices is not that of the cores, or a device does not exist or
            occurs twice.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.mesh import LayoutRules, Mesh, Shape
        >>> cores = Cores(Mesh.from_text("data:1"), ["CPU:0"])
        >>> def program(lowering, x):
        ...     return lowering.all_reduce((x,), ["data"])[0] + 1
        >>> run = cores.function(program, LayoutRules(), tf.TensorSpec([], tf.int32))
        >>> run([[tf.constant(2)]])[0].numpy()
        np.int32(3)
    """

    def __init__(
        self, mesh: Mesh, devices: Sequence[str], *, time_limit_s: float | None = 600.0
    ) -> None:
        check_mesh(mesh)
        self.devices = devices_of(mesh, devices, "cores", "each core")
        for device in self.devices:
            if self.devices.count(device) > 1:
                raise DeviceError(
                    f"device {device!r} was given for {self.devices.count(device)} cores; cores "
                    "wait for each other, so each needs a device of its own"
                )
        if time_limit_s is not None and time_limit_s <= 0:
            raise DeviceError(f"time_limit_s is {time_limit_s}; it is above 0, or None for ever")
        self.mesh = mesh
        self.time_limit_s = time_limit_s
        self.keys = GroupKeys(mesh)
        self.tokens: list[tf.Variable] = []
        self.numbers: list[tf.Tensor] = []
        for core, device in enumerate(self.devices):
            with tf.device(device):
                token = tf.Variable(0.0, trainable=False)  # pyright: ignore[reportArgumentType]
                self.tokens.append(token)
                self.numbers.append(tf.constant(core, tf.int32))

    def function(
        self, program: Callable[..., Any], rules: LayoutRules, *specs: tf.TensorSpec
    ) -> CoreFunction:
        """Traces a program once for all cores.

        Args:
            program: takes a `SimdLowering` and one tensor per spec; returns a nest of tensors. It
                must compute gradients inside.
            rules: the layout rules.
            *specs: specs of the program's other arguments, on one core.

        Raises:
            LayoutError: a rule names an unknown axis, or the program splits a size that does not
                divide.
        """
        _check_program(program)
        check_rules(rules)
        for spec in tf.nest.flatten(specs):
            if not isinstance(spec, tf.TypeSpec):
                raise ShapeError(
                    f"{spec!r} is no spec of an argument; write for example tf.TensorSpec([4, 6])"
                )
        return CoreFunction(self, program, rules, specs)

    def run_eagerly(
        self, program: Callable[..., Any], rules: LayoutRules, args: Sequence[Sequence[tf.Tensor]]
    ) -> list[Any]:
        """Runs a program once without tracing it, for tests and debuggers.

        Each core has a thread, and all are devices of this process. A program that runs often is
        faster as a `function`.

        Args:
            program: as for `function`; may call the collectives of `SimdLowering` at most 4096
                times.
            rules: the layout rules.
            args: one list of arguments per core.

        Returns:
            The program's result for each core.

        Raises:
            LayoutError: as for `function`.
            ShapeError: the number of argument lists is not the number of cores.
            DeviceError: cores were not done at the time limit, for example because they call
                different collectives.
            Exception: the error of the first core that failed. After an error in a collective,
                TensorFlow fails all later collectives of the process.
        """
        _check_program(program)
        check_rules(rules)
        rules.check(self.mesh)
        _check_args(args, self.devices)
        instance_keys = eager_instance_keys()
        runs = [futures.Future[Any]() for _ in self.devices]
        errors: list[BaseException] = []

        def run(i: int) -> None:
            core, token = self.numbers[i], self.tokens[i].handle
            lowering = TfLowering(self.mesh, rules, core, token, self.keys, iter(instance_keys))
            try:
                with tf.device(self.devices[i]):
                    result = _run_program(program, lowering, args[i], warns=not i)
                runs[i].set_result(result)
            except BaseException as error:
                errors.append(error)
                runs[i].set_exception(error)

        # The first core gets a thread too: the caller's graph and tapes belong to its thread, and
        # all cores must see the same. Daemon threads let a caller that gives up leave.
        for i in range(len(runs)):
            threading.Thread(target=run, args=(i,), daemon=True).start()
        _, late = futures.wait(runs, self.time_limit_s, futures.FIRST_EXCEPTION)
        if errors or late:
            error = errors[0] if errors else self._late([future in late for future in runs])
            _end(runs, f"another core failed: {type(error).__name__}: {error}")
            raise error
        return [future.result() for future in runs]

    def _late(self, is_late: Sequence[bool]) -> DeviceError:
        waiting = [core for core, late in enumerate(is_late) if late]
        ended = [core for core, late in enumerate(is_late) if not late]
        message = f"cores {_listed(waiting)} of mesh '{self.mesh}' were not done in "
        message += f"{self.time_limit_s:g} s"
        if ended:
            message += f", while cores {_listed(ended)} were"
        return DeviceError(
            f"{message}. Do all run the same program, as often? If it only takes longer, give "
            "Cores a higher time_limit_s"
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _end(runs: Sequence[futures.Future[Any]], why: str) -> None:
    """Ends all runs after a core has failed; abandons one that keeps computing."""
    if futures.wait(runs, _PATIENCE_SECONDS).not_done:
        collectives.abort(why)
    futures.wait(runs, _PATIENCE_SECONDS)


class CoreFunction:
    """A traced program that runs on all cores when called, in one graph that calls it for each.

    Attributes:
        concrete: the traced function of core number, token and arguments.
        lowering: the lowering of the trace, which has the communication costs.
    """

    def __init__(
        self,
        cores: Cores,
        program: Callable[..., Any],
        rules: LayoutRules,
        specs: Sequence[tf.TensorSpec],
    ) -> None:
        self._cores = cores
        self._specs = specs
        self.lowering: SimdLowering

        def core_program(core: tf.Tensor, token: tf.Tensor, *args: tf.Tensor) -> Any:
            stand_for_alike(token, cores.tokens[0])
            self.lowering = TfLowering(cores.mesh, rules, core, token, cores.keys)
            return _run_program(program, self.lowering, args)

        # TensorFlow must not inline the calls: collectives in loops of several cores in one graph
        # wait for each other for ever.
        function = tf.function(
            core_program, autograph=False, experimental_attributes={"_noinline": True}
        )
        self.concrete = function.get_concrete_function(
            tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource), *specs
        )
        self._run = tf.function(self._run_all, autograph=False)

    def __call__(self, args: Sequence[Sequence[tf.Tensor]]) -> list[Any]:
        """Runs one step, given a list of arguments per core, and returns each core's result."""
        devices = self._cores.devices
        _check_args(args, devices)
        # Cores see neither the caller's graph nor its tapes.
        with outside_graphs():
            on_devices: list[Any] = []
            for core, (device, of_core) in enumerate(zip(devices, args, strict=True)):
                _check_specs(core, of_core, self._specs)
                with tf.device(device):
                    tensors = tf.nest.map_structure(_tensor_of, tuple(of_core), self._specs)
                on_devices.append(tensors)
            return self._run(on_devices)

    def _run_all(self, args: Sequence[Sequence[Any]]) -> list[Any]:
        cores = self._cores

        def run(core: tf.Tensor, token: Any, of_core: Sequence[Any]) -> Any:
            return self.concrete(core, token.handle, *of_core)

        return on_each(cores.devices, run, cores.numbers, cores.tokens, args)


def _tensor_of(value: Any, spec: tf.TypeSpec) -> Any:
    return tf.convert_to_tensor(value, spec.dtype) if isinstance(spec, tf.TensorSpec) else value


def _check_program(program: Any) -> None:
    """Raises a LayoutError unless the program is a function."""
    if not callable(program):
        raise LayoutError(
            f"program is {program!r}, which is no function; write a function of a lowering and the "
            "arguments of a core"
        )


def _check_args(args: Any, devices: Sequence[str]) -> None:
    """Raises a ShapeError unless there is one list of arguments per core."""
    form = "give a list with a list of arguments for each core, as in [[x0], [x1]]"
    if not isinstance(args, list | tuple):
        raise ShapeError(f"the arguments of the cores are {described(args)}; {form}")
    if len(args) != len(devices):
        raise ShapeError(
            f"arguments for {len(args)} cores were given; the mesh has {len(devices)}: "
            f"{', '.join(devices)}"
        )
    for core, of_core in enumerate(args):
        if not isinstance(of_core, list | tuple):
            raise ShapeError(f"the arguments of core {core} are {described(of_core)}; {form}")


def _check_specs(core: int, of_core: Sequence[Any], specs: Sequence[tf.TypeSpec]) -> None:
    """Raises a ShapeError unless a core's arguments have the traced specs.

    The traced program would use only a part of larger slices.
    """
    for position, value in enumerate(of_core):
        if isinstance(value, Tensor):
            raise ShapeError(
                f"argument {position} of core {core} is {value!r}; give the core its slice, and "
                "name its dims in the program: Tensor(lowering, (slice,), shape)"
            )
    try:
        tf.nest.assert_same_structure(tuple(of_core), specs)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"core {core} was given {len(of_core)} arguments; the program was built for "
            f"{len(specs)}: {', '.join(map(str, specs))}"
        ) from error
    flat = zip(tf.nest.flatten(tuple(of_core)), tf.nest.flatten(specs), strict=True)
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


def _run_program(
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
