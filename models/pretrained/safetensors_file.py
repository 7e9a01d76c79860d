"""Tensors in safetensors files: one file, or several with an index, in blocks of rows."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from pipemesh.checkpoint.files import replacing, write_whole
from pipemesh.errors import install

from .values import WeightsError, json_object, parse_object

try:
    # Import this before files are opened: it adds bfloat16 to NumPy.
    import ml_dtypes
    from safetensors import SafetensorError, safe_open
except ImportError as missing:
    raise WeightsError(
        f"weights come in files of safetensors, which needs {missing.name!r}, which is not "
        f"installed; {install('examples')}"
    ) from missing

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Supported dtypes of weights, by their names in files.
DTYPES: Mapping[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The first bytes of `torch.save` files, new and old, and their name endings.
_PICKLED = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
_OF_PICKLES = (".bin", ".pt", ".pth")
_CONVERT = (
    "pickles may run code when they are read, so they are not; convert them with torch and "
    "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)
# Larger models are written as several files.
_BYTES_A_FILE = 4 << 30
# The most bytes of rows that are read or cast at once; one larger row is read whole.
BLOCK = 1 << 20


def find(path: str) -> str:
    """Returns the path of a tensor file or index, or of the one with the usual name in a folder.

    If a folder has both, it is the file, as in `transformers`. It raises WeightsError if there is
    none.
    """
    if not os.path.exists(path):
        raise WeightsError(
            f"--from={path!r} does not exist; give a file of safetensors, or the folder of one"
        )
    if not os.path.isdir(path):
        return path
    for name in (ONE, INDEX):
        found = os.path.join(path, name)
        if os.path.exists(found):
            return found
    pickles = sorted(name for name in os.listdir(path) if name.endswith(_OF_PICKLES))
    raise WeightsError(
        f"the folder {path!r} has neither {ONE} nor {INDEX}; "
        + (
            f"it has {pickles[0]}: {_CONVERT}"
            if pickles
            else "give the path of the weights, a file of safetensors"
        )
    )


class _Place(NamedTuple):
    """A tensor in an open file."""

    file: BufferedReader
    path: str
    dtype: str
    shape: list[int]
    begin: int


class TensorFiles:
    """The tensors of a `.safetensors` file, or of all files of an index, as a context manager.

    The headers are checked at once; data is read when requested, never mapped, because a mapped
    file counts as memory, and one that becomes shorter would end the process. A missing or invalid
    file raises WeightsError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        self._places: dict[str, _Place] = {}
        try:
            if path.endswith(".json"):
                self._open_all(path)
            else:
                self._places = self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return sorted(self._places)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises WeightsError if a tensor has another shape, or is not floating-point."""
        there, dtype = self._places[name].shape, self._places[name].dtype
        if there != list(shape):
            raise WeightsError(
                f"{self.path}: tensor {name!r} has shape {there}, but that of config.json has "
                f"{list(shape)}; the two are of different models"
            )
        if dtype not in DTYPES:
            raise WeightsError(
                f"{self.path}: tensor {name!r} has numbers of {dtype}; weights may be of "
                f"{', '.join(DTYPES)}"
            )

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns a tensor, or a slice of it, in its dtype in the file."""
        place = self._places[name]
        whole = [range(size) for size in place.shape]
        rows = [kept[of] for kept, of in zip(whole, index, strict=True)] if index else whole
        found = np.empty([len(kept) for kept in rows], DTYPES[place.dtype])
        for part, block in self.blocks(name, index):
            found[part] = block
        return found

    def blocks(
        self, name: str, index: tuple[slice, ...] = (), shape: Sequence[int] = ()
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields a tensor, or a slice of it, as some rows after the other, each time with their
        numbers. `shape` is one that it gets before it is sliced.
        """
        file, path, dtype, there, begin = self._places[name]
        shape = shape or there
        row_bytes = math.prod(shape[1:]) * DTYPES[dtype].itemsize
        rows = range(shape[0])[index[0] if index else slice(None)]
        number = max(1, BLOCK // max(1, row_bytes))
        for start in range(0, len(rows), number):
            part = rows[start : start + number]
            block = np.empty([len(part), *shape[1:]], DTYPES[dtype])
            try:
                file.seek(begin + part.start * row_bytes)
                memory: Any = block.reshape(-1).view(np.uint8)
                count = file.readinto(memory)
            except OSError as error:
                raise WeightsError(
                    f"{path!r}: tensor {name!r} cannot be read ({error.strerror})"
                ) from error
            if count != block.nbytes:
                raise WeightsError(
                    f"{path!r}: tensor {name!r} is cut short: the file became shorter while it was "
                    "read; fetch it again"
                )
            yield slice(start, start + len(part)), block[(slice(None), *index[1:])]

    def _open(self, path: str) -> dict[str, _Place]:
        try:
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                raise WeightsError(f"{path!r} is a folder; give the path of a file of safetensors")
            if not stat.S_ISREG(status.st_mode):
                raise WeightsError(f"{path!r} is no regular file; give a file of safetensors")
            # The package checks the header: sizes, offsets, dtypes.
            with safe_open(path, framework="numpy"):
                file = self._stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise WeightsError(f"{path!r} cannot be read ({error.strerror or error})") from error
        except SafetensorError as error:
            with open(path, "rb") as file:
                if file.read(4).startswith(_PICKLED) or path.endswith(_OF_PICKLES):
                    raise WeightsError(f"{path!r} is a file of torch: {_CONVERT}") from error
            told = str(error).removeprefix("Error while deserializing header: ")
            raise WeightsError(
                f"{path!r} ({status.st_size:,} bytes) is no whole file of safetensors ({told}): it "
                "was cut short, or is something else; fetch it again"
            ) from error
        length = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(length), path)
        header.pop("__metadata__", None)
        return {
            name: _Place(
                file, path, value["dtype"], value["shape"], 8 + length + value["data_offsets"][0]
            )
            for name, value in header.items()
        }

    def _open_all(self, path: str) -> None:
        places = json_object(path).get("weight_map")
        if not isinstance(places, dict):
            raise WeightsError(
                f"{path!r} is no index of safetensors, which names the file of each tensor in "
                "'weight_map'"
            )
        folder = os.path.dirname(path)
        wanted = {str(name): str(place) for name, place in places.items()}
        opened: dict[str, Mapping[str, _Place]] = {}
        for place in sorted(set(wanted.values())):
            _check_within(path, place)
            opened[place] = self._open(os.path.join(folder, place))
        for name, place in wanted.items():
            if name not in opened[place]:
                raise WeightsError(
                    f"{os.path.join(folder, place)!r} has no tensor {name!r}, which {path!r} says "
                    "is in it; fetch both again"
                )
            self._places[name] = opened[place][name]


def _check_within(index: str, place: str) -> None:
    """Raises WeightsError if an index, which strangers write, names a file outside its folder."""
    folder = os.path.realpath(os.path.dirname(index) or ".")
    # Downloads of a hub are links in `snapshots/REVISION` to files in `blobs`.
    above = os.path.dirname(os.path.dirname(folder))
    allowed = [folder, os.path.join(above, "blobs")]
    is_name = place.isprintable() and place not in ("", ".", "..") and not {"/", "\\"} & {*place}
    path = os.path.realpath(os.path.join(folder, place)) if is_name else ""
    if os.path.dirname(path) not in allowed:
        raise WeightsError(
            f"{index!r} names the file {place!r}, which is outside of its folder; put all files "
            "beside the index, and name them without folders"
        )


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: its name in the file.
        dtype: one of the values of `DTYPES`.
        shape: its shape.
        blocks: returns its content as arrays, one after the other, when its turn comes.
    """

    name: str
    dtype: np.dtype
    shape: Sequence[int]
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def size(self) -> int:
        """Returns the number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: str, tensors: Iterable[Tensor], bytes_a_file: int = _BYTES_A_FILE) -> list[str]:
    """Writes tensors into one file, or into several with an index if they are too large; returns
    the paths.

    One block of a tensor is in memory at once. It raises OSError if a file cannot be written, and
    then removes the others.
    """
    groups: list[list[Tensor]] = [[]]
    total = size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.size > bytes_a_file:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size, total = size + tensor.size, total + tensor.size
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    paths = [os.path.join(folder, name) for name in (names if len(groups) > 1 else [ONE])]
    with contextlib.ExitStack() as undo:
        for path, group in zip(paths, groups, strict=True):
            _write_file(path, group)
            undo.callback(os.unlink, path)
        if len(groups) > 1:
            places = {
                tensor.name: place
                for place, group in zip(names, groups, strict=True)
                for tensor in group
            }
            index = {"metadata": {"total_size": total}, "weight_map": places}
            paths.append(os.path.join(folder, INDEX))
            write_whole(paths[-1], (json.dumps(index, indent=2) + "\n").encode())
        undo.pop_all()
    return paths


def _write_file(path: str, tensors: Sequence[Tensor]) -> None:
    # The package writes only what is in memory whole. Readers with torch look for the format.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # Data begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            # No name keeps a block, and with it its tensor, while the next one is read.
            file.writelines(map(np.ndarray.tobytes, tensor.blocks()))
