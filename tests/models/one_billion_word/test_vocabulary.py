"""Pieces spell every text exactly, and are learned once."""

import dataclasses
import io
import os
import re

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.one_billion_word import vocabulary as vocabulary_module
from models.one_billion_word.corpus import SPACE_MARK, Sentences, TextFiles
from models.one_billion_word.vocabulary import (
    Vocabulary,
    VocabularyError,
    load_vocabulary,
    train_vocabulary,
)
from tests.checkpoint.made import flipped

TEXT = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters=SPACE_MARK), min_size=1
)


@settings(deadline=None, max_examples=200)
@given(TEXT)
@example("The quick brown fox.")
@example("  two  spaces  ")
@example("e\u0301 \u00c5 \ufb01 \u2126 are not normalized")
@example("\x00 tab\t\u3000\u00a0 <s> </s> <unk> <0x41> \U0001f600")
def test_pieces_count_and_spell_every_text_exactly(vocabulary, text):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    with_eos = [*ids, vocabulary.eos_id]
    assert vocabulary.piece_bytes[with_eos].sum() == len(text.encode()) + 1
    assert vocabulary.piece_words[with_eos].sum() == len(text.split(" ")) + 1
    assert not {vocabulary.bos_id, vocabulary.eos_id} & set(ids)


def test_tables(vocabulary):
    assert vocabulary.size == 600
    for table in (vocabulary.piece_bytes, vocabulary.piece_words):
        assert table.shape == (600,) and table.dtype == np.int32
    assert vocabulary.piece_bytes[vocabulary.eos_id] == 0, "the front mark counts the newline"
    assert vocabulary.piece_words[vocabulary.eos_id] == 1
    assert vocabulary.piece_bytes[vocabulary.bos_id] == 0
    assert vocabulary.piece_words[vocabulary.bos_id] == 0
    the = vocabulary.encode("the")
    assert vocabulary._processor.id_to_piece(the) == [SPACE_MARK + "the"]
    assert vocabulary.piece_bytes[the] == [4] and vocabulary.piece_words[the] == [1]


def test_unseen_characters_fall_back_to_bytes(vocabulary):
    ids = vocabulary.encode("\U0001f600")
    assert vocabulary._processor.id_to_piece(ids)[-4:] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert vocabulary.decode(ids[:-1]) != "", "half a character is shown somehow"


def test_the_same_text_gives_the_same_pieces(corpus, vocabulary):
    assert train_vocabulary(corpus.train, 600).model == vocabulary.model


def test_it_is_learned_once(corpus, tmp_path, monkeypatch):
    cache_dir = str(tmp_path / "made" / "on the way")
    learned = load_vocabulary(corpus, 400, cache_dir)
    (name,) = os.listdir(cache_dir)
    assert re.fullmatch(r"vocab-400-[0-9a-f]{12}-[0-9a-f]{12}\.model", name)
    monkeypatch.setattr(vocabulary_module, "train_vocabulary", None)
    assert load_vocabulary(corpus, 400, cache_dir).model == learned.model
    monkeypatch.undo()
    other = dataclasses.replace(corpus, train=Sentences(corpus.train.lines[:1000]))
    load_vocabulary(other, 400, cache_dir)
    assert len(os.listdir(cache_dir)) == 2


def test_the_cache_folder_may_be_the_current_one(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_vocabulary(corpus, 400, "").size == 400


def test_a_kill_leaves_no_half_file(corpus, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        load_vocabulary(corpus, 400, str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_no_flipped_bit_of_the_file_passes(corpus, tmp_path):
    """Of 300 flipped bits 133 gave another vocabulary once, without a word."""
    load_vocabulary(corpus, 400, str(tmp_path))
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for bad in (*flipped(good, 300), good[: len(good) // 2]):
        path.write_bytes(bad)
        with pytest.raises(VocabularyError, match=r"vocab-400-.*\.model' is damaged: .* delete it"):
            load_vocabulary(corpus, 400, str(tmp_path))
    path.write_bytes(good)
    assert load_vocabulary(corpus, 400, str(tmp_path)).model == good


@pytest.mark.parametrize("gap", [" ", ""])
def test_a_line_of_many_thousand_characters_is_learned_from(corpus, gap):
    """SentencePiece skips long lines, and of a text of nothing else it said nothing of use."""
    line = gap.join(corpus.train.lines[:500]).replace(" ", gap)
    line = (line * (200_000 // len(line) + 1))[:200_000]
    learned = train_vocabulary(Sentences((line,)), 400)
    assert learned.size == 400
    assert learned.decode(learned.encode(line[:9999])) == line[:9999]


def test_a_sample_is_limited_by_characters_too(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"{name * 9}\n" * 9)
    files = TextFiles(tuple(str(tmp_path / name) for name in "ab"))
    assert list(files.sample(99, 24)) == ["a" * 9, "a" * 3, "b" * 9, "b" * 3]
    assert list(Sentences(("abc", "def")).sample(99, 3)) == ["abc"]


def test_a_model_without_bos_and_eos_is_refused(corpus):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.train),
        model_writer=model,
        vocab_size=400,
        bos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(VocabularyError, match="no BOS or no EOS"):
        Vocabulary(model.getvalue())


def test_the_sizes_that_the_errors_name_work(corpus):
    with pytest.raises(VocabularyError, match=r"--vocab_size=50000 is too large") as error:
        train_vocabulary(corpus.train, 50000)
    largest = int(re.search(r"at most (\d+) pieces", str(error.value))[1])
    assert train_vocabulary(corpus.train, largest).size == largest
    with pytest.raises(VocabularyError, match=rf"at most {largest} pieces"):
        train_vocabulary(corpus.train, largest + 1)

    with pytest.raises(VocabularyError, match=r"--vocab_size=280 is too small") as error:
        train_vocabulary(corpus.train, 280)
    smallest = int(re.search(r"at least (\d+) pieces", str(error.value))[1])
    assert train_vocabulary(corpus.train, smallest).size == smallest


@pytest.mark.parametrize("size", [-5, 0, 1, 2, 3, 10])
def test_a_size_that_is_much_too_small(corpus, size):
    with pytest.raises(VocabularyError, match=rf"--vocab_size={size} is too small.*at least \d+"):
        train_vocabulary(corpus.train, size)


def test_text_that_supports_no_vocabulary():
    with pytest.raises(VocabularyError, match=r"--vocab_size=300: no vocabulary can be learned"):
        train_vocabulary(Sentences(()), 300)


def test_sentencepiece_is_quiet(corpus, capfd):
    train_vocabulary(corpus.train, 400).encode("a")
    with pytest.raises(VocabularyError):
        train_vocabulary(corpus.train, 10)
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_written_is_told_by_name(corpus, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    match = (
        r"cannot be written to '.*/file/below/vocab-400-.*\.model' \(Not a directory\); make room"
    )
    with pytest.raises(VocabularyError, match=match):
        load_vocabulary(corpus, 400, str(tmp_path / "file" / "below"))
