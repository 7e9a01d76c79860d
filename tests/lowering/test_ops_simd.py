"""Every operation as the program of one core equals plain TensorFlow on every core.

Generated from the registry and `tests/lowering/cases`, on meshes of one, two and three axes with up
to 8 logical CPU devices that talk to each other by TensorFlow's collectives. Every layout is run
without a graph, each core in its thread; layouts that differ only by exchanging axes of one size
are run once, a different one for each case. Tracing takes its time, so as a graph each case runs on
the mesh of three axes only, under the two layouts that split most dims, or one if it is `thin`.
"""

import concurrent.futures
import functools
import json
import subprocess
import sys
import threading

import pytest

from tests.lowering.cases import ALL
from tests.lowering.cases.case import MESHES, THIN_MESHES, thinned

EAGER = [(mesh_text, name, False) for mesh_text in MESHES for name in ALL]
GRAPHS = [(mesh_text, name, True) for mesh_text, name in thinned(ALL, THIN_MESHES)]
TODO = EAGER + GRAPHS
NUM_PROCESSES = 2
SECONDS_WITHOUT_A_RESULT = 60


def run_process(todo):
    """Results by mesh, case and kind; ends early where the process hangs or dies."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lowering.simd_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    process.stdin.write(json.dumps(todo))
    process.stdin.close()
    results = {}
    while True:
        watch = threading.Timer(SECONDS_WITHOUT_A_RESULT, process.kill)
        watch.start()
        line = process.stdout.readline()
        watch.cancel()
        if not line:
            break
        *what, found = json.loads(line)
        results[tuple(what)] = found
    process.stdout.close()
    process.wait()
    reader.join()
    process.stderr.close()
    return results, errors[0]


def results_of(todo):
    """Goes on in a new process behind what makes one hang or die."""
    results = {}
    while len(results) < len(todo):
        rest = [item for item in todo if item not in results]
        done, errors = run_process(rest)
        results |= done
        if len(done) < len(rest):
            broken = next(item for item in rest if item not in results)
            results[broken] = [f"the process hung or died: {errors[-2000:]}"]
    return results


@functools.cache
def all_results():
    # Python runs one thread at a time, so two processes are faster than one.
    halves = [TODO[half::NUM_PROCESSES] for half in range(NUM_PROCESSES)]
    with concurrent.futures.ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return dict(item for part in pool.map(results_of, halves) for item in part.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mesh_text", "name", "in_graph"), TODO)
def test_result_and_gradients_equal_those_of_the_whole_tensors(mesh_text, name, in_graph):
    assert not all_results()[mesh_text, name, in_graph]
