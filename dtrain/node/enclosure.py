"""A command with everything it leaves running, daemons too, ended when it ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from dtrain.node import procs
from dtrain.node.folder import BUNDLE

_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0
_START = "import sys; sys.path.insert(0, sys.argv[1]); from dtrain.node import enclosure; sys.exit(enclosure.main(sys.argv[2:]))"


def enclosed(argv: list[str], fd: int) -> list[str]:
    """The command that runs another one below a process of its own. When its stdin ends, so does the other.

    A process of its own, for a marker would not do: the environment of an ssh-agent cannot be read.

    Args:
        fd: that the command inherits, and so must this one.
    """
    return [sys.executable, "-I", "-S", "-c", _START, BUNDLE, str(fd), *argv]


def main(argv: list[str]) -> int:
    """The command's exit code, once nothing of it is left; 128+n for signal n.

    Args:
        argv: a descriptor and the command that inherits it.
    """
    procs.become_subreaper()
    command = subprocess.Popen(argv[1:], stdin=subprocess.DEVNULL, pass_fds=(int(argv[0]),), start_new_session=True)
    while os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if select.select([0], [], [], _POLL_S)[0]:
            break
    codes: dict[int, int] = {}
    procs.kill_all(lambda pid, status: codes.__setitem__(pid, procs.exit_code(status)), _KILL_TIMEOUT_S)
    command.returncode = codes.get(command.pid, 1)
    return command.returncode
