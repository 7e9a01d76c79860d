"""From files of others to text, to a training and back to files, by commands."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from models.pretrained import transfer
from pipemesh.commands.main import main
from pipemesh.errors import CheckpointError
from tests.commands import program
from tests.models.pretrained import reference, small

pytestmark = pytest.mark.slow

SPLIT = ["--mesh_shape=layers:2;model:2", "--layout=heads:model;d_ff:model;vocab:model"]
PROMPT = ["--prompt=the cat", "--max_tokens=5"]
# A class of one's own, in the folder that a command is called in.
TUNED = """
from lingvo import model_registry
from models.pretrained import params
from pipemesh.plan import Plan

@model_registry.RegisterSingleTaskModel
class Tuned(params.Gpt2):
    TRAIN_DATA = HELDOUT_DATA = {text!r}
    BATCH_SIZE, SEQUENCE_LENGTH, LEARNING_RATE = 4, 8, 2e-2
    PLAN = Plan("layers:2", num_microbatches=2)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training that begins with weights of others; no token of theirs ends a text."""
    folder = tmp_path_factory.mktemp("commands")
    # Nine tokens, which two devices cannot share evenly.
    values = small.GPT2 | {"vocab_size": len(small.WORDS) + 1}
    small.write(folder / "in", values, small.tensors_of(values))
    small.write_tokenizer(folder / "in")
    transfer.import_weights(str(folder / "in"), str(folder / "run"))
    return folder / "run"


def test_text_goes_on_and_is_scored_under_any_plan_with_a_tokenizer_and_without(run, tmp_path):
    # Flags of training in a file, as that of a training, have no effect.
    config = tmp_path / "config.toml"
    config.write_text('steps = 3\nnum_microbatches = 3\nremat = "full"\n')
    flags = [f"--logdir={run}", *PROMPT, "--format=json"]
    found = json.loads(program.done("decode", *flags, "--plain", f"--config={config}"))
    assert found["text"].startswith("the cat")
    values = json.loads((run / "config.json").read_text())
    tokens, log_probs = reference.greedy(values, small.tensors_of(values), [1, 2, 3], 5)
    assert found["tokens"] == tokens
    np.testing.assert_allclose(found["log_probs"], log_probs, rtol=0, atol=1e-4)
    ids = "--prompt=" + " ".join(map(str, [1, 2, 3, *tokens]))
    line = program.done("score", f"--logdir={run}", "--ids", ids, "--format=json", *SPLIT)
    scored = json.loads(line)
    assert scored["tokens"][2:7] == tokens
    np.testing.assert_allclose(scored["log_probs"][2:7], log_probs, rtol=0, atol=1e-4)
    os.rename(run / "tokenizer.json", run / "away.json")
    try:
        line = program.refused("decode", f"--logdir={run}", *PROMPT)
        assert "has neither tokenizer.json nor tokenizer.model; put that of the model" in line
        ids = ["--ids", "--prompt=1 2, 3", "--max_tokens=5", *SPLIT, "--lowering=simd"]
        said = program.done("decode", f"--checkpoint={run}/ckpt-0", *ids)
        assert said.split() == ["1", "2", "3", *map(str, found["tokens"])]
        line = program.refused("decode", f"--logdir={run}", "--ids", "--prompt=the cat")
        assert "with --ids a text is token ids, such as 12 7 30, but" in line
        line = program.refused(
            "decode", f"--logdir={run}", "--ids", "--prompt=1 99", "--max_tokens=2"
        )
        assert "has the token 99; ids are from 0 to 8" in line
    finally:
        os.rename(run / "away.json", run / "tokenizer.json")
    line = program.refused("decode", f"--logdir={run}", "--prompt=the cat", "--max_tokens=14")
    assert "has 3 tokens, with 14 more it exceeds the model's 16" in line
    words = ["score", f"--logdir={run}", "--prompt=the cat", "--dataset=Test"]
    ((_, _, err),) = program.without_tensorflow(words)
    assert err == "error: --dataset is for training; leave it out\n"
    line = program.refused("train", f"--logdir={run}")
    assert "there is no data to train on; give --train_data=FILE, or derive a class" in line


def test_a_model_is_exported_at_its_length_without_a_tokenizer(tmp_path):
    """Rows had 512 places at most, and a tokenizer was wanted that no SavedModel has."""
    values = small.GPT2 | {"n_positions": 520}
    small.write(tmp_path / "in", values, small.tensors_of(values))
    run = tmp_path / "run"
    transfer.import_weights(str(tmp_path / "in"), str(run))
    out = program.done("export", f"--logdir={run}", f"--to={tmp_path}/made/out")
    assert out.rstrip().endswith("signatures score and decode, 520 tokens a row")
    decode = tf.saved_model.load(f"{tmp_path}/made/out").signatures["decode"]
    tokens, _ = reference.greedy(values, small.tensors_of(values), [1, 2, 3], 5)
    got = decode(ids=tf.constant([[1, 2, 3]]), lengths=tf.constant([3]), max_tokens=tf.constant(5))
    assert got["tokens"].numpy().tolist() == [tokens]


def test_tokens_of_llama_are_those_of_its_formulas(tmp_path):
    tensors = small.tensors_of(small.LLAMA)
    small.write(tmp_path / "in", small.LLAMA, tensors)
    transfer.import_weights(str(tmp_path / "in"), str(tmp_path / "run"))
    prompt = ["--ids", "--prompt=3 9 1 20", "--max_tokens=8", "--format=json"]
    layout = f"{SPLIT[1]};kv_heads:model"
    found = json.loads(
        program.done("decode", f"--logdir={tmp_path}/run", *prompt, SPLIT[0], layout)
    )
    tokens, log_probs = reference.greedy(small.LLAMA, tensors, [3, 9, 1, 20], 8)
    assert found["tokens"] == tokens and len(set(tokens)) > 5
    np.testing.assert_allclose(found["log_probs"], log_probs, rtol=0, atol=1e-4)


@pytest.fixture
def begin(run, tmp_path, monkeypatch):
    """Imports weights for a class of one's own; returns the log directory."""

    def begin(name, *flags):
        code = f"import os; os.chdir({str(tmp_path)!r})\n{program.CODE}"
        monkeypatch.setattr(program, "CODE", code)
        monkeypatch.syspath_prepend(str(tmp_path))
        text, logdir = tmp_path / "text.txt", tmp_path / "own"
        text.write_text("the cat sat on a mat\na cat sat on the mat\n" * 30)
        content = TUNED.replace("Tuned", name).format(text=str(text))
        (tmp_path / f"{name.lower()}.py").write_text(content)
        enter = ["--from", f"{run.parent}/in", "--logdir", str(logdir)]
        enter += [f"--model={name.lower()}.{name}", *flags]
        assert main(["checkpoint", "import", *enter]) == 0
        return logdir

    return begin


def test_a_training_goes_on_with_them_and_says_text_too(begin, tmp_path):
    logdir = begin("Tuned")
    out = program.done("train", f"--logdir={logdir}", "--steps=40", *SPLIT)
    assert f"going on from {logdir}/ckpt-0" in out
    assert "changed since the checkpoint: mesh layers:2 -> layers:2;model:2" in out
    prefix = "changed since the checkpoint: "
    lines = [line for line in out.splitlines() if line.startswith(prefix)]
    changed = {line.removeprefix(prefix).split()[0] for line in lines}
    assert changed == {"mesh", "layout"}, "once, not by the stack's params as well"
    assert "the data is read from its beginning" in out
    said = program.done("decode", f"--logdir={logdir}", "--prompt=the cat sat", "--max_tokens=2")
    assert said.split()[:4] == ["the", "cat", "sat", "on"]
    assert main(["checkpoint", "export", str(logdir), str(tmp_path / "out")]) == 0
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_adapters_are_trained_decoded_and_exported(begin, run, tmp_path):
    # The first part of a tensor there has no adapter: the others were rounded like it.
    logdir = begin("Narrow", "--dtype=bfloat16")
    lora = ["--lora_rank=2", "--lora_targets=/w_[kv]", "--max_to_keep=1"]
    out = program.done("train", f"--logdir={logdir}", "--steps=20", *SPLIT, *lora)
    assert "--lora_rank" not in out
    assert out.count("changed since the checkpoint: ") == 2, "mesh and layout, not each adapter"
    out = program.done("train", f"--logdir={logdir}", "--steps=21")
    assert "--lora_rank=2 --lora_targets=/w_[kv]" in out
    assert f"going on from {logdir}/ckpt-20" in out and "changed since" not in out
    decode = ["decode", "--prompt=the cat sat", "--max_tokens=2", "--format=json"]
    said = json.loads(program.done(*decode, f"--logdir={logdir}", "--plain"))
    export = ["checkpoint", "export", str(logdir), str(tmp_path / "adapters")]
    assert main(export) == 0
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert main([*export[:-1], str(tmp_path / "merged"), "--merged"]) == 0
    transfer.import_weights(str(tmp_path / "merged"), str(tmp_path / "again"))
    again = json.loads(program.done(*decode, f"--logdir={tmp_path}/again"))
    assert again["tokens"] == said["tokens"]
    np.testing.assert_allclose(again["log_probs"], said["log_probs"], rtol=0, atol=1e-4)
    for command in (["train", "--steps=22"], ["evaluate"]):
        line = program.refused(*command, f"--logdir={logdir}", "--lora_rank=0")
        assert "ckpt-21 has adapters that the model has not, such as" in line
    line = program.refused("train", "--model=models.digits.params.DigitsPipelined", *lora[:1])
    assert line.endswith(
        "--lora_rank=2: models.digits.params.DigitsPipelined has no attribute LORA_RANK that would "
        "take it; leave it out"
    )
    with pytest.raises(CheckpointError, match=r"--merged: .* has no adapters to be merged; leave"):
        transfer.export_weights(f"{run}/ckpt-0", str(tmp_path / "out"), merged=True)
