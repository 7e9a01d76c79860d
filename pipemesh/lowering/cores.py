"""Runs the program of one core on every core of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Its door for those who wait in a collective that another will never call.
from tensorflow.python.eager import context as tf_context

from pipemesh.errors import DeviceError
from pipemesh.lowering.devices import check_devices_exist
from pipemesh.lowering.simd import SimdLowering
from pipemesh.lowering.tf_collectives import GroupKeys, TfCollectives, eager_instance_keys
from pipemesh.mesh import LayoutRules, Mesh

# An error of another core than the first is seen after so long.
_POLL_SECONDS = 0.1
# For the others to end by themselves, after a core has failed.
_PATIENCE_SECONDS = 5.0


class Cores:
    """The cores of a mesh that belong to this process, as TensorFlow devices.

    Args:
        mesh: the mesh, of all processes together.
        devices: of this process, in the order of their cores' numbers.
        first_core: the number of the first one.

    Raises:
        DeviceError: the mesh does not have so many cores, or a device does not exist.

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

    def __init__(self, mesh: Mesh, devices: Sequence[str], first_core: int = 0) -> None:
        if not 0 <= first_core <= first_core + len(devices) <= mesh.num_devices:
            raise DeviceError(
                f"{len(devices)} devices from core {first_core} on were given for mesh '{mesh}', "
                f"which has cores 0 to {mesh.num_devices - 1}"
            )
        check_devices_exist(devices)
        self.mesh = mesh
        self.devices = tuple(devices)
        self.first_core = first_core
        self.keys = GroupKeys(mesh)
        self.tokens: list[tf.Variable] = []
        self.numbers: list[tf.Tensor] = []
        for core, device in enumerate(devices, first_core):
            with tf.device(device):
                self.tokens.append(tf.Variable(0.0, trainable=False))
                self.numbers.append(tf.constant(core, tf.int32))

    def function(
        self, program: Callable[..., Any], rules: LayoutRules, *specs: tf.TensorSpec
    ) -> CoreFunction:
        """Traces a program, once for all cores.

        Args:
            program: takes a `SimdLowering` and a tensor for each spec; returns a nest of tensors.
                If it asks for gradients, it does so inside.
            rules: the layout rules.
            *specs: of the program's other arguments, on one core.

        Raises:
            LayoutError: a rule names an unknown axis, or the program splits what does not divide.
        """
        return CoreFunction(self, program, rules, specs)

    def run_eagerly(
        self, program: Callable[..., Any], rules: LayoutRules, args: Sequence[Sequence[tf.Tensor]]
    ) -> list[Any]:
        """Runs a program once without tracing it, for tests and debuggers.

        A program that runs often is faster as a `function`.

        Args:
            program: as for `function`; it calls the collectives of `SimdLowering` at most 4096
                times.
            rules: the layout rules.
            args: for each core of this process its arguments.

        Returns:
            For each core of this process what the program returned.

        Raises:
            LayoutError: a rule names an unknown axis, or the program splits what does not divide.
            ValueError: there are arguments for more or fewer cores.
            Exception: what the first core raised that failed; see `CoreFunction`.
        """
        self.check_args(args)
        instance_keys = eager_instance_keys()

        def run(i: int) -> Any:
            core = self.numbers[i]
            collectives = TfCollectives(
                self.mesh, core, self.tokens[i].handle, self.keys, iter(instance_keys)
            )
            lowering = SimdLowering(self.mesh, rules, collectives, core)
            result = program(lowering, *args[i])
            if not i:
                lowering.warn_of_misspelt_rules()
            return result

        return self.on_all(run)

    def check_args(self, args: Sequence[Any]) -> None:
        """Raises a ValueError unless there is one element for each core of this process."""
        if len(args) != len(self.devices):
            raise ValueError(
                f"arguments for {len(args)} cores were given; this process has "
                f"{len(self.devices)}: {', '.join(self.devices)}"
            )

    def on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """Calls a function for each core of this process, in threads, under the core's device.

        A core that fails leaves the others waiting in a collective. They are given some seconds to
        end by themselves; then TensorFlow's collectives are aborted, for the rest of the process.

        Args:
            run: takes the position of the core among those of this process.

        Returns:
            What it returned, core by core.

        Raises:
            Exception: what the first core raised that failed.
        """
        results: list[Any] = [None] * len(self.devices)
        errors: list[BaseException] = []

        def run_core(i: int) -> None:
            try:
                with tf.device(self.devices[i]):
                    results[i] = run(i)
            except BaseException as error:
                errors.append(error)

        # For the first core as well: the caller's graph and tapes are its thread's, and no core
        # may see what the others do not.
        threads = [threading.Thread(target=run_core, args=(i,)) for i in range(len(self.devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(_POLL_SECONDS)
        if errors:
            _end(threads, errors[0])
            raise errors[0]
        return results


def _end(threads: Sequence[threading.Thread], error: BaseException) -> None:
    """Has all threads end after a core has failed."""
    until = time.monotonic() + _PATIENCE_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        tf_context.context().abort_collective_ops(
            tf.errors.ABORTED, f"another core failed: {type(error).__name__}: {error}"
        )
    for thread in threads:
        thread.join()


class CoreFunction:
    """A program that has been traced; calling it runs it on all cores of this process.

    Each core has a thread: a collective waits until all cores have called it, so a caller that
    ran one core after the other would wait for ever. One graph that held all cores' calls would
    grow with their number.

    Attributes:
        concrete: the traced function of core number, token and arguments.
        lowering: the one that the program was traced with, for its communication costs.
    """

    def __init__(
        self,
        cores: Cores,
        program: Callable[..., Any],
        rules: LayoutRules,
        specs: Sequence[tf.TensorSpec],
    ) -> None:
        self._cores = cores
        self.lowering: SimdLowering | None = None

        def core_program(core: tf.Tensor, token: tf.Tensor, *args: tf.Tensor) -> Any:
            collectives = TfCollectives(cores.mesh, core, token, cores.keys)
            self.lowering = SimdLowering(cores.mesh, rules, collectives, core)
            result = program(self.lowering, *args)
            self.lowering.warn_of_misspelt_rules()
            return result

        self.concrete = tf.function(core_program, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource), *specs
        )

    def __call__(self, args: Sequence[Sequence[tf.Tensor]]) -> list[Any]:
        """Runs one step on each core.

        Args:
            args: for each core of this process its arguments.

        Returns:
            For each core of this process what the program returned.

        Raises:
            ValueError: there are arguments for more or fewer cores.
            Exception: what the first core raised that failed. After an error in a collective,
                TensorFlow fails all later collectives of the process.
        """
        cores = self._cores
        cores.check_args(args)

        def run(i: int) -> Any:
            return self.concrete(cores.numbers[i], cores.tokens[i].handle, *args[i])

        return cores.on_all(run)
