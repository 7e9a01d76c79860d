"""Evaluation, decoding, scoring and the report, where several processes compute."""

import json
import re

import pytest

from pipemesh.commands.main import main
from tests.hosts.faults import LAUNCH
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
LAUNCHED = [*LAUNCH, "--processes=2", "--"]
DRAWN = ["--prompt=The module", "--temperature=0.9", "--max_tokens=5", "--format=json"]


def said(command, *flags, launch=()):
    """The lines of standard output."""
    code, out, err = finish(open_process([*launch, *warm("-c", PROGRAM, command, *flags)]))
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
def logdir(tmp_path_factory):
    """What two processes have trained, and judged while they did."""
    folder = tmp_path_factory.mktemp("together") / "run"
    flags = ["--lowering=simd", "--mesh_shape=layers:2", "--steps=3", "--log_format=json"]
    lines = said("train", *SMALL, *flags, f"--logdir={folder}", launch=LAUNCHED)
    events = [json.loads(line) for line in lines]
    assert [each["step"] for each in events if each["event"] == "final"] == [3]
    return folder


@pytest.fixture(scope="module")
def alone(logdir):
    """What one process makes of it, as one program for all devices."""
    where = f"--logdir={logdir}"
    return bits(said("evaluate", where)), said("decode", where, "--lowering=simd", *DRAWN)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_processes_evaluate_and_decode_as_one_does(logdir, alone):
    simd = ["--lowering=simd", f"--logdir={logdir}"]
    assert bits(said("evaluate", *simd, launch=LAUNCHED)) == pytest.approx(alone[0], abs=2e-3)
    assert_same_text(said("decode", *simd, *DRAWN, launch=LAUNCHED), alone[1])


@pytest.mark.slow
def test_each_of_several_processes_reads_the_texts(logdir):
    flags = ["--cluster=127.0.0.1:1", "--process=0", "--lowering=simd", "--file=-"]
    command = warm("-c", PROGRAM, "decode", f"--logdir={logdir}", *flags)
    code, _, err = finish(open_process(command))
    assert code == 2
    assert "each of them reads the texts; give a file that all of them have" in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_evaluate_and_decode_what_processes_have_trained(logdir, alone):
    with started(2) as (_, addresses):
        flags = [f"--cluster={','.join(addresses)}", f"--logdir={logdir}"]
        found = bits(said("evaluate", *flags, "--lowering=placement"))
        assert found == pytest.approx(alone[0], abs=2e-3)
        assert_same_text(said("decode", *flags, *DRAWN), alone[1])


@pytest.mark.slow
def test_the_report_of_several_processes_is_like_any_other(logdir):
    """The first one has written it, from a record that has every event once."""
    events = [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]
    assert [each["step"] for each in events if each["event"] == "step"] == [1, 2, 3]
    page = (logdir / "report.html").read_text(encoding="utf-8")
    assert "layers:2" in page
    assert main(["report", str(logdir), f"--output={logdir / 'again.html'}"]) == 0
    assert (logdir / "again.html").read_text(encoding="utf-8") == page
