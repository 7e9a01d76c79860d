"""An environment with torch, apart from that of pipemesh."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv

TORCH = "torch==2.13.0"
# What fine-tuning takes besides.
PEFT = ("transformers>=5,<6", "peft>=0.21,<0.22", "safetensors")


def torch_python(given: str | None, *more: str) -> str:
    """The Python of an environment that has torch.

    Args:
        given: path of such a Python, or None for an environment below this folder, which is made
            if it is not there.
        *more: other packages that it has.
    """
    if given is not None:
        return given
    folder = pathlib.Path(__file__).with_name(".peft" if more else ".torch")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    finished = folder / "finished"
    if not finished.exists():
        print(f"installing {', '.join([TORCH, *more])} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "-q", TORCH, "numpy", *more]
        subprocess.run(command, check=True)
        finished.touch()
    return str(python)
