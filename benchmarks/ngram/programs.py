"""KenLM's programs: `lmplz` estimates a modified Kneser-Ney model, `query` scores text with it."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

PROGRAMS = ("lmplz", "query")
_TOTAL = re.compile(r"^Total: (\S+) OOV: \d+$", re.MULTILINE)
_COUNT = re.compile(r"^ngram \d+=(\d+)$")
# What sorting may take of memory; the rest is sorted on the disk.
_SORTING_MEMORY = "1G"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a model of n-grams is made with.

    Attributes:
        order: the longest n-gram, at least 2: KenLM has no unigram models.
        prune: n-grams that occur at most so often are left out, for each length from 1 on; the
            last number is that of all longer ones too.
    """

    order: int
    prune: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        pruned = " ".join(map(str, self.prune)) if any(self.prune) else "nothing"
        return f"order {self.order}, pruned: {pruned}"


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a model makes of a text.

    Attributes:
        nats: summed negative log likelihood, ends of lines included.
        ngrams: number of n-grams in the model.
    """

    nats: float
    ngrams: int


class KenLM:
    """The programs in a folder, or, without one, on the path of programs.

    Both read text of tokens with spaces between them; a line is a sentence.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._programs = {}
        for name in PROGRAMS:
            found = shutil.which(name, path=folder)
            if not found:
                where = f"in --kenlm={folder!r}" if folder else "on PATH"
                sys.exit(f"no {name} {where}; benchmarks/ngram/README.md says how KenLM is made")
            self._programs[name] = str(Path(found).resolve())

    def costs(
        self, setting: Setting, learned: Path, scored: Path, *, vocabulary_size: int = 0
    ) -> Costs:
        """Estimates a model of one text and scores another one with it.

        Args:
            setting: what the model is made with.
            learned: the text to learn from.
            scored: the text to score.
            vocabulary_size: number of tokens that may follow, the end of the line included. What
                the text to learn from does not have gets an equal share each. By default it is
                what that text has.
        """
        arpa = learned.with_suffix(".arpa")
        try:
            self._estimate(setting, learned, arpa, vocabulary_size)
            scores = self._run("query", "-v", "sentence", str(arpa), text=scored)
            return Costs(total(scores), _ngrams(arpa))
        finally:
            arpa.unlink(missing_ok=True)

    def _estimate(self, setting: Setting, learned: Path, arpa: Path, vocabulary_size: int) -> None:
        prune = [str(count) for count in setting.prune]
        self._run(
            *("lmplz", "--order", str(setting.order), "--prune", *prune, "--arpa", str(arpa)),
            *("--vocab_pad", str(vocabulary_size), "--memory", _SORTING_MEMORY),
            # For lengths of which none occurs once or twice, as pieces by themselves: there the
            # discounts have no estimate.
            *("--discount_fallback", "--temp_prefix", f"{learned.parent}/"),
            text=learned,
        )

    def _run(self, name: str, *arguments: str, text: Path) -> str:
        with open(text, "rb") as file:
            done = subprocess.run(
                [self._programs[name], *arguments], stdin=file, capture_output=True, text=True
            )
        if done.returncode:
            sys.exit(f"{name} {' '.join(arguments)} < {text}\n{done.stderr[-2000:]}")
        return done.stdout


def total(scores: str) -> float:
    """The nats of all that `query -v sentence` writes the scores of.

    Example:
        >>> round(total("Total: -1.5 OOV: 0\\nTotal: -0.5 OOV: 1\\n"), 4)
        4.6052
    """
    return -math.fsum(map(float, _TOTAL.findall(scores))) * math.log(10)


def write_lines(path: Path, lines: Iterable[Sequence[object]]) -> None:
    """Writes tokens with spaces between them, a line each."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(" ".join(map(str, line)) + "\n")


def _ngrams(arpa: Path) -> int:
    """The number of n-grams, of all lengths, that the head of a model's file says."""
    number = 0
    with open(arpa, encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("\\1-grams:"):
                break
            if match := _COUNT.match(line):
                number += int(match[1])
    return number
