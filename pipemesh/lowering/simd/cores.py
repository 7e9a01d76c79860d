"""Runs the program of one core on every core of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.devices import check_devices_exist
from pipemesh.backend.static_shape import stand_for_alike
from pipemesh.errors import DeviceError, ShapeError
from pipemesh.lowering.lowering import check_rules
from pipemesh.lowering.simd.core_program import (
    check_args,
    check_program,
    check_specs,
    run_program,
)
from pipemesh.lowering.simd.partners import Agreement, Partners
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.lowering.simd.tf_collectives import GroupKeys, TfCollectives, eager_instance_keys
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.checks import whole_number
from pipemesh.mesh.mesh import check_mesh

# Seconds until an error of any core but the first is noticed.
_POLL_SECONDS = 0.1
# Time limit for the other cores to end by themselves after one has failed.
_PATIENCE_SECONDS = 5.0
# Errors of collectives when another process is gone, and the interval between checks for that.
_OF_PARTNERS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
)
_LOOKS = 3


class Cores:
    """The cores of a mesh that belong to this process, as TensorFlow devices.

    A core waits in a collective for all others. Therefore every cause of an endless wait is an
    error:

    * A core without a device is reported before anything runs.
    * A process that builds another program is reported when the program is built.
    * A process that stops answering is reported some seconds later.
    * Anything else is reported at the time limit.

    Args:
        mesh: the mesh of all processes together.
        devices: the devices of this process in the order of their core numbers; each once.
        first_core: the number of the first device's core.
        time_limit_s: limit for a step, and for waiting for other processes while a program is
            built; None for no limit.

    Raises:
        DeviceError: the mesh has fewer cores, devices are missing and there is no other process, or
            a device does not exist or occurs twice.

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
        self,
        mesh: Mesh,
        devices: Sequence[str],
        first_core: int = 0,
        time_limit_s: float | None = 600.0,
    ) -> None:
        check_mesh(mesh)
        self.devices = check_devices_exist(devices)
        if whole_number(first_core) is None:
            raise DeviceError(f"first_core is {first_core!r}; give a whole number")
        if not 0 <= first_core < first_core + len(devices) <= mesh.num_devices:
            raise DeviceError(
                f"{len(devices)} devices from core {first_core} on were given for mesh '{mesh}', "
                f"which has cores 0 to {mesh.num_devices - 1}"
            )
        for device in self.devices:
            if self.devices.count(device) > 1:
                raise DeviceError(
                    f"device {device!r} was given for {self.devices.count(device)} cores; cores "
                    "wait for each other, so each needs a device of its own"
                )
        if time_limit_s is not None and time_limit_s <= 0:
            raise DeviceError(f"time_limit_s is {time_limit_s}; it is above 0, or None for ever")
        self.partners = Partners()
        if self.partners.alone and len(devices) < mesh.num_devices:
            raise DeviceError(
                f"{len(devices)} devices were given for mesh '{mesh}', which has "
                f"{mesh.num_devices} cores, and no other process is connected, so nobody runs the "
                "others; give one device for each core, or call connect_processes first"
            )
        self.mesh = mesh
        self.first_core = first_core
        self.time_limit_s = time_limit_s
        self.keys = GroupKeys(mesh)
        self.tokens: list[tf.Variable] = []
        self.numbers: list[tf.Tensor] = []
        for core, device in enumerate(self.devices, first_core):
            with tf.device(device):
                token = tf.Variable(0.0, trainable=False)  # pyright: ignore[reportArgumentType]
                self.tokens.append(token)
                self.numbers.append(tf.constant(core, tf.int32))
        self.agreement: Agreement | None = None
        if len(devices) < mesh.num_devices:
            self.agreement = Agreement(
                self.partners, mesh.num_devices, self.devices, first_core, self.tokens
            )

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
            DeviceError: another process builds another program, or does not come in time.
        """
        check_program(program)
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

        A program that runs often is faster as a `function`.

        Args:
            program: as for `function`; may call the collectives of `SimdLowering` at most 4096
                times.
            rules: the layout rules.
            args: one list of arguments per core of this process.

        Returns:
            The program's result for each core of this process.

        Raises:
            LayoutError: a rule names an unknown axis, or the program splits a size that does not
                divide.
            ShapeError: the number of argument lists is not the number of cores.
            DeviceError: see `on_all`.
            Exception: the error of the first core that failed; see `CoreFunction`.
        """
        check_program(program)
        check_args(args, self.devices)
        instance_keys = eager_instance_keys()

        def run(i: int) -> Any:
            core = self.numbers[i]
            collectives = TfCollectives(
                self.mesh, core, self.tokens[i].handle, self.keys, iter(instance_keys)
            )
            lowering = SimdLowering(self.mesh, rules, collectives, core)
            return run_program(program, lowering, args[i], warns=not i)

        return self.on_all(run)

    def on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """Calls a function for each core of this process, in threads, under the core's device.

        A core that fails leaves the others waiting in a collective. They get some seconds to end by
        themselves. Then this method aborts TensorFlow's collectives for the rest of the process. It
        does the same if another process is gone or the time limit is over.

        Args:
            run: takes the position of the core among the cores of this process.

        Returns:
            The results, core by core.

        Raises:
            DeviceError: another process stopped answering, or the time limit is over.
            Exception: the error of the first core that failed.
        """
        results: list[Any] = [None] * len(self.devices)
        errors: list[BaseException] = []

        def run_core(i: int) -> None:
            try:
                with tf.device(self.devices[i]):
                    results[i] = run(i)
            except BaseException as error:
                errors.append(error)

        # The first core gets a thread too: the caller's graph and tapes belong to its thread, and
        # all cores must see the same. Daemon threads let a caller that gives up leave.
        threads = [
            threading.Thread(target=run_core, args=(i,), daemon=True)
            for i in range(len(self.devices))
        ]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(_POLL_SECONDS)
                trouble = self._trouble(threads, time.monotonic() - begin)
                if trouble and not errors:
                    _end(threads, trouble)
                    # Cores that needed no other core have ended by now.
                    if errors or any(each.is_alive() for each in threads):
                        raise DeviceError(trouble) from (errors[0] if errors else None)
        if errors:
            _end(threads, f"another core failed: {type(errors[0]).__name__}: {errors[0]}")
            lost = self._lost_by(errors[0])
            if lost:
                raise DeviceError(lost) from errors[0]
            raise errors[0]
        return results

    def _trouble(self, threads: Sequence[threading.Thread], seconds: float) -> str | None:
        """Returns the reason why waiting any longer is useless, or None."""
        gone = self.partners.gone()
        if gone:
            return self._gone_text(gone)
        if self.time_limit_s is None or seconds < self.time_limit_s:
            return None
        waiting = [i for i, t in enumerate(threads, self.first_core) if t.is_alive()]
        ended = [i for i, t in enumerate(threads, self.first_core) if not t.is_alive()]
        told = f"cores {_listed(waiting)} of mesh '{self.mesh}' were not done in "
        told += f"{self.time_limit_s:g} s"
        if ended:
            told += f", while cores {_listed(ended)} were"
        silent = self.partners.silent()
        if silent:
            told += f": {self.partners.describe(silent)} does not answer"
        elif not self.partners.alone:
            told += f": {self.partners.describe(self.partners.others)} answers, but has not come"
        return (
            f"{told}. Do all run the same program, as often? If it only takes longer, give Cores "
            "a higher time_limit_s"
        )

    def _lost_by(self, error: BaseException) -> str | None:
        """Returns the cause of the error if another process is gone, else None."""
        if self.partners.alone or not isinstance(error, _OF_PARTNERS):
            return None
        for _ in range(_LOOKS):
            silent = self.partners.silent()
            if silent:
                return self._gone_text(silent)
            time.sleep(1.0)
        return None

    def _gone_text(self, processes: Sequence[int]) -> str:
        return (
            f"{self.partners.describe(processes)} does not answer any more; it was killed, has "
            "failed or has ended before the others. Look at its log, and start all processes again"
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _end(threads: Sequence[threading.Thread], why: str) -> None:
    """Ends all threads after a core has failed; abandons a thread that keeps computing."""
    _join(threads)
    if any(thread.is_alive() for thread in threads):
        collectives.abort(why)
    _join(threads)


def _join(threads: Sequence[threading.Thread]) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


class CoreFunction:
    """A traced program that runs on all cores of this process when called.

    Each core has a thread: a collective waits until all cores have called it, so calling one core
    after the other would wait for ever. A single graph with the calls of all cores would grow with
    their number.

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
        steps = [f"mesh '{cores.mesh}'", f"layout rules '{rules}'", *map(str, specs)]

        def core_program(core: tf.Tensor, token: tf.Tensor, *args: tf.Tensor) -> Any:
            stand_for_alike(token, cores.tokens[0])
            collectives = TfCollectives(cores.mesh, core, token, cores.keys, calls=steps)
            self.lowering = SimdLowering(cores.mesh, rules, collectives, core)
            return run_program(program, self.lowering, args)

        failed: Exception | None = None
        try:
            self.concrete = tf.function(core_program, autograph=False).get_concrete_function(
                tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource), *specs
            )
        except Exception as error:
            failed = error
        if cores.agreement is not None:
            told = None if failed is None else f"{type(failed).__name__}: {failed}"[:2000]
            try:
                cores.agreement.check(steps, told, cores.on_all)
            except DeviceError:
                # The local error explains more than the collective's.
                if failed is None:
                    raise
        if failed is not None:
            raise failed

    def __call__(self, args: Sequence[Sequence[tf.Tensor]]) -> list[Any]:
        """Runs one step on each core.

        Args:
            args: one list of arguments per core of this process.

        Returns:
            The program's result for each core of this process.

        Raises:
            ShapeError: the number of argument lists is not the number of cores, or an argument does
                not match its spec.
            DeviceError: see `Cores.on_all`.
            Exception: the error of the first core that failed. After an error in a collective,
                TensorFlow fails all later collectives of the process.
        """
        cores = self._cores
        check_args(args, cores.devices)
        for core, given in enumerate(args, cores.first_core):
            check_specs(core, given, self._specs)

        def run(i: int) -> Any:
            return self.concrete(cores.numbers[i], cores.tokens[i].handle, *args[i])

        return cores.on_all(run)
