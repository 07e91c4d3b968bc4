"""GPUs for a machine that has none: an nvidia-smi on the PATH that answers queries as NVIDIA's own does, from a table."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.cluster import Workspace

_NVIDIA_SMI = """#!{python} -IS
import json, os, sys, time

folder = os.path.dirname(os.path.abspath(__file__))
with open(folder + "/table.json") as file:
    table = json.load(file)
what, _, fields = sys.argv[1].partition("=")
if sys.argv[2:] != ["--format=csv,noheader,nounits"] or what not in ("--query-gpu", "--query-compute-apps"):
    sys.exit(2)
if what == "--query-compute-apps":
    if table["fails"]:
        print(table["fails"])
        sys.exit(9)
    with open(folder + "/asked", "a") as file:
        file.write("x")
    deadline = time.monotonic() + 30.0
    while os.path.getsize(folder + "/asked") < table["meet"] and time.monotonic() < deadline:
        time.sleep(0.01)
for row in table[what]:
    if any(field not in row for field in fields.split(",")):
        print(f'Field "{{fields}}" is not a valid field to query.')
        sys.exit(2)
    print(", ".join(row[field] for field in fields.split(",")))
"""


class Gpus:
    """What a driver knows: GPUs, and the processes that compute on them."""

    def __init__(self, workspace: Workspace, num_gpus: int) -> None:
        self._folder = workspace.root / "nvidia"
        self._folder.mkdir()
        self._gpus = [
            {"index": str(index), "uuid": _uuid(index), "name": "NVIDIA H100", "memory.total": "81559", "memory.used": "4"}
            for index in range(num_gpus)
        ]
        self._processes: list[dict[str, str]] = []
        self._write(meet=0, fails="")
        tool = self._folder / "nvidia-smi"
        tool.write_text(_NVIDIA_SMI.format(python=sys.executable))
        tool.chmod(0o755)
        workspace.env["PATH"] = f"{self._folder}:{workspace.env['PATH']}"

    def compute(self, index: int, pid: int | str, memory_mib: int | str = 2048) -> None:
        """Say that a process computes on a GPU."""
        self._processes.append({"gpu_uuid": _uuid(index), "pid": str(pid), "used_memory": str(memory_mib)})
        self._write(meet=0, fails="")

    def tell_no_memory(self) -> None:
        for gpu in self._gpus:
            gpu.update({"memory.total": "[N/A]", "memory.used": "[N/A]"})
        self._write(meet=0, fails="")

    def fail(self, complaint: str) -> None:
        """Let the question for processes fail."""
        self._write(meet=0, fails=complaint)

    def idle(self) -> None:
        """Let every process end."""
        self._processes.clear()
        self._write(meet=0, fails="")

    def let_meet(self, num_launches: int) -> None:
        """The next launches are told who computes only once all of them have asked."""
        self._write(meet=self.num_asked + num_launches, fails="")

    @property
    def num_asked(self) -> int:
        """How often somebody wanted to know who computes."""
        asked = self._folder / "asked"
        return asked.stat().st_size if asked.exists() else 0

    def _write(self, *, meet: int, fails: str) -> None:
        new = Path(f"{self._folder}/table.new")
        table = {"--query-gpu": self._gpus, "--query-compute-apps": self._processes, "meet": meet, "fails": fails}
        new.write_text(json.dumps(table))
        os.replace(new, self._folder / "table.json")


def _uuid(index: int) -> str:
    return f"GPU-6c1d9d43-1d0b-7a5b-5f3e-{index:012x}"
