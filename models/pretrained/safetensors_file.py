"""Tensors in safetensors files: one file, or several with an index, read in slices."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from pipemesh.checkpoint.files import write_whole
from pipemesh.errors import SaveError, install

from .values import WeightsError, json_object

try:
    # Import this before files are opened: it adds bfloat16 to NumPy.
    import ml_dtypes
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
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
# The first bytes of `torch.save` files, and their name endings.
_ZIP, _OF_PICKLES = b"PK\x03\x04", (".bin", ".pt", ".pth")
_CONVERT = (
    "pickles may run code when they are read, so they are not; convert them with torch and "
    "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)
# Larger models are written as several files.
_BYTES_A_FILE = 4 << 30


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


class TensorFiles:
    """The tensors of a `.safetensors` file, or of all files of an index, as a context manager.

    Only requested data is read. A missing or invalid file raises WeightsError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        try:
            if path.endswith(".json"):
                self._open_all(path)
            else:
                file = self._open(path)
                self._files = dict.fromkeys(file.keys(), file)
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
        return sorted(self._files)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises WeightsError if a tensor has another shape, or is not floating-point."""
        found = self._files[name].get_slice(name)
        there, dtype = list(found.get_shape()), found.get_dtype()
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
        try:
            return self._files[name].get_slice(name)[index or slice(None)]
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{self.path}: tensor {name!r} cannot be read ({error})") from error

    def _open(self, path: str) -> Any:
        try:
            size = os.path.getsize(path)
            if os.path.isdir(path):
                raise WeightsError(f"{path!r} is a folder; give the path of a file of safetensors")
            return self._stack.enter_context(safe_open(path, framework="numpy"))
        except OSError as error:
            raise WeightsError(f"{path!r} cannot be read ({error.strerror or error})") from error
        except SafetensorError as error:
            with open(path, "rb") as file:
                if file.read(len(_ZIP)) == _ZIP or path.endswith(_OF_PICKLES):
                    raise WeightsError(f"{path!r} is a file of torch: {_CONVERT}") from error
            told = str(error).removeprefix("Error while deserializing header: ")
            raise WeightsError(
                f"{path!r} ({size:,} bytes) is no whole file of safetensors ({told}): it was cut "
                "short, or is something else; fetch it again"
            ) from error

    def _open_all(self, path: str) -> None:
        places = json_object(path).get("weight_map")
        if not isinstance(places, dict):
            raise WeightsError(
                f"{path!r} is no index of safetensors, which names the file of each tensor in "
                "'weight_map'"
            )
        wanted = {str(name): str(place) for name, place in places.items()}
        for place in wanted.values():
            # An index from a stranger must not open files outside of its folder.
            if os.path.isabs(place) or ".." in place.replace("\\", "/").split("/"):
                raise WeightsError(
                    f"{path!r} names the file {place!r}, which is outside of its folder; put all "
                    "files beside the index, and name them without folders"
                )
        folder = os.path.dirname(path)
        opened = {place: self._open(os.path.join(folder, place)) for place in set(wanted.values())}
        there = {place: set(file.keys()) for place, file in opened.items()}
        for name, place in wanted.items():
            if name not in there[place]:
                raise WeightsError(
                    f"{os.path.join(folder, place)!r} has no tensor {name!r}, which {path!r} says "
                    "is in it; fetch both again"
                )
            self._files[name] = opened[place]


def write(
    folder: str,
    tensors: Iterable[tuple[str, int, Callable[[], np.ndarray]]],
    bytes_a_file: int = _BYTES_A_FILE,
) -> list[str]:
    """Writes tensors into one file, or into several with an index if they are too large; returns
    the paths.

    Tensors are names, bytes, and functions that return the value. The tensors of one file are in
    memory at once. It raises SaveError if a file cannot be written, and then removes the others.
    """
    groups: list[list[tuple[str, Callable[[], np.ndarray]]]] = [[]]
    total = size = 0
    for name, number, get in tensors:
        if groups[-1] and size + number > bytes_a_file:
            groups.append([])
            size = 0
        groups[-1].append((name, get))
        size, total = size + number, total + number
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    paths = [os.path.join(folder, name) for name in (names if len(groups) > 1 else [ONE])]
    with contextlib.ExitStack() as undo:
        for path, group in zip(paths, groups, strict=True):
            _write_file(path, {name: np.ascontiguousarray(get()) for name, get in group})
            undo.callback(os.unlink, path)
        undo.pop_all()
    if len(groups) > 1:
        places = {
            name: place for place, group in zip(names, groups, strict=True) for name, _ in group
        }
        index = {"metadata": {"total_size": total}, "weight_map": places}
        paths.append(os.path.join(folder, INDEX))
        write_whole(paths[-1], (json.dumps(index, indent=2) + "\n").encode())
    return paths


def _write_file(path: str, tensors: Mapping[str, np.ndarray]) -> None:
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        # Readers with torch look for the format.
        save_file(dict(tensors), temporary, metadata={"format": "pt"})
        # The package creates files that only their owner may read.
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise SaveError(f"{path} cannot be written ({error})") from error
