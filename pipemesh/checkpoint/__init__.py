"""Saved runs: tensors by logical name, in slices or whole, independent of plans.

Reading the contents of a folder needs no TensorFlow; `Checkpoints`, `contents`, `convert` and
`restore` load it.

Example:
    >>> import tempfile
    >>> import tensorflow as tf
    >>> from pipemesh.checkpoint import Checkpoints, Manifest
    >>> folder, w = tempfile.mkdtemp(), tf.Variable(1.0)
    >>> path = Checkpoints(folder, {"w": w}).save(3, note={})
    >>> Manifest.read(path).step
    3
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipemesh.checkpoint.folder import Folder, newest, newest_whole
from pipemesh.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from pipemesh.checkpoint.checkpoints import Checkpoints
    from pipemesh.checkpoint.conversion import convert
    from pipemesh.checkpoint.reader import contents, restore

__all__ = [
    "Checkpoints",
    "Folder",
    "Manifest",
    "contents",
    "convert",
    "newest",
    "newest_whole",
    "restore",
]

_WITH_TENSORFLOW = {
    "Checkpoints": "checkpoints",
    "contents": "reader",
    "convert": "conversion",
    "restore": "reader",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TENSORFLOW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # First: it says what is missing.
    importlib.import_module("pipemesh.needs_tensorflow")
    module = importlib.import_module(f"{__name__}.{_WITH_TENSORFLOW[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
