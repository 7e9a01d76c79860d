"""Runs the program of one core on every core of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from pipemesh.errors import DeviceError
from pipemesh.lowering.simd import SimdLowering
from pipemesh.lowering.tf_collectives import GroupKeys, TfCollectives, eager_instance_keys
from pipemesh.mesh import LayoutRules, Mesh


class Cores:
    """The cores of a mesh that belong to this process, as TensorFlow devices.

    Args:
        mesh: the mesh, of all processes together.
        devices: of this process, in the order of their cores' numbers.
        first_core: the number of the first one.

    Raises:
        DeviceError: the mesh does not have so many cores.

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
        # They wait for each other, so there is one for each core but the caller's.
        self._threads = ThreadPoolExecutor(max(1, len(devices) - 1), "pipemesh_core")
        self._running = threading.Lock()

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
            Exception: what the first core raised that failed; see `CoreFunction`.
        """
        instance_keys = eager_instance_keys()

        def run(i: int) -> Any:
            core = self.numbers[i]
            collectives = TfCollectives(
                self.mesh, core, self.tokens[i].handle, self.keys, iter(instance_keys)
            )
            return program(SimdLowering(self.mesh, rules, collectives, core), *args[i])

        return self.on_all(run)

    def on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """Calls a function for each core of this process, each under the core's device.

        The first core's runs in the caller's thread, the others in threads of their own. Calls
        from several threads run one after the other.

        Args:
            run: takes the position of the core among those of this process.

        Returns:
            What it returned, core by core.

        Raises:
            Exception: what the first core raised that failed.
        """
        errors: list[BaseException] = []

        def run_core(i: int) -> Any:
            try:
                with tf.device(self.devices[i]):
                    return run(i)
            except BaseException as error:
                errors.append(error)

        if not self.devices:
            return []
        with self._running:
            others = [self._threads.submit(run_core, i) for i in range(1, len(self.devices))]
            results = [run_core(0), *(other.result() for other in others)]
        if errors:
            raise errors[0]
        return results


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
            return program(self.lowering, *args)

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
            Exception: what the first core raised that failed. After an error in a collective,
                TensorFlow fails all later collectives of the process.
        """
        cores = self._cores

        def run(i: int) -> Any:
            return self.concrete(cores.numbers[i], cores.tokens[i].handle, *args[i])

        return cores.on_all(run)
