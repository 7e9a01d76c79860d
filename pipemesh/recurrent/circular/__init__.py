"""Runs a stack of alike stages as one loop on all cores, with named dims or any operations."""

from pipemesh.recurrent.circular.alike_pipeline import alike_pipeline
from pipemesh.recurrent.circular.layer_position import LayerPosition
from pipemesh.recurrent.circular.simd_pipeline import SimdPipeline

__all__ = [
    "LayerPosition",
    "SimdPipeline",
    "alike_pipeline",
]
