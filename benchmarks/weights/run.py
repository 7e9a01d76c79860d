"""Peak memory and time of import and export of a model in several files, against its size.

    python benchmarks/weights/run.py --folder=/tmp/weights

Sizes are those of Llama 2 7B (Touvron et al., 2023) in bfloat16: 13.5 GB. The files are made up:
sparse, so they take no disk. The checkpoint and the exported files take as much as the model each,
and are removed at the end. Import and export are a process each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.resident import resident

ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
SMALLER = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def make(folder: pathlib.Path, values: dict, dtype: str, files: int) -> tuple[int, int]:
    """Writes sparse files with an index; returns the bytes of all tensors, and of the largest."""
    from models.pretrained import config, names

    shapes = {
        theirs: parts[0].there
        for theirs, parts in names.by_theirs(names.weights_of(config.of_values(values)))
    }
    sizes = {name: math.prod(shape) * BYTES[dtype] for name, shape in shapes.items()}
    places = {}
    for number in range(files):
        header, end = {}, 0
        place = f"model-{1 + number:05d}-of-{files:05d}.safetensors"
        for name in list(shapes)[number::files]:
            begin, end = end, end + sizes[name]
            entry = {"dtype": NAMES[dtype], "shape": shapes[name], "data_offsets": [begin, end]}
            header[name], places[name] = entry, place
        text = json.dumps(header).encode()
        with open(folder / place, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(values))
    return sum(sizes.values()), max(sizes.values())


def rise(work) -> int:
    """Returns by how many bytes the peak of the resident set rises while something runs."""
    # Large blocks go back to the system when they are freed, instead of staying in an arena
    # (M_MMAP_THRESHOLD is -3).
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)
    libc.malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    if "VmHWM" not in before:
        raise SystemExit("error: /proc/self/status has no VmHWM; run this on Linux")
    work()
    return resident()["VmHWM"] - before["VmRSS"]


def move(what: str, place: pathlib.Path, dtype: str) -> None:
    """Imports `in` to `run`, or exports `run` to `out`."""
    from models.pretrained import transfer

    if what == "import":
        transfer.import_weights(str(place / "in"), str(place / "run"), dtype=dtype)
    else:
        transfer.export_weights(str(place / "run" / "ckpt-0"), str(place / "out"), dtype)


def serve(what: str, folder: pathlib.Path, dtype: str) -> None:
    """Imports or exports, after a tiny model that loads all modules; prints peak and time."""
    move(what, folder / "tiny", dtype)
    begin = time.perf_counter()
    peak = rise(lambda: move(what, folder, dtype))
    print(json.dumps({"peak": peak, "seconds": time.perf_counter() - begin}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", default="weights", help="a new folder, with room for two models"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=BYTES)
    parser.add_argument("--small", action="store_true", help="a model of some MB")
    parser.add_argument("--serve", choices=("import", "export"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    folder = pathlib.Path(flags.folder).absolute()
    if flags.serve:
        serve(flags.serve, folder, flags.dtype)
        return
    values = LLAMA_7B | (SMALLER if flags.small else {})
    for place in (folder / "in", folder / "tiny" / "in"):
        place.mkdir(parents=True)
    try:
        make(folder / "tiny" / "in", LLAMA_7B | SMALLER, flags.dtype, 2)
        total, largest = make(folder / "in", values, flags.dtype, 3)
        print(f"{total / 1e9:.2f} GB as {flags.dtype}, largest tensor {largest / 1e6:.0f} MB")
        print("         peak rise  of the largest tensor   time  GB a second")
        for what in ("import", "export"):
            command = [sys.executable, __file__, "--serve", what, "--folder", str(folder)]
            command += ["--dtype", flags.dtype]
            done = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{what:8s} {found['peak'] / 1e6:6.0f} MB {found['peak'] / largest:22.2f} "
                f"{found['seconds']:6.1f} s {total / 1e9 / found['seconds']:8.2f}"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
