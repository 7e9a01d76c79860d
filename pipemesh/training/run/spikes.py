"""Losses that stand out of those before them."""

from __future__ import annotations

import math

# Of the running mean of losses, and of their squared distances from it.
_DECAY = 0.98
# So many losses have to be known; a loss stands out by so many standard deviations, and by such a
# share of the mean: a loss that is nearly constant makes no spikes of its noise.
_FEWEST = 50
_DEVIATIONS = 6.0
_SHARE = 0.1


class Spikes:
    """Watches losses, one a step.

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
        """Takes the loss of a step.

        Args:
            loss: finite.

        Returns:
            What stands out; None if nothing does. Of a loss that stays high it is told until the
            mean has come after it, at most for as many steps as that takes.
        """
        apart = loss - self._mean
        told = None
        if self._count >= _FEWEST:
            least = max(_DEVIATIONS * math.sqrt(self._square), _SHARE * abs(self._mean))
            if apart > least:
                told = f"the loss is {loss:.3f}, after {self._mean:.3f} on average"
        # As means of all there is, until there is more than the decay remembers.
        self._count += 1
        new = max(1 - _DECAY, 1 / self._count)
        self._mean += new * apart
        self._square += new * (apart**2 * (1 - new) - self._square)
        return told
