"""The range of alike layers in a stack, for `lowering="simd"` with the loss inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import is_stage
from pipemesh.layers.named import NamedLayer
from pipemesh.layers.pipeline.alike_stages import differences


@dataclasses.dataclass(frozen=True)
class SimdCut:
    """The layers before and behind the alike ones.

    Attributes:
        before: the number of layers of the first stage before the alike ones.
        behind: the number of layers of the last stage behind them.
    """

    before: int
    behind: int

    def split(self, stages: Sequence[Any]) -> tuple[Any | None, list[Any], Any | None]:
        """Returns params of the layers before, of the alike layers' stages, and of the layers
        behind.
        """
        cells = [stage.Copy() for stage in stages]
        first, last = cells[0].Copy(), cells[-1].Copy()
        first.Set(name=f"{first.name}_before", sub=first.sub[: self.before])
        last.Set(name=f"{last.name}_behind", sub=last.sub[len(last.sub) - self.behind :])
        cells[-1].sub = cells[-1].sub[: len(cells[-1].sub) - self.behind]
        cells[0].sub = cells[0].sub[self.before :]
        return first if self.before else None, cells, last if self.behind else None


def simd_cut(p: Any) -> SimdCut:
    """Finds the longest run of alike layers, and checks that each stage has equally many of them.

    Raises:
        PipelineError: stages have different numbers of alike layers, the alike layers have no named
            dims or share weights with others, or stages fetch activations.
    """
    for cell in p.cell_tpl:
        if not is_stage(cell) or any(map(is_stage, cell.sub)):
            raise PipelineError(
                f"{p.name}: lowering='simd' takes layers from stages, but {cell.name!r} is a "
                f"{cell.cls.__name__} or has stages inside; make cell_tpl of "
                "FeatureExtractionLayers of layers, as PartitionSequentialLayers does"
            )
        if cell.act_fetch_layers or cell.num_act_inputs:
            raise PipelineError(
                f"{p.name}: stage {cell.name!r} fetches or hands on activations beside those of "
                "its layers, which a loop over ticks does not; use lowering='placement'"
            )
    layers = [layer for cell in p.cell_tpl for layer in cell.sub]
    begin, end = _longest_run(layers)
    number, rest = divmod(end - begin, len(p.cell_tpl))
    wanted = [number] * len(p.cell_tpl)
    wanted[0] += begin
    wanted[-1] += len(layers) - end
    found = [len(cell.sub) for cell in p.cell_tpl]
    if rest or not number:
        raise PipelineError(
            f"{p.name}: lowering='simd' gives each of {len(p.cell_tpl)} stages as many alike "
            f"layers, but there are {end - begin} ({layers[begin].cls.__name__}); make that a "
            "multiple of the number of stages, or use lowering='placement'"
        )
    if found != wanted:
        raise PipelineError(
            f"{p.name}: lowering='simd' gives each stage {number} of the {end - begin} alike "
            f"layers ({layers[begin].cls.__name__}), so that stages have {_listed(wanted)} layers, "
            f"but in cell_tpl they have {_listed(found)}; cut them so, or use lowering='placement'"
        )
    run = layers[begin:end]
    if not issubclass(run[0].cls, NamedLayer):
        raise PipelineError(
            f"{p.name}: the alike layers are {run[0].cls.__name__}s; with loss_inside "
            "lowering='simd' runs layers with named dims: use some (pipemesh.layers.named), put "
            "the head behind the stack and leave loss_inside unset, or use lowering='placement'"
        )
    names = {layer.name for layer in run}
    for pair in p.tied_weights.items():
        for weight in pair:
            if weight.rpartition(".")[0] in names:
                raise PipelineError(
                    f"{p.name}: tied_weights names {weight!r}, a weight of one of the alike "
                    "layers, which lowering='simd' stacks; tie those of other layers, or use "
                    "lowering='placement'"
                )
    return SimdCut(begin, len(layers) - end)


def check_simd(p: Any) -> None:
    """Checks that a stack with the loss inside can be one program; see `simd_cut`."""
    simd_cut(p)
    for name, wrong, why in (
        ("fprop_dtype", p.fprop_dtype == tf.float16, "the loss is not scaled, which float16 needs"),
        ("state_dtype", p.state_dtype is not None, "activations keep their dtype"),
        ("strict_devices", p.strict_devices, "stages are no functions that are looked into"),
        ("check_numerics", p.check_numerics == "results", "the loss alone is looked at ('loss')"),
    ):
        if wrong:
            raise PipelineError(
                f"{p.name}: {name} is {getattr(p, name)!r}, but with loss_inside and "
                f"lowering='simd' {why}; leave it out, or use lowering='placement'"
            )


def _longest_run(layers: Sequence[Any]) -> tuple[int, int]:
    """Returns the begin and the end of the longest run of alike layers."""
    best, begin = (0, 1), 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or next(differences(layers[begin], layers[end], "layer"), None):
            if end - begin > best[1] - best[0]:
                best = begin, end
            begin = end
    return best


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
