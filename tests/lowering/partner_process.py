"""One of two processes whose cores should compute together, and what is said when they cannot.

A process of its own, because it is killed or loses its collectives. Its arguments are the addresses
of both, its index, and what to do: `differ`, `leader` (the first process is killed) or `absent`.
Prints a JSON line for each case.
"""

import json
import os
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from pipemesh.backend.cluster import connect_processes
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.lowering.simd.cores import Cores
from pipemesh.mesh import LayoutRules, Mesh

SCALAR = tf.TensorSpec([], tf.float32)


def tell(case, run):
    """Prints the case and what came of it: a value, or the error's type and text, and seconds."""
    begin = time.monotonic()
    try:
        found = run()
    except Exception as error:
        found = [type(error).__name__, str(error)]
    print(json.dumps([case, found, time.monotonic() - begin]), flush=True)


def program(lowering, x):
    return lowering.all_reduce((x,), ["data"])[0]


def longer(lowering, x):
    return program(lowering, program(lowering, x))


def failing(lowering, x):
    raise KeyError("ill")


def kill_if(condition):
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    addresses, process, todo = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
    start_cpu_devices(2)
    devices = connect_processes(addresses, process)
    mesh = Mesh.from_text("data:4")

    def cores(first_core=2 * process, time_limit_s=60.0, mesh=mesh):
        return Cores(mesh, devices, first_core, time_limit_s)

    if todo == "absent":
        tell("absent", lambda: cores(time_limit_s=8.0).function(program, LayoutRules(), SCALAR))
        os._exit(0)
    good = cores()
    step = good.function(program, LayoutRules(), SCALAR)
    args = [[tf.constant(1.0 + 2 * process + i)] for i in range(2)]
    tell("good", lambda: [float(y) for y in step(args)])
    if todo == "leader":
        kill_if(process == 0)
        tell("leader", lambda: step(args))
        os._exit(0)
    mine = longer if process else program
    tell("program", lambda: good.function(mine, LayoutRules(), SCALAR) and None)
    mine = failing if process else program
    tell("failing", lambda: good.function(mine, LayoutRules(), SCALAR) and None)
    spec = tf.TensorSpec([1 + process], tf.float32)
    tell("sizes", lambda: good.function(program, LayoutRules(), spec) and None)
    other = cores(mesh=Mesh.from_text("data:2;model:2" if process else "data:4"))
    tell("mesh", lambda: other.function(program, LayoutRules(), SCALAR) and None)
    twice = cores(first_core=0)
    tell("twice", lambda: twice.function(program, LayoutRules(), SCALAR) and None)
    tell("good again", lambda: [float(y) for y in step(args)])
    kill_if(process == 1)
    tell("killed", lambda: [float(y) for y in step(args)])
    # Without a farewell to the other one.
    os._exit(0)


if __name__ == "__main__":
    main()
