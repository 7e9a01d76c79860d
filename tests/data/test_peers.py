"""Chats of `transformers` have the same tokens, and the same ones count."""

import json

import pytest
import tokenizers

from pipemesh.data import documents_of, parse_sources
from tests.data import templates
from tests.data.templates import CHAT

pytestmark = pytest.mark.slow

# Control tokens of all templates.
CONTROL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks \u00e9."}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer like those of the models, and their options."""
    folder = tmp_path_factory.mktemp("peer")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    texts = ["The cat sat on the mat.", "Which animal sat? Where is the assistant?"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    found.train_from_iterator(texts * 9, trainer)
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **templates.SPECIAL})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 999}))
    (folder / "chat.jsonl").write_text(json.dumps({"messages": CHAT, "tools": TOOLS}))
    return folder


@pytest.mark.parametrize("name", templates.ALL)
def test_tokens_of_chats_and_their_masks_are_theirs(folder, name):
    reason = "the package to compare with is not installed: pip install -e '.[dev,peers]'"
    transformers = pytest.importorskip("transformers", reason=reason)
    from models.pretrained.text import FolderSpelling

    (folder / "chat_template.jinja").write_text(templates.ALL[name])
    spelling, vocab_size = FolderSpelling(str(folder))()
    (source,) = parse_sources(str(folder / "chat.jsonl"))
    (document,) = documents_of(source, spelling, vocab_size)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    how = {"tools": TOOLS, "tokenize": True, "return_dict": True}
    wanted = theirs.apply_chat_template(CHAT, return_assistant_tokens_mask=True, **how)
    assert document.ids.tolist() == wanted["input_ids"]
    if "blocks" in name:
        assert document.weights.tolist() == wanted["assistant_masks"]
        return
    # Without blocks their prefixes say which tokens are the assistant's.
    mask = [0.0] * len(document.ids)
    for turn in (1, 3):
        begin = theirs.apply_chat_template(CHAT[:turn], add_generation_prompt=True, **how)
        end = theirs.apply_chat_template(CHAT[: turn + 1], **how)
        first, last = len(begin["input_ids"]), len(end["input_ids"])
        mask[first:last] = [1.0] * (last - first)
    assert document.weights.tolist() == mask and 0 < sum(mask) < len(mask) / 2
