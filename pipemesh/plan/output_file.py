"""Files that a command writes at its end, checked at its beginning."""

from __future__ import annotations

import pathlib

from pipemesh.errors import PlanError


def check_output(flag: str, path: str | None) -> None:
    """Checks that a file can be written, before work is done that would be lost.

    Args:
        flag: the flag that names the file.
        path: of the file, which is left as it is; None for no file.

    Raises:
        PlanError: it cannot be written.
    """
    if path is None:
        return
    file = pathlib.Path(path)
    try:
        is_new = not file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if is_new:
            # What a link leads to, not the link.
            file.resolve().unlink()
    except (OSError, ValueError) as error:
        raise _refused(flag, path, error) from error


def write_output(flag: str, path: str | None, text: str) -> None:
    """Writes a file.

    Args:
        flag: the flag that names the file.
        path: of the file; None for no file.
        text: its content.

    Raises:
        PlanError: it cannot be written.
    """
    if path is None:
        return
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(flag, path, error) from error


def _refused(flag: str, path: str, error: OSError | ValueError) -> PlanError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return PlanError(f"{flag}={path!r} cannot be written ({reason}); give another file")
