"""Cases of every operation; `ALL` is what tests run."""

from tests.lowering.cases import convolutions, elementwise, pooling, reductions, rows, structure

_MODULES = (elementwise, reductions, structure, rows, convolutions, pooling)
ALL = {case.name: case for module in _MODULES for case in module.CASES}
assert len(ALL) == sum(len(module.CASES) for module in _MODULES)
