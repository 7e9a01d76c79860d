"""Labels of stages, replicas and layers in node names, prints and summaries."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# All of TensorFlow's prints and summaries end in these generated modules. They are not public, but
# they are the one place that catches every caller; the TensorFlow version is pinned to 2.21.
from tensorflow.python.ops import gen_logging_ops, gen_summary_ops

KINDS = ("stage", "replica", "layer")


def label(kind: str, name: str) -> str:
    """The component of a node's name that says which stage, replica or layer it belongs to.

    Example:
        >>> label("layer", "block#1")
        'layer.block-23-1'
    """
    return f"{kind}." + re.sub(r"[^A-Za-z0-9_]", lambda found: f"-{ord(found[0]):x}-", name)


def labelled(kind: str, node: str) -> str | None:
    """The innermost stage, replica or layer that a node belongs to; None if it says none.

    Example:
        >>> labelled("layer", "stage.first/layer.block-23-1/MatMul")
        'block#1'
    """
    found = re.findall(rf"(?:^|/){kind}\.([A-Za-z0-9_-]*)(?=/)", node)
    if not found:
        return None
    return re.sub(r"-([0-9a-f]+)-", lambda code: chr(int(code[1], 16)), found[-1])


@contextlib.contextmanager
def label_scope(kind: str, name: str) -> Iterator[None]:
    """Nodes made inside bear the label, without a number if it is entered twice.

    Args:
        kind: one of `KINDS`.
        name: of the stage, replica or layer, any text.
    """
    if tf.executing_eagerly():
        yield
        return
    outer = tf.compat.v1.get_default_graph().get_name_scope()
    # With a slash at its end, a scope is entered again instead of being numbered.
    with tf.name_scope(f"{outer}/{label(kind, name)}/" if outer else f"{label(kind, name)}/"):
        yield


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[str, list[tuple[str, Any]]]] = []


_scopes = _Scopes()
_install_lock = threading.Lock()
_installed = False


@contextlib.contextmanager
def tagged(
    stage: str, microbatch: tf.Tensor, replica: int | None = None, part: tf.Tensor | None = None
) -> Iterator[None]:
    """Inside, what is printed begins with stage and microbatch, and tags of summaries end in it.

    Args:
        stage: name of the stage.
        microbatch: int64 scalar, the index of the microbatch.
        replica: the number of the replica, where a stage has several.
        part: int64 scalar, the index of the slice, where sequences are cut.

    Example:
        >>> import sys
        >>> with tagged("s0", tf.constant(3, tf.int64)):
        ...     tf.print("seen", output_stream="file:///dev/stdout")
    """
    _install()
    said: list[tuple[str, Any]] = [
        ("microbatch", microbatch),
        ("slice", part),
        ("replica", replica),
    ]
    _scopes.stack.append((stage, [(what, number) for what, number in said if number is not None]))
    try:
        yield
    finally:
        _scopes.stack.pop()


def _prefix() -> tf.Tensor:
    stage, said = _scopes.stack[-1]
    numbers = [t for what, number in said for t in (f", {what} ", _text(number))]
    return tf.strings.join([f"stage {stage!r}", *numbers, ": "])


def _text(number: Any) -> Any:
    return str(number) if isinstance(number, int) else tf.strings.as_string(number)


def _print_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(input: Any, *rest: Any, **kwargs: Any) -> Any:
        if _scopes.stack:
            input = tf.strings.join([_prefix(), input])
        return original(input, *rest, **kwargs)

    return dispatch


def _print(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(input: Any, data: Any, *rest: Any, **kwargs: Any) -> Any:
        if _scopes.stack:
            data = [_prefix(), *data]
        return original(input, data, *rest, **kwargs)

    return dispatch


def _summary(original: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not _scopes.stack:
            return original(*args, **kwargs)
        _, said = _scopes.stack[-1]

        def with_microbatch(tag: Any) -> tf.Tensor:
            parts = [t for what, number in said for t in (f"/{what}_", _text(number))]
            return tf.strings.join([tag, *parts])

        if name in kwargs:
            kwargs[name] = with_microbatch(kwargs[name])
        else:
            arguments = list(args)
            arguments[position] = with_microbatch(arguments[position])
            args = tuple(arguments)
        return original(*args, **kwargs)

    return dispatch


# The name and the position of the argument that is the tag.
_TAGS = {
    gen_logging_ops: {
        "audio_summary_v2": ("tag", 0),
        "histogram_summary": ("tag", 0),
        "image_summary": ("tag", 0),
        "scalar_summary": ("tags", 0),
        "tensor_summary_v2": ("tag", 0),
    },
    gen_summary_ops: {
        "write_audio_summary": ("tag", 2),
        "write_histogram_summary": ("tag", 2),
        "write_image_summary": ("tag", 2),
        "write_scalar_summary": ("tag", 2),
        "write_summary": ("tag", 3),
    },
}


def _install() -> None:
    """Puts the dispatchers in place, once; without a scope they change nothing."""
    global _installed
    with _install_lock:
        if _installed:
            return
        gen_logging_ops.print_v2 = _print_v2(gen_logging_ops.print_v2)
        gen_logging_ops._print = _print(gen_logging_ops._print)
        for module, functions in _TAGS.items():
            for function, (name, position) in functions.items():
                setattr(module, function, _summary(getattr(module, function), name, position))
        _installed = True
