"""The manifest: a file beside a checkpoint that tells whether the checkpoint's files are whole.

It is written before the checkpoint gets its name, and is read without TensorFlow. Tensors have
checksums in TensorFlow's files, which are checked when they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pipemesh.checkpoint.files import check_name, step_in, write_whole
from pipemesh.errors import CheckpointError, DamagedError

SUFFIX = ".manifest"
INDEX = ".index"
# Key in the note of a checkpoint with only weights, imported from another program.
WEIGHTS_ONLY = "weights_only"
# Key in the note of a checkpoint without the frozen weights: the checkpoint that has them, by its
# name in the folder and the SHA-256 of its index, which has the checksums of all tensors.
BASE = "base"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, its step and its note.

    Attributes:
        step: the number of finished steps.
        index: SHA-256 of the index, which has the names, shapes and checksums of all tensors.
        sizes: the bytes of each data file, by file ending: `.data-00000-of-00001`.
        note: free-form JSON from the caller.
        score: the result of an evaluation, lower is better; None without one.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt-3")
        >>> Manifest(3, index="", sizes={}, note={"by": "me"}).write(path)
        >>> open(path + ".index", "w").close()
        >>> Manifest.read(path).note
        {'by': 'me'}
    """

    step: int
    index: str
    sizes: Mapping[str, int]
    note: Mapping[str, Any]
    score: float | None = None

    @classmethod
    def of(
        cls, path: str, step: int, note: Mapping[str, Any], score: float | None = None
    ) -> Manifest:
        """Returns the manifest of files that were just written, with names that begin with `path`;
        the other arguments are attributes.
        """
        folder, name = os.path.split(path)
        files = sorted(file for file in os.listdir(folder) if file.startswith(f"{name}.data"))
        ends = [file.removeprefix(name) for file in files]
        sizes = {end: os.path.getsize(path + end) for end in ends}
        return cls(step, _digest(_content(path + INDEX)), sizes, note, score)

    @classmethod
    def read(cls, path: str) -> Manifest:
        """Reads the manifest of a checkpoint, whose `path` has no file ending.

        Raises:
            CheckpointError: the checkpoint or its manifest is missing, cannot be read now or has
                another version, or TensorFlow cannot read such a path.
            DamagedError: the manifest has changed since it was written.
        """
        check_name(path)
        with _reading(path, SUFFIX):
            try:
                digest, _, content = _content(path + SUFFIX).partition(b"\n")
            except FileNotFoundError as error:
                if not os.path.lexists(path + INDEX):
                    raise CheckpointError(
                        f"there is no checkpoint {path}; give the path of one without the endings "
                        "of its files, as folder/ckpt-100"
                    ) from error
                raise CheckpointError(
                    f"{path} is a checkpoint of another program, or lost {path}{SUFFIX}; give "
                    "another folder"
                ) from error
        if _digest(content).encode() != digest:
            raise DamagedError(path, f"{path}{SUFFIX} has changed since it was written")
        try:
            manifest = cls(**json.loads(content))
            if type(manifest.step) is not int:
                raise ValueError(f"its step is {manifest.step!r}")
            return manifest
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}{SUFFIX} has another version ({error}); give another folder"
            ) from error

    def write(self, path: str) -> None:
        """Writes the manifest beside a checkpoint, whose `path` has no file ending."""
        content = json.dumps(dataclasses.asdict(self), indent=1).encode()
        write_whole(path + SUFFIX, _digest(content).encode() + b"\n" + content)

    def check(self, path: str) -> None:
        """Checks that all files exist with their sizes and the index that was written.

        A step in the checkpoint's name must be the step of the manifest. Tensors are not read.

        Raises:
            DamagedError: a file is missing or has changed.
            CheckpointError: a file cannot be read now.
        """
        if step_in(path) not in (None, self.step):
            raise DamagedError(
                path, f"it is the checkpoint of step {self.step}, and its files were renamed"
            )
        for end, size in self.sizes.items():
            with _reading(path, end), open(path + end, "rb") as file:
                actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise DamagedError(path, f"{path}{end} has {actual:,} bytes of {size:,}")
        with _reading(path, INDEX):
            index = _content(path + INDEX)
        if _digest(index) != self.index:
            raise DamagedError(path, f"{path}{INDEX} has changed since it was written")


@contextlib.contextmanager
def _reading(path: str, end: str) -> Iterator[None]:
    """Distinguishes damage from errors of the file system while a file of a checkpoint is read."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(path, f"{path}{end} is missing") from None
    except IsADirectoryError:
        raise DamagedError(path, f"{path}{end} is a folder") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}{end} cannot be read ({error.strerror}); mend that, or move the files of "
            f"{os.path.basename(path)} away to go on from an older one"
        ) from error


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
