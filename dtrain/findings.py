"""What is wrong with a cluster, by its stable name: how grave it is, where it comes from, what cures it. docs/preflight.md tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_NAMES = 4
_SAME_TORCH = "install the same torch, from the same index, on all of them"


@dataclass(frozen=True, slots=True)
class Kind:
    is_error: bool  # it stops a launch; else it is shown
    cause: str
    cure: str
    can_pass: bool  # a user may say that it counts for nothing: the nodes could run the job all the same


@dataclass(frozen=True, slots=True)
class Finding:
    name: str  # one of KINDS
    nodes: tuple[str, ...]
    text: str  # names the nodes, except where it is about all of them
    cure: str | None

    @property
    def is_error(self) -> bool:
        return KINDS[self.name].is_error


def listed(nodes: Sequence[str]) -> str:
    """As many names as a sentence bears."""
    return ", ".join(nodes[:_MOST_NAMES]) + (f" and {len(nodes) - _MOST_NAMES} more" if len(nodes) > _MOST_NAMES else "")


def _error(cause: str, cure: str, *, can_pass: bool = False) -> Kind:
    return Kind(True, cause, cure, can_pass)


def _warning(cause: str, cure: str) -> Kind:
    return Kind(False, cause, cure, True)


ENDS_AT_LOGOUT = "ends-at-logout"

KINDS = {
    # ---- of the machine that launches ----
    "workdir-unfit": _error(
        "the working directory is too large to be sent, or a file of it cannot be read", "name what is not needed in .dtrainignore"
    ),
    # ---- of one node, which cannot run the job ----
    "unreachable": _error("no login in time: the machine is off, a firewall is between, or its sshd says nothing", "ssh NODE true"),
    "access-refused": _error("the login was refused, or the host key is not the known one", "ssh NODE true must ask for nothing"),
    "no-space": _error("the disk that dtrain's folder lies on is full, or the user's share of it", "make room, or set another dir:"),
    "python-missing": _error("there is no Python, it does not run, or it is older than 3.9", "set python: in the cluster file"),
    "torch-missing": _error("the workers' Python has no torch", "install it for that Python, or set python: to one that has it"),
    "torch-untested": _error(
        "a built-in trainer uses parts of torch that change from release to release, and was tested with another one",
        "install that one; a script takes any torch",
        can_pass=True,
    ),
    "workdir-missing": _error(
        "under `sync: false`, the working directory or the script is not on the node",
        "is workdir: the folder that all nodes share? sync: true sends one from here",
    ),
    "activate-failed": _error("the line `activate` failed, or did not end", "log in there, and type it into `bash -l`"),
    "gpu-missing": _error("there are fewer GPUs than the job asks for", "ask for fewer in gpus_per_instance"),
    "gpu-unreadable": _error(
        "nvidia-smi does not tell of the GPUs, or of who holds them: a driver that was updated and not loaded anew, a GPU that hangs",
        "run nvidia-smi there, and restart the machine; device: cpu does without GPUs",
    ),
    "gpu-busy": _error("others hold the GPUs that the job asks for", "launch --wait waits for them; stop ends a dtrain job"),
    "mpi-unfit": _error("mpirun or its daemon is missing, of another family, or not the same on all nodes", "install Open MPI 4"),
    "no-port": _error("too few ports of the window `ports` are free on the first node", "widen ports:, or end what has them"),
    "unfit": _error("something else that the node says of itself", "the finding says what"),
    # ---- of the way between them ----
    "no-address": _error(
        "a node has no address in `network`, or not the `address` that it was given", "set network: to one that all share"
    ),
    "rendezvous-blocked": _error("a node does not reach another one where they would meet", "let TCP through; ports: keeps to a window"),
    "packets-lost": _error("small packets come through and larger ones do not: an MTU on the way is too small", "give all links one MTU"),
    # ---- of all of them, which differ ----
    "torch-differs": _error("the nodes have several versions of torch", "install the same version on all of them", can_pass=True),
    "nccl-differs": _error("the nodes' torch brings several versions of NCCL", _SAME_TORCH, can_pass=True),
    "cuda-differs": _warning("the nodes' torch was built for several versions of CUDA", _SAME_TORCH),
    "python-differs": _warning("the workers run under several versions of Python", "set python: to the same version everywhere"),
    "driver-differs": _warning("the nodes have several versions of the GPU driver", "bring them to the same version"),
    "gpu-model-differs": _warning("the GPUs are of several models; the slowest sets the pace", "leave the slower ones out with --exclude"),
    # ---- of one node, which can run the job ----
    "no-gpu": _warning(
        "a machine that has to give GPUs has none: its workers run on CPUs",
        "device: cuda refuses that, and device: cpu says that it is meant",
    ),
    "gpu-lost": _warning(
        "the driver has lost a GPU, such as one that has fallen off the bus: the job can have the others",
        "restart the machine, and leave it out with --exclude until then",
    ),
    "left-over": _warning(
        "processes of an earlier job whose agent and guard were killed; they have been ended, and dtrain status tells of the job",
        "nothing; where it happens again, look for what kills the user's processes there",
    ),
    ENDS_AT_LOGOUT: _warning(
        "systemd ends what a user leaves running: a job ends with the connection to the node, and launch --detach is refused",
        "loginctl enable-linger, on that node as its user",
    ),
    "clock-skew": _warning("a node's clock is a minute or more off", "timedatectl set-ntp true, on that node"),
    "shm-small": _warning(
        "/dev/shm is so small that the workers of a DataLoader die by a bus error",
        "Docker: --shm-size=8g or --ipc=host; else mount -o remount,size=8G /dev/shm",
    ),
    "memlock-low": _warning(
        "so little memory may be locked that RDMA cannot register its buffers",
        "memlock unlimited in /etc/security/limits.conf, and log in again",
    ),
    "nofile-low": _warning(
        "so few files may be open that many workers run out of them", "nofile 65536 in /etc/security/limits.conf, and log in again"
    ),
    "disk-low": _warning("where dtrain's folder lies is hardly room for logs and checkpoints", "make room, or set another dir:"),
    "env-contradicts": _warning(
        "`env` names an interface at which the others do not reach the node; it wins, and the job may hang", "leave it out of env"
    ),
    "host-name-loopback": _warning(
        "the node's own name means the node itself there: a library that tells others this name tells them nothing",
        "dtrain's own addresses are numbers, and need no cure; else give the name its address in /etc/hosts",
    ),
}

WARNABLE = frozenset(name for name, kind in KINDS.items() if kind.can_pass)
