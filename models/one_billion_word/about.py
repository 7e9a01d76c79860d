"""What a checkpoint's weights were made of: model, settings, text and vocabulary.

It is the note of a checkpoint's manifest, which is read without TensorFlow. The vocabulary is in
it as a whole: weights are worth nothing under another one, and the text that it was learned from
may be gone.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan

from .corpus import Corpus
from .sizes import Settings
from .vocabulary import Vocabulary

# Who goes on with a checkpoint, and judges it.
# `pipemesh_models.one_billion_word` in the wheel.
_PROGRAM = f"python -m {__package__}.train"
_EVALUATION = f"{__package__}.evaluate"
_DECODING = f"{__package__}.decode"
_OF_TRAINER = ("best", "decoded_by", "evaluated_by", "judged", "program", "skip")
# What weights depend on, and the seed, on which the order of the text depends.
_MODEL = (
    "VOCAB_SIZE",
    "MODEL_DIM",
    "HIDDEN_DIM",
    "NUM_LAYERS",
    "NUM_HEADS",
    "LAYERS",
    "TIED_EMBEDDINGS",
    "NUM_EXPERTS",
    "EXPERT_CHOICES",
    "CAPACITY_FACTOR",
    "OPTIMIZER",
    "SEQUENCE_LENGTH",
    "SEED",
)
# What may change when training goes on, and is said then.
_SETTINGS = (
    "BATCH_SIZE",
    "LEARNING_RATE",
    "WARMUP_STEPS",
    "CLIP_GRADIENT_NORM",
    "DROPOUT_PROB",
    "BALANCE_WEIGHT",
    "EMA_DECAY",
)


@dataclasses.dataclass(frozen=True)
class About:
    """What a checkpoint's weights were made of.

    Attributes:
        model: what must be the same to go on.
        settings: what may differ.
        plan: how it is run, as texts by name (`Plan.to_values`); it may differ.
        data: digests of the text to train on and of the text to judge by.
        vocabulary: the serialized vocabulary.
        flags: that were given; who goes on takes them unless others are given.
    """

    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    plan: Mapping[str, str]
    data: Mapping[str, str]
    vocabulary: bytes
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: str,
        settings: Settings,
        device_type: str,
        data: Mapping[str, str],
        words: Vocabulary,
    ) -> About:
        """What is to be trained now.

        Args:
            model: name of the configuration.
            settings: its settings.
            device_type: what it runs on.
            data: as `digests`.
            words: the vocabulary.
        """
        return cls(
            model={"model": model, **_values(settings, _MODEL)},
            settings={"device_type": device_type, **_values(settings, _SETTINGS)},
            plan=settings.PLAN.to_values(),
            data=data,
            vocabulary=words.model,
        )

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> About:
        """What a checkpoint's manifest notes.

        Raises:
            CheckpointError: another program has noted it.
        """
        try:
            # The trainer notes more beside it.
            values: dict[str, Any] = {n: v for n, v in note.items() if n not in _OF_TRAINER}
            return cls(**{**values, "vocabulary": base64.b64decode(note["vocabulary"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "--logdir has checkpoints of another program, or of another version of this one "
                f"({error}); give another --logdir"
            ) from error

    def to_note(self) -> dict[str, Any]:
        """What a checkpoint's manifest is to note."""
        vocabulary = base64.b64encode(self.vocabulary).decode()
        of_programs = {
            "program": _PROGRAM,
            "evaluated_by": _EVALUATION,
            "decoded_by": _DECODING,
        }
        return dataclasses.asdict(self) | {"vocabulary": vocabulary} | of_programs

    def keep_choice(self, now: About, settings: Settings) -> tuple[str, ...]:
        """Goes on with what was chosen, if what it was chosen for is the same.

        Args:
            now: what is to be trained now.
            settings: its settings; what was chosen is set in them.

        Returns:
            What is still to be chosen.
        """
        same = all(self.settings[n] == now.settings[n] for n in ("device_type", "batch_size"))
        free = settings.CHOSEN
        if not same or any(n not in free and self.plan[n] != text for n, text in now.plan.items()):
            return free
        settings.PLAN = Plan.from_values(self.plan)
        return ()

    def changes(self, now: About) -> str:
        """Lists the changes of settings and of the plan since this checkpoint."""
        return changes({**self.plan, **self.settings}, {**now.plan, **now.settings})

    def check_model(self, model: str, settings: Settings, logdir: str) -> None:
        """Checks that a model can go on from this checkpoint.

        Args:
            model: name of the configuration.
            settings: its settings.
            logdir: where the checkpoint lies.

        Raises:
            CheckpointError: it is another model's.
        """
        mine = {"model": model, **_values(settings, _MODEL), "moving_averages": "none"}
        if settings.EMA_DECAY:
            mine["moving_averages"] = "some"
        there = {**self.model, "moving_averages": "none"}
        if self.settings.get("ema_decay"):
            there["moving_averages"] = "some"
        if told := changes(there, mine):
            raise CheckpointError(
                f"--logdir={logdir!r} holds a checkpoint of another model ({told}); give another "
                "--logdir, or the settings it was trained with"
            )

    def check_data(self, data: Mapping[str, str], logdir: str) -> None:
        """Checks that the text is the one of this checkpoint, wherever it lies now.

        Raises:
            CheckpointError: it is other text.
        """
        if data != self.data:
            raise CheckpointError(
                f"--logdir={logdir!r} holds a checkpoint that was trained on other text "
                f"({changes(self.data, data)}); give that text, or another --logdir, or "
                "--other_text to go on from these weights and their vocabulary with this text"
            )


def digests(corpus: Corpus) -> dict[str, str]:
    """Digests of all that will be read, of the text to train on and of the text to judge by.

    Raises:
        CorpusError: the text cannot be read.
    """
    return {part: getattr(corpus, part).digest()[:16] for part in ("train", "heldout")}


def changes(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Lists the differences, such as `batch_size 4 -> 8`; "" if there are none."""
    return ", ".join(
        f"{key} {_told(there.get(key))} -> {_told(value)}"
        for key, value in now.items()
        if there.get(key) != value
    )


def _told(value: Any) -> Any:
    return "none" if value == "" else value


def _values(settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    return {name.lower(): getattr(settings, name) for name in names}
