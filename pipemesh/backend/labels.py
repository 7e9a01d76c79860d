"""Labels of stages, replicas and layers in node names, prints and summaries.

TensorFlow's errors show the names of nodes. A node's name allows few characters; each other
character becomes its hexadecimal code point between two hyphens.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from pipemesh.backend.patches import wrap_operation

KINDS = ("stage", "replica", "layer")


def label(kind: str, name: str) -> str:
    """Returns the component of a node's name for a stage, replica or layer: `layer.block-23-1`."""
    return f"{kind}." + re.sub(r"[^A-Za-z0-9_]", lambda match: f"-{ord(match[0]):x}-", name)


def labelled(kind: str, node: str) -> str | None:
    """Returns the innermost stage, replica or layer in a node's name; None if it has none."""
    labels = re.findall(rf"(?:^|/){kind}\.([A-Za-z0-9_-]*)(?=/)", node)
    if not labels:
        return None
    return re.sub(r"-([0-9a-f]+)-", lambda code: chr(int(code[1], 16)), labels[-1])


@contextlib.contextmanager
def label_scope(kind: str, name: str) -> Iterator[None]:
    """Puts the label into the names of nodes made inside, without a number if entered twice."""
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


@contextlib.contextmanager
def tagged(
    stage: str, microbatch: tf.Tensor, replica: int | None = None, part: tf.Tensor | None = None
) -> Iterator[None]:
    """Prefixes prints inside with stage and microbatch, and appends these to tags of summaries."""
    # `microbatch` and `part` (the sequence slice) are int64 scalars.
    numbers: list[tuple[str, Any]] = [
        ("microbatch", microbatch),
        ("slice", part),
        ("replica", replica),
    ]
    _scopes.stack.append(
        (stage, [(kind, number) for kind, number in numbers if number is not None])
    )
    try:
        yield
    finally:
        _scopes.stack.pop()


def _prefix() -> tf.Tensor:
    stage, numbers = _scopes.stack[-1]
    parts = [t for kind, number in numbers for t in (f", {kind} ", _text(number))]
    return tf.strings.join([f"stage {stage!r}", *parts, ": "])


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
        _, numbers = _scopes.stack[-1]

        def with_microbatch(tag: Any) -> tf.Tensor:
            parts = [t for kind, number in numbers for t in (f"/{kind}_", _text(number))]
            return tf.strings.join([tag, *parts])

        if name in kwargs:
            kwargs[name] = with_microbatch(kwargs[name])
        else:
            arguments = list(args)
            arguments[position] = with_microbatch(arguments[position])
            args = tuple(arguments)
        return original(*args, **kwargs)

    return dispatch


# Name and position of the argument that holds the tag.
_TAGS = {
    "audio_summary_v2": ("tag", 0),
    "histogram_summary": ("tag", 0),
    "image_summary": ("tag", 0),
    "scalar_summary": ("tags", 0),
    "tensor_summary_v2": ("tag", 0),
    "write_audio_summary": ("tag", 2),
    "write_histogram_summary": ("tag", 2),
    "write_image_summary": ("tag", 2),
    "write_scalar_summary": ("tag", 2),
    "write_summary": ("tag", 3),
}
wrap_operation("print_v2", _print_v2)
wrap_operation("_print", _print)
for _operation, (_name, _position) in _TAGS.items():
    wrap_operation(_operation, functools.partial(_summary, name=_name, position=_position))
