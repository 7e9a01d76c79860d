"""The same steps by torch, transformers and peft: the gradients of microbatches are accumulated.

To be run with the Python of an environment that has them; needs neither TensorFlow nor pipemesh.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import settings

settings.leave_out("pandas", "pyarrow", "scipy", "sklearn")  # isort: split

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from shared.contender import serve_timed  # noqa: E402


def make_step(mode: str, folder: str):
    """A step of training of all weights, of the upper ones, or of adapters; see `IMPORTS`."""
    if mode == settings.IMPORTS:
        _ = transformers.LlamaForCausalLM  # Loaded when it is asked for.
        return lambda: 0.0
    # Both cores work on each operation.
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(folder, "in"), attn_implementation="sdpa", dtype=torch.float32
    )
    model.config.use_cache = False
    if mode == "frozen":
        for part in (model.model.embed_tokens, *model.model.layers[: settings.FROZEN_BLOCKS]):
            part.requires_grad_(False)
    if mode == "lora":
        adapters = peft.LoraConfig(
            r=settings.LORA_RANK,
            lora_alpha=settings.LORA_ALPHA,
            target_modules=["q_proj", "v_proj"],
        )
        model = peft.get_peft_model(model, adapters)
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, settings.RATE, weight_decay=settings.WEIGHT_DECAY)
    ids = torch.tensor(settings.token_ids(), dtype=torch.int64)
    number = settings.MICROBATCHES

    def step() -> float:
        total = 0.0
        optimizer.zero_grad(set_to_none=True)
        for rows in ids.chunk(number):
            logits = model(input_ids=rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            (loss / number).backward()
            total += float(loss.detach()) / number
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return total

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", required=True, choices=[*settings.MODES, settings.IMPORTS])
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()
    step = make_step(arguments.serve, arguments.folder)
    serve_timed(lambda: (step(),))


if __name__ == "__main__":
    main()
