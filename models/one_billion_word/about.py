"""The origin of a checkpoint's weights: model, settings, text and vocabulary.

It is the note in a checkpoint's manifest, which can be read without TensorFlow. It contains the
whole vocabulary: weights are useless with another one, and its training text may be gone.
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

# The commands that resume and evaluate a checkpoint, and the module for decoding. In the wheel the
# package is `pipemesh_models.one_billion_word`.
_PROGRAM = f"python -m {__package__}.train"
_EVALUATION = f"{__package__}.evaluate"
_DECODING = f"{__package__}.decode"
_OF_TRAINER = ("best", "decoded_by", "evaluated_by", "judged", "program", "skip")
# Settings on which weights depend, and the seed, which determines the order of the text.
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
# Settings that may change when a run resumes; changes are reported.
_SETTINGS = (
    "BATCH_SIZE",
    "LEARNING_RATE",
    "LEARNING_RATE_SCHEDULE",
    "WARMUP_STEPS",
    "DECAY_STEPS",
    "STABLE_STEPS",
    "FINAL_LEARNING_RATE",
    "WEIGHT_DECAY",
    "WEIGHT_DECAY_EXCEPT",
    "CLIP_GRADIENT_NORM",
    "DROPOUT_PROB",
    "BALANCE_WEIGHT",
    "EMA_DECAY",
)


@dataclasses.dataclass(frozen=True)
class About:
    """The origin of a checkpoint's weights.

    Attributes:
        model: settings that must be the same to resume.
        settings: settings that may change.
        plan: the plan as texts by name (`Plan.to_values`); it may change.
        data: digests of the training text and of the held-out text.
        vocabulary: the serialized vocabulary.
        flags: the flags of the run, which are defaults for a resumed run.
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
        """Returns the origin of the weights of a new run."""
        return cls(
            model={"model": model, **_values(settings, _MODEL)},
            settings={"device_type": device_type, **_values(settings, _SETTINGS)},
            plan=settings.PLAN.to_values(),
            data=data,
            vocabulary=words.model,
        )

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> About:
        """Reads the note of a checkpoint's manifest; raises CheckpointError if another program
        wrote it.
        """
        try:
            # The trainer adds further keys to the note.
            values: dict[str, Any] = {n: v for n, v in note.items() if n not in _OF_TRAINER}
            return cls(**{**values, "vocabulary": base64.b64decode(note["vocabulary"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "--logdir has checkpoints of another program, or of another version of this one "
                f"({error}); give another --logdir"
            ) from error

    def to_note(self) -> dict[str, Any]:
        """Returns the note for a checkpoint's manifest."""
        vocabulary = base64.b64encode(self.vocabulary).decode()
        of_programs = {
            "program": _PROGRAM,
            "evaluated_by": _EVALUATION,
            "decoded_by": _DECODING,
        }
        return dataclasses.asdict(self) | {"vocabulary": vocabulary} | of_programs

    def keep_choice(self, now: About, settings: Settings) -> tuple[str, ...]:
        """Copies earlier choices into `settings`, if the values they depend on are unchanged.

        It returns the names of the values that must still be chosen.
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
        """Raises CheckpointError if a model cannot resume from this checkpoint."""
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
        """Raises CheckpointError if the text differs from this checkpoint's, wherever it lies."""
        if data != self.data:
            raise CheckpointError(
                f"--logdir={logdir!r} holds a checkpoint that was trained on other text "
                f"({changes(self.data, data)}); give that text, or another --logdir, or "
                "--other_text to go on from these weights and their vocabulary with this text"
            )


def digests(corpus: Corpus) -> dict[str, str]:
    """Returns digests of the training text and of the held-out text."""
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
