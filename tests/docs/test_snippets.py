"""Snippets of Python run as they stand, in plain Python: nobody has prepared devices for them."""

import subprocess

import pytest

from tests.docs.pages import PAGES, name_of, python_of
from tests.warm import warm

WITH_PYTHON = [page for page in PAGES if python_of(page)]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_snippets_run_in_plain_python(page, tmp_path):
    # A file, whose source AutoGraph can read.
    path = tmp_path / "snippets.py"
    path.write_text(python_of(page), encoding="utf-8")
    run = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run(warm("-c", run), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "AutoGraph could not transform" not in done.stderr
    if name_of(page) == "README.md":
        # The first one prints equal losses, and is short.
        one, two = map(float, done.stdout.split()[:2])
        assert one == pytest.approx(two, rel=1e-5) and one > 0
        first = path.read_text(encoding="utf-8").partition("from pipemesh.partition import")[0]
        assert len([line for line in first.splitlines() if line]) <= 16
