"""Loss spikes: losses far above the mean of those before."""

from __future__ import annotations

import math

# Decay of the running mean and variance of losses.
_DECAY = 0.98
# A spike needs this many losses before it. It exceeds the mean by this many standard deviations and
# by this share of the mean, as nearly constant losses would make spikes of noise.
_FEWEST = 50
_DEVIATIONS = 6.0
_SHARE = 0.1


class Spikes:
    """A detector of loss spikes.

    Example:
        >>> spikes = Spikes()
        >>> [spikes.add(2.0 + 0.01 * (step % 3)) for step in range(60)] == [None] * 60
        True
        >>> spikes.add(3.5)
        'the loss is 3.500, after 2.010 on average'
    """

    def __init__(self) -> None:
        self._count, self._mean, self._square = 0, 0.0, 0.0

    def add(self, loss: float) -> str | None:
        """Adds a finite loss, and describes it if it is a spike; None otherwise.

        A loss that stays high is reported until the mean has caught up with it.
        """
        apart = loss - self._mean
        told = None
        if self._count >= _FEWEST:
            least = max(_DEVIATIONS * math.sqrt(self._square), _SHARE * abs(self._mean))
            if apart > least:
                told = f"the loss is {loss:.3f}, after {self._mean:.3f} on average"
        # A plain mean until there are more losses than the decay remembers.
        self._count += 1
        new = max(1 - _DECAY, 1 / self._count)
        self._mean += new * apart
        self._square += new * (apart**2 * (1 - new) - self._square)
        return told
