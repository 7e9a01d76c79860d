"""Decoding: a model of named layers continues prompts, group by group through its stages."""

from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

# Before lingvo, which it loads on every system.
from pipemesh import layers as layers  # isort: skip

from pipemesh.decoding.decoder import Continuation, Decoder
from pipemesh.decoding.generator import Generator
from pipemesh.decoding.sampling import Sampler

__all__ = ["Continuation", "Decoder", "Generator", "Sampler"]
