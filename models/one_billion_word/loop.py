"""The loop of training: steps, progress, evaluation, summaries and saving.

What is only reported may fail without ending a run. What ends a run from outside, a signal or a
text that is gone, ends it after a checkpoint was saved.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from models.command import SECONDS_A_REFRESH
from models.one_billion_word.console import ticking, waiting
from models.one_billion_word.corpus import Corpus
from models.one_billion_word.metrics import Score, ratio
from models.one_billion_word.request import Request
from models.one_billion_word.trainer import Trainer
from models.one_billion_word.unigram import fit_unigram
from models.one_billion_word.vocabulary import Vocabulary
from pipemesh.backend.peak import peak_memory
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import DataError, NotFiniteError, SaveError
from pipemesh.partition.text import bytes_text
from pipemesh.schedule.render import to_html, to_trace
from pipemesh.training import Spikes

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A shell reports the number of the signal beyond this.
_BY_SIGNAL = 128
# Steps that speed is told of once.
_MEASURED_STEPS = 5
# Steps that may be skipped one after the other: more are no accident of the data.
_MOST_IN_A_ROW = 10


class Loop:
    """Trains, and tells of it.

    Args:
        request: what is asked for.
        trainer: what is trained.
        corpus: the text.
        vocabulary: its vocabulary.
    """

    def __init__(
        self, request: Request, trainer: Trainer, corpus: Corpus, vocabulary: Vocabulary
    ) -> None:
        self._request, self._trainer = request, trainer
        self._corpus, self._vocabulary = corpus, vocabulary
        self._stop: int | None = None
        self._rate: float | None = None
        self._spikes, self._in_a_row = Spikes(), 0
        # What the devices can do in flops a second; the first steps, and their seconds.
        self._peak, self._measured_steps, self._seconds = 0.0, 0, 0.0
        self._writers: dict[str, Any] = {}
        self._complained: set[str] = set()

    def run(self) -> int:
        """Trains, evaluates and saves; returns the exit code."""
        # Who started it with `nohup` ignores SIGHUP, and is to have it so.
        stops = [s for s in _STOPS if signal.getsignal(s) is not signal.SIG_IGN]
        old = {s: signal.signal(s, self._request_stop) for s in stops}
        try:
            self._train()
            if self._stop is not None:
                path = self._trainer.save()
                name = signal.Signals(self._stop).name
                print(f"{name}: saved {path}; run the same command again to go on", flush=True)
                return _BY_SIGNAL + self._stop
        except DataError as error:
            try:
                kept = f"saved {self._trainer.save()}"
            except SaveError as failed:
                kept = f"nor can it be saved ({failed}), {self._trainer.saved or 'nothing'} is kept"
            raise DataError(
                f"step {self._trainer.step + 1}: {error}; {kept}: put the text back and run the "
                "same command again to go on"
            ) from error
        except Exception:
            # What was confirmed is written, before the process ends.
            self._trainer.saving.give_up()
            raise
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        gc.enable()
        self._conclude()
        if self._request.trace_schedule:
            self._trace_schedule()
        return 0

    def _train(self) -> None:
        trainer, request = self._trainer, self._request
        steps = request.steps
        if trainer.step < steps:
            with waiting("measuring the devices"):
                self._peak = trainer.peak_flops()
        terminal = sys.stderr.isatty()
        with tqdm(
            total=max(steps, trainer.step),
            initial=trainer.step,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            mininterval=SECONDS_A_REFRESH[terminal],
            file=sys.stderr,
        ) as bar:
            while trainer.step < steps and self._stop is None:
                if self._rate is None:
                    bar.set_postfix_str("building the graph")
                    period = SECONDS_A_REFRESH[terminal]
                    with ticking(lambda _: bar.refresh(), period, period):
                        self._one_step(bar)
                    gc.enable()
                    self._report(bar)
                else:
                    self._one_step(bar)
                done, judged = trainer.step, None
                if done % request.eval_every == 0 and done != steps:
                    score = trainer.evaluate(trainer.sample.batches, lambda: self._stop is not None)
                    if score is not None:
                        judged = score.bits_per_byte
                        self._summarize_heldout(score)
                        bar.write(f"step {done}: held out {describe(score)}", file=sys.stdout)
                        sys.stdout.flush()
                if done == steps:
                    self._save(bar, trainer.save)
                elif done % request.save_every == 0:
                    self._save(bar, functools.partial(trainer.begin_save, judged))
                else:
                    self._save(bar, trainer.saving.poll)

    def _report(self, bar: Any) -> None:
        """Says what a step holds and sends, and writes how the weights lie beside the run."""
        found = self._trainer.report
        if found is None:
            return
        path = os.path.join(self._request.logdir, "layout.txt")
        told = f"predicted of a step:\n{found}"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{found.layout()}\n")
            told = f"{told}\nlayout of the weights: {path}"
        except OSError as error:
            told = f"{told}\nthe layout of the weights cannot be written ({reason(error)})"
        bar.write(told, file=sys.stdout)
        sys.stdout.flush()

    def _measured(self, bar: Any, seconds: float) -> None:
        """Says what the first steps after the graph was built have shown."""
        self._measured_steps += 1
        self._seconds += seconds
        number, is_last = self._measured_steps, self._trainer.step >= self._request.steps
        if number == _MEASURED_STEPS or (is_last and number < _MEASURED_STEPS):
            share = self._mfu(self._seconds / number)
            plural = "" if number == 1 else "s"
            bar.write(
                f"measured over {number} step{plural}: {self._rate:,.0f} tokens/s, "
                f"MFU {share:.1%} of {self._peak / 1e9:,.0f} GFLOP/s, "
                f"{bytes_text(peak_memory(self._trainer.all_devices))}",
                file=sys.stdout,
            )
            sys.stdout.flush()

    def _mfu(self, seconds: float) -> float:
        """The share of what the devices can do that the model's products make up."""
        return ratio(self._trainer.flops, seconds * self._peak)

    def _save(self, bar: Any, act: Callable[[], object]) -> None:
        try:
            act()
        except SaveError as error:
            kept = self._trainer.saved
            kept = f"{kept} is kept" if kept else "none was written yet"
            if self._trainer.step == self._request.steps:
                raise SaveError(f"{error}; of the checkpoints before, {kept}") from error
            bar.write(f"{error}; training goes on, and {kept}", file=sys.stderr)

    def _request_stop(self, number: int, _frame: Any) -> None:
        if self._stop is not None:
            # The second time without ceremony.
            raise KeyboardInterrupt
        self._stop = number

    def _one_step(self, bar: Any) -> None:
        begin = time.perf_counter()
        try:
            result = self._trainer.train_step()
        except NotFiniteError as error:
            self._skip(bar, str(error))
            return
        self._in_a_row = 0
        seconds = time.perf_counter() - begin
        if told := self._spikes.add(result["loss"]):
            bar.write(f"step {self._trainer.step}: {told}", file=sys.stderr)
        score = result["score"]
        values = {
            "loss": result["loss"],
            "learning_rate": result["learning_rate"],
            "word_perplexity": score.word_perplexity,
            "bits_per_byte": score.bits_per_byte,
        }
        shown = f"loss {result['loss']:.3f}, word ppl {_short(score.word_perplexity)}"
        if self._rate is None:
            # The first step builds the graph; its time says nothing of those to come.
            self._rate = 0.0
        else:
            now = ratio(score.tokens, seconds)
            values["tokens_per_second"] = now
            values["mfu"] = self._mfu(seconds)
            self._rate = 0.9 * self._rate + 0.1 * now if self._rate else now
            shown += f", {self._rate:,.0f} tokens/s"
            self._measured(bar, seconds)
        self._summarize("train", **values)
        bar.set_postfix_str(shown, refresh=False)
        bar.update()

    def _skip(self, bar: Any, why: str) -> None:
        """Goes on without a step that is not finite, or not at all."""
        trainer = self._trainer
        if self._request.on_nonfinite == "stop":
            trainer.give_up(why, trainer.step + 1)
        trainer.skip()
        self._in_a_row += 1
        if self._in_a_row == _MOST_IN_A_ROW:
            told = f"{_MOST_IN_A_ROW} steps in a row were skipped, the last one since {why}"
            trainer.give_up(told, trainer.step)
        if self._in_a_row == 1:
            number = trainer.skipped
            bar.write(
                f"step {trainer.step}: {why}; skipped, its weights are those before "
                f"({number} step{'' if number == 1 else 's'} skipped so far)",
                file=sys.stderr,
            )
        self._summarize("train", skipped_steps=trainer.skipped)
        # The graph is built, whatever it gave.
        self._rate = self._rate or 0.0
        bar.update()

    def _summarize_heldout(self, score: Score) -> None:
        self._summarize(
            "heldout",
            loss=ratio(score.nats, score.tokens),
            bits_per_byte=score.bits_per_byte,
            token_perplexity=score.token_perplexity,
            word_perplexity=score.word_perplexity,
        )

    def _summarize(self, name: str, **values: float) -> None:
        try:
            if name not in self._writers:
                path = os.path.join(self._request.logdir, name)
                self._writers[name] = tf.summary.create_file_writer(path)
            with self._writers[name].as_default(step=self._trainer.step):
                for key, value in values.items():
                    # Perplexities exceed what a float32 holds; TensorFlow takes no such number.
                    with np.errstate(over="ignore"):
                        tf.summary.scalar(key, np.float32(value))
            self._writers[name].flush()
        except (OSError, tf.errors.OpError) as error:
            # A file that was written in part is not written to again.
            self._writers.pop(name, None)
            if name not in self._complained:
                self._complained.add(name)
                tqdm.write(
                    f"summaries of step {self._trainer.step} cannot be written ({reason(error)}); "
                    "training goes on",
                    file=sys.stderr,
                )

    def _conclude(self) -> None:
        trainer = self._trainer
        asked = self._request.eval_batches
        batches = trainer.sample.batches if asked else trainer.whole
        what = str(trainer.sample) if asked else "all of the held-out text"
        with waiting("evaluating"):
            score = trainer.evaluate(batches)
        # Nothing stops it.
        assert score is not None
        with waiting("counting tokens for the unigram model"):
            unigram = fit_unigram(self._corpus.train, self._vocabulary).score(batches)
        self._summarize_heldout(score)
        print(f"held out at step {trainer.step}: {describe(score)} ({what})")
        print(f"smoothed unigram model, same tokens: {describe(unigram)}")
        share = ratio(score.bits_per_byte, unigram.bits_per_byte)
        print(
            f"bits per byte are {100 * abs(1 - share):.1f}% {'below' if share < 1 else 'above'}"
            " those of the unigram model"
        )
        print(f"checkpoint: {trainer.saved}", flush=True)

    def _trace_schedule(self) -> None:
        predicted, measured = self._trainer.trace_schedule()
        title = f"{self._request.model}, milliseconds"
        for name, text in (
            ("schedule.html", to_html(predicted, title=title, measured=measured)),
            ("schedule_trace.json", to_trace(predicted, measured=measured)),
        ):
            path = os.path.join(self._request.logdir, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            print(f"schedule: {path}")
        print(
            f"a step takes {measured.makespan:.0f} ms in the pipeline, predicted from its actions "
            f"{predicted.makespan:.0f} ms; bubble {measured.bubble_ratio:.1%}, predicted "
            f"{predicted.bubble_ratio:.1%}",
            flush=True,
        )


def describe(score: Score) -> str:
    """Bits per byte and both perplexities of a score."""
    return (
        f"{score.bits_per_byte:.3f} bits/byte, perplexity {_short(score.token_perplexity)} a token "
        f"and {_short(score.word_perplexity)} a word"
    )


def _short(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.1f}" if value < 1e5 else f"{value:.2g}"
