"""What TensorFlow keeps of a process for eager execution."""

from __future__ import annotations

# Most of it is not public; TensorFlow's version is pinned.
from tensorflow.python.eager import context


def eager_context() -> context.Context:
    """The context of this process, made if there is none yet."""
    found = context.context()
    assert found is not None
    return found


# The job of a process that drives workers; TensorFlow's name of one that is alone, too.
CLIENT = "localhost"


def is_client() -> bool:
    """Whether this process drives workers; see `pipemesh.backend.cluster`."""
    definition = eager_context().get_server_def()
    return definition is not None and definition.job_name == CLIENT
