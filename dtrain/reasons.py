"""Why workers and nodes fail: one word each, and the next step. docs/failures.md tells more of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.node import lastwords, wire


@dataclass(frozen=True, slots=True)
class Reason:
    hint: str  # the next step
    of_node: str = ""  # what happened there, where a node failed and none of its workers


REASONS: Mapping[str, Reason] = {
    "exception": Reason("the last line of the traceback says what was wrong, the line above it where"),
    "exit-code": Reason("no exception and no signal ended it: its last lines may say why it chose this code"),
    "import-error": Reason("install the module for that node's python, or name another one with python: in the cluster file"),
    "not-found": Reason("the command is not on that node: look at command:, python: and PATH"),
    "too-long": Reason("args, env and secrets are together more than that node's system takes, often 2 MB: put what is long into a file"),
    "workdir-gone": Reason("see what removes it on that node, such as the job's setup"),
    "out-of-memory": Reason("use a smaller batch or fewer DataLoader workers, or give the node more memory"),
    "cuda-out-of-memory": Reason("use a smaller batch, more micro-batches or more pipeline stages; nvidia-smi shows who else holds memory"),
    "no-space": Reason("make room on that node (df -h), or move dir: or outputs: to a larger disk"),
    "port-in-use": Reason("another process on that node has the port; let dtrain choose it, or free it (ss -ltnp)"),
    "killed": Reason("out of memory is the usual cause of SIGKILL, a person or a scheduler on the node the next"),
    "terminated": Reason("nothing of dtrain's sent the signal: look for a shutdown, a scheduler or a person on that node"),
    "segfault": Reason("native code crashed; PYTHONFAULTHANDLER: 1 under env: shows where"),
    "bus-error": Reason("often /dev/shm is full (df -h /dev/shm): use fewer DataLoader workers, or make it larger"),
    "illegal-instruction": Reason("a library was built for another CPU than that node has"),
    "arithmetic-error": Reason("native code divided by zero; PYTHONFAULTHANDLER: 1 under env: shows where"),
    "aborted": Reason("native code gave up; its last lines say why"),
    "peer-lost": Reason("no worker told of a failure of its own: look at the network between the nodes, and for workers that hang"),
    "setup-failed": Reason("its last lines say why", "the job's setup failed on it"),
    "launcher-failed": Reason("its last lines say why", "torchrun or mpirun on it ended before the workers did"),
    "start-timeout": Reason("look at mpirun's last lines", "its workers did not start in time"),
    "agent-killed": Reason("look for a person, a scheduler or a lack of memory on it", "dtrain's agent on it was killed"),
    "guard-killed": Reason("look for a person, a scheduler or a lack of memory on it", "dtrain's guard on it was killed"),
    "all-killed": Reason("look for a person, a scheduler or a lack of memory on it", "dtrain's agent and guard on it were killed"),
    "rebooted": Reason("see why it went down; a job goes on from its last checkpoint when it is launched again", "it was started anew"),
    "node-lost": Reason("look whether it is up (ping, ssh), and at the network between the nodes", "the job has lost it"),
    "folder-gone": Reason("see who cleans up there, and whether its disk is full", "its job folder was deleted, or cannot be written"),
    "never-committed": Reason("start the job again", "its launcher was gone before it was told to start"),
    "lease-over": Reason("a longer --lease lets it run on", "its launcher was silent for longer than the lease"),
}
_MESSAGES = (  # of an exception, or of worker.py; the first that matches
    ("too-long", r"^dtrain: cannot start .*Argument list too long"),
    ("workdir-gone", r"^dtrain: cannot enter the working directory"),
    ("import-error", r"^(ModuleNotFoundError|ImportError)\b"),
    ("cuda-out-of-memory", r"^torch\.(cuda\.)?OutOfMemoryError\b|CUDA out of memory|Cuda failure 'out of memory'"),
    ("out-of-memory", r"^\S*MemoryError\b|Cannot allocate memory|std::bad_alloc"),
    ("no-space", r"\[Errno 28\]|No space left on device"),
    ("port-in-use", r"\[Errno 98\]|EADDRINUSE|[Aa]ddress already in use"),
    ("killed", r"DataLoader worker \(pid\S* [\d, ]+\) is killed by signal: Killed"),
    ("bus-error", r"DataLoader worker \(pid\S* [\d, ]+\) is killed by signal: Bus error"),
    ("segfault", r"DataLoader worker \(pid\S* [\d, ]+\) is killed by signal: Segmentation fault"),
)
_SIGNALS = {4: "illegal-instruction", 6: "aborted", 7: "bus-error", 8: "arithmetic-error", 9: "killed", 11: "segfault", 15: "terminated"}


def is_port_in_use(message: str) -> bool:
    return re.search(dict(_MESSAGES)["port-in-use"], message) is not None


def reason_of(event: wire.WorkerEnded) -> str:
    """One word for why a worker ended, from the evidence that it left. Lack of memory needs proof: a signal alone is none."""
    if event.memory is not None and event.memory.is_shown:
        return "out-of-memory"
    if lastwords.is_peer_lost(event.traceback):
        return "peer-lost"
    # What an exception was raised from says more than its own name; what it was raised beside does not.
    chain = lastwords.exceptions(event.traceback.rpartition(lastwords.CONTEXT)[2])
    for message in reversed(chain or [event.traceback]):
        for reason, pattern in _MESSAGES:
            if re.search(pattern, message):
                return reason
    if chain or lastwords.is_syntax_error(event.traceback):
        return "exception"
    # A shell ends with 128+n where its command was ended by signal n.
    number = event.exit_code - 128 if event.signal is None else event.signal
    if number in _SIGNALS:
        return _SIGNALS[number]
    if event.signal is not None:
        return "terminated"
    return "not-found" if event.exit_code == 127 else "exit-code"
