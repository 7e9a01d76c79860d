"""The text forms of a plan's values."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, cast

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.checks import text_of
from pipemesh.plan.remat import Remat
from pipemesh.schedule import Schedule, from_csv, write_csv

# Prefix of a schedule's text that contains a table.
_TABLE = "table:"


def of_value(value: Any) -> str:
    """Returns the text of a plan's value."""
    if isinstance(value, Schedule):
        return _TABLE + write_csv(value).strip()
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[int, ...]", value)))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def parse(name: str, text: str) -> Any:
    """Parses the text of a plan's value."""
    if name == "mesh":
        return Mesh.from_text(text)
    if name == "layout":
        return LayoutRules.from_text(text)
    if name == "remat":
        return Remat.from_text(text)
    if name == "schedule" and text.startswith(_TABLE):
        return from_csv(text.removeprefix(_TABLE))
    if name == "num_microbatches":
        return _whole(text)
    if name == "boundaries":
        return tuple(map(_whole, text.split(","))) if text else None
    if name == "compute_dtype":
        return text or None
    if name == "allow_idle":
        if text not in ("true", "false"):
            raise PlanError("it must be true or false")
        return text == "true"
    return text


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise PlanError(f"{text!r} is no whole number")
    return int(text)


def joined(texts: Mapping[str, str]) -> str:
    """Joins pairs of name and text by blanks; texts with blanks are quoted as in a shell."""
    return " ".join(f"{name}={_quoted(text)}" for name, text in texts.items())


def _quoted(text: str) -> str:
    # Semicolons need no quotes, and every mesh has some.
    return (
        text if shlex.quote(text.replace(";", "")) == text.replace(";", "") else shlex.quote(text)
    )


def split(text: str) -> dict[str, str]:
    """Splits the text that `joined` writes."""
    text = text_of(text, PlanError, "mesh=layers:2 schedule=1f1b")
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"plan {text!r} cannot be read: {error}") from error
    values: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise PlanError(
                f"{part!r} in plan {text!r} is not name=value; write for example "
                "'mesh=layers:2;data:2 layout=batch:data num_microbatches=8'"
            )
        if name in values:
            raise PlanError(f"{name!r} is given twice in plan {text!r}")
        values[name] = value
    return values


def to_json(texts: Mapping[str, str]) -> str:
    """Returns a JSON object with a line for each value."""
    return json.dumps(texts, indent=1)


def from_json(text: str) -> dict[str, str]:
    """Reads the text that `to_json` writes."""
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise PlanError(f"the plan is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"the plan is {found!r}; it must be a JSON object of texts")
    values = cast("dict[str, Any]", found)
    for name, value in values.items():
        if not isinstance(value, str):
            raise PlanError(f"{name!r} of the plan is {value!r}; it must be a text")
    return cast("dict[str, str]", values)
