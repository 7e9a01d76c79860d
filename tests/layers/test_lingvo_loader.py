"""lingvo loads with and without its native ops."""

import importlib
import pathlib
import subprocess
import sys
import types

import pytest
import tensorflow as tf
from lingvo.core import layers, py_utils

from pipemesh.errors import NativeOpError, PipelineError, PipemeshError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, lingvo_loader
from tests.warm import warm


@pytest.fixture
def no_ops_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, lingvo_loader.GEN_X_OPS)


@pytest.mark.usefixtures("no_ops_loaded")
def test_the_real_ops_are_used_where_the_library_loads(monkeypatch):
    real = types.ModuleType("real")
    paths = []
    monkeypatch.setattr(tf, "load_op_library", lambda path: paths.append(path) or real)
    for _ in range(2):
        lingvo_loader.load_native_ops()
        assert sys.modules[lingvo_loader.GEN_X_OPS] is real
    assert len(paths) == 1 and paths[0].endswith("lingvo/core/ops/x_ops.so")


@pytest.mark.usefixtures("no_ops_loaded")
def test_the_stand_in_is_used_where_the_library_does_not_load(monkeypatch):
    def load(path):
        raise tf.errors.NotFoundError(None, None, "version `GLIBC_2.38' not found")

    monkeypatch.setattr(tf, "load_op_library", load)
    lingvo_loader.load_native_ops()
    ops = sys.modules[lingvo_loader.GEN_X_OPS]
    with pytest.raises(NativeOpError, match=r"'pack_sequences'.*glibc 2\.38.*GLIBC_2\.38"):
        ops.pack_sequences(1, 2)
    importlib.import_module("lingvo.core.ops")


def test_lingvo_without_docstrings_is_refused(monkeypatch):
    """`PYTHONOPTIMIZE=2` was a traceback."""
    flags = types.SimpleNamespace(optimize=2)
    monkeypatch.setattr(lingvo_loader, "sys", types.SimpleNamespace(flags=flags))
    with pytest.raises(PipemeshError, match="use PYTHONOPTIMIZE=1 or python -O"):
        lingvo_loader.load_native_ops()


def test_the_assertions_compare_shapes_and_first_dims():
    for x, y in (([2, 3], [2, 3]), ([2, -1], [2, 3]), ([-1, 3], [2, 3]), ([], [])):
        lingvo_loader.assert_shape_match(x, y, msg="here")
    for x, y in (([2, 3], [2, 4]), ([2], [2, 3])):
        with pytest.raises(tf.errors.InvalidArgumentError, match="here shapes do not match"):
            lingvo_loader.assert_shape_match(x, y, msg="here")
    lingvo_loader.assert_same_dim0([])
    lingvo_loader.assert_same_dim0([tf.zeros([2, 3]), tf.zeros([2])])
    with pytest.raises(tf.errors.InvalidArgumentError, match="first dims differ"):
        lingvo_loader.assert_same_dim0([tf.zeros([2]), tf.zeros([3])])


def test_shapes_that_are_known_are_compared_before_the_first_step():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2, 5, 7])
        put_together = tf.stack([tf.shape(x)[-1], tf.shape(x)[0]])
        lingvo_loader.assert_shape_match(put_together, [7, -1])
        assert "Assert" not in {op.type for op in graph.get_operations()}
        lingvo_loader.assert_shape_match(put_together, [7, 3])
        assert "Assert" in {op.type for op in graph.get_operations()}


@pytest.mark.slow
def test_lingvo_and_its_trainer_load_only_after_the_loader():
    """`python -m lingvo.trainer` needs glibc 2.38, unless a script imports pipemesh first."""
    code = f"""
import importlib.abc, runpy, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("lingvo."):
            assert {lingvo_loader.GEN_X_OPS!r} in sys.modules, name
sys.meta_path.insert(0, Watch())
import models.one_billion_word.params as params
assert "lingvo.core" in sys.modules
sys.argv = ["trainer", "--mode=inspect_evaler", f"--model={{params.__name__}}.OneBillionWordTiny"]
runpy.run_module("pipemesh.layers.lingvo_trainer", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=200, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "dev,heldout,test,train"


def test_the_library_of_text_is_loaded_when_a_tokenizer_needs_it():
    """Its 115 MiB were a seventh of what a process took by imports."""
    pytest.importorskip("tensorflow_text")
    code = """
import sys
from pipemesh.layers import lingvo_loader
from lingvo.core import tokenizers
assert "tensorflow_text" not in sys.modules
assert tokenizers.tf_text.SentencepieceTokenizer.__module__.startswith("tensorflow_text.")
import tensorflow_text
assert tensorflow_text.SentencepieceTokenizer is tokenizers.tf_text.SentencepieceTokenizer
"""
    subprocess.run(warm("-c", code), check=True, timeout=120)


def test_modules_outside_of_the_layers_import_the_loader_before_lingvo():
    """Functions too: whether another module has loaded it is a matter of luck."""
    root = pathlib.Path(lingvo_loader.__file__).parents[1]
    checked = 0
    for path in set(root.rglob("*.py")) - set(root.glob("layers/**/*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        loaders = [i for i, line in enumerate(lines) if "import lingvo_loader" in line]
        for i, line in enumerate(lines):
            if line.lstrip().startswith(("from lingvo", "import lingvo")):
                checked += 1
                # At the top of the module, or just before.
                tops = [at for at in loaders if at < i and not lines[at].startswith(" ")]
                assert tops or i - 1 in loaders, f"{path}:{i + 1}"
    assert checked


def test_the_assertions_hold_in_a_graph_of_tf1_behaviour():
    """`==` between tensors compares objects there, which once made every assertion fail."""
    code = """
import tensorflow as tf
from pipemesh.layers import lingvo_loader
tf.compat.v1.disable_v2_behavior()
with tf.compat.v1.Session() as session:
    session.run(lingvo_loader.assert_shape_match([2, -1], [2, 3]))
    session.run(lingvo_loader.assert_same_dim0([tf.zeros([2]), tf.zeros([2, 3])]))
    try:
        session.run(lingvo_loader.assert_same_dim0([tf.zeros([2]), tf.zeros([3])]))
    except tf.errors.InvalidArgumentError:
        print("failed as it should")
"""
    result = subprocess.run(
        warm("-c", code), check=True, timeout=120, capture_output=True, text=True
    )
    assert "failed as it should" in result.stdout


def test_a_refused_layer_leaves_no_weights_behind(eagerly):
    def dense(**wrong):
        return layers.FCLayer.Params().Set(name="dense", input_dim=4, output_dim=4, **wrong)

    def refuse(params):
        with pytest.raises(PipelineError, match="cell_tpl is empty"):
            stage = FeatureExtractionLayer.Params().Set(name="both", sub=[dense(), params])
            stage.Instantiate()

    empty = PipeliningLayer.Params().Set(name="refused")
    refuse(empty)
    a, b = dense().Instantiate(), dense().Instantiate()
    assert a.vars.w is not b.vars.w
    with py_utils.VariableStore() as store:
        kept = dense().Set(name="kept").Instantiate()
        refuse(empty)
        # A weight of another size is no "Cached config", and what was there before is still there.
        assert dense().Set(output_dim=8).Instantiate().vars.w.shape == [4, 8]
        assert dense().Set(name="kept").Instantiate().vars.w is kept.vars.w
    assert store
    assert dense().Set(name="kept").Instantiate().vars.w is not kept.vars.w
    with tf.Graph().as_default() as graph:
        refuse(empty)
        assert not graph.lingvo_variable_store
