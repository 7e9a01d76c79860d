"""Files of weights: safetensors, import and export."""

import errno
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

from models.pretrained import config, names, safetensors_file, transfer
from models.pretrained.config import WeightsError
from models.pretrained.safetensors_file import INDEX, ONE, Tensor, TensorFiles, find, write
from pipemesh.checkpoint import Manifest
from pipemesh.commands import main as cli
from pipemesh.errors import SaveError
from tests.models.pretrained import small
from tests.pairwise import in_turn


def tensors_in(folder):
    with TensorFiles(find(str(folder))) as files:
        return {name: files.read(name) for name in files.names}


def entries(tensors):
    return [
        Tensor(name, value.dtype, value.shape, lambda value=value: [value])
        for name, value in tensors.items()
    ]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def refused(capsys, *words):
    """The one line that says why."""
    capsys.readouterr()
    assert cli.main(["checkpoint", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert not out and line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("kind", "dtype"), in_turn([*small.KINDS], ["float32", "bfloat16", "float16"])
)
def test_what_comes_in_goes_out_as_it_was(tmp_path, capsys, kind, dtype):
    values = small.KINDS[kind] | {"dtype": "float32", "architectures": ["Any"]}
    kinds = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    tensors = small.tensors_of(values, kinds[dtype])
    small.write(tmp_path / "in", values, tensors)
    beside = ["generation_config.json", "chat_template.jinja", "added_tokens.json"]
    for name in beside:
        (tmp_path / "in" / name).write_text("{}")
    run, out = tmp_path / "run", tmp_path / "out"
    enter = ["import", "--from", str(tmp_path / "in" / "model.safetensors"), "--logdir", str(run)]
    assert cli.main(["checkpoint", *enter]) == 0
    assert f"{run}/ckpt-0: " in capsys.readouterr().out
    # In the checkpoint they are float32, as training has them.
    reader = tf.train.load_checkpoint(str(run / "ckpt-0"))
    for weight in names.weights_of(config.of_values(values)):
        found = reader.get_tensor(weight.name)
        assert (found.dtype, found.shape) == (np.float32, weight.shape)
    assert Manifest.read(str(run / "ckpt-0")).note["model"].startswith("models.pretrained.params.")
    assert cli.main(["checkpoint", "export", str(run), str(out), f"--dtype={dtype}"]) == 0
    assert_same(tensors_in(out), tensors)
    assert json.loads((out / "config.json").read_text()) == values | {"dtype": dtype}
    assert [(out / name).read_text() for name in beside] == ["{}"] * len(beside)
    # Once more is not over what is there.
    assert "added_tokens.json exists; give another folder" in refused(capsys, "export", run, out)


def test_files_of_other_makers_are_the_same_model(tmp_path):
    """Without prefix, with masks and with logits of their own; in several files."""
    tensors = small.tensors_of(small.GPT2)
    small.write(tmp_path / "plain", small.GPT2, tensors)
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{i}.attn.bias": np.ones([1, 1, 16, 16], np.float32) for i in range(2)}
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "config.json").write_text(json.dumps(small.GPT2))
    given = {**bare, **masks, "lm_head.weight": bare["wte.weight"]}
    assert len(write(str(tmp_path / "parts"), entries(given), 2000)) > 3
    for name in ("plain", "parts"):
        transfer.import_weights(str(tmp_path / name), str(tmp_path / f"run {name}"))
        transfer.export_weights(
            str(tmp_path / f"run {name}" / "ckpt-0"), str(tmp_path / f"of {name}")
        )
    assert_same(tensors_in(tmp_path / "of parts"), tensors_in(tmp_path / "of plain"))
    assert (tmp_path / "parts" / INDEX).exists()


def test_logits_of_another_dtype_may_equal_the_table(tmp_path, monkeypatch):
    """They were said to be two weights where both are larger than a block."""
    monkeypatch.setattr(safetensors_file, "BLOCK", 64)
    values = small.LLAMA | {"tie_word_embeddings": True}
    tensors = small.tensors_of(values, ml_dtypes.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    small.write(tmp_path / "in", values, tensors)
    transfer.import_weights(str(tmp_path / "in"), str(tmp_path / "run"))
    tensors["lm_head.weight"][-1, -1] += 1
    small.write(tmp_path / "in", values, tensors)
    with pytest.raises(WeightsError, match=r"'lm_head\.weight' is not 'model\.embed"):
        transfer.import_weights(str(tmp_path / "in"), str(tmp_path / "more"))


@pytest.fixture
def given(tmp_path):
    """A folder of weights, and a function that writes other ones there."""
    tensors = small.tensors_of(small.LLAMA)
    folder = small.write(tmp_path / "in", small.LLAMA, tensors)

    def change(**other):
        small.write(folder, small.LLAMA | other.pop("config", {}), {**tensors, **other})

    return folder, tensors, change


def test_what_cannot_be_taken_in_is_one_line(tmp_path, capsys, given):
    folder, _, change = given
    run = tmp_path / "run"
    enter = "import", "--from", folder, "--logdir", run
    first = "model.layers.0.mlp.up_proj.weight"
    change(**{first: np.zeros([12, 17], np.float32)})
    told = refused(capsys, *enter)
    assert f"'{first}' has shape [12, 17], but that of config.json has [12, 16]" in told
    change(**{"model.layers.2.input_layernorm.weight": np.ones([16], np.float32)})
    told = refused(capsys, *enter)
    assert "1 tensors that the model of config.json (llama, 2 layers) has not, such as" in told
    change(config={"num_hidden_layers": 3})
    told = refused(capsys, *enter)
    assert "there is no tensor 'model.layers.2.input_layernorm.weight', which the model of" in told
    change(config={"tie_word_embeddings": True})
    assert "'lm_head.weight' is not 'model.embed_tokens.weight', but" in refused(capsys, *enter)
    change(config={"model_type": "gpt2"})
    assert "but this type of model has no such key" in refused(capsys, *enter)
    change(config={"rope_scaling": {"rope_type": "yarn"}})
    assert "rope_type is 'yarn'; supported are default, linear" in refused(capsys, *enter)
    change()
    assert "cannot be read" in refused(capsys, *enter, "--config", tmp_path / "none.json")
    (folder / "tokenizer.json").write_text("none")
    assert "tokenizer.json' is no tokenizer" in refused(capsys, *enter)
    (folder / "tokenizer.json").unlink()
    told = refused(capsys, *enter, "--model", "models.digits.params.DigitsPlain")
    assert "takes no weights of others; give models.pretrained.params.Llama" in told
    told = refused(capsys, *enter, "--model", "models.pretrained.params.Gpt2")
    assert "model_type 'gpt2', but config.json is of 'llama'; take models.pretrained.params" in told
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert "cut short" in refused(capsys, *enter)
    assert not run.exists()
    # All is well in the end, but once.
    change()
    assert cli.main(["checkpoint", *map(str, enter)]) == 0
    assert "has a checkpoint, " in refused(capsys, *enter)


def test_numbers_that_a_dtype_has_not_are_an_error(tmp_path, capsys, given):
    folder, tensors, change = given
    name = "model.norm.weight"
    change(**{name: tensors[name] * 1e9})
    enter = "import", "--from", folder, "--logdir", tmp_path / "run"
    told = f"tensor '{name}' has numbers that are too large for float16; give --dtype=float32"
    assert told in refused(capsys, *enter, "--dtype=float16")
    assert cli.main(["checkpoint", *map(str, enter), "--dtype=bfloat16"]) == 0
    assert told in refused(capsys, "export", tmp_path / "run", tmp_path / "out", "--dtype=float16")
    assert not (tmp_path / "out").exists()
    enter = "import", "--from", folder, "--logdir", tmp_path / "more"
    change(**{name: tensors[name].astype(np.float64) * 1e300})
    assert "too large for float32; no --dtype is wider" in refused(capsys, *enter)
    # All was well until token 0 was said for ever.
    name = "model.layers.1.self_attn.k_proj.weight"
    for number in (np.nan, np.inf):
        broken = tensors[name].copy()
        broken[3, 2] = number
        change(**{name: broken})
        told = f"tensor '{name}' has numbers that are not finite (NaN or infinity)"
        assert told in refused(capsys, *enter)
    assert not (tmp_path / "more").exists()


def test_what_lies_beside_weights_is_checked_at_import(tmp_path, capsys, given):
    folder, _, _ = given
    enter = "import", "--from", folder, "--logdir", tmp_path / "run"
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json' is no JSON" in refused(capsys, *enter)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 999]}')
    small.write_tokenizer(folder)
    values = small.LLAMA | {"vocab_size": 4, "eos_token_id": 99}
    small.write(folder, values, small.tensors_of(values))
    told = transfer.import_weights(str(folder), str(tmp_path / "run"))
    assert told[2].endswith(
        "tokens, but the model has 4: texts that have one of the others are refused"
    )
    assert [line.partition(": ")[2].split(" plays")[0] for line in told[3:]] == [
        "eos_token_id 99",
        "eos_token_id 999",
    ]


def test_no_import_uses_files_of_another(tmp_path, capsys, given):
    """The tokenizer of an import that was refused was used with the weights of the next one."""
    folder, tensors, _ = given
    other, run = tmp_path / "other", tmp_path / "run"
    small.write(other, small.LLAMA, tensors)
    small.write_tokenizer(other)
    told = refused(
        capsys, "import", "--from", other, "--logdir", run, "--model=models.pretrained.params.Gpt2"
    )
    assert "model_type" in told and not run.exists()
    # As a process that was killed left it.
    run.mkdir()
    shutil.copy(other / "tokenizer.json", run)
    enter = "import", "--from", folder, "--logdir", run
    assert f"{run}/tokenizer.json is there, but there is no " in refused(capsys, *enter)
    (run / "tokenizer.json").unlink()
    (run / "config.json").write_text("{}")
    assert f"{run}/config.json is there, and is not the same as " in refused(capsys, *enter)
    assert [each.name for each in run.iterdir()] == ["config.json"]
    shutil.copy(folder / "config.json", run)
    assert cli.main(["checkpoint", *map(str, enter)]) == 0
    # A folder to export to has none of them either.
    (tmp_path / "out").mkdir()
    shutil.copy(other / "tokenizer.json", tmp_path / "out")
    told = refused(capsys, "export", run, tmp_path / "out")
    assert "tokenizer.json exists; give another folder" in told


def test_what_cannot_go_out_is_one_line(tmp_path, capsys, given):
    folder, _, _ = given
    run, out = tmp_path / "run", tmp_path / "out"
    transfer.import_weights(str(folder), str(run))
    shutil.copytree(run, tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    told = refused(capsys, "export", tmp_path / "bare", out)
    assert "is of no model that can be exported: there is no " in told
    other = small.LLAMA | {"intermediate_size": 13}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(other))
    told = refused(capsys, "export", tmp_path / "bare", out)
    assert "is of another model than" in told and "it has it as [16, 12]" in told
    other = small.LLAMA | {"num_hidden_layers": 3}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(other))
    assert "it has none" in refused(capsys, "export", tmp_path / "bare", out)
    assert "is no checkpoint" in refused(capsys, "export", run / "ckpt-9", out)
    data = run / "ckpt-0.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-3])
    assert "ckpt-0.data-00000-of-00001 has " in refused(capsys, "export", run, out)
    assert not out.exists()


def test_an_export_is_whole_or_nothing(tmp_path, capsys, given, monkeypatch):
    """Weights were left where the disk was full for a tokenizer, and others' weights replaced."""
    folder, _, _ = given
    run, out = tmp_path / "run", tmp_path / "out"
    small.write_tokenizer(folder)
    transfer.import_weights(str(folder), str(run))
    out.mkdir()
    (out / "README.md").touch()

    def full(_, to):
        with open(to, "wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        told = refused(capsys, "export", run, out)
        assert f"[Errno 28] No space left on device, so {out} is not written" in told
        refused(capsys, "export", run, tmp_path / "new")
    assert [each.name for each in out.iterdir()] == ["README.md"]
    assert not (tmp_path / "new").exists()
    assert "Not a directory" in refused(capsys, "export", run, out / "README.md" / "deep")
    (out / "model-00001-of-00002.safetensors").touch()
    told = refused(capsys, "export", run, out)
    assert "model-00001-of-00002.safetensors exists; give another folder" in told
    assert len(list(out.iterdir())) == 2


NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def path(tmp_path):
    low = NUMBERS.astype(ml_dtypes.bfloat16)
    save_file({"a": NUMBERS, "low": low, "whole": NUMBERS.astype(np.int32)}, tmp_path / ONE)
    return tmp_path / ONE


def test_tensors_are_read_part_by_part_in_their_dtype(path):
    with TensorFiles(find(str(path.parent))) as files:
        assert files.names == ["a", "low", "whole"]
        np.testing.assert_array_equal(files.read("a", (slice(None), slice(1, 3))), NUMBERS[:, 1:3])
        assert files.read("low").dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(files.read("low").astype(np.float32), NUMBERS)
        files.check("low", [3, 4])
        with pytest.raises(WeightsError, match=r"'a' has shape \[3, 4\], but .* has \[4, 3\]"):
            files.check("a", [4, 3])
        with pytest.raises(WeightsError, match="'whole' has numbers of I32; weights may be of F64"):
            files.check("whole", [3, 4])


@pytest.mark.parametrize("left", [0, 4, 30, -1])
def test_a_file_that_was_cut_short_is_told_so(path, left):
    path.write_bytes(path.read_bytes()[:left])
    size = path.stat().st_size
    told = rf"model.safetensors' \({size} bytes\) is no whole file of safetensors .*cut short"
    with pytest.raises(WeightsError, match=told):
        TensorFiles(str(path))


def test_what_is_no_such_file_is_told(tmp_path, path):
    with pytest.raises(WeightsError, match="gone' cannot be read"):
        TensorFiles(str(tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=f"has neither {ONE} nor {INDEX}; give the path"):
        find(str(tmp_path / "empty"))
    with pytest.raises(WeightsError, match="--from='/nonexist' does not exist; give a file of"):
        find("/nonexist")
    with pytest.raises(WeightsError, match="is a folder; give the path of a file"):
        TensorFiles(str(tmp_path / "empty"))


def test_pickles_are_named_with_how_to_convert_them(tmp_path):
    """They were said to be cut short."""
    path = tmp_path / "pytorch_model.bin"
    for content in (b"PK\x03\x04" * 99, b"\x80\x02}q\x00."):
        path.write_bytes(content)
        with pytest.raises(
            WeightsError, match=r"is a file of torch: pickles may run code .*conver"
        ):
            TensorFiles(str(path))
    with pytest.raises(WeightsError, match=r"it has pytorch_model\.bin: pickles .*save_pretr"):
        find(str(tmp_path))


def test_of_a_folder_with_both_the_single_file_counts(tmp_path):
    """As with `transformers`: the index may be of an older model."""
    written(tmp_path, 1)
    save_file({"a": NUMBERS}, tmp_path / ONE)
    assert find(str(tmp_path)) == str(tmp_path / ONE)


def written(folder, most):
    tensors = {f"t{i}": NUMBERS + i for i in range(5)}
    return tensors, write(str(folder), entries(tensors), most)


@pytest.mark.parametrize(("most", "number"), [(10_000, 1), (2 * NUMBERS.nbytes, 4), (1, 6)])
def test_what_is_written_is_read_in_one_file_or_in_several(tmp_path, most, number):
    tensors, paths = written(tmp_path, most)
    assert len(paths) == number
    assert sorted(tmp_path.iterdir()) == sorted(map(type(tmp_path), paths))
    # As others are: folders of models are shared.
    (tmp_path / "other").touch()
    assert {each.stat().st_mode for each in tmp_path.iterdir()} == {
        (tmp_path / "other").stat().st_mode
    }
    with TensorFiles(find(str(tmp_path))) as files:
        assert files.names == sorted(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(files.read(name), value)


def test_an_index_without_what_it_names_is_told(tmp_path):
    written(tmp_path, 1)
    path = tmp_path / INDEX
    good = json.loads(path.read_text())

    def refused(told):
        with pytest.raises(WeightsError, match=told):
            TensorFiles(str(path))

    good["weight_map"]["more"] = "model-00001-of-00005.safetensors"
    path.write_text(json.dumps(good))
    refused("model-00001-of-00005.safetensors' has no tensor 'more', which .* says is in it")
    del good["weight_map"]["more"]
    path.write_text(json.dumps(good))
    (tmp_path / "model-00003-of-00005.safetensors").unlink()
    refused("model-00003-of-00005.safetensors' cannot be read")
    for content in ("{}", '{"weight_map": 3}'):
        path.write_text(content)
        refused("is no index of safetensors")
    for content in ("[]", "no json", "[" * 100_000):
        path.write_text(content)
        refused(f"{INDEX}' .* JSON")
    path.unlink()
    refused("cannot be read")


def test_an_index_opens_no_file_outside_of_its_folder(tmp_path, path):
    other = tmp_path / "in" / "deep"
    other.mkdir(parents=True)
    places = ("../../" + ONE, f"deep/../../../{ONE}", "..\\\\" + ONE, str(path))
    for place in places:
        (other / INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
        with pytest.raises(WeightsError, match="which is outside of its folder; put all files"):
            TensorFiles(str(other / INDEX))


def test_links_of_a_download_are_followed_but_no_others(tmp_path, path):
    """A hub's cache has links to its own blobs, for the index too."""
    folder = tmp_path / "models--a--b" / "snapshots" / "revision"
    blobs = tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (folder / "part.safetensors").symlink_to(path)
    (blobs / "index").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    (folder / INDEX).symlink_to(blobs / "index")
    with pytest.raises(WeightsError, match="which is outside of its folder; put all files"):
        TensorFiles(str(folder / INDEX))
    (folder / "part.safetensors").unlink()
    shutil.copy(path, blobs / "numbers")
    (folder / "part.safetensors").symlink_to("../../blobs/numbers")
    with TensorFiles(str(folder / INDEX)) as files:
        np.testing.assert_array_equal(files.read("a"), NUMBERS)


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    for name, most in ((ONE, 10_000), (INDEX, 1)):
        (tmp_path / name).mkdir()
        with pytest.raises(OSError, match="Is a directory"):
            written(tmp_path, most)
        assert [each.name for each in tmp_path.iterdir()] == [name]
        (tmp_path / name).rmdir()

    def broken():
        raise SaveError("the last one cannot be written")

    (tmp_path / "out").mkdir()
    tensors = [*entries({"a": NUMBERS}), Tensor("b", NUMBERS.dtype, NUMBERS.shape, broken)]
    with pytest.raises(SaveError, match="the last one"):
        write(str(tmp_path / "out"), tensors, 1)
    assert not list((tmp_path / "out").iterdir())
