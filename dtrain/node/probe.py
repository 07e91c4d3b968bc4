"""What a node says of itself, found in well under a second and without importing torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from typing import Optional

from dtrain.node import gpus
from dtrain.node.addresses import addresses
from dtrain.node.folder import NodeDir
from dtrain.node.wire import NodeFacts, Probe

_PYTHON_TIMEOUT_S = 30.0
_MPIRUN_TIMEOUT_S = 10.0

# Runs under the workers' interpreter. torch says its version in a file of its own; importing it would take seconds.
_ASK_PYTHON = """
import importlib.util, json, re, sys
found = importlib.util.find_spec("torch")
torch = ""
if found is not None and found.submodule_search_locations:
    with open(found.submodule_search_locations[0] + "/version.py") as file:
        match = re.search(r"^__version__ = ['\\"](.*)['\\"]", file.read(), re.M)
    torch = match.group(1) if match else "unknown"
print(json.dumps([sys.executable, "%d.%d.%d" % sys.version_info[:3], torch]))
"""


def facts(order: Probe, node_dir: NodeDir, *, bundle: str, job_folder: str, output_dir: str) -> NodeFacts:
    python, python_version, torch_version = _ask_python(order.python)
    mpirun = shutil.which("mpirun") if order.mpi else None
    return NodeFacts(
        host_name=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus.found(node_dir),
        python=python,
        python_version=python_version,
        torch_version=torch_version,
        addresses=addresses(),
        bundle=bundle,
        job_folder=job_folder,
        output_dir=output_dir,
        mpirun=mpirun or "",
        mpi_daemon=_mpi_daemon(mpirun),
        mpi_version=_mpi_version(mpirun),
    )


def _ask_python(python: str) -> tuple[str, str, str]:
    """Path, version and torch version of an interpreter; empty texts where it is missing or does not run."""
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        return "", "", ""
    asked = subprocess.Popen(
        [path, "-c", _ASK_PYTHON],
        cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,  # a wrapper that hangs is ended with what it started
    )  # fmt: skip
    try:
        said = asked.communicate(timeout=_PYTHON_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(asked.pid, signal.SIGKILL)
        asked.communicate()
        raise ValueError(f"{path} did not answer within {_PYTHON_TIMEOUT_S:g} s") from None
    try:
        _, version, torch_version = json.loads(said.strip().rpartition("\n")[2])  # a wrapper may print before it
    except (ValueError, TypeError):  # it does not run, or is no Python
        return "", "", ""
    return path, version, torch_version


def _mpi_daemon(mpirun: Optional[str]) -> str:
    """Open MPI's daemon, next to its mpirun; "" where it is missing."""
    return shutil.which("orted", path=os.path.dirname(mpirun)) or "" if mpirun else ""


def _mpi_version(mpirun: Optional[str]) -> str:
    """First line of what mpirun says of itself."""
    if mpirun is None:
        return ""
    answer = subprocess.run(
        [mpirun, "--version"],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_MPIRUN_TIMEOUT_S,
        check=False,
    )
    return answer.stdout.partition("\n")[0].strip()
