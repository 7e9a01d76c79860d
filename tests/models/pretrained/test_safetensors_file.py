"""Files of safetensors: whole, in parts, and not what they ought to be."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.pretrained.config import WeightsError
from models.pretrained.safetensors_file import INDEX, ONE, TensorFiles, find, write
from pipemesh.errors import SaveError

NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def path(tmp_path):
    low = NUMBERS.astype(ml_dtypes.bfloat16)
    save_file({"a": NUMBERS, "low": low, "whole": NUMBERS.astype(np.int32)}, tmp_path / ONE)
    return tmp_path / ONE


def test_tensors_are_read_part_by_part_in_their_dtype(path):
    with TensorFiles(find(str(path.parent))) as files:
        assert files.names == ["a", "low", "whole"]
        np.testing.assert_array_equal(files.read("a", (slice(None), slice(1, 3))), NUMBERS[:, 1:3])
        assert files.read("low").dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(files.read("low").astype(np.float32), NUMBERS)
        files.check("low", [3, 4])
        with pytest.raises(WeightsError, match=r"'a' has shape \[3, 4\], but .* has \[4, 3\]"):
            files.check("a", [4, 3])
        with pytest.raises(WeightsError, match="'whole' has numbers of I32; weights may be of F64"):
            files.check("whole", [3, 4])


@pytest.mark.parametrize("left", [0, 4, 30, -1])
def test_a_file_that_was_cut_short_is_told_so(path, left):
    path.write_bytes(path.read_bytes()[:left])
    size = path.stat().st_size
    told = rf"model.safetensors' \({size} bytes\) is no whole file of safetensors .*cut short"
    with pytest.raises(WeightsError, match=told):
        TensorFiles(str(path))


def test_what_is_no_such_file_is_told(tmp_path, path):
    with pytest.raises(WeightsError, match="gone' cannot be read"):
        TensorFiles(str(tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=f"has neither {ONE} nor {INDEX}; give the path"):
        find(str(tmp_path / "empty"))
    with pytest.raises(WeightsError, match="--from='/nonexist' does not exist; give a file of"):
        find("/nonexist")
    with pytest.raises(WeightsError, match="is a folder; give the path of a file"):
        TensorFiles(str(tmp_path / "empty"))


def test_pickles_are_named_with_how_to_convert_them(tmp_path):
    """They were said to be cut short."""
    path = tmp_path / "pytorch_model.bin"
    for content in (b"PK\x03\x04" * 99, b"\x80\x02}q\x00."):
        path.write_bytes(content)
        with pytest.raises(
            WeightsError, match=r"is a file of torch: pickles may run code .*conver"
        ):
            TensorFiles(str(path))
    with pytest.raises(WeightsError, match=r"it has pytorch_model\.bin: pickles .*save_pretr"):
        find(str(tmp_path))


def test_of_a_folder_with_both_the_single_file_counts(tmp_path):
    """As with `transformers`: the index may be of an older model."""
    written(tmp_path, 1)
    save_file({"a": NUMBERS}, tmp_path / ONE)
    assert find(str(tmp_path)) == str(tmp_path / ONE)


def written(folder, most):
    tensors = {f"t{i}": NUMBERS + i for i in range(5)}
    entries = [(name, value.nbytes, lambda value=value: value) for name, value in tensors.items()]
    return tensors, write(str(folder), entries, most)


@pytest.mark.parametrize(("most", "number"), [(10_000, 1), (2 * NUMBERS.nbytes, 4), (1, 6)])
def test_what_is_written_is_read_in_one_file_or_in_several(tmp_path, most, number):
    tensors, paths = written(tmp_path, most)
    assert len(paths) == number
    assert sorted(tmp_path.iterdir()) == sorted(map(type(tmp_path), paths))
    # As others are: folders of models are shared.
    (tmp_path / "other").touch()
    assert {each.stat().st_mode for each in tmp_path.iterdir()} == {
        (tmp_path / "other").stat().st_mode
    }
    with TensorFiles(find(str(tmp_path))) as files:
        assert files.names == sorted(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(files.read(name), value)


def test_an_index_without_what_it_names_is_told(tmp_path):
    written(tmp_path, 1)
    path = tmp_path / INDEX
    good = json.loads(path.read_text())

    def refused(told):
        with pytest.raises(WeightsError, match=told):
            TensorFiles(str(path))

    good["weight_map"]["more"] = "model-00001-of-00005.safetensors"
    path.write_text(json.dumps(good))
    refused("model-00001-of-00005.safetensors' has no tensor 'more', which .* says is in it")
    del good["weight_map"]["more"]
    path.write_text(json.dumps(good))
    (tmp_path / "model-00003-of-00005.safetensors").unlink()
    refused("model-00003-of-00005.safetensors' cannot be read")
    for content in ("{}", '{"weight_map": 3}'):
        path.write_text(content)
        refused("is no index of safetensors")
    for content in ("[]", "no json", "[" * 100_000):
        path.write_text(content)
        refused(f"{INDEX}' .* JSON")
    path.unlink()
    refused("cannot be read")


def test_an_index_opens_no_file_outside_of_its_folder(tmp_path, path):
    other = tmp_path / "in" / "deep"
    other.mkdir(parents=True)
    places = ("../../" + ONE, f"deep/../../../{ONE}", "..\\\\" + ONE, str(path))
    for place in places:
        (other / INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
        with pytest.raises(WeightsError, match="which is outside of its folder; put all files"):
            TensorFiles(str(other / INDEX))
    # Folders of downloads have links, which those who downloaded have made.
    (other / "part.safetensors").symlink_to(path)
    (other / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with TensorFiles(str(other / INDEX)) as files:
        np.testing.assert_array_equal(files.read("a"), NUMBERS)


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / ONE).mkdir()
    with pytest.raises(SaveError, match="cannot be written"):
        written(tmp_path, 10_000)
    assert [each.name for each in tmp_path.iterdir()] == [ONE]

    def broken():
        raise SaveError("the last one cannot be written")

    (tmp_path / "out").mkdir()
    tensors = [("a", 48, lambda: NUMBERS), ("b", 48, broken)]
    with pytest.raises(SaveError, match="the last one"):
        write(str(tmp_path / "out"), tensors, 1)
    assert not list((tmp_path / "out").iterdir())
