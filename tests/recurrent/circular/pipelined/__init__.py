"""Models whose layers run in a `SimdPipeline`, plain and on a mesh."""

from tests.recurrent.circular.pipelined.mlp import DEEP_MLP, MLP
from tests.recurrent.circular.pipelined.transformer import TRANSFORMER

MODELS = {model.name: model for model in (MLP, DEEP_MLP, TRANSFORMER)}
