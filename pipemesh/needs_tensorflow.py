"""A check that raises one clear error if a package needs TensorFlow and it is missing.

Packages that need TensorFlow import this module first. The pure ones only need NumPy.
"""

from __future__ import annotations

import importlib.util

from pipemesh.errors import MissingPackageError

for _package in ("tensorflow", "lingvo"):
    if importlib.util.find_spec(_package) is None:
        raise MissingPackageError("this part of pipemesh", _package, "tensorflow")
