"""The training loop: steps, progress, evaluation and checkpoints.

Failures of reporting never end a run. A signal or lost data ends it after a checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipemesh.backend.peak import peak_memory
from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.folder import path_of, steps_of
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import DataError, NotFiniteError, PipemeshError, RescaledError, SaveError
from pipemesh.plan import Figures, predict
from pipemesh.plan.figures import FILE, settings_of
from pipemesh.report import to_html, to_trace
from pipemesh.text import bytes_text, count_text
from pipemesh.training.run import Options
from pipemesh.training.run.console import Progress, Stops, objects_alone, waiting
from pipemesh.training.run.output import (
    Histograms,
    Profile,
    Telling,
    of_beginning,
    of_measured,
    of_report,
)
from pipemesh.training.subject import ratio, rows_of
from pipemesh.training.trainer import Trainer, layers_of

# Decay of the running mean and variance of losses.
_DECAY = 0.98
# A spike needs this many losses before it. It exceeds the mean by this many standard deviations and
# by this share of the mean, as nearly constant losses would make spikes of noise.
_FEWEST = 50
_DEVIATIONS = 6.0
_SHARE = 0.1


class Spikes:
    """A detector of loss spikes."""

    def __init__(self) -> None:
        self._count, self._mean, self._square = 0, 0.0, 0.0

    def add(self, loss: float) -> str | None:
        """Adds a finite loss; describes it if it is a spike, until the mean has caught up."""
        apart = loss - self._mean
        text = None
        if self._count >= _FEWEST:
            least = max(_DEVIATIONS * math.sqrt(self._square), _SHARE * abs(self._mean))
            if apart > least:
                text = f"the loss is {loss:.3f}, after {self._mean:.3f} on average"
        # A plain mean until there are more losses than the decay remembers.
        self._count += 1
        new = max(1 - _DECAY, 1 / self._count)
        self._mean += new * apart
        self._square += new * (apart**2 * (1 - new) - self._square)
        return text


_NOT_MEASURED = (
    "what its layers take under these flags was not measured; do so with `pipemesh plan "
    "--model=... --save=FILE`, and give --figures=FILE"
)


def expected(trainer: Trainer, options: Options) -> tuple[dict[str, Any], str]:
    """Returns the prediction for a step, for the record and as text for people; nothing unless
    there is exactly one pipeline, and no text if there are no figures.
    """
    if len(trainer.trained.pipelines) != 1:
        return {}, ""
    rows = rows_of(trainer.batch)
    sizes = [len(layers_of(cell)) for cell in trainer.trained.pipelines[0].params.cell_tpl]
    cuts = (0, *itertools.accumulate(sizes))
    values: dict[str, Any] = {
        "rows": rows,
        "cuts": cuts,
        "device_memory": options.device_memory,
        # All devices of a process share them.
        "cores": os.cpu_count() if trainer.subject.device_type == "CPU" else None,
    }
    if trainer.report is not None and trainer.report.layers:
        layers = itertools.chain.from_iterable(trainer.report.layers)
        values["layers"] = [dataclasses.asdict(layer) for layer in layers]
    path = options.figures or os.path.join(options.logdir, FILE)
    if options.figures is None and not os.path.exists(path):
        return {**values, "unpredicted": _NOT_MEASURED}, ""
    try:
        figures = Figures.read(path)
        if options.figures is None and figures.settings != settings_of(options.given):
            return {**values, "unpredicted": _NOT_MEASURED}, ""
        plan = dataclasses.replace(trainer.subject.plan, boundaries=cuts)
        step = predict(plan, figures, rows)
    except PipemeshError as error:
        return {**values, "unpredicted": str(error)}, f"seconds are not predicted: {error}"
    values["figures"] = json.loads(figures.to_json())
    values["predicted"] = {
        "seconds": step.seconds,
        "bubble": step.bubble,
        "memory": step.memory,
        "parts": step.parts,
        "about": figures.about,
    }
    supposed = f"; supposed: {step.supposed}" if step.supposed else ""
    return values, (
        f"{1e3 * step.seconds:.4g} ms a step by what was measured of its layers, bubble "
        f"{step.bubble:.1%}, {bytes_text(max(step.memory))} on the fullest device{supposed}"
    )


# Number of first steps whose speed is reported once.
_MEASURED_STEPS = 5
# Most steps skipped in a row: more are no accident of the data.
_MOST_IN_A_ROW = 10
# Steps between reports on workers.
_STEPS_OF_WORK = 100


class Loop:
    """The training loop with its output.

    Args:
        trainer: the trainer.
        options: the settings of the run.
        renew: see `pipemesh.report.Record`.
    """

    def __init__(
        self, trainer: Trainer, options: Options, renew: Callable[[], object] = lambda: None
    ) -> None:
        self._trainer, self._options = trainer, options
        self._stops = Stops()
        self._rate: float | None = None
        self._spikes, self._in_a_row = Spikes(), 0
        # Flops of a step, peak flops per second of the devices, and the number and seconds of the
        # first steps.
        self._flops, self._peak, self._measured_steps, self._seconds = 0.0, 0.0, 0, 0.0
        self._tell = Telling(options, renew)
        self._profile = Profile(options.logdir, options.profile_steps, self._tell.warn)
        self._histograms = Histograms(trainer.trained.learned(), options.histogram_every)
        # The step of the last reported checkpoint, and of the last one begun.
        self._saved = self._begun = trainer.step

    def run(self) -> int:
        """Trains, evaluates and saves; returns the exit code."""
        with objects_alone(self._options.log_format == "json"):
            self._tell("begin", **of_beginning(self._trainer, self._options))
            try:
                return self._run()
            except BaseException as error:
                is_known = isinstance(error, (PipemeshError, OSError))
                reason_text = " ".join(str(error).split()) if is_known else type(error).__name__
                self._tell("end", step=self._trainer.step, reason=reason_text, is_done=False)
                raise

    def _run(self) -> int:
        with self._stops:
            try:
                try:
                    self._train()
                finally:
                    # The profile ends early if the run does.
                    self._profile.close()
                    self._tell_profile()
                if (stop := self._stops.signal) is not None:
                    self._save(is_last=True)
                    saved = f"saved {self._trainer.saving.newest}"
                    self._tell.say(f"{stop.name}: {saved}; run the same command again to go on")
                    self._end(f"stopped by {stop.name}", is_done=False)
                    return self._stops.exit_code
            except DataError as error:
                try:
                    kept = f"saved {self._trainer.save()}"
                except SaveError as failed:
                    saved = self._trainer.saving.newest or "nothing"
                    kept = f"nor can it be saved ({failed}), {saved} is kept"
                raise DataError(
                    f"step {self._trainer.step + 1}: {error}; {kept}: put the data back and run "
                    "the same command again to go on"
                ) from error
            except Exception:
                # Write confirmed checkpoints before the process ends.
                self._trainer.saving.give_up()
                raise
        gc.enable()
        self._tell_work()
        self._conclude()
        steps = self._trainer.step
        reason = "stopped early" if steps < self._options.steps else "done"
        # Report the page first, so that the checkpoint, the main result, is the last line.
        if not self._options.trace_schedule:
            self._end(reason, is_told=True)
        self._tell.say(f"checkpoint: {self._trainer.saving.newest}")
        if self._options.trace_schedule:
            self._trace_schedule()
            self._end(reason, is_told=True, step=steps)
        return 0

    def _train(self) -> None:
        trainer, options = self._trainer, self._options
        steps = options.steps
        if trainer.step >= steps:
            self._tell.say(
                f"already at step {trainer.step} of --steps={steps}: nothing to train; give more "
                "--steps, or another --logdir"
            )
        if options.profile_steps and trainer.step >= options.profile_steps[1]:
            self._tell.warn("the steps that are to be profiled are done; there is no profile")
        self._flops = trainer.subject.flops() or 0.0
        if trainer.step < steps and self._flops:
            with waiting("measuring the devices"):
                self._peak = trainer.peak_flops()
        with Progress(trainer.step, steps) as progress:
            if trainer.restored:
                # A signal may have interrupted this evaluation, or the earlier run had fewer steps.
                score = self._evaluate()
                if score is not None:
                    trainer.saving.judge(trainer.restored, score)
            while trainer.step < steps and not (self._stops.signal or self._is_settled):
                if self._rate is None:
                    with progress.busy("building the graph"):
                        self._some_steps(progress)
                    gc.enable()
                    self._report()
                else:
                    self._some_steps(progress)
                judged = self._evaluate()
                self._save(judged, is_last=trainer.step == steps or self._is_settled)

    def _evaluate(self) -> float | None:
        """Evaluates if it is due, and returns the score of the weights."""
        trainer, options = self._trainer, self._options
        step, sample = trainer.step, trainer.sample.batches
        # After the last step, `_conclude` evaluates all held-out data.
        is_due = step % options.eval_every == 0 and step < options.steps
        if not (is_due and sample) or step == trainer.judged:
            return None
        score = trainer.evaluate(sample, lambda: self._stops.signal is not None)
        if score is None:
            return None
        trainer.judged = step
        best, since = trainer.best
        better = math.isfinite(score.judged) and (best is None or score.judged < best)
        trainer.best = (score.judged, 0) if better else (best, since + 1)
        values: dict[str, Any] = {"judged": score.judged, **score.values()}
        self._tell("heldout", f"step {step}: held out {score}", step=step, **values)
        return score.judged

    @property
    def _is_settled(self) -> bool:
        """Returns whether early stopping ends the run."""
        most = self._options.early_stop
        return 0 < most <= self._trainer.best[1]

    def _report(self) -> None:
        """Reports memory and communication of a step, and writes the layout of the weights."""
        forecast = self._trainer.report
        values, predicted = expected(self._trainer, self._options)
        if forecast is not None:
            values |= of_report(forecast)
        if values:
            self._tell("forecast", step=self._trainer.step, **values)
        if predicted:
            self._tell.say(f"predicted: {predicted}")
        if forecast is None:
            return
        path = os.path.join(self._options.logdir, "layout.txt")
        text = f"predicted of a step:\n{forecast}"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{forecast.layout()}\n")
            text = f"{text}\nlayout of the weights: {path}"
        except OSError as error:
            text = f"{text}\nthe layout of the weights cannot be written ({reason(error)})"
        self._tell.say(text)

    def _measured(self, step: int, seconds: float) -> None:
        """Reports the measured speed of the first steps after the graph was built."""
        self._measured_steps += 1
        self._seconds += seconds
        number, is_last = self._measured_steps, step >= self._options.steps
        if number == _MEASURED_STEPS or (is_last and number < _MEASURED_STEPS):
            unit = self._trainer.subject.unit
            values: dict[str, Any] = {"steps": number, f"{unit}_per_second": self._rate}
            text = f"{self._rate:,.0f} {unit}/s"
            if self._flops:
                share = self._mfu(self._seconds / number)
                peak = f"{self._peak / 1e9:,.0f} GFLOP/s"
                unknown = f"not known: more than the {peak} that were measured at the start"
                text += f", MFU {unknown if share is None else f'{share:.1%} of {peak}'}"
                known = {} if share is None else {"mfu": share}
                values |= known | {"flops_per_second": self._peak}
            values["peak_memory"] = peak_memory(self._trainer.trained.all_devices())
            if values["peak_memory"]:
                text += f", {bytes_text(values['peak_memory'])}"
            text = f"measured over {count_text(number, 'step')}: {text}"
            self._tell("measured", text, step=step, **values)

    def _mfu(self, seconds: float) -> float | None:
        """Returns the matmul flops as a share of the measured peak; None above 1, which is
        impossible.
        """
        return share if (share := ratio(self._flops, seconds * self._peak)) <= 1 else None

    def _save(self, judged: float | None = None, *, is_last: bool) -> None:
        """Saves the last weights, or begins to save others where it is due."""
        trainer = self._trainer
        is_due = trainer.step % self._options.save_every == 0
        try:
            if is_last or is_due:
                self._begun = trainer.step
            if is_last:
                trainer.save()
            elif is_due:
                trainer.begin_save(judged)
            else:
                trainer.saving.poll()
            self._tell_saved()
        except SaveError as error:
            if is_last:
                raise SaveError(f"{error}; of the checkpoints before, {trainer.kept}") from error
            text = f"{error}; training goes on, and {trainer.kept}"
            self._tell("unsaved", text, is_warning=True, step=trainer.step, why=str(error))

    def _tell_saved(self) -> None:
        """Reports checkpoints completed since the last call."""
        if self._saved == self._begun:
            return
        folder, steps = self._options.logdir, []
        with contextlib.suppress(OSError):
            steps = steps_of(folder)
        for step in steps:
            if self._saved < step <= self._begun:
                self._saved = step
                self._tell("checkpoint", step=step, path=path_of(folder, step))

    def _num_steps(self) -> int:
        """Returns the number of steps of the next call, which ends where something else is due."""
        step, options = self._trainer.step, self._options
        ends = [options.steps]
        ends += [step - step % n + n for n in (options.save_every, options.eval_every)]
        if every := options.histogram_every:
            due = step - step % every + every
            # That step has a call of its own, which returns its gradients.
            ends.append(max(due - 1, step + 1))
        first, last = options.profile_steps or (0, 0)
        ends += [end for end in (first - 1, last) if end > step]
        return min(options.steps_per_call, *(end - step for end in ends))

    def _some_steps(self, progress: Progress) -> None:
        """Trains for as many steps as a call has, each of which is finished or skipped."""
        left = self._num_steps()
        while left:
            number, is_first = self._trainer.step + 1, self._rate is None
            self._histograms.before(number)
            try:
                with self._profile.around(number, number + left - 1):
                    begin = time.perf_counter()
                    results = self._trainer.train_steps(left)
                    seconds = time.perf_counter() - begin
            except NotFiniteError as error:
                self._skip(error)
                progress.advance()
                left -= 1
                continue
            # The first call builds the graph, and one that fails locates that, so their times are
            # not typical.
            is_timed = not is_first and len(results) == left
            for step, result in enumerate(results, number):
                self._tell_step(step, result, seconds / left if is_timed else None, progress)
            left -= len(results)
            self._tell_profile()

    def _tell_step(
        self, step: int, result: Mapping[str, Any], seconds: float | None, progress: Progress
    ) -> None:
        """Reports a finished step."""
        self._in_a_row = 0
        if spike := self._spikes.add(result["loss"]):
            self._tell("spike", f"step {step}: {spike}", is_warning=True, step=step, why=spike)
        score, unit = result["score"], self._trainer.subject.unit
        values = {
            **score.values(),
            "loss": result["loss"],
            "learning_rate": result["learning_rate"],
        }
        shown = ", ".join(filter(None, [f"loss {result['loss']:.3f}", score.short()]))
        if (norm := result["gradient_norm"]) is not None:
            values["gradient_norm"] = norm
            shown += f", gradient norm {norm:.3g}"
        if seconds is None:
            self._rate = self._rate or 0.0
        else:
            now = ratio(score.amount, seconds)
            values |= {"seconds": seconds, f"{unit}_per_second": now}
            if self._flops and (share := self._mfu(seconds)) is not None:
                values["mfu"] = share
            self._rate = 0.9 * self._rate + 0.1 * now if self._rate else now
            shown += f", {self._rate:,.0f} {unit}/s"
            self._measured(step, seconds)
        histograms = self._histograms.after(self._trainer.gradients)
        self._tell("step", step=step, histograms=histograms, **values)
        progress.advance(shown)
        if step % _STEPS_OF_WORK == 0:
            self._tell_work()

    def _tell_work(self) -> None:
        """Reports how long each worker computed, and which ones are slow."""
        if not (work := self._trainer.work()):
            return
        slow = "; ".join(
            f"{worker.worker} is slow: it takes {worker.times:.1f} times as long as the others for "
            "as many flops"
            for worker in work
            if worker.is_slow
        )
        rows = [
            worker._replace(
                seconds=round(worker.seconds, 6), times=worker.times and round(worker.times, 3)
            )._asdict()
            for worker in work
        ]
        self._tell("workers", slow or None, is_warning=True, step=self._trainer.step, workers=rows)

    def _tell_profile(self) -> None:
        """Reports a finished profile."""
        if (path := self._profile.written) is not None:
            self._profile.written = None
            self._tell("profile", f"profile: {path}", step=self._trainer.step, path=path)

    def _skip(self, error: NotFiniteError) -> None:
        """Skips a step that is not finite, or ends the run."""
        trainer, why = self._trainer, str(error)
        # Overflows of float16 only search for the loss scale, and stop by themselves.
        is_rescaled = isinstance(error, RescaledError)
        if self._options.on_nonfinite == "stop" and not is_rescaled:
            trainer.give_up(why, trainer.step + 1)
        trainer.skip()
        self._in_a_row += not is_rescaled
        if self._in_a_row == _MOST_IN_A_ROW:
            reason_text = f"{_MOST_IN_A_ROW} steps in a row were skipped, the last one since {why}"
            trainer.give_up(reason_text, trainer.step)
        number, text = trainer.skipped, None
        if self._in_a_row == 1 or is_rescaled:
            text = (
                f"step {trainer.step}: {why}; skipped, its weights are those before "
                f"({count_text(number, 'step')} skipped so far)"
            )
        values = {"why": why, "skipped_steps": number}
        self._tell("skipped", text, is_warning=True, step=trainer.step, **values)
        # The graph is built even if the step failed.
        self._rate = self._rate or 0.0

    def _conclude(self) -> None:
        trainer = self._trainer
        if self._is_settled and trainer.step < self._options.steps:
            best, since = trainer.best
            than = "a number" if best is None else f"{best:.4g}"
            self._tell.say(f"stopped early: {since} evaluations were no better than {than}")
        if trainer.sample.batches:
            if self._options.eval_batches:
                batches, what = trainer.sample.batches, str(trainer.sample)
            else:
                batches, what = trainer.whole, "all of the held-out data"
            with waiting("evaluating"):
                score = trainer.evaluate(batches)
            # Without `stopped` there is always a score.
            assert score is not None
            text = f"held out at step {trainer.step}: {score} ({what})"
            values = {"judged": score.judged, "what": what, **score.values()}
            self._tell("final", text, step=trainer.step, **values)
            for line in trainer.subject.epilogue(score, batches):
                self._tell.say(line)

    def _end(
        self, reason: str, *, is_done: bool = True, is_told: bool = False, step: int | None = None
    ) -> None:
        """Records how the run ended, and writes its page."""
        step = self._trainer.step if step is None else step
        self._tell("end", step=step, reason=reason, is_done=is_done)
        if (path := self._tell.write_page()) and is_told:
            self._tell.say(f"report: {path}")

    def _trace_schedule(self) -> None:
        step = self._trainer.step
        predicted, steps = self._trainer.trace_schedule()
        measured = steps[0][0]
        self._tell("schedule", step=step, **of_measured(steps))
        title = f"{self._trainer.subject.name}, milliseconds"
        for name, text in (
            ("schedule.html", to_html(predicted, title=title, measured=measured)),
            ("schedule_trace.json", to_trace(predicted, measured=measured)),
        ):
            path = os.path.join(self._options.logdir, name)
            write_whole(path, text.encode())
            self._tell.say(f"schedule: {path}")
        self._tell.say(
            f"a step takes {measured.makespan:.0f} ms in the pipeline, predicted from its actions "
            f"{predicted.makespan:.0f} ms; bubble {measured.bubble_ratio:.1%}, predicted "
            f"{predicted.bubble_ratio:.1%}"
        )
