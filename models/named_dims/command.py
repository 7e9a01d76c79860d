"""The command line of the examples: flags, one-line errors, and the training loop."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS, Command, Flag, FlagError, parse
from pipemesh.commands.workers import device_flags, device_type, start_devices
from pipemesh.errors import LayoutError, PipemeshError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.training.run.console import SECONDS_A_REFRESH

if TYPE_CHECKING:
    from .trainer import Arrays, Network, Trainer


def shared_flags(
    *,
    batch_size: int,
    hidden_size: int,
    learning_rate: float,
    eval_every: int,
    hidden: str = "Units of the hidden layer.",
) -> tuple[Flag, ...]:
    """Returns the flags of all examples; the arguments are defaults."""
    return (
        *device_flags(
            "data:2",
            "batch:data",
            "Mesh of devices, such as 'data:2;model:2'.",
            "Which dims are split over which axes, such as 'batch:data;hidden:model'.",
        ),
        Flag(
            "lowering",
            default="placement",
            choices=["placement", "simd"],
            help="One graph for all devices, or one program that all devices run.",
        ),
        Flag("batch_size", int, batch_size, least=1, help="Examples a step."),
        Flag("hidden_size", int, hidden_size, least=1, help=hidden),
        Flag("learning_rate", float, learning_rate, help="Factor of the gradients."),
        Flag("seed", int, 0, least=0, help="Seed of weights and data."),
        Flag("eval_every", int, eval_every, least=1, help="Steps between evaluations."),
        Flag("curve", value="FILE", help="File to write the loss of every step to, as CSV."),
    )


def run(train: Callable[[], None], about: str | None, flags: tuple[Flag, ...]) -> NoReturn:
    """Runs a training program, and ends with its exit code; `about` starts its help."""

    def program() -> int:
        parse(sys.argv, Command(process.name_of_main(), about, flags))
        train()
        return 0

    sys.exit(process.exit_code(program))


def make_trainer(network: Network, size_flags: Mapping[str, str]) -> Trainer:
    """Starts the devices, builds the training step from the flags, and prints the plan.

    `size_flags` names the flag of each dim whose size a flag sets.
    """
    if not (math.isfinite(FLAGS.learning_rate) and FLAGS.learning_rate > 0):
        raise FlagError(f"--learning_rate={FLAGS.learning_rate}: it must be above 0")
    mesh = _mesh()
    rules = _rules(mesh, network)
    kind = device_type(mesh.num_devices)
    start_devices(mesh, kind)
    from .trainer import TRAINERS, plan_report

    devices = [f"{kind}:{i}" for i in range(mesh.num_devices)]
    try:
        trainer = TRAINERS[FLAGS.lowering](network, mesh, rules, devices, FLAGS.learning_rate)
    except LayoutError as error:
        sizes = ", ".join(f"--{flag} is the size of {dim!r}" for dim, flag in size_flags.items())
        raise FlagError(f"--layout={FLAGS.layout!r}: {error} ({sizes})") from error
    print(f"mesh {mesh}, layout '{rules}', {FLAGS.lowering} on {mesh.num_devices} x {kind}\n")
    print(plan_report(trainer, mesh, rules), end="\n\n", flush=True)
    return trainer


def _mesh() -> Mesh:
    try:
        return Mesh.from_text(FLAGS.mesh_shape)
    except PipemeshError as error:
        raise FlagError(f"--mesh_shape={FLAGS.mesh_shape!r}: {error}") from error


def _rules(mesh: Mesh, network: Network) -> LayoutRules:
    from .trainer import dim_names

    try:
        rules = LayoutRules.from_text(FLAGS.layout)
        rules.check(mesh, dim_names(network))
    except PipemeshError as error:
        raise FlagError(f"--layout={FLAGS.layout!r}: {error}") from error
    return rules


def train(
    trainer: Trainer, batches: Iterator[Arrays], steps: int, evaluate: Callable[[], str]
) -> None:
    """Trains with a progress bar, and prints loss and evaluation from time to time.

    It raises PipemeshError for a loss that is not finite, OSError if the curve cannot be written.
    """
    from tqdm import tqdm

    with (
        _curve() as write,
        tqdm(
            total=steps,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            mininterval=SECONDS_A_REFRESH[True],
            # A file gets the lines of evaluations alone.
            disable=not sys.stderr.isatty(),
        ) as bar,
    ):
        bar.write(f"step 0: {evaluate()}")
        for step in range(1, steps + 1):
            loss = trainer.train_step(next(batches))
            if not math.isfinite(loss):
                raise FlagError(
                    f"--learning_rate={FLAGS.learning_rate}: the loss is {loss} at step {step}; "
                    "give a lower one"
                )
            write(f"{step},{loss!r}\n")
            bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
            bar.update()
            if step % FLAGS.eval_every == 0 or step == steps:
                bar.write(f"step {step}: loss {loss:.4g}, {evaluate()}")


@contextlib.contextmanager
def _curve() -> Iterator[Callable[[str], object]]:
    if FLAGS.curve is None:
        yield lambda line: None
        return
    try:
        file = open(FLAGS.curve, "w", encoding="utf-8")
    except OSError as error:
        raise FlagError(f"--curve={FLAGS.curve!r}: {error.strerror}") from error
    with file:
        file.write("step,loss\n")
        yield file.write
