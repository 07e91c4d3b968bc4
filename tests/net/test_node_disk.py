"""A node's disk that is full while a job runs: what is told of it, and what comes after."""

from __future__ import annotations

import errno
import re
import time
from pathlib import Path

import pytest

from dtrain.node import wire
from dtrain.node.folder import JobFolder
from tests.cluster import Workspace
from tests.lan import DIR, Lan, small_disk, why_not

pytestmark = [pytest.mark.net, pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

# Rank 1 prints as many lines as it is told, the others wait for that.
FLOOD = """
import os, sys, time
if os.environ["NODE_RANK"] == "1":
    for number in range(int(sys.argv[1])):
        print(f"line {number} " + "x" * 90, flush=True)
    print("all", flush=True)
else:
    while not os.path.exists("/tmp/go"): time.sleep(0.05)
"""


def test_a_job_that_fills_the_disk_of_its_folder(lan: Lan, workspace: Workspace) -> None:
    """About half of it is dtrain's own. What fits of the log is here, and once there is room, so is the next job."""
    node = lan.nodes[1]
    node.path(DIR).mkdir()
    workspace.write("flood.py", FLOOD)
    job = workspace.write("job.yaml", "name: flood\nlauncher: none\nscript: flood.py\ncluster: lan.yaml\ngrace: 1\n")
    with node.small_disk(DIR, "2m"):
        launched = workspace.dtrain("launch", job, "--", "100000")
        assert launched.code == 1, launched.err[-2000:]
        failed = workspace.status("flood")
        log = f"{DIR}/jobs/{failed['job']}/n2/logs/rank1.log"
        told = launched.err[launched.err.rindex("rank 1 on n2 failed") :]
        assert told.startswith("rank 1 on n2 failed with exit code 1: no-space\nhint: make room on that node (df -h), or move dir:"), told
        assert f"[Errno 28] No space left on device: '{log}'; the last words there are cut off" in told
        assert (failed["state"], failed["exit_code"], failed["first_failure"]["reason"]) == ("FAILED", 1, "no-space")
        written = node.path(log).read_bytes()
        assert len(written) > 300_000
        assert (workspace.root / f"state/dtrain/jobs/{failed['job']}/n2/logs/rank1.log").read_bytes() == written
        workspace.until(lambda: not lan.processes(), "all processes to end")

        refused = workspace.dtrain("launch", job, "--", "1")
        assert refused.code == 73, refused.err
        assert re.search(rf"^error: n2: No space left on device: {DIR}\S*\nhint: make room there", refused.err, re.MULTILINE), refused.err

        node.within("mount", "-o", "remount,size=4m", DIR)
        for each in lan.nodes:
            each.path("/tmp/go").touch()
        again = workspace.dtrain("launch", job, "--", "1")
        assert again.code == 0 and "[1] all\n" in again.err, again.err
        workspace.until(lambda: not lan.processes(), "the sessions to end")
    for each in lan.nodes:
        each.path("/tmp/go").unlink()


def test_a_jobs_last_word_finds_room_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "1m"):
        folder, without, late = (JobFolder(str(tmp_path / name)) for name in ("j0b", "without", "late"))
        for each in (folder, without, late):
            each.make()
        folder.reserve()
        with (tmp_path / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        word = wire.NodeEnded(time.time(), "failed", "launcher-failed", "x" * 20_000, ())
        folder.append_event(word)
        assert wire.from_json(Path(folder.stream(wire.EVENTS)).read_text()) == word
        with pytest.raises(OSError, match="No space left"):
            without.append_event(word)
        with pytest.raises(OSError) as full:
            late.reserve()
        assert full.value.errno == errno.ENOSPC
