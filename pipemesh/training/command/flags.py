"""What all command lines that train share: flags of devices, parsing, errors of one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType

from absl import flags

from pipemesh.errors import PipemeshError
from pipemesh.hosts import silence, watch
from pipemesh.mesh import Mesh
from pipemesh.training.command import config

FLAGS = flags.FLAGS

# What a shell reports of a program that was interrupted, and of one that was asked the impossible.
INTERRUPTED = 130
BAD_INPUT = 2
# What tensors of int32 and float32 hold.
_LARGEST = {int: 2**31 - 1, float: 3.4e38}
# Each logical device has threads of its own; a larger mesh is a slip of the pen.
_MOST_CPU_DEVICES = 64
_HELP = {"-h", "-?", "--?"} | {
    dashes + name for dashes in ("-", "--") for name in ("help", "helpshort", "helpfull")
}

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()


class FlagError(PipemeshError, ValueError):
    """A flag has a value that cannot be had."""


def define_devices(
    mesh_shape: str | None, layout: str | None, about_mesh: str, about_layout: str
) -> None:
    """Defines the flags that say what a program runs on.

    Args:
        mesh_shape: the default of `--mesh_shape`.
        layout: the default of `--layout`.
        about_mesh: the help of `--mesh_shape`.
        about_layout: the help of `--layout`.
    """
    flags.DEFINE_string("mesh_shape", mesh_shape, about_mesh)
    flags.DEFINE_string("layout", layout, about_layout)
    flags.DEFINE_enum("device_type", "CPU", ["CPU", "GPU"], "What the devices are.")
    flags.DEFINE_string(
        "config", None, "A TOML file of flags, `steps = 300`; those of the command line come first."
    )


def parse(argv: list[str], program: ModuleType, about: str | None = None) -> None:
    """Parses the command line; shows help and ends the program where that is asked for.

    Args:
        argv: the program and its arguments.
        program: the module that defines the flags.
        about: what help begins with; None for what its docstring says.

    Raises:
        FlagError: a flag is unknown or malformed, or an argument is none.
    """
    asked = argv[1 : argv.index("--") if "--" in argv else None]
    if _HELP & set(asked):
        print(f"{about or program.__doc__}\n{FLAGS.module_help(program)}")
        sys.exit(0)
    try:
        rest = FLAGS(argv)
    except flags.Error as error:
        raise FlagError(str(error)) from error
    if len(rest) > 1:
        raise FlagError(f"{rest[1]!r} is no flag; flags begin with --")
    path = FLAGS.config if "config" in FLAGS else None
    if path is not None:
        config.apply(config.read(path), f"--config={path!r}", program)


def exit_code(program: Callable[[], int]) -> int:
    """Runs a program, and turns what users can mend into one line.

    Args:
        program: returns its exit code.
    """
    try:
        return program()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PipemeshError, OSError) as error:
        silence.speak()
        watch.check_workers(error)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        silence.speak()
        # Errors of TensorFlow say little of a worker that is lost.
        watch.check_workers(error)
        raise


def start_devices(mesh: Mesh, device_type: str) -> None:
    """Starts TensorFlow with the devices of a mesh.

    Raises:
        FlagError: there are not as many.
    """
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    wanted = mesh.num_devices
    given = f"--mesh_shape={str(mesh)!r} needs {wanted} {device_type}s, but"
    if device_type == "GPU":
        found = len(tf.config.list_physical_devices("GPU"))
        if wanted > found:
            raise FlagError(f"{given} {found} exist; use a smaller mesh or --device_type=CPU")
    elif wanted > _MOST_CPU_DEVICES:
        raise FlagError(
            f"{given} at most {_MOST_CPU_DEVICES} logical ones are made; use a smaller mesh"
        )
    else:
        start_cpu_devices(wanted)


def check_number(flag: str, value: float) -> None:
    """Checks that a flag's value is above 0, finite, and what a tensor holds.

    Raises:
        FlagError: it is not.
    """
    largest = _LARGEST[type(value)]
    if not value > 0:
        raise FlagError(f"--{flag}={value}: it must be above 0")
    if not (math.isfinite(value) and value <= largest):
        raise FlagError(f"--{flag}={value}: it must be finite, at most {largest}")
