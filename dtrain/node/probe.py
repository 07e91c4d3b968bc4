"""What a node says of itself, found in well under a second and without importing torch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Optional

from dtrain.node import gpus
from dtrain.node.addresses import addresses
from dtrain.node.folder import NodeDir
from dtrain.node.machine import machine
from dtrain.node.preparation import Refused
from dtrain.node.record import dataclass
from dtrain.node.wire import Failed, LeftOver, NodeFacts, Probe

_PYTHON_TIMEOUT_S = 30.0
_MPIRUN_TIMEOUT_S = 10.0
_OLDEST = (3, 9)  # of worker.py

# Runs under the workers' interpreter. torch and NCCL say their versions in a file and in a folder's name: to import torch would take
# seconds, and importlib.metadata three times as long as all of this.
_ASK_PYTHON = """
import sys
version = "%d.%d.%d" % sys.version_info[:3]
torch = cuda = nccl = ""
if sys.version_info >= (3, 9):
    import os
    found = next(filter(None, (finder.find_spec("torch", None) for finder in sys.meta_path if hasattr(finder, "find_spec"))), None)
    if found is not None and found.submodule_search_locations:
        said = {}
        with open(os.path.join(found.submodule_search_locations[0], "version.py")) as file:
            for line in file:
                name, _, value = line.partition(" = ")
                said[name.partition(":")[0]] = value.strip()
        torch, cuda = (said[name].strip("'\\"") if said.get(name, "None") != "None" else "" for name in ("__version__", "cuda"))
        start, end = "nvidia_nccl_cu%s-" % cuda.partition(".")[0], ".dist-info"
        folders = [folder for folder in sys.path if cuda and os.path.isdir(folder) and os.access(folder, os.R_OK)]
        names = [name for folder in folders for name in os.listdir(folder) if name.startswith(start) and name.endswith(end)]
        nccl = names[0][len(start):-len(end)] if names else ""
        torch = torch or "unknown"
print("\\t".join((version, torch, cuda, nccl)))
"""


@dataclass(frozen=True)
class _Python:
    """The workers' interpreter; texts are "" for what it has not."""

    path: str
    version: str
    torch: str
    cuda: str
    nccl: str


def facts(
    order: Probe,
    environ: Mapping[str, str],
    node_dir: NodeDir,
    left_over: tuple[LeftOver, ...],
    *,
    bundle: str,
    job_folder: str,
    output_dir: str,
) -> NodeFacts:
    """Args:
        environ: in which the job will run.
        left_over: what this session has found of earlier jobs.

    Raises:
        Refused: there is no Python that could run the workers.
    """
    python = _ask_python(order.python, environ)
    found = gpus.found(node_dir)
    mpirun = shutil.which("mpirun", path=environ.get("PATH")) if order.mpi else None
    return NodeFacts(
        host_name=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        gpus=found.gpus,
        gpu_fault=found.fault,
        python=python.path,
        python_version=python.version,
        torch_version=python.torch,
        cuda_version=python.cuda,
        nccl_version=python.nccl,
        addresses=addresses(),
        bundle=bundle,
        node_dir=node_dir.root,
        job_folder=job_folder,
        output_dir=output_dir,
        mpirun=mpirun or "",
        mpi_daemon=_mpi_daemon(mpirun),
        mpi_version=_mpi_version(mpirun, environ),
        missing=_missing(order),
        machine=machine(node_dir, left_over),
    )


def _missing(order: Probe) -> str:
    if order.workdir is None:
        return ""
    if not os.path.isdir(order.workdir):
        return f"the working directory {order.workdir} is not there"
    if order.script is not None and not os.path.exists(os.path.join(order.workdir, order.script)):
        return f"the script {order.script} is not there, in {order.workdir}"
    return ""


def _ask_python(python: str, environ: Mapping[str, str]) -> _Python:
    searched = environ.get("PATH", os.defpath)
    path = shutil.which(os.path.expanduser(python), path=searched)
    if path is None:
        _refuse_folder(python)
        if os.path.isfile(os.path.expanduser(python)):
            raise _no_python(f"{python} may not be executed")
        raise _no_python(f"there is no Python at {python}" if "/" in python else f"there is no {python} on its PATH, {searched}")
    try:
        asked = subprocess.Popen(
            [path, "-c", _ASK_PYTHON],
            cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environ,
            start_new_session=True,  # a wrapper that hangs is ended with what it started
        )  # fmt: skip
    except OSError as error:  # the interpreter that its first line names is not there
        raise _no_python(f"{path} does not run as a Python: {error.strerror}") from None
    try:
        said, complained = asked.communicate(timeout=_PYTHON_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(asked.pid, signal.SIGKILL)
        asked.communicate()
        raise _no_python(f"{path} does not run as a Python: no answer within {_PYTHON_TIMEOUT_S:g} s") from None
    try:
        told = _Python(path, *said.rstrip("\n").rpartition("\n")[2].split("\t"))  # a wrapper may print before it
        version = tuple(map(int, told.version.split(".")))
    except (ValueError, TypeError, AttributeError):
        words = complained.strip() or said.strip()
        lines = words.splitlines() or [f"it ended with exit code {asked.returncode}"]
        why = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1])[-300:]  # its stack comes after it
        home = environ.get("PYTHONHOME")
        hint = f"unset PYTHONHOME, in which it looks for its own library: {home}" if home else None
        raise _no_python(f"{path} does not run as a Python: {why}", hint) from None
    if version < _OLDEST:
        raise _no_python(f"{path} is Python {told.version}, and the workers need {_OLDEST[0]}.{_OLDEST[1]} or newer")
    return told


def _refuse_folder(python: str) -> None:
    """Where `python` names the folder of a virtual environment, or its bin, instead of the interpreter there."""
    folder = os.path.expanduser(python)
    if "/" in python and os.path.isdir(folder):
        there = next((end for end in ("python", "bin/python") if shutil.which(os.path.join(folder, end))), None)
        hint = None if there is None else f"write python: {os.path.join(python, there)}"
        raise _no_python(f"{python} is a folder, and no Python", hint)


def _no_python(text: str, hint: Optional[str] = None) -> Refused:
    return Refused(Failed("setup", text, hint or "set python: in the cluster file to one that has torch", "python-missing"))


def _mpi_daemon(mpirun: Optional[str]) -> str:
    """Open MPI's daemon, next to its mpirun; "" where it is missing."""
    return shutil.which("orted", path=os.path.dirname(mpirun)) or "" if mpirun else ""


def _mpi_version(mpirun: Optional[str], environ: Mapping[str, str]) -> str:
    """First line of what mpirun says of itself; "" where it says nothing, or is no program."""
    if mpirun is None:
        return ""
    try:
        answer = subprocess.run(
            [mpirun, "--version"],
            cwd="/",
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MPIRUN_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.partition("\n")[0].strip()
