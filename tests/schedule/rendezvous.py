"""Blocking sends and receives, run to their end."""

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action
from pipemesh.schedule.validate import Receive, Send


def check_rendezvous(steps):
    """Runs the steps of all devices; a send or receive returns when the other device has come."""
    position = [0] * len(steps)
    runnable = list(range(len(steps)))
    while runnable:
        device = runnable.pop()
        row = steps[device]
        while position[device] < len(row):
            step = row[position[device]]
            if not isinstance(step, Action):
                peer = step.device
                theirs = steps[peer]
                wanted = (Receive if isinstance(step, Send) else Send)(step.action, device)
                if position[peer] >= len(theirs) or theirs[position[peer]] != wanted:
                    break  # The peer wakes this device when it comes to the matching step.
                position[peer] += 1
                runnable.append(peer)
            position[device] += 1
    stuck = [
        f"device {device} waits at step {tick} in {steps[device][tick]}"
        for device, tick in enumerate(position)
        if tick < len(steps[device])
    ]
    if stuck:
        raise ScheduleError("deadlock: " + "; ".join(stuck))
