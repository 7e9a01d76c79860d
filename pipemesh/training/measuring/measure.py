"""Figures of a model on this machine: its layers as stages, and whole steps under several plans."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PipelineError, PipemeshError, PlanError
from pipemesh.layers.layout_pricing import layers_shares, of_rows
from pipemesh.layers.partition_layers import layer_flops, layer_metas
from pipemesh.layers.pipeline.alike_stages import alike_range, like_earlier, shapes_text
from pipemesh.layers.pipeline.slices import past_bytes, row_work, sliced_positions
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Link, Machine, Plan, Remat, SearchSpace
from pipemesh.plan.calibration import Measured, fitted
from pipemesh.plan.figures import (
    DATA,
    MODEL,
    PLAIN,
    Curve,
    Figures,
    LayerFigures,
    Shares,
    cuts_weights,
    splits_layers,
)
from pipemesh.plan.predict import predict
from pipemesh.plan.search import Split
from pipemesh.plan.stages import evenly_cut
from pipemesh.recurrent.forecast import StageMemory
from pipemesh.schedule import Schedule
from pipemesh.text import count_text
from pipemesh.training.measuring.timed_step import (
    ROUNDS,
    ActionTimes,
    TimedStep,
    in_turn,
    one_core,
    rounds,
    usual,
    working_memory,
)
from pipemesh.training.subject import Subject, rows_of

# Microbatches of a step: more than one, as first actions differ from later ones.
_MICROBATCHES = 2
# Actions that are timed together, for progress lines.
_NAMES = {
    "B": "forward and backward",
    "IW": "forward, input and weight gradients",
    "RB": "forward, recomputation and backward",
}

# About so many things are measured for one device, and for several.
_ON_ONE, _ON_SEVERAL = 12, 24
# Defaults: the least overhead of an action, and the speed of a link within one machine.
_ACTION, _LINK, _CROWDING = 2e-5, Link(5e-5, 4e9), 0.5
# Flops that a device computes while it reads or writes a byte.
_FLOPS_A_BYTE = {"CPU": 5.0, "GPU": 30.0}

Make = Callable[[Plan], Subject]
"""A model under a plan."""


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers of a model's pipeline, and the first of each kind, which stand for all."""

    # The params of all.
    params: list[Any]
    # For each layer, which of the first ones it is like.
    kinds: list[int]
    # The layers that a loop over ticks can run.
    alike: tuple[int, int]

    @property
    def firsts(self) -> list[int]:
        """The numbers of the first layers of their kind."""
        return [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]

    def cuts(self, stages: int) -> tuple[int, ...]:
        """Returns the boundaries of stages with a first layer each, or of one stage."""
        return (*self.firsts[: stages if stages > 1 else 1], len(self.kinds))

    def at_least(self, number: int) -> tuple[int, ...]:
        """Returns the numbers of the first layers, and of others up to so many if there are."""
        firsts = self.firsts
        others = [layer for layer in range(len(self.kinds)) if layer not in firsts]
        return tuple(sorted([*firsts, *others[: max(0, number - len(firsts))]]))

    def __str__(self) -> str:
        count, firsts = count_text(len(self.kinds), "layer"), len(self.firsts)
        return count if firsts == len(self.kinds) else f"{count} of {count_text(firsts, 'kind')}"


def _layers(make: Make, batch: Any) -> _Layers:
    """Returns the layers of a model.

    Two layers are of one kind if they have the same params, shapes of inputs and trained weights,
    and gradients that go on to layers before both or neither. The outputs of all but the first have
    the shapes of their inputs, so they can be left out.
    """
    number = number_of_layers(make)
    plan = Plan(
        schedule=_in_turn_of(number, "B"),
        num_microbatches=_MICROBATCHES,
        boundaries=tuple(range(number + 1)),
    )
    outline = TimedStep(make(plan), with_rows(batch, _MICROBATCHES), until="inputs")
    p, stack = outline.stack.params, outline.stack
    layers = [stack.children[cell.name].children[cell.sub[0].name] for cell in p.cell_tpl]
    params, alike = [layer.params for layer in layers], alike_range(p)
    like = like_earlier(params)
    try:
        metas = layer_metas(params, *outline.shapes, like=like)
    except PipemeshError:
        # A layer does not say what it returns.
        return _Layers(params, [*range(number)], alike)
    learned = itertools.chain.from_iterable(outline.trained.learned().values())
    trained = {weight.ref() for weight in learned}
    givers = {giver.partition(".")[0] for giver in p.tied_weights.values()}
    if any(cell.act_fetch_layers for cell in p.cell_tpl):
        return _Layers(params, [*range(number)], alike)
    kinds: list[int] = []
    # Those of earlier layers.
    known: dict[Any, int] = {}
    # Below the first trained weight no gradient is computed.
    goes_on = False
    given = shapes_text(outline.shapes)
    for layer, same, meta in zip(layers, like, metas, strict=True):
        is_trained = tuple(v.ref() in trained for v in layer.vars.Flatten())
        key = same, given, is_trained, goes_on
        goes_on |= any(is_trained)
        before, given = given, shapes_text(meta.out_shapes)
        number = max(kinds, default=-1) + 1
        kind = known.setdefault(key, number)
        can_go = given == before and layer.params.name not in givers
        kinds.append(kind if can_go else number)
    return _Layers(params, kinds, alike)


def _layers_alone(
    make: Make,
    batch: Any,
    layers: _Layers,
    devices: int,
    on_cpu: bool,
    say: Callable[[str], None],
) -> Figures:
    """Returns the figures of a model with each layer a stage on its first device, and with several
    devices also of the parts that these have of split layers.
    """
    number, batch_rows = len(layers.firsts), rows_of(batch)
    # Examples in a microbatch.
    rows = sorted({1, max(1, batch_rows // 4), batch_rows})
    middle = rows[len(rows) // 2]
    # Assumes that the share of I and W in B does not depend on the size.
    cases = [("B", size) for size in rows] + [("IW", middle), ("RB", middle)]
    steps: list[TimedStep] = []
    for kinds, size in cases:
        say(f"{layers}, {count_text(size, 'row')} a microbatch, {_NAMES[kinds]}")
        steps.append(_step(make, batch, layers, number, kinds, size))
    say(f"{layers} as one stage, {count_text(rows[0], 'row')} a microbatch")
    whole = _step(make, batch, layers, 1, "B", rows[0])
    sizes = [size for _, size in cases]
    say("actions of these steps in turn")
    alone = ActionTimes(steps, sizes, number, whole)
    overhead = alone.besides(rows[0])
    seconds = alone.of_layers(overhead)
    # On one core, time is the work that all cores would share.
    together: ActionTimes | None = None
    if on_cpu:
        say("the same on one core")
        with one_core() as is_one:
            together = ActionTimes(steps, sizes, number, whole) if is_one else None
    work: list[dict[str, dict[int, float]]] = [{} for _ in range(number)]
    if together is not None:
        work = together.of_layers(together.besides(rows[0]))
    step, halves = steps[0], steps[cases.index(("IW", middle))].memory[0].stages
    held = [(size, timed.memory[0].stages) for size, timed in zip(rows, steps, strict=False)]
    counted = [(size, working_memory(timed)) for size, timed in zip(rows, steps, strict=False)]
    needed = {size: memory for size, memory in counted if memory is not None}
    cells = [step.stack.children[cell.name] for cell in step.stack.params.cell_tpl]
    positions = sliced_positions(cells, step.shapes)
    work_of_row: list[list[float]] = [[] for _ in cells]
    if positions:
        # Those that do not count their work are taken to take the same everywhere.
        with contextlib.suppress(PipelineError):
            firsts = [layers.params[number] for number in layers.firsts]
            work_of_row = row_work("the model", firsts, step.shapes)
    shares: dict[str, list[Shares]] = {}
    if devices > 1:
        busy = sum(seconds[k][kind][batch_rows] for k in layers.kinds for kind in "FB")
        shares = _counted(layers, step.shapes, batch_rows, busy, make(Plan()).device_type, say)
    # By the rules for devices of a replica, what two of them hold of each layer.
    on_two: dict[str, Sequence[StageMemory]] = {}
    for layout, of_layers in list(shares.items()):
        rules = LayoutRules.from_text(layout).rules
        split = LayoutRules(tuple(rule for rule in rules if rule[1] == MODEL))
        most = [each.most for each in of_layers if each.most > 1]
        if not most or math.gcd(*most) % 2:
            continue
        if (text := str(split)) not in on_two:
            say(f"{layers} on two devices by '{text}', {count_text(middle, 'row')} each")
            on = Mesh.from_text(f"layers:1;{MODEL}:2"), split
            try:
                traced = _step(make, batch, layers, number, "IW", middle, on=on)
                on_two[text] = traced.memory[0].stages
            except PipemeshError as error:
                say(f"no forecast for these rules: {error}")
                del shares[layout]
                continue
        shares[layout] = [
            _with_bytes(each, halves[kind], on_two[text][kind], middle)
            for each, kind in zip(of_layers, layers.kinds, strict=True)
        ]
    rules = next((layout for layout in shares if DATA not in _axes(layout)), "")
    learned = list(itertools.chain.from_iterable(step.trained.learned().values()))
    weights = num_bytes(learned)
    states = step.trained.optimizer_variables()
    update, fixed = _outside(alone, together, weights)

    def figures_of(layer: int) -> LayerFigures:
        kind = layers.kinds[layer]
        half, own = halves[kind], cells[kind].vars.Flatten()
        refs = {v.ref() for v in own}
        trained = [v for v in learned if v.ref() in refs]
        # Core time is the better measure: other programs disturb it least.
        best = work[kind] or seconds[kind]

        def curve(part: Callable[[StageMemory], float]) -> Curve:
            return Curve(tuple((size, part(memory[kind])) for size, memory in held))

        working = tuple((size, memory.stages[kind]) for size, memory in needed.items())
        past = past_bytes(cells[kind], positions)
        return LayerFigures(
            layers.params[layer].name,
            _with_halves(seconds[kind], middle),
            num_bytes(own),
            curve(lambda memory: memory.kept),
            curve(lambda memory: num_bytes(memory.outputs)),
            shares={
                "" if layout == rules else layout: of_layers[layer]
                for layout, of_layers in shares.items()
                if of_layers[layer].most > 1 or of_layers[layer].cut or of_layers[layer].sent
            },
            working=Curve(working) if working else None,
            pending=Curve(((middle, half.pending),)),
            work=_with_halves(work[kind], middle) if work[kind] else {},
            again=min(1.0, best["R"][middle] / best["F"][middle]),
            optimizer=_state_bytes(trained, states),
            trained=num_bytes(trained) / num_bytes(own) if own else 1.0,
            past=Curve(((1, past),)) if past else None,
            row_work=tuple(work_of_row[kind]),
        )

    return Figures(
        tuple(map(figures_of, range(len(layers.kinds)))),
        action=max(_ACTION, overhead),
        fixed=fixed,
        update=update,
        optimizer=num_bytes(states) / weights,
        update_memory=max([1.0, *(memory.update / weights for memory in needed.values())]),
        transfer=_LINK,
        sums=_LINK if rules else None,
        crowding=_CROWDING,
        cores=float(os.cpu_count() or 1) if on_cpu else None,
        rules=rules,
        batch=batch_rows,
        about=f"{make(Plan()).name}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{devices} devices",
        alike=layers.alike,
        positions=positions,
    )


def _axes(layout: str) -> set[str]:
    return {axis for _, axis in LayoutRules.from_text(layout).rules}


def _counted(
    layers: _Layers,
    shapes: tuple[Any, ...],
    rows: int,
    seconds: float,
    device_type: str,
    say: Callable[[str], None],
) -> dict[str, list[Shares]]:
    """Returns the shares of layers by layout rules; `seconds` are those of all of their work."""
    try:
        flops = 3 * sum(layer_flops(layers.params, *of_rows(shapes, rows))) / seconds
        machine = Machine(flops, flops / _FLOPS_A_BYTE[device_type], _LINK)
        return layers_shares(layers.params, machine, rows, *shapes, alike=layers.alike)
    except PipemeshError as error:
        say(f"no layout rules: {error}")
        return {}


def _with_bytes(shares: Shares, alone: StageMemory, on_two: StageMemory, rows: int) -> Shares:
    """Returns shares with those of bytes, from what a device holds alone and as one of two."""

    # Each of two devices holds the unsplit part, and half of the rest.
    def whole(part: Callable[[StageMemory], int]) -> Curve:
        return Curve(((rows, max(0, 2 * part(on_two) - part(alone))),))

    passed = num_bytes(alone.outputs)
    outputs = 2 * (1 - num_bytes(on_two.outputs) / passed) if passed else 0.0
    return dataclasses.replace(
        shares,
        outputs=min(1.0, max(0.0, outputs)),
        whole=whole(lambda memory: memory.kept),
        pending_whole=whole(lambda memory: memory.pending),
    )


def _state_bytes(weights: Sequence[Any], states: Sequence[Any]) -> float | None:
    """Returns the bytes of the optimizer's state per byte of weights, whose names it begins with;
    None without weights.
    """
    names = tuple(f"{weight.name.removesuffix(':0')}/" for weight in weights)
    own = [state for state in states if state.name.startswith(names)]
    return num_bytes(own) / num_bytes(weights) if names else None


def _outside(alone: ActionTimes, together: ActionTimes | None, weights: int) -> tuple[float, float]:
    """Returns the seconds of an update for each byte of weights, and of a step besides."""
    if together is None:
        return alone.after / weights, alone.before
    # All cores update weights, so time that one core does not lengthen is no update.
    cores = len(os.sched_getaffinity(0))
    shorter = max(0.0, together.after - alone.after)
    updates = min(together.after, shorter / (1 - 1 / cores)) if cores > 1 else together.after
    return updates / weights, alone.before + together.after - updates


def _in_turn_of(stages: int, kinds: str) -> Schedule:
    """Returns the schedule of one device that finishes a microbatch before it begins the next."""
    row: list[str] = []
    for m in range(_MICROBATCHES):
        row += [f"{s}F{m}" for s in range(stages)]
        row += [f"{s}{kind}{m}" for s in reversed(range(stages)) for kind in kinds]
    return Schedule.from_text(f"0: {' '.join(row)}")


def _step(
    make: Make,
    batch: Any,
    layers: _Layers,
    stages: int,
    kinds: str,
    rows: int,
    on: tuple[Mesh, LayoutRules] | None = None,
) -> TimedStep:
    """Returns a step with a clock on one device, with the first layer of each kind a stage, or all
    of these in one; `on` others it says only what it holds.
    """
    mesh, layout = on or (Plan().mesh, Plan().layout)
    plan = Plan(
        mesh,
        layout,
        schedule=_in_turn_of(stages, kinds),
        num_microbatches=_MICROBATCHES,
        remat=Remat.FULL if "R" in kinds else Remat.NONE,
        boundaries=layers.cuts(stages),
    )
    return TimedStep(
        make(plan),
        with_rows(batch, rows * _MICROBATCHES),
        clocked=True,
        until="memory" if on else None,
        layers=layers.firsts,
    )


def number_of_layers(make: Make) -> int:
    """Returns the number of layers in a model's pipeline, which must follow a plan's partition."""
    from pipemesh.training.registered import stacks_of

    subject = make(Plan())
    stacks = stacks_of(subject.task())
    if len(stacks) != 1:
        raise PlanError(
            f"{subject.name} has {len(stacks)} pipelines; figures are of a model that has one"
        )
    stages = stacks[0].cell_tpl
    if len(stages) != 1 or "sub" not in stages[0]:
        raise PlanError(
            f"{subject.name} cuts its layers itself, so they cannot be measured one by one; give "
            "the class an attribute PLAN = pipemesh.plan.Plan() and let Task() cut them as "
            "self.PLAN says"
        )
    return len(stages[0].sub)


def with_rows(batch: Any, rows: int) -> Any:
    """Returns a batch with `rows` examples, repeated if there are too few."""

    def some(x: tf.Tensor) -> tf.Tensor:
        times = -(-rows // int(x.shape[0] or 1))
        return tf.concat([x] * times, 0)[:rows]

    return tf.nest.map_structure(some, batch)


def _with_halves(seconds: dict[str, dict[int, float]], middle: int) -> dict[str, Curve]:
    """Returns curves of all kinds of action, where I and W were measured at one size only."""
    # A layer without weights has no W. On several cores I and W together take longer than B, which
    # overlaps their independent parts.
    curves = {kind: Curve(tuple(seconds[kind].items())) for kind in ("F", "B")}
    for kind in "IW":
        whole, half = seconds["B"][middle], seconds.get(kind, {}).get(middle, 0.0)
        curves[kind] = curves["B"].scaled(half / whole if whole else 0.0)
    return curves


def in_rounds(
    steps: Sequence[TimedStep], number: int, seconds_at_most: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Runs steps in turn, so often or while there is time (`rounds`); returns by round the seconds
    and the core seconds of each step.
    """
    seconds: list[list[float]] = []
    work: list[list[float]] = []
    for _ in rounds(number, seconds_at_most):
        seconds.append([step.run() for step in steps])
        work.append([step.cpu for step in steps])
    return seconds, work


_TRIALS_SECONDS = 60.0


def seconds_of(
    make: Make, batch: Any, plans: Sequence[Plan], say: Callable[[str], None] = lambda text: None
) -> list[float]:
    """Returns the seconds of a training step under each plan, infinite for an impossible plan."""
    # Earlier measurements may hold much memory, and all plans are in memory at once.
    gc.collect()
    steps: dict[int, TimedStep] = {}
    failed: PipemeshError | None = None
    for i, plan in enumerate(plans):
        say(f"a trial of '{plan}'")
        try:
            steps[i] = TimedStep(make(plan), batch)
        except PipemeshError as error:
            # The traceback would keep the built model alive.
            failed = error.with_traceback(None)
        except tf.errors.ResourceExhaustedError:
            failed = PlanError(f"'{plan}' needs more memory than there is")
        else:
            continue
        say(f"nothing of it, since it cannot be had: {failed}")
    if failed is not None and not steps:
        raise failed
    typical = in_turn(in_rounds(list(steps.values()), ROUNDS, _TRIALS_SECONDS)[0])
    seconds = dict(zip(steps, typical, strict=True))
    return [seconds.get(i, math.inf) for i in range(len(plans))]


# Rounds of whole steps, and their seconds; see `rounds`.
_STEPS, _STEPS_SECONDS = 30, 12.0


class _Progress:
    """Says what is measured, how much of about so much, and how long the rest will take."""

    def __init__(self, say: Callable[[str], None], expected: int) -> None:
        self._say, self._begin, self._done = say, time.monotonic(), 0
        self.expected = expected

    def __call__(self, text: str) -> None:
        spent, done = time.monotonic() - self._begin, self._done
        self._done += 1
        self.expected = max(self.expected, self._done)
        left = ""
        if done:
            left = f", about {math.ceil(spent / done * (self.expected - done))} s left"
        self._say(f"{self._done} of about {self.expected}{left}: {text}")

    def expect(self, more: int) -> None:
        """Takes what is still to come as known."""
        self.expected = self._done + more


def measure(
    make: Make, batch: Any, devices: int, say: Callable[[str], None] = lambda text: None
) -> Figures:
    """Returns the figures of a model: each layer timed as a stage, the rest fitted to steps.

    Of layers that are alike, one is timed alone. Steps that are fitted have as many as there are
    devices, but for a plain one, which has all.
    """
    on_cpu = make(Plan()).device_type == "CPU"
    say = progress = _Progress(say, _ON_ONE if devices == 1 else _ON_SEVERAL)
    layers = _layers(make, batch)
    figures = _layers_alone(make, batch, layers, devices, on_cpu, say)
    had = layers.at_least(devices)
    some = figures.of_layers(had)
    plans = [evenly_cut(plan, some, figures.batch) for plan in plans_to_fit(some, devices)]
    program = _program(figures, devices)
    progress.expect(len(plans) + (program is not None) + 2)
    say(f"a step of '{PLAIN}'")
    whole = [TimedStep(make(PLAIN), batch)]
    measured: list[tuple[Plan, tuple[int, ...] | None]] = [(PLAIN, None)]
    for plan in plans:
        starts = [had[at] for at in (plan.boundaries or ())[:-1]]
        cut = dataclasses.replace(plan, boundaries=(*starts, len(layers.kinds)))
        say(f"a step of '{cut}' with {count_text(len(had), 'layer')}")
        whole.append(TimedStep(make(cut), batch, layers=had))
        measured.append((plan, had))
    if program is not None:
        say(f"a step of '{program}'")
        try:
            whole.append(TimedStep(make(program), batch))
        except PipemeshError as error:
            say(f"no forecast of lowering=simd: {error}")
            figures, program = dataclasses.replace(figures, alike=(0, 0)), None
    say(f"{count_text(len(whole), 'step')} in turn")
    seconds, work = in_rounds(whole, _STEPS, _STEPS_SECONDS)
    steps = in_turn(seconds)
    measurements: list[Measured] = []
    # The program has a step too, the last one, by which nothing is fitted but its own pace.
    for (plan, kept), duration, done, every in zip(
        measured, steps, in_turn(work), zip(*seconds, strict=True), strict=False
    ):
        spread = statistics.median(every) / usual(every) - 1
        measurements.append(Measured(plan, figures.batch, duration, False, spread, kept))
        if on_cpu:
            # Other programs lengthen a step, but not its core time.
            measurements.append(Measured(plan, figures.batch, done, True, 0.0, kept))
    figures = fitted(figures, measurements)
    pace = 1.0
    if program is not None:
        parts = predict(program, figures, figures.batch).parts
        besides = sum(parts[name] for name in ("gradients", "optimizer", "fixed"))
        pace = max(0.1 * steps[-1], steps[-1] - besides) / (sum(parts.values()) - besides)
    errors = [
        abs(each.forecast(figures).seconds / each.seconds - 1)
        for each in measurements
        if not each.is_work
    ]
    return dataclasses.replace(
        figures,
        plain_step=steps[0],
        loop_pace=pace,
        error=statistics.fmean(errors),
    )


def _program(figures: Figures, devices: int) -> Plan | None:
    """Returns a plan that runs as one program; None without one."""
    count = figures.alike[1] - figures.alike[0]
    places = [n for n in range(2, devices + 1) if count and count % n == 0]
    if not places:
        return None
    number = max(n for n in range(1, 5) if figures.batch % n == 0)
    over = next(iter(figures.end_layouts), "")
    split = Split(places[0], 1, 1, "gpipe", number, Remat.FULL, "", "simd", over)
    plan = split.plan(figures, SearchSpace(devices, figures.batch))
    return evenly_cut(plan, figures, figures.batch)


def plans_to_fit(figures: Figures, devices: int) -> Iterator[Plan]:
    """Yields plans whose times, with that of `PLAIN`, separate the fitted quantities."""
    rows = figures.batch

    def divisor(number: int, most: int) -> int:
        return max(n for n in range(1, most + 1) if number % n == 0)

    yield Plan(num_microbatches=divisor(rows, 8), remat=Remat.NONE)
    yield Plan(num_microbatches=divisor(rows, 2), remat=Remat.FULL)
    if devices < 2:
        return
    if len(figures.layers) > 1:
        yield Plan(Mesh.from_text("layers:2"), num_microbatches=divisor(rows, 4), remat=Remat.NONE)
    most = divisor(devices, len(figures.layers))
    if most > 1:
        # Many short actions.
        mesh = Mesh.from_text(f"layers:{most}")
        yield Plan(mesh, schedule="zb_h1", num_microbatches=divisor(rows, 8), remat=Remat.FULL)
    if rows % 2 == 0:
        yield Plan(
            Mesh.from_text("layers:1;data:2"), LayoutRules.from_text("batch:data"), remat=Remat.NONE
        )
    if devices > 2 and rows % devices == 0:
        # The most gradient all-reduces, with few examples.
        mesh = Mesh.from_text(f"layers:1;data:{devices}")
        number = divisor(rows // devices, 8)
        yield Plan(mesh, LayoutRules.from_text("batch:data"), num_microbatches=number)
    others: dict[bool, Split] = {}
    for layout in figures.layouts[1:]:
        split = Split(1, 1 + cuts_weights(layout), 1 + splits_layers(layout), layout=layout)
        fits = figures.can_share(split.model, layout) and figures.can_cut(split.data, layout)
        if split.num_devices <= min(2, devices) and rows % split.data == 0 and fits:
            # One that splits layers and one that cuts weights: all have the links of the first.
            others.setdefault(cuts_weights(layout), split)
    for split in others.values():
        yield split.plan(figures, SearchSpace(devices, rows))
    if not figures.can_share(2):
        return
    rules = LayoutRules.from_text(figures.rules)
    for number in sorted({1, divisor(rows, 8)}):
        mesh = Mesh.from_text(f"layers:1;{MODEL}:2")
        yield Plan(mesh, rules, num_microbatches=number, remat=Remat.NONE)
    most = max(n for n in range(1, devices + 1) if not devices % n and figures.can_share(n))
    if most > 2:
        # The most slices.
        mesh = Mesh.from_text(f"layers:1;{MODEL}:{most}")
        yield Plan(mesh, rules, num_microbatches=divisor(rows, 2), remat=Remat.FULL)
