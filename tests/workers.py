"""Real workers on this machine, under torchrun and gloo, without a launcher of dtrain around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def torchrun(folder: Path, world_size: int, script: str | Path, *args: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a script on so many CPU workers, with folder as their working directory and as the job's."""
    argv = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", str(script), *args)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DTRAIN_JOB_FOLDER": str(folder), "DTRAIN_DEVICE": "cpu"}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            raise
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)
