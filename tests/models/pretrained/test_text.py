"""Text as rows of tokens."""

import json

import pytest

from models.pretrained import text
from pipemesh.errors import DataError
from tests.models.pretrained import small


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small.GPT2))
    small.write_tokenizer(tmp_path)
    (tmp_path / "text").write_text("the cat sat on a mat\na cat sat on the mat\n")
    return tmp_path


def test_every_token_is_predicted_once(folder):
    # The mark of UTF-8 is no part of the text.
    (folder / "text").write_bytes(b"\xef\xbb\xbf" + (folder / "text").read_bytes())
    rows = text.rows_of(str(folder / "text"), str(folder), 5)
    tokens = [1, 2, 3, 4, 5, 7, 6, 7, 3, 4, 5, 2, 6]
    assert rows["ids"].shape == (3, 5)
    counted = rows["weights"].reshape(-1) > 0
    assert rows["ids"].reshape(-1)[counted].tolist() == tokens[:-1]
    assert rows["labels"].reshape(-1)[counted].tolist() == tokens[1:]
    # What is filled up belongs to no text.
    assert (rows["segment_ids"].reshape(-1) > 0).tolist() == counted.tolist()
    assert rows["segment_pos"].tolist() == [[0, 1, 2, 3, 4]] * 3


def test_an_epoch_has_every_row_once_in_an_order_of_the_seed(folder):
    path = str(folder / "text")

    def epochs(seed):
        found = text.train_dataset(path, str(folder), 4, 3, seed).take(8)
        return [tuple(map(tuple, batch["ids"].numpy())) for batch in found]

    found = epochs(0)
    assert all(len(set(batch)) == 3 for batch in found)
    assert len(set(found)) > 1 and found == epochs(0) != epochs(1)
    (batch,) = text.heldout_dataset(path, str(folder), 4, 9)
    assert set(map(tuple, batch["ids"].numpy())) == set(found[0])


def test_what_cannot_be_read_is_told(folder):
    def refused(path, told):
        with pytest.raises(DataError, match=told):
            text.rows_of(str(path), str(folder), 4)

    refused(folder / "gone", "gone' cannot be read")
    (folder / "short").write_text("")
    refused(folder / "short", "has 1 tokens; give a longer one")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    refused(folder / "bytes", "bytes' cannot be read")
    (folder / "tokenizer.json").unlink()
    refused(folder / "text", "has neither tokenizer.json nor tokenizer.model")
