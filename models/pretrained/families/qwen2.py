"""Qwen2 (Yang et al., 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..values import Given
from .family import Config, windows
from .llama import like_llama, silu_gate, sizes

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}


def later_windows(given: Given, num_layers: int) -> tuple[int | None, ...]:
    """Returns the window of each block; by default the first `max_window_layers` have none."""
    used = given.flag("use_sliding_window", False)
    first = given.number("max_window_layers", 28, zero=True)
    # A window that is not in use may be anything.
    given.get("sliding_window")
    window = given.optional("sliding_window", 4096, given.whole) if used else None
    return windows(given, window, [window is not None and i >= first for i in range(num_layers)])


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    given.only("use_mrope", [False, None], "positions are those of one text")
    shared: dict[str, Any] = sizes(given, **DEFAULTS)
    return Config(
        model_type="qwen2",
        **shared,
        activation=silu_gate(given),
        windows=later_windows(given, shared["num_layers"]),
        attention_bias=True,
    )


QWEN2 = like_llama(read=_read)
