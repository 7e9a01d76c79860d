"""An environment with torch, apart from that of pipemesh."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv

from shared.contender import ROOT

sys.path.insert(0, str(ROOT))

from pipemesh.text import toml_of

TORCH = "torch==2.13.0"
_EXTRAS = toml_of(str(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
# What fine-tuning takes besides: the versions that tests compare with.
PEFT = tuple(name for name in _EXTRAS["peers"] if name.startswith(("transformers", "peft")))


def torch_version(python: str) -> str:
    """Returns the version of torch that a Python has."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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
    # The packages that it was finished with.
    finished, packages = folder / "finished", [TORCH, "numpy", *more]
    if not finished.exists() or finished.read_text(encoding="utf-8").split("\n") != packages:
        print(f"installing {', '.join(packages)} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        finished.write_text("\n".join(packages), encoding="utf-8")
    return str(python)
