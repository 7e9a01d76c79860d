"""What TensorFlow keeps of a process for eager execution."""

from __future__ import annotations

# Most of it is not public; TensorFlow's version is pinned.
from tensorflow.python.eager import context


def eager_context() -> context.Context:
    """The context of this process, made if there is none yet."""
    found = context.context()
    assert found is not None
    return found
