"""Runs schedules: stages, microbatches and devices in, outputs and gradients out.

`Recurrent` runs one cell along time. `StackedRecurrent` runs a stack of cells on several devices.
"""

# First, because it reports a missing TensorFlow.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

from pipemesh.recurrent.executor import pipeline, pipeline_loss
from pipemesh.recurrent.forecast import (
    DeviceMemory,
    Transfer,
    predict_memory,
    predict_transfers,
)
from pipemesh.recurrent.options import LossScale, Options
from pipemesh.recurrent.remat import REMAT_POLICIES, ByStage, RematPolicy, Selective
from pipemesh.recurrent.stage import Home, Slice, Stage, current_slice, write_slice
from pipemesh.recurrent.time.recurrent import Recurrent
from pipemesh.recurrent.time.stacked_recurrent import StackedRecurrent
from pipemesh.recurrent.watch.clock import ActionClock
from pipemesh.recurrent.watch.marks import Marks
from pipemesh.recurrent.watch.placement import Placement

__all__ = [
    "REMAT_POLICIES",
    "ActionClock",
    "ByStage",
    "DeviceMemory",
    "Home",
    "LossScale",
    "Marks",
    "Options",
    "Placement",
    "Recurrent",
    "RematPolicy",
    "Selective",
    "Slice",
    "StackedRecurrent",
    "Stage",
    "Transfer",
    "current_slice",
    "pipeline",
    "pipeline_loss",
    "predict_memory",
    "predict_transfers",
    "write_slice",
]
