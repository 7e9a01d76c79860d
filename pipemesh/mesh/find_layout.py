"""Search for the layout rules of a program, given a function that prices them."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from pipemesh.errors import LayoutError
from pipemesh.mesh.layout import LayoutRules
from pipemesh.mesh.mesh import Mesh
from pipemesh.text import columns, number

# The axis of each decided dim, None if it is whole.
Axes = Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class Price:
    """The time and memory of a step under some layout rules.

    Attributes:
        seconds: of the step.
        memory: bytes that one processor holds.
        parts: seconds by what takes them, such as `compute` and the axes of communication.
    """

    seconds: float
    memory: float = 0.0
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass(frozen=True)
class Pricing:
    """A program whose layout rules are searched, and the functions that price them.

    `pipemesh.lowering.program_pricing` makes it for a program on named dims, and
    `pipemesh.layers.layers_pricing` for layers.

    Attributes:
        mesh: the mesh.
        sizes: for each dim that may be split, its sizes in the program, those with most work first.
        price: prices rules; raises a LayoutError for rules that cannot split the program.
        least: lower bounds of the price of all rules that give the decided dims these axes.
        meeting: sets of dims that meet in one tensor, so that no two of a set may have one axis.
    """

    mesh: Mesh
    sizes: Mapping[str, Collection[int]]
    price: Callable[[LayoutRules], Price]
    least: Callable[[Axes], Price] = lambda decided: Price(0.0)
    meeting: Collection[frozenset[str]] = ()


@dataclasses.dataclass(frozen=True)
class FoundLayout:
    """The result of a search.

    Attributes:
        rules: the cheapest rules that fit into memory.
        price: their price.
        table: all priced rules, cheapest first, also those that do not fit.
        refused: rules that cannot split the program, with the reason.
        is_best: whether no other rules are cheaper: the search has priced or excluded all of them.
    """

    rules: LayoutRules
    price: Price
    table: tuple[tuple[LayoutRules, Price], ...]
    refused: Mapping[str, str]
    is_best: bool

    def __str__(self) -> str:
        parts = list(dict.fromkeys(name for _, price in self.table for name in price.parts))
        head = ["layout", "ms", *(f"{part} ms" for part in parts), "memory MB"]
        rows = [head]
        for rules, price in self.table:
            seconds = (price.seconds, *(price.parts.get(part, 0.0) for part in parts))
            cells = (number(1e3 * value) for value in seconds)
            rows.append([str(rules) or "-", *cells, number(price.memory / 1e6)])
        end = "no other rules are cheaper" if self.is_best else "not all rules were priced"
        return "\n".join([*columns(rows), f"best: '{self.rules}'; {end}"])


def find_layout(
    pricing: Pricing,
    *,
    memory: float | None = None,
    fixed: LayoutRules | str = "",
    seconds: float = 60.0,
    most: int = 1000,
) -> FoundLayout:
    """Returns the cheapest layout rules of a program that fit into memory.

    The search decides dim by dim over which axis it is split (branch and bound). It prices the
    rules with the smallest lower bound first, and ends when no bound is below the best price.

    Args:
        pricing: the program and the functions that price its rules.
        memory: bytes of a processor; None for no limit.
        fixed: rules that stay; other dims are searched.
        seconds: time after which the search ends with the best rules so far.
        most: the number of priced rules after which it ends.

    Returns:
        The rules, all prices, and whether the rules are proven to be the best.

    Raises:
        LayoutError: no rules can split the program within the memory, or a fixed rule names an
            unknown axis or dim.

    Example:
        >>> mesh, sizes = Mesh.from_text("data:2;model:4"), {"batch": [8], "hidden": [6, 64]}
        >>> def price(rules):
        ...     return Price(1 / math.prod(mesh.size(axis) for _, axis in rules.rules))
        >>> found = find_layout(Pricing(mesh, sizes, price))
        >>> str(found.rules), found.price.seconds, found.is_best
        ('batch:model;hidden:data', 0.125, True)
    """
    mesh = pricing.mesh
    given = LayoutRules.from_text(fixed) if isinstance(fixed, str) else fixed
    given.check(mesh, pricing.sizes)
    dims = list(pricing.sizes)
    limit = math.inf if memory is None else memory
    end = time.monotonic() + seconds
    number_of = itertools.count()
    # Lower bound, minus the number of decided dims, and what breaks ties; then the axes.
    queue: list[tuple[float, int, int, tuple[str | None, ...]]] = [(0.0, 0, 0, ())]
    priced: list[tuple[LayoutRules, Price]] = []
    refused: dict[str, str] = {}
    best = math.inf
    is_best = True
    while queue:
        bound, _, _, axes = heapq.heappop(queue)
        if bound >= best:
            break
        if len(priced) + len(refused) >= most or time.monotonic() > end:
            is_best = False
            break
        if len(axes) < len(dims):
            for axis in _axes(pricing, given, dims, axes):
                more = (*axes, axis)
                least = pricing.least(dict(zip(dims, more, strict=False)))
                if least.memory <= limit and least.seconds < best:
                    heapq.heappush(queue, (least.seconds, -len(more), next(number_of), more))
            continue
        rules = LayoutRules(tuple((d, a) for d, a in zip(dims, axes, strict=True) if a))
        try:
            price = pricing.price(rules)
        except LayoutError as error:
            refused[str(rules)] = str(error)
            continue
        priced.append((rules, price))
        if price.memory <= limit:
            best = min(best, price.seconds)
    table = tuple(sorted(priced, key=lambda pair: pair[1].seconds))
    fitting = [(rules, price) for rules, price in table if price.memory <= limit]
    if not fitting:
        raise LayoutError(_nothing(pricing, table, refused, memory, is_best))
    return FoundLayout(*fitting[0], table, refused, is_best)


def _axes(
    pricing: Pricing, given: LayoutRules, dims: list[str], axes: tuple[str | None, ...]
) -> Iterator[str | None]:
    """Yields the axes that may split the next dim, None among them."""
    dim = dims[len(axes)]
    if (fixed := given.axis(dim)) is not None:
        yield fixed
        return
    yield None
    for axis in pricing.mesh.axis_names:
        size = pricing.mesh.size(axis)
        taken = {other for other, at in zip(dims, axes, strict=False) if at == axis}
        meets = any(dim in together and taken & together for together in pricing.meeting)
        if size > 1 and not meets and not any(n % size for n in pricing.sizes[dim]):
            yield axis


def _nothing(
    pricing: Pricing,
    table: tuple[tuple[LayoutRules, Price], ...],
    refused: Mapping[str, str],
    memory: float | None,
    is_best: bool,
) -> str:
    if table:
        rules, price = min(table, key=lambda pair: pair[1].memory)
        way = "give" if is_best else "not all were priced: give a longer search,"
        return (
            f"no layout on mesh '{pricing.mesh}' fits into {memory:,.0f} bytes a processor, of "
            f"{len(table)} that were priced; '{rules}' needs least, {price.memory:,.0f}; {way} "
            "more memory or a larger mesh"
        )
    if memory is not None and not refused and is_best:
        return (
            f"no layout on mesh '{pricing.mesh}' fits into {memory:,.0f} bytes a processor: its "
            "weights alone need more; give more memory or a larger mesh"
        )
    reason = next(iter(refused.values()), "none was priced")
    tried = "" if is_best else " that was tried within the limits of the search"
    return f"no layout{tried} can split the program over mesh '{pricing.mesh}': {reason}"
