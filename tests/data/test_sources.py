"""Sources: lists of them, and files in every format."""

import gzip
import json
import os
import sys

import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from backports import zstd
from pyarrow import parquet

from pipemesh.data import Document, documents_of, parse_sources, write_tokens
from pipemesh.data.sources import digest_of, rows_of
from pipemesh.errors import DataError, MissingPackageError

TEXTS = ["the cat", "sat on \u2713", "a mat"]
LINES = "".join(f"{json.dumps({'text': text, 'id': 7})}\n\n" for text in TEXTS).encode()
TABLE = {
    "text": TEXTS,
    "messages": [None, None, None],
    "id": [1, 2, 3],
}


def rows(path):
    (source,) = parse_sources(str(path))
    return [row for _, row in rows_of(source)]


def test_all_formats_of_texts_give_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "a.ndjson.zst").write_bytes(zstd.compress(LINES))
    parquet.write_table(pyarrow.table(TABLE), tmp_path / "a.parquet", row_group_size=2)
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord-00000-of-00001")) as writer:
        for text in TEXTS:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
            features = tf.train.Features(feature={"text": feature})
            writer.write(tf.train.Example(features=features).SerializeToString())
    for path in tmp_path.iterdir():
        assert rows(path) == [{"text": text} for text in TEXTS], path.name
    (tmp_path / "b.txt").write_text("two\nlines\n")
    assert rows(tmp_path / "b.txt") == [{"text": "two\nlines\n"}]


def test_a_table_renames_fields_and_shards_are_one_source(tmp_path):
    for number, text in enumerate(TEXTS):
        row = json.dumps({"question": text, "answer": "x", "text": "not this"})
        (tmp_path / f"a-{number}.data").write_text(row)
    (tmp_path / "mix.toml").write_text(
        '[[source]]\npath = "a-*.data"\nformat = "jsonl"\n'
        'fields = {prompt = "question", completion = "answer", text = "none"}\n'
    )
    found = rows(tmp_path / "mix.toml")
    assert found == [{"prompt": text, "completion": "x"} for text in TEXTS]


@pytest.mark.parametrize("ending", ["tfrecord", "array_record"])
def test_ready_tokens_are_read_as_they_were_written(tmp_path, ending):
    documents = [
        Document(np.array([5, 6, 2**31 - 1]), None),
        Document(np.array([7, 8]), np.array([0, 0.25], np.float32)),
        Document(np.array([], np.int32), None),
    ] * 700
    path = tmp_path / f"a.{ending}"
    assert write_tokens(str(path), documents) == 2100
    (source,) = parse_sources(str(path))
    found = list(documents_of(source, None, 2**31))
    for one, other in zip(documents, found, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        if one.weights is not None:
            assert one.weights.tolist() == other.weights.tolist()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_tokens_are_not_written_in_part(tmp_path):
    def documents():
        yield Document(np.array([1]), None)
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        write_tokens(str(tmp_path / "a.tfrecord"), documents())
    with pytest.raises(DataError, match=r"must have the ending \.tfrecord or \.array_record"):
        write_tokens(str(tmp_path / "a.jsonl"), documents())
    with pytest.raises(DataError, match=r"gone/a\.tfrecord' cannot be written"):
        write_tokens(str(tmp_path / "gone" / "a.tfrecord"), documents())
    assert not list(tmp_path.iterdir())


def test_a_list_has_weights():
    found = parse_sources("a-*.jsonl*0.7, b.parquet*3e-1,tfds:c:1.0.0/train,d*2.txt")
    assert [(each.path, each.weight) for each in found] == [
        ("a-*.jsonl", 0.7),
        ("b.parquet", 0.3),
        ("tfds:c:1.0.0/train", 1),
        ("d*2.txt", 1),
    ]


@pytest.mark.parametrize(
    "text, told",
    [
        ("a.jsonl,,b", "has a source without a path; write PATH or PATH"),
        ("a.jsonl*0", r"the weight of 'a\.jsonl' is 0\.0; it must be a finite number above 0"),
        ("a.jsonl*-1", "must be a finite number above 0"),
        ("a.jsonl*1e999", "must be a finite number above 0"),
        ("a.jsonl*2,a.jsonl", "has the source 'a.jsonl' twice; add up the weights"),
        ("gone.toml", r"'gone\.toml' cannot be read"),
        ("[source", "is no TOML"),
        ("source = 3", r"must have tables \[\[source\]\] and nothing else"),
        ("source = []", r"must have tables \[\[source\]\] and nothing else"),
        ("source = ['a']", r"must have tables \[\[source\]\] and nothing else"),
        ("[[source]]\npath='a'\nwieght=2", "a source has no 'wieght'.*weight"),
        ("[[source]]\nweight=2", "has a source without a path"),
        ("[[source]]\npath='a'\nweight=true", "the weight of '.*a' is True"),
        ("[[source]]\npath='a'\ndate=3", "date of '.*a' is 3; it must be a text"),
        ("[[source]]\npath='a'\nformat='jsnl'", "has the format 'jsnl'.*jsonl"),
        ("[[source]]\npath='a'\nfields={txet='b'}", "has no field 'txet'.*text"),
        ("[[source]]\npath='a'\nfields={text=3}", "fields of '.*a' must be a table of names"),
    ],
)
def test_wrong_lists_are_refused(tmp_path, text, told):
    if "\n" in text or text.startswith(("[", "source")):
        (tmp_path / "mix.toml").write_text(text)
        text = str(tmp_path / "mix.toml")
    with pytest.raises(DataError, match=told) as error:
        parse_sources(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("a.csv", b"", r"has the ending '\.csv'; known are \.array_record, .*\.txt\. Rename it"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl', line 2 is no JSON \(Expecting val"),
        ("a.jsonl", b'{"text": "a"}\n["a"]', "line 2 is a list; each line must be an object of J"),
        ("a.jsonl", b'\n{"text": "\xff"}', "line 2 is no JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is no JSON"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "is a damaged gzip archive"),
        ("a.txt", b"\xff\xfe\x00", r"a\.txt' cannot be read .*text must be UTF-8"),
        ("a.parquet", b"PAR1 and no more", "is no whole parquet file"),
        ("a.tfrecord", b"no such thing at all", "is no whole file of TFRecord"),
        ("a.array_record", b"no such thing at all", "is no whole array_record"),
        ("gone.jsonl", None, r"gone\.jsonl' cannot be read \(No such file or directory\)"),
        ("gone-*.jsonl", None, "matches no file; give the path of a file with documents"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told) as error:
        rows(tmp_path / name)
    assert "\n" not in str(error.value)


def test_folders_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl' is no file; give the path of a file"):
        rows(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"is a folder; give .* a pattern such as '.*\*\.jsonl'"):
        rows(tmp_path)


def test_nulls_of_structs_are_absent_keys(tmp_path):
    """A column of structs has each key that any of its rows has."""
    call = {"name": "look", "arguments": {"at": "a"}, "ids": [1, None]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call, {"name": "end", "arguments": {"why": "b"}}]},
    ]
    table = pyarrow.table({"messages": [messages], "tools": [[{"a": {"b": 1}}, {"a": {"c": 2}}]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    tools = [{"a": {"b": 1}}, {"a": {"c": 2}}]
    assert rows(tmp_path / "a.parquet") == [{"messages": messages, "tools": tools}]


def test_fields_that_nobody_asked_for_are_not_decoded(tmp_path):
    features = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        for name, value in (("text", b"a"), ("picture", b"\xff\xfe"))
    }
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        example = tf.train.Example(features=tf.train.Features(feature=features))
        writer.write(example.SerializeToString())
    assert rows(tmp_path / "a.tfrecord") == [{"text": "a"}]
    table = '[[source]]\npath = "a.tfrecord"\nfields = {text = "%s"}'
    for name, told in (("picture", "has a text that is not UTF-8"), ("b", "but picture, text;")):
        (tmp_path / "mix.toml").write_text(table % name)
        with pytest.raises(DataError, match=told):
            rows(tmp_path / "mix.toml")


def test_a_record_that_is_no_example_is_refused(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(b"\xff\xff")
    with pytest.raises(DataError, match=r"a\.tfrecord', record 1 is no tf\.train\.Example"):
        rows(tmp_path / "a.tfrecord")


@pytest.mark.parametrize(
    "name, package",
    [
        ("a.parquet", "pyarrow"),
        ("a.array_record", "array_record"),
        ("a.jsonl", "backports.zstd"),
        ("tfds:a/train", "tensorflow_datasets"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    if ":" not in name:
        (tmp_path / name).write_bytes(zstd.compress(b""))
        name = tmp_path / name
    for module in [each for each in sys.modules if each.startswith(package)]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"needs {package}, which .*'\.\[data\]'"):
        rows(name)


@pytest.mark.slow
def test_datasets_on_disk_are_read_by_name(tmp_path):
    import tensorflow_datasets as tfds

    message = {"role": tfds.features.Text(), "content": tfds.features.Text()}
    features = tfds.features.FeaturesDict({"messages": tfds.features.Sequence(message)})
    folder = tmp_path / "tiny" / "1.0.0"
    folder.mkdir(parents=True)
    with tf.io.TFRecordWriter(str(folder / "tiny-train.tfrecord-00000-of-00001")) as writer:
        for text in TEXTS:
            said = {"role": ["user", "assistant"], "content": [text, "yes"]}
            writer.write(features.serialize_example({"messages": said}))
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    split = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[len(TEXTS)],
        num_bytes=0,
        filename_template=tfds.core.ShardedFileTemplate(
            data_dir=folder, template=template, dataset_name="tiny", filetype_suffix="tfrecord"
        ),
    )
    tfds.folder_dataset.write_metadata(
        data_dir=folder, features=features, split_infos=[split], filename_template=template
    )
    table = '[[source]]\npath = "tfds:{}"\ndata_dir = "{}"\n'

    def read(name):
        # It is relative to the file, like a path.
        (tmp_path / "mix.toml").write_text(table.format(name, "."))
        return rows(tmp_path / "mix.toml")

    found = read("tiny/train")
    assert sorted(row["messages"][0]["content"] for row in found) == sorted(TEXTS)
    assert all(row["messages"][1] == {"role": "assistant", "content": "yes"} for row in found)
    assert found == read("tiny:1.0.0/train") and len(read("tiny/train[:1]")) == 1
    (source,) = parse_sources(str(tmp_path / "mix.toml"))
    before = digest_of(source)
    (file,) = folder.glob("*.tfrecord*")
    file.write_bytes(file.read_bytes().replace(b"cat", b"dog"))
    assert before.partition(":")[0] == digest_of(source).partition(":")[0]
    assert before != digest_of(source)
    with pytest.raises(DataError, match=r"data 'tfds:tiny/train\[:1\]' is damaged \("):
        rows(tmp_path / "mix.toml")
    with pytest.raises(DataError, match=r"has no split 'tran'.*train"):
        read("tiny/tran")
    with pytest.raises(DataError, match=r"is not on disk; prepare it .* TFDS_DATA_DIR"):
        read("huge/train")
    about = folder / "dataset_info.json"
    about.write_text(about.read_text().replace("tfrecord", "array_record"))
    file.rename(folder / file.name.replace("tfrecord", "array_record"))
    with pytest.raises(DataError, match="such as array_record; prepare it with --file_format=tfre"):
        read("tiny/train")
    with pytest.raises(DataError, match="must be tfds:NAME/SPLIT; give both"):
        rows("tfds:tiny")
