"""Checkpoints in a folder that workers share: each writes and reads the slices that lie on it."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from pipemesh.backend.cluster import own_host, task_of
from pipemesh.checkpoint.entries import Snapshot
from pipemesh.checkpoint.paths import escaped, is_pattern
from pipemesh.errors import CheckpointError

# Hosts that were told of, each with the folder: once is enough.
_told: set[tuple[str, str, str]] = set()


class JoinedFiles:
    """Writes each value on its host, and joins the files of all hosts.

    The graph that writes is kept as long as names and hosts are the same.

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


def writers(folder: str, hosts: Iterable[str]) -> list[str]:
    """The workers among some hosts that can write into a folder of this process.

    Each is to read what is written there now, and to write what is read then. Of those that cannot
    it is said, once, on standard error.

    Args:
        folder: it exists.
        hosts: CPUs of processes, as `host_of` names them.

    Raises:
        OSError: this process cannot write there.
    """
    hosts = _workers(hosts)
    if not hosts:
        return []
    mark = os.path.join(os.path.abspath(folder), f".shared-{secrets.token_hex(8)}")
    try:
        with open(mark, "w") as file:
            file.write(mark)
        found = [host for host in hosts if _writes(folder, host, mark)]
    finally:
        for left in glob.glob(f"{glob.escape(mark)}*"):
            with contextlib.suppress(OSError):
                os.unlink(left)
    return found


def readers(path: str, hosts: Iterable[str]) -> list[str]:
    """The workers among some hosts that have a checkpoint under the path that it has here.

    Of the others it is said, once, on standard error.

    Args:
        path: of the checkpoint, without any ending.
        hosts: CPUs of processes, as `host_of` names them.
    """
    hosts = _workers(hosts)
    if not hosts:
        return []
    path = os.path.abspath(path)
    if is_pattern(path):
        for host in hosts:
            say_once("reads", path, host, "reads no path with [ or \\")
        return []
    try:
        here = _contents(path, own_host())
    except tf.errors.NotFoundError:
        # Of the format before this one, which has no index. Who reads will tell.
        return hosts
    return [host for host in hosts if _reads(path, host, here)]


def absolute(prefix: str, host: str) -> str:
    """A path as another process is to be told it; its working directory may be another."""
    return prefix if host == own_host() else os.path.abspath(prefix)


def told_by(host: str) -> str:
    """What a host is called in messages."""
    task = task_of(host)
    return "this process" if task is None else f"worker {task}"


def say_once(doing: str, folder: str, host: str, why: str) -> None:
    """Says, once, that this process does something for a worker.

    Args:
        doing: `reads` or `writes`.
        folder: where.
        host: the worker.
        why: what it cannot.
    """
    if (doing, folder, host) not in _told:
        _told.add((doing, folder, host))
        print(
            f"{folder}: {told_by(host)} {why}; this process {doing} for it. A folder that all "
            "hosts share under one path saves the way",
            file=sys.stderr,
        )


def _workers(hosts: Iterable[str]) -> list[str]:
    return [host for host in dict.fromkeys(hosts) if task_of(host) is not None]


def _writes(folder: str, host: str, mark: str) -> bool:
    answer = f"{mark}-{task_of(host)}"
    try:
        with tf.device(host):
            # First: where it does not see the folder, it would make it.
            if tf.io.read_file(mark).numpy().decode() != mark:
                raise CheckpointError("sees another folder there")
            tf.io.write_file(answer, mark)
            # Nobody waits for what gives nothing.
            tf.io.read_file(answer).numpy()
        with open(answer) as file:
            if file.read() == mark:
                return True
        why = "writes what is not to be read here"
    except CheckpointError as error:
        why = str(error)
    except tf.errors.OpError as error:
        why = _why(error)
    except OSError as error:
        why = f"writes what is not to be seen here ({error.strerror})"
    say_once("writes", folder, host, why)
    return False


def _reads(path: str, host: str, here: object) -> bool:
    try:
        if _contents(path, host) == here:
            return True
        why = "sees another checkpoint, or a part of it, under that name"
    except tf.errors.OpError as error:
        why = _why(error)
    say_once("reads", path, host, why)
    return False


def _contents(path: str, host: str) -> tuple[bytes, list[bytes]]:
    """What tells checkpoints apart, as a host sees it: a digest of the index, names of files."""
    with tf.device(host):
        index = tf.io.read_file(f"{path}.index")
        digest = tf.raw_ops.Fingerprint(data=index[None], method="farmhash64")
        names = tf.io.matching_files(f"{escaped(path)}.data-*")
    return digest.numpy().tobytes(), sorted(os.path.basename(n) for n in names.numpy())


def _why(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.NotFoundError):
        return "does not see it"
    if isinstance(error, tf.errors.PermissionDeniedError):
        return "may not read and write there"
    return f"cannot use it ({error.message.splitlines()[0]})"  # pyright: ignore
