"""What all command lines that train share: flags of devices, parsing, errors of one line."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from absl import flags

from pipemesh.errors import DeviceError, PipemeshError
from pipemesh.hosts import Cluster, watch
from pipemesh.mesh import Mesh
from pipemesh.training.command import config

FLAGS = flags.FLAGS

# What a shell reports of a program that was interrupted, and of one that was asked the impossible.
INTERRUPTED = 130
BAD_INPUT = 2
_SEEDS = range(-(2**63), 2**63)
# What tensors of int32 and float32 hold.
_LARGEST = {int: 2**31 - 1, float: 3.4e38}
# Each logical device has threads of its own; a larger mesh is a slip of the pen.
_MOST_CPU_DEVICES = 64
_HELP = {"-h", "-?", "--?"} | {
    dashes + name for dashes in ("-", "--") for name in ("help", "helpshort", "helpfull")
}

# The groups of flags in the order of `--help`.
FILES, TEXTS, MODEL = "model and files", "texts", "size and optimizer of the model"
PLAN, TRAINING, WORKERS = "plan", "training", "workers"
_GROUPS = (FILES, TEXTS, PLAN, TRAINING, MODEL, WORKERS)
_group_of: dict[str, str] = {}

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()


class group:
    """Puts the flags that are defined meanwhile, or by a function, into a group of `--help`.

    Args:
        title: one of the groups above.
    """

    def __init__(self, title: str) -> None:
        self._title, self._before = title, set[str]()

    def __enter__(self) -> None:
        self._before = set(FLAGS)

    def __exit__(self, *_: object) -> None:
        for name in set(FLAGS) - self._before:
            _group_of.setdefault(name, self._title)

    def __call__(self, define: Callable[..., None]) -> Any:
        """Wraps a function here: flags belong to the first module that does not disclaim them."""

        @functools.wraps(define)
        def grouped(*args: Any, **kwargs: Any) -> None:
            with group(self._title):
                define(*args, **kwargs)

        return grouped


class FlagError(PipemeshError, ValueError):
    """Invalid flag value."""


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
    flags.DEFINE_enum(
        "device_type",
        None,
        ["CPU", "GPU"],
        "What the devices are; default: GPU if this machine has enough of them for the mesh and "
        "--cluster names no workers, else CPU.",
    )
    with group(FILES):
        flags.DEFINE_string(
            "config",
            None,
            "A TOML file of flags, such as `steps = 300`; the command line has precedence.",
        )


def parse(
    argv: list[str],
    program: ModuleType,
    about: str | None = None,
    taken: Collection[str] | None = None,
    why: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Parses the command line; shows help and ends the program where that is asked for.

    Args:
        argv: the program and its arguments.
        program: the module that defines the flags.
        about: what help begins with; None for what its docstring says.
        taken: names of the flags that the program uses; None for all of the module. Others are
            refused. A TOML file may have them, as one that a training wrote does.
        why: by name, why a flag is refused; the others are for training.

    Raises:
        FlagError: a flag is unknown, malformed or refused, or an argument is no flag.
    """
    names = set(config.names(program))
    refused = names.difference(names if taken is None else taken)
    if is_help(argv):
        show_help(about or program.__doc__ or "", names - refused)
        sys.exit(0)
    end = argv.index("--") if "--" in argv else len(argv)
    try:
        rest = FLAGS([*map(_with_underscores, argv[:end]), *argv[end:]])
    except flags.Error as error:
        raise FlagError(str(error)) from error
    if len(rest) > 1:
        raise FlagError(f"{rest[1]!r} is no flag; flags begin with --")
    for name in sorted(refused):
        if FLAGS[name].present:
            raise FlagError(f"--{name} {why.get(name, 'is for training')}; leave it out")
    path = FLAGS.config if "config" in FLAGS else None
    if path is not None:
        values = config.read(path)
        kept = {name: value for name, value in values.items() if name not in refused}
        config.apply(kept, f"--config={path!r}", program)
    for name, value in config.given(program).items():
        if isinstance(value, str) and "\0" in value:
            raise FlagError(f"--{name}={value!r} has a NUL character; leave it out")


def define_for(program: ModuleType, *defines: Callable[[], None]) -> set[str]:
    """Defines flags that belong to a program, whichever module calls this.

    Args:
        program: its module.
        *defines: functions that define flags.

    Returns:
        Their names.
    """
    before = set(FLAGS)
    for define in defines:
        define()
    names = set(FLAGS) - before
    for name in names:
        FLAGS.register_key_flag_for_module(program.__name__, FLAGS[name])
    return names


def is_help(argv: list[str]) -> bool:
    """Whether a command line asks for help."""
    return bool(_HELP.intersection(argv[1 : argv.index("--") if "--" in argv else None]))


def show_help(about: str, names: Collection[str], required: Collection[str] = ()) -> None:
    """Prints the help of a program.

    Args:
        about: the program, in words.
        names: of its flags.
        required: flags that must be given.
    """
    print(about.rstrip())
    titles = {name: _group_of.get(name, TRAINING) for name in names}
    titles.update(dict.fromkeys(required, "required"))
    for title in ("required", *_GROUPS):
        told = [_help_of(name) for name in FLAGS if titles.get(name) == title and len(name) > 1]
        if told:
            print(f"\n{title}:", *told, sep="\n")


def _help_of(name: str) -> str:
    """The lines of `--help` on one flag."""
    flag: Any = FLAGS[name]
    values = "|".join(getattr(flag.parser, "enum_values", None) or ["..."])
    word = f"--[no]{name}" if flag.boolean else f"--{name}={values}"
    short = f"-{flag.short_name}, " if flag.short_name else ""
    default = (
        ""
        if flag.default in (None, False, "") or "default:" in flag.help.lower()
        else (f" (default: {flag.default})")
    )
    # absl begins the help of a choice with the values.
    about = flag.help.removeprefix(f"<{values}>: ").rstrip(".")
    lines = textwrap.wrap(f"{about}{default}.", 92)
    return "\n".join([f"  {short}{word}", *(f"      {line}" for line in lines)])


def _with_underscores(word: str) -> str:
    """A word of a command line, with the name of a flag as it is defined; values stay."""
    name, equals, value = word.partition("=")
    other = name[2:].replace("-", "_")
    if other.startswith("no_") and other[3:] in FLAGS:
        other = f"no{other[3:]}"
    is_flag = other in FLAGS or other.removeprefix("no") in FLAGS
    return f"--{other}{equals}{value}" if name.startswith("--") and is_flag else word


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
        watch.check_workers(error)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        # Errors of TensorFlow say little of a worker that is lost.
        watch.check_workers(error)
        raise


def device_type(num_devices: int) -> str:
    """Returns `CPU` or `GPU`: the flag, or what it is by default. Loads TensorFlow to find GPUs.

    Args:
        num_devices: devices of the mesh; 0 if they are not known.
    """
    if FLAGS.device_type is None:
        import tensorflow as tf

        has_workers = "cluster" in FLAGS and FLAGS.cluster not in (None, "none")
        if "cluster" in FLAGS and FLAGS.cluster is None:
            # What is wrong with it is said when workers are connected.
            with contextlib.suppress(DeviceError):
                has_workers = Cluster.from_environment() is not None
        gpus = 0 if has_workers else len(tf.config.list_physical_devices("GPU"))
        FLAGS.device_type = "GPU" if gpus and gpus >= num_devices else "CPU"
        if 0 < gpus < num_devices:
            print(
                f"{gpus} GPU{'s' * (gpus > 1)} of this machine idle: the mesh has {num_devices} "
                "devices, which are CPU devices; use a smaller mesh with --device_type=GPU",
                file=sys.stderr,
            )
    return FLAGS.device_type


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


def check_seed(seed: int) -> None:
    """Checks that the value of `--seed` is one that TensorFlow takes.

    Raises:
        FlagError: it is not.
    """
    if seed not in _SEEDS:
        raise FlagError(f"--seed={seed}: it must fit into 64 bits, from -2**63 to 2**63 - 1")


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
