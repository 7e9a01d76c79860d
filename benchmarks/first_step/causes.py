"""Where the seconds before the end of the first step go; flags as those of the trainer.

python benchmarks/first_step/causes.py --mesh_shape=layers:2 --num_microbatches=8
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

SECONDS: dict[str, float] = {}


def timed(owner: Any, name: str, cause: str) -> None:
    """From here on, what a function takes is added to a cause; the outermost one counts."""
    plain = getattr(owner, name)
    running = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running:
            return plain(*args, **kwargs)
        running, begin = True, time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            running = False
            SECONDS[cause] = SECONDS.get(cause, 0.0) + time.perf_counter() - begin

    setattr(owner, name, run)


def main() -> None:
    gc.disable()
    begin = time.perf_counter()
    from models.one_billion_word import kind, train

    timed(kind, "read_text", "text and vocabulary")
    start = kind._start_devices

    def start_and_watch(request: Any) -> None:
        importing = time.perf_counter()
        start(request)
        from pipemesh.recurrent.passes import tracing
        from pipemesh.recurrent.table import machine, run
        from pipemesh.training import trainer
        from pipemesh.training.run import loop

        SECONDS["imports"] = time.perf_counter() - importing
        timed(trainer.Trainer, "__init__", "model, datasets")
        timed(trainer.Trainer, "_train_step", "tracing the step")
        timed(machine.Machine, "_trace", "- stages and their gradients, evaluation included")
        timed(tracing.Replica, "differentiate", "  - gradients")
        timed(run.Run, "perform", "- actions, evaluation included")
        timed(trainer.Trainer, "train_steps", "first step, tracing included")
        timed(trainer.Trainer, "_prepare_evaluation", "evaluation's graph, meanwhile")
        timed(trainer.Trainer, "save", "evaluating and saving")
        timed(loop.Loop, "_conclude", "evaluating at the end")

    kind._start_devices = start_and_watch
    with tempfile.TemporaryDirectory() as logdir, contextlib.suppress(SystemExit):
        flags = ["--steps=1", "--eval_batches=1", f"--logdir={logdir}"]
        train.main(["train", *sys.argv[1:], *flags])
    for cause, seconds in SECONDS.items():
        print(f"{cause:52} {seconds:5.1f} s")
    print(f"{'all':52} {time.perf_counter() - begin:5.1f} s")


if __name__ == "__main__":
    main()
