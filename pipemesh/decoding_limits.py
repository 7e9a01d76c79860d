"""Prompts with a source, and limits of decoding settings, checked without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipemesh.errors import DecodingError

# Logits divided by less might overflow float32.
_COLDEST = 1e-6


class SourcePrompt(NamedTuple):
    """A prompt of a model that reads a source, such as a translator.

    Attributes:
        source: ids of the source.
        ids: ids that the output begins with.

    Example:
        >>> SourcePrompt(source=[7, 12, 5], ids=[1]).source
        [7, 12, 5]
    """

    source: Sequence[int]
    ids: Sequence[int]


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises DecodingError for a sampling setting that is out of range or without effect.

    A `temperature` of 0 takes the most likely token; `top_k` 0 allows all tokens.

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
    """Raises DecodingError for a beam search setting that is out of range.

    `length_penalty` is the exponent of the length by which a log probability is divided.

    Example:
        >>> check_beams(beams=4, length_penalty=1.0)
    """
    if beams < 1:
        raise DecodingError(f"beams is {beams}; give 1 or more")
    if not 0 <= length_penalty < float("inf"):
        raise DecodingError(f"length_penalty is {length_penalty}; give 0 or more")
