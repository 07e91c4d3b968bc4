"""Nobody needs root: a user without any right launches, logs in to an sshd of their own, stops the job and fetches what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.lan import why_not
from tests.ssh import SSHD

pytestmark = [
    pytest.mark.net,
    pytest.mark.root,
    pytest.mark.skipif(SSHD is None or why_not() is not None, reason=why_not() or "not installed: sshd"),
]

ROOT = Path(__file__).resolve().parents[2]
UID = 54321  # of a user that only this test's namespaces know

# Becomes that user. $1: the folder that the test prepared. $2: a script for Python. From $3: what stays visible even where it lies in
# a folder that is hidden.
BECOME = rf"""
set -e
folder=$1 script=$2 stage=$1/stage; shift 2
mount --bind "$folder/passwd" /etc/passwd
i=0; for kept; do i=$((i + 1)); mkdir -p "$stage/$i"; mount --bind "$kept" "$stage/$i"; done
mount -t tmpfs -o mode=1777 tmpfs /var/tmp; mount -t tmpfs -o mode=755 tmpfs /root
i=0; for kept; do i=$((i + 1)); case $kept in /root/*|/var/tmp/*) mkdir -p "$kept"; mount --bind "$stage/$i" "$kept";; esac; done
umount "$stage"/*; rm -r "$stage"
cd "$folder"
export PYTHONPATH={ROOT} HOME="$folder"
exec setpriv --reuid={UID} --regid={UID} --clear-groups --inh-caps=-all --bounding-set=-all {sys.executable} -c "$script" "$folder/work"
"""

SCENARIO = """
import json, os, pathlib, sys
from tests.cluster import WAIT, Workspace
from tests.ssh import Sshd, write_user_files
root = pathlib.Path(sys.argv[1])
root.mkdir()
workspace = Workspace(root)
sshd = Sshd(root / "sshd")
try:
    write_user_files(root / "home", sshd.user_key, [sshd.host()])
    workspace.write("wait.py", "open('out/kept', 'w').write('x')\\n" + WAIT)
    cluster = f"{{instances: [box], gpus_per_instance: 1, device: cpu, python: {sys.executable}}}"
    text = f"name: mine\\nscript: wait.py\\nenv: {{GO: /nowhere/go}}\\ncluster: {cluster}\\n"
    launched = workspace.dtrain("launch", workspace.write("job.yaml", text), "--detach")
    assert launched.code == 0, launched.err
    workspace.until(lambda: "ready" in workspace.dtrain("logs").out, "the worker")
    folder = os.stat(f"/var/tmp/dtrain-{os.getuid()}")
    stopped = workspace.dtrain("stop", "mine", "--grace", "1")
    fetched = workspace.dtrain("fetch", "mine", "--to", root / "fetched")
    print(json.dumps([os.getuid(), folder.st_uid, oct(folder.st_mode & 0o777), stopped.code, workspace.status()["state"], fetched.code,
        (root / "fetched/box/kept").read_text()]))
finally:
    sshd.close()
assert not workspace.close()
"""


def test_a_user_without_rights_launches_stops_and_fetches_over_ssh() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, UID, UID)
        Path(folder, "passwd").write_text(f"root:x:0:0:root:/root:/bin/sh\neva:x:{UID}:{UID}::{folder}:/bin/sh\n")
        kept = sorted({str(Path(path).resolve()) for path in (ROOT, sys.prefix, sys.base_prefix)})
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        ran = subprocess.run(
            (*namespaces, "sh", "-c", BECOME, "sh", folder, SCENARIO, *kept),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [UID, UID, "0o700", 0, "STOPPED", 0, "x"]
