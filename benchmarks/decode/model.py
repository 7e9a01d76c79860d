"""The language model as it decodes: one batch of prompts, under any plan."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROWS, PROMPT, TOKENS = 16, 64, 64


class Setup(NamedTuple):
    """How it is run.

    Attributes:
        mesh: as text.
        layout: as text.
        groups: among which the rows are divided.
        pipelined: whether there is a pipeline at all.
        cached: whether keys and values are kept; else each token is computed of the whole row.
        length: places a row.
        rows: in all.
        lowering: `placement`, or `simd` for one program on all devices.
    """

    mesh: str = "layers:1"
    layout: str = ""
    groups: int = 1
    pipelined: bool = True
    cached: bool = True
    length: int = PROMPT + TOKENS
    rows: int = ROWS
    lowering: str = "placement"


def make(setup: Setup) -> tuple[Any, Any]:
    """A generator with random weights, and its task."""
    from pipemesh.backend.devices import start_cpu_devices
    from pipemesh.plan import Plan

    plan = Plan(setup.mesh, setup.layout, "gpipe", 1, lowering=setup.lowering)
    start_cpu_devices(plan.mesh.num_devices)
    from shared.stack import quiet

    quiet()
    from lingvo.core import py_utils

    from models.one_billion_word.params import OneBillionWordTiny
    from pipemesh.decoding import Sampler
    from pipemesh.decoding.generator import generator_of
    from pipemesh.training.trained_task import TrainedTask

    py_utils.SetEagerMode(True)
    config = OneBillionWordTiny()
    config.PLAN, config.PIPELINED = plan, setup.pipelined
    config.SEQUENCE_LENGTH, config.CHOSEN = setup.length, ()
    trained = TrainedTask(config.Task(), plan, "CPU", 0, learns=False)
    return generator_of(trained, setup.length, Sampler()), config


def prompts_of(setup: Setup, vocab: int) -> list[Any]:
    """Ids, lengths and seeds of each group: the same rows however they are divided."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, vocab, [setup.rows, PROMPT]).astype(np.int32)
    size = setup.rows // setup.groups
    return [
        (each, np.full([size], PROMPT, np.int32), np.zeros([size, 2], np.int32))
        for each in np.split(ids, setup.groups)
    ]


def measured(setup: Setup) -> Callable[[], dict[str, Any]]:
    """A function that decodes all rows, and says how long that took."""
    import numpy as np

    generator, config = make(setup)
    prompts = prompts_of(setup, config.VOCAB_SIZE)
    numbers = list(range(setup.groups))
    none: Sequence[Any] = [None] * setup.groups

    def cached() -> tuple[float, float, Any]:
        begin = time.perf_counter()
        found = generator.begin(numbers, prompts, none)
        first = [told[0].numpy() for _, told in found]
        middle = time.perf_counter()
        _, told = generator.go_on([group for group, _ in found], TOKENS - 1)
        rest = [ids.numpy() for ids, _ in told]
        end = time.perf_counter()
        tokens = [np.concatenate([a[None], b]) for a, b in zip(first, rest, strict=True)]
        return middle - begin, end - middle, np.concatenate(tokens, 1)

    def uncached() -> tuple[float, float, Any]:
        rows = [np.zeros([len(ids), setup.length], np.int32) for ids, _, _ in prompts]
        for row, (ids, _, _) in zip(rows, prompts, strict=True):
            row[:, :PROMPT] = ids
        begin, tokens = time.perf_counter(), []
        for place in range(PROMPT, PROMPT + TOKENS):
            now = [
                (row, np.full([len(row)], place, np.int32), seeds)
                for row, (_, _, seeds) in zip(rows, prompts, strict=True)
            ]
            found = [told[0].numpy() for _, (_, told) in zip(now, _begin(now), strict=True)]
            for row, ids in zip(rows, found, strict=True):
                if place < setup.length:
                    row[:, place] = ids
            tokens.append(np.concatenate(found))
        return 0.0, time.perf_counter() - begin, np.stack(tokens)

    def _begin(now: Any) -> Any:
        return generator.begin(numbers, now, none)

    def step() -> dict[str, Any]:
        cpu = time.process_time()
        prefill, generation, tokens = (cached if setup.cached else uncached)()
        return {
            "prefill": prefill,
            "generation": generation,
            "cpu": time.process_time() - cpu,
            "tokens": tokens.tolist(),
        }

    return step


def memory(setup: Setup) -> dict[str, int]:
    """Bytes that are kept for all rows, and the most that the process held, after some tokens."""
    import tensorflow as tf

    generator, config = make(setup)
    prompts = prompts_of(setup, config.VOCAB_SIZE)
    numbers = list(range(setup.groups))
    found = generator.begin(numbers, prompts, [None] * setup.groups)
    groups, _ = generator.go_on([group for group, _ in found], 8)
    kept = tf.nest.flatten([group.kept for group in groups])
    closed = 2 * config.NUM_LAYERS * config.MODEL_DIM * setup.length * 4 * setup.rows
    return {
        "kept": sum(int(tf.size(each)) * each.dtype.size for each in kept),
        "closed": closed,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
