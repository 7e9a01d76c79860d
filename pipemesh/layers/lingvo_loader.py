"""Import of lingvo on every system, with fixes.

lingvo's wheel contains `x_ops.so`, which needs glibc 2.38. On older systems this module registers a
substitute for `lingvo.core.ops.gen_x_ops` before lingvo is imported. It implements the two
assertions that lingvo's layers use in TensorFlow. Every other native op raises an error that
explains the missing library. If the library loads, the real ops are used.

lingvo's `VariableStore` stays open when a layer's `__init__` raises. Layers of one name made later
would then share weights in eager mode. This module replaces it with one that closes.

lingvo imports `tensorflow_text`, whose libraries take 115 MiB of memory, for two tokenizers. It is
imported here when one of them is made.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import surrounding_graphs
from pipemesh.backend.static_shape import static_vector
from pipemesh.errors import MissingPackageError, NativeOpError, PipemeshError

GEN_X_OPS = "lingvo.core.ops.gen_x_ops"
GLIBC = "2.38"
TEXT = "tensorflow_text"


def load_native_ops() -> None:
    """Makes `import lingvo.core.ops` work."""
    if sys.flags.optimize > 1:
        raise PipemeshError(
            "PYTHONOPTIMIZE=2 and python -OO remove docstrings, without which lingvo's tokenizers "
            "cannot be imported; use PYTHONOPTIMIZE=1 or python -O"
        )
    if GEN_X_OPS in sys.modules:
        return
    spec = importlib.util.find_spec("lingvo")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError("this part of pipemesh", "lingvo", "tensorflow")
    path = pathlib.Path(spec.submodule_search_locations[0], "core", "ops", "x_ops.so")
    # `lingvo.core.ops` tries this name first, so the library is loaded once on either branch.
    try:
        sys.modules[GEN_X_OPS] = tf.load_op_library(str(path))
    except tf.errors.NotFoundError as error:
        sys.modules[GEN_X_OPS] = StandInOps(reason=str(error))


class StandInOps(types.ModuleType):
    """The substitute for the module of lingvo's native ops; `reason` says why they did not load."""

    def __init__(self, reason: str) -> None:
        super().__init__(GEN_X_OPS, doc=StandInOps.__doc__)
        self.reason = reason
        self.assert_same_dim0 = assert_same_dim0
        self.assert_shape_match = assert_shape_match

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NativeOpError(
                f"lingvo's native op {name!r} was called, but lingvo's op library needs glibc "
                f"{GLIBC} or newer and did not load here ({self.reason}). Run on a system with "
                f"glibc {GLIBC}, or feed input through tf.data, which needs no native op."
            )

        missing.__name__ = name
        return missing


def assert_shape_match(x: tf.Tensor, y: tf.Tensor, msg: str = "", name: str | None = None) -> Any:
    """Returns an op that fails unless shapes are equal (-1 matches any size); None eagerly."""
    x, y = tf.convert_to_tensor(x, tf.int32), tf.convert_to_tensor(y, tf.int32)
    a, b = static_vector(x), static_vector(y)
    if a is not None and b is not None and len(a) == len(b):
        # Most shapes are static and equal, so a step computes nothing.
        if ((a == b) | (a == -1) | (b == -1)).all():
            return None if tf.executing_eagerly() else tf.no_op(name)
    with tf.name_scope(name or "assert_shape_match"):
        same_rank = tf.equal(tf.size(x), tf.size(y))
        common = tf.minimum(tf.size(x), tf.size(y))
        a, b = x[:common], y[:common]
        # Not `==`, which compares objects under TF1 behaviour.
        same_sizes = tf.reduce_all(tf.equal(a, b) | tf.equal(a, -1) | tf.equal(b, -1))
        # Not `tf.debugging.Assert`, which warns if its result is not used.
        return tf.raw_ops.Assert(
            condition=same_rank & same_sizes,
            data=[f"{msg} shapes do not match:", x, y],
            summarize=16,
        )


def assert_same_dim0(xs: list[tf.Tensor], msg: str = "", name: str | None = None) -> Any:
    """Returns an op that fails unless the first dims of all tensors are equal; None eagerly."""
    with tf.name_scope(name or "assert_same_dim0"):
        sizes = tf.stack([tf.shape(x)[0] for x in xs]) if xs else tf.zeros([0], tf.int32)
        return tf.raw_ops.Assert(
            condition=tf.reduce_all(tf.equal(sizes, sizes[:1])),
            data=[f"{msg} first dims differ:", sizes],
            summarize=64,
        )


def close_variable_stores() -> None:
    """Makes lingvo's `VariableStore` remove the variables of a layer whose `__init__` raised."""
    py_utils: Any = importlib.import_module("lingvo.core.py_utils")
    opened = py_utils.VariableStore

    @contextlib.contextmanager
    def variable_store(default_store: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        graph: Any
        *_, graph = surrounding_graphs(tf.compat.v1.get_default_graph())
        surrounding: Any = getattr(graph, "lingvo_variable_store", None)
        known = set(surrounding or ())
        try:
            with opened(default_store) as store:
                yield store
        except BaseException:
            if surrounding is not None:
                for name in set(surrounding) - known:
                    del surrounding[name]
            raise
        finally:
            graph.lingvo_variable_store = surrounding

    py_utils.VariableStore = variable_store


class TextWhenUsed(types.ModuleType):
    """Imports `tensorflow_text` when an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(TEXT), name)


def defer_text() -> None:
    """Imports lingvo's tokenizers without `tensorflow_text`.

    Only they get the substitute: others import that module for the ops that it registers.
    """
    if TEXT in sys.modules or importlib.util.find_spec(TEXT) is None:
        return
    sys.modules[TEXT] = TextWhenUsed(TEXT)
    try:
        importlib.import_module("lingvo.core.tokenizers")
    finally:
        del sys.modules[TEXT]


load_native_ops()
defer_text()
close_variable_stores()
