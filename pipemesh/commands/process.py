"""A command as a process: quiet imports, Ctrl-C, errors in one line, exit codes.

A command line answers within a second as long as neither TensorFlow nor lingvo is loaded, so
whatever concerns their import waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from pipemesh.errors import DamagedError, PipemeshError

# The exit codes of a program that was interrupted, and of a mistake in the request.
INTERRUPTED, BAD_INPUT = 130, 2
_ABOUT_DAMAGE = "; use another checkpoint of its folder, or put a whole copy of its files there"


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> NoReturn:
    """Runs a program as this process, by default with its command line, and ends the process."""
    # Before all else: imports take seconds.
    signal.signal(signal.SIGINT, _leave)
    warnings.formatwarning = _line_of_warning
    # Until the first step little is garbage, and to look for it takes an eighth of the time.
    gc.disable()
    try:
        from pipemesh.training.run import console

        console.stand_in()
        code = exit_code(lambda: main([name_of_main(), *sys.argv[1:]] if argv is None else argv))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            # Python writes it.
            raise
        code = end.code or 0
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # At once: the system frees all memory, which takes Python seconds.
    os._exit(code)


_as_python, _LIBRARY = warnings.formatwarning, os.path.dirname(os.path.dirname(__file__))


def _line_of_warning(
    message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any
) -> str:
    """Returns a warning of this library without its line of code, which says nothing to users."""
    if filename.startswith(os.path.join(_LIBRARY, "")):
        return f"warning: {message}\n"
    return _as_python(message, category, filename, *more, **named)


def name_of_main() -> str:
    """Returns the program of this process as users call it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return sys.argv[0] if spec is None else f"python -m {spec.name}"


def exit_code(program: Callable[[], int]) -> int:
    """Runs a program, and turns errors that users can mend into one line on standard error."""
    try:
        code = program()
        # A closed pipe shows here, not when the interpreter exits.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, `head` for example, has seen enough; nor may the interpreter write on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PipemeshError, OSError) as error:
        _tell_lost_workers(error)
        advice = _ABOUT_DAMAGE if isinstance(error, DamagedError) else ""
        print(f"error: {' '.join(str(error).split())}{advice}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        # Errors of TensorFlow say little of a worker that is lost.
        _tell_lost_workers(error)
        raise


def _tell_lost_workers(error: Exception) -> None:
    """Names lost workers; without workers it does nothing."""
    hosts = "pipemesh.hosts"
    if (watch := sys.modules.get(f"{hosts}.watch")) is not None:
        watch.check_workers(error)


def _leave(_number: int, _frame: Any) -> NoReturn:
    """Ends the program at once: in the middle of an import an exception might be swallowed."""
    # Not number 2 while native code is held back there, and not `print`, which may be in use.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)


def look_here() -> None:
    """Lets models be imported from the folder of the call, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def _quiet_native_code() -> Iterator[None]:
    """Holds back what native libraries write to stderr, and hands it on if the block fails.

    TensorFlow announces itself while it is loaded, whatever its log level.
    """
    try:
        stderr = os.dup(2)
    except OSError:
        # Standard error is closed: nobody can be disturbed.
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            # The error counts, not whether it can be written.
            with contextlib.suppress(OSError):
                os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow and lingvo where the other finders do, and lets them be imported quietly."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ("tensorflow", "lingvo"):
            return None
        for finder in sys.meta_path:
            if not isinstance(finder, _Finder) and (spec := finder.find_spec(fullname, path)):
                loader: Any = spec.loader
                loader.exec_module = functools.partial(_execute, loader.exec_module)
                return spec
        return None


def _execute(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    """Executes a module, with what it needs around or before it."""
    is_loud = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
    with contextlib.nullcontext() if is_loud else _quiet_native_code():
        if module.__name__ == "lingvo":
            from pipemesh.layers import lingvo_loader as lingvo_loader
        execute(module)


def import_quietly() -> None:
    """Prepares both imports; once is enough, and more do no harm."""
    # Errors reach Python as exceptions; set it to 0 to hear all that TensorFlow logs.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
