"""Raises one clear error where a room that needs TensorFlow is imported without it.

Those rooms import this module first. The pure ones work with NumPy alone.
"""

from __future__ import annotations

import importlib.util

from pipemesh.errors import MissingPackageError

for _package in ("tensorflow", "lingvo"):
    if importlib.util.find_spec(_package) is None:
        raise MissingPackageError("this part of pipemesh", _package, "tensorflow")
