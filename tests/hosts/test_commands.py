"""Evaluation, decoding and the report, where workers compute."""

import json
import re

import pytest

from pipemesh.commands.main import main
from tests.hosts.workers import started
from tests.models.one_billion_word.program import SMALL, finish, open_process
from tests.warm import warm

# With two blocks of five.
PROGRAM = """
import sys
from models.one_billion_word import sizes
sizes.Tiny.NUM_LAYERS = 2
from pipemesh.commands import main as cli
from pipemesh.commands import process
from models.one_billion_word.train import main
if sys.argv[1] == "train":
    del sys.argv[1]
    process.run(main)
sys.exit(cli.main(sys.argv[1:]))
"""
DRAWN = ["--prompt=The module", "--temperature=0.9", "--max_tokens=5", "--format=json"]


def output(command, *flags):
    """The lines of standard output."""
    code, out, err = finish(open_process(warm("-c", PROGRAM, command, *flags)))
    assert code == 0, err
    return out.splitlines()


def bits(lines):
    """Bits a byte, which are told with three decimals."""
    return float(re.search(r"([\d.]+) bits/byte", lines[-1])[1])


def assert_same_text(lines, wanted):
    (found,), (wanted,) = map(json.loads, lines), map(json.loads, wanted)
    assert (found["tokens"], found["text"]) == (wanted["tokens"], wanted["text"])
    assert found["log_probs"] == pytest.approx(wanted["log_probs"], abs=1e-4)


@pytest.fixture(scope="module")
def addresses():
    with started(2) as (_, addresses):
        yield f"--cluster={','.join(addresses)}"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory, addresses):
    """The log directory of a run as one program on two workers, with evaluations."""
    folder = tmp_path_factory.mktemp("workers") / "run"
    flags = ["--lowering=simd", "--mesh_shape=layers:2", "--steps=3", "--log_format=json"]
    lines = output("train", *SMALL, *flags, addresses, f"--logdir={folder}")
    events = [json.loads(line) for line in lines]
    assert [event["step"] for event in events if event["event"] == "final"] == [3]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_evaluate_and_decode_as_one_process(logdir, addresses):
    """As one program for all devices, and placed."""
    where, simd = f"--logdir={logdir}", "--lowering=simd"
    alone = output("decode", where, simd, *DRAWN)
    bits_a_byte = bits(output("evaluate", where, addresses, simd))
    assert bits_a_byte == pytest.approx(bits(output("evaluate", where)), abs=2e-3)
    for lowering in (simd, "--lowering=placement"):
        assert_same_text(output("decode", where, addresses, lowering, *DRAWN), alone)


@pytest.mark.slow
def test_the_report_with_workers_is_like_any_other(logdir):
    events = [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    page = (logdir / "report.html").read_text(encoding="utf-8")
    assert "layers:2" in page
    assert main(["report", str(logdir), f"--output={logdir / 'again.html'}"]) == 0
    assert (logdir / "again.html").read_text(encoding="utf-8") == page
