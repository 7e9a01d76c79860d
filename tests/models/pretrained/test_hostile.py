"""Files that lie: each is one line, whatever is in them, and nothing is written."""

import json
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.pretrained import transfer
from models.pretrained.config import WeightsError
from models.pretrained.safetensors_file import INDEX, ONE
from pipemesh.commands import main as cli
from tests.models.pretrained import small

TENSORS = small.tensors_of(small.LLAMA)
NAMES = sorted(TENSORS)


def honest():
    """The header and the data of a small model."""
    header, data = {}, b""
    for name, value in TENSORS.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}
        data += value.tobytes()
    return header, data


def file_of(header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def changed(name, **entries):
    """The small model, with another entry for a tensor."""
    header, data = honest()
    header[name] = {**header[name], **entries}
    return file_of(header, data)


FIRST, *_, LAST = TENSORS
HEADER, DATA = honest()
TEXT = json.dumps(HEADER).encode()
BEGIN, END = HEADER[LAST]["data_offsets"]
ENTRY = json.dumps({FIRST: HEADER[FIRST]}).encode()[1:-1]
NO_FILE = "is no whole file of safetensors"
# Contents of a file, and the errors.
FILES = {
    "empty": (b"", NO_FILE),
    "without a header": (struct.pack("<Q", 0), NO_FILE),
    "cut short by a byte": (file_of(HEADER, DATA[:-1]), NO_FILE),
    "cut short in the header": (file_of(TEXT, DATA)[:100], NO_FILE),
    "longer than its tensors": (file_of(HEADER, DATA + b"more"), NO_FILE),
    "with a header of 2**63 bytes": (file_of(TEXT, DATA, 2**63), NO_FILE),
    "with a header of 2**64 - 1 bytes": (file_of(TEXT, DATA, 2**64 - 1), NO_FILE),
    "with a header beyond the file": (file_of(TEXT, b"", len(TEXT) + 1), NO_FILE),
    "with a header that is no UTF-8": (
        file_of(TEXT.replace(b"model.", b"\xff\xfe."), DATA),
        NO_FILE,
    ),
    "with a header that is no JSON": (file_of(b"x" * 80, DATA), NO_FILE),
    "with a header that is a list": (file_of(b"[]", DATA), NO_FILE),
    "with a header nested deeply": (file_of(b'{"a":' * 50_000, DATA), NO_FILE),
    "with metadata nested deeply": (
        file_of(b'{"__metadata__":' + b"[" * 50_000 + b"]" * 50_000 + b"," + TEXT[1:], DATA),
        NO_FILE,
    ),
    "with a tensor twice": (file_of(b"{" + ENTRY + b"," + TEXT[1:], DATA), f"'{FIRST}' twice"),
    "with a negative offset": (changed(LAST, data_offsets=[-1, END]), NO_FILE),
    "with a negative size": (changed(LAST, shape=[-16]), NO_FILE),
    "with an end before its begin": (changed(LAST, data_offsets=[END, BEGIN]), NO_FILE),
    "with offsets beyond the file": (
        changed(LAST, data_offsets=[BEGIN + 2**40, END + 2**40]),
        NO_FILE,
    ),
    "with offsets beyond 64 bits": (changed(LAST, data_offsets=[BEGIN, 2**70]), NO_FILE),
    "with a gap": (changed(LAST, data_offsets=[BEGIN + 4, END]), NO_FILE),
    "with tensors that overlap": (
        changed(LAST, data_offsets=HEADER[FIRST]["data_offsets"]),
        NO_FILE,
    ),
    "with sizes that overflow": (changed(LAST, shape=[2**62, 2**62]), NO_FILE),
    "with a size that is no whole number": (changed(LAST, shape=[1.5]), NO_FILE),
    "with a dtype that is none": (changed(LAST, dtype="F31"), NO_FILE),
    "with a dtype of the same size": (changed(LAST, dtype="I32"), "has numbers of I32"),
    "with a dtype of another size": (changed(LAST, dtype="F16"), NO_FILE),
    "with the same size, another shape": (
        changed(LAST, shape=[2, (END - BEGIN) // 8]),
        "has shape",
    ),
    "a pickle": (pickle.dumps({"a": 1}, 2), "is a file of torch: pickles may run code"),
    "a newer pickle": (pickle.dumps({"a": 1}, 5), "is a file of torch: pickles may run code"),
    "a pickle in an archive": (b"PK\x03\x04" + b"0" * 99, "is a file of torch: pickles may run"),
}


def refused(capsys, tmp_path, source, *more):
    """The one line that says why; nothing is written, also not into a folder that is there."""
    (tmp_path / "there").mkdir(exist_ok=True)
    lines = []
    for run in ("new", "there"):
        capsys.readouterr()
        words = ["import", "--from", str(source), "--logdir", str(tmp_path / run), *more]
        assert cli.main(["checkpoint", *words]) == 2
        out, err = capsys.readouterr()
        assert not out
        lines += err.splitlines()
    # The package that reads headers may name another fault the second time.
    assert [line[:7] for line in lines] == ["error: "] * 2
    assert not (tmp_path / "new").exists() and not list((tmp_path / "there").iterdir())
    return lines[0]


@pytest.fixture
def folder(tmp_path):
    return small.write(tmp_path / "in", small.LLAMA, TENSORS)


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_lies_is_refused(tmp_path, capsys, folder, case):
    content, told = FILES[case]
    (folder / ONE).write_bytes(content)
    assert told in refused(capsys, tmp_path, folder)


def test_a_header_in_another_order_is_the_same_model(tmp_path, folder):
    """Offsets count, not the order of names."""
    (folder / ONE).write_bytes(file_of(dict(reversed(HEADER.items())), DATA))
    transfer.import_weights(str(folder), str(tmp_path / "run"))
    transfer.export_weights(str(tmp_path / "run" / "ckpt-0"), str(tmp_path / "out"))
    with transfer.TensorFiles(str(tmp_path / "out" / ONE)) as files:
        for name, value in TENSORS.items():
            np.testing.assert_array_equal(files.read(name), value, err_msg=name)


def index_of(folder, places):
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder / INDEX


OUTSIDE = "which is outside of its folder"
# Names of the file of the last tensor in the index, and the errors.
PLACES = {
    "absolute": ("/etc/passwd", OUTSIDE),
    "above": (f"../in/{ONE}", OUTSIDE),
    "the folder": (".", OUTSIDE),
    "the folder above": ("..", OUTSIDE),
    "nothing": ("", OUTSIDE),
    "below": (f"deep/{ONE}", OUTSIDE),
    "above, as elsewhere": (f"..\\{ONE}", OUTSIDE),
    "with a zero": (f"{ONE}\0", OUTSIDE),
    "with half a character": ("\ud800", OUTSIDE),
    "too long": ("a" * 5000, "cannot be read"),
    "missing": ("model-00002-of-00002.safetensors", "cannot be read (No such file"),
    "a link out of the folder": ("link", OUTSIDE),
    "a pipe, which would wait for ever": ("pipe", "is no regular file"),
    "a file without the tensor": ("other", f"has no tensor '{LAST}'"),
    "a pickle": ("pickle", "is a file of torch"),
    "no text": (3, "cannot be read"),
}


@pytest.mark.parametrize("case", PLACES)
def test_an_index_that_lies_is_refused(tmp_path, capsys, folder, case):
    place, told = PLACES[case]
    (tmp_path / "outside").write_bytes((folder / ONE).read_bytes())
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    other = {FIRST: HEADER[FIRST]}
    (folder / "other").write_bytes(file_of(other, DATA[: HEADER[FIRST]["data_offsets"][1]]))
    (folder / "pickle").write_bytes(pickle.dumps({}, 4))
    path = index_of(folder, {name: ONE for name in NAMES} | {LAST: place})
    assert told in refused(capsys, tmp_path, path)


def test_an_index_with_a_name_twice_is_refused(tmp_path, capsys, folder):
    text = json.dumps({"weight_map": {name: ONE for name in NAMES}})
    (folder / INDEX).write_text(text.replace(': {"', f': {{"{FIRST}": "x", "'))
    assert f"has '{FIRST}' twice" in refused(capsys, tmp_path, folder / INDEX)


CONFIGS = {
    "more layers than tensors": ({"num_hidden_layers": 2**31 - 1}, "2,147,483,647 layers, but "),
    "fewer layers": ({"num_hidden_layers": 1}, "tensors that the model of config.json"),
    "no whole number of layers": ({"num_hidden_layers": 2.5}, "is a whole number from 1 to"),
    "sizes that overflow": ({"intermediate_size": 2**70}, "is a whole number from 1 to"),
    "sizes whose product overflows": (
        {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2**30},
        "has shape",
    ),
    "another vocabulary": ({"vocab_size": 25}, "has shape [24, 16], but that of config.json"),
    "heads that do not divide": ({"num_attention_heads": 3}, "does not divide"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size is 0; it is a whole number from 1 to"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it is a whole number"),
    "no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it is above 0"),
    "one table": ({"tie_word_embeddings": True}, "is not 'model.embed_tokens.weight', but by"),
    "code": ({"auto_map": {"AutoModel": "x.py"}}, "auto_map is"),
    "another type": ({"model_type": "lama"}, "model_type is 'lama'; did you mean 'llama'?"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_lies_is_refused(tmp_path, capsys, folder, case):
    values, told = CONFIGS[case]
    (folder / "config.json").write_text(json.dumps(small.LLAMA | values))
    assert told in refused(capsys, tmp_path, folder)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{}", b"[" * 99_999, b'{"a":' + b"9" * 5000])
def test_a_config_that_is_no_json_is_refused(tmp_path, capsys, folder, content):
    (folder / "config.json").write_bytes(content)
    assert "JSON" in refused(capsys, tmp_path, folder)


@pytest.mark.parametrize("name", [ONE, INDEX, "config.json", "tokenizer.json", "merges.txt"])
def test_a_file_that_is_no_regular_one_is_refused(tmp_path, capsys, folder, name):
    """Import waited for a pipe for ever, and read a device without end."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(os.devnull)
    source = folder / name if name == INDEX else folder
    assert f"{name}' is no regular file" in refused(capsys, tmp_path, source)


def test_a_file_that_becomes_shorter_is_told(tmp_path, folder):
    """A mapped file would end the process."""
    with transfer.TensorFiles(str(folder / ONE)) as files:
        os.truncate(folder / ONE, 2000)
        with pytest.raises(WeightsError, match="is cut short: the file became shorter while"):
            files.read(LAST)


PIECES = st.one_of(
    st.binary(max_size=9),
    st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number)),
    st.sampled_from([b'"', b"}", b"[", b"0", b"-1", b"F16", b"null", b"1e999", b"\0" * 8, b"PK"]),
)


@given(
    which=st.sampled_from([ONE, INDEX, "config.json"]),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), PIECES), min_size=1, max_size=3),
    cut=st.none() | st.floats(0, 1),
)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_bytes_end_in_one_error_or_none(tmp_path, folder, which, edits, cut):
    """Replaces, inserts and removes some bytes of a file, and cuts it: an import takes it, or
    raises WeightsError and leaves nothing.
    """
    index_of(folder, {name: ONE for name in NAMES})
    small.write(folder, small.LLAMA, TENSORS)
    content = (folder / which).read_bytes()
    for at, number, piece in edits:
        # Most in the header, where they matter.
        begin = int(at**4 * len(content))
        content = content[:begin] + piece + content[begin + number :]
    (folder / which).write_bytes(content if cut is None else content[: int(cut * len(content))])
    run, source = tmp_path / "run", folder / (INDEX if which == INDEX else ONE)
    try:
        transfer.import_weights(str(source), str(run))
    except WeightsError as error:
        assert "\n" not in str(error)
        assert not run.exists()
    else:
        transfer.shutil.rmtree(run)
