"""Tests of a release: errors of a repository come before anything is built."""

import pathlib
import shutil
import subprocess
import sys

import pytest

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / ".ci/release.py"
SOURCE = '__version__ = "0.1.0.dev0"\n'
WHOLE = (
    "# Changelog\n\n## 1.2.0rc1 (2027-01-31)\n\n### Added\n\n* A thing.\n\n## 1.1.0 (2026-12-01)\n"
)


@pytest.fixture
def repository(tmp_path):
    """A repository with a changelog, and a function that changes it and gives tags."""
    (tmp_path / "pipemesh").mkdir()
    (tmp_path / "pipemesh/__init__.py").write_text(SOURCE)

    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")

    def committed(changelog=WHOLE, *tags):
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        git("add", "-A")
        git("commit", "--allow-empty", "-m", "a change")
        for tag in tags:
            git("tag", tag)
        return tmp_path

    return committed


def checked(folder, *flags):
    words = [sys.executable, str(PROGRAM), "--only_check", f"--folder={folder}", *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr or done.stdout


@needs_git
def test_the_tag_of_head_is_the_version(repository):
    folder = repository(WHOLE, "v1.2.0rc1", "nightly")
    assert checked(folder).startswith("1.2.0rc1: ")
    (folder / "new").write_text("")
    assert checked(folder).startswith("error: files differ from HEAD; commit them")
    assert checked(folder, "--rehearse").startswith("0.1.0.dev0: ")


@needs_git
@pytest.mark.parametrize("tags", [[], ["1.2.0"], ["v1.2"], ["v1.2.0", "v1.2.1"]])
def test_head_needs_one_tag_of_a_version(repository, tags):
    assert "needs one such as v0.1.0 or v0.1.0rc1" in checked(repository(WHOLE, *tags))


@needs_git
@pytest.mark.parametrize(
    ("changelog", "error"),
    [
        ("# Changelog\n", "begins with the section `## `, and not `## 1.0.0 (YYYY-MM-DD)`"),
        ("## 1.0.0\n\n* A thing.\n", "and not `## 1.0.0 (YYYY-MM-DD)`"),
        ("## 1.0.0 (2027-01-31)\n\n## 0.9.0\n\n* A thing.\n", "names no change"),
        ("## Unreleased\n\n* New.\n\n## 1.0.0 (2027-01-31)\n\n* A thing.\n", "give them the title"),
    ],
)
def test_the_changelog_has_a_section_of_the_version(repository, changelog, error):
    assert error in checked(repository(changelog, "v1.0.0"))


def test_this_repository_can_be_rehearsed():
    assert ": changelog checked" in checked(ROOT, "--rehearse")
