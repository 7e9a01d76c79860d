"""Prices of layout rules for a stack of layers, counted from shapes."""

from __future__ import annotations

from typing import Any

from lingvo.core import tshape

from pipemesh.errors import LayoutError, PartitionError
from pipemesh.layers.named import ReplicaCut, lowering_scope, replica_cut_scope
from pipemesh.layers.partition_layers import Meta, layer_metas, named_layers
from pipemesh.lowering import OperationCosts, PlacementLowering
from pipemesh.lowering.costs import Work, usual_bytes
from pipemesh.mesh import LayoutRules, Mesh, Price, Pricing
from pipemesh.mesh.find_layout import Axes
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import Machine
from pipemesh.plan.homes import BATCH, cut_rules, replica_axis
from pipemesh.plan.machine import by_work, least_seconds


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

    def counted(
        mesh: Mesh, rules: LayoutRules, replicas: int = 1, costs: OperationCosts | None = None
    ) -> list[Meta]:
        lowering = PlacementLowering(mesh, rules, [""] * mesh.num_devices)
        lowering.costs = costs or lowering.costs
        with lowering_scope(lowering):
            try:
                return layer_metas(params, *(_rows(shape, replicas) for shape in shapes))
            except PartitionError as error:
                if isinstance(error.__cause__, LayoutError):
                    raise error.__cause__ from None
                raise

    def price(rules: LayoutRules) -> Price:
        replica = replica_axis(mesh, rules)
        axis, replicas = replica or ("", 1)
        inner = mesh.without(axis)
        others = LayoutRules(tuple(rule for rule in rules.rules if rule[0] != BATCH))
        within = LayoutRules(tuple(rule for rule in others.rules if rule[1] != axis))
        cut = None
        if cut_rules(rules).rules and replica is not None:
            cut_rules(rules).check(mesh, weight_dims)
            cut = ReplicaCut(Mesh((replica, *inner.axes)), others)
        with replica_cut_scope(cut):
            metas = counted(inner, within, replicas)
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
    for meta in counted(Mesh(()), LayoutRules()):
        weight_dims.update(meta.weight_dims)
        for name, sizes in meta.dims.items():
            dims.setdefault(name, set()).update(sizes)
    # Of layers that nothing splits: rules, even over axes of size 1, add work to some.
    work = OperationCosts(Mesh(tuple((dim, 1) for dim in dims)), by_dims=True)
    for meta in counted(Mesh(()), LayoutRules(), costs=work):
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


def _rows(shape: Any, replicas: int) -> Any:
    """Returns the shape of an input of one replica."""
    if shape is None:
        return None
    batch, *rest = shape.ToTensorShape().as_list()
    if batch % replicas:
        raise LayoutError(f"a batch of {batch} rows cannot be cut into {replicas} equal parts")
    return tshape.Shape([batch // replicas, *rest])


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
    """Adds the sum of gradients over replicas, and the weights that they fetch for each pass."""
    cut = fetched * replicas // (replicas - 1)
    sent = {"all_reduce": weights - cut, "reduce_scatter": cut}
    for primitive, size in sent.items():
        if size:
            usual = usual_bytes(primitive, size, replicas)
            costs.add_sent(primitive, [axis], usual, backward=True)
    if fetched:
        for backward in (False, True):
            costs.add_sent("all_gather", [axis], fetched, backward)
