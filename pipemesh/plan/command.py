"""Says which plans are fastest for a model and some devices, and what binds them.

What the model's layers take is measured on this machine, in some minutes, or read from a file that
`--save` wrote: `pipemesh plan FIGURES` needs no TensorFlow. All meshes, layouts, schedules, numbers
of microbatches, partitions and remat are searched together. Forecasts are off by some percent, so
`--trials` runs steps of the few best plans in turn, and puts them in the order of what these took.
Beside a file, trials also say by how much the machine is slower now than when it was measured, and
all forecasts are made so.

  pipemesh plan --model=package.module.Class --devices=8 --memory=16GiB --save=figures.json
  pipemesh plan figures.json --devices=8 --memory=16GiB --fix schedule=1f1b
  pipemesh plan figures.json --devices=8 --model=package.module.Class --trials=4
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from pipemesh.errors import PlanError
from pipemesh.plan.figures import PLAIN, Figures
from pipemesh.plan.output_file import check_output, write_output
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.search import SearchSpace, search
from pipemesh.text import bytes_option, columns, nearest_text

_MB = 1e6
# The share of a step that is round-off.
_NOTHING = 1e-9
_NAMES = tuple(Plan().to_values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `pipemesh plan`.

    Args:
        parser: the parser of this subcommand.
    """
    parser.add_argument("figures", nargs="?", metavar="FIGURES", help="what was measured before")
    parser.add_argument("--model", "-m", help="package.module.Class, to be measured here")
    parser.add_argument(
        "--device-type", choices=["CPU", "GPU"], default="CPU", help="to measure on (default: CPU)"
    )
    parser.add_argument("--save", metavar="FILE", help="write what is measured there")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="that there are")
    parser.add_argument("--batch", type=int, metavar="ROWS", help="default: the model's")
    parser.add_argument(
        "--memory", type=bytes_option, metavar="BYTES", help="of a device, such as 16GiB"
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"of the plan, as schedule=1f1b; may be repeated; names are {', '.join(_NAMES)}",
    )
    parser.add_argument("--count", type=int, default=5, metavar="N", help="plans to show")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="that the search may take (default: 8)"
    )
    parser.add_argument(
        "--trials", type=int, default=0, metavar="N", help="plans to run steps of, with --model"
    )
    parser.add_argument("--parts", action="store_true", help="what each step is made of, too")
    parser.add_argument("--json", metavar="FILE", help="write the plans there, too")


def run(arguments: argparse.Namespace) -> int:
    """Does what the options say.

    Args:
        arguments: the parsed options.

    Returns:
        The exit code, 0.

    Raises:
        PlanError: the figures are malformed, or no plan fits.
        PipemeshError: the model cannot be measured.
    """
    _check(arguments)
    fixed = fixed_values(arguments.fix)
    figures = None if arguments.figures is None else Figures.read(arguments.figures)
    model: Any = None
    if arguments.model is not None:
        model = arguments.measured(arguments.model, arguments.devices, arguments.device_type)
    if figures is None:
        figures = model.figures()
        write_output("--save", arguments.save, figures.to_json())
    if not (batch := arguments.batch or figures.batch):
        raise PlanError("how many rows has a batch? the figures do not say; give --batch")
    if model is not None and arguments.trials and batch != model.rows:
        raise PlanError(
            f"a batch of {arguments.model} has {model.rows} rows, so trials cannot be of {batch}; "
            "give --batch and figures that say the same, or leave --trials out"
        )
    asked = SearchSpace(arguments.devices, batch, arguments.memory, fixed)
    count = max(arguments.count, arguments.trials)
    found = search(figures, asked, seconds=arguments.seconds, count=count)
    took: list[float] = []
    pace = 1.0
    if model is not None and arguments.trials:
        # What has just been measured is at the pace of the machine.
        is_old = arguments.figures is not None and _has_plain_step(figures, asked)
        found, took, pace = _tried(figures, found, model, arguments.trials, is_old)
    if figures.about:
        print(f"figures: {figures.about}")
    if pace != 1:
        print(f"a plain step takes {pace:.2f} of what it took then, and so do all forecasts")
    print("\n".join(columns(rows_of(found, took), left=(0, 1, 2, 5))))
    if arguments.parts:
        print("\nmilliseconds of a step, by what takes them")
        print("\n".join(columns(part_rows(found), left=())))
    if found[0].supposed:
        print(f"\nnote: {found[0].supposed}; bytes are forecast")
    if (used := found[0].plan.mesh.num_devices) < arguments.devices:
        print(f"\nnote: the best plan that was found uses {used} of {arguments.devices} devices")
    print(f"\nbest: {found[0].plan}")
    values = [values_of(each) for each in found]
    for value, seconds in zip(values, took, strict=False):
        value["trial"] = seconds
    write_output("--json", arguments.json, json.dumps(values, indent=1))
    return 0


def _has_plain_step(figures: Figures, asked: SearchSpace) -> bool:
    """Whether it is known what a plain step took, and one can be run here."""
    if not figures.plain_step or asked.batch != figures.batch:
        return False
    held = max(predict(PLAIN, figures, figures.batch, parts=False).memory)
    return asked.memory is None or held <= asked.memory


def _tried(
    figures: Figures, found: Sequence[Prediction], model: Any, number: int, is_old: bool
) -> tuple[list[Prediction], list[float], float]:
    """The first ones in the order of what steps took, then the others.

    Args:
        figures: forecasts are made of.
        found: the best plans.
        model: whose steps are run.
        number: of plans to run steps of.
        is_old: whether to see how fast the machine is now, too.

    Returns:
        Forecasts at the pace of the machine, without those of plans that could not be run; what
        steps took; and that pace: what a step takes as a share of what it took when figures were
        measured.
    """
    plans = [each.plan for each in found[:number]]
    # All layers in one stage are the plain plan, whether that says so or not.
    uncut = [dataclasses.replace(plan, boundaries=None) for plan in plans]
    times = model.seconds([*plans, PLAIN] if is_old and PLAIN not in uncut else plans)
    pace = 1.0
    if is_old and math.isfinite(plain := times[[*uncut, PLAIN].index(PLAIN)]):
        now = figures.at_pace(plain)
        pace = now.plain_step / figures.plain_step
        found = [predict(each.plan, now, now.batch) for each in found]
    # A plan that cannot be had for the model took endless.
    order = sorted((i for i in range(len(plans)) if math.isfinite(times[i])), key=times.__getitem__)
    if not order:
        raise PlanError(f"none of {len(plans)} plans that were tried can be had for this model")
    return [*(found[i] for i in order), *found[number:]], [times[i] for i in order], pace


def _check(arguments: argparse.Namespace) -> None:
    """Checks what can be checked before anything is measured."""
    given = (arguments.figures is not None, arguments.model is not None)
    if not any(given) or (all(given) and not arguments.trials):
        raise PlanError(
            "of which model? give either --model=package.module.Class, which is measured, or a "
            "file of figures; both only with --trials"
        )
    if arguments.save and arguments.figures is not None:
        raise PlanError("--save is for what is measured; give --model alone, or leave it out")
    check_output("--save", arguments.save)
    check_output("--json", arguments.json)
    if arguments.count < 1:
        raise PlanError(f"--count is {arguments.count}; it must be at least 1")
    if arguments.trials < 0:
        raise PlanError(f"--trials is {arguments.trials}; it must be a number from 0 on")
    if arguments.trials and arguments.model is None:
        raise PlanError(
            f"--trials={arguments.trials} runs steps of the model; say which one with "
            "--model=package.module.Class"
        )


def fixed_values(texts: Sequence[str]) -> dict[str, str]:
    """Values of a plan that are asked for.

    Args:
        texts: as `schedule=1f1b`.

    Raises:
        PlanError: one is malformed.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise PlanError(f"--fix={text!r} must be NAME=VALUE, such as schedule=1f1b")
        if name not in _NAMES:
            raise PlanError(f"--fix={text!r}: a plan has no {name!r}{nearest_text(name, _NAMES)}")
        found[name] = value
    return found


def rows_of(found: Sequence[Prediction], took: Sequence[float] = ()) -> list[tuple[str, ...]]:
    """A table of predictions, with what they are called above.

    Args:
        found: at least one.
        took: seconds of a step, of those of the first that were tried.
    """
    rows = [
        (
            *("mesh", "layout", "schedule", "microbatches", "boundaries", "remat"),
            *("step ms", "bubble", "memory MB", "binds"),
            *(("trial ms",) if took else ()),
        )
    ]
    for i, each in enumerate(found):
        trial = f"{1e3 * took[i]:.4g}" if i < len(took) else "-"
        plan, cuts = each.plan, each.plan.boundaries
        rows.append(
            (
                str(plan.mesh),
                str(plan.layout) or "-",
                str(plan.schedule),
                f"{plan.num_microbatches:,}",
                ",".join(map(str, cuts)) if cuts and len(cuts) > 2 else "-",
                str(plan.remat),
                f"{1e3 * each.seconds:.4g}",
                f"{each.bubble:.1%}",
                f"{max(each.memory) / _MB:.4g}",
                each.binds,
                *((trial,) if took else ()),
            )
        )
    return rows


def part_rows(found: Sequence[Prediction]) -> list[list[str]]:
    """A table of what steps are made of, in milliseconds; what is nothing beside a step is 0.

    Args:
        found: with their parts, at least one.
    """
    names = list(found[0].parts)
    rows = [names]
    for each in found:
        parts = (each.parts[name] for name in names)
        rows.append(
            [f"{1e3 * part:.4g}" if part > _NOTHING * each.seconds else "0" for part in parts]
        )
    return rows


def values_of(each: Prediction) -> dict[str, object]:
    """A prediction as JSON has it.

    Args:
        each: the prediction.
    """
    return {
        "plan": each.plan.to_values(),
        "seconds": each.seconds,
        "bubble": each.bubble,
        "memory": each.memory,
        "parts": each.parts,
        "binds": each.binds,
    }
