"""Limits of decoding settings, checked by flags before TensorFlow is loaded, and by `decoding`."""

from __future__ import annotations

from pipemesh.errors import DecodingError

# Logits that are divided by less might be more than float32 has.
_COLDEST = 1e-6


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Checks how tokens are drawn.

    Args:
        temperature: divisor of logits; 0 for the most likely token.
        top_k: how many of the most likely tokens may be drawn; 0 for all.
        top_p: probability of the tokens that may be drawn.

    Raises:
        DecodingError: a value is out of its range, or without effect.

    Example:
        >>> check_sampling(temperature=0.8, top_k=0, top_p=0.9)
    """
    if not (temperature == 0 or _COLDEST <= temperature < float("inf")):
        raise DecodingError(f"temperature is {temperature}; give 0 (greedy), or {_COLDEST} or more")
    if top_k < 0:
        raise DecodingError(f"top_k is {top_k}; give a number of tokens, or 0 for all")
    if not 0 < top_p <= 1:
        raise DecodingError(f"top_p is {top_p}; give a probability above 0, at most 1")
    if not temperature and (top_k or top_p < 1):
        raise DecodingError(
            f"top_k {top_k} and top_p {top_p} are for drawing; give a temperature above 0, or "
            "leave them out"
        )


def check_beams(beams: int, length_penalty: float) -> None:
    """Checks a beam search.

    Args:
        beams: how many beginnings are kept.
        length_penalty: exponent of the length that a log probability is divided by.

    Raises:
        DecodingError: a value is out of its range.

    Example:
        >>> check_beams(beams=4, length_penalty=1.0)
    """
    if beams < 1:
        raise DecodingError(f"beams is {beams}; give 1 or more")
    if not 0 <= length_penalty < float("inf"):
        raise DecodingError(f"length_penalty is {length_penalty}; give 0 or more")
