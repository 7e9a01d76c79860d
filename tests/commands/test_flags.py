"""The layer of all command lines: flags in; values, help, errors and TOML out."""

import pytest

from pipemesh.commands.flags import (
    FLAGS,
    Command,
    ConfigError,
    Flag,
    FlagError,
    as_toml,
    check_output,
    grouped,
    parse,
    read_toml,
    write_output,
)


def _even(text):
    if int(text) % 2:
        raise ValueError("it must be even")
    return int(text)


COMMAND = Command(
    "pipemesh test",
    "Tests flags.",
    (
        Flag("steps", int, 300, least=0, help="Number of steps."),
        Flag("rate", float),
        Flag("layout", help="A layout."),
        Flag("model", short="m"),
        Flag("kind", choices=["text", "json"], default="text"),
        Flag("allow_idle", bool),
        Flag("plain", bool, False),
        Flag("node", bool, False),
        Flag("fix", repeated=True),
        Flag("even", _even),
        Flag("config", value="FILE"),
        Flag("secret", int, hidden=True),
        *grouped("workers", Flag("cluster"), Flag("spares", group="others")),
    ),
    refused={"cluster": "is for training"},
)
NEEDY = Command(
    "pipemesh needy",
    "Needs arguments.",
    (Flag("paths", argument="+"), Flag("devices", int, required=True, value="N")),
)
REST = Command(
    "pipemesh rest", None, (Flag("words", argument="..."), Flag("processes", int), Flag("x", bool))
)


def values(*words, command=COMMAND):
    return parse([command.name, *words], command).given()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--steps=3", "--rate", "1"], {"steps": 3, "rate": 1.0}),
        (["--allow-idle"], {"allow_idle": True}),
        (["--no-allow-idle"], {"allow_idle": False}),
        (["--noallow-idle"], {"allow_idle": False}),
        (["--noallow_idle"], {"allow_idle": False}),
        (["--allow_idle=False", "--plain=1"], {"allow_idle": False, "plain": True}),
        (["--node"], {"node": True}),
        (["-m", "a.B"], {"model": "a.B"}),
        (["-ma.B"], {"model": "a.B"}),
        (["-m=a.B"], {"model": "a.B"}),
        (["-steps=3"], {"steps": 3}),
        (["--layout", "-x-y_z"], {"layout": "-x-y_z"}),
        (["--layout="], {"layout": ""}),
        (["--layout=a", "--layout=b-c"], {"layout": "b-c"}),
        (["--fix=a=1", "--fix=b=2"], {"fix": ["a=1", "b=2"]}),
        (["--even=4"], {"even": 4}),
    ],
)
def test_spellings_of_a_flag(words, wanted):
    assert values(*words) == wanted


def test_flags_that_are_not_given_have_their_defaults():
    assert values("--steps=3") == {"steps": 3}
    assert (FLAGS.rate, FLAGS.kind, FLAGS.plain, FLAGS.allow_idle) == (None, "text", False, None)
    assert FLAGS.fix == []
    assert FLAGS.value("nothing", 5) == 5 and not FLAGS.is_given("rate")
    with pytest.raises(AttributeError, match="no flag 'nothing'"):
        _ = FLAGS.nothing
    # Each command line begins anew.
    assert values() == {} and FLAGS.steps == 300


def test_arguments_without_names_and_flags_may_be_mixed():
    with pytest.raises(FlagError, match=r"missing: PATHS \.\.\., --devices=N; `pipemesh needy"):
        values(command=NEEDY)
    assert values("a", "b", "--devices=2", command=NEEDY) == {"paths": ["a", "b"], "devices": 2}
    assert values("--devices", "2", "-", command=NEEDY) == {"paths": ["-"], "devices": 2}


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_what_follows_the_flags_of_a_command_stays_as_it_is(separator):
    rest = ["train", "--x", "--processes=4", "--", "--a-b"]
    found = values("--processes=2", *separator, *rest, command=REST)
    assert found == {"processes": 2, "words": rest}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stepz=3"], "unknown flag --stepz; did you mean --steps?"),
        (["--zzz"], "unknown flag --zzz; there are --steps, --rate, "),
        (["--clustr=a"], "unknown flag --clustr; there are --steps, --rate, "),
        (["--steps=many"], "--steps='many': it must be a whole number"),
        (["--steps=-1"], "--steps=-1: it must be at least 0"),
        (["--rate=x"], "--rate='x': it must be a number"),
        (["--rate"], "--rate has no value; write --rate=..."),
        (["--plain=perhaps"], "--plain='perhaps': it must be true or false"),
        (["--kind=jsn"], "--kind='jsn': it must be one of text|json; did you mean 'json'?"),
        (["--even=3"], "--even='3': it must be even"),
        (["--layout=a\0"], "has a NUL character; leave it out"),
        (["--cluster=a"], "--cluster is for training; leave it out"),
        (["trash"], "'trash' is no flag; flags begin with --"),
        (["--", "a well-known fact"], "is no flag; flags begin with --"),
        (["--nosteps"], "unknown flag --nosteps"),
    ],
)
def test_errors_name_the_flag_and_what_is_allowed(words, told):
    with pytest.raises(FlagError) as error:
        values(*words)
    assert told in str(error.value)


@pytest.mark.parametrize("word", ["--help", "-h", "-help", "--helpfull", "--helpshort"])
def test_help_has_required_flags_first_and_then_the_groups(word, capsys):
    with pytest.raises(SystemExit) as end:
        values("--stepz", word)
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: pipemesh test [--flag=value ...]\n\nTests flags.\n\n")
    assert "  --steps=...\n      Number of steps (default: 300).\n" in out
    assert "  -m, --model=..." in out and "  --[no]plain" in out and "  --kind=text|json" in out
    assert "secret" not in out and "cluster" not in out and "\nothers:\n  --spares" in out
    help = NEEDY.help()
    assert help.startswith("usage: pipemesh needy --devices=N PATHS ...\n")
    assert help.index("required:") < help.index("  PATHS ...\n") < help.index("  --devices=N\n")


def test_the_command_line_has_precedence_over_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('steps = 300\nlayout = "batch:data"  # Of replicas.\nplain = true\nrate = 1\n')
    found = values("--steps=7", f"--config={path}")
    assert found == {
        **{"steps": 7, "layout": "batch:data", "plain": True, "rate": 1.0},
        "config": str(path),
    }
    # One that a training wrote has flags that others refuse.
    path.write_text('cluster = "a:1"\nsteps = 3\n')
    assert values(f"--config={path}")["steps"] == 3 and FLAGS.cluster is None


def test_what_is_written_as_toml_is_read(tmp_path):
    layout = 'a "quoted" \\ näme\n\x7f\x00\x1f\u2028'
    flags = {"layout": layout, "steps": 3, "rate": 1e-30, "plain": False}
    path = tmp_path / "run.toml"
    path.write_text(as_toml(flags), encoding="utf-8")
    assert read_toml(str(path)) == flags


def test_a_path_that_is_not_utf8_is_left_out_of_a_file(tmp_path):
    """It ended a training before its first step, by a UnicodeEncodeError."""
    path = tmp_path / "run.toml"
    path.write_text(as_toml({"text": "by\udcffte", "steps": 3}), encoding="utf-8")
    assert read_toml(str(path)) == {"steps": 3}
    assert "# text is not UTF-8, which TOML has to be: 'by\\udcffte'" in path.read_text()
    # Nor is a byte order mark a part of it.
    path.write_bytes(b"\xef\xbb\xbfsteps = 3\r\n")
    assert read_toml(str(path)) == {"steps": 3}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('config = "other.toml"', "has 'config': a file of flags includes no other one"),
        ("stepz = 3", "has 'stepz', which is no flag; did you mean 'steps'?"),
        ("[train]\nsteps = 3", "has 'train', which is no flag"),
        ("steps = [3]", "steps is a list; give text, a number, true or false"),
        ("steps = 1.5", "--steps='1.5': it must be a whole number"),
        ("steps = -1", "--steps=-1: it must be at least 0"),
        ('plain = "perhaps"', "--plain='perhaps': it must be true or false"),
    ],
)
def test_a_file_with_something_else_than_flags_is_an_error(tmp_path, text, told):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        values(f"--config={path}")
    assert f"--config={str(path)!r}" in str(error.value) and told in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, r"run\.toml.*cannot be read \(No such file"), (b"\xff\xfe = 3", "is no TOML")],
)
def test_a_file_that_is_missing_or_no_toml_is_an_error(tmp_path, content, told):
    path = tmp_path / "run.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_toml(str(path))


def test_checking_an_output_file_leaves_it_as_it_is(tmp_path):
    path = tmp_path / "x.json"
    check_output("--json", str(path))
    assert not path.exists()
    write_output("--json", str(path), "text")
    check_output("--json", str(path))
    assert path.read_text() == "text"
    for bad in (str(tmp_path), str(tmp_path / "none" / "x"), "a\0b"):
        with pytest.raises(FlagError, match=r"--json=.* cannot be written"):
            check_output("--json", bad)
