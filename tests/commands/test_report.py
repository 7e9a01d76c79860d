"""`pipemesh report`."""

import pytest

from pipemesh.commands.main import main
from tests.report import records


@pytest.fixture
def folders(tmp_path):
    made = []
    for name, make in (("one", records.whole), ("two", records.plain)):
        (tmp_path / name).mkdir()
        made.append(make(tmp_path / name))
    return made


def test_page_is_written_to_the_log_directory(folders, capsys):
    assert main(["report", str(folders[0])]) == 0
    path = folders[0] / "report.html"
    assert capsys.readouterr().out == f"report: {path}\n"
    assert "Tiny: report of a run" in path.read_text()


def test_several_runs_are_compared(folders, tmp_path, capsys):
    assert main(["report", *map(str, folders)]) == 0
    assert "Comparison of one, two" in (folders[1] / "comparison.html").read_text()
    path = tmp_path / "other.html"
    assert main(["report", *map(str, folders), "--output", str(path)]) == 0
    assert path.exists() and capsys.readouterr().out.endswith(f"report: {path}\n")


def refused(capsys, *words):
    assert main(["report", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    return line


def test_errors_are_one_line(folders, tmp_path, capsys):
    told = f"error: '{tmp_path}' has no record.jsonl; give the log directory of a "
    assert refused(capsys, tmp_path).startswith(told)
    assert "does not exist" in refused(capsys, folders[0], tmp_path / "none")
    line = refused(capsys, folders[0], "--output", tmp_path / "no" / "page.html")
    assert line.endswith("cannot be written (No such file or directory); give another file")
