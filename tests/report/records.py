"""Writes records of runs, without running anything."""

import json
import math
import random

from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import Curve, LayerFigures
from pipemesh.report import Record, read
from pipemesh.schedule import Costs, one_f_one_b, simulate

STAGES = [
    ["stage", "layers", "flops", "parameters", "device"],
    ["0", "Embedding + 2 Block", "48.0%", "123,456", "CPU:0"],
    ["1", "2 Block + Softmax", "52.0%", "133,120", "CPU:1"],
]


PLAN = {"mesh": "layers:2", "schedule": "1f1b", "num_microbatches": "4", "layout": ""}
PLAN["remat"] = "none"
BYTES = {"parameter_bytes": 1e6, "activation_bytes": 1e6, "output_bytes": 1e4}
LAYERS = [{"name": "Block", "flops": 1e9 * (1 + number), **BYTES} for number in range(4)]
# Milliseconds of the step that was timed.
TIMED = 200.0


def figures():
    """Returns measured figures of the layers, for two sizes of microbatches."""
    layers = [
        LayerFigures(
            layer["name"],
            {"F": Curve(((1, t), (4, 3 * t))), "B": Curve(((1, 2 * t), (4, 6 * t)))},
            int(layer["parameter_bytes"]),
            Curve(((4, layer["activation_bytes"]),)),
            Curve(((4, layer["output_bytes"]),)),
        )
        for layer, t in zip(LAYERS, (2e-3, 1.5e-3, 1.8e-3, 2e-3), strict=True)
    ]
    about = "Tiny, x86_64, 2 cores"
    return Figures(tuple(layers), action=1e-3, fixed=5e-3, update=1e-9, batch=16, about=about)


def expected(told=()):
    """Returns the fields of a forecast that need layers: `rows`, `layers`, `limit`, `predicted`."""
    found = {"unpredicted": "nothing was measured"}
    if "rows" in told:
        found |= {"rows": 16, "cuts": [0, 2, 4], "cores": 2}
    if "layers" in told:
        found["layers"] = LAYERS
    if "limit" in told:
        found["device_memory"] = 24e6
    if "predicted" in told:
        del found["unpredicted"]
        ahead = predict(Plan("layers:2", num_microbatches=4, remat="none"), figures(), 16)
        found["figures"] = json.loads(figures().to_json())
        names = ("seconds", "memory", "bubble", "parts")
        found["predicted"] = {name: getattr(ahead, name) for name in names}
        found["predicted"]["about"] = figures().about
    return found


def begin(record, step=0, **changes):
    """Adds the first line."""
    values = {
        "name": "Tiny",
        "unit": "tokens",
        "mesh": "layers:2",
        "restored": f"runs/a/ckpt-{step}" if step else None,
        "plan": PLAN,
        "flags": {"steps": 300, "learning_rate": 0.1, "plain": False},
        "versions": {"pipemesh": "0.1", "tensorflow": "2.21"},
        "stages": [STAGES],
        "time": 1.75e9 + step,
    }
    record.add("begin", step=step, **values | changes)


def steps(record, first, last, *, seed=0, level=3.0, every=50):
    """Steps with a falling loss, judged now and then."""
    draw = random.Random(seed)
    for step in range(first, last + 1):
        loss = level + 4 * math.exp(-step / 60) + draw.gauss(0, 0.08)
        record.add(
            "step",
            step=step,
            loss=loss,
            bits_per_byte=loss / 2.5,
            token_perplexity=math.exp(loss),
            learning_rate=0.1 / math.sqrt(step),
            tokens_per_second=draw.gauss(5000, 200),
            mfu=draw.gauss(0.41, 0.01),
            seconds=draw.gauss(0.18, 0.01),
        )
        if step % every == 0:
            values = {"loss": loss + 0.1, "bits_per_byte": loss / 2.4}
            record.add("heldout", token_perplexity=math.exp(loss + 0.1), **values)


def forecast(record, told=()):
    """Adds a forecast of memory, transfers and time; see `expected`."""
    devices = [
        {"device": f"CPU:{n}", "weights": 4e6, "optimizer": 8e6, "gradients": 4e6, "activations": a}
        for n, a in enumerate((9e6, 5e6))
    ]
    record.add(
        "forecast",
        devices=devices,
        sent=[{"axes": "layers", "what": "activations", "times": 4, "bytes": 1 << 20}],
        bubble=0.2,
        flops=1e9,
        schedule=one_f_one_b(2, 4).to_text(),
        costs={"F": [9e6, 1e7], "B": [18e6, 2e7], "I": [9e6, 1e7], "W": [9e6, 1e7]},
        **expected(told),
    )
    record.add("measured", peak_memory=300 << 20, tokens_per_second=5000, steps=5)


def schedule(record, num_devices=2, num_microbatches=4):
    """Adds a timed step."""
    table = one_f_one_b(num_devices, num_microbatches)
    forward = [10.0 + stage for stage in range(num_devices)]
    usual = Costs(forward, [2 * time for time in forward])
    late = Costs(forward, [2 * time for time in forward], transfer=1.5)
    real = simulate(table, late, jitter=0.1, seed=3)
    record.add(
        "schedule",
        schedule=table.to_text(),
        costs=usual.per_stage(num_devices).durations(),
        starts=real.starts,
        ends=real.ends,
        **({"seconds": 1e-3 * TIMED} if real.makespan < TIMED else {}),
    )


def whole(folder, *, seed=0, level=3.0, last=300, timed=True, told=(), **changes):
    """Writes a complete run with a pipeline."""
    record = Record(str(folder))
    begin(record, **changes)
    forecast(record, told)
    steps(record, 1, last, seed=seed, level=level)
    record.add("final", loss=level + 0.1, bits_per_byte=1.3, token_perplexity=math.exp(level + 0.1))
    record.add("checkpoint", path=f"{folder}/ckpt-{last}")
    if timed:
        schedule(record)
    record.add("end", reason="done", is_done=True)
    return folder


def made(folder, make=whole, **changes):
    """Writes a record into a folder of its own, and reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    return read(str(make(folder, **changes)))


def plain(folder, last=30):
    """Writes a run without a pipeline, too short for evaluations before its end."""
    record = Record(str(folder))
    begin(record, plan={}, stages=[], mesh="layers:1", unit="examples", name="Plain")
    steps(record, 1, last, every=1000)
    record.add("measured", peak_memory=200 << 20, steps=5)
    record.add("final", loss=4.5)
    record.add("end", reason="done", is_done=True)
    return folder


def interrupted(folder):
    """Writes a run that was killed at step 137, resumed from 100, and was stopped at 220."""
    record = Record(str(folder))
    begin(record)
    forecast(record)
    steps(record, 1, 137, level=5.0)
    with open(f"{folder}/record.jsonl", "a") as file:
        file.write('{"event": "step", "step": 138, "lo')
    record = Record(str(folder))
    begin(record, step=100)
    steps(record, 101, 220, seed=1)
    record.add("skipped", step=180, why="a gradient is not finite")
    record.add("spike", step=200, why="the loss is 9.000, after 3.100 on average")
    record.add("checkpoint", step=220, path=f"{folder}/ckpt-220")
    record.add("end", reason="stopped by SIGTERM", is_done=False)
    return folder
