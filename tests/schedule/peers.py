"""One process of torch.distributed.pipelining, for test_peers.py.

`python -m tests.schedule.peers FOLDER RANK SIZE` runs every table in both forms of CSV, and those
that torch writes, and says how far its stages are from the plain model: `FOLDER/RANK.json`.
"""

import json
import pathlib
import sys

import pytest

from pipemesh.schedule import Costs, Schedule, from_csv, list_schedule, validate, write_csv
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.names import NAMES

# Tests are collected where it is not installed, too.
torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[dev,peers]'")

from torch.distributed import destroy_process_group, init_process_group  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402

DEVICES, MICROBATCHES, WIDTH = 3, 6, 4
FORMS = ("compute_only", "compute_comms")
# Neighbours on one device, and backward passes that are split here and whole there.
ODD = """\
0: 0F0 1F0 0F1 1F1 3F0 3F1 3B0 3I1 3W1 1B0 0I0 1B1 0B1 0W0
1: 2F0 2F1 2I0 2B1 2W0
2: 4F0 4B0 4F1 4I1 4W1
"""
# Torch's schedules, each with the stages of this process.
THEIRS = {
    "ScheduleLoopedBFS": lambda rank: [rank, rank + DEVICES],
    "ScheduleInterleaved1F1B": lambda rank: [rank, rank + DEVICES],
    "ScheduleInterleavedZeroBubble": lambda rank: [rank, rank + DEVICES],
    "ScheduleZBVZeroBubble": lambda rank: [rank, 2 * DEVICES - 1 - rank],
    "ScheduleDualPipeV": lambda rank: [rank, 2 * DEVICES - 1 - rank],
}


def tables():
    """Tables of ours by name."""
    found = {name: build(name, DEVICES, MICROBATCHES) for name in BUILDERS if NAMES[name].trains}
    uneven = Costs(forward=[1, 3, 1, 2, 1, 1], transfer=0.5)
    found["list_schedule"] = list_schedule(uneven, DEVICES, MICROBATCHES, effort=0)
    found["odd"] = validate(Schedule.from_text(ODD))
    return found


def main(folder, rank, size):
    """Runs all tables."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = {}
    for name, table in tables().items():
        for form in FORMS:
            found[f"{name}, {form}"] = differences(
                folder, rank, table, write_csv(table, form), form
            )
    for name, stages_of in THEIRS.items():
        stages = [stage(index, 2 * DEVICES) for index in stages_of(rank)]
        theirs = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_of)
        read = {}
        for form in FORMS:
            path = pathlib.Path(folder, f"theirs.{rank}.csv")
            theirs._dump_csv(str(path), format=form)
            read[form] = validate(from_csv(path.read_text()))
        assert read["compute_only"] == read["compute_comms"], name
        for form in FORMS:
            table = read[form]
            found[f"{name}, {form}"] = differences(
                folder, rank, table, write_csv(table, form), form
            )
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))
    destroy_process_group()


def loss_of(outputs, target):
    """The loss of a microbatch."""
    return torch.nn.functional.mse_loss(outputs, target)


def layer(index):
    """A layer of the model, the same in each process."""
    torch.manual_seed(index)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def stage(index, num_stages):
    """A stage of one layer."""
    return PipelineStage(layer(index), index, num_stages, torch.device("cpu"))


def differences(folder, rank, table, text, form):
    """How far the loss, and the gradients of this process, are from those of the plain model."""
    torch.manual_seed(99)
    inputs, target = torch.randn(2, 2 * table.num_microbatches, WIDTH)
    plain = torch.nn.Sequential(*map(layer, range(table.num_stages)))
    wanted = loss_of(plain(inputs), target)
    wanted.backward()

    here = [index for index, device in enumerate(table.stage_devices) if device == rank]
    stages = [stage(index, table.num_stages) for index in here]
    path = pathlib.Path(folder, f"{rank}.csv")
    path.write_text(text)
    runtime = schedules._PipelineScheduleRuntime(stages, table.num_microbatches, loss_fn=loss_of)
    runtime._load_csv(str(path), format=form)
    losses = []
    last = {"target": target, "losses": losses} if table.num_stages - 1 in here else {}
    runtime.step(*([inputs] if 0 in here else []), **last)
    found = [abs(torch.stack(losses).mean() - wanted).item()] if last else []
    for index, each in zip(here, stages, strict=True):
        for mine, whole in zip(each.submod.parameters(), plain[index].parameters(), strict=True):
            found.append((abs(mine.grad - whole.grad).max() / abs(whole.grad).max()).item())
    return max(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
