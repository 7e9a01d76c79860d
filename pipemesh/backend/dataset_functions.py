"""Python functions that a dataset calls in the process in which it lies."""

from __future__ import annotations

import functools
import importlib
import itertools
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# The registry is private; TensorFlow's version is pinned to 2.21.
from tensorflow.python.ops import script_ops

from pipemesh.backend.cluster import task_of
from pipemesh.backend.devices import device_of_scope
from pipemesh.errors import DataError, PipemeshError

# The name by which TensorFlow finds `_call`, in each process that has called `accept_calls`.
_TOKEN = "pipemesh_dataset_function"
# The operations that call functions of Python.
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# Functions of datasets that this process has made, by what is sent of them. They are kept, as
# TensorFlow keeps those of `tf.numpy_function`.
_own: dict[bytes, Callable[..., Any]] = {}


def numpy_call(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Calls a Python function without state, from arrays to arrays, where a dataset lies.

    As `tf.numpy_function`, but a dataset on a worker calls the function in the worker's process.
    What is sent there is the pickled function, so modules and files must be found there.

    Args:
        function: from an array for each input to a list of arrays. If it cannot be pickled, a
            dataset on a worker raises an error at its first element.
        inputs: tensors.
        dtypes: the dtypes of the results.
    """
    try:
        sent = pickle.dumps(function)
        why = "it is defined in the program itself" if b"__main__" in sent else ""
    except PipemeshError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        sent = pickle.dumps(functools.partial(_refuse, why, id(function)))
    _own[sent] = function
    accept_calls()
    return tf.raw_ops.PyFuncStateless(input=[tf.constant(sent), *inputs], token=_TOKEN, Tout=dtypes)


def load_library(name: str) -> None:
    """Imports a module with operations of its own in the process of the current `tf.device` scope.

    Raises:
        tf.errors.OpError: a worker cannot import it.
    """
    if task_of(device_of_scope()) is None:
        importlib.import_module(name)
        return
    (done,) = numpy_call(functools.partial(_import, name), [], [tf.bool])
    # A worker answers before it has imported.
    done.numpy()


def calls_this_process(dataset: Any) -> bool:
    """Returns whether a dataset calls Python functions that only this process has."""

    def is_own(node: Any) -> bool:
        return node.op in _PYTHON and node.attr["token"].s.decode() != _TOKEN

    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        bodies = [graph.node, *(nested.node_def for nested in graph.library.function)]
        if any(map(is_own, itertools.chain(*bodies))):
            return True
    return any(map(calls_this_process, dataset._inputs()))


def accept_calls() -> None:
    """Lets datasets in this process call functions of `numpy_call`."""
    script_ops._py_funcs._funcs[_TOKEN] = _call


def _call(sent: bytes, *arguments: np.ndarray) -> Any:
    if sent in _own:
        return _own[sent](*arguments)
    try:
        return _sent_here(sent)(*arguments)
    except (PipemeshError, OSError) as error:
        raise DataError(f"the worker on {socket.gethostname()}: {error}") from error
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"the worker on {socket.gethostname()} has not the code that reads the data "
            f"({type(error).__name__}: {error}); start it in the folder of the project, as this "
            "command, or leave --read_data=workers out"
        ) from error


@functools.lru_cache(8)
def _sent_here(sent: bytes) -> Callable[..., Any]:
    """Returns a function of another process."""
    return pickle.loads(sent)


def _import(name: str) -> list[np.ndarray]:
    importlib.import_module(name)
    return [np.array(True)]


def _refuse(why: str, _: int, *arguments: object) -> None:
    raise DataError(
        f"the data is read by a Python function that cannot be sent to a worker ({why}); define it "
        "in a module, or leave --read_data=workers out"
    )
