"""Says in one line that TensorFlow is missing, where a room that needs it is imported without it.

Those rooms import this module first. The pure ones are installed alone with `pip install pipemesh`.
"""

from __future__ import annotations

import importlib.util

INSTALL = "pip install 'pipemesh[tensorflow]'"

for _package in ("tensorflow", "lingvo"):
    if importlib.util.find_spec(_package) is None:
        raise ImportError(
            f"this part of pipemesh needs {_package}, which is not installed: {INSTALL}"
        )
