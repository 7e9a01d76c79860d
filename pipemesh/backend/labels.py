"""Stages, replicas and layers in the names of a graph's nodes, where TensorFlow's errors show them.

Only a few characters may stand in the name of a node; the others are written as their code point
in hexadecimal between two hyphens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

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
