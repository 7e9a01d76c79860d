"""The tokenizer beside weights, and text as rows of tokens."""

import io
import json
import sys

import pytest
import sentencepiece
import tokenizers

from models.pretrained import config, text, tokenizer
from models.pretrained.config import WeightsError
from pipemesh.errors import DataError
from tests.models.pretrained import small

MODEL = config.of_values(small.GPT2 | {"bos_token_id": 1})


def test_a_tokenizer_of_json(tmp_path):
    assert tokenizer.load(str(tmp_path), MODEL) is None
    small.write_tokenizer(tmp_path)
    found = tokenizer.load(str(tmp_path), MODEL)
    assert found.encode("the cat sat") == [1, 2, 3, 4]
    # What begins a text is no part of it.
    assert found.decode([1, 2, 3]) == "the cat"


def test_settings_of_an_earlier_training_change_no_ids(tmp_path):
    """A text of 7,142 tokens became one of 8, and generation went on behind the padding."""
    small.write_tokenizer(tmp_path)
    path = str(tmp_path / tokenizer.JSON)
    words = tokenizers.Tokenizer.from_file(path)
    words.enable_truncation(3)
    words.enable_padding(length=32)
    words.save(path)
    assert tokenizer.load(str(tmp_path), MODEL).encode("the cat sat on") == [1, 2, 3, 4, 5]


def test_tokens_that_were_added_have_the_ids_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    small.write_tokenizer(tmp_path)
    number = len(small.WORDS)
    options, added = tmp_path / tokenizer.OPTIONS, tmp_path / tokenizer.ADDED
    text = "the <|im|> cat[PAD] sat </s>on"
    for values, more in (
        ({}, {}),
        ({"added_tokens_decoder": {str(number): {"content": "<|im|>", "special": True}}}, {}),
        (
            {
                "pad_token": "[PAD]",
                "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True},
            },
            {},
        ),
        ({"pad_token": "[PAD]"}, {"<|im|>": number}),
        ({"additional_special_tokens": ["<|im|>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<|im|>"}}, {}),
    ):
        options.write_text(json.dumps(values | {"tokenizer_class": "PreTrainedTokenizerFast"}))
        added.write_text(json.dumps(more))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        ours = tokenizer.load(str(tmp_path), MODEL)
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], values
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), values
    (tmp_path / tokenizer.SPECIAL).write_text('{"sep_token": "<|im|>"}')
    options.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.load(str(tmp_path), MODEL).encode(text) == theirs(text)["input_ids"]
    added.write_text(json.dumps({"<|im|>": 20}))
    with pytest.raises(
        WeightsError, match=r"token '<\|im\|>', id 20, has the id 8 in .*save it with"
    ):
        tokenizer.load(str(tmp_path), MODEL)
    options.write_text('{"added_tokens_decoder": {"x": 3}}')
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: a token is malformed"):
        tokenizer.load(str(tmp_path), MODEL)


def test_a_token_that_the_model_lacks_is_named(tmp_path):
    """Somebody who gave text was told of an id."""
    small.write_tokenizer(tmp_path)
    found = tokenizer.load(str(tmp_path), config.of_values(small.GPT2 | {"vocab_size": 4}))
    (note,) = found.notes
    assert "has 8 tokens, but the model has 4: texts that have one of the others are ref" in note
    assert found.encode("the cat") == [1, 2, 3]
    with pytest.raises(
        WeightsError, match=r"a text has the token 6 \('mat'\), but the model has the ids 0 to 3"
    ):
        found.encode("the mat")
    assert tokenizer.load(str(tmp_path), MODEL).notes == ()


def write_sentencepiece(folder):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat", "a cat sat on the mat"] * 20),
        model_writer=model,
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / tokenizer.SENTENCEPIECE).write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_control_tokens_in_texts_of_sentencepiece(tmp_path):
    """They were spelled letter by letter; options that change ids were not read."""
    pieces = write_sentencepiece(tmp_path)
    cat, size = pieces.encode("cat"), pieces.get_piece_size()
    bare = cat[1:] if pieces.id_to_piece(cat[0]) == "\u2581" else None
    assert bare is not None, "a piece of its own for the space in front"

    def encoded(text, **options):
        (tmp_path / tokenizer.OPTIONS).write_text(json.dumps(options))
        return tokenizer.load(str(tmp_path), MODEL).encode(text)

    text = "<s>cat</s>"
    assert encoded(text) == encoded(text, legacy=True) == [1, 1, *cat, 2]
    assert encoded(text, legacy=False) == [1, 1, *bare, 2]
    assert encoded("cat", legacy=False) == [1, *cat]
    assert encoded("cat", add_prefix_space=False) == [1, *bare]
    assert encoded("cat", add_bos_token=False, add_eos_token=True) == [*cat, 2]
    added = {str(size): {"content": "<|im|>", "special": False}}
    assert encoded("cat<|im|>", added_tokens_decoder=added) == [1, *cat, size]
    found = tokenizer.load(str(tmp_path), MODEL)
    assert found.decode([1, *cat, size, *cat, 2]) == "cat<|im|>cat" and not found.notes
    (tmp_path / tokenizer.ADDED).write_text(json.dumps({"<|im|>": 5}))
    with pytest.raises(WeightsError, match=r"id 5, is .* in .*tokenizer\.model; save it"):
        encoded("cat")
    with pytest.raises(WeightsError, match="add_bos_token is 1; it is true or false"):
        encoded("cat", add_bos_token=1, added_tokens_decoder={})


def test_a_model_of_sentencepiece(tmp_path):
    write_sentencepiece(tmp_path)
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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small.GPT2))
    small.write_tokenizer(tmp_path)
    (tmp_path / "text").write_text("the cat sat on a mat\na cat sat on the mat\n")
    return tmp_path


def test_rows_begin_anew_only_for_what_a_tokenizer_takes_from_the_configuration(folder):
    digests = []
    for changes in ({}, {"resid_pdrop": 0.5}, {"eos_token_id": 3}, {"vocab_size": 9}):
        (folder / "config.json").write_text(json.dumps(small.GPT2 | changes))
        digests.append(str(text.FolderSpelling(str(folder)).digests))
    assert digests[0] == digests[1] and len(set(digests)) == 3


def rows_of(folder, length):
    (batch,) = text.batches_of(str(folder / "text"), str(folder), length, 9)()
    return {name: value.numpy() for name, value in batch.items()}


def test_every_token_is_predicted_once(folder):
    # The mark of UTF-8 is no part of the text.
    (folder / "text").write_bytes(b"\xef\xbb\xbf" + (folder / "text").read_bytes())
    rows = rows_of(folder, 5)
    tokens = [1, 2, 3, 4, 5, 7, 6, 7, 3, 4, 5, 2, 6]
    assert rows["ids"].shape == (3, 5)
    counted = rows["weights"].reshape(-1) > 0
    assert rows["ids"].reshape(-1)[counted].tolist() == tokens[:-1]
    assert rows["labels"].reshape(-1)[counted].tolist() == tokens[1:]
    # What is filled up belongs to no text.
    assert (rows["segment_ids"].reshape(-1) > 0).tolist() == counted.tolist()
    assert rows["segment_pos"].tolist() == [[0, 1, 2, 3, 4]] * 2 + [[0, 1, 0, 0, 0]]


def test_an_epoch_has_every_row_once_in_an_order_of_the_seed(folder):
    def epochs(seed):
        found = text.batches_of(str(folder / "text"), str(folder), 4, 3, seed=seed)().take(8)
        return [tuple(map(tuple, batch["ids"].numpy())) for batch in found]

    found = epochs(0)
    assert all(len(set(batch)) == 3 for batch in found)
    assert len(set(found)) > 1 and found == epochs(0) != epochs(1)
    assert set(map(tuple, rows_of(folder, 4)["ids"])) == set(found[0])


def test_what_cannot_be_read_is_told(folder):
    def refused(path, told):
        with pytest.raises(DataError, match=told):
            text.batches_of(str(path), str(folder), 4, 2)()

    refused(folder / "gone", "gone' cannot be read")
    (folder / "short").write_text("")
    refused(folder / "short", "has no document with a token to predict in rows of 4 tokens")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    refused(folder / "bytes", "bytes' cannot be read")
    (folder / "tokenizer.json").unlink()
    (folder / "text").write_text("the cat")
    refused(folder / "text", "there is no tokenizer; put tokenizer.json or tokenizer.model")
