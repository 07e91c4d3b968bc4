"""What becomes of what a user has started on this machine once they have left it, and what lets a job stay.

With logind's KillUserProcesses a session takes all its processes along. What is below the user's own manager stays where the user
lingers, and else ends with their last session. Where neither holds, what has a session of its own (setsid) stays.
"""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
from typing import Optional

STAYS, SCOPE, ENDS, UNKNOWN = "stays", "scope", "ends", "unknown"  # SCOPE: as it stands it ends, and in a scope of the manager it stays

_SYSTEMD = "/run/systemd/system"
_LINGER = "/var/lib/systemd/linger"
_BUSCTL_S = 2.0
_KILL = "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers"
# Beyond what a session has: as many tasks as the user may have, and where the kernel ends one process for lack of memory, systemd
# is to let the others be, which with Delegate it does.
_OF_SCOPE = ("--property=TasksMax=infinity", "--property=Delegate=yes")


@functools.cache
def fate() -> str:
    """What becomes of the processes of this one once the user has left."""
    if not os.path.isdir(_SYSTEMD):
        return STAYS
    with open("/proc/self/cgroup") as file:
        kind = login_unit(file.read())
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # logind knows it no more than we do
        return UNKNOWN if kind else STAYS
    kills = shall_kill(_ask_logind(), user) if kind == "session" else None
    has_manager = os.path.exists(f"{_runtime_dir()}/systemd/private") and shutil.which("systemd-run") is not None
    return fate_of(kind, kills, lingers=os.path.exists(f"{_LINGER}/{user}"), has_manager=has_manager)


def ends(fate: str) -> Optional[bool]:
    """Whether systemd ends a job whose user has left; None where nobody says."""
    return {ENDS: True, UNKNOWN: None}.get(fate, False)


def staying(argv: list[str], about: str) -> tuple[list[str], dict[str, str]]:
    """What to run, and in which environment, so that the command stays if it can. The process is the same, with its descriptors.

    Args:
        about: what `systemctl --user` says that it is.
    """
    if fate() != SCOPE:
        return argv, dict(os.environ)
    scope = ["systemd-run", "--user", "--scope", "--quiet", *_OF_SCOPE, f"--description={about}", "--"]
    return [*scope, *argv], {**os.environ, "XDG_RUNTIME_DIR": _runtime_dir()}


def fate_of(kind: str, kills: Optional[bool], *, lingers: bool, has_manager: bool) -> str:
    """
    Args:
        kind: what login_unit says.
        kills: whether logind ends a session's processes; None: it does not say.
        lingers: the user's manager goes on without them.
        has_manager: it is there, and can be asked for a scope.
    """
    if kind == "session":
        if kills is False:
            return STAYS
        if lingers and has_manager:
            return SCOPE
        return ENDS if kills else UNKNOWN
    return ENDS if kind == "manager" and not lingers else STAYS


def login_unit(cgroups: str) -> str:
    """What systemd counts this process to: "session" of a login, a user's "manager", whose desktop started it, or "" for neither, as
    in a container or below an sshd without PAM.

    Args:
        cgroups: /proc/self/cgroup.
    """
    for line in cgroups.splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers in ("", "name=systemd"):
            units = path.split("/")
            if any(unit.startswith("user@") and unit.endswith(".service") for unit in units):
                return "manager"
            if any(unit.startswith("session-") and unit.endswith(".scope") for unit in units):
                return "session"
    return ""


def shall_kill(said: str, user: str) -> Optional[bool]:
    """Whether logind ends what is left of a user's session, by what busctl prints of its three properties; None for anything else.

    That the user lingers does not matter: what lingers is the manager, and no session is below it.
    """
    values = [line.replace('"', "").split() for line in said.splitlines()]
    if [value[:1] for value in values] != [["b"], ["as"], ["as"]]:
        return None
    kills, only, spared = values[0][1] == "true", values[1][2:], values[2][2:] or ["root"]  # which is what no list means
    return user not in spared and (user in only if only else kills)


def _ask_logind() -> str:
    asked = "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", *_KILL
    try:
        answer = subprocess.run(
            ("busctl", "get-property", *asked), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BUSCTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _runtime_dir() -> str:
    return f"/run/user/{os.getuid()}"
