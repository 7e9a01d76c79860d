"""Decoding: a model of named layers continues prompts, group by group through its stages.

Every plan gives the same tokens. Keys and values are cached, and free rows take waiting prompts.
`pipemesh decode` is the command line.
"""

from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

# Before lingvo, which it loads on every system.
from pipemesh import layers as layers  # isort: skip

from pipemesh.decoding.beam import BeamSearch
from pipemesh.decoding.choice import Continuation, Sampler
from pipemesh.decoding.decoder import Decoder
from pipemesh.decoding.export import ExportedModel
from pipemesh.decoding.generator import Generator
from pipemesh.decoding.scorer import ScoredText, Scorer
from pipemesh.decoding_limits import SourcePrompt

__all__ = [
    "BeamSearch",
    "Continuation",
    "Decoder",
    "ExportedModel",
    "Generator",
    "Sampler",
    "ScoredText",
    "Scorer",
    "SourcePrompt",
]
