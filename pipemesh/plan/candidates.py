"""All plans that some devices can run a model under, each rated by a formula."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules
from pipemesh.mesh.checks import whole_number
from pipemesh.plan.figures import Figures
from pipemesh.plan.plan import Plan
from pipemesh.plan.stage_costs import layer_seconds
from pipemesh.schedule.names import FILE, SEARCHED, parse
from pipemesh.text import bytes_of

SCHEDULES = (
    "1f1b",
    "gpipe",
    "zb_h1",
    "zb_h2",
    "interleaved:2",
    "zb_v",
    "v_half",
    "v_min",
    "dual_pipe_v",
)
# The names of the axes that plans which are found have.
DATA, MODEL = "data", "model"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What plans are looked for.

    Attributes:
        devices: that there are; fewer may be used.
        batch: rows of a batch.
        memory: bytes of a device, also as text such as `80GB`; None for no limit.
        fixed: values of the plan that are asked for, as in `Plan.to_values`.
        schedules: by name, to be tried.

    Raises:
        PlanError: there are no devices, no rows or no memory, or a number is none.
    """

    devices: int
    batch: int
    memory: float | None = None
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    schedules: Sequence[str] = SCHEDULES

    def __post_init__(self) -> None:
        for name in ("devices", "batch"):
            number = whole_number(given := getattr(self, name))
            if number is None or number < 1:
                raise PlanError(f"{name} is {given!r}; it must be a whole number from 1 on")
            object.__setattr__(self, name, number)
        if self.memory is not None:
            object.__setattr__(self, "memory", memory_of(self.memory))


def memory_of(given: object) -> float:
    """Bytes of a device.

    Args:
        given: a number, or a text such as `80GB`.

    Raises:
        PlanError: it is none, or not above 0.

    Example:
        >>> memory_of("16GiB")
        17179869184.0
    """
    try:
        size = bytes_of(given) if isinstance(given, str) else float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PlanError(f"memory is {given!r}: {error}") from error
    if not (math.isfinite(size) and size > 0):
        raise PlanError(f"memory is {given!r}; it must be a number of bytes above 0")
    return size


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that is not made yet.

    Attributes:
        places: along the axis `layers`.
        replicas: along the axis of the batch.
        group: along the axis of layers' dims.
        schedule: by name.
        num_microbatches: of a batch.
        remat: `none` or `full`.
    """

    places: int
    replicas: int
    group: int
    schedule: str
    num_microbatches: int
    remat: str

    def plan(self, figures: Figures, asked: Asked) -> Plan:
        """The plan, without boundaries unless they are fixed.

        Args:
            figures: of the model.
            asked: with what is fixed.

        Raises:
            PipemeshError: there is none, such as of tables for other numbers of microbatches.
        """
        axes = [f"layers:{self.places}"]
        rules: list[str] = []
        if self.replicas > 1:
            axes.append(f"{DATA}:{self.replicas}")
            rules.append(f"batch:{DATA}")
        if self.group > 1:
            axes.append(f"{MODEL}:{self.group}")
            rules.append(figures.rules)
        values = {
            "mesh": ";".join(axes),
            "layout": ";".join(rules),
            "schedule": self.schedule,
            "num_microbatches": str(self.num_microbatches),
            "remat": self.remat,
        }
        return Plan.from_values(values | dict(asked.fixed))


def candidates(figures: Figures, asked: Asked) -> Iterator[Candidate]:
    """All that may be tried.

    Args:
        figures: of the model.
        asked: with what is fixed.

    Raises:
        PipemeshError: a value that is fixed is malformed.
    """
    fixed = asked.fixed
    count = len(figures.layers)
    fixed_number = fixed.get("num_microbatches", "")
    for places, replicas, group in _meshes(figures, asked):
        rest = asked.batch // replicas
        # `Plan` says what is wrong with others.
        is_number = fixed_number.isdecimal() and int(fixed_number) > 0
        numbers = [int(fixed_number)] if is_number else divisors(rest)
        schedules = asked.schedules if places > 1 else ("1f1b",)
        if "schedule" in fixed:
            schedules = (fixed["schedule"],)
        remats = (fixed["remat"],) if "remat" in fixed else ("none", "full")
        for schedule in schedules:
            if "mesh" not in fixed and places * _stages_a_device(schedule) > count:
                continue
            for number in numbers:
                for remat in remats:
                    yield Candidate(places, replicas, group, schedule, number, remat)


def _stages_a_device(schedule: str) -> int:
    if schedule.startswith("table:"):
        return 1
    found = parse(schedule)
    return 1 if found.name in (FILE, SEARCHED) else found.stages()


def _meshes(figures: Figures, asked: Asked) -> Iterator[tuple[int, int, int]]:
    """Places, replicas and devices that share a layer, of no more devices than there are."""
    if "mesh" in asked.fixed:
        # Checks what goes with what, and says it.
        plan = Plan.from_values(
            {n: v for n, v in asked.fixed.items() if n in ("mesh", "layout", "allow_idle")}
        )
        places, replicas = plan.mesh.num_stages, plan.num_replicas
        if plan.mesh.num_devices > asked.devices:
            raise PlanError(
                f"mesh '{plan.mesh}' has {plan.mesh.num_devices} devices, but there are "
                f"{asked.devices}; use a smaller mesh, or more devices"
            )
        yield places, replicas, plan.mesh.num_devices // places // replicas
        return
    is_given = bool(LayoutRules.from_text(asked.fixed.get("layout", "")).rules)
    groups = [n for n in range(1, asked.devices + 1) if figures.can_share(n)]
    for places in range(1, min(asked.devices, len(figures.layers)) + 1):
        for replicas in divisors(asked.batch):
            for group in groups:
                # A layout that is given is for axes that have other names.
                if (home := replicas * group) * places <= asked.devices and (
                    home == 1 or not is_given
                ):
                    yield places, replicas, group


def rated(figures: Figures, asked: Asked) -> list[Candidate]:
    """All candidates, those first whose step is shortest by a formula.

    The work of a place, and of all if they share cores; the bubble of a table of its kind for equal
    stages; sums of gradients.

    Args:
        figures: of the model.
        asked: with what is fixed.
    """
    seconds = functools.lru_cache(maxsize=None)(functools.partial(_work, figures))
    sizes = sum(layer.parameter_bytes for layer in figures.layers)

    def rate(each: Candidate) -> float:
        rows = asked.batch / each.num_microbatches / each.replicas
        work, longest, load = seconds(rows, each.group, each.remat == "full")
        kinds = 3 if each.schedule.startswith(("zb", "v_")) else 2
        virtual = _stages_a_device(each.schedule)
        # No place takes less than the longest layer.
        a_place = max(work / each.places, longest) + kinds * virtual * figures.action
        fill = (each.places - 1) * a_place / (3 if kinds == 3 else virtual)
        total = each.num_microbatches * a_place
        length = total + fill
        home = each.replicas * each.group
        if figures.cores is not None:
            length = max(length, total * each.places * home * load / figures.cores)
        weights = sizes / each.places / each.group
        return length + figures.transfer.all_reduce(each.replicas, weights)

    return sorted(candidates(figures, asked), key=rate)


def _work(figures: Figures, rows: float, group: int, again: bool) -> tuple[float, float, float]:
    """What a microbatch takes in all layers and in the longest, and cores that it keeps busy."""
    costs = layer_seconds(figures, rows, group, again)
    if not any(layer.work for layer in figures.layers):
        return sum(costs), max(costs), figures.loads.get("B", 1.0)
    done = sum(
        (layer.computes("F", rows) + layer.computes("B", rows, again)) / min(group, layer.split)
        for layer in figures.layers
    )
    return sum(costs), max(costs), done / sum(costs) if done else 1.0


def divisors(number: int) -> list[int]:
    """All of them, rising.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
