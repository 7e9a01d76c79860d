"""What has to happen around the first import of TensorFlow and of lingvo, whoever makes it.

TensorFlow's announcements are held back, and `pipemesh.layers.lingvo_loader` comes before lingvo.
A command line answers within a second as long as neither is loaded, so both wait for that import.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from typing import Any


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


class _Prepared(importlib.abc.Loader):
    """Loads a module as another loader does, with what it needs around or before it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # The module is to know its own loader, as if nothing had stood in between.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        with contextlib.ExitStack() as stack:
            if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
                stack.enter_context(_quiet_native_code())
            if module.__name__ == "lingvo":
                from pipemesh.layers import lingvo_loader as lingvo_loader
            self._loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow and lingvo where the other finders do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ("tensorflow", "lingvo"):
            return None
        for finder in sys.meta_path:
            if not isinstance(finder, _Finder) and (spec := finder.find_spec(fullname, path)):
                spec.loader = _Prepared(spec.loader)
                return spec
        return None


def install() -> None:
    """Prepares both imports; once is enough, and more do no harm."""
    # Errors reach Python as exceptions; set it to 0 to hear all that TensorFlow logs.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
