"""Starts workers on this machine, and a command that drives them.

    pipemesh launch --processes=4 -- pipemesh train --mesh_shape=layers:4 --model=...
    pipemesh launch --processes=2 -- python -m models.one_billion_word.train --mesh_shape=layers:2

The command finds the workers by TF_CONFIG. Its output and its exit code are passed on. Workers end
with the command, or with the launcher, however these end; a worker that ends before is restarted.
"""

from __future__ import annotations

from pipemesh.commands.flags import Command, Flag, parse

COMMAND = Command(
    "pipemesh launch",
    __doc__,
    (
        Flag("command", argument="...", help="The command and its arguments."),
        Flag(
            "processes",
            int,
            required=True,
            value="N",
            least=1,
            help="Number of workers to start.",
        ),
        Flag("spares", int, 0, value="N", least=0, help="Number of spares that replace lost ones."),
        Flag(
            "cpu_devices", int, 1, value="N", least=1, help="Number of CPU devices of each worker."
        ),
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        DeviceError: there is nothing to launch, or workers cannot be started.
    """
    flags = parse(argv, COMMAND)
    from pipemesh.hosts.processes import launch

    return launch(flags.command or [], flags.processes, flags.spares, flags.cpu_devices)
