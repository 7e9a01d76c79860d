"""An environment with torch, apart from that of pipemesh."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv

TORCH = "torch==2.13.0"
FOLDER = pathlib.Path(__file__).with_name(".torch")


def torch_python(given: str | None) -> str:
    """The Python of an environment that has torch.

    Args:
        given: path of such a Python, or None for an environment below this folder, which is made
            if it is not there.
    """
    if given is not None:
        return given
    python = FOLDER / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    finished = FOLDER / "finished"
    if not finished.exists():
        print(f"installing {TORCH} in {FOLDER}", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", TORCH, "numpy"], check=True)
        finished.touch()
    return str(python)
