"""Processes of a benchmark, which end with it, however it ends."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from pipemesh.hosts.processes import ends_with_parent


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts a process that the system kills when this thread has ended.

    Args:
        command: what to run, arguments included.
        options: of `subprocess.Popen`.
    """
    return subprocess.Popen(command, preexec_fn=ends_with_parent(), **options)
