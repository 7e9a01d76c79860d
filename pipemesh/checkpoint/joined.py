"""Files of one checkpoint that several hosts write, each those of its slices."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend.cluster import own_host
from pipemesh.checkpoint.entries import Snapshot
from pipemesh.checkpoint.shared_folder import absolute


class JoinedFiles:
    """Writes values where they are, and joins what was written.

    The graph that does it is kept from time to time, as long as names and places are the same.

    Example:
        >>> import os, tempfile
        >>> from pipemesh.checkpoint.entries import entries_of
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> JoinedFiles().write(Snapshot.of(entries_of({"w": tf.Variable([1.0, 2.0])})), path)
        >>> tf.train.load_checkpoint(path).get_tensor("w").tolist()
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self._layout: object = None
        self._write: Callable[..., object] | None = None

    def write(self, snapshot: Snapshot, path: str) -> None:
        """Writes the data and the index of a checkpoint.

        Args:
            snapshot: the values, on hosts that see the folder.
            path: of the checkpoint, without any ending, in a folder that is nobody else's.

        Raises:
            tf.errors.OpError: it cannot be written; some of it may be left.
        """
        hosts = list(dict.fromkeys(snapshot.hosts))
        if hosts == [own_host()]:
            write_tensors(hosts[0], path, snapshot.names, snapshot.specs, snapshot.tensors)
            return
        layout = snapshot.names, snapshot.specs, snapshot.hosts
        if self._write is None or layout != self._layout:
            self._layout, self._write = layout, _writer(hosts, *layout)
        # Of a training that was killed a worker may be writing still, under the same path.
        mark = secrets.token_hex(8)
        parts = [f"{path}-{mark}-{number}" for number in range(len(hosts))]
        prefixes = [absolute(part, host) for part, host in zip(parts, hosts, strict=True)]
        self._write([tf.constant(prefix) for prefix in prefixes], snapshot.tensors)
        join_files(own_host(), parts, path)


def _writer(
    hosts: Sequence[str], names: Sequence[str], specs: Sequence[str], places: Sequence[str]
) -> Callable[..., object]:
    """A graph in which each host writes what lies on it, all at the same time.

    One by one, a worker would answer a step of training only after it has written.
    """
    of_hosts = {host: [i for i, place in enumerate(places) if place == host] for host in hosts}

    @tf.function(autograph=False)
    def write(prefixes: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> None:
        for (host, own), prefix in zip(of_hosts.items(), prefixes, strict=True):
            write_tensors(
                host,
                prefix,
                [names[i] for i in own],
                [specs[i] for i in own],
                [tensors[i] for i in own],
            )

    return write


def write_tensors(
    host: str,
    prefix: object,
    names: Sequence[str],
    specs: Sequence[str],
    tensors: Sequence[tf.Tensor],
) -> None:
    """Writes tensors into files of their own, with an index.

    Args:
        host: that writes, and has them.
        prefix: what the names of the files begin with.
        names: of the tensors.
        specs: which slice of a tensor of that name each is, "" for all of it.
        tensors: the values.

    Raises:
        tf.errors.OpError: they cannot be written.
    """
    with tf.device(host):
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors
        )


def join_files(host: str, parts: Sequence[str], path: str) -> None:
    """Makes one checkpoint of several; of what they have only the indices are read.

    Args:
        host: that does it.
        parts: what the names of their files begin with.
        path: what those of the whole are to begin with.

    Raises:
        tf.errors.OpError: it cannot be done.
    """
    with tf.device(host):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=path, delete_old_dirs=False
        )
