"""The plan: mesh, layout rules, schedule, microbatches, partition, remat, lowering, precision."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from pipemesh.errors import LayoutError, PipemeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.checks import text_of, whole_number
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import homes
from pipemesh.plan.remat import Remat
from pipemesh.schedule import Schedule, ScheduleSpec, from_csv, write_csv
from pipemesh.schedule.names import FILE, parse
from pipemesh.text import nearest_text

LOWERINGS = ("placement", "simd")
DTYPES = ("float32", "bfloat16", "float16")
# Fields that have no meaning for a model without a pipeline.
OF_PIPELINES = ("num_microbatches", "schedule", "boundaries", "remat", "lowering")
_ONE_PLACE = Mesh(((LAYERS_AXIS, 1),))
_NO_RULES = LayoutRules()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a stack of layers: all settings that change its speed and memory.

    Values with a text form may be given as text: `mesh="layers:2;data:2"`.

    Attributes:
        mesh: the devices; its axis `layers` has one index for each home.
        layout: the dims that are split over the other axes; the batch is the dim `batch`.
        schedule: a name from `pipemesh schedule --help`, `file:x.csv`, or a table.
        num_microbatches: number of microbatches per batch.
        boundaries: S + 1 ascending layer indices at which the layers are cut; None for stages of
            equal flops.
        remat: the recomputation of the backward pass: `full`, `none`, `except_last`, `twice`, one
            of these for each stage separated by commas, or `custom`, a policy that exists in Python
            only.
        lowering: `placement`, where each device has its own operations, or `simd`, one program for
            all.
        compute_dtype: name of the dtype that stages compute in; None for the dtypes of weights and
            inputs.
        allow_idle: whether unused axes and idle devices are allowed.

    Raises:
        PlanError: a value is invalid, or two values contradict each other.
        LayoutError: the layout is malformed, names an unknown axis, or splits the batch over
            `layers`.
        MeshError: the mesh is malformed.
        ScheduleError: the schedule is unknown, or does not support this number of homes and
            microbatches.

    Example:
        >>> plan = Plan("layers:2;data:2", "batch:data", "zb_h1", num_microbatches=4)
        >>> str(plan)
        'mesh=layers:2;data:2 layout=batch:data schedule=zb_h1 num_microbatches=4'
        >>> plan.check_batch(24)
        >>> plan.check_batch(20)
        Traceback (most recent call last):
        pipemesh.errors.PlanError: a batch of 20 does not divide into 4 microbatches of 2 \
replicas; num_microbatches may be 1, 2, 5, 10
    """

    mesh: Mesh = _ONE_PLACE
    layout: LayoutRules = _NO_RULES
    schedule: str | Schedule = "1f1b"
    num_microbatches: int = 1
    boundaries: tuple[int, ...] | None = None
    remat: Remat = Remat.FULL
    lowering: str = "placement"
    compute_dtype: str | None = None
    allow_idle: bool = False

    def __post_init__(self) -> None:
        values: dict[str, Any] = vars(self)
        if isinstance(values["mesh"], str):
            object.__setattr__(self, "mesh", Mesh.from_text(values["mesh"]))
        if isinstance(values["layout"], str):
            object.__setattr__(self, "layout", LayoutRules.from_text(values["layout"]))
        if isinstance(values["remat"], str):
            object.__setattr__(self, "remat", Remat.from_text(values["remat"]))
        self._check_types()
        self.layout.check(self.mesh)
        self._check_axes()
        table = self.table
        if self.boundaries is not None:
            object.__setattr__(self, "boundaries", tuple(self.boundaries))
            self._check_boundaries(table.num_stages)
        self.remat.check_stages(table.num_stages)

    def _check_types(self) -> None:
        values: dict[str, Any] = vars(self)
        for name, kind in (("mesh", Mesh), ("layout", LayoutRules), ("remat", Remat)):
            if not isinstance(values[name], kind):
                raise PlanError(f"{name} is {values[name]!r}; give a {kind.__name__} or its text")
        if not isinstance(values["schedule"], str | Schedule):
            raise PlanError(f"schedule is {self.schedule!r}; give a name or a Schedule")
        number = whole_number(self.num_microbatches)
        if number is None or number < 1:
            raise PlanError(
                f"num_microbatches is {self.num_microbatches!r}; it must be a whole number from 1 "
                "on"
            )
        object.__setattr__(self, "num_microbatches", number)
        if not isinstance(values["allow_idle"], bool):
            raise PlanError(f"allow_idle is {values['allow_idle']!r}; it must be True or False")
        for name, allowed in (
            ("lowering", LOWERINGS),
            ("compute_dtype", DTYPES),
        ):
            if values[name] not in allowed and (name, values[name]) != ("compute_dtype", None):
                near = nearest_text(str(values[name]), allowed)
                raise PlanError(f"{name} is {values[name]!r}{near}")

    def _check_axes(self) -> None:
        homes.check_axes(self.layout, self.lowering)
        homes.check_uneven(self.mesh, self.layout, self.lowering)
        cut = homes.cut_rules(self.layout)
        if self.lowering == "simd" and cut.rules:
            raise LayoutError(
                f"rule '{cut}' cuts weights over the axis that the batch is split over, of which "
                "replicas fetch slices for actions; lowering='simd' has no actions, so leave the "
                "rule out, or use lowering='placement'"
            )
        if not self.allow_idle:
            homes.check_no_idle_axis(self.mesh, self.layout)

    def _check_boundaries(self, num_stages: int) -> None:
        cuts = self.boundaries or ()
        whole = [number for cut in cuts if (number := whole_number(cut)) is not None]
        rising = len(whole) == len(cuts) and all(a < b for a, b in itertools.pairwise(whole))
        if len(cuts) != num_stages + 1 or not rising or whole[0] != 0:
            raise PlanError(
                f"boundaries are {cuts}; {num_stages} stages have {num_stages + 1} layer indices, "
                "which rise from 0 to the number of layers"
            )

    @property
    def has_slices_of_equal_work(self) -> bool:
        """Returns whether sequence slices take the same work, instead of having one length."""
        return isinstance(self.schedule, str) and parse(self.schedule).equal_work

    @property
    def slice_multiple(self) -> int:
        """Returns what the length of each sequence slice is a multiple of: the devices that split
        positions.
        """
        axis = self.layout.axis("length")
        return 1 if axis is None else self.mesh.size(axis)

    @functools.cached_property
    def table(self) -> Schedule:
        """Returns the schedule's table for the homes of the mesh.

        Raises:
            PlanError: a given table has other counts.
            ScheduleError: the schedule is not available.
        """
        num_homes, number = self.mesh.num_stages, self.num_microbatches
        if isinstance(self.schedule, str):
            # The file may have changed.
            is_file = parse(self.schedule).name == FILE
            return (_built if is_file else built)(self.schedule, num_homes, number)
        counts = self.schedule.num_devices, self.schedule.num_microbatches
        if counts != (num_homes, number):
            raise PlanError(
                f"the schedule has {counts[0]} devices and {counts[1]} microbatches, but the axis "
                f"'layers' of mesh '{self.mesh}' has {num_homes} places and num_microbatches is "
                f"{number}; make them equal"
            )
        return self.schedule

    @property
    def num_stages(self) -> int:
        """Returns the number of stages, virtual ones included."""
        return self.table.num_stages

    @property
    def num_replicas(self) -> int:
        """Returns the number of replicas over which the batch is split."""
        return homes.num_replicas(self.mesh, self.layout)

    def home(self, stage: int) -> tuple[int, ...]:
        """Returns the processors that own a stage, in the order of their sub-mesh.

        Raises:
            PlanError: there is no such stage.
        """
        if not 0 <= stage < self.num_stages:
            raise PlanError(f"there is no stage {stage}; the plan has 0 to {self.num_stages - 1}")
        return self.mesh.stage_processors(self.table.stage_devices[stage])

    def check_batch(self, size: int) -> None:
        """Checks that every replica gets the same number of rows of every microbatch.

        Raises:
            PlanError: the batch does not divide.
        """
        if (rows := whole_number(size)) is None or rows < 1:
            raise PlanError(f"batch is {size!r}; it must be a whole number of rows from 1 on")
        axis = self.layout.axis(homes.BATCH)
        check_batch(rows, self.num_microbatches, self.num_replicas, axis=axis)

    def check_dims(self, dims: Iterable[str]) -> None:
        """Checks that the names `dims` of a model hold the dim of every layout rule.

        Raises:
            LayoutError: a rule names another dim.
        """
        self.layout.check(self.mesh, dims)

    def check_layers(self, count: int) -> None:
        """Checks that the plan can cut a number of layers.

        Raises:
            PlanError: it cannot.
        """
        if count < self.num_stages:
            raise PlanError(
                f"mesh '{self.mesh}' and this schedule have {self.num_stages} stages, but there "
                f"are {count} layers; use at most {count} stages"
            )
        if self.boundaries is not None and self.boundaries[-1] != count:
            raise PlanError(
                f"boundaries end at {self.boundaries[-1]}, but there are {count} layers"
            )

    def changes(self, other: Plan) -> dict[str, tuple[str, str]]:
        """Returns the values that differ from another plan's: both texts, by name."""
        mine, theirs = self.to_values(), other.to_values()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def to_values(self) -> dict[str, str]:
        """Returns all values as texts by name, defaults included; `from_values` parses them."""
        return {
            field.name: value_text(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    def __str__(self) -> str:
        """Returns the mesh and all values that differ from their default; `from_text` parses it."""
        defaults = {field.name: value_text(field.default) for field in dataclasses.fields(self)}
        chosen = {
            name: text
            for name, text in self.to_values().items()
            if name == "mesh" or text != defaults[name]
        }
        return join_texts(chosen)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Parses `name=value` pairs separated by blanks; missing values have their default.

        Raises:
            PipemeshError: a value is invalid (see the class), or a name is unknown or repeated. For
                an unknown name, the error suggests the nearest one.
        """
        return cls.from_values(split_text(text))

    @classmethod
    def from_values(cls, values: Mapping[str, str]) -> Plan:
        """Makes a plan from texts by name, such as flags.

        Raises:
            PipemeshError: as `from_text`.
        """
        parsed: dict[str, Any] = {}
        for name, text in values.items():
            if name not in _PARSERS:
                near = nearest_text(name, list(_PARSERS))
                raise PlanError(f"{name!r} is nothing that a plan has{near}")
            try:
                parsed[name] = parse_value(name, text)
            except PipemeshError as error:
                raise type(error)(f"{name}={text!r}: {error}") from error
        return cls(**parsed)

    def to_json(self) -> str:
        """Returns all values as a JSON object of texts, defaults included."""
        return json.dumps(self.to_values(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parses the output of `to_json`.

        Raises:
            PipemeshError: as `from_text`, or the text is not a JSON object of texts.
        """
        try:
            content: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the plan is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise PlanError(f"the plan is {content!r}; it must be a JSON object of texts")
        values = cast("dict[str, Any]", content)
        for name, value in values.items():
            if not isinstance(value, str):
                raise PlanError(f"{name!r} of the plan is {value!r}; it must be a text")
        return cls.from_values(values)


def check_batch(
    size: int,
    num_microbatches: int,
    num_replicas: int = 1,
    *,
    axis: str | None = None,
    name: str = "num_microbatches",
) -> None:
    """Checks that a batch divides into microbatches, and each of these among replicas."""
    if size % num_replicas:
        along = "" if axis is None else f" along the axis {axis!r}"
        raise PlanError(
            f"a batch of {size} does not divide among the {num_replicas} replicas{along}; use a "
            f"multiple of {num_microbatches * num_replicas} (microbatches times replicas), or "
            "another number of replicas"
        )
    if size % (num_microbatches * num_replicas):
        replicas = f" of {num_replicas} replicas" if num_replicas > 1 else ""
        allowed = ", ".join(map(str, divisors(size // num_replicas)))
        raise PlanError(
            f"a batch of {size} does not divide into {num_microbatches} microbatches{replicas}; "
            f"{name} may be {allowed}"
        )


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _built(schedule: str, homes: int, num_microbatches: int) -> Schedule:
    """Returns the table of a named schedule."""
    return ScheduleSpec.from_text(schedule).build(homes, num_microbatches)


built = functools.lru_cache(maxsize=256)(_built)


# Prefix of a schedule's text that contains a table.
_TABLE = "table:"


def value_text(value: Any) -> str:
    """Returns the text of a plan's value."""
    if isinstance(value, Schedule):
        return _TABLE + write_csv(value).strip()
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[int, ...]", value)))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise PlanError(f"{text!r} is no whole number")
    return int(text)


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise PlanError("it must be true or false")
    return text == "true"


# By a plan's value, what parses its text.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "mesh": Mesh.from_text,
    "layout": LayoutRules.from_text,
    "schedule": lambda text: (
        from_csv(text.removeprefix(_TABLE)) if text.startswith(_TABLE) else text
    ),
    "num_microbatches": _whole,
    "boundaries": lambda text: tuple(map(_whole, text.split(","))) if text else None,
    "remat": Remat.from_text,
    "lowering": str,
    "compute_dtype": lambda text: text or None,
    "allow_idle": _truth,
}


def parse_value(name: str, text: str) -> Any:
    """Parses the text of a plan's value."""
    return _PARSERS[name](text)


def join_texts(texts: Mapping[str, str]) -> str:
    """Joins pairs of name and text by blanks; texts with blanks are quoted as in a shell."""
    # Semicolons need no quotes, and every mesh has some.
    bare = {name: text.replace(";", "") for name, text in texts.items()}
    return " ".join(
        f"{name}={text if shlex.quote(bare[name]) == bare[name] else shlex.quote(text)}"
        for name, text in texts.items()
    )


def split_text(text: str) -> dict[str, str]:
    """Splits the text that `join_texts` writes."""
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
