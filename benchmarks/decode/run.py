"""Tokens a second of decoding under several plans, what rows hold, and how fast groups may go."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import ROOT, Contender, serve

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from model import PROMPT, ROWS, TOKENS, Setup, measured, memory

REFERENCE, UNCACHED = "plain", "plain, no cache"
MODEL = "heads:model;d_ff:model;vocab:model"
CONTENDERS = {
    REFERENCE: Setup(pipelined=False),
    UNCACHED: Setup(pipelined=False, cached=False),
    "layers:2, 1 group": Setup("layers:2", groups=1),
    "layers:2": Setup("layers:2", groups=2),
    "layers:2, 4 groups": Setup("layers:2", groups=4),
    "data:2": Setup("layers:1;data:2", "batch:data", groups=2),
    "model:2": Setup("layers:1;model:2", MODEL),
    "model:2, simd": Setup("layers:1;model:2", MODEL, lowering="simd"),
}
BARS = {("layers:2", REFERENCE): 1.2, (REFERENCE, UNCACHED): 1.0}
WAITING = [(2, 1), (2, 2), (2, 4), (4, 2), (4, 4), (4, 6), (8, 8)]
WAIT, WAITING_TOKENS = 0.02, 49
LONG = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", default=["speed", "memory", "waiting"])
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(measured(Setup(*json.loads(arguments.serve))))
        return
    if arguments.memory is not None:
        setup = Setup(*json.loads(arguments.memory))
        serve(lambda: memory(setup))
        return
    result: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    parts = {"speed": speed, "memory": rows_of_memory, "waiting": waiting}
    for part in arguments.parts:
        result[part] = parts[part](arguments.rounds)
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


def _contender(flag: str, setup: Setup) -> Contender:
    return Contender([sys.executable, __file__, flag, json.dumps(setup)])


def speed(rounds: int) -> object:
    """Each contender decodes all rows once a round, in turn."""
    contenders = {name: _contender("--serve", setup) for name, setup in CONTENDERS.items()}
    tokens = {}
    for name, contender in contenders.items():
        for _ in range(3):
            tokens[name] = contender.ask()["tokens"]
        if tokens[name] != tokens[REFERENCE]:
            raise SystemExit(f"{name} says other tokens than {REFERENCE}")
    found: dict[str, dict[str, list[float]]] = {
        name: {"prefill": [], "generation": [], "cpu": []} for name in contenders
    }
    for _ in range(rounds):
        for name, contender in contenders.items():
            answer = contender.ask()
            for what, values in found[name].items():
                values.append(answer[what])
    for contender in contenders.values():
        contender.close()

    def ratio(name: str, other: str, what: str = "generation") -> float:
        pairs = zip(found[name][what], found[other][what], strict=True)
        return statistics.median(theirs / mine for mine, theirs in pairs if mine)

    print(f"{ROWS} prompts of {PROMPT} tokens, {TOKENS} more of each; {rounds} rounds in turn")
    columns = (
        f"{'prefill':>9} {'/ plain':>8} {'tokens/s':>9} {'/ plain':>8} {'CPU':>7} {'cores':>6}"
    )
    print(f"{'':22} {columns}")
    for name, values in found.items():
        median = {what: statistics.median(each) for what, each in values.items()}
        prefill = (
            f"{1e3 * median['prefill']:7.1f}ms {ratio(name, REFERENCE, 'prefill'):8.2f}"
            if name != UNCACHED
            else f"{'':9} {'':8}"
        )
        count = ROWS * (TOKENS - (name != UNCACHED))
        wall = median["prefill"] + median["generation"]
        print(
            f"{name:22} {prefill} {count / median['generation']:9,.0f} "
            f"{ratio(name, REFERENCE):8.2f} {1e3 * median['cpu']:5.0f}ms "
            f"{median['cpu'] / wall:6.2f}"
        )
    plain = {what: statistics.median(each) for what, each in found[REFERENCE].items()}
    cores = plain["cpu"] / (plain["prefill"] + plain["generation"])
    print(
        f"limit: {REFERENCE} keeps {cores:.2f} of 2 cores busy; the same work on both of them all "
        f"the time were {2 / cores:.2f} times as many tokens"
    )
    for (name, other), bar in BARS.items():
        share = ratio(name, other)
        verdict = "met" if share >= bar else "NOT met"
        print(
            f"{name} / {other}, generation, median over rounds: {share:.2f} (bar {bar}: {verdict})"
        )
    return found


def rows_of_memory(_: int) -> object:
    """What is kept for a row, and how much more a process holds for more rows."""
    found = []
    print(f"\nmemory of a row of {LONG} places      kept  closed form  process, by 16 and 48 rows")
    for name, setup in CONTENDERS.items():
        if name in (UNCACHED, "layers:2, 1 group"):
            continue
        answers = []
        for rows in (16, 48):
            contender = _contender("--memory", setup._replace(rows=rows, length=LONG))
            answers.append(contender.ask())
            contender.close()
        kept, closed = (answers[0][what] / 16 / 2**20 for what in ("kept", "closed"))
        more = (answers[1]["peak"] - answers[0]["peak"]) / 32 / 2**20
        print(
            f"{name:34} {kept:6.2f} MiB {closed:6.2f} MiB {more:10.2f} MiB ({more / closed:.2f} x)"
        )
        found.append({"name": name, "answers": answers})
    return found


def waiting(rounds: int) -> object:
    """Stages that wait: the share of the steady rate of the table that is reached."""
    from pipemesh.backend.devices import start_cpu_devices

    start_cpu_devices(8)
    from shared.stack import quiet

    quiet()
    from lingvo.core import py_utils
    from waiting_stages import Waiters

    py_utils.SetEagerMode(True)
    found = []
    print(f"\nstages that wait {1e3 * WAIT:.0f} ms, {WAITING_TOKENS} tokens; g groups, p stages")
    print(
        "p  g  rate of the table, beginning and end included  measured  (shares of g / max(g, p))"
    )
    for stages, groups in WAITING:
        waiters = Waiters(stages, groups, WAIT)
        for _ in range(2):
            # Groups that begin and groups that go on have graphs of their own.
            waiters.measure(WAITING_TOKENS)
        all_of = [waiters.measure(WAITING_TOKENS) for _ in range(min(rounds, 5))]
        simulated = statistics.median(each.simulated / each.steady for each in all_of)
        share = statistics.median(each.rate / each.steady for each in all_of)
        verdict = "met" if min(simulated, share) >= 0.9 else "NOT met"
        print(f"{stages}  {groups}  {simulated:.3f}  {share:.3f} (bar 0.9: {verdict})")
        found.append({"stages": stages, "groups": groups, "table": simulated, "rate": share})
    return found


if __name__ == "__main__":
    main()
