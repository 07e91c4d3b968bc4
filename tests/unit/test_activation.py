"""`activate` under a real bash: the environment that it leaves behind, whatever it prints, and how it fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dtrain.node import procs
from dtrain.node.activation import activated
from dtrain.node.preparation import Refused


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without start-up files of anybody's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(text: str) -> dict[str, str]:
    return activated(text, lambda: False)


def has_ended(file: Path) -> bool:
    """Whether the process whose id is in there ends."""
    pid = int(file.read_text())
    deadline = time.monotonic() + 20.0
    while (process := procs.look(pid)) is not None and not process.is_dead:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def refused(text: str, timeout_s: float = 30.0) -> tuple[str, str]:
    """What is told, and the next step."""
    with pytest.raises(Refused) as caught:
        activated(text, lambda: False, timeout_s)
    return caught.value.failed.text, caught.value.failed.hint or ""


def test_values_arrive_whatever_the_text_prints() -> None:
    noise = "printf 'A=wrong\\0B=wrong\\0'; printf 'A=wrong\\0' >&2; exec 1>&- 2>&-\n"
    env = run(noise + "export A=$'two\\nlines = 2\\n' B=\"it's\" C= D=$'\\xff\\xc3\\xbc'  # a comment\nE=not_exported")
    assert (env["A"], env["B"], env["C"], os.fsencode(env["D"])) == ("two\nlines = 2\n", "it's", "", b"\xff\xc3\xbc")
    assert not {"E", "_"} & set(env)


def test_it_is_a_login_shell_in_the_home_folder(home: Path) -> None:
    (home / ".profile").write_text("export FROM_PROFILE=1\n")
    (home / "venv").write_text("export FROM_FILE=$#\nunset GONE\n")
    os.environ["GONE"] = "there"
    env = run(". ./venv")
    assert (env["FROM_PROFILE"], env["FROM_FILE"]) == ("1", "0")  # nothing stands in $1: conda's script would take it for a name
    assert "GONE" not in env


def test_it_reads_nothing_and_leaves_nothing_running(home: Path) -> None:
    assert run("read line; export GOT=[$line]; sleep 300 & echo $! > pid")["GOT"] == "[]"
    assert has_ended(home / "pid")
    assert "SSH_AUTH_SOCK" in run("eval $(ssh-agent); echo $SSH_AGENT_PID > agent; (env -i setsid sleep 300 & echo $! > daemon)")
    assert has_ended(home / "agent") and has_ended(home / "daemon")


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("echo no module; exit 3", "activate failed with exit code 3:\n  echo no module; exit 3\n  it printed:\n    no module", "bash -l"),
        ("set -e\nfalse\ntrue", "activate failed with exit code 1:\n  set -e\n  false\n  true\n  it printed nothing", "bash -l"),
        ("kill -9 $$", "activate failed with exit code 137", "bash -l"),
        ("echo 'no end", "activate failed with exit code", "bash -l"),
        ("exit", "activate ended before it was through", "it must not exit"),
        ("exec true", "activate ended before it was through", "nor exec"),
    ],
)
def test_a_failure_tells_the_code_and_what_was_printed(text: str, told: str, hint: str) -> None:
    message, step = refused(text)
    assert message.startswith(told) and hint in step


def test_one_that_hangs_is_ended(home: Path) -> None:
    message, _ = refused("echo wait; echo $$ > pid; sleep 300", timeout_s=1.0)
    assert message == "activate did not end within 1 s:\n  echo wait; echo $$ > pid; sleep 300\n  it printed:\n    wait"
    assert has_ended(home / "pid")


def test_nobody_is_there_any_more(home: Path) -> None:
    with pytest.raises(BrokenPipeError):
        activated("echo $$ > new; mv new pid; sleep 300", (home / "pid").exists)
    assert has_ended(home / "pid")


def test_conda_that_is_not_set_up_here_is_shown_the_way_round(home: Path) -> None:
    """As `conda init` leaves a .bashrc that returns before it where nobody types."""
    base = home / "forge"
    (base / "bin").mkdir(parents=True)
    (base / "bin/activate").touch()
    (home / ".bashrc").write_text(f"case $- in *i*) ;; *) return;; esac\n__conda_setup=\"$('{base}/bin/conda' 'shell.bash' 'hook')\"\n")
    (home / ".profile").write_text('. "$HOME/.bashrc"\n')
    message, hint = refused("conda activate train && export A=1")
    assert "exit code 127" in message and "conda: command not found" in message
    assert f"write `activate: source {base}/bin/activate train`" in hint
    said = "CondaError: Run 'conda init' before 'conda activate'"
    (home / ".bash_profile").write_text(f'conda() {{ echo "{said}" >&2; return 1; }}\n')
    message, hint = refused("conda activate")
    assert said in message and f"`activate: source {base}/bin/activate`" in hint
    (base / "bin/activate").unlink()
    assert "source BASE/bin/activate train`, BASE being" in refused("conda activate train")[1]
    (home / ".bash_profile").write_text("conda() { echo EnvironmentNameNotFound; return 1; }\n")
    assert "bash -l" in refused("conda activate train")[1]


@pytest.mark.parametrize("path", ["./env", "~/env/", "{home}/env/bin", "env/bin/activate"])
def test_a_path_alone_is_no_line(home: Path, path: str) -> None:
    (home / "env/bin").mkdir(parents=True)
    (home / "env/bin/activate").write_text("export ACTIVE=1\n")
    told, hint = refused(path.format(home=home))
    assert "activate failed with exit code 126" in told
    assert run(hint.partition("activate: ")[2].rstrip("`"))["ACTIVE"] == "1", hint
