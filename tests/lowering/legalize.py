"""The program that a TPU's compiler would get, without a TPU."""

import re

import tensorflow as tf

from pipemesh.lowering.simd.collectives import TpuLowering

# Lists of tensors become tensors; this pass looks at functions from `main` on alone.
LISTS = "tf-tensor-list-ops-decomposition"
# The kernels of XLA stand in for operations that have no pattern of their own, as random numbers.
PIPELINE = "xla-legalize-tf{use-tf2xla-fallback=true device-type=XLA_CPU_JIT}"


def legalize(program, mesh, rules, *specs):
    """MLIR text of a core's program in XLA's operations; other operations are called `tf.X` in it.

    `program` takes a `SimdLowering` and a tensor for each spec; it returns a nest of tensors.
    """

    def core_program(core, *args):
        lowering = TpuLowering(mesh, rules, core)
        return [t for t in tf.nest.flatten(program(lowering, *args)) if t is not None]

    function = tf.function(core_program, autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec([], tf.int32), *specs)
    text = tf.mlir.experimental.convert_function(concrete, pass_pipeline="tf-standard-pipeline")
    entry = re.search(r"func\.func @(\w+)\(", text)[1]
    text = re.sub(rf"@{entry}\b", "@main", text)
    for pipeline in (LISTS, PIPELINE):
        text = tf.mlir.experimental.run_pass_pipeline(text, pipeline)
    return text


def not_lowered(text):
    """The names of TensorFlow's operations in MLIR text; loops stay as they are."""
    return sorted(set(re.findall(r"\btf\.([A-Z]\w*)\"?[( ]", text)) - {"While", "WhileRegion"})


def numbers_after(word, text):
    """The constants that follow a word, one for each time that it occurs."""
    return [
        [[int(i) for i in re.findall(r"\d+", group)] for group in re.findall(r"\[[\d, ]+\]", found)]
        for found in re.findall(rf"{word} = dense<(\[.*?\])> :", text)
    ]
