"""What the machine of a node is like, from its kernel and its plain files, in a few milliseconds."""

from __future__ import annotations

import contextlib
import os
import pwd
import queue
import resource
import shutil
import socket
import subprocess
import threading
import time
from typing import Optional

from dtrain.node.folder import NodeDir
from dtrain.node.wire import Interface, LeftOver, Limits, Machine

_LOOK_UP_S = 2.0  # the name service of a machine may be away
_BUSCTL_S = 2.0
_INFINIBAND = "/sys/class/infiniband"
_CONTAINERS = (
    ("docker", "/.dockerenv"),
    ("podman", "/run/.containerenv"),
    ("apptainer", "/.singularity.d"),
    ("kubernetes", "/var/run/secrets/kubernetes.io"),
)
_SYSTEMD = "/run/systemd/system"
_LINGER = "/var/lib/systemd/linger"
_KILL = "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers"


def machine(node_dir: NodeDir, left_over: tuple[LeftOver, ...]) -> Machine:
    return Machine(
        system=_system(),
        kernel=os.uname().release,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        container=_container(),
        name_means=_name_means(),
        interfaces=_interfaces(),
        has_infiniband=os.path.isdir(_INFINIBAND) and bool(os.listdir(_INFINIBAND)),
        limits=Limits(_limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_NPROC)),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        free_bytes=shutil.disk_usage(node_dir.root).free,
        gpu_driver=_gpu_driver(),
        clock_s=time.time(),
        time_zone=time.strftime("%z"),
        ends_at_logout=_ends_at_logout(),
        jobs=node_dir.running(),
        left_over=left_over,
    )


def _system() -> str:
    with contextlib.suppress(OSError), open("/etc/os-release") as file:
        for line in file:
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip().strip("\"'")
    return os.uname().sysname


def _container() -> str:
    """Which kind of container this is; "" for none that shows itself."""
    for kind, path in _CONTAINERS:
        if os.path.exists(path):
            return kind
    with contextlib.suppress(OSError), open("/run/systemd/container") as file:
        return file.read().strip()
    return ""


def _name_means() -> tuple[str, ...]:
    """The addresses that this machine's own name has here; none where nobody knows it, or nobody answers."""
    answers: queue.Queue[tuple[str, ...]] = queue.Queue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        answers.put(tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))

    threading.Thread(target=look_up, daemon=True).start()
    try:
        return answers.get(timeout=_LOOK_UP_S)
    except queue.Empty:
        return ()


def _interfaces() -> tuple[Interface, ...]:
    found = []
    for _, name in socket.if_nameindex():
        state, mtu, speed = (_of_interface(name, what) for what in ("operstate", "mtu", "speed"))
        found.append(Interface(name, state or "unknown", int(mtu or 0), max(0, int(speed or 0))))
    return tuple(found)


def _of_interface(name: str, what: str) -> str:
    try:
        with open(f"/sys/class/net/{name}/{what}") as file:
            return file.read().strip()
    except OSError:  # the speed of one that is down
        return ""


def _limit(which: int) -> Optional[int]:
    """Of new processes; None for no limit."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _gpu_driver() -> str:
    """Version of NVIDIA's kernel driver; "" without one."""
    with contextlib.suppress(OSError), open("/sys/module/nvidia/version") as file:
        return file.read().strip()
    return ""


def _ends_at_logout() -> Optional[bool]:
    """Whether systemd ends what a user leaves running at log-out; None where it does not say."""
    if not os.path.isdir(_SYSTEMD):
        return False
    with open("/proc/self/cgroup") as file:
        kind = login_unit(file.read())
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # logind knows it no more than we do
        return None if kind else False
    if kind == "manager":
        return not os.path.exists(f"{_LINGER}/{user}")
    return shall_kill(_ask_logind(), user) if kind == "session" else False


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
    kills, only, spared = values[0][1] == "true", values[1][2:], values[2][2:]
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
