"""What the machine of a node is like, from its kernel and its plain files, in a few milliseconds."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import shutil
import socket
import threading
import time
from typing import Optional

from dtrain.node import logout
from dtrain.node.folder import NodeDir
from dtrain.node.wire import Interface, LeftOver, Limits, Machine

_LOOK_UP_S = 2.0  # the name service of a machine may be away
_INFINIBAND = "/sys/class/infiniband"
_CONTAINERS = (
    ("docker", "/.dockerenv"),
    ("podman", "/run/.containerenv"),
    ("apptainer", "/.singularity.d"),
    ("kubernetes", "/var/run/secrets/kubernetes.io"),
)


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
        ends_at_logout=logout.ends(logout.fate()),
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
