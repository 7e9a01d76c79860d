"""Families of models: one module describes each."""

from .bert import BERT
from .family import Config, Family
from .gemma import GEMMA
from .gemma2 import GEMMA2
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .opt import OPT
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .t5 import T5

__all__ = ["FAMILIES", "Config", "Family"]

# By `model_type`.
FAMILIES = {
    "bert": BERT,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "opt": OPT,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "t5": T5,
}
