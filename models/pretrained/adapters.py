"""Adapters of a checkpoint: merged with their weights, and as the files of the package `peft`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.files import write_whole

from . import names
from .names import Weight

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
# `peft` wraps the model twice.
_PREFIX = "base_model.model."
# The type of a task there, by kind of model.
_TASKS = {"decoder": "CAUSAL_LM", "encoder": None, "encoder_decoder": "SEQ_2_SEQ_LM"}


class Weights:
    """The whole weights of a checkpoint; adapters are added to those of its base.

    Raises:
        CheckpointError: the checkpoint has adapters for other weights than those beside it.
    """

    def __init__(self, path: str) -> None:
        from pipemesh.checkpoint.reader import contents
        from pipemesh.training.saving import base_of

        # The checkpoint that has all weights.
        self.base = base_of(path) or path
        self.shapes, self._dtypes = contents(self.base)
        self._path, self._scale = path, 0.0
        self._adapters: dict[str, Any] = {}
        if self.base != path:
            shapes, self._adapters = contents(path)
            # Noted by the run that saved it.
            self.settings = Manifest.read(path).note["adapters"]
            ranks = {shapes[name][-1] for name in shapes if name.endswith("_lora/a/var")}
            (self.rank,) = ranks
            self._scale = self.settings["LORA_ALPHA"] / self.rank

    def read(self, name: str) -> np.ndarray:
        """Returns a weight, with its adapter if it has one."""
        import tensorflow as tf

        from pipemesh.checkpoint.conversion import read_one

        tensor = read_one(self.base, name, self._dtypes[name])
        # `tensor.numpy()` would be a copy.
        bits = tf.bitcast(tensor, f"uint{8 * tensor.dtype.size}")
        value = np.from_dlpack(bits).view(tensor.dtype.as_numpy_dtype)
        if (pair := self.adapter(name)) is None:
            return value
        return value.astype(np.float32) + np.tensordot(*pair, 1) * np.float32(self._scale)

    def adapter(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the two matrices of a weight's adapter, as they are here; None without one."""
        from pipemesh.checkpoint.conversion import read_one

        parts = [f"{name.removesuffix('/var')}_lora/{part}/var" for part in "ab"]
        if parts[0] not in self._adapters:
            return None
        a, b = (read_one(self._path, part, self._adapters[part]).numpy() for part in parts)
        return a, b


def write(
    weights: Weights,
    table: Sequence[Weight],
    folder: str,
    task: str,
    cast: Callable[[np.ndarray, str], np.ndarray],
) -> list[str]:
    """Writes adapters of a kind of model, `task`, as `peft` does; returns the paths.

    Several weights here may be one tensor there, as in GPT-2. Then the adapter there has a rank for
    each of them, and its second matrix has a block for each.
    """
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    rank, settings, fan_in_fan_out = weights.rank, weights.settings, False
    for theirs, parts in names.by_theirs(table):
        pairs = [weights.adapter(part.name) for part in parts]
        number = sum(pair is not None for pair in pairs)
        if not number:
            continue
        outputs = parts[0].there[0 if parts[0].transposed else -1]
        first, up = [], np.zeros([outputs, number * rank], np.float32)
        for part, pair in zip(parts, pairs, strict=True):
            if pair is not None:
                a, b = pair
                block = np.zeros([outputs, rank], np.float32)
                # `b` lies in its tensor as the weight lies in that of the model.
                shape = {"shape": b.shape, "there": block.shape, "transposed": True}
                dataclasses.replace(part, **shape).put(b, block)
                up[:, len(first) * rank : (len(first) + 1) * rank] = block
                first.append(a.reshape(-1, rank).T)
        # In files of GPT-2 matmuls are `inputs, outputs`.
        fan_in_fan_out = not parts[0].transposed
        module = theirs.removesuffix(".weight")
        if number > 1:
            ranks[module], alphas[module] = number * rank, number * settings["LORA_ALPHA"]
        else:
            ranks.setdefault(module, rank)
        for kind, value in (("A", np.concatenate(first)), ("B", up)):
            name = f"{_PREFIX}{module}.lora_{kind}.weight"
            tensors[name] = np.ascontiguousarray(cast(value, name))
    config = {
        "peft_type": "LORA",
        "task_type": _TASKS[task],
        "base_model_name_or_path": None,
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": settings["LORA_ALPHA"],
        "lora_dropout": settings["LORA_DROPOUT"],
        "target_modules": list(ranks),
        "rank_pattern": {module: size for module, size in ranks.items() if size != rank},
        "alpha_pattern": alphas,
        "fan_in_fan_out": fan_in_fan_out,
    }
    paths = [os.path.join(folder, name) for name in (FILE, CONFIG)]
    write_whole(paths[0], save(tensors, metadata={"format": "pt"}))
    write_whole(paths[1], (json.dumps(config, indent=2) + "\n").encode())
    return paths
