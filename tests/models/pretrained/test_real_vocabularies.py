"""Vocabularies of real models, which two devices cannot share evenly, by the README's commands."""

import json

import numpy as np
import pytest

from models.pretrained import transfer
from pipemesh.commands.main import main
from tests.commands import program
from tests.models.pretrained import reference, small

pytestmark = pytest.mark.slow

PLANS = {
    "plain": ["--plain"],
    "split": ["--mesh_shape=layers:2;model:2", "--layout=heads:model;d_ff:model;vocab:model"],
}
# GPT-2's, and that of Qwen 3 with one table for both ends.
KINDS = {
    "Gpt2": small.GPT2 | {"vocab_size": 50257},
    "Llama": small.LLAMA | {"vocab_size": 151669, "tie_word_embeddings": True},
}
TUNED = """
import numpy as np
import tensorflow as tf
from lingvo import model_registry
from models.pretrained import params
from pipemesh.layers import DatasetInput

def batches():
    ids = np.random.default_rng(3).integers(0, {vocab}, [20, 8, 9]).astype(np.int32)
    shape = [8, 8]
    return tf.data.Dataset.from_tensor_slices(ids).map(lambda ids: {{
        "ids": ids[:, :-1], "labels": ids[:, 1:], "weights": tf.ones(shape),
        "segment_ids": tf.ones(shape, tf.int32),
        "segment_pos": tf.tile(tf.range(8)[None], [8, 1]),
    }})

@model_registry.RegisterSingleTaskModel
class Tuned(params.{kind}):
    BATCH_SIZE, SEQUENCE_LENGTH, LEARNING_RATE = 8, 8, 1e-2
    def Train(self):
        return DatasetInput.Params().Set(name="Train", dataset=batches)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["Gpt2", "Llama"])
def test_results_are_those_of_one_device(kind, tmp_path, monkeypatch):
    values = KINDS[kind]
    tensors = small.tensors_of(values)
    small.write(tmp_path / "in", values, tensors)
    monkeypatch.setattr(program, "CODE", f"import os; os.chdir({str(tmp_path)!r})\n{program.CODE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    # A module is imported once in a process.
    module = f"real_{kind.lower()}"
    (tmp_path / f"{module}.py").write_text(TUNED.format(kind=kind, vocab=values["vocab_size"]))
    losses = {}
    for plan, flags in PLANS.items():
        run = tmp_path / plan
        transfer.import_weights(str(tmp_path / "in"), str(run), model=f"{module}.Tuned")
        out = program.done("train", f"--logdir={run}", "--steps=2", "--log_format=json", *flags)
        events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        losses[plan] = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses["plain"]) == 2
    np.testing.assert_allclose(losses["split"], losses["plain"], rtol=1e-5)

    tokens, _ = reference.greedy(values, tensors, [3, 9, 1, 20], 8)
    prompt = ["--ids", "--prompt=3 9 1 20", "--max_tokens=8", "--format=json"]
    found = program.done("decode", f"--checkpoint={run}/ckpt-0", *prompt, *PLANS["split"])
    assert json.loads(found)["tokens"] == tokens

    # What the split run saved is whole, and is read by others.
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out")]) == 0
    package = pytest.importorskip("transformers", reason="pip install -e '.[dev,peers]'")
    torch = pytest.importorskip("torch", reason="pip install -e '.[dev,peers]'")
    theirs = package.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    ids = torch.tensor([[3, 9, 1, 20]])
    said = theirs.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert said[0, 4:].tolist() == tokens
    package.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
