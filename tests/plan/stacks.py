"""Figures of small stacks, in whole seconds and bytes."""

import dataclasses

from pipemesh.partition import LayerCost
from pipemesh.plan.figures import Curve, Figures, LayerFigures, Shares, figures_of_costs


def line(value=1.0):
    """A quantity that a row has."""
    return Curve(((1, value),))


def layer(**more):
    """A layer of a second and a byte of everything but weights."""
    return LayerFigures("a", {"F": line(), "B": line()}, 0, line(), line(), **more)


def figures(seconds=4, split=1, **more):
    """Layers of these seconds, or so many of a second each, that hold equally much."""
    if isinstance(seconds, int):
        seconds = (1.0,) * seconds
    sizes = {"parameter_bytes": 8.0, "activation_bytes": 4.0, "boundary_bytes": 2.0}
    costs = [LayerCost(s, backward=2 * s, name=f"l{n}", **sizes) for n, s in enumerate(seconds)]
    summed = [6.0] * len(costs) if split > 1 else []
    return Figures(tuple(figures_of_costs(costs, 1, split=split, summed=summed)), **more)


def with_ends(**more):
    """Four alike layers of a second between layers of two and six, which split a vocabulary."""
    found = figures((2.0, *(1.0,) * 4, 6.0), **more)
    first, *blocks, last = found.layers
    over = {"vocab:model": Shares(8, work=1.0, weights=1.0)}
    ends = [dataclasses.replace(layer, shares=over) for layer in (first, last)]
    return dataclasses.replace(found, layers=(ends[0], *blocks, ends[1]), alike=(1, 5))
