"""Finds the plans with the shortest steps for a model and some devices, and what limits them.

The model's layers are measured on this machine, in some minutes, or read from a file that `--save`
wrote: `pipemesh plan FIGURES` needs no TensorFlow. All meshes, layouts, schedules, numbers of
microbatches, partitions and remat are searched together. Forecasts are off by some percent, so
`--trials` runs steps of the few best plans in turn, and sorts them by the measured time. Beside a
file, trials also say by how much the machine is slower now than when it was measured, and scale
all forecasts by that.

  pipemesh plan --model=package.module.Class --devices=8 --device_memory=16GiB --save=figures.json
  pipemesh plan figures.json --devices=8 --device_memory=16GiB --fix=schedule=1f1b
  pipemesh plan figures.json --devices=8 --model=package.module.Class --trials=4
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
from collections.abc import Sequence
from typing import Any

from pipemesh.commands import process
from pipemesh.commands.flags import (
    DEVICE_MEMORY,
    Command,
    Flag,
    Flags,
    check_output,
    parse,
    write_output,
)
from pipemesh.commands.model_kind import REGISTERED, logdir, take_flags
from pipemesh.commands.training_flags import MEASURED_FLAGS
from pipemesh.errors import PlanError
from pipemesh.plan.figures import PLAIN, Figures, settings_of
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.search import SearchSpace, check_fixed, search
from pipemesh.text import columns, count_text, nearest_text, number

_MB = 1e6
# The share of a step that is round-off.
_NOTHING = 1e-9
_NAMES = tuple(Plan().to_values())
COMMAND = Command(
    "pipemesh plan",
    __doc__,
    (
        Flag("figures", argument="?", help="File of figures that were measured before."),
        Flag("model", short="m", help="Model to measure here: package.module.Class."),
        Flag("device_type", default="CPU", choices=["CPU", "GPU"], help="Devices to measure on."),
        *(flag for flag in REGISTERED.flags if flag.name in (*MEASURED_FLAGS, "logdir")),
        Flag("save", value="FILE", help="Write the measured figures there."),
        Flag("devices", int, required=True, value="N", least=1, help="Number of devices."),
        Flag(
            "batch_size",
            int,
            value="ROWS",
            least=1,
            help="Examples of a batch; default: the model's.",
        ),
        DEVICE_MEMORY,
        Flag(
            "fix",
            repeated=True,
            value="NAME=VALUE",
            help="Fix one value of the plan, such as schedule=1f1b; may be repeated; names are "
            f"{', '.join(_NAMES)}.",
        ),
        Flag("count", int, 5, value="N", least=1, help="Number of plans to show."),
        Flag("seconds", float, 8.0, value="S", help="Time limit of the search."),
        Flag(
            "trials",
            int,
            0,
            value="N",
            least=0,
            help="Number of plans to run steps of, with --model.",
        ),
        Flag("parts", bool, False, help="Show the parts of each step, too."),
        Flag("json", value="FILE", help="Write the plans there, too."),
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, COMMAND)
    _check(flags)
    fixed = fixed_values(flags.fix)
    check_fixed(fixed)
    figures = None if flags.figures is None else Figures.read(flags.figures)
    model: Any = None
    if flags.model is not None:
        model = measured(flags)
    if figures is None:
        figures = dataclasses.replace(model.figures(), settings=settings_of(flags.given()))
        write_output("--save", flags.save, figures.to_json())
    if not (batch := flags.batch_size or figures.batch):
        raise PlanError("the figures do not say the batch size; give --batch_size")
    if model is not None and flags.trials and batch != model.rows:
        raise PlanError(
            f"a batch of {flags.model} has {model.rows} examples, so trials cannot have {batch}; "
            "give --batch_size and figures that say the same, or leave --trials out"
        )
    asked = SearchSpace(flags.devices, batch, flags.device_memory, fixed)
    count = max(flags.count, flags.trials)
    plans = search(figures, asked, seconds=flags.seconds, count=count)
    took: list[float] = []
    pace = 1.0
    if model is not None and flags.trials:
        # What has just been measured is at the pace of the machine.
        is_old = flags.figures is not None and _has_plain_step(figures, asked)
        plans, took, pace = _tried(figures, plans, model, flags.trials, is_old)
    about = f"figures: {figures.about}; " if figures.about else ""
    print(f"{about}a batch of {count_text(batch, 'row')}")
    if pace != 1:
        print(
            f"a reference step now takes {pace:.2f} of the time it took when measured; forecasts "
            "are scaled accordingly"
        )
    print("\n".join(columns(rows_of(plans, took, figures.error), left=(0, 1, 2, 5))))
    if flags.parts:
        print("\nmilliseconds of a step, by part")
        print("\n".join(columns(part_rows(plans), left=(0,))))
    if plans[0].supposed:
        print(f"\nnote: {plans[0].supposed}")
    if (used := plans[0].plan.mesh.num_devices) < flags.devices:
        print(f"\nnote: the best plan uses {used} of {flags.devices} devices")
    print(f"\nbest: {plans[0].plan}")
    values = [values_of(plan) for plan in plans]
    for value, seconds in zip(values, took, strict=False):
        value["trial"] = seconds
    write_output("--json", flags.json, json.dumps(values, indent=1))
    return 0


def measured(flags: Flags) -> Any:
    """Returns a model whose layers and steps can be measured on this machine."""
    importlib.import_module("pipemesh.needs_tensorflow")
    process.import_quietly()
    process.look_here()
    module: Any = importlib.import_module("pipemesh.training.measuring")
    return module.RegisteredSteps(
        flags.model,
        flags.devices,
        flags.device_type,
        flags.optimizer,
        # `--batch_size` is that of the forecast.
        functools.partial(take_flags, flags=flags, folder=logdir(), names=MEASURED_FLAGS),
        freeze=flags.freeze,
        train_only=flags.train_only,
    )


def _has_plain_step(figures: Figures, asked: SearchSpace) -> bool:
    """Returns whether the time of a plain step is known, and one can be run here."""
    if not figures.plain_step or asked.batch != figures.batch:
        return False
    held = max(predict(PLAIN, figures, figures.batch, parts=False).memory)
    return asked.memory is None or held <= asked.memory


def _tried(
    figures: Figures, found: Sequence[Prediction], model: Any, count: int, is_old: bool
) -> tuple[list[Prediction], list[float], float]:
    """Runs steps of the first plans, and sorts these by the measured time.

    It returns forecasts at the current pace of the machine, without plans that could not be run,
    the measured times, and the pace: the time of a step divided by its time when figures were
    measured, which `is_old` measures again.
    """
    plans = [each.plan for each in found[:count]]
    # All layers in one stage are the plain plan, whether that says so or not.
    uncut = [dataclasses.replace(plan, boundaries=None) for plan in plans]
    times = model.seconds([*plans, PLAIN] if is_old and PLAIN not in uncut else plans)
    pace = 1.0
    if is_old and math.isfinite(plain := times[[*uncut, PLAIN].index(PLAIN)]):
        now = figures.at_pace(plain)
        pace = now.plain_step / figures.plain_step
        found = [predict(each.plan, now, now.batch) for each in found]
    # A plan that the model does not support has an infinite time.
    order = sorted((i for i in range(len(plans)) if math.isfinite(times[i])), key=times.__getitem__)
    if not order:
        raise PlanError(f"this model supports none of the {len(plans)} plans that were tried")
    return [*(found[i] for i in order), *found[count:]], [times[i] for i in order], pace


def _check(flags: Flags) -> None:
    """Checks flags before anything is measured."""
    sources = (flags.figures is not None, flags.model is not None)
    if not any(sources) or (all(sources) and not flags.trials):
        raise PlanError(
            "give either --model=package.module.Class, which is measured, or a file of figures; "
            "both only with --trials"
        )
    given = next((name for name in MEASURED_FLAGS if flags.is_given(name)), None)
    if given and flags.model is None:
        raise PlanError(
            f"--{given}={flags.value(given)} is measured; give --model=package.module.Class"
        )
    if flags.save and flags.figures is not None:
        raise PlanError("--save is for what is measured; give --model alone, or leave it out")
    check_output("--save", flags.save)
    check_output("--json", flags.json)
    if flags.trials and flags.model is None:
        raise PlanError(
            f"--trials={flags.trials} runs steps of a model; give --model=package.module.Class"
        )


def fixed_values(texts: Sequence[str]) -> dict[str, str]:
    """Parses values of a plan, such as `schedule=1f1b`."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise PlanError(f"--fix={text!r} must be NAME=VALUE, such as schedule=1f1b")
        if name not in _NAMES:
            raise PlanError(f"--fix={text!r}: a plan has no {name!r}{nearest_text(name, _NAMES)}")
        found[name] = value
    return found


def rows_of(
    found: Sequence[Prediction], took: Sequence[float] = (), error: float = 0.0
) -> list[tuple[str, ...]]:
    """Returns a table of predictions with a header; `took` has seconds of the first ones.

    `error` is that of `Figures`.
    """
    sure = f" ±{max(0.01, error):.0%}" if error else ""
    has_program = any(each.plan.lowering != "placement" for each in found)
    rows = [
        (
            *("mesh", "layout", "schedule", "microbatches", "boundaries", "remat"),
            *(("lowering",) if has_program else ()),
            *("step ms", "bubble", "memory MB", "binds"),
            *(("trial ms",) if took else ()),
        )
    ]
    for i, each in enumerate(found):
        trial = number(1e3 * took[i]) if i < len(took) else "-"
        plan, cuts = each.plan, each.plan.boundaries
        rows.append(
            (
                str(plan.mesh),
                str(plan.layout) or "-",
                str(plan.schedule),
                f"{plan.num_microbatches:,}",
                ",".join(map(str, cuts)) if cuts and len(cuts) > 2 else "-",
                str(plan.remat),
                *((plan.lowering,) if has_program else ()),
                number(1e3 * each.seconds) + sure,
                f"{each.bubble:.1%}",
                number(max(each.memory) / _MB),
                each.binds,
                *((trial,) if took else ()),
            )
        )
    return rows


def part_rows(found: Sequence[Prediction]) -> list[list[str]]:
    """Returns a table of the parts of steps, in milliseconds; negligible ones are 0."""
    names = list(found[0].parts)
    rows = [["plan", *names]]
    for each in found:
        parts = (each.parts[name] for name in names)
        cells = (number(1e3 * part) if part > _NOTHING * each.seconds else "0" for part in parts)
        rows.append([str(each.plan), *cells])
    return rows


def values_of(each: Prediction) -> dict[str, object]:
    """Returns a prediction for JSON."""
    names = ("seconds", "bubble", "memory", "parts", "binds")
    return {"plan": each.plan.to_values(), **{name: getattr(each, name) for name in names}}
