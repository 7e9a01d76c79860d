"""Fine-tuning of a model of 26 million weights: tokens a second and memory, beside torch and peft.

All weights are trained, the upper half of them, or adapters of low rank (LoRA) of q and v.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import settings
from shared.contender import ROOT, Contender, serve_timed, take_turns
from shared.mkl_shim import mkl_shim
from shared.resident import resident
from shared.torch_environment import PEFT, torch_python, torch_version

sys.path.insert(0, str(ROOT))

HERE = pathlib.Path(__file__).resolve().parent
OURS, THEIRS, FAST = "pipemesh, layers:2", "torch", "torch, AVX-512"
# With it, glibc's allocator returns memory and has large tensors in huge pages; TensorFlow's own
# for CPUs returns none. `torch` runs as it is started by default, `torch, AVX-512` with
# the same.
RETURNING = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "true",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**22),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
# At least so many of torch's tokens a second, and at most so much of its memory.
SPEED_BAR = MEMORY_BAR = 1.0


def make_files(folder: str) -> None:
    """Writes a model as `transformers` does, and imports it."""
    import numpy as np
    from safetensors.numpy import save_file

    from models.pretrained import config, names, transfer

    there = pathlib.Path(folder, "in")
    there.mkdir()
    (there / "config.json").write_text(json.dumps(settings.CONFIG), encoding="utf-8")
    rng = np.random.default_rng(0)
    tensors = {}
    for theirs, parts in names.by_theirs(names.weights_of(config.of_values(settings.CONFIG))):
        shape = parts[0].there
        tensors[theirs] = (0.02 * rng.standard_normal(shape)).astype(np.float32)
        if "norm" in theirs:
            tensors[theirs] += 1
    save_file(tensors, str(there / "model.safetensors"), metadata={"format": "pt"})
    transfer.import_weights(str(there), str(pathlib.Path(folder, "run")))


def make_step(mode: str, folder: str):
    """A step of pipemesh; nothing but imports if `mode` is IMPORTS."""
    # Keras imports them where they are installed.
    settings.leave_out("pandas", "pyarrow")
    from pipemesh.backend.devices import start_cpu_devices

    start_cpu_devices(2)
    import tensorflow as tf

    from pipemesh.layers import DatasetInput  # isort: skip
    from lingvo.core import py_utils

    py_utils.SetEagerMode(True)
    from models.pretrained import params
    from pipemesh.plan import Plan
    from pipemesh.training.registered import RegisteredModel
    from pipemesh.training.run import Options
    from pipemesh.training.trainer import Trainer

    if mode == settings.IMPORTS:
        return lambda: (0.0,)
    ids = settings.token_ids()
    shape = [settings.ROWS, settings.LENGTH]
    batch = {
        "ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "weights": tf.ones(shape),
        "segment_ids": tf.ones(shape, tf.int32),
        "segment_pos": tf.tile(tf.range(settings.LENGTH)[None], [settings.ROWS, 1]),
    }

    class Tuned(params.Llama):
        OPTIMIZER, LEARNING_RATE, CLIP_GRADIENT_NORM = "adamw", settings.RATE, 1.0
        # Torch's AdamW makes all weights decay.
        WEIGHT_DECAY, WEIGHT_DECAY_EXCEPT = settings.WEIGHT_DECAY, ""
        BATCH_SIZE, SEQUENCE_LENGTH = shape
        PLAN = Plan("layers:2", num_microbatches=settings.MICROBATCHES, remat=settings.REMAT[mode])
        FREEZE = settings.FROZEN if mode == "frozen" else None
        LORA_RANK = settings.LORA_RANK if mode == "lora" else 0
        LORA_ALPHA = settings.LORA_ALPHA

        def Train(self):
            dataset = tf.data.Dataset.from_tensors(batch).repeat()
            return DatasetInput.Params().Set(name="Train", dataset=lambda: dataset)

    config = Tuned()
    config.LOGDIR = os.path.join(folder, "run")
    subject = RegisteredModel(config, "Tuned")
    logdir = tempfile.mkdtemp(dir=folder)
    trainer = Trainer(
        subject, Options(logdir=logdir, steps=1000), os.path.join(folder, "run", "ckpt-0")
    )
    return lambda: (trainer.train_step()["loss"],)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modes", nargs="+", choices=settings.MODES, default=settings.MODES)
    parser.add_argument(
        "--torch_python", help="Python with torch, transformers and peft; default: one made here"
    )
    parser.add_argument("--out", default=str(HERE / "result.json"))
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_timed(make_step(arguments.serve, arguments.folder))
        return
    if "VmHWM" not in resident():
        raise SystemExit("error: /proc/self/status has no VmHWM; run this on Linux")
    theirs = torch_python(arguments.torch_python, *PEFT)
    shim = mkl_shim()
    imports = {
        name: imported([python, str(HERE / script), "--serve", settings.IMPORTS, "--folder", ""])
        for name, python, script in (
            (OURS, sys.executable, "run.py"),
            (THEIRS, theirs, "torch_llama.py"),
        )
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        make_files(folder)
        for mode in arguments.modes:
            ask = ["--serve", mode, "--folder", folder]
            torch = [theirs, str(HERE / "torch_llama.py"), *ask]
            contenders = {
                OURS: Contender([sys.executable, __file__, *ask], RETURNING),
                THEIRS: Contender(torch),
            }
            if shim is not None:
                contenders[FAST] = Contender(torch, {**RETURNING, "LD_PRELOAD": shim})
            found[mode] = measured(contenders, arguments.rounds)
    report(found, imports, torch_version(theirs), arguments)


def imported(command):
    """The memory in MiB of a process that only imports what it needs."""
    contender = Contender(command, RETURNING)
    contender.ask()
    contender.close()
    return contender.peak_bytes / 2**20


def measured(contenders, rounds):
    """The seconds of each contender's steps, and its peak of memory in MiB."""
    seconds, cpu, _ = take_turns(contenders, rounds, OURS)
    return {
        name: {"seconds": seconds[name], "cpu": cpu[name], "memory": each.peak_bytes / 2**20}
        for name, each in contenders.items()
    }


def report(found, imports, version, arguments) -> None:
    tokens = settings.ROWS * settings.LENGTH
    print(
        f"{tokens} tokens a step, {settings.MICROBATCHES} microbatches; {arguments.rounds} rounds"
    )
    heads = ("tokens/s", "peak memory", "beyond the imports")
    print(f"{'trained':10}{'':20}" + "".join(f"{head:>20}{'/ torch':>9}" for head in heads))
    for mode, by_name in found.items():
        peer = by_name.get(FAST, by_name[THEIRS])
        for name, each in by_name.items():
            each["beyond"] = each["memory"] - imports[name if name == OURS else THEIRS]
        for name, each in by_name.items():
            pairs = zip(each["seconds"], peer["seconds"], strict=True)
            speed = statistics.median(theirs / mine for mine, theirs in pairs)
            share = each["memory"] / peer["memory"]
            rate = tokens / statistics.median(each["seconds"])
            print(
                f"{mode:10}{name:20}{rate:20,.0f}{speed:9.2f}"
                f"{each['memory']:16,.0f} MiB{share:9.2f}"
                f"{each['beyond']:16,.0f} MiB{each['beyond'] / peer['beyond']:9.2f}"
            )
            if name == OURS:
                each |= {"speed": speed, "share": share}
    print(
        "memory of the imports alone, which no step can do without: "
        + ", ".join(f"{name} {value:,.0f} MiB" for name, value in imports.items())
    )
    for mode, by_name in found.items():
        for what, value, is_met in (
            ("tokens a second", by_name[OURS]["speed"], by_name[OURS]["speed"] >= SPEED_BAR),
            ("memory", by_name[OURS]["share"], by_name[OURS]["share"] <= MEMORY_BAR),
        ):
            verdict = "met" if is_met else "NOT met"
            print(f"{mode}: {what} / torch's: {value:.2f} (bar {SPEED_BAR}: {verdict})")
    machine = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": version}
    text = json.dumps(
        {**machine, "python": platform.python_version(), "imports": imports, "found": found},
        indent=1,
    )
    pathlib.Path(arguments.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
