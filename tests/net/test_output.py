"""Where what dtrain prints goes to a full disk, to nobody, or to a terminal of another time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster import Result, Workspace
from tests.ssh import Sshd

pytestmark = pytest.mark.net


def redirected(workspace: Workspace, redirection: str, *args: str, env: dict[str, str] | None = None) -> Result:
    """`dtrain ARGS` as a shell starts it with this behind it."""
    script = f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ("bash", "-c", script, "bash", sys.executable, "-m", "dtrain", *args),
        cwd=workspace.workdir,
        env={**workspace.env, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("redirection", "args", "told"),
    [
        (">/dev/full", ("launch", "--dry-run"), "cannot be written: No space left on device"),
        (">/dev/full", ("launch", "--dry-run", "--json"), "cannot be written: No space left on device"),
        (">&-", ("launch", "--dry-run"), "is closed"),
        (">&- <&-", ("schema",), "is closed"),
        (">/dev/full", ("--help",), "cannot be written: No space left on device"),
    ],
)
def test_a_result_that_cannot_be_written_is_an_error(workspace: Workspace, redirection: str, args: tuple[str, ...], told: str) -> None:
    workspace.write("train.py", "")
    workspace.job("script: train.py\n")
    result = redirected(workspace, redirection, *args)
    assert (result.code, result.err) == (73, f"error: stdout {told}\nhint: what was written is not whole: let it go where there is room\n")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "<&- >&- 2>&-"])
def test_messages_that_cannot_be_written_change_nothing(workspace: Workspace, redirection: str) -> None:
    assert redirected(workspace, redirection, "launch") == Result(65, "", "")


def test_a_closed_stdin_is_nobody_to_ask_for_a_passphrase(workspace: Workspace, sshd: Sshd) -> None:
    cluster = f"{{instances: [box], gpus_per_instance: 1, device: cpu, python: {sys.executable}, dir: {workspace.nodes}}}"
    workspace.write("job.yaml", f"launcher: none\ncommand: echo ran\ncluster: {cluster}\n")
    result = redirected(workspace, "<&-", "launch")
    assert result.code == 0 and "ran" in result.err + result.out, result


def test_a_job_goes_on_when_nobody_reads_its_lines(workspace: Workspace) -> None:
    """`dtrain launch 2>&1 | head -1`: the exit code is the worker's own, and its log is whole."""
    workspace.write("talk.py", "for i in range(20000):\n    print('line', i)\nraise SystemExit(3)\n")
    workspace.job("script: talk.py\n", instances=1)
    result = redirected(workspace, "2>&1 | head -1", "launch")
    assert (result.code, result.out.count("\n"), result.err) == (3, 1, "")
    assert workspace.dtrain("logs").out.splitlines()[-1] == "[0] line 19999"


def test_a_reader_who_has_had_enough_ends_a_command_quietly(workspace: Workspace) -> None:
    for args in (("schema",), ("launch", "--dry-run"), ("--help",)):
        workspace.write("job.yaml", "command: [true]\n")
        assert redirected(workspace, "| true", *args) == Result(141, "", "")


def test_a_character_that_the_terminal_lacks_is_written_as_an_escape(workspace: Workspace) -> None:
    workspace.write("größe.py", "")
    workspace.job("script: größe.py\nargs: ['→']\n")
    env = {"PYTHONIOENCODING": "ascii"}
    shown = workspace.dtrain("launch", "--dry-run", env=env)
    assert shown.code == 0 and "\n  'gr\\xf6\\xdfe.py' '\\u2192'\n" in shown.out, shown.err
    for name, told in (("größe.yaml", "gr\\xf6\\xdfe.yaml"), ("\udcff.yaml", "\\xff.yaml")):
        result = workspace.dtrain("launch", name, env=env)
        assert result.code == 65 and result.err.startswith(f"error: {told}: there is no such file\n"), result.err


def test_no_escape_of_a_file_reaches_the_terminal(workspace: Workspace) -> None:
    workspace.write("job.yaml", 'script: "tr\\e[31main.py"\n"k\\e]0;x\\a": 1\n')
    result = workspace.dtrain("launch")
    assert result.code == 65 and "script 'tr\\x1b[31main.py' is not there\n" in result.err
    assert result.err.replace("\n", "").isprintable()
