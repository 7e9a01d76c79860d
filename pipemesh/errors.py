"""Every error that pipemesh raises on purpose.

Each one is also the built-in exception that a caller would expect, so code that knows
nothing of pipemesh can still catch it.
"""


class PipemeshError(Exception):
    """Base of all errors that pipemesh raises on purpose."""

    # TensorFlow's autograph keeps the type of an exception that has this very constructor, and
    # turns all others into errors of its own.
    __init__ = Exception.__init__


def install(extra: str) -> str:
    """Returns the command that installs what a part of pipemesh needs.

    Nothing is released yet, and the name `pipemesh` on the Python package index belongs to another
    project, so the command works in a checkout.

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
        part: what needs it.
        package: the missing package.
        extra: the optional dependencies that it belongs to.
    """

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(f"{part} needs {package}, which is not installed; {install(extra)}")


class PartitionError(PipemeshError, ValueError):
    """The layers cannot be cut into the stages that were asked for."""


class ScheduleError(PipemeshError, ValueError):
    """A schedule is malformed, incomplete, out of order or deadlocks."""


class MeshError(PipemeshError, ValueError):
    """A mesh or its text form is malformed."""


class ShapeError(PipemeshError, ValueError):
    """The dims of tensors do not fit each other or the operation."""


class LayoutError(PipemeshError, ValueError):
    """A layout rule is malformed, or a tensor cannot be split as the rules say."""


class PlanError(PipemeshError, ValueError):
    """A plan names what does not exist, or its parts do not go together."""


class DeviceError(PipemeshError, RuntimeError):
    """The devices that a plan names do not exist or are set up too late."""


class PipelineError(PipemeshError, ValueError):
    """A pipeline was declared or called in a way it cannot honour."""


class GradientError(PipemeshError, ValueError):
    """A gradient was asked for, or would be lost, in a way that gives none or a wrong one."""


class NativeOpError(PipemeshError, NotImplementedError):
    """A native lingvo op was called where lingvo's op library cannot load."""


class CheckpointError(PipemeshError, ValueError):
    """A folder holds something else than what is to be restored, or cannot be written to."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written.

    Args:
        path: the checkpoint.
        what: which of its files, and what is wrong with it.

    Attributes:
        path: the checkpoint.
        what: which of its files, and what is wrong with it.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} is damaged: {what}")
        self.path, self.what = path, what


class SaveError(PipemeshError, OSError):
    """A checkpoint cannot be written: the disk is full, or the folder cannot be written to."""


class DataError(PipemeshError, OSError):
    """The data to train on, or to judge by, cannot be read any more."""


class TrainingError(PipemeshError, RuntimeError):
    """Training cannot go on."""


class DecodingError(PipemeshError, ValueError):
    """A prompt, or how it is to be continued, cannot be had."""


class NotFiniteError(TrainingError):
    """The loss or a gradient of a step is not finite; nothing has changed."""


class RescaledError(NotFiniteError):
    """Gradients of a step overflowed float16; nothing has changed but the scale of the loss."""


class ReportError(PipemeshError, ValueError):
    """There is no record of a training to make a report of, or it cannot be read."""
