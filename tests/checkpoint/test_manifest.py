"""The manifest: written whole, and read without TensorFlow."""

import hashlib
import os
import pathlib
import subprocess
import sys

import pytest

from pipemesh.checkpoint import Manifest
from pipemesh.errors import CheckpointError, DamagedError
from tests.checkpoint.made import flipped

DATA = ".data-00000-of-00001"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "ckpt-3.index").write_bytes(b"names and checksums")
    (tmp_path / f"ckpt-3{DATA}").write_bytes(b"tensors")
    (tmp_path / f"ckpt-33{DATA}").write_bytes(b"of another one")
    path = str(tmp_path / "ckpt-3")
    Manifest.of(path, step=3, note={"by": [1, "me"]}, score=2.5).write(path)
    return path


def test_it_is_read_as_it_was_written(path):
    found = Manifest.read(path)
    assert (found.step, found.note, found.score) == (3, {"by": [1, "me"]}, 2.5)
    assert found.sizes == {DATA: 7}
    found.check(path)


def test_no_flipped_bit_passes(path):
    manifest = pathlib.Path(f"{path}.manifest")
    for bad in flipped(manifest.read_bytes(), 100):
        manifest.write_bytes(bad)
        with pytest.raises(DamagedError, match=r"ckpt-3\.manifest has changed since it was writ"):
            Manifest.read(path)


def test_another_programs_checkpoint_has_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*ckpt-3; give"):
        Manifest.read(str(tmp_path / "ckpt-3"))
    (tmp_path / "ckpt-3.index").touch()
    with pytest.raises(CheckpointError, match="ckpt-3 is a checkpoint of another program, or lost"):
        Manifest.read(str(tmp_path / "ckpt-3"))


OTHER_STEP = b'{"step": "3", "index": "", "sizes": {}, "note": {}}'


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"{", b'{"more": 1}', OTHER_STEP])
def test_a_manifest_of_another_version_is_one_line(path, content):
    digest = hashlib.sha256(content).hexdigest().encode()
    pathlib.Path(f"{path}.manifest").write_bytes(digest + b"\n" + content)
    with pytest.raises(CheckpointError, match=r"ckpt-3.manifest has another version \("):
        Manifest.read(path)


def test_a_folder_is_read_without_tensorflow(path):
    code = (
        "import sys; from pipemesh.checkpoint import Folder, Manifest, newest_whole\n"
        "assert newest_whole(sys.argv[1])[1].step == 3\n"
        "assert not {'tensorflow', 'lingvo'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, os.path.dirname(path)], check=True)
