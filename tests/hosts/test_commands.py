"""Evaluation and decoding where workers compute."""

import json
import re

import pytest

from tests.hosts.workers import started
from tests.models.one_billion_word.program import finish, open_process, run
from tests.models.one_billion_word.test_decode import PROGRAM
from tests.warm import warm

DRAWN = ["--prompt=The module", "--temperature=0.9", "--max_tokens=5", "--format=json"]


def output(command, *flags):
    """The last line of standard output."""
    code, out, err = finish(open_process(warm("-c", PROGRAM, command, *flags)))
    assert code == 0, err
    return out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_evaluate_and_decode_as_one_process(tmp_path):
    """As one program for all devices, and placed."""
    where = f"--logdir={tmp_path}"
    # All of the held-out text, as `evaluate` does it.
    words = ["--mesh_shape=layers:1", "--batch_size=32", "--steps=1", "--eval_batches=100000"]
    run(*words, where)
    lines = (tmp_path / "record.jsonl").read_text().splitlines()
    (final,) = [event for event in map(json.loads, lines) if event["event"] == "final"]
    wanted = json.loads(output("decode", where, "--plain", *DRAWN))
    with started(2) as (_, addresses):
        cluster = [f"--cluster={','.join(addresses)}", "--mesh_shape=layers:2"]
        line = output("evaluate", where, *cluster, "--lowering=simd")
        # Three decimals are told.
        bits_a_byte = float(re.search(r"([\d.]+) bits/byte", line)[1])
        assert bits_a_byte == pytest.approx(final["judged"], abs=2e-3)
        for lowering in ("--lowering=simd", "--lowering=placement"):
            found = json.loads(output("decode", where, *cluster, lowering, *DRAWN))
            assert (found["tokens"], found["text"]) == (wanted["tokens"], wanted["text"])
            assert found["log_probs"] == pytest.approx(wanted["log_probs"], abs=1e-4)
