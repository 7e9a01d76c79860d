"""The tokenizer beside weights."""

import io
import sys

import pytest
import sentencepiece

from models.pretrained import config, tokenizer
from models.pretrained.config import WeightsError
from tests.models.pretrained import small

MODEL = config.of_values(small.GPT2 | {"bos_token_id": 1})


def test_none_is_no_error(tmp_path):
    assert tokenizer.load(str(tmp_path), MODEL) is None


def test_a_tokenizer_of_json(tmp_path):
    small.write_tokenizer(tmp_path)
    found = tokenizer.load(str(tmp_path), MODEL)
    assert found.encode("the cat sat") == [1, 2, 3, 4]
    # What begins a text is no part of it.
    assert found.decode([1, 2, 3]) == "the cat"


def test_a_model_of_sentencepiece(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat", "a cat sat on the mat"] * 20),
        model_writer=model,
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / tokenizer.SENTENCEPIECE).write_bytes(model.getvalue())
    found = tokenizer.load(str(tmp_path), MODEL)
    ids = found.encode("the cat sat on a mat")
    assert ids[0] == 1 and len(ids) > 4
    # A table may have rows for which there is no piece.
    assert found.decode([*ids, 999]) == "the cat sat on a mat"


@pytest.mark.parametrize("name", [tokenizer.JSON, tokenizer.SENTENCEPIECE])
def test_what_is_none_is_told_in_a_line(tmp_path, name, monkeypatch):
    (tmp_path / name).write_text("no such thing")
    with pytest.raises(WeightsError, match=f"{name}' is no ") as error:
        tokenizer.load(str(tmp_path), MODEL)
    assert "\n" not in str(error.value)
    package = {tokenizer.JSON: "tokenizers", tokenizer.SENTENCEPIECE: "sentencepiece"}[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WeightsError, match=f"needs the package {package}, which is not installed"):
        tokenizer.load(str(tmp_path), MODEL)
