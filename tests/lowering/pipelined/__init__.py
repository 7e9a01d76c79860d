"""Models whose layers run in a `SimdPipeline`, plain and on a mesh."""

from tests.lowering.pipelined.mlp import DEEP_MLP, MLP
from tests.lowering.pipelined.transformer import TRANSFORMER

MODELS = {model.name: model for model in (MLP, DEEP_MLP, TRANSFORMER)}
