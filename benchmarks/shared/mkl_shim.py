"""Lets MKL, torch's library for matrix products, use AVX-512 on processors that are not Intel's.

MKL computes with AVX2 there, at half the speed, which would compare two libraries of matrix
products instead of two pipelines. It asks a function of its own who made the processor; a library
that is loaded before it answers in its place.
"""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess

_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
_LIBRARY = pathlib.Path(__file__).with_name(".mkl_shim.so")


def mkl_shim() -> str | None:
    """Path of the library to preload, or None where it is of no use or there is no C compiler."""
    try:
        processor = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    if platform.machine() != "x86_64" or "GenuineIntel" in processor or "avx512f" not in processor:
        return None
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("no C compiler: torch is measured with AVX2 only")
        return None
    if not _LIBRARY.exists():
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(_LIBRARY)]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
    return str(_LIBRARY)
