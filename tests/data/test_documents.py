"""Documents: which tokens they have, and which count."""

import json

import numpy as np
import pytest
import tokenizers

from models.pretrained import config, tokenizer
from pipemesh.data import documents_of, parse_sources
from pipemesh.errors import DataError
from tests.data import templates

END = 2


class Letters:
    """A tokenizer with a token for each character; 1 begins a text, and 2 ends a document."""

    template, special, end = templates.CHATML, {}, END

    def spans(self, text, begins):
        ids = [ord(letter) for letter in text]
        places = [(at, at + 1) for at in range(len(ids))]
        return ([1, *ids], [(0, 0), *places]) if begins else (ids, places)


def documents(tmp_path, *rows, spelling=None, vocab_size=300):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (source,) = parse_sources(str(path))
    return list(documents_of(source, spelling or Letters(), vocab_size))


def counted(document):
    """The tokens that count, as text."""
    weights = document.weights
    weights = np.ones(len(document.ids)) if weights is None else weights
    return "".join(map(chr, document.ids[weights > 0]))


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"text": "ab", "id": 7}, "\1ab\2"),
        ({"prompt": "ab", "completion": "cd"}, "cd\2"),
        ({"prompt": "", "completion": "cd", "text": None}, "\1cd\2"),
        ({"ids": [97, 98, 99], "weights": [0, 0.5, 1]}, "bc"),
        (
            {
                "messages": [
                    {"role": "user", "content": "ab", "name": None},
                    {"role": "assistant", "content": "cd"},
                ]
            },
            "cd<|im_end|>\n",
        ),
    ],
)
def test_only_what_is_to_be_learnt_counts(tmp_path, row, wanted):
    (document,) = documents(tmp_path, row)
    assert counted(document) == wanted


def test_content_beside_calls_of_tools_is_none(tmp_path):
    """A null was left out, and templates that ask for none wrote what is not there."""

    class Calling(Letters):
        template = (
            "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].name }}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        )

    call = {"role": "assistant", "tool_calls": [{"name": "look"}]}
    rows = [{"messages": [USER, call | more]} for more in ({"content": None}, {})]
    found = documents(tmp_path, *rows, spelling=Calling())
    assert [counted(each) for each in found] == ["look", "look"]


def test_a_token_of_prompt_and_completion_does_not_count(tmp_path):
    class Pairs(Letters):
        def spans(self, text, begins):
            ids = [10 + at for at in range(0, len(text), 2)]
            return ids, [(at, at + 2) for at in range(0, len(text), 2)]

    (document,) = documents(tmp_path, {"prompt": "abc", "completion": "def"}, spelling=Pairs())
    assert document.ids.tolist() == [10, 12, 14, END]
    assert document.weights.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("post", ["ByteLevel", "RobertaProcessing", "Sequence"])
def test_spaces_of_tokens_are_theirs(tmp_path, post):
    """Offsets without them let a token begin later, and count for what follows."""
    processors = tokenizers.processors
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(["a cat sat\n\non a mat"] * 9, trainer)
    made.add_special_tokens(["<s>"])

    def found(trimmed):
        level = processors.ByteLevel(trim_offsets=trimmed)
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        of_pair = [("<s>", made.token_to_id("<s>"))] * 2
        made.post_processor = {
            "ByteLevel": level,
            "RobertaProcessing": processors.RobertaProcessing(*of_pair, trim_offsets=trimmed),
            "Sequence": processors.Sequence([level, begin]),
        }[post]
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(templates.LLAMA3)
        values = {"model_type": "gpt2", "vocab_size": made.get_vocab_size()}
        spelling = tokenizer.load(str(tmp_path), config.of_values(values))
        rows = (
            {"prompt": "a ", "completion": "cat sat"},
            {"prompt": "a\n\n", "completion": "cat "},
            {"messages": templates.CHAT},
        )
        return [
            (document.ids.tolist(), document.weights.tolist())
            for document in documents(tmp_path, *rows, spelling=spelling, vocab_size=9999)
        ]

    assert found(True) == found(False)


def test_an_end_that_the_tokenizer_adds_is_not_repeated(tmp_path):
    class Ended(Letters):
        def spans(self, text, begins):
            ids, places = super().spans(text, begins)
            return [*ids, END], [*places, (0, 0)]

    rows = {"text": "a"}, {"prompt": "a", "completion": "b"}
    text, completion = documents(tmp_path, *rows, spelling=Ended())
    assert text.ids.tolist() == [1, 97, 2] and completion.ids.tolist() == [1, 97, 98, 2]
    assert completion.weights.tolist() == [0, 0, 1, 1]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "row, told",
    [
        ({"content": "a"}, "has none of the fields text, .* but content; name the field in a TOML"),
        ({"text": "a", "ids": [1]}, "has text and ids"),
        ({"text": "a", "prompt": "b"}, "a document with text has no field 'prompt'; leave one"),
        ({"prompt": "a"}, "a document has either .* but this one has prompt"),
        ({"completion": "a"}, "has no prompt; give both"),
        ({"text": 5}, "text is a int; it must be a text"),
        ({"text": "\ud800"}, "a text is no Unicode"),
        ({"text": "\u20ac"}, "has the token 8364, but the model has the ids 0 to 299; take"),
        ({"ids": [5, -1]}, "has the token -1, but the model"),
        ({"ids": "ab"}, "ids must be a list of whole numbers"),
        ({"ids": [1.5]}, "ids must be a list of whole numbers"),
        ({"ids": [10**30]}, "ids must be a list of whole numbers"),
        ({"ids": [1, [2]]}, "ids must be a list of whole numbers"),
        ({"ids": [1, 2], "weights": [1]}, "there are 2 ids, but 1 weights"),
        ({"ids": [1, 2], "weights": [1, -1]}, "weights must be finite and not negative"),
        ({"ids": [1, 2], "weights": ["a", "b"]}, "weights must be a list of numbers"),
        ({"messages": "a"}, "messages must be a list of objects with role and content"),
        ({"messages": []}, "messages must be a list of objects with role and content"),
        ({"messages": [{"content": "a"}]}, "message 1 has no role"),
        ({"messages": [USER], "tools": "[]"}, "tools must be a list of objects, not a text"),
        ({"messages": [{"role": "user"}]}, "the chat template refuses the messages"),
    ],
)
def test_wrong_documents_are_refused_by_their_line(tmp_path, row, told):
    with pytest.raises(DataError, match=rf"a\.jsonl', line 2:? {told}|{told}") as error:
        documents(tmp_path, {"text": "a"}, row)
    assert "a.jsonl', line 2" in str(error.value) and "\n" not in str(error.value)


def test_missing_template_and_tokenizer_are_told(tmp_path):
    class Bare(Letters):
        template = None

    with pytest.raises(DataError, match=r"the tokenizer has none; put chat_template\.jinja"):
        documents(tmp_path, {"messages": [USER]}, spelling=Bare())
    path = tmp_path / "a.txt"
    path.write_text("a")
    (source,) = parse_sources(str(path))
    with pytest.raises(DataError, match=r"there is no tokenizer; put tokenizer\.json or"):
        list(documents_of(source, None, 9))
