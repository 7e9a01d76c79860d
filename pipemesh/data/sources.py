"""Sources: files of documents with weights, and their rows one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pipemesh.data import text_file
from pipemesh.errors import DataError, needed
from pipemesh.text import nearest_text, toml_of

# Begins the path of a dataset of TensorFlow Datasets: tfds:NAME/SPLIT.
TFDS = "tfds:"
TOML = ".toml"
# Fields of a document, in the order of error messages.
FIELDS = ("text", "prompt", "completion", "messages", "tools", "ids", "weights")
# Those of pairs, in the order of columns and of files.
_COLUMNS = FIELDS[1:3]
# The day that templates may write. Results must not depend on the day of a run. Templates of Llama
# 3 have this day as their own default.
_DATE = "2024-07-26"
_PACKED = (".gz", ".zst")
_ROWS_AT_ONCE = 1024
# Bytes at the start and end of a file, and of each of its other samples, in digests.
_SAMPLED, _SAMPLES = 1 << 12, 16


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of documents, and how often rows are taken from them.

    Attributes:
        path: path of a file, a glob pattern of several, or `tfds:NAME/SPLIT`.
        weight: share of the rows of a mixture, relative to the other weights.
        completions: path of a second file of lines: line n of the first file is a prompt, and that
            of the second its completion; None for documents of one file.
        format: one of `FORMATS`; "" goes by the ending of the file.
        fields: for fields with other names: the name in the file, by that of the field.
        data_dir: folder of TensorFlow Datasets; None for its own default.
        date: the day that a chat template may write, as YYYY-MM-DD.
    """

    path: str
    weight: float = 1.0
    completions: str | None = None
    format: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    data_dir: str | None = None
    date: str = _DATE

    def __str__(self) -> str:
        others = ((field, getattr(self, field.name)) for field in dataclasses.fields(self)[2:])
        told = [f"{field.name} {value}" for field, value in others if value != field.default]
        return ", ".join([f"{self.path}*{self.weight}", *told])


def parse_sources(text: str) -> tuple[Source, ...]:
    """Reads a list of sources.

    Args:
        text: paths with optional weights, such as `a.jsonl*0.7,b.parquet*0.3`, or two of them for
            lines of prompts and completions, such as `a.en+a.de`; or the path of a TOML file with a
            table `[[source]]` for each, which has a `path` and any of the other attributes of
            `Source`.

    Returns:
        The sources. Relative paths in a TOML file are relative to its folder.

    Raises:
        DataError: the list is malformed.

    Example:
        >>> [(s.path, s.weight) for s in parse_sources("a.jsonl*0.7,b.parquet*0.3")]
        [('a.jsonl', 0.7), ('b.parquet', 0.3)]
        >>> [str(s) for s in parse_sources("a.en+a.de")]
        ['a.en*1.0, completions a.de']
    """
    tables: list[Any]
    if text.endswith(TOML):
        tables = _tables(text)
    else:
        tables = [_split(_weighted(part.strip())) for part in text.split(",")]
    sources = tuple(_source(table, text) for table in tables)
    paths = [(source.path, source.completions) for source in sources]
    for path in paths:
        if paths.count(path) > 1:
            raise DataError(f"{text!r} has the source {path[0]!r} twice; add up the weights")
    return sources


def _split(table: dict[str, Any]) -> dict[str, Any]:
    """Splits `a.en+a.de`, unless it is the name of a file or a pattern of some."""
    path, plus, completions = table["path"].partition("+")
    is_whole = not plus or path.startswith(TFDS) or glob.glob(table["path"], recursive=True)
    return table if is_whole else {**table, "path": path, "completions": completions}


def _weighted(part: str) -> dict[str, Any]:
    path, star, weight = part.rpartition("*")
    # A pattern has stars, too.
    with_weight = star and weight and not set(weight) - set("0123456789.+-e")
    if not with_weight:
        return {"path": part}
    try:
        return {"path": path, "weight": float(weight)}
    except ValueError:
        return {"path": part}


def _tables(path: str) -> list[Any]:
    try:
        values = toml_of(path)
    except OSError as error:
        raise DataError(f"{path!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path!r} is no TOML ({error})") from error
    tables = values.get("source")
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if set(values) != {"source"} or not tables or not is_list:
        raise DataError(f"{path!r} must have tables [[source]] and nothing else")
    folder = os.path.dirname(path)
    for table in tables:
        for name in ("path", "completions", "data_dir"):
            given = table.get(name)
            if isinstance(given, str) and given and not given.startswith(TFDS):
                table[name] = os.path.join(folder, os.path.expanduser(given))
    return tables


def _source(table: Mapping[str, Any], text: str) -> Source:
    known = [field.name for field in dataclasses.fields(Source)]
    for name in table:
        if name not in known:
            near = nearest_text(name, known)
            raise DataError(f"{text!r}: a source has no {name!r}{near}")
    path, weight, fields = table.get("path"), table.get("weight", 1.0), table.get("fields", {})
    if not isinstance(path, str) or not path:
        raise DataError(f"{text!r} has a source without a path; write PATH or PATH*WEIGHT")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (is_number and 0 < weight < math.inf):
        raise DataError(
            f"{text!r}: the weight of {path!r} is {weight!r}; it must be a finite number above 0. "
            "Leave a source out that has no weight"
        )
    for name in ("completions", "format", "data_dir", "date"):
        if not isinstance(table.get(name, ""), str):
            raise DataError(f"{text!r}: {name} of {path!r} is {table[name]!r}; it must be a text")
    if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
        raise DataError(f"{text!r}: fields of {path!r} must be a table of names")
    for name in fields:
        if name not in FIELDS:
            near = nearest_text(name, FIELDS)
            raise DataError(f"{text!r}: a document has no field {name!r}{near}")
    if table.get("completions"):
        unused = [name for name in ("format", "fields", "data_dir") if table.get(name)]
        if unused or path.startswith(TFDS):
            raise DataError(
                f"{text!r}: completions of {path!r} are for two files of lines, which have no "
                f"{' or '.join(unused) or 'dataset'}; leave one of them out"
            )
    if table.get("format") and table["format"] not in FORMATS:
        near = nearest_text(table["format"], FORMATS)
        raise DataError(f"{text!r}: {path!r} has the format {table['format']!r}{near}")
    return Source(**{**table, "weight": float(weight), "fields": tuple(sorted(fields.items()))})


def paths_of(source: Source) -> list[str]:
    """Returns the files of a source, sorted; raises DataError if there are none."""
    if os.path.isfile(source.path):
        return [source.path]
    if os.path.exists(source.path):
        # It is read twice, which a pipe cannot be.
        what = "a folder" if os.path.isdir(source.path) else "no file"
        raise DataError(
            f"data {source.path!r} is {what}; give the path of a file, or a pattern such as "
            f"{os.path.join(source.path, '*.jsonl')!r}"
        )
    found = sorted(path for path in glob.glob(source.path, recursive=True) if os.path.isfile(path))
    if not found:
        is_pattern = glob.has_magic(source.path)
        why = "matches no file" if is_pattern else "cannot be read (No such file or directory)"
        raise DataError(f"data {source.path!r} {why}; give the path of a file with documents")
    if source.completions is not None and len(found) > 1:
        raise DataError(
            f"data {source.path!r} matches {len(found)} files, but {source.completions!r} has the "
            "completions of one; give a source for each file"
        )
    return found


def absolute(source: Source) -> Source:
    """Returns the source with absolute paths, for a process with another working folder."""
    names = ("path", "completions", "data_dir")
    paths = {name: getattr(source, name) for name in names}
    changed = {
        name: os.path.abspath(path)
        for name, path in paths.items()
        if path and not path.startswith(TFDS)
    }
    return dataclasses.replace(source, **changed)


def digest_of(source: Source) -> str:
    """Returns sizes and a digest of samples of a source's files; raises DataError if there are
    none.
    """
    if source.path.startswith(TFDS):
        builder, _ = _builder(source)
        paths = sorted(glob.glob(os.path.join(glob.escape(str(builder.data_dir)), "*")))
    else:
        paths = [*paths_of(source), *filter(None, [source.completions])]
    found, sizes = hashlib.sha256(), list[str]()
    for path in paths:
        try:
            size = os.path.getsize(path)
            sizes.append(str(size))
            with open(path, "rb") as file:
                for number in range(_SAMPLES + 1):
                    file.seek(max(0, size - _SAMPLED) * number // _SAMPLES)
                    found.update(file.read(_SAMPLED))
        except OSError as error:
            raise text_file.unreadable(path, error) from error
    return f"{'+'.join(sizes)}:{found.hexdigest()[:16]}"


def rows_of(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the documents of a source as rows of fields, each with its place for errors.

    Fields have the names in `FIELDS`, and no others are there. It raises DataError for an unknown
    format or unreadable files, and MissingPackageError.
    """
    names = {name: name for name in FIELDS} | dict(source.fields)
    for path, found in _read(source, list(names.values())):
        row = {name: found[theirs] for name, theirs in names.items() if theirs in found}
        row = {name: value for name, value in row.items() if value is not None}
        if not row.keys() - {"tools", "weights"}:
            wanted = "text, prompt and completion, messages, or ids"
            given = ", ".join(sorted(map(str, found))) or "none"
            raise DataError(
                f"{path} has none of the fields {wanted}, but {given}; "
                "name the field in a TOML file: fields = {text = ...}"
            )
        yield path, row


def _read(source: Source, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    is_dataset = source.path.startswith(TFDS)
    for path in [source.path] if is_dataset else paths_of(source):
        try:
            if is_dataset:
                yield from _tfds(source, fields)
            elif source.completions is not None:
                yield from _two_files(path, source.completions)
            else:
                yield from FORMATS[source.format or format_of(path)](path, fields)
        except OSError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"data {path!r} cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise DataError(f"data {path!r} has a text that is not UTF-8 ({error})") from error


def format_of(path: str) -> str:
    """Returns the format of a file by its ending; raises DataError if that is unknown."""
    name = os.path.basename(path)
    for ending in _PACKED:
        name = name.removesuffix(ending)
    # Shards of TensorFlow have their number at the end: name.tfrecord-00000-of-00004.
    ending = os.path.splitext(name)[1].partition("-")[0].lower()
    if ending not in _ENDINGS:
        known = ", ".join(sorted(filter(None, _ENDINGS)))
        raise DataError(
            f"data {path!r} has the ending {ending!r}; known are {known}. Rename it, or name its "
            "format in a TOML file"
        )
    return _ENDINGS[ending]


def _text(path: str, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the whole file as one text."""
    yield repr(path), {"text" if "text" in fields else fields[0]: text_file.whole(path)}


def _json_lines(path: str, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text_file.whole_lines(path), 1):
        place = f"{path!r}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            why = getattr(error, "msg", None) or error
            raise DataError(
                f"{place} is no JSON ({why}); each line must be an object of JSON"
            ) from error
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise DataError(f"{place} is a {kind}; each line must be an object of JSON")
        yield place, row


def _table(path: str, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields lines of a prompt, a tab and its completion."""
    for field, theirs in zip(FIELDS, fields, strict=True):
        if theirs not in (field, *_COLUMNS):
            raise DataError(
                f"data {path!r} has no {theirs!r}, which fields gives as {field}: its columns are "
                f"{' and '.join(_COLUMNS)}, in this order; leave {field} out of fields"
            )
    for number, line in enumerate(text_file.whole_lines(path), 1):
        place = f"{path!r}, line {number}"
        if not line.strip():
            continue
        columns = _line(line, place, number).split("\t")
        if len(columns) != len(_COLUMNS):
            raise DataError(
                f"{place} has {len(columns)} columns; each line must be a prompt, a tab and its "
                "completion"
            )
        yield place, dict(zip(_COLUMNS, columns, strict=True))


def _two_files(path: str, completions: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each line of a file with that of the other one."""
    files = path, completions
    lines = itertools.zip_longest(*map(text_file.whole_lines, files))
    for number, pair in enumerate(lines, 1):
        place = f"{path!r} and {completions!r}, line {number}"
        if None in pair:
            raise DataError(
                f"{files[pair.index(None)]!r} has {number - 1:,} lines and "
                f"{files[1 - pair.index(None)]!r} has more; give a completion for each prompt"
            )
        if not any(line.strip() for line in pair):
            continue
        lines = [_line(line, place, number) for line in pair]
        yield place, dict(zip(_COLUMNS, lines, strict=True))


def _line(line: bytes, place: str, number: int) -> str:
    """Returns the text of a line of pairs, without a byte-order mark and a carriage return."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 ({error}); convert the file") from error
    return text.removesuffix("\r")


def _parquet(path: str, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    arrow = needed("pyarrow", f"data {path!r}", "data")
    parquet = needed("pyarrow.parquet", f"data {path!r}", "data")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in fields] or names
            number = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path!r}, row {number}", _without_nulls(row)
    except arrow.ArrowException as error:
        raise DataError(f"data {path!r} is no whole parquet file ({line_of(error)})") from error


def _without_nulls(value: Any) -> Any:
    """Returns a value without the nulls of structs, which have each key that any row has."""
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _tfrecord(path: str, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import tensorflow as tf

    with open(path, "rb") as file:
        packed = "GZIP" if file.read(2) == b"\x1f\x8b" else ""
    records: Any = tf.data.TFRecordDataset(path, packed)
    try:
        yield from _examples(path, (record.numpy() for record in records), fields)
    except tf.errors.OpError as error:
        raise DataError(f"data {path!r} is no whole file of TFRecord ({line_of(error)})") from error


def _array_record(path: str, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    module = needed("array_record.python.array_record_module", f"data {path!r}", "data")
    # The package does not say that a file is missing.
    os.stat(path)

    def records() -> Iterator[bytes]:
        with contextlib.closing(module.ArrayRecordReader(path)) as reader:
            number = reader.num_records()
            for begin in range(0, number, _ROWS_AT_ONCE):
                yield from reader.read(begin, min(begin + _ROWS_AT_ONCE, number))

    try:
        yield from _examples(path, records(), fields)
    # The package has no specific exception class, and some errors come when a file is closed.
    except (RuntimeError, ValueError) as error:
        raise DataError(f"data {path!r} is no whole array_record ({line_of(error)})") from error


def _examples(
    path: str, records: Iterable[bytes], fields: list[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the features of serialized `tf.train.Example`s."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    for number, record in enumerate(records, 1):
        place = f"{path!r}, record {number}"
        try:
            features = tf.train.Example.FromString(record).features.feature
        except DecodeError as error:
            raise DataError(f"{place} is no tf.train.Example ({error})") from error
        row: dict[str, Any] = dict.fromkeys(features)
        for name in row.keys() & fields:
            kind = features[name].WhichOneof("kind")
            values = list(getattr(features[name], kind).value) if kind else []
            # Texts have one value.
            row[name] = _plain(values[0] if kind == "bytes_list" and len(values) == 1 else values)
        yield place, row


def _builder(source: Source) -> tuple[Any, str]:
    """Returns what reads a dataset of TensorFlow Datasets, and the split."""
    tfds = needed("tensorflow_datasets", f"data {source.path!r}", "data")
    name, _, split = source.path.removeprefix(TFDS).rpartition("/")
    if not name or not split:
        raise DataError(f"data {source.path!r} must be {TFDS}NAME/SPLIT; give both")
    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=source.data_dir)
    except tfds.core.registered.DatasetNotFoundError as error:
        raise DataError(
            f"data {source.path!r} is not on disk; prepare it with the package "
            "tensorflow_datasets, and give its folder as TFDS_DATA_DIR, or as data_dir in a TOML "
            "file"
        ) from error
    return builder, split


def _tfds(source: Source, fields: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    tfds = needed("tensorflow_datasets", f"data {source.path!r}", "data")
    import tensorflow as tf

    builder, split = _builder(source)
    try:
        dataset = builder.as_dataset(split=split, shuffle_files=False)
    except (ValueError, AssertionError, KeyError) as error:
        near = nearest_text(split, list(builder.info.splits))
        raise DataError(f"data {source.path!r} has no split {split!r}{near}") from error
    except NotImplementedError as error:
        raise DataError(
            f"data {source.path!r} has files that TensorFlow Datasets cannot give as tf.data, such "
            "as array_record; prepare it with --file_format=tfrecord"
        ) from error
    try:
        for number, row in enumerate(tfds.as_numpy(dataset), 1):
            found = {name: _plain(v) if name in fields else None for name, v in row.items()}
            yield f"{source.path!r}, example {number}", found
    except tf.errors.OpError as error:
        raise DataError(f"data {source.path!r} is damaged ({line_of(error)})") from error


def _plain(value: Any) -> Any:
    """Returns bytes as text, arrays as lists, and a dict of lists as a list of dicts."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        columns = {name: _plain(each) for name, each in value.items()}
        lengths = {len(each) if isinstance(each, list) else -1 for each in columns.values()}
        if len(lengths) == 1 and -1 not in lengths:
            rows = zip(*columns.values(), strict=True)
            return [dict(zip(columns, row, strict=True)) for row in rows]
        return columns
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def line_of(error: Exception) -> str:
    """Returns the first line of an error's text, or else its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# By name: functions from a path and the wanted fields to rows with their places.
FORMATS: Mapping[str, Callable[[str, list[str]], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    "text": _text,
    "jsonl": _json_lines,
    "tsv": _table,
    "parquet": _parquet,
    "tfrecord": _tfrecord,
    "array_record": _array_record,
}
_ENDINGS = {
    "": "text",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
