"""All errors that pipemesh raises on purpose.

Each error also derives from the built-in exception that a caller would expect. So code that does
not know pipemesh can still catch it.
"""

import importlib
import types


class PipemeshError(Exception):
    """The base class of all errors that pipemesh raises on purpose."""

    # TensorFlow's AutoGraph keeps the type of an exception only if it has this constructor. It
    # converts all others into its own errors.
    __init__ = Exception.__init__


def install(extra: str) -> str:
    """Returns the command that installs the dependencies of a part of pipemesh.

    Nothing is released yet, and the name `pipemesh` on the Python package index belongs to another
    project. So the command works in a checkout.

    Args:
        extra: one of the optional dependencies in `pyproject.toml`.

    Example:
        >>> install("tensorflow")
        "in a checkout of pipemesh run: pip install '.[tensorflow]'"
    """
    return f"in a checkout of pipemesh run: pip install '.[{extra}]'"


class MissingPackageError(PipemeshError, ImportError):
    """A package that a part of pipemesh needs is not installed.

    Args:
        part: the part that needs it.
        package: the missing package.
        extra: the optional dependencies that contain it.
    """

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(f"{part} needs {package}, which is not installed; {install(extra)}")


def needed(module: str, part: str, extra: str, package: str | None = None) -> types.ModuleType:
    """Imports a module that a part of pipemesh needs, and returns it.

    Args:
        module: the name of the module.
        part: the part that needs it.
        extra: the optional dependencies that contain it.
        package: the package that contains it, if that is not the first part of its name.

    Raises:
        MissingPackageError: the module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(part, package or module.partition(".")[0], extra) from error


class PartitionError(PipemeshError, ValueError):
    """The layers cannot be cut into the requested stages."""


class ScheduleError(PipemeshError, ValueError):
    """A schedule is malformed, incomplete, out of order or deadlocks."""


class MeshError(PipemeshError, ValueError):
    """A mesh or its text form is malformed."""


class ShapeError(PipemeshError, ValueError):
    """Tensor dims do not match each other or the operation."""


class LayoutError(PipemeshError, ValueError):
    """A layout rule is malformed, or a tensor cannot be split by the rules."""


class PlanError(PipemeshError, ValueError):
    """A plan names something that does not exist, or its parts are incompatible."""


class DeviceError(PipemeshError, RuntimeError):
    """The devices in a plan do not exist, or are set up too late."""


class PipelineError(PipemeshError, ValueError):
    """A pipeline was declared or called in an unsupported way."""


class GradientError(PipemeshError, ValueError):
    """A requested gradient would be missing or wrong."""


class NativeOpError(PipemeshError, NotImplementedError):
    """A native lingvo op was called, but lingvo's op library cannot load here."""


class CheckpointError(PipemeshError, ValueError):
    """A folder does not contain the expected checkpoint, or is not writable."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written.

    Attributes:
        path: the checkpoint.
        what: the damaged file and the damage.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} is damaged: {what}")
        self.path, self.what = path, what


class SaveError(PipemeshError, OSError):
    """A checkpoint cannot be written: the disk is full, or the folder is not writable."""


class DataError(PipemeshError, OSError):
    """The data for training or evaluation cannot be read."""


class TrainingError(PipemeshError, RuntimeError):
    """Training cannot continue."""


class DecodingError(PipemeshError, ValueError):
    """Invalid prompt or decoding settings."""


class NotFiniteError(TrainingError):
    """The loss or a gradient of a step is not finite; no state has changed."""


class RescaledError(NotFiniteError):
    """Gradients of a step overflowed float16; only the loss scale has changed."""


class ReportError(PipemeshError, ValueError):
    """The record of a run is missing, or cannot be read."""
