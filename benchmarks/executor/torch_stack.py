"""The stack in torch.distributed.pipelining: `Schedule1F1B`, two gloo processes.

To be run with the Python of an environment that has torch; needs neither TensorFlow nor pipemesh.
The process that is asked is the first stage; it starts the others, one a stage.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from shared.children import start
from shared.contender import serve
from shared.stack import Stack, initial_weight
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Block(nn.Module):
    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        self.first = nn.Linear(stack.dim, stack.hidden)
        self.second = nn.Linear(stack.hidden, stack.dim)
        with torch.no_grad():
            for layer, name in ((self.first, "w1"), (self.second, "w2")):
                # Linear keeps the transpose.
                shape = (layer.in_features, layer.out_features)
                layer.weight.copy_(
                    torch.from_numpy(initial_weight(f"block{number}/{name}", shape)).T
                )
                layer.bias.zero_()

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Rank:
    """One process of the pipeline."""

    def __init__(self, stack: Stack, rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=stack.stages
        )
        size = stack.blocks // stack.stages
        self._module = nn.Sequential(
            *(Block(stack, number) for number in range(rank * size, (rank + 1) * size))
        )
        stage = PipelineStage(self._module, rank, stack.stages, torch.device("cpu"))
        # Gradients of the sum of the microbatches' losses, not of their mean.
        self._schedule = Schedule1F1B(
            stage,
            stack.microbatches,
            loss_fn=lambda y, _: (y * y).sum(),
            scale_grads=False,
        )
        self._x = torch.from_numpy(stack.batch()) if rank == 0 else None
        # The schedule wants a target, which the loss does not.
        self._target = torch.zeros(stack.rows, 1) if rank == stack.stages - 1 else None

    def step(self) -> dict[str, float]:
        """Forward and backward; what this rank knows of the results."""
        cpu = time.process_time()
        self._module.zero_grad(set_to_none=True)
        known = {}
        if self._target is not None:
            losses = []
            self._schedule.step(target=self._target, losses=losses)
            known["loss"] = float(sum(loss.detach() for loss in losses))
        elif self._x is not None:
            self._schedule.step(self._x)
            known["norm"] = float(self._module[0].first.bias.grad.norm())
        else:
            self._schedule.step()
        return {**known, "cpu": time.process_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stack", required=True, help="fields of the stack as JSON")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", help="a file that the processes meet at")
    arguments = parser.parse_args()
    stack = Stack(**json.loads(arguments.stack))
    if arguments.rank:
        serve(Rank(stack, arguments.rank, arguments.meeting).step)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        command = [sys.executable, __file__, "--stack", arguments.stack, "--meeting", meeting]
        others = [
            start(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, stack.stages)
        ]
        mine = Rank(stack, 0, meeting)

        def step() -> list[float]:
            begin = time.perf_counter()
            for other in others:
                other.stdin.write("\n")
                other.stdin.flush()
            answers = [mine.step(), *(json.loads(other.stdout.readline()) for other in others)]
            seconds = time.perf_counter() - begin
            known = {key: value for answer in answers for key, value in answer.items()}
            cpu = sum(answer["cpu"] for answer in answers)
            return [seconds, cpu, known["loss"], known["norm"]]

        serve(step)
        for other in others:
            other.stdin.close()
            other.wait()


if __name__ == "__main__":
    main()
