"""Layers for lingvo models: they cut a model into stages and pipeline it.

The names are those of `lingvo.core.gpipe`. A model that imports them from there also works with an
import from here. `PipeliningLayer` has an example.
"""

# First: it raises the error for a missing TensorFlow.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

# Nothing else may import lingvo before this module has run.
from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

from pipemesh.layers.dataset_input import DatasetInput
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.foreign_layers import FunctionLayer, KerasLayer
from pipemesh.layers.keras_cells import keras_layers
from pipemesh.layers.keras_task import KerasTask
from pipemesh.layers.layout_pricing import layers_pricing
from pipemesh.layers.lingvo_gpipe import (
    export_to_lingvo,
    import_from_lingvo,
    lingvo_checkpoint_rules,
    lingvo_names,
    replace_gpipe,
)
from pipemesh.layers.mesh_cluster import mesh_cluster
from pipemesh.layers.partition_layers import PartitionSequentialLayers, layer_costs
from pipemesh.layers.pipeline.pipelining import PipeliningLayer
from pipemesh.layers.pipeline.seq_layer import SeqLayer
from pipemesh.layers.report import Report, report
from pipemesh.layers.step_seed import (
    CellFnFPropOpReplacementWrapper,
    GenerateStepSeedPair,
    GetOverWriteGlobalStep,
    SetOverWriteGlobalStep,
)

__all__ = [
    "CellFnFPropOpReplacementWrapper",
    "DatasetInput",
    "FeatureExtractionLayer",
    "FunctionLayer",
    "GenerateStepSeedPair",
    "GetOverWriteGlobalStep",
    "KerasLayer",
    "KerasTask",
    "PartitionSequentialLayers",
    "PipeliningLayer",
    "Report",
    "SeqLayer",
    "SetOverWriteGlobalStep",
    "export_to_lingvo",
    "import_from_lingvo",
    "keras_layers",
    "layer_costs",
    "layers_pricing",
    "lingvo_checkpoint_rules",
    "lingvo_names",
    "mesh_cluster",
    "replace_gpipe",
    "report",
]
