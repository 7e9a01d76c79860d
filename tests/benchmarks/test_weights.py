"""Import and export hold one tensor in memory, whatever the model's size."""

import json
import pathlib
import subprocess

from models.pretrained.safetensors_file import TensorFiles, find
from tests.models.pretrained import small
from tests.warm import warm

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks" / "weights"
SERVE = f"""
import pathlib, sys
sys.path.insert(0, {str(FOLDER)!r})
import run
run.serve(sys.argv[1], pathlib.Path(sys.argv[2]), "float32")
"""


def test_less_than_two_tensors_are_in_memory(tmp_path, modules_of):
    """21 tensors of 17 MB: all of a file were held for export, and 256 MB for import."""
    (run,) = modules_of("weights", "run")
    sizes = {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 3}
    values = small.LLAMA | sizes | {"num_key_value_heads": 4}
    for folder in (tmp_path / "in", tmp_path / "tiny" / "in"):
        folder.mkdir(parents=True)
    run.make(tmp_path / "tiny" / "in", small.LLAMA, "float32", 1)
    total, largest = run.make(tmp_path / "in", values, "float32", 3)
    assert total > 21 * largest and 16.7e6 < largest < 16.8e6
    for what in ("import", "export"):
        # In a process of its own: garbage of other tests counts as well.
        found = subprocess.run(
            warm("-c", SERVE, what, tmp_path),
            check=True,
            timeout=120,
            capture_output=True,
        )
        peak = json.loads(found.stdout.splitlines()[-1])["peak"]
        assert peak < 2 * largest, f"{what}: {peak:,} bytes"
    with TensorFiles(find(str(tmp_path / "out"))) as files:
        assert len(files.names) == 3 * 9 + 3
