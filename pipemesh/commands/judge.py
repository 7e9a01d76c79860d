"""Judges a trained language model: perplexity of a file, and tasks of the package lm-eval."""

from __future__ import annotations

import collections
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS, TEXTS, Flag, FlagError, grouped, is_help
from pipemesh.commands.texts import (
    DECODE_FLAGS,
    OWN,
    TAKEN,
    TAKEN_TO_SCORE,
    in_order,
    json_number,
    line_of,
    model_of,
    parse_for_texts,
    restored_model,
    scorer_of,
    sizes_of,
)
from pipemesh.data import text_file
from pipemesh.errors import DecodingError, MissingPackageError
from pipemesh.training.run import console

# The largest default of --window: some models have more positions than memory has room for.
_WINDOW = 2048
PERPLEXITY_FLAGS = grouped(
    TEXTS,
    Flag(
        "text",
        value="FILE",
        help="A file of text, UTF-8, plain or packed by gzip or zstd: prints its perplexity a "
        "token, a word and a byte instead.",
    ),
    Flag(
        "window",
        int,
        least=2,
        help=f"With --text: tokens seen at once; default: the model's most, up to {_WINDOW}.",
    ),
    Flag(
        "stride",
        int,
        least=1,
        help="With --text: tokens from one window to the next. Each token is scored once, with at "
        "least window - stride tokens before it; default: half of the window.",
    ),
    Flag("format", default="text", choices=["text", "json"], help="With --text: text or JSON."),
)
_OF_TEXT = ("window", "stride", "format")


def check_without_text() -> None:
    """Refuses flags of `--text` where it is not given."""
    for name in _OF_TEXT:
        if FLAGS.is_given(name):
            raise FlagError(f"--{name} is for --text=FILE; give it, or leave --{name} out")


def perplexity(argv: list[str], about: str | None) -> int:
    """Prints the perplexity of a file as the flags say; returns the exit code."""
    process.import_quietly()
    kind = parse_for_texts("score", argv, about, PERPLEXITY_FLAGS, TAKEN_TO_SCORE)
    text = text_file.whole(FLAGS.text)
    subject, path, tokens, rows = model_of(kind, "score", ())
    window = FLAGS.window or min(tokens.length, _WINDOW)
    if window > tokens.length:
        raise FlagError(f"--window={window}: the model has {tokens.length} tokens at most")
    stride = FLAGS.stride or max(1, window // 2)
    if stride >= window:
        raise FlagError(
            f"--stride={stride}: the first token of a window has no score, so windows of {window} "
            f"tokens overlap; give at most {window - 1}"
        )
    ids = tokens.encode(text)
    if len(ids) < 2:
        raise FlagError(f"--text={FLAGS.text!r} has {len(ids)} tokens; give a longer one")
    from pipemesh.decoding.scorer import exp, windows

    trained = restored_model(subject, path)
    scorer = scorer_of(subject, trained, rows, window, tokens.vocab_size)
    parts, counts = zip(*windows(ids, window, stride), strict=True)
    with console.waiting("scoring"):
        found = zip(scorer.score(parts), counts, strict=True)
        # The sum of all has more digits than those of windows.
        log_prob = math.fsum(math.fsum(each.log_probs[-count:]) for each, count in found)
    numbers = {
        "tokens": sum(counts),
        "words": len(text.split()),
        "bytes": len(text.encode()),
    }
    values = {name: exp(-log_prob / number) for name, number in numbers.items()}
    if FLAGS.format == "json":
        print(
            line_of(
                {
                    "checkpoint": path,
                    "log_prob": json_number(log_prob),
                    "window": window,
                    "stride": stride,
                    **numbers,
                    **{f"{name[:-1]}_perplexity": json_number(v) for name, v in values.items()},
                }
            )
        )
        return 0
    shown = ", ".join(
        f"{values[name]:.4f} a {name[:-1]} ({number:,})" for name, number in numbers.items()
    )
    print(f"{path}: perplexity {shown}; windows of {window} tokens, {stride} apart")
    return 0


_ABOUT_LM_EVAL = """\
Runs tasks of the package lm-eval with a trained language model.

    pipemesh lm_eval --model_args=logdir=runs/gpt2,mesh_shape=layers:2 --tasks=lambada_openai

All flags are those of `lm-eval run`; --model is `pipemesh`. --model_args has flags of `pipemesh
decode` with commas between, and, if needed, max_length (tokens that the model sees at once) and
prefix_token (the id before texts without a context; default: that which begins a text, or else that
which ends one).
"""


def lm_eval(argv: list[str]) -> int:
    """Runs the command line of lm-eval with this library's model; returns the exit code."""
    if is_help(argv):
        print(_ABOUT_LM_EVAL, end="")
        return 0
    process.import_quietly()
    try:
        program: Any = importlib.import_module("lm_eval.__main__")
        registry: Any = importlib.import_module("lm_eval.api.registry")
    except ImportError as missing:
        raise MissingPackageError("pipemesh lm_eval", str(missing.name), "judging") from missing
    registry.register_model("pipemesh")(language_model())
    words = argv[1:] if argv[1:2] != ["run"] else argv[2:]
    if any(word.partition("=")[0] in ("--model", "-M") for word in words):
        raise FlagError("--model is pipemesh here; leave it out, and give --model_args=logdir=RUN")
    before = sys.argv
    sys.argv = ["lm-eval", "run", "--model", "pipemesh", *words]
    try:
        program.cli_evaluate()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def language_model() -> Any:
    """Returns the class of the model for lm-eval, which is imported for it."""
    base: Any = importlib.import_module("lm_eval.api.model").TemplateLM
    texts: Any = importlib.import_module("lm_eval.models.utils")
    utils: Any = importlib.import_module("lm_eval.utils")

    class PipemeshLM(base):
        """A model of a log directory; its texts are scored and continued as by the commands."""

        def __init__(
            self,
            batch_size: Any = None,
            max_batch_size: Any = None,
            device: Any = None,
            max_length: int | None = None,
            prefix_token: int | None = None,
            **flags: Any,
        ) -> None:
            super().__init__()
            # lm-eval gives its defaults, too.
            is_default = str(batch_size) in ("None", "1") and device in (None, "cuda:0")
            if not is_default or max_batch_size:
                raise FlagError(
                    "--batch_size and --device are not supported: give rows, groups and "
                    "device_type in --model_args"
                )
            words = [f"--{name}={_spelled(value)}" for name, value in flags.items()]
            kind = parse_for_texts(
                "decode", ["pipemesh lm_eval", *words], _ABOUT_LM_EVAL, DECODE_FLAGS, TAKEN
            )
            self._subject, path, self._tokens, self._rows = model_of(kind, "decode", (), OWN)
            if self._tokens.source_length is not None:
                raise FlagError(
                    f"{path} is of a model that reads a source, and lm-eval is for models that "
                    "continue texts; use pipemesh decode"
                )
            self._trained = restored_model(self._subject, path)
            most = self._tokens.length
            self.max_length = min(max_length or most, most)
            self._special = self._tokens.encode("")
            found = prefix_token if prefix_token is not None else next(iter(self._special), None)
            if found is None:
                found = min(self._tokens.stop, default=None)
            if found is None:
                raise DecodingError(
                    "the model has no token that begins or ends a text; give prefix_token=ID in "
                    "--model_args"
                )
            self._prefix: int = found
            self._scorers: dict[int, Any] = {}

        @property
        def eot_token_id(self) -> int:
            return min(self._tokens.stop, default=self._prefix)

        @property
        def prefix_token_id(self) -> int:
            return self._prefix

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids = list(self._tokens.encode(string))
            if add_special_tokens is False and self._special:
                begin = len(self._special) - (self._special[-1] in self._tokens.stop)
                ids = ids[begin : len(ids) - (len(self._special) - begin)]
            return ids

        def _loglikelihood_tokens(
            self,
            requests: Sequence[tuple[Any, list[int], list[int]]],
            disable_tqdm: bool = False,
            **_: Any,
        ) -> list[tuple[float, bool]]:
            scored = self._scored([(context, text) for _, context, text in requests])
            log_probs = [
                found[-len(text) :] for found, (_, _, text) in zip(scored, requests, strict=True)
            ]
            greedy = self._greedy(requests, log_probs)
            answers = [
                (math.fsum(row), is_greedy)
                for row, is_greedy in zip(log_probs, greedy, strict=True)
            ]
            for request, answer in zip(requests, answers, strict=True):
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
            return answers

        def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, ...]]:
            """Returns the log probabilities of contexts and texts, cut on the left."""
            most = self.max_length
            for _, text in pairs:
                if not 0 < len(text) <= most:
                    raise DecodingError(f"a text has {len(text)} tokens; give 1 to {most}")
            whole = [[*context, *text][-(most + 1) :] for context, text in pairs]
            # Few lengths, as each has its own graph.
            longest = max(map(len, whole), default=2) - 1
            length = min(1 << max(3, (longest - 1).bit_length()), most)
            if length not in self._scorers:
                self._scorers[length] = scorer_of(
                    self._subject, self._trained, self._rows, length, self._tokens.vocab_size
                )
            return [found.log_probs for found in self._scorers[length].score(whole)]

        def _greedy(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], log_probs: Sequence[Any]
        ) -> list[bool]:
            """Returns which texts are the most likely ones, token by token."""
            found: list[bool] = []
            # By length, as all prompts get as many tokens.
            unsure: dict[int, list[int]] = collections.defaultdict(list)
            least = -math.log(self._tokens.vocab_size)
            for number, row in enumerate(log_probs):
                # Above a half no other token is more likely; below the mean one is.
                found.append(all(each > -math.log(2) for each in row))
                if not found[-1] and min(row) >= least:
                    unsure[len(row)].append(number)
            for size, numbers in unsure.items():
                # A prompt and its continuation have to fit in, with which a text that fills the
                # window loses its first token.
                room = self.max_length - size
                wanted = [requests[number][2] for number in numbers]
                prompts = [requests[number][1][-room:] if room else [] for number in numbers]
                if not room:
                    raise DecodingError(
                        f"a text has {size} tokens, the model's most; give shorter ones to find "
                        "whether they are the most likely ones"
                    )
                said = self._continued(prompts, size, _sampler(), frozenset())
                for number, text, tokens in zip(numbers, wanted, said, strict=True):
                    found[number] = list(tokens) == list(text)
            return found

        def _continued(
            self, prompts: Sequence[list[int]], most: int, chooser: Any, stop: frozenset[int]
        ) -> Iterator[tuple[int, ...]]:
            """Yields the continuations of prompts, in their order."""
            from pipemesh.decoding import Decoder
            from pipemesh.decoding.generator import generator_of

            longest = max(map(len, prompts)) + most
            length = min(1 << max(3, (longest - 1).bit_length()), self.max_length)
            generator = generator_of(self._trained, length, chooser, stop)
            groups, rows = sizes_of(self._subject.plan, generator, len(prompts))
            decoder = Decoder(
                generator,
                groups=groups,
                rows=rows,
                length=length,
                vocab_size=self._tokens.vocab_size,
                seed=FLAGS.sample_seed,
            )
            return (found.tokens for found in in_order(decoder.generate(prompts, most)))

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            answers: list[float] = []
            for request in requests:
                (text,) = request.args
                windows = utils.get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, 1
                )
                pairs = [utils.make_disjoint_window(window) for window in windows]
                rows = zip(self._scored(pairs), pairs, strict=True)
                answers.append(math.fsum(math.fsum(row[-len(part) :]) for row, (_, part) in rows))
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
            return answers

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            answers = [""] * len(requests)
            alike: dict[str, list[int]] = collections.defaultdict(list)
            for number, request in enumerate(requests):
                alike[repr(request.args[1])].append(number)
            for numbers in alike.values():
                given = dict(requests[numbers[0]].args[1])
                values = dict(texts.normalize_gen_kwargs(given))
                until = texts.handle_stop_sequences(
                    values.pop("until", None), self._tokens.decode([self.eot_token_id]) or None
                )
                most = values.pop("max_gen_toks")
                if most >= self.max_length:
                    raise DecodingError(
                        f"max_gen_toks is {most}, but the model has {self.max_length} tokens for "
                        "a prompt and its continuation; give fewer, as --gen_kwargs=max_gen_toks=N"
                    )
                room = self.max_length - most
                prompts = [self.tok_encode(requests[n].args[0])[-room:] for n in numbers]
                said = self._continued(prompts, most, _sampler(**values), self._tokens.stop)
                for number, tokens in zip(numbers, said, strict=True):
                    text = self._tokens.text((), tokens)
                    answers[number] = texts.postprocess_generated_text(text, until, None)
                    args = requests[number].args
                    self.cache_hook.add_partial("generate_until", args, answers[number])
            return answers

    return PipemeshLM


def _sampler(
    do_sample: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    **more: Any,
) -> Any:
    from pipemesh.decoding import Sampler

    if more:
        raise DecodingError(
            f"generation has {next(iter(more))!r}; supported are do_sample, temperature, top_k, "
            "top_p, until and max_gen_toks"
        )
    return Sampler(temperature, top_k, top_p) if do_sample else Sampler()


def _spelled(value: Any) -> str:
    """Returns a value that lm-eval has parsed as flags spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
