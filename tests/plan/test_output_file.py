"""Files that a command writes at its end."""

import pytest

from pipemesh.errors import PlanError
from pipemesh.plan.output_file import check_output, write_output


def test_a_check_leaves_files_as_they_are(tmp_path):
    path = tmp_path / "x.json"
    check_output("--json", str(path))
    assert not path.exists()
    write_output("--json", str(path), "text")
    check_output("--json", str(path))
    assert path.read_text() == "text"
    for bad in (str(tmp_path), str(tmp_path / "none" / "x"), "a\0b"):
        with pytest.raises(PlanError, match=r"--json=.* cannot be written"):
            check_output("--json", bad)
