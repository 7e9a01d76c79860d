"""Mixtral (Jiang et al., 2024): Mistral with two of several experts for each token."""

from __future__ import annotations

from typing import Any

from ..values import Given
from .family import Config
from .llama import MODULES, like_llama, silu_gate, sizes
from .mistral import DEFAULTS, all_windows


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    given.only("num_experts_per_tok", [2], "a token meets two experts")
    why = (
        "experts are balanced by no loss; what balances them in transformers is over a whole batch"
    )
    given.only("output_router_logits", [False, None], why)
    given.only("router_jitter_noise", [0.0, 0, None], "the inputs of the router are exact")
    shared: dict[str, Any] = sizes(given, **DEFAULTS, rope_theta=1e6, rms_norm_eps=1e-5)
    num_experts = given.whole("num_local_experts", 8)
    if num_experts < 2:
        raise given.error("num_local_experts", num_experts, "a token meets two experts")
    return Config(
        model_type="mixtral",
        **shared,
        activation=silu_gate(given),
        windows=all_windows(given, shared["num_layers"], None),
        num_experts=num_experts,
    )


MIXTRAL = like_llama(
    read=_read,
    modules={
        **MODULES,
        "feed_forward/router": "block_sparse_moe.gate",
        "feed_forward/in": "block_sparse_moe.experts.{}.w3",
        "feed_forward/gate": "block_sparse_moe.experts.{}.w1",
        "feed_forward/out": "block_sparse_moe.experts.{}.w2",
    },
    # The weight of a loss that is refused.
    ignored=frozenset(["router_aux_loss_coef"]),
)
