"""Jobs on instances of this machine, from the job file to the screen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import HOSTILE, Workspace

pytestmark = pytest.mark.net

SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "DTRAIN_JOB_NAME")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_every_rank_knows_its_place(workspace: Workspace) -> None:
    workspace.write("show.py", SHOW)
    result = workspace.dtrain("launch", workspace.job("name: places\nscript: show.py\n", gpus=2))
    assert result.code == 0, result.err
    logs = workspace.dtrain("logs")
    seen = {int(line[1]): json.loads(line[4:]) for line in logs.out.splitlines()}
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, env in seen.items():
        assert env == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": str(rank // 2),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "DTRAIN_JOB_NAME": "places",
        }
    for line in logs.out.splitlines():
        assert line in result.err  # the same lines were on the screen while it ran


def test_ranks_form_one_process_group(workspace: Workspace) -> None:
    workspace.write(
        "sum.py",
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([float(dist.get_rank())])\n"
        "dist.all_reduce(x)\n"
        "print('sum', x.item())\n"
        "dist.destroy_process_group()\n",
    )
    result = workspace.dtrain("launch", workspace.job("script: sum.py\n", gpus=2))
    assert result.code == 0, result.err
    assert [f"[{rank}] sum 6.0" in result.err for rank in range(4)] == [True] * 4


def test_arguments_and_values_arrive_byte_for_byte(workspace: Workspace) -> None:
    workspace.write(
        "tell.py", "import json, os, sys\njson.dump([sys.argv[1:], os.environ['VALUE'], os.environ['TYPED']], open('out/told.json', 'w'))\n"
    )
    value = "".join(HOSTILE)
    text = json.dumps({"script": "tell.py", "args": HOSTILE, "env": {"VALUE": value}})[1:-1]
    job = workspace.job("", instances=1)
    job.write_text(
        "{"
        + text
        + ', "cluster": '
        + json.dumps({"instances": 1, "gpus_per_instance": 1, "device": "cpu", "dir": str(workspace.nodes)})
        + "}"
    )
    job.write_text(job.read_text().replace('"env": {', '"env": {"TYPED": 1e-4, '))
    result = workspace.dtrain("launch", job, "--", "--lr", "a  b")
    assert result.code == 0, result.err
    assert workspace.dtrain("fetch", "--to", workspace.root / "home").code == 0
    told = json.loads((workspace.root / "home/node0/told.json").read_text())
    assert told == [[*HOSTILE, "--lr", "a  b"], value, "1e-4"]


def test_module_and_command_jobs(workspace: Workspace) -> None:
    workspace.write("package/__init__.py", "")
    workspace.write("package/train.py", "import sys\nprint('module', sys.argv[1:])\n")
    result = workspace.dtrain("launch", workspace.job("module: package.train\nargs: --a 'b c'\n"))
    assert result.code == 0, result.err
    assert "[1] module ['--a', 'b c']" in result.err
    result = workspace.dtrain("launch", workspace.job("command: echo rank $RANK of $WORLD_SIZE | tr a-z A-Z\n"))
    assert result.code == 0, result.err
    assert "[1] RANK 1 OF 2" in result.err
    result = workspace.dtrain("launch", workspace.job("command: [printf, '%s|', $RANK, 'x y']\n"))
    assert result.code == 0, result.err
    assert "[0] $RANK|x y|" in result.err


def test_a_secret_reaches_the_worker_and_nothing_else(workspace: Workspace) -> None:
    workspace.write("use.py", "import os\nprint('length', len(os.environ['TOKEN']))\n")
    secret = "s3cr3t-0f-th3-t3st"
    job = workspace.job("script: use.py\nsecrets: [TOKEN]\n")
    result = workspace.dtrain("launch", job, env={"TOKEN": secret})
    assert result.code == 0, result.err
    assert f"[0] length {len(secret)}" in result.err
    kept = [path for folder in ("state", "nodes") for path in (workspace.root / folder).rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if secret.encode() in path.read_bytes()] == []
    missing = workspace.dtrain("launch", job)
    assert missing.code == 65
    assert "TOKEN" in missing.err


def test_the_job_has_a_tree_of_its_own(workspace: Workspace) -> None:
    """A job may write into its files; neither the user's folder nor a later job sees that."""
    workspace.write("data.txt", "mine")
    workspace.write("build/big.bin", "ignored")
    workspace.write(".gitignore", "build/\n")
    workspace.write(
        "change.py", "import os\nprint(open('data.txt').read(), os.path.exists('build'))\nopen('data.txt', 'w').write('theirs')\n"
    )
    job = workspace.job("launcher: none\nscript: change.py\n", instances=1)
    for _ in range(2):
        result = workspace.dtrain("launch", job)
        assert result.code == 0, result.err
        assert "[0] mine False" in result.err
    assert (workspace.workdir / "data.txt").read_text() == "mine"


def test_outputs_persist_per_job_name_and_come_home(workspace: Workspace) -> None:
    workspace.write(
        "append.py",
        "import os\n"
        "assert os.path.realpath('out') == os.environ['DTRAIN_OUTPUT_DIR']\n"
        "open(f'out/rank{os.environ[\"NODE_RANK\"]}.txt', 'a').write('x')\n",
    )
    job = workspace.job("name: keeps\nlauncher: none\nscript: append.py\n")
    for _ in range(2):
        assert workspace.dtrain("launch", job).code == 0
    fetched = workspace.dtrain("fetch", "keeps")
    assert fetched.code == 0 and fetched.err.startswith("job keeps "), fetched.err
    assert (workspace.workdir / "out/node0/rank0.txt").read_text() == "xx"
    assert (workspace.workdir / "out/node1/rank1.txt").read_text() == "xx"
    assert "0 of them new" in workspace.dtrain("fetch", "keeps").err
    told = "the next launch sends these files to the nodes: to keep them here, write /got/ into "
    assert told in workspace.dtrain("fetch", "keeps", "--to", "got/here").err and "the next launch" not in fetched.err
    workspace.write(".dtrainignore", "/got/\n")
    assert "the next launch" not in workspace.dtrain("fetch", "keeps", "--to", "got/here").err
    assert workspace.dtrain("launch", job).code == 0  # what was fetched is not sent back
    assert not list(workspace.nodes.glob("jobs/*/*/tree/out/node0"))


def test_status_and_logs_from_another_shell(workspace: Workspace) -> None:
    workspace.write(
        "wait.py",
        "import os, time\nprint('hello from', os.environ['RANK'])\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\n",
    )
    go = workspace.root / "go"
    launch = workspace.start("launch", workspace.job(f"name: waits\nscript: wait.py\nenv: {{GO: {go}}}\n"))
    workspace.until(lambda: "hello from 1" in workspace.dtrain("logs").out, "the workers' first line")
    running = workspace.status("waits")
    assert (running["state"], running["exit_code"], running["cluster_size"]) == ("RUNNING", None, 2)
    assert [rank["state"] for node in running["nodes"] for rank in node["ranks"]] == ["RUNNING", "RUNNING"]
    assert workspace.dtrain("logs", "waits", "--ranks", "1").out == "[1] hello from 1\n"
    go.touch()
    assert workspace.wait(launch).code == 0
    ended = workspace.status(running["job"][:5])
    assert (ended["state"], ended["exit_code"], ended["exit_source"]) == ("SUCCEEDED", 0, "worker")
    assert ended["ended_at"] >= ended["started_at"]


def test_a_failing_worker_ends_the_job_with_its_own_code(workspace: Workspace) -> None:
    workspace.write(
        "fail.py",
        "import os, sys, time, traceback\n"
        "if os.environ['RANK'] == '2':\n"
        "    try:\n"
        "        raise ValueError('bad batch')\n"
        "    except ValueError:\n"
        "        traceback.print_exc()\n"
        "        sys.stderr.flush()\n"
        "        os._exit(3)\n"
        "time.sleep(600)\n",
    )
    result = workspace.dtrain("launch", workspace.job("name: fails\nscript: fail.py\n", gpus=2), timeout_s=60)
    assert result.code == 3
    assert "rank 2 on node1 failed with exit code 3: exception" in result.err
    assert 'fail.py", line 4, in <module>' in result.err
    assert "ValueError: bad batch" in result.err
    assert "Traceback" in result.err and "torch/distributed/elastic" not in result.err
    failed = workspace.status("fails")
    assert (failed["state"], failed["exit_code"], failed["exit_source"]) == ("FAILED", 3, "worker")
    cause = failed["first_failure"]
    assert (cause["node"], cause["rank"], cause["exit_code"], cause["reason"]) == ("node1", 2, 3, "exception")


def test_the_cause_is_the_worker_that_failed_not_the_one_that_lost_it(workspace: Workspace) -> None:
    workspace.write(
        "lose.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os._exit(7)\n"
        "dist.all_reduce(torch.ones(1 << 20))\n",
    )
    result = workspace.dtrain("launch", workspace.job("script: lose.py\n"), timeout_s=60)
    assert result.code == 7, result.err
    assert "rank 1 on node1 failed with exit code 7" in result.err


def test_the_cause_may_take_longer_to_end_than_what_it_ended(workspace: Workspace) -> None:
    """An exception is out at once, but its process closes its connections, and with them its peers, before it ends."""
    workspace.write(
        "slow.py",
        "import atexit, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    atexit.register(lambda: (dist.destroy_process_group(), time.sleep(600)))\n"
        "    raise ValueError('bad shard')\n"
        "dist.all_reduce(torch.ones(1 << 20))\n",
    )
    result = workspace.dtrain("launch", workspace.job("name: slow\nscript: slow.py\n"), timeout_s=60)
    assert result.code == 1, result.err
    assert "rank 1 on node1 failed with exit code 1: exception" in result.err and "ValueError: bad shard" in result.err
    assert workspace.status("slow")["first_failure"]["rank"] == 1


def test_a_signal_and_a_missing_program_have_names(workspace: Workspace) -> None:
    result = workspace.dtrain("launch", workspace.job("command: kill -SEGV $$\n", instances=1))
    assert result.code == 139
    assert "SIGSEGV (exit code 139): segfault" in result.err
    result = workspace.dtrain("launch", workspace.job("command: [no-such-program]\n", instances=1))
    assert result.code == 127
    assert "cannot start no-such-program: No such file or directory" in result.err


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("told to end", flush=True))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen("sleep 601 & disown", shell=True, executable="/bin/bash")
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def test_a_command_that_the_system_refuses_is_not_taken_for_a_missing_one(workspace: Workspace) -> None:
    wide = "".join(f"  WIDE{i}: {'x' * 120_000}\n" for i in range(30))
    result = workspace.dtrain("launch", workspace.job(f"launcher: none\ncommand: 'true'\nenv:\n{wide}", instances=1))
    assert (result.code, workspace.status()["first_failure"]["reason"]) == (127, "too-long"), result.err
    assert re.search(r"^  dtrain: cannot start bash: Argument list too long: 3,6.* bytes of arguments and variables$", result.err, re.M)
    gone = workspace.job('launcher: none\ncommand: "true"\nsetup: cd .. && rm -r tree\n', instances=1)
    result = workspace.dtrain("launch", gone)
    assert (result.code, workspace.status()["first_failure"]["reason"]) == (127, "workdir-gone"), result.err
    assert re.search(r"^  dtrain: cannot enter the working directory /.*/tree: No such file or directory$", result.err, re.M)
    assert "hint: see what removes it on that node, such as the job's setup" in result.err


def test_ctrl_c_ends_even_what_ignores_term(workspace: Workspace) -> None:
    workspace.write("stubborn.py", STUBBORN)
    launch = workspace.start("launch", workspace.job("script: stubborn.py\ngrace: 1\n"))
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    began = time.monotonic()
    launch.send_signal(signal.SIGINT)
    result = workspace.wait(launch, timeout_s=30)
    assert result.code == 130
    assert time.monotonic() - began < 20
    assert "told to end" in workspace.dtrain("logs").out
    assert workspace.leftovers() == {}
    assert workspace.status()["state"] == "STOPPED"


def test_a_second_ctrl_c_does_not_wait_for_the_grace(workspace: Workspace) -> None:
    workspace.write("stubborn.py", STUBBORN)
    launch = workspace.start("launch", workspace.job("launcher: none\nscript: stubborn.py\ngrace: 300\n"))
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    launch.send_signal(signal.SIGINT)
    workspace.until(lambda: workspace.printed("told to end") == 2, "TERM to arrive")
    launch.send_signal(signal.SIGINT)
    assert workspace.wait(launch, timeout_s=30).code == 130
    assert workspace.leftovers() == {}


def test_a_daemon_that_outlives_its_worker_is_ended(workspace: Workspace) -> None:
    workspace.write("leave.py", "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '600'])\nprint('done')\n")
    result = workspace.dtrain("launch", workspace.job("launcher: none\nscript: leave.py\n"))
    assert result.code == 0, result.err
    assert workspace.leftovers() == {}


@pytest.mark.parametrize("victim", ["agent", "guard"])
def test_agent_and_guard_clean_up_after_each_other(workspace: Workspace, victim: str) -> None:
    workspace.write("stubborn.py", STUBBORN)
    launch = workspace.start("launch", workspace.job("name: hit\nlauncher: none\nscript: stubborn.py\ngrace: 1\n"))
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    guards = [pid for pid, command in workspace.leftovers().items() if " guard " in command and "/node1" in command]
    assert len(guards) == 2  # the agent is a fork of the guard
    agent = max(guards, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) in guards)
    os.kill(agent if victim == "agent" else next(pid for pid in guards if pid != agent), signal.SIGKILL)
    result = workspace.wait(launch, timeout_s=40)
    assert result.code == 69, result.err
    assert f"node1 failed: dtrain's {victim} on it was killed" in result.err
    assert workspace.leftovers() == {}


def test_two_jobs_at_once_do_not_touch_each_other(workspace: Workspace) -> None:
    workspace.write(
        "wait.py", "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\n"
    )
    go = workspace.root / "go"
    long = workspace.start("launch", workspace.job(f"name: long\nscript: wait.py\nenv: {{GO: {go}}}\n", name="long.yaml"))
    workspace.until(lambda: workspace.printed("ready") == 2, "the first job")
    workspace.write("fail.py", "import os\nos._exit(4)\n")
    assert workspace.dtrain("launch", workspace.job("name: short\nscript: fail.py\n", name="short.yaml")).code == 4
    go.touch()
    assert workspace.wait(long).code == 0


def test_a_deleted_job_folder_ends_the_job(workspace: Workspace) -> None:
    workspace.write(
        "delete.py",
        "import os, shutil, time\nif os.environ['NODE_RANK'] == '0': shutil.rmtree(os.environ['DTRAIN_JOB_FOLDER'])\ntime.sleep(600)\n",
    )
    result = workspace.dtrain("launch", workspace.job("launcher: none\nscript: delete.py\ngrace: 1\n"), timeout_s=60)
    assert result.code == 69, result.err
    workspace.until(lambda: workspace.leftovers() == {}, "the agent to notice", timeout_s=20)


def test_a_killed_torchrun_is_not_blamed_on_a_worker(workspace: Workspace) -> None:
    workspace.write("sleep.py", "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    launch = workspace.start("launch", workspace.job("name: hit\nscript: sleep.py\ngrace: 1\n"))
    workspace.until(lambda: workspace.printed("ready") == 2, "both workers")
    os.kill(
        next(pid for pid, command in workspace.leftovers().items() if "torch.distributed.run" in command and "--node-rank=1" in command), 9
    )
    result = workspace.wait(launch, timeout_s=40)
    assert result.code == 78, result.err
    assert "node1 failed: torchrun or mpirun on it ended before the workers did" in result.err
    ranks = [rank for node in workspace.status("hit")["nodes"] for rank in node["ranks"]]
    assert [rank["state"] for rank in ranks].count("RUNNING") == 0


def test_garbage_among_the_metrics_harms_nobody(workspace: Workspace) -> None:
    workspace.write(
        "garbage.py",
        "import os, dtrain\n"
        "garbage = b'garbage\\xff\\n[1]\\n' + b'[' * 100_000 + b'\\n'\n"
        "open(os.environ['DTRAIN_JOB_FOLDER'] + '/metrics.jsonl', 'ab').write(garbage)\n"
        "dtrain.log_metrics(iteration=6, loss=10**400, bubble='none')\n"
        "dtrain.log_metrics(iteration=7, loss=float('nan'))\n"
        "dtrain.log_metrics(evaluation={'note': 'early stop', 'accuracy': None, 'test accuracy': 0.5, '\\x1b[2J': 1})\n",
    )
    result = workspace.dtrain("launch", workspace.job("launcher: none\nscript: garbage.py\n", instances=1))
    after = workspace.dtrain("attach")
    for shown in (result, after):
        assert shown.code == 0 and "test accuracy 50.0%\n" in shown.err and "note" not in shown.err, shown.err
    assert workspace.dtrain("status", "work").code == 0
    metrics = workspace.status()["metrics"]
    assert (metrics["iteration"], metrics["loss"], metrics["evaluation"]) == (7, None, {"test accuracy": 0.5})


def test_the_exception_is_told_as_torch_prints_it_within_a_process_group(workspace: Workspace) -> None:
    """Once there is a process group torch puts [rankN]: before each line of a traceback."""
    workspace.write(
        "raise.py",
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('bad shard')\n"
        "dist.all_reduce(torch.ones(1 << 20))\n",
    )
    result = workspace.dtrain("launch", workspace.job("name: raises\nscript: raise.py\n"), timeout_s=60)
    told = result.err[result.err.index("rank 1 on node1 failed with") :]
    assert "raise ValueError('bad shard')" in told and "ValueError: bad shard" in told and "[rank1]" not in told
    assert "rank 1 on node1 failed with" in workspace.dtrain("status", "raises").out


def test_a_worker_without_a_traceback_is_quoted(workspace: Workspace) -> None:
    result = workspace.dtrain("launch", workspace.job("command: echo the disk is on fire; exit 9\n", instances=1))
    assert result.code == 9
    assert "rank 0 on node0 failed with exit code 9\nhint: " in result.err
    assert "\nlast 1 line of its log:\n  the disk is on fire\nlog: " in result.err


def test_a_log_of_the_launch_may_lie_in_the_working_directory(workspace: Workspace) -> None:
    """`dtrain launch > log` grows while the folder that it lies in is sent."""
    workspace.write("hello.py", "print('hello', flush=True)\n")
    job = workspace.job("launcher: none\nscript: hello.py\n", instances=1)
    with (workspace.workdir / "log").open("wb") as log:
        log.write(b"of yesterday\n" * 1000)
        log.flush()
        ran = subprocess.run(
            (sys.executable, "-m", "dtrain", "launch", str(job)), cwd=workspace.workdir, env=workspace.env, stderr=log, check=False
        )
    assert ran.returncode == 0
    assert b"[0] hello" in (workspace.workdir / "log").read_bytes()
    wrong = workspace.dtrain("logs", "--ranks", "3-4")
    assert (wrong.code, wrong.out) == (66, "") and "hint: its ranks: 0\n" in wrong.err


def test_a_start_that_was_killed_is_over_and_gives_its_name_back(workspace: Workspace) -> None:
    """Its nodes never had the job, so only the end of its launcher says that it will not run."""
    workspace.write("hello.py", "print('hello')\n")
    with (workspace.workdir / "large").open("wb") as large:
        large.truncate(400 << 20)
    job = workspace.job("name: named\nlauncher: none\nscript: hello.py\n")
    launch = workspace.start("launch", job)
    jobs = workspace.root / "state/dtrain/jobs"
    workspace.until(lambda: list(jobs.glob("*/plan.json")), "the job to be planned")
    launch.kill()
    launch.wait()
    (workspace.workdir / "large").unlink()
    assert workspace.dtrain("launch", job).code == 0
    assert workspace.status("named")["state"] == "SUCCEEDED"
    states = [each["state"] for each in json.loads(workspace.dtrain("status", "--json").out)["jobs"]]
    assert states == ["SUCCEEDED", "FAILED"]
    assert not list(workspace.nodes.glob("blobs/incoming-*"))


def test_ctrl_c_stops_a_launch_in_the_background_of_a_script(workspace: Workspace) -> None:
    """Its shell has told it to ignore Ctrl-C; whoever sends the signal all the same means it."""
    job = workspace.job("command: echo ready; sleep 600\nlauncher: none\ngrace: 1\n")
    argv = [sys.executable, "-m", "dtrain", "launch", str(job)]
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    with open(os.devnull, "wb") as null:
        launch = subprocess.Popen(
            [sys.executable, "-c", ignoring, *argv], cwd=workspace.workdir, env=workspace.env, stdout=null, stderr=null
        )
    workspace.until(lambda: workspace.printed("ready") == 2, "the workers")
    launch.send_signal(signal.SIGINT)
    assert launch.wait(timeout=60) == 130


def test_a_terminal_that_takes_nothing_holds_up_neither_ctrl_c_nor_the_lease(workspace: Workspace) -> None:
    """As after Ctrl-S, or before `less`."""
    workspace.write("flood.py", "import time\nwhile True:\n    print('x' * 1000, flush=True)\n    time.sleep(0.001)\n")
    launch = workspace.start("launch", "--lease", "3", workspace.job("script: flood.py\nlauncher: none\ngrace: 1\n"))
    workspace.until(lambda: any("flood.py" in command for command in workspace.leftovers().values()), "the workers")
    time.sleep(8)  # nobody reads, so the pipe is full by now, and the lease would be over twice
    assert any("flood.py" in command for command in workspace.leftovers().values())
    launch.send_signal(signal.SIGINT)
    workspace.until(lambda: not any("flood.py" in command for command in workspace.leftovers().values()), "the workers to stop")
    result = workspace.wait(launch)
    assert result.code == 130, result.err[-2000:]


def test_a_process_that_has_lost_its_first_thread_is_found(workspace: Workspace) -> None:
    """The kernel calls it a zombie, and its other threads run on; while it does, the agent does not end, which the fixture sees."""
    workspace.write(
        "orphan.py",
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print(flush=True)\n"
        "number = {'x86_64': 60, 'aarch64': 93}[os.uname().machine]  # exit, of this thread alone\n"
        "ctypes.CDLL(None).syscall(number, 0)\n",
    )
    workspace.write(
        "leave.py",
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, 'orphan.py'], start_new_session=True, stdout=subprocess.PIPE).stdout.read(1)\n",
    )
    result = workspace.dtrain("launch", workspace.job("script: leave.py\nlauncher: none\n"), timeout_s=40)
    assert result.code == 0, result.err
    assert "is still there" not in result.err


def test_more_instances_of_this_machine_than_it_allows_open_files(workspace: Workspace) -> None:
    """A soft limit is raised, and the workers keep it; a hard one is told."""
    workspace.write("files.py", "import resource\nprint('files', *resource.getrlimit(resource.RLIMIT_NOFILE))\n")

    def run(limit: str, command: str, instances: int) -> subprocess.CompletedProcess[str]:
        job = workspace.job("launcher: none\nscript: files.py\n", instances=instances)
        limited = ("prlimit", f"--nofile={limit}", sys.executable, "-m", "dtrain", command, str(job))
        return subprocess.run(limited, cwd=workspace.workdir, env=workspace.env, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    ran = run("40:512", "launch", 4)
    assert ran.returncode == 0 and ran.stderr.count("files 40 512") == 4, ran.stderr
    for command in ("launch", "check"):
        ran = run("40:64", command, 30)
        assert ran.returncode == 78 and "30 nodes take up to 242 open files at once, and this machine allows a process 64" in ran.stderr


def test_a_dir_that_is_no_folder_of_this_user(workspace: Workspace) -> None:
    (workspace.root / "real").mkdir()
    workspace.nodes.symlink_to("real")
    job = workspace.job("launcher: none\nscript: train.py\n", instances=1)
    workspace.write("train.py", "")
    for told in (f"Permission denied, for it is a symlink or another user's: {workspace.nodes}", f"File exists: {workspace.nodes}"):
        result = workspace.dtrain("launch", job)
        assert result.code == 78 and f"node0: {told}\nhint: choose another dir: in the cluster file" in result.err, result.err
        workspace.nodes.unlink()
        workspace.nodes.touch()
    workspace.nodes.unlink()
    result = workspace.dtrain("launch", job, "--set", "cluster.dir=/proc/dtrain")
    told = "node0: No such file or directory: /proc/dtrain\nhint: choose another dir: in the cluster file"
    assert result.code == 78 and told in result.err, result.err
