"""mpirun's daemons. mpirun runs on the first node and expects a program that starts its daemon on another one, as ssh would.

That program is `main` below: it hands the daemon's command to the agent of its own node and is done. That agent passes the
command on to the agent of the node that is meant (tripwire.py), which starts what daemon_argv lets through.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from dtrain.node import wire
from dtrain.node.folder import FOLDER_VARIABLE, JobFolder

LINGER_S = 5.0  # how long mpirun and its daemons may take to end once every worker of the job has

_JOB_ID = r"\d{1,10}"
_PORT = r"\d{1,5}"

# Settings of another MPI job, or of a scheduler whose nodes mpirun would take instead of ours.
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "PBS_", "LSB_", "PE_HOSTFILE")


def main(argv: list[str]) -> int:
    """What mpirun runs for each daemon.

    Args:
        argv: the host, then the daemon's command in words that a shell was to join and to split anew.
    """
    host, *words = argv
    agent = JobFolder(os.environ[FOLDER_VARIABLE]).connect()
    agent.sendall(wire.frame(wire.DaemonWanted(host, tuple(shlex.split(" ".join(words))))))
    received = wire.read_frame(agent.recv)
    if received is not None and isinstance(received[0], wire.Done):
        return 0  # mpirun goes on without us
    why = received[0].text if received is not None and isinstance(received[0], wire.Failed) else "its agent is gone"
    print(f"dtrain: no daemon for {host}: {why}", file=sys.stderr)
    return 1


def environment(environ: Mapping[str, str], folder: JobFolder) -> dict[str, str]:
    """What mpirun and its daemons see of a node's own variables, and where their files go."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN)}
    kept["OMPI_MCA_orte_tmpdir_base"] = folder.path  # else folders stay behind in /tmp when one is killed
    if os.getuid() == 0:  # they refuse root unless it insists
        kept.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return kept


def daemon_argv(node: wire.MpiNode, wanted: Sequence[str]) -> tuple[str, ...]:
    """The command of a node's daemon, out of what mpirun asked for.

    Nothing is passed on but settings that a daemon of this job needs, each with a value of its own form.

    Raises:
        ValueError: it is not that command.
    """
    forms = {
        "orte_leave_session_attached": "1",
        "ess": "env",
        "ess_base_jobid": _JOB_ID,
        "ess_base_vpid": str(node.node_rank),
        "ess_base_num_procs": str(node.num_nodes),
        "orte_node_regex": r"[\w.,:@()\[\]-]+",
        "orte_hnp_uri": rf"{_JOB_ID}\.0;tcp://{re.escape(node.first_address)}:{_PORT}",
        "plm": "rsh",
    }
    daemon, *rest = wanted or ("",)
    flags, names, values = rest[0::3], rest[1::3], rest[2::3]
    is_whole = daemon == "orted" and len(flags) == len(values) and set(flags) == {"-mca"}
    if not is_whole or sorted(names) != sorted(forms):
        raise ValueError(f"this is not the command of a daemon of this job: {shlex.join(wanted)}")
    for name, value in zip(names, values):
        if not re.fullmatch(forms[name], value):
            raise ValueError(f"{name} of a daemon of this job is not {value!r}")
    return (node.daemon, *rest)
