"""Mistral (Jiang et al., 2023): Llama whose tokens see a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..values import Given
from .family import Config
from .llama import like_llama, silu_gate, sizes

DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def all_windows(given: Given, num_layers: int, default: int | None) -> tuple[int | None, ...]:
    """Returns the window of all blocks; null is none, and a missing key the default."""
    window = given.optional("sliding_window", default, given.whole)
    return () if window is None else (window,) * num_layers


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    shared: dict[str, Any] = sizes(given, **DEFAULTS)
    return Config(
        model_type="mistral",
        **shared,
        activation=silu_gate(given),
        windows=all_windows(given, shared["num_layers"], 4096),
    )


MISTRAL = like_llama(read=_read)
