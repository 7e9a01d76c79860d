"""Layout rules for a stack of layers: their prices and shares, counted from shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PartitionError
from pipemesh.layers.named import ReplicaCut, lowering_scope, replica_cut_scope
from pipemesh.layers.partition_layers import Meta, layer_metas, named_layers
from pipemesh.layers.pipeline.alike_stages import like_earlier
from pipemesh.lowering import OperationCosts, PlacementLowering
from pipemesh.lowering.costs import BACKWARD, Work
from pipemesh.mesh import LayoutRules, Mesh, Price, Pricing, find_layout
from pipemesh.mesh.find_layout import Axes
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import Link, Machine
from pipemesh.plan.figures import DATA, MODEL, Curve, Shares, collective_of
from pipemesh.plan.homes import BATCH, cut_rules, replica_axis
from pipemesh.plan.machine import by_work, least_seconds
from pipemesh.plan.network import sent_bytes


def layers_pricing(
    mesh: Mesh, layers: Any, machine: Machine, *shapes: Any, optimizer: float = 2.0
) -> Pricing:
    """Describes layers for `pipemesh.mesh.find_layout`, which searches their layout rules.

    The layers are one stage, and a step has one microbatch. The axis that splits the batch makes
    replicas, which sum gradients once. Rules for other dims over that axis cut weights (stage 3 of
    ZeRO). They have a price, but the search leaves them out: one stage holds all of its weights
    while it computes, so it would send more and hold as much. Nothing is built or traced: layers
    count their work, what they send and what they keep (`FPropMeta`). Layers without named dims are
    not split.

    Args:
        mesh: the mesh, without the axis `layers`.
        layers: params of a `SequentialLayer`, or a list of layers' params.
        machine: the speed of a device and its links.
        *shapes: a `tshape.Shape` for each input of the first layer, of the whole batch, which comes
            first; or None.
        optimizer: bytes of the optimizer's state for each byte of weights.

    Raises:
        LayoutError: the mesh has the axis `layers`.
        PartitionError: a layer does not say what it costs.

    Example:
        >>> from pipemesh.layers.named import TransformerBlock
        >>> from pipemesh.mesh import find_layout
        >>> from pipemesh.plan import Link
        >>> block = TransformerBlock.Params().Set(input_dim=64, num_heads=4, hidden_dim=256)
        >>> machine = Machine(flops=1e10, network=Link(1e-6, 1e10))
        >>> mesh, shape = Mesh.from_text("data:2;model:2"), tshape.Shape([16, 32, 64])
        >>> pricing = layers_pricing(mesh, [block] * 2, machine, shape)
        >>> found = find_layout(pricing, memory=2e7)
        >>> found.rules.axis("batch") is not None, found.is_best
        (True, True)
    """
    if LAYERS_AXIS in mesh.axis_names:
        raise LayoutError(
            f"mesh '{mesh}' has the axis {LAYERS_AXIS!r}; the search is for one stage, so give the "
            "mesh of its home: the other axes"
        )
    params = named_layers(layers)
    like = like_earlier(params)

    def price(rules: LayoutRules) -> Price:
        axis, replicas = replica_axis(mesh, rules) or ("", 1)
        inner = mesh.without(axis)
        if cut_rules(rules).rules and replicas > 1:
            cut_rules(rules).check(mesh, weight_dims)
        metas = counted(params, shapes, mesh, rules, like=like)
        costs = OperationCosts(mesh)
        memory = 0.0
        for meta in metas:
            _include(costs, meta)
            whole = meta.held_bytes + meta.fetched_bytes
            if replicas > 1:
                _include_gradients(costs, axis, replicas, whole, meta.fetched_bytes)
            # While they compute, replicas have all weights and gradients; each updates its share.
            memory += whole * (2 + optimizer / replicas)
            memory += (meta.activation_bytes or 0) / inner.num_devices
        parts = machine.parts(costs, mesh)
        return Price(sum(parts.values()), memory, parts)

    dims: dict[str, set[int]] = {}
    weight_dims: set[str] = set()
    for meta in counted(params, shapes, Mesh(()), LayoutRules(), like=like):
        weight_dims.update(meta.weight_dims)
        for name, sizes in meta.dims.items():
            dims.setdefault(name, set()).update(sizes)
    # Of layers that nothing splits: rules, even over axes of size 1, add work to some.
    work = OperationCosts(Mesh(tuple((dim, 1) for dim in dims)), by_dims=True)
    for meta in counted(params, shapes, Mesh(()), LayoutRules(), work, like):
        _include(work, meta)
    least = least_seconds(work.work, mesh, machine)

    def least_price(decided: Axes) -> Price:
        return Price(least(decided))

    # Products have a name for a whole sequence. One stage holds all weights while it computes, so
    # cutting them over replicas costs traffic and saves nothing.
    meeting = {
        frozenset(members) - {BATCH, "length"}
        for members, operation, _ in work.work
        if operation in ("einsum", "attention")
    }
    meeting |= {frozenset({BATCH, dim}) for dim in dims}
    sizes = {dim: dims[dim] for dim in by_work(work.work, dims)}
    return Pricing(mesh, sizes, price, least_price, meeting)


def counted(
    params: Any,
    shapes: Sequence[Any],
    mesh: Mesh,
    rules: LayoutRules,
    costs: OperationCosts | None = None,
    like: Sequence[int] = (),
) -> list[Meta]:
    """Returns the costs of layers on a replica of a home's mesh; `shapes` are of all replicas, and
    `like` is as in `layer_metas`.
    """
    replica = replica_axis(mesh, rules)
    axis, replicas = replica or ("", 1)
    inner = mesh.without(axis)
    others = LayoutRules(tuple(rule for rule in rules.rules if rule[0] != BATCH))
    within = LayoutRules(tuple(rule for rule in others.rules if rule[1] != axis))
    cut = None
    if cut_rules(rules).rules and replica is not None:
        cut = ReplicaCut(Mesh((replica, *inner.axes)), others)
    lowering = PlacementLowering(inner, within, [""] * inner.num_devices)
    lowering.costs = costs or lowering.costs
    with replica_cut_scope(cut), lowering_scope(lowering):
        try:
            return layer_metas(params, *(_rows(shape, replicas) for shape in shapes), like=like)
        except PartitionError as error:
            if isinstance(error.__cause__, LayoutError):
                raise error.__cause__ from None
            raise


# Stands for any number of devices: many numbers divide it.
_MANY = 2**6 * 3**2 * 5 * 7
# Dims whose slices devices compute separately and add once: they are split first.
_FIRST = ("heads", "d_ff", "vocab", "experts")
# Numbers of rules to count: for devices of a replica, and for weights cut over replicas.
_FEW, _FEWER = 3, 2
# Of less memory than rules before, and the least share of all weights that is worth a cut.
_LEANER, _WORTH = 0.95, 0.05
# Limits of the search for rules.
_SECONDS, _PRICED = 30.0, 100


def layers_shares(
    layers: Any, machine: Machine, rows: int, *shapes: Any, alike: tuple[int, int] = (0, 0)
) -> dict[str, list[Shares]]:
    """Counts how devices share layers, under those layout rules that plans may need.

    `find_layout` chooses rules for two devices of a replica: the fastest ones, then faster ones the
    less memory they need, on the machine's links and on infinitely fast ones. Of rules that cut
    weights over replicas, those that cut most are taken. Bytes that are kept or passed on are not
    counted. The first rules are of all dims that are usually split. The last ones are of dims that
    no layer from `alike[0]` to before `alike[1]` has, and that only `lowering=simd` splits over
    stages. Arguments are as for `layers_pricing`, `rows` those of a batch.
    """
    params = named_layers(layers)
    like = like_earlier(params)

    def metas_of(rules: str, number: int, members: int = 2) -> list[Meta]:
        given = LayoutRules.from_text(rules)
        axes = dict.fromkeys(axis for _, axis in given.rules)
        mesh = Mesh(tuple((axis, 2 if axis == DATA else members) for axis in axes))
        many = number * (2 if DATA in axes else 1)
        return counted(params, [of_rows(s, many) for s in shapes], mesh, given, like=like)

    plain = {number: metas_of("", number) for number in sorted({1, rows})}
    found: dict[str, list[Shares]] = {}

    def add(split: str, cut: str = "") -> None:
        # A dim that two devices cannot split may be one for three or more.
        for members in (2, 3, 5, 7):
            with contextlib.suppress(LayoutError):
                rules = ";".join(filter(None, (split, cut)))
                metas = {n: metas_of(split, n, members) if split else plain[n] for n in plain}
                held = metas_of(f"{BATCH}:{DATA};{rules}", 1, members) if cut else metas[1]
                found[rules] = [
                    _shares(
                        {n: plain[n][i] for n in plain},
                        {n: metas[n][i] for n in plain},
                        held[i],
                        LayoutRules.from_text(rules),
                        members,
                        machine,
                    )
                    for i in range(len(params))
                ]
                return

    dims = {dim for meta in plain[1] for dim in meta.dims}
    if first := ";".join(f"{dim}:{MODEL}" for dim in _FIRST if dim in dims):
        add(first)
    batch = [of_rows(shape, rows) for shape in shapes]
    for network in (machine.network, Link(0.0, math.inf)):
        speed, memory = dataclasses.replace(machine, network=network), math.inf
        pricing = layers_pricing(Mesh(((MODEL, 2),)), layers, speed, *batch)
        sizes = {dim: size for dim, size in pricing.sizes.items() if dim != BATCH}
        pricing = dataclasses.replace(pricing, sizes=sizes)
        with contextlib.suppress(LayoutError):
            for _ in range(_FEW):
                if len(found) > _FEW or not sizes:
                    break
                best = find_layout(pricing, memory=memory, seconds=_SECONDS, most=_PRICED)
                same = (set(rules.split(";")) for rules in found)
                if best.rules.rules and set(str(best.rules).split(";")) not in same:
                    add(str(best.rules))
                memory = _LEANER * best.price.memory
    splits = list(found)[:_FEWER]
    weights = sum(meta.held_bytes for meta in plain[1])
    cuts: dict[int, str] = {}
    for dim in sorted({dim for meta in plain[1] for dim in meta.weight_dims}):
        with contextlib.suppress(LayoutError):
            held = metas_of(f"{BATCH}:{DATA};{dim}:{DATA}", 1)
            cuts.setdefault(sum(meta.held_bytes for meta in held), f"{dim}:{DATA}")
    best_cuts = [cuts[held] for held in sorted(cuts) if held <= (1 - _WORTH / 2) * weights]
    for cut in best_cuts[:_FEWER]:
        add("", cut)
    for split, cut in itertools.product(splits, best_cuts[:1]):
        add(split, cut)
    begin, end = alike
    inside = {BATCH, *(dim for meta in plain[1][begin:end] for dim in meta.dims)}
    ends = ";".join(f"{dim}:{MODEL}" for dim in _FIRST if dim in dims - inside)
    if begin < end and ends and ends not in found:
        add(ends)
    return found


def _shares(
    plain: Mapping[int, Meta],
    split: Mapping[int, Meta],
    cut: Meta,
    rules: LayoutRules,
    members: int,
    machine: Machine,
) -> Shares:
    """Returns the shares of a layer: its costs by rows on one device, those on one of so many that
    share it, and on one whose weights two replicas cut.
    """
    rows = max(plain)
    whole, shared = plain[rows], split[rows]

    def number(dims: Iterable[str]) -> int:
        sizes = [size for dim in dims if dim in whole.dims for size in whole.dims[dim]]
        return math.gcd(*sizes) or _MANY

    def fewer(whole: float, part: float, devices: int) -> float:
        return (1 - part / whole) * devices / (devices - 1) if whole else 0.0

    def seconds(meta: Meta) -> float:
        if meta.communication is None:
            return 0.0
        return sum(machine.operation(*row) for row in meta.communication.work.values())

    def sent(meta: Meta, key: Any) -> float:
        return meta.communication.rows.get(key, (0, 0))[1] if meta.communication else 0.0

    keys = shared.communication.rows if shared.communication else {}
    axes = {axis: [dim for dim, at in rules.rules if at == axis] for axis in (MODEL, DATA)}
    has_dims = any(dim in whole.dims for dim in axes[MODEL])
    return Shares(
        number(axes[MODEL]) if has_dims else 1,
        tuple(
            collective_of(
                key[1],
                key[2] == BACKWARD,
                calls,
                Curve(tuple((n, sent(meta, key)) for n, meta in split.items())),
                members,
            )
            for key, (calls, _) in keys.items()
        ),
        work=fewer(seconds(whole), seconds(shared), members),
        weights=fewer(whole.held_bytes, shared.held_bytes, members),
        cut=fewer(shared.held_bytes, cut.held_bytes, 2),
        replicas=number(dim for dim in axes[DATA] if dim in whole.weight_dims),
    )


def of_rows(shape: Any, rows: int) -> Any:
    """Returns the shape of an input with another number of rows; shapes may be nested, or None."""

    def of(each: Any) -> Any:
        return each and tshape.Shape([rows, *each.ToTensorShape().as_list()[1:]])

    return tf.nest.map_structure(of, shape)


def _rows(shape: Any, replicas: int) -> Any:
    """Returns the shape of an input of one replica."""
    for each in filter(None, tf.nest.flatten(shape)):
        if (batch := each.ToTensorShape()[0]) % replicas:
            raise LayoutError(f"a batch of {batch} rows cannot be cut into {replicas} equal parts")
        return of_rows(shape, batch // replicas)
    return shape


def _include(costs: OperationCosts, meta: Meta) -> None:
    """Adds the counts of a layer; one without named dims computes everything on each device."""
    if meta.communication is not None:
        costs.include(meta.communication)
    else:
        # Replicas have their own rows of it.
        divided = [BATCH] if costs.by_dims else []
        costs.add_work("layer", divided, Work(int(meta.flops), 0, gradients=2))


def _include_gradients(
    costs: OperationCosts, axis: str, replicas: int, weights: int, fetched: int
) -> None:
    """Adds the sum of gradients over replicas, and the weights that they fetch for a step."""
    cut = fetched * replicas // (replicas - 1)
    sent = {"all_reduce": weights - cut, "reduce_scatter": cut}
    for primitive, size in sent.items():
        if size:
            usual = sent_bytes(primitive, size, replicas)
            costs.add_sent(primitive, [axis], usual, backward=True)
    if fetched:
        costs.add_sent("all_gather", [axis], fetched, backward=False)
