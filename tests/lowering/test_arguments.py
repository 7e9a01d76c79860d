"""Wrong arguments: each is one clear line that names what was given."""

import inspect
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipemeshError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.lowering.arguments import COERCERS, register
from pipemesh.lowering.registry import OPS, op_table
from pipemesh.lowering.simd.collectives import TpuLowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.lowering.variable import Constant, Normal, Uniform, Variable
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape
from pipemesh.recurrent.circular import SimdPipeline

MESH = Mesh.from_text("data:2")
RULES = LayoutRules.from_text("batch:data;late:data")
DEVICES = ["CPU:0", "CPU:1"]
LOW = PlacementLowering(MESH, RULES, DEVICES)
CORES = Cores(MESH, DEVICES)
CORE = TpuLowering(MESH, RULES, tf.constant(0))
LAYOUT = RULES.tensor_layout(Shape.of(batch=4, io=6), MESH)


def made(text, dtype=np.float32):
    shape = Shape.from_text(text)
    return ops.import_tensor(LOW, np.ones(shape.sizes, dtype), shape)


with tf.GradientTape(persistent=True) as TAPE:
    OF_CORE = ops.import_tensor(CORE, np.ones([4, 6], np.float32), "batch:4;io:6")

KNOWN = {
    **{"np": np, "tf": tf, "ops": ops, "Cores": Cores, "PlacementLowering": PlacementLowering},
    **{"Constant": Constant, "Normal": Normal, "Uniform": Uniform, "Variable": Variable},
    **{"Tensor": Tensor, "SimdPipeline": SimdPipeline},
    **{"Dim": Dim, "LayoutRules": LayoutRules, "Mesh": Mesh, "Shape": Shape, "made": made},
    **{"LAYOUT": LAYOUT, "LOW": LOW, "MESH": MESH, "RULES": RULES, "DEVICES": DEVICES},
    **{"CORE": CORE, "CORES": CORES, "of_core": OF_CORE, "tape": TAPE},
    "returns": lambda lowering, part: {"loss": [Tensor(lowering, (part,), OF_CORE.shape)]},
    "RUN": CORES.function(lambda lowering, part: part, RULES, tf.TensorSpec([2, 6])),
    "whole": ops.import_tensor(
        PlacementLowering(MESH, LayoutRules(), DEVICES), np.ones([4, 6], np.float32), "batch:4;io:6"
    ),
    "x": made("batch:4;io:6"),
    "w": made("io:6;out:2"),
    "i": made("batch:4;io:6", np.int32),
    "m": made("batch:4;io:6", np.bool_),
    "d": made("batch:4;io:6", np.float64),
    "images": made("batch:4;rows:8;c:3"),
    "filters": made("k:3;c:3;out:2"),
    "bare": tf.ones([4, 6]),
    "part": tf.ones([2, 6]),
    "array": np.ones([4, 6], np.float32),
    "v": Variable.create("v", LAYOUT, DEVICES, Constant(0.0)),
}

# Arguments of one kind are checked by one function (`COERCERS`), so each kind is here once. Dtypes
# are those of a table by operation (`_KINDS`). Words may begin with the class of the error.
WRONG = [
    # Meshes, rules, devices and lowerings.
    ("Mesh('data:2')", "Mesh.from_text"),
    ("Mesh.from_text(None)", "None is no text"),
    ("LayoutRules('batch:data')", "LayoutRules.from_text"),
    ("LayoutRules.from_text(None)", "None is no text"),
    ("PlacementLowering('data:2', RULES, DEVICES)", "Mesh.from_text"),
    ("PlacementLowering(MESH, None, DEVICES)", "LayoutRules()"),
    ("PlacementLowering(MESH, LayoutRules.from_text('batch:dta'), DEVICES)", "mean 'data'"),
    ("PlacementLowering(MESH, RULES, 'CPU:0')", "give a list of names"),
    ("PlacementLowering(MESH, RULES, ['CPU:0'])", "1 devices were given"),
    ("PlacementLowering(MESH, RULES, ['CPU:0', 'CPU:99'])", "does not exist"),
    ("PlacementLowering(MESH, RULES, ['CPU:0', 'one'])", "not the name of a device"),
    ("LOW.all_reduce(x.slices, ['dta'])", "MeshError: mesh 'data:2' has no axis 'dta'; did you"),
    ("LOW.slice_along((tf.ones([3]),) * 2, 'data', 0)", "LayoutError: a dim of size 3 cannot"),
    ("LOW.permute(x.slices, 'data', [(0, 1), (1, 1)])", "is no permutation along axis 'data'"),
    ("Cores('data:2', DEVICES)", "Mesh.from_text"),
    ("Cores(MESH, [])", "DeviceError: 0 devices were given for mesh 'data:2'"),
    ("Cores(MESH, ['CPU:0'])", "which has 2 cores; give one device for each core"),
    ("Cores(MESH, ['CPU:1', 'CPU:1'])", "was given for 2 cores; cores wait for each other"),
    ("Cores(MESH, ['CPU:1', '/device:CPU:1'])", "was given for 2 cores"),
    ("Cores(MESH, ['CPU:1', '/job:localhost/replica:0/task:0/device:CPU:1'])", "given for 2 cores"),
    ("Cores(MESH, DEVICES, time_limit_s=0)", "DeviceError: time_limit_s is 0; it is above 0, or"),
    ("Cores(MESH, DEVICES, time_limit_s=-1.0)", "it is above 0, or None for ever"),
    ("Cores(MESH, 'CPU:0')", "give a list of names"),
    ("Cores(MESH, DEVICES).function(lambda low: 1, 'batch:data')", "LayoutRules.from_text"),
    ("Cores(MESH, DEVICES).function(lambda low, x: x, RULES, [4, 6])", "tf.TensorSpec"),
    ("Cores(MESH, DEVICES).function(None, RULES)", "no function"),
    ("CORES.run_eagerly(abs, LayoutRules.from_text('batch:dta'), [[bare], [bare]])", "mean 'data'"),
    # Dims and shapes.
    ("Dim.from_text(None)", "None is no text"),
    ("Shape('batch:4')", "Shape.from_text"),
    ("Shape.from_text(None)", "None is no text"),
    ("x.shape[0]", "no dim is called 0"),
    ("x.shape | 'batch:4'", "Shape.from_text"),
    # Into the mesh and out of it.
    ("ops.import_tensor(bare, 'batch:4;io:6', LOW)", "lowering"),
    ("ops.import_tensor(LOW, None, 'batch:4')", "array"),
    ("ops.import_tensor(LOW, 'text', '')", "array"),
    ("ops.import_tensor(LOW, [[1, 2], [3]], 'batch:2;io:2')", "array"),
    ("ops.import_tensor(LOW, x, 'batch:4;io:6')", "named dims already"),
    ("ops.import_tensor(LOW, bare, [4, 6])", "name the dims"),
    ("ops.import_tensor(LOW, bare, ['batch', 'io'])", "no size"),
    ("ops.import_tensor(LOW, bare, 'batch:4')", "cannot have the shape"),
    ("ops.import_tensor(LOW, bare, 'batch:4;batch:6')", "twice"),
    ("LOW.import_tensor(tf.ones([8]), LOW.tensor_layout(Shape.of(batch=4)))", "sizes (8,) cannot"),
    (
        "CORE.import_tensor(tf.ones([8]), CORE.tensor_layout(Shape.of(batch=4)))",
        "the shape 'batch:4",
    ),
    ("ops.export_tensor(bare)", "import_tensor"),
    ("ops.export_tensor(None)", "None"),
    ("ops.export_tensor([x, x])", "one tensor"),
    ("ops.export_tensor(v)", "variable.tensor(lowering)"),
    ("Tensor(LOW, bare, x.shape)", "slices"),
    ("Tensor(LOW, (bare,), x.shape)", "slices"),
    ("Tensor(LOW, x.slices, 'batch:4;io:6')", "Shape.from_text"),
    ("Tensor(MESH, x.slices, x.shape)", "lowering"),
    ("Tensor(LOW, (bare, bare), x.shape)", "has sizes [2, 6]"),
    # Gradients of complex numbers would depend on the layout.
    ("made('batch:4', 'c8')", "is complex64; elements are real numbers or booleans"),
    ("LOW.import_tensor(tf.ones([4, 6], tf.complex128), x.layout)", "is complex128; elements are"),
    ("ops.cast(x, tf.complex64)", "is complex64; elements are"),
    ("LOW.map(lambda s: tf.cast(s, tf.complex64), x.slices)", "is complex64; elements are"),
    ("CORE.map(lambda s: tf.cast(s, tf.complex64), (part,))", "is complex64; elements are"),
    ("Tensor(LOW, [tf.ones([2, 6], tf.complex64)] * 2, x.shape)", "is complex64; elements are"),
    (
        "Variable.create('v', LAYOUT, DEVICES, Constant(0.0), tf.complex64)",
        "is complex64; elements",
    ),
    # Products.
    ("ops.einsum(x, ['batch'])", "give a list"),
    ("ops.einsum([x, bare], ['batch'])", "import_tensor"),
    ("ops.einsum('bi,io->bo', x, w)", "give a list of tensors"),
    ("ops.einsum([x, w], None)", "a name, 'name:size'"),
    ("ops.einsum([x, w], 'batch,out')", "joined by ';'"),
    ("ops.einsum([x, w], ['batch', 'outt'])", "mean 'out'"),
    ("ops.einsum([x, w], ['batch', 'batch'])", "twice"),
    ("ops.einsum([x, w], [Dim('batch', 5)])", "size 5"),
    ("ops.einsum([x, i], ['batch'])", "float32, int32"),
    ("ops.einsum([], [])", "no tensor was given"),
    (
        "ops.einsum([made('batch:2;hidden:4'), made('hiden:4;out:2')], ['out'])",
        "'hidden:4' of one operand and 'hiden:4' of",
    ),
    ("ops.einsum([made('batch:4'), made('late:4')], [])", "rename one of"),
    ("ops.einsum([m, m], ['batch'])", "numbers"),
    ("x @ w", "ops.einsum"),
    # Element by element.
    ("x + None", "None"),
    ("x + 'one'", "'one'"),
    ("x + v", "variable.tensor(lowering)"),
    ("x + i", "float32, int32"),
    ("x + whole", "2 lowerings"),
    ("made('batch:4') * made('late:4')", "'batch' and 'late'"),
    ("x == None", "`is` compares objects"),
    ("x != 'x'", "not with 'x'"),
    ("bool(x)", "neither true nor false"),
    ("x in [w]", "neither true nor false"),
    ("bare * x", "import the array"),
    ("x * m", "numbers"),
    ("i * 0.5", "0.5, which is no int32"),
    ("i + 2**40", "which is no int32"),
    ("x + 1j", "1j, which is no float32"),
    ("x + True", "True, which is no float32"),
    ("m & 1", "1, which is no bool"),
    ("x & x", "booleans"),
    ("~x", "booleans"),
    ("-m", "numbers"),
    ("x + array", "named dims"),
    ("x + [1.0, 2.0]", "named dims"),
    ("x + tf.constant(1, tf.int32)", "float32, int32"),
    ("x / i", "float32, int32"),
    ("x + made('batch:2')", "size 4"),
    ("ops.add(1.0, 2.0)", "named dims"),
    ("ops.exp(i)", "floating numbers"),
    ("ops.is_nan(i)", "floating numbers"),
    ("ops.relu(m)", "numbers"),
    ("ops.relu([x])", "one tensor"),
    ("ops.logical_not(x)", "booleans"),
    ("ops.where(x, 1.0, x)", "booleans"),
    ("ops.where(m, 1.0, 2.0)", "named dims"),
    ("ops.where(m, x, i)", "float32, int32"),
    ("ops.cast(x, 'float33')", "dtype"),
    ("ops.cast(x, None)", "dtype"),
    ("ops.broadcast_to(x, 'batch:4')", "lacks"),
    # Reductions.
    ("ops.reduce_sum(x, 0)", "a name, 'name:size'"),
    ("ops.reduce_sum(x, 'bacth')", "mean 'batch'"),
    ("ops.reduce_mean(i, 'batch')", "cast them first"),
    ("ops.reduce_sum(x, ['batch', 'batch'])", "twice"),
    ("ops.reduce_sum(x, Dim('batch', 3))", "size 3"),
    ("ops.reduce_sum(x, 'batch:3')", "size 3"),
    ("ops.reduce_sum(x, axis=0)", "'axis'; write ops.reduce_sum(x, dims=...)"),
    ("ops.reduce_sum(m, 'batch')", "numbers"),
    ("ops.reduce_logsumexp(i, 'io')", "floating numbers"),
    ("ops.reduce_all(x)", "booleans"),
    # Order and lookups.
    ("ops.argmax(ops.slice(x, 'io', 0, 0), 'io')", "has no elements"),
    ("ops.argmax(x, ['batch', 'io'])", "one dim"),
    ("ops.top_k(x, 'io', 3)", "Dim('name', 8)"),
    ("ops.top_k(x, 'io', 'best')", "no size"),
    ("ops.top_k(x, 'io', 'best:9')", "no 9 elements"),
    ("ops.cumsum(m, 'io')", "numbers"),
    ("ops.one_hot(x, 'classes:10')", "integers"),
    ("ops.one_hot(i, 'io:10')", "twice"),
    ("ops.one_hot(i, 'classes:10', dtype=tf.string)", "dtype"),
    ("ops.gather(w, x, 'io')", "integers"),
    ("ops.gather(made('io:6'), made('io:6', np.int32), 'io')", "rename it"),
    ("ops.gather(w, made('batch:4', np.int32), 'oi')", "no dim is called 'oi'"),
    # Other shapes.
    ("ops.transpose(x)", "write ops.transpose(x, dims)"),
    ("ops.transpose(x, ['io'])", "no order of the dims"),
    ("ops.rename(x, 'batch')", "dict"),
    ("ops.rename(x, {'io': 'batch'})", "'batch' occurs twice"),
    ("ops.rename(x, {'io': 'late'})", "'batch' and 'late'"),
    ("ops.rename(x, {'batch': 'my rows'})", "no name of a dim"),
    ("ops.rename(x, {'bacth': 'rows'})", "mean 'batch'"),
    ("ops.reshape(x, 'all:25')", "24 elements"),
    ("ops.slice(x, 'io', 0.0, 2)", "whole number"),
    ("ops.slice(x, 'io', -2, 2)", "do not all lie"),
    ("ops.pad(x, 'io', -1, 1)", "use `slice`"),
    ("ops.pad(x, 'io', 1, 1, value='0')", "give a number"),
    ("ops.pad(i, 'io', 1, 1, value=0.5)", "no int32"),
    ("ops.concat(x, 'io')", "give a list"),
    ("ops.concat([x, i], 'io')", "cannot be joined"),
    ("ops.stack([x, x], 'batch')", "twice"),
    ("ops.stack([x, x], 'n', position=-1)", "position -1"),
    ("ops.split(x, 'io', 4)", "equal pieces"),
    ("ops.split(x, 'io', [2, 2.0, 2])", "whole number"),
    ("ops.split(x, 'io', [])", "sum up to 6"),
    ("ops.shift(x, 'io', 1)", "write ops.shift(x, dim, offset, wrap=...)"),
    ("ops.shift(x, 'io', 1, wrap=1)", "True or False"),
    ("ops.slice(x, 'batch', 0, 3)", "LayoutError: dim 'batch' of the tensor 'batch:3;io:6' has"),
    ("ops.pad(x, 'batch', 1, 0)", "remove or change the rule 'batch:data', or make the size a mul"),
    ("ops.split(x, 'batch', [1, 3])", "remove or change the rule 'batch:data'"),
    ("ops.halo_exchange(x, 'batch', 'io', -1)", "0 to 6 rows"),
    ("ops.halo_exchange(x, 'io', 'io', 1)", "the dims are two"),
    # Convolutions.
    ("ops.conv1d(images, filters, {'rows': 'k'}, padding=None)", "'SAME' or 'VALID'"),
    ("ops.conv1d(images, filters, {'rows': 'k'}, padding='SAME', strides=1.5)", "whole number"),
    ("ops.conv1d(images, filters, {'rows': 'k'}, padding='SAME', strides=0)", "at least 1"),
    ("ops.conv1d(images, filters, {'rows': 'k'}, padding='SAME', strides={'k': 1})", "one for"),
    ("ops.conv2d(images, filters, {'rows': 'k'}, padding='SAME')", "2 dims"),
    ("ops.conv1d(images, filters, {'rows': 'c'}, padding='SAME')", "names of their own"),
    ("ops.conv1d(images, filters, {'rows': 'k'}, padding='VALID', dilations=8)", "does not fit"),
    ("ops.conv1d(images, ops.cast(filters, tf.int32), {'rows': 'k'}, padding='SAME')", "floating"),
    ("ops.conv1d(images, made('k:3;c:3', 'f8'), {'rows': 'k'}, padding='SAME')", "float64"),
    ("ops.conv1d(images, made('k:3;batc:4'), {'rows': 'k'}, padding='SAME')", "mean 'batch'"),
    (
        "ops.conv1d(made('batch:8;c:3'), filters, {'batch': 'k'}, padding='SAME', strides=3)",
        "remove or change the rule 'batch:data'",
    ),
    (
        "ops.conv1d(made('batch:8;c:3'), made('k:3;c:3;late:2'), {'batch': 'k'}, padding='SAME')",
        "LayoutError: dims 'batch' and 'late' of the tensor",
    ),
    ("ops.conv_transpose(images, filters, {}, padding='SAME')", "1 to 3 dims"),
    # Pooling.
    ("ops.max_pool(images, {'rows': 2}, padding='FULL')", "'SAME' or 'VALID'"),
    ("ops.max_pool(images, 2, padding='SAME')", "as in {'rows': 2}"),
    ("ops.max_pool(images, {'rows': 0}, padding='SAME')", "at least 1"),
    ("ops.max_pool(images, {'row': 2}, padding='SAME')", "did you mean 'rows'"),
    ("ops.avg_pool(images, {'rows': 2}, padding='SAME', strides={'c': 1})", "one for each of rows"),
    ("ops.avg_pool(i, {'io': 2}, padding='SAME')", "floating"),
    ("ops.avg_pool(images, {'rows': 99}, padding='VALID')", "does not fit"),
    ("ops.max_pool(x, {'batch': 4}, padding='SAME')", "LayoutError: dim 'batch'"),
    ("ops.upsample(images, {'rows': 0})", "factors are {'rows': 0}"),
    # Random numbers.
    ("ops.random_uniform(LOW, 'batch:4', seed=[1.0, 2.0])", "two integers"),
    ("ops.random_uniform(LOW, 'batch:4', seed=[1, 2, 3])", "two integers"),
    ("ops.random_normal(LOW, 'batch:4', seed=[1, 2], dtype=tf.int32)", "floating"),
    ("ops.random_normal(LOW, 'batch:4')", "seed=..."),
    ("ops.dropout(x, rate='0.1', seed=[1, 2])", "give a number"),
    ("ops.dropout(x, rate=-0.1, seed=[1, 2])", "at least 0"),
    ("ops.dropout(x, rate=1.0, seed=[1, 2])", "rate is 1.0"),
    ("ops.dropout(x, rate=0.5, seed=[1, 2], noise_dims=Shape.of(q=2))", "'q:2' are no dims"),
    ("ops.dropout(i, rate=0.1, seed=[1, 2])", "floating numbers"),
    ("ops.dropout(x, rate=0.1, seed='seed')", "two integers"),
    ("ops.dropout(x, rate=0.1, seed=[1, 2], noise_dims='bacth')", "mean 'batch'"),
    # As arrays and tensors of TensorFlow are used.
    ("x[0]", "ops.unstack(x, 'batch')[0]"),
    ("len(x)", "x.shape.sizes"),
    ("[row for row in x]", "ops.unstack"),
    ("x.shape.as_list()", "shape.sizes"),
    ("x.shape.rank", "len(shape)"),
    ("int(x)", "no number"),
    ("tf.reduce_sum(x)", "operation of its name in ops"),
    ("np.exp(x)", "operation of its name in ops"),
    ("tf.stack([x, x])", "ops.export_tensor"),
    ("ops.reduce_sum(x, 'io', keepdims=True)", "'keepdims'; write ops.reduce_sum"),
    ("ops.softmax(x, axis=-1)", "write ops.softmax(x, dims)"),
    ("ops.stack([x, x], axis=0)", "write ops.stack(tensors, dim, position=...)"),
    ("ops.rename(x, 'batch', 'rows')", "write ops.rename(x, names)"),
    ("ops.dropout(x, 0.1)", "write ops.dropout(x, rate=..., seed=..., noise_dims=...)"),
    ("ops.dropout(x, keep_prob=0.9)", "rate=..., seed=..."),
    ("ops.dropout(x, rate=0.1)", "missing a required argument: 'seed'"),
    ("ops.conv1d(images, filters, {'rows': 'k'})", "padding=..."),
    ("ops.matmul(x, w)", "lists all operations"),
    ("ops.reduce_summ(x)", "did you mean 'reduce_sum'"),
    ("LOW.map(lambda part: None, x.slices)", "returned None; it returns one tensor"),
    ("Tensor(LOW, [None, None], x.shape)", "slices are tensors"),
    ("RULES.tensor_layout(MESH, x.shape)", "rules.tensor_layout(shape, mesh)"),
    ("LOW.tensor_layout('batch:4')", "Shape.from_text"),
    ("RULES.check('data:2')", "Mesh.from_text"),
    ("ops.gradients(bare, x)", "the loss is a float32 tensor of TensorFlow"),
    ("ops.gradients(x, i)", "int32 tensor of TensorFlow of sizes (2, 6) has no gradient"),
    ("ops.gradients(i, x, tape)", "GradientError: the loss is Tensor('batch:4/data;io:6', int32)"),
    ("ops.gradients(x, ['w'], tape)", "GradientError: the text 'w' has no gradient; sources are"),
    ("ops.gradients(x, x)", "GradientError: without a graph, gradients need the tape"),
    ("ops.gradients(of_core, v, tape)", "GradientError: variable 'v' has 2 slices in this process"),
    # Programs of cores.
    ("RUN(bare)", "[[x0], [x1]]"),
    ("RUN([[bare]])", "arguments for 1 cores were given; the mesh has 2"),
    ("RUN([[part]] * 4)", "arguments for 4 cores were given; the mesh has 2"),
    ("RUN([[x], [x]])", "give the core its slice"),
    # Rows of longer slices would get lost.
    (
        "RUN([[part], [bare]])",
        "ShapeError: argument 0 of core 1 is float32 of sizes (4, 6), but the",
    ),
    ("RUN([[part], [tf.ones([1, 6])]])", "argument 0 of core 1 is float32 of sizes (1, 6)"),
    ("RUN([[part], [array]])", "argument 0 of core 1 is float32 of sizes (4, 6)"),
    ("RUN([[tf.cast(part, tf.int32)], [part]])", "of core 0 is int32 of sizes (2, 6), but the pro"),
    ("RUN([[part], [part, part]])", "core 1 was given 2 arguments; the program was built for 1"),
    ("CORES.function(returns, RULES, tf.TensorSpec([2, 6]))", "ShapeError: the program of a core"),
    (
        "CORES.run_eagerly(returns, RULES, [[part], [part]])",
        "return the whole, ops.export_tensor(x)",
    ),
    ("CORES.run_eagerly(None, RULES, [[bare], [bare]])", "no function"),
    # Variables and pipelines.
    ("v * 2.0", "variable.tensor(lowering)"),
    ("-v", "variable.tensor(lowering)"),
    ("float(v)", "variable.tensor(lowering)"),
    ("v.assign(w)", "variable 'v' is 'batch:4;io:6', but"),
    ("v.assign(d)", "is float32, but float64 is assigned"),
    ("v.assign(tf.ones([4, 6], tf.int32))", "is float32, but int32 is assigned"),
    ("v.assign(np.ones([6, 4]))", "cannot have the shape"),
    ("v.assign(whole)", "one set of rules"),
    ("v.assign(of_core)", "DeviceError: variable 'v' has 2 slices in this process, but"),
    ("v.tensor(CORE)", "computes for 1 processors; pass a core its slice"),
    ("Variable.create('v', LAYOUT, ['CPU:0'], Constant(0.0))", "DeviceError: 1 devices were given"),
    ("Variable.create('v', x.shape, DEVICES, Constant(0.0))", "layout"),
    ("Variable.create('v', LAYOUT, 'CPU:0', Constant(0.0))", "give a list of names"),
    ("Variable.create('v', LAYOUT, ['CPU:0', 'CPU:99'], Constant(0.0))", "does not exist"),
    ("Variable.create('v', LAYOUT, DEVICES, 0.0)", "initializer"),
    ("v.tensor(MESH)", "lowering"),
    ("Normal('0.1', (1, 2))", "stddev"),
    ("Normal(0.1, 3)", "two integers"),
    ("Uniform(0.0, None, (1, 2))", "high"),
    ("SimdPipeline('layers:2', 2, 2)", "Mesh.from_text"),
    ("SimdPipeline(MESH, '2', 2)", "whole number"),
    ("SimdPipeline(MESH, 2, 2).stacked([4, 6])", "name the dims"),
    ("SimdPipeline(MESH, 2, 2)(lambda a, b, c: a, bare, {})", "import_tensor"),
    ("SimdPipeline(MESH, 2, 2)(lambda a, b, c: a, x, [w])", "dict"),
    ("SimdPipeline(MESH, 2, 2)(lambda a, b, c: a, x, {'w': bare})", "import_tensor"),
    ("SimdPipeline(MESH, 2, 2)(None, x, {})", "no function"),
]


@pytest.mark.parametrize(("code", "words"), WRONG, ids=[code for code, _ in WRONG])
def test_a_wrong_use_is_one_clear_line(code, words):
    with pytest.raises((PipemeshError, TypeError, AttributeError)) as found:
        eval(code, dict(KNOWN))
    text = str(found.value)
    assert words in f"{type(found.value).__name__}: {text}"
    assert "\n" not in text
    assert len(text) < 500
    ours = isinstance(found.value, PipemeshError)
    assert ours or "named dims" in text or text.startswith(("a Shape has", "ops has"))


X = KNOWN["x"]


@pytest.mark.parametrize(
    "io",
    ["io", " io ", "io:6", Dim("io", 6), ["io"], ("io:6",), [Dim("io", 6)], Shape.of(io=6),
     X.shape.dims[1:]],
)  # fmt: skip
def test_a_dim_is_given_alike_everywhere(io):
    """One operation for each annotation that takes dims; that all have one is checked below."""
    for use in (
        lambda io: ops.reduce_sum(X * X, io),
        lambda io: ops.cumsum(X, io),
        lambda io: ops.einsum([X, X], io),
        lambda io: ops.dropout(X, rate=0.5, seed=[1, 2], noise_dims=io),
    ):
        want, got = use("io"), use(io)
        assert str(got.shape) == str(want.shape)
        np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize(
    "dims",
    ["io;batch", "io:6;batch:4", ["io", "batch"], ["io:6", Dim("batch", 4)], ("io", "batch"),
     Shape.of(io=6, batch=4), [Shape.of(io=6), "batch"]],
)  # fmt: skip
def test_several_dims_are_given_alike_everywhere(dims):
    for result in (ops.transpose(X, dims), ops.einsum([X], dims)):
        assert str(result.shape) == "io:6;batch:4"
    assert not ops.reduce_sum(X, dims).shape.names


@pytest.mark.parametrize(
    "shape",
    ["batch:4;io:6", Shape.of(batch=4, io=6), ["batch:4", "io:6"], (Dim("batch", 4), "io:6")],
)
def test_a_shape_is_given_alike_everywhere(shape):
    for result in (
        ops.import_tensor(LOW, KNOWN["bare"], shape),
        ops.reshape(made("all:24"), shape),
        ops.broadcast_to(made("io:6"), shape),
        ops.random_uniform(LOW, shape, seed=[1, 2]),
    ):
        assert str(result.shape) == "batch:4;io:6"


@pytest.mark.parametrize(
    "dim", ["classes:3", Dim("classes", 3), [Dim("classes", 3)], ["classes:3"]]
)
def test_a_new_dim_is_given_with_its_size_alike_everywhere(dim):
    assert str(ops.one_hot(KNOWN["i"], dim).shape) == "batch:4;io:6;classes:3"
    assert str(ops.top_k(X, "io", dim)[0].shape) == "batch:4;classes:3"


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_integers_divided_are_float32(dtype):
    """They were float64, as in TensorFlow, and met no weight any more."""
    seven, two = made("batch:4", dtype) * 7, made("batch:4", dtype) * 2
    for quotient in (seven / two, seven / 2, seven / 2.0, 7 / two, 7.0 / two, ops.divide(seven, 2)):
        assert quotient.dtype == tf.float32
        np.testing.assert_array_equal(quotient.numpy(), [3.5] * 4)
    np.testing.assert_array_equal(ops.floor_divide(seven, two).numpy(), np.full(4, 3, dtype))


def test_every_parameter_of_an_operation_is_checked():
    for op in OPS.values():
        for parameter in inspect.signature(op.function).parameters.values():
            assert str(parameter.annotation) in COERCERS, f"{op.name}: {parameter}"


def test_the_readme_shows_the_table_of_the_registry():
    readme = (pathlib.Path(ops.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert readme.endswith("\n" + op_table() + "\n")


def test_a_name_is_registered_once_and_has_documentation():
    def add():
        """Is another one."""

    with pytest.raises(ValueError, match="registered twice; give it another name"):
        register("elementwise")(add)
    # Not when it is registered: with `python -OO` no function has any.
    assert all(op.function.__doc__ for op in OPS.values())
