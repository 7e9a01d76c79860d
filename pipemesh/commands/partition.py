"""`pipemesh partition`: the partitioner in the shell."""

from __future__ import annotations

import csv
import io
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pipemesh.commands.flags import (
    DEVICE_MEMORY,
    NUM_MICROBATCHES,
    NUM_VIRTUAL_STAGES,
    Command,
    Flag,
    grouped,
    parse,
    write_output,
)
from pipemesh.errors import PartitionError
from pipemesh.partition.costs import NUMBERS, LayerCost, number_problem
from pipemesh.partition.memory import REMAT_POLICIES
from pipemesh.partition.options import METHODS
from pipemesh.partition.result import MOST_ROWS, Partition, layers_text, table
from pipemesh.partition.solve import partition
from pipemesh.report.partition_drawing import partition_to_svg
from pipemesh.schedule.names import help_text
from pipemesh.text import bytes_of, columns, nearest, number_text

COLUMNS = (*NUMBERS, "name")
# Flags by the parameters of `partition`.
_OPTIONS = {
    "memory_limit": "device_memory",
    "optimizer_bytes_per_parameter_byte": "optimizer_bytes",
    **{
        name: name
        for name in (
            *("speeds", "bandwidth", "overlap_transfers", "num_virtual_stages"),
            *("schedule", "num_microbatches", "remat", "same_stage", "min_layers", "max_layers"),
            "fixed",
        )
    },
}
# Parameters that messages name; others are words of their sentences as well.
_NAMED = re.compile(r"\b(num_stages|" + "|".join(name for name in _OPTIONS if "_" in name) + r")\b")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("it must be numbers such as 1,1,0.5") from None


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("it must be layer indices such as 0,3") from None


COMMAND = Command(
    "pipemesh partition",
    "Cuts layers into contiguous stages with the smallest possible bottleneck.\n\n"
    "COSTS is a CSV file (one number a line, or a header with cost or forward, backward,\n"
    "parameter_bytes, activation_bytes, boundary_bytes, shared_bytes, name), a JSON list of\n"
    "numbers or of objects with these fields, or - for standard input.",
    (
        Flag("costs", argument="once", help="CSV or JSON file, or - for standard input."),
        Flag("stages", int, required=True, value="N", help="Number of stages."),
        Flag("method", default="exact", help=f"Partitioning method: {', '.join(METHODS)}."),
        *grouped(
            "devices",
            Flag("speeds", _numbers, value="A,B,...", help="Relative speed of each device."),
            Flag(
                "bandwidth",
                bytes_of,
                value="BYTES",
                help="Bytes per unit of time between devices.",
            ),
            Flag("overlap_transfers", bool, False, help="Transfers overlap with computation."),
            NUM_VIRTUAL_STAGES,
        ),
        *grouped(
            "memory",
            DEVICE_MEMORY,
            NUM_MICROBATCHES,
            Flag("schedule", help="Schedule that memory depends on; the spellings are below."),
            Flag("remat", default="none", help=f"Recomputation: {', '.join(REMAT_POLICIES)}."),
            Flag(
                "optimizer_bytes",
                float,
                2.0,
                value="X",
                help="Optimizer bytes for each byte of parameters; default: 2, Adam's moments.",
            ),
        ),
        *grouped(
            "cuts",
            Flag(
                "same_stage",
                _integers,
                value="I,J,...",
                repeated=True,
                help="Layers that share a stage; can be repeated.",
            ),
            Flag("min_layers", int, 1, value="N", help="Minimum number of layers per stage."),
            Flag("max_layers", int, value="N", help="Maximum number of layers per stage."),
            Flag(
                "fixed",
                _integers,
                (),
                value="I,J,...",
                help="Layers at which a stage must begin.",
            ),
        ),
        *grouped(
            "output",
            Flag("json", bool, False, help="Print JSON instead of a table."),
            Flag("compare", bool, False, help="Show exact, lingvo and uniform side by side."),
            Flag("plot", value="OUT.SVG", help="Write a picture of the stage costs."),
        ),
    ),
    more=f"schedules, in upper or lower case:\n{help_text()}",
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, COMMAND)
    costs = read_costs(*_read(flags.costs))
    options = {name: flags.value(flag) for name, flag in _OPTIONS.items()}
    if flags.compare and flags.method != "exact":
        raise PartitionError("--compare shows all methods; leave --method out")
    plans: dict[str, Partition | str] = {}
    for method in METHODS if flags.compare else (flags.method,):
        try:
            plans[method] = partition(costs, flags.stages, method=method, **options)
        except PartitionError as error:
            told = _by_flags(str(error))
            # In a comparison, only the exact method has to find a cut.
            if method == "exact" or not flags.compare:
                raise PartitionError(told) from error
            plans[method] = told
    partitions = {name: plan for name, plan in plans.items() if isinstance(plan, Partition)}
    write_output("--plot", flags.plot, partition_to_svg(partitions) if flags.plot else "")
    if flags.json:
        first = next(iter(partitions.values()))
        values = {
            name: json.loads(plan.to_json()) if isinstance(plan, Partition) else {"error": plan}
            for name, plan in plans.items()
        }
        print(json.dumps(values, indent=2) if flags.compare else first.to_json(indent=2))
    elif flags.compare:
        print(comparison(plans))
    else:
        print(_by_flags(table(next(iter(partitions.values())), block=_block())))
    if flags.plot:
        print(f"wrote {flags.plot}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def _by_flags(text: str) -> str:
    """Returns a message with flags in place of the parameters of `partition`."""
    return _NAMED.sub(lambda match: f"--{_OPTIONS.get(match[1], 'stages')}", text)


def _block() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"


def _read(path: str) -> tuple[str, str]:
    if path == "-":
        return sys.stdin.read(), "standard input"
    try:
        return pathlib.Path(path).read_text(encoding="utf-8"), path
    except OSError as error:
        raise PartitionError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PartitionError(f"cannot read {path}: it is no UTF-8 text") from error


def comparison(plans: Mapping[str, Partition | str]) -> str:
    """Returns partitions of the same layers side by side, or why a method has none."""
    found = {name: plan for name, plan in plans.items() if isinstance(plan, Partition)}
    lines: list[str] = []
    if found:
        stages = max(plan.num_stages for plan in found.values())
        summary = ("bottleneck", "over the best", "balance", "empty stages")
        table_columns = [["stage", *map(str, range(stages)), *summary]]
        best = min(plan.bottleneck for plan in found.values())
        for name, plan in found.items():
            over = plan.bottleneck / best - 1 if best else 0.0
            layers = map(layers_text, plan.stages)
            table_columns.append([f"{name}: layers", *layers, *[""] * len(summary)])
            table_columns.append(
                [
                    "cost",
                    *map(number_text, plan.stage_costs),
                    number_text(plan.bottleneck),
                    f"{over:+.1%}" if over else "0%",
                    f"{plan.balance:.3f}",
                    str(sum(not layers for layers in plan.stages)),
                ]
            )
        rows = list(zip(*table_columns, strict=True))
        if stages > MOST_ROWS:
            half = MOST_ROWS // 2
            rows[half + 1 : half + 1 + stages - MOST_ROWS] = [("...", *[""] * (len(rows[0]) - 1))]
        lines = columns(rows, left=())
        lines.insert(len(rows) - len(summary), "-" * max(len(line) for line in lines))
    lines += [f"{name}: {plan}" for name, plan in plans.items() if isinstance(plan, str)]
    return "\n".join(lines)


def read_costs(text: str, source: str) -> list[float] | list[LayerCost]:
    """Reads costs from the text of a CSV or JSON file.

    JSON is a list of numbers or of objects with `cost` or the fields of `LayerCost`. CSV is one
    number a line, or has a header with these names, in any order; `name` may come with either.
    Empty lines and lines that begin with `#` are skipped.
    """
    stripped = text.lstrip("\ufeff").strip()
    if not stripped:
        raise PartitionError(f"{source} is empty; give one cost a line, or a JSON list")
    return _from_json(stripped, source) if stripped[0] in "[{" else _from_csv(stripped, source)


def _check_names(names: Iterable[str], where: str) -> None:
    """Raises PartitionError for a name that is no column."""
    for name in names:
        if any(mark in name for mark in ";\t "):
            raise PartitionError(
                f"{where}: {name!r} is no column name; separate columns with commas, one layer a "
                "line"
            )
        if name not in (*COLUMNS, "cost"):
            near = nearest(name, (*COLUMNS, "cost"))
            hint = f"; did you mean {near}?" if near else ""
            raise PartitionError(
                f"{where}: {name!r} is no known column; known are cost, {', '.join(COLUMNS)}{hint}"
            )


_Records = list[tuple[str, dict[str, Any]]]
"""For each layer its location, for messages, and its fields by name."""


def _costs(records: _Records, source: str) -> list[float] | list[LayerCost]:
    """Plain numbers from records with `cost`, layers from records with `forward`."""
    names = {name for _, fields in records for name in fields}
    others = sorted(names - {"cost", "name"})
    if "cost" not in names:
        return [_layer(where, fields) for where, fields in records]
    if others:
        raise PartitionError(
            f"{source} has cost beside {', '.join(others)}; cost is the whole time of a layer, so "
            "give either cost, or forward and the others"
        )
    numbers: list[float] = []
    for where, fields in records:
        if "cost" not in fields:
            raise PartitionError(f"{where} has no cost; every layer needs one")
        if problem := number_problem(fields["cost"]):
            raise PartitionError(f"{where}: cost is {fields['cost']!r}, {problem}")
        numbers.append(fields["cost"])
    return numbers


def _layer(where: str, fields: dict[str, Any]) -> LayerCost:
    if "forward" not in fields:
        raise PartitionError(f"{where} has no forward; every layer needs its forward time")
    try:
        return LayerCost(**fields)
    except PartitionError as error:
        raise PartitionError(f"{where}: {error}") from error


def _from_json(text: str, source: str) -> list[float] | list[LayerCost]:
    try:
        loaded: Any = json.loads(text)
    except RecursionError as error:
        raise PartitionError(
            f"{source} is nested too deeply; give a list of numbers or of objects"
        ) from error
    except ValueError as error:
        # A number of thousands of digits is one, too.
        raise PartitionError(f"{source} is no valid JSON: {error}") from error
    if not isinstance(loaded, list):
        raise PartitionError(
            f"{source} holds a JSON object, but must hold a list: of numbers, or of objects with "
            f"{', '.join(COLUMNS)}"
        )
    items = cast("list[Any]", loaded)
    has_objects = any(isinstance(item, dict) for item in items)
    records: _Records = []
    for index, item in enumerate(items):
        where = f"{source}: layer {index}"
        if isinstance(item, dict):
            fields = cast("dict[str, Any]", item)
            _check_names(fields, where)
        elif has_objects:
            raise PartitionError(
                f"{where} is {item!r} among objects; give all numbers or all objects"
            )
        else:
            fields = {"cost": item}
        records.append((where, fields))
    return _costs(records, source)


def _from_csv(text: str, source: str) -> list[float] | list[LayerCost]:
    rows: list[tuple[int, list[str]]] = []
    # Lines may end in a carriage return alone.
    reader = csv.reader(io.StringIO(text, newline=None), skipinitialspace=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells) and not cells[0].startswith("#"):
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise PartitionError(f"{source}: line {reader.line_num} is no CSV: {error}") from error
    if not rows:
        raise PartitionError(f"{source} has no lines but comments; give one cost a line")
    line, head = rows[0]
    if _is_number(head[0]):
        if len(head) > 1:
            raise PartitionError(
                f"{source}: line {line} has {len(head)} columns and no header says what they are; "
                f"begin with a header of cost, or of {', '.join(COLUMNS)}"
            )
        head, body = ["cost"], rows
    else:
        head, body = [name.lower() for name in head], rows[1:]
        _check_names(head, f"{source}: line {line}")
        if len(set(head)) < len(head):
            raise PartitionError(f"{source}: line {line} names a column twice: {', '.join(head)}")
    if not body:
        raise PartitionError(f"{source} has a header and no layers; give one layer a line")
    if "cost" not in head and "forward" not in head:
        raise PartitionError(f"{source} has neither a column cost nor a column forward")
    records: _Records = []
    for line, cells in body:
        where = f"{source}: line {line}"
        if len(cells) != len(head):
            raise PartitionError(
                f"{where} has {len(cells)} cells, but the header has {len(head)} "
                f"({', '.join(head)})"
            )
        fields: dict[str, Any] = {}
        for name, cell in zip(head, cells, strict=True):
            if name == "name":
                fields[name] = cell
            elif cell or name in ("cost", "forward"):
                try:
                    fields[name] = float(cell)
                except ValueError:
                    raise PartitionError(
                        f"{where}: {name} is {cell!r}, but must be a number"
                    ) from None
        records.append((where, fields))
    return _costs(records, source)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
