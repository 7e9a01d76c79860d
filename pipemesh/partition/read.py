"""Costs out of CSV and JSON text."""

from __future__ import annotations

import csv
import io
import json
from typing import Any, cast

from pipemesh.errors import PartitionError
from pipemesh.partition.costs import NUMBERS, LayerCost, number_problem
from pipemesh.text import nearest

COLUMNS = (*NUMBERS, "name")


def read_costs(text: str, source: str) -> list[float] | list[LayerCost]:
    """Reads costs from the text of a CSV or JSON file.

    JSON is a list of numbers or of objects with `cost` or the fields of `LayerCost`. CSV is one
    number a line, or has a header with these names, in any order; `name` may come with either.
    Empty lines and lines that begin with `#` are skipped.

    Args:
        text: the contents.
        source: what messages call the file.

    Returns:
        Numbers or `LayerCost`s.

    Raises:
        PartitionError: the text cannot be read; the message says where.

    Example:
        >>> read_costs("name,cost\\na,1.5\\nb,2\\n", "costs.csv")
        [1.5, 2.0]
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PartitionError(f"the text of {source} is {type(text).__name__}, but must be str")
    stripped = text.lstrip("\ufeff").strip()
    if not stripped:
        raise PartitionError(f"{source} is empty; give one cost a line, or a JSON list")
    return _from_json(stripped, source) if stripped[0] in "[{" else _from_csv(stripped, source)


def _unknown(name: str) -> str:
    if any(mark in name for mark in ";\t "):
        return f"{name!r} is no column name; separate columns with commas, one layer a line"
    near = nearest(name, (*COLUMNS, "cost"))
    hint = f"; did you mean {near}?" if near else ""
    return f"{name!r} is no known column; known are cost, {', '.join(COLUMNS)}{hint}"


_Records = list[tuple[str, dict[str, Any]]]
"""For each layer where it stands, for messages, and its fields by name."""


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
        _check(fields["cost"], "cost", where)
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
            for name in fields:
                if name not in (*COLUMNS, "cost"):
                    raise PartitionError(f"{where}: {_unknown(name)}")
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
        for name in head:
            if name not in (*COLUMNS, "cost"):
                raise PartitionError(f"{source}: line {line}: {_unknown(name)}")
        if len(set(head)) < len(head):
            raise PartitionError(f"{source}: line {line} names a column twice: {', '.join(head)}")
    if not body:
        raise PartitionError(f"{source} has a header and no layers; give one layer a line")
    if "cost" not in head and "forward" not in head:
        raise PartitionError(f"{source} has neither a column cost nor a column forward")
    records: _Records = []
    for line, cells in body:
        if len(cells) != len(head):
            raise PartitionError(
                f"{source}: line {line} has {len(cells)} cells, but the header has {len(head)} "
                f"({', '.join(head)})"
            )
        fields: dict[str, Any] = {}
        for name, cell in zip(head, cells, strict=True):
            if name == "name":
                fields[name] = cell
            elif cell or name in ("cost", "forward"):
                fields[name] = _number(cell, name, f"{source}: line {line}")
        records.append((f"{source}: line {line}", fields))
    return _costs(records, source)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str, name: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        raise PartitionError(f"{where}: {name} is {cell!r}, but must be a number") from None
    _check(number, name, where)
    return number


def _check(number: Any, name: str, where: str) -> None:
    problem = number_problem(number)
    if problem:
        raise PartitionError(f"{where}: {name} is {number!r}, {problem}")
