"""Files of ready tokens, which training reads without a tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from pipemesh.checkpoint.files import replacing
from pipemesh.data.documents import Document
from pipemesh.data.sources import format_of
from pipemesh.errors import DataError, needed


def write_tokens(path: str, documents: Iterable[Document]) -> int:
    """Writes documents to a TFRecord or array_record file of ready tokens.

    Each record is a serialized `tf.train.Example` with `ids`, a list of int64, and, if not all
    tokens count alike, `weights`, a list of float32. The file appears when it is complete.

    Args:
        path: the file, with the ending .tfrecord or .array_record.
        documents: for example of `documents_of`.

    Returns:
        The number of documents.

    Raises:
        DataError: the ending is another one, or the file cannot be written.
        MissingPackageError: array_record is not installed.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> from pipemesh.data import Document
        >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
        >>> write_tokens(path, [Document(np.array([5, 6, 7]), None)])
        1
    """
    import tensorflow as tf

    is_array = format_of(path) == "array_record"
    if not is_array and (format_of(path) != "tfrecord" or path.endswith((".gz", ".zst"))):
        raise DataError(f"{path!r} must have the ending .tfrecord or .array_record")
    number = 0
    try:
        with replacing(path) as temporary:
            writer: Any
            if is_array:
                name = "array_record.python.array_record_module"
                records = needed(name, "an array_record file", "data")
                # One record a group, so that each can be read alone.
                writer = records.ArrayRecordWriter(temporary, "group_size:1")
            else:
                writer = tf.io.TFRecordWriter(temporary)
            with contextlib.closing(writer):
                for document in documents:
                    writer.write(_example(document).SerializeToString())
                    number += 1
    except (OSError, tf.errors.OpError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path!r} cannot be written ({error})") from error
    return number


def _example(document: Document) -> Any:
    import tensorflow as tf

    train: Any = tf.train
    ids = train.Int64List(value=document.ids)
    features = {"ids": train.Feature(int64_list=ids)}
    if document.weights is not None:
        weights = train.FloatList(value=document.weights)
        features["weights"] = train.Feature(float_list=weights)
    return train.Example(features=train.Features(feature=features))
