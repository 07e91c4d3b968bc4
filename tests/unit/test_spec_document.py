"""Files that are no good YAML, and files that are no file: an answer with a place, and never a traceback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dtrain.errors import SpecError
from dtrain.spec import load_cluster, load_job


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


# (bytes of job.yaml, where the mistake is, a part of the message, a part of the hint)
WRONG: list[tuple[bytes, str, str, str]] = [
    (b"# nothing but words\n", ":1:1", "the file is empty", "script: train.py"),
    (b"- script", ":1:1", "the file holds a list", "script: train.py"),
    (b"\n train", ":2:2", "the file holds the text 'train'", "script: train.py"),
    (b"script: a\xff", ":1:10", "byte 0xff is not UTF-8", "UTF-8"),
    ("a: ü\nb: ü".encode("latin-1"), ":1:4", "byte 0xfc is not UTF-8", "UTF-8"),
    ("script: x".encode("utf-16"), ":1:1", "byte 0xff is not UTF-8", "UTF-8"),
    (b"script: a\x01", ":1:10", "U+0001 cannot stand in YAML", "escape"),
    (b"script: @x", ":1:9", "cannot start any token", "quotes"),
    (b"script: a: b", ":1:10", "mapping values are not allowed", "quotes"),
    (b"script: 'a", ":1:9", "the quote that begins here is not closed", "close the quotes"),
    (b"name: 'a\nscript: b\n", ":1:7", "the quote that begins here is not closed", "close the quotes"),
    (b"script: train.py\nargs:--epochs 3\n", ":2:1", "no 'key: value'", "put a space after ':', as in `args: --epochs 3`"),
    (b"script:train.py\nargs: a", ":1:1", "no 'key: value'", "put a space after ':', as in `script: train.py`"),
    (b"script:train.py\n", ":1:1", "the file holds the text", "put a space after ':', as in `script: train.py`"),
    (b"script = train.py\n", ":1:1", "the file holds the text", "write `script: train.py`"),
    (b"name: a\nscript = train.py\nargs: b\n", ":2:1", "no 'key: value'", "write `script: train.py`"),
    (b"trainer:\n  model:gpt\n  data: text\n", ":2:3", "no 'key: value'", "`model: gpt`"),
    (b"script: t\nenv: {TAG: run #3}\nargs: b\n", ":2:16", "a comment begins here, and the '{' before it is not closed", "quotes"),
    (b"env: {A: ' #', B: 1,  # first\n  C: 2\nargs: b\n", ":3:5", "expected ',' or '}'", "brackets"),
    (b"cluster: {instances: [trn[01-16].lab]}", ":1:26", "expected ',' or ']'", '"trn[01-16].lab"'),
    (b"script: [a", ":1:9", "the bracket that opens here is not closed", "close the bracket"),
    (b"script: train.py\nargs: [a\n\n", ":2:7", "the bracket that opens here is not closed", "close the bracket"),
    (b"script: train.py\ngrace 3\n", ":2:1", "no 'key: value'", "put ': ' after the key"),
    (b"setup: |\n   a\n  b\n", ":3:3", "this line belongs to none above it", "check the indentation"),
    (b"env:\n  A: 1\n B\n", ":3:2", "this line belongs to none above it", "check the indentation"),
    (b"args:\n  - a\n b", ":3:2", "this line belongs to none above it", "check the indentation"),
    (b"args:\n  - 'a'\n b", ":3:2", "this line belongs to none above it", "check the indentation"),
    (b"script: t\nargs: [a] b\n", ":2:11", "a text stands behind a value", "quotes around all of it"),
    (b"args:\n  - 'a' b\n", ":2:9", "a text goes on behind its quotes", "one pair of quotes"),
    (b"script: *x", ":1:9", "found undefined alias", "quotes"),
    (b"script: *.py", ":1:10", "expected alphabetic", "quotes"),
    (b"script: train.py\n---\nscript: b", ":2:1", "a second document begins", "---"),
    (b"script: !!python/object/apply:os.system [reboot]", ":1:9", "YAML tags", "remove"),
    (b"script: !x", ":1:9", "YAML tags", "quote"),
    (b"script: train.py\nscript: train.py", ":2:1", "'script' stands here a second time", "line 1"),
    (b"script: train.py\nenv:\n  A: 1\n  'A': 2", ":4:3", "'A' stands here a second time", "line 3"),
    (b"script: train.py\n? [a]\n: b", ":2:3", "a key must be a text", "quotes"),
    (b"script: train.py\n<<: {name: x}", ":2:1", "merge keys", "write the keys out"),
    (b'script: train.py\nargs: ["a\\0b"]', ":2:8", "NUL", "remove"),
    (b'script: train.py\nargs: ["\\ud83d"]', ":2:8", "surrogate", "itself"),
    (b'script: train.py\nargs: ["\\ufffd \\ud83d"]', ":2:8", "surrogate", "itself"),
    (b'script: "\\UFFFFFFFF"', ":1:12", "cannot be read as YAML", "single quotes"),
    (b"%YAML 1" + b"0" * 5000 + b".1\n---\na: b", ":1:7", "cannot be read as YAML", "quotes"),
    (b"script: " + b"[" * 30, ":1:28", "nested more than 20", ""),
    (b"script: train.py\nenv: &x\n  A: *x", ":2:6", "env grows without end", "write the values out"),
    (b"#" * 5_000_000, "", "larger than 4 MiB", "the file that you meant"),
]


@pytest.mark.parametrize(("data", "where", "message", "hint"), WRONG, ids=[f"{row[2]} {row[1]}" for row in WRONG])
def test_a_file_that_is_no_good_yaml_is_answered_with_the_place(data: bytes, where: str, message: str, hint: str) -> None:
    Path("job.yaml").write_bytes(data)
    with pytest.raises(SpecError) as caught:
        load_job(Path("job.yaml"))
    (problem,) = caught.value.problems
    assert problem.where == f"job.yaml{where}"
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert "\n" not in problem.message


def test_a_file_full_of_values_is_answered_before_all_of_it_is_read() -> None:
    Path("job.yaml").write_text(f"args: [{', '.join(['x'] * 80_000)}]\n")
    begin_s = time.process_time()
    with pytest.raises(SpecError, match=r"job.yaml:1:\d+: more than 32000 keys and values"):
        load_job(Path("job.yaml"))
    assert time.process_time() - begin_s < 1.0


def test_a_bomb_of_aliases_is_defused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    Path("job.yaml").write_text("\n".join(lines))
    begin_s = time.process_time()
    with pytest.raises(SpecError, match=r"job.yaml:5:1: with a4 the file has more than 16000 values"):
        load_job(Path("job.yaml"))
    assert time.process_time() - begin_s < 1


def test_an_alias_stands_for_its_text() -> None:
    Path("job.yaml").write_text("script: train.py\nenv: {A: &a 08, B: *a}\n")
    assert load_job(Path("job.yaml")).env == {"A": "08", "B": "08"}


def test_a_pair_of_surrogates_is_the_character_that_json_writes_so() -> None:
    Path("job.yaml").write_text(r'{"script": "train.py", "name": "n", "env": {"A": "\ud83d\ude00 \ufffd"}}')
    assert load_job(Path("job.yaml")).env == {"A": "😀 \ufffd"}


def test_a_byte_order_mark_and_windows_line_ends_change_nothing() -> None:
    Path("job.yaml").write_bytes("\ufeffscript: train.py\r\nenv:\r\n  A: x\r\nadress: 1\r\n".encode())
    with pytest.raises(SpecError) as caught:
        load_job(Path("job.yaml"))
    assert [problem.where for problem in caught.value.problems] == ["job.yaml:4:1"]


@pytest.mark.parametrize("load", [load_job, load_cluster])
def test_a_file_that_is_not_there_is_named_with_the_nearest(load: type) -> None:
    Path("job.yaml").touch()
    with pytest.raises(SpecError) as caught:
        load(Path("jbo.yaml"))
    assert str(caught.value) == "jbo.yaml: there is no such file\nhint: did you mean 'job.yaml'?"


def test_a_folder_is_answered_with_the_job_file_in_it() -> None:
    Path("project").mkdir()
    Path("project/job.yaml").touch()
    with pytest.raises(SpecError) as caught:
        load_job(Path("project"))
    assert str(caught.value) == "project: is a folder, not a file\nhint: did you mean 'project/job.yaml'?"


def test_a_python_script_given_as_a_job_is_answered_with_the_job_to_write() -> None:
    Path("train.py").write_text("print\n")
    with pytest.raises(SpecError, match=r"write `script: train.py` into a file job.yaml"):
        load_job(Path("train.py"))


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "train.py/job.yaml", "x" * 5000, "a\0b"])
def test_an_unreadable_file_is_a_plain_answer(path: str) -> None:
    with pytest.raises(SpecError):
        load_job(Path(path))


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{i}:\n" for i in range(15_900)),
        "script: train.py\npreflight: {ignore: [" + ", ".join(f"k{i}" for i in range(15_000)) + "]}",
        "secrets:\n" + "".join(f"- k{i}\n" for i in range(15_900)),
        "cluster: {instances: [" + "[x], " * 15_000 + "a]}",
        "cluster: {instances: [" + "'a[1-4096]', " * 15_000 + "a]}",
        "script: train.py\nargs: [" + "[x], " * 15_000 + "a]",
        "cluster: {instances: 1, gpus_per_instance: [" + ", ".join(map(str, range(15_900))) + "]}",
    ],
    ids=["unknown keys", "findings", "secrets", "wrong instances", "ranges", "wrong args", "GPUs"],
)
def test_thousands_of_mistakes_take_seconds(text: str) -> None:
    Path("job.yaml").write_text(text)
    begin_s = time.process_time()
    with pytest.raises(SpecError):
        load_job(Path("job.yaml"))
    assert time.process_time() - begin_s < 10  # what grows with the square takes minutes


def test_a_file_like_a_missing_one_is_looked_for_a_few_times_alone() -> None:
    Path("keys").mkdir()
    for number in range(900):
        Path(f"keys/id_{number:05}_key").touch()
    lines = (f"- {{host: h{number}, ssh: {{identity_file: keys/idd_{number}_kye}}}}\n" for number in range(300))
    Path("lab.yaml").write_text("instances:\n" + "".join(lines))
    begin_s = time.process_time()
    with pytest.raises(SpecError) as caught:
        load_cluster(Path("lab.yaml"))
    assert time.process_time() - begin_s < 2.5  # each search takes 20 ms
    assert len(caught.value.problems) == 300
    assert "did you mean" in str(caught.value.problems[19].hint) and "looked for as" in str(caught.value.problems[20].hint)
