"""Import and export hold two tensors in memory, whatever the model's size."""

from models.pretrained.safetensors_file import TensorFiles, find
from tests.models.pretrained import small


def test_no_more_than_two_tensors_are_in_memory(tmp_path, modules_of):
    """100 tensors of 8 MB: all of a file were held for export, and 256 MB for import."""
    (run,) = modules_of("weights", "run")
    sizes = {"hidden_size": 1448, "intermediate_size": 1448, "num_hidden_layers": 14}
    values = small.LLAMA | sizes | {"num_key_value_heads": 4}
    for folder in (tmp_path / "in", tmp_path / "tiny" / "in"):
        folder.mkdir(parents=True)
    run.make(tmp_path / "tiny" / "in", small.LLAMA, "float32", 1)
    total, largest = run.make(tmp_path / "in", values, "float32", 3)
    assert total > 98 * largest and 8.3e6 < largest < 8.4e6
    for what in ("import", "export"):
        # What is loaded with the first one does not count.
        run.move(what, tmp_path / "tiny", "float32")
        peak = run.rise(lambda what=what: run.move(what, tmp_path, "float32"))
        assert peak < 3 * largest, f"{what}: {peak:,} bytes"
    with TensorFiles(find(str(tmp_path / "out"))) as files:
        assert len(files.names) == 14 * 9 + 3
