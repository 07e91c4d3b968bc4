"""`check`: each fault is really there, is named, and nothing else is."""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import pytest

from tests.cluster import PLACE, Workspace
from tests.lan import DIR, Lan
from tests.nvidia import Gpus
from tests.ssh import write_user_files

pytestmark = [pytest.mark.net, pytest.mark.root]

_PYTHON = sys.executable


@contextmanager
def firewall(lan: Lan, workspace: Workspace) -> Iterator[None]:
    lan.firewall(lan.nodes[0])
    yield


@contextmanager
def one_way(lan: Lan, workspace: Workspace) -> Iterator[None]:
    """n3 lets in what n1 begins and nothing that n2 does, but ssh."""
    n3, rule = lan.nodes[2], ("INPUT", "-s", lan.nodes[1].address, "-p", "tcp", "--syn", "-j", "DROP")
    n3.run("iptables", "-w", "-A", *rule)
    yield
    n3.run("iptables", "-w", "-D", *rule)


@contextmanager
def refusing(lan: Lan, workspace: Workspace) -> Iterator[None]:
    """A firewall that says so."""
    n2, rule = lan.nodes[1], ("INPUT", "-p", "tcp", "--syn", "!", "--dport", "22", "-j", "REJECT", "--reject-with", "tcp-reset")
    n2.run("iptables", "-w", "-A", *rule)
    yield
    n2.run("iptables", "-w", "-D", *rule)


@contextmanager
def no_route(lan: Lan, workspace: Workspace) -> Iterator[None]:
    n1, n2, _ = lan.nodes[:3]
    n1.run("ip", "route", "add", "unreachable", f"{n2.address}/32")
    yield
    n1.run("ip", "route", "del", "unreachable", f"{n2.address}/32")


@contextmanager
def small_mtu(lan: Lan, workspace: Workspace) -> Iterator[None]:
    lan.lose_large_packets(lan.nodes[1])
    yield


@contextmanager
def down(lan: Lan, workspace: Workspace) -> Iterator[None]:
    lan.nodes[1].run("ip", "link", "set", "dead0", "down")
    yield
    lan.nodes[1].run("ip", "link", "set", "dead0", "up")


@contextmanager
def dead(lan: Lan, workspace: Workspace) -> Iterator[None]:
    with lan.cut(lan.nodes[2]):
        yield


@contextmanager
def silent_sshd(lan: Lan, workspace: Workspace) -> Iterator[None]:
    """Its kernel still takes connections."""
    init = lan.nodes[2].init
    assert init is not None
    os.kill(init, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(init, signal.SIGCONT)


@contextmanager
def other_host_key(lan: Lan, workspace: Workspace) -> Iterator[None]:
    known = workspace.root / "home/.ssh/known_hosts"
    n1, n2 = lan.nodes[:2]
    known.write_text(known.read_text().replace(n2.public_key, n1.public_key))
    yield


@contextmanager
def full_disk(lan: Lan, workspace: Workspace) -> Iterator[None]:
    with lan.nodes[1].small_disk("/var/tmp", "64k"):
        yield


@contextmanager
def little_shm(lan: Lan, workspace: Workspace) -> Iterator[None]:
    with lan.nodes[1].small_disk("/dev/shm", "1m"):
        yield


@contextmanager
def low_memlock(lan: Lan, workspace: Workspace) -> Iterator[None]:
    init = str(lan.nodes[1].init)
    before = subprocess.run(
        ("prlimit", "--pid", init, "--memlock", "-o", "SOFT,HARD", "--noheadings", "--raw"), capture_output=True, text=True
    )
    subprocess.run(("prlimit", "--pid", init, "--memlock=65536:"), check=True)
    yield
    subprocess.run(("prlimit", "--pid", init, f"--memlock={':'.join(before.stdout.split())}"), check=True)


@contextmanager
def clock(lan: Lan, workspace: Workspace) -> Iterator[None]:
    lan.set_clock(lan.nodes[1], 600)
    yield


@contextmanager
def port_taken(lan: Lan, workspace: Workspace) -> Iterator[None]:
    listening = subprocess.Popen(
        lan.nodes[0].inside(
            _PYTHON, "-c", "import socket, time; s = socket.create_server(('', 29500)); print(flush=True); time.sleep(600)"
        ),
        stdout=subprocess.PIPE,
    )
    assert listening.stdout is not None and listening.stdout.readline() == b"\n"
    try:
        yield
    finally:
        listening.kill()
        listening.communicate()


@contextmanager
def other_torch(lan: Lan, workspace: Workspace) -> Iterator[None]:
    torch = lan.nodes[1].path(f"{DIR}/old/torch")
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.12.0'\n")
    python = lan.nodes[1].path(f"{DIR}/old/python")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={DIR}/old exec {_PYTHON} "$@"\n')
    python.chmod(0o755)
    yield


@contextmanager
def other_mpi(lan: Lan, workspace: Workspace) -> Iterator[None]:
    n2 = lan.nodes[1]
    mpich = n2.path("/run/etc/mpirun")
    mpich.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    mpich.chmod(0o755)
    with n2.in_place_of("/usr/bin/mpirun", "/run/etc/mpirun"):
        yield
    mpich.unlink()


@contextmanager
def six(lan: Lan, workspace: Workspace, but: int | None = None) -> Iterator[None]:
    """The network between the nodes, but that of this index, has IPv6 alone; what else they have does not."""
    network = ipaddress.IPv6Network("fd77::/64")
    addresses = {node.name: network[11 + i] for i, node in enumerate(lan.nodes) if i != but}
    changed = [(node.run, node.address, addresses[node.name], "eth0") for node in lan.nodes if node.name in addresses]
    hosts = [replace(host, address=str(addresses.get(host.alias, host.address))) for host in lan.hosts()]
    write_user_files(workspace.root / "home", lan.user_key, hosts)
    subprocess.run(("ip", "address", "add", f"{network[1]}/64", "dev", lan.bridge, "nodad"), check=True)
    length = lan.network.prefixlen
    for run, old, new, interface in changed:
        run("ip", "address", "del", f"{old}/{length}", "dev", interface)
        run("ip", "address", "add", f"{new}/64", "dev", interface, "nodad")
    try:
        yield
    finally:
        for run, old, new, interface in changed:
            run("ip", "address", "del", f"{new}/64", "dev", interface)
            run("ip", "address", "add", f"{old}/{length}", "dev", interface)
        subprocess.run(("ip", "address", "del", f"{network[1]}/64", "dev", lan.bridge), check=True)


@contextmanager
def four_among_six(lan: Lan, workspace: Workspace) -> Iterator[None]:
    with six(lan, workspace, but=1):
        yield


@contextmanager
def another_name(lan: Lan, workspace: Workspace) -> Iterator[None]:
    """n2's interface is ens3, where the others' is eth0."""
    n2 = lan.nodes[1]
    n2.run("ip", "-batch", "-", input="link set eth0 down\nlink set eth0 name ens3\nlink set ens3 up\n")
    yield
    n2.run("ip", "-batch", "-", input="link set ens3 down\nlink set ens3 name eth0\nlink set eth0 up\n")


@contextmanager
def nothing(lan: Lan, workspace: Workspace) -> Iterator[None]:
    yield


@dataclass(frozen=True, slots=True)
class Fault:
    make: Callable[[Lan, Workspace], AbstractContextManager[None]]
    name: str
    text: str  # a pattern
    code: int = 78
    cluster: dict[str, str] = field(default_factory=dict)
    instances: str | None = None
    job: str = "script: train.py"


FAULTS = {
    "blocked rendezvous port": Fault(firewall, "rendezvous-blocked", r"n1: not reached .* at \S+ \(eth0\) from n2, n3: timed out"),
    "blocked one way": Fault(one_way, "rendezvous-blocked", r"n3: not reached .* at \S+ \(eth0\) from n2: timed out"),
    "refused": Fault(refusing, "rendezvous-blocked", r"n2: not reached .* at \S+ \(eth0\) from n1, n3: refused"),
    "no route": Fault(no_route, "rendezvous-blocked", r"n2: not reached .* at \S+ \(eth0\) from n1: no route"),
    "IPv4 among IPv6": Fault(
        four_among_six, "rendezvous-blocked", r"n2: reaches no other node: .*n3 at \[fd77::d\]:\d+ \(eth0\): no IPv6 address to dial from"
    ),
    "a bridge with one address everywhere": Fault(
        nothing, "rendezvous-blocked", r"n2: not reached at 172\.17\.0\.1:\d+ \(docker0\)", cluster={"network": "docker0"}
    ),
    "an interface that is down": Fault(down, "no-address", r"n2: no address in network dead0; it has .*eth0", cluster={"network": "dead0"}),
    "a subnet that leads nowhere": Fault(nothing, "rendezvous-blocked", r"n2: not reached at 172\.29\.0\.2", cluster={"network": "dead0"}),
    "small mtu": Fault(small_mtu, "packets-lost", r"n2: not reached at \S+ \(eth0\) from n1, n3: larger packets are lost \(MTU\)"),
    "dead node": Fault(dead, "unreachable", r"n3: ", 69),
    "silent sshd": Fault(silent_sshd, "unreachable", r"n3: .*takes a connection, and no ssh server speaks there", 69),
    "wrong host key": Fault(other_host_key, "access-refused", r"n2: .*host key", 77),
    "missing python": Fault(
        nothing, "python-missing", r"n2: there is no Python at /nowhere", instances="n1, {host: n2, python: /nowhere/python3}, n3"
    ),
    "missing torch": Fault(
        nothing, "torch-missing", r"n2: torch is not installed for /usr/bin/python3",
        instances="n1, {host: n2, python: /usr/bin/python3}, n3",
    ),
    "another torch": Fault(
        other_torch,
        "torch-differs",
        r"n2: torch 2\.12\.0, the other 2 have 2\.13\.0\+cpu",
        instances=f"n1, {{host: n2, python: {DIR}/old/python}}, n3",
    ),
    "full disk": Fault(full_disk, "no-space", r"n2: No space left on device", 73),
    "little shm": Fault(little_shm, "shm-small", r"n2: /dev/shm holds 1 MiB", 0),
    "low memlock": Fault(low_memlock, "memlock-low", r"n2: 64 KiB of memory may be locked", 0),
    "clock": Fault(clock, "clock-skew", r"n2: its clock is 10 min ahead of this machine's", 0),
    "port taken": Fault(port_taken, "no-port", r"n1: no port of 29500-29500 is free", cluster={"ports": "29500-29500"}),
    "one port": Fault(nothing, "no-port", r"n1: only one port of 29500-29500 is free, .* takes two: ", cluster={"ports": "29500-29500"}),
    "another mpi": Fault(
        other_mpi, "mpi-unfit", r"n2: \S+ is not Open MPI; it calls itself HYDRA", job="launcher: mpirun\nscript: train.py"
    ),
    "GPUs that are asked for": Fault(
        nothing, "no-gpu", r"n1, n2, n3: no GPU; it gets 2 CPU workers", 0, cluster={"device": "auto", "gpus_per_instance": "2"}
    ),
    "an interface that env contradicts": Fault(
        nothing, "env-contradicts", r"n1, n2, n3: env says GLOO_SOCKET_IFNAME=docker0, and the others reach it over eth0", 0,
        job="script: train.py\nenv: {GLOO_SOCKET_IFNAME: docker0}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(lan: Lan, workspace: Workspace, name: str) -> None:
    fault = FAULTS[name]
    workspace.write("train.py", "print('started')\n")
    workspace.write("lan.yaml", lan.cluster(fault.instances, **fault.cluster))
    workspace.write("job.yaml", f"{fault.job}\ncluster: lan.yaml\n")
    with fault.make(lan, workspace):
        result = workspace.dtrain("check", "--json", "--ignore", "host-name-loopback", timeout_s=60)
    told = json.loads(result.out)
    assert [finding["name"] for finding in told["findings"]] == [fault.name] * len(told["findings"]) != [], told["findings"]
    assert any(re.match(fault.text, finding["text"]) for finding in told["findings"]), told["findings"]
    assert all(finding["cure"] for finding in told["findings"])
    assert result.code == fault.code and (told["plan"] is None) == (fault.code != 0), result.err
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)
    for node in lan.nodes:
        assert not node.path(f"{DIR}/jobs").exists()


def test_a_cluster_that_is_fit_takes_a_line(lan: Lan, workspace: Workspace) -> None:
    """What its nodes have in common with every Debian machine is a warning, which --ignore and a job file pass over."""
    warned = workspace.dtrain("check", "lan.yaml")
    assert warned.code == 0, warned.err
    assert "warning host-name-loopback\n  n1, n2, n3: its own name means 127.0.1.1 there\n  hint: " in warned.out
    fit = workspace.dtrain("check", "lan.yaml", "--ignore", "host-name-loopback")
    assert re.fullmatch(rf"fit: 3 nodes, cluster size 3, meeting at {lan.nodes[0].address}:\d+\n", fit.out), fit.out
    workspace.write("train.py", "print('here')\n")
    workspace.write("job.yaml", "script: train.py\ncluster: lan.yaml\npreflight: {ignore: [host-name-loopback]}\n")
    plan = workspace.dtrain("check")
    assert plan.code == 0 and "warning" not in plan.out and "lease 900 s" in plan.out, plan.out
    assert (
        f"rendezvous {lan.nodes[0].address}:" in plan.out
        and "GLOO_SOCKET_IFNAME=eth0" in plan.out
        and set(re.findall("<.*?>", plan.out)) == {"<job>", "<job folder>"}
    )
    launch = workspace.dtrain("launch")
    assert launch.code == 0 and "warning" not in launch.err, launch.err


def test_facts_of_all_nodes(lan: Lan, workspace: Workspace) -> None:
    in_pod = lan.nodes[1].path("/run/secrets")  # /var/run is a link to /run
    (in_pod / "kubernetes.io").mkdir(parents=True)
    told = json.loads(workspace.dtrain("check", "lan.yaml", "--json").out)
    shutil.rmtree(in_pod)
    assert list(told["facts"]) == ["n1", "n2", "n3"]
    containers = [one["machine"]["container"] for one in told["facts"].values()]
    assert containers[1] == "kubernetes" if containers[0] == "" else len({*containers}) == 1, containers  # or all of it is in one
    facts = told["facts"]["n2"]
    assert facts["host_name"] == "n2" and abs(facts["clock_offset_s"]) < 1
    said = {name: facts[name] for name in ("cores", "python", "python_version", "gpus", "gpu_fault", "node_dir", "missing")}
    cores = len(os.sched_getaffinity(lan.nodes[1].init or 0))
    assert said == {
        "cores": cores, "python": _PYTHON, "python_version": platform.python_version(),
        "gpus": [], "gpu_fault": "", "node_dir": DIR, "missing": "",
    }  # fmt: skip
    assert facts["torch_version"].partition("+")[0] == version("torch").partition("+")[0]
    assert facts.keys() >= {"cuda_version", "nccl_version"}  # which torch's CPU build has not
    assert {"interface": "eth0", "address": lan.nodes[1].address, "prefix_length": 24, "speed_mbit": 10000} in facts["addresses"]
    assert bool(facts["mpirun"]) == bool(shutil.which("mpirun")) == facts["mpi_version"].startswith("mpirun (Open MPI) 4")
    machine = facts["machine"]
    assert machine["name_means"] == ["127.0.1.1"]
    interfaces = {interface["name"]: interface for interface in machine["interfaces"]}
    assert list(interfaces)[-1] == "eth0" and interfaces.keys() >= {"docker0", "dead0"}
    assert interfaces["eth0"] == {"name": "eth0", "state": "up", "mtu": 1500, "speed_mbit": 10000}
    assert machine["kernel"] == os.uname().release and machine["memory_bytes"] > machine["shm_bytes"] > 0 < machine["free_bytes"]
    assert machine["limits"].keys() == {"memlock_bytes", "nofile", "nproc"} and machine["time_zone"] == time.strftime("%z")
    assert machine["system"] and (machine["gpu_driver"], machine["ends_at_logout"], machine["jobs"]) == ("", False, [])
    shown = workspace.dtrain("check", "lan.yaml", "-v").out
    assert re.search(r"^n\[1-3\] ", shown, re.MULTILINE) and max(map(len, shown.splitlines())) <= 80, shown


def test_a_launch_finds_what_differs_and_can_be_told_to_go_on(lan: Lan, workspace: Workspace) -> None:
    workspace.write("train.py", "print('started')\n")
    python = f"{DIR}/old/python"
    workspace.write("two.yaml", lan.cluster(f"n1, {{host: n2, python: {python}}}"))
    job = workspace.write("job.yaml", "launcher: none\nscript: train.py\ncluster: two.yaml\n")
    with other_torch(lan, workspace):
        refused = workspace.dtrain("launch", job)
        assert refused.code == 78 and "n2: torch 2.12.0, n1 has 2.13.0" in refused.err, refused.err
        assert "preflight: {ignore: [torch-differs]} goes on" in refused.err and "started" not in refused.err
        assert workspace.dtrain("launch", job, "--set", "preflight.ignore=[torch-differs]").code == 0


def test_what_an_earlier_job_left_is_ended_and_told(lan: Lan, workspace: Workspace) -> None:
    """Its agents and guards on two nodes were killed, and it had started daemons. Whoever comes to a node first says so."""
    stay = "import subprocess, sys, time\nsubprocess.Popen(['setsid', 'sleep', '600'])\nprint('ready', flush=True)\ntime.sleep(600)\n"
    workspace.write("stay.py", stay)
    launch = workspace.start("launch", workspace.write("job.yaml", "launcher: none\nscript: stay.py\ncluster: lan.yaml\n"))
    workspace.until(lambda: workspace.printed("ready") == 3, "the workers")
    job = workspace.status()["job"]
    launch.kill()
    launch.communicate()
    n1, *others = lan.nodes
    workspace.until(lambda: not any(" -c " in said for node in others for said in node.processes().values()), "the sessions to end")
    for signal_name in ("-STOP", "-KILL"):  # else the second hears of the first one's end, and ends what is its own
        for node in others:
            node.within("kill", signal_name, *(str(pid) for pid, command in node.processes().items() if " guard " in command))
    workspace.until(lambda: not n1.processes(), "the node that is well to stop", timeout_s=30)
    assert all([*node.processes().values()] == ["sleep 600"] for node in others), lan.processes()
    told = f"warning left-over\n  {{}}: job {job} had left 1 process running, now ended\n"
    checked = workspace.dtrain("check", "lan.yaml", "--nodes", "n1,n2", "--ignore", "host-name-loopback")
    assert checked.code == 0 and checked.out.startswith(told.format("n2")) and checked.out.count("warning") == 1, checked.out
    assert "sleep 600" not in others[0].processes().values()
    workspace.write("next.py", "")
    launched = workspace.dtrain("launch", workspace.write("next.yaml", "launcher: none\nscript: next.py\ncluster: lan.yaml\n"))
    assert launched.code == 0 and told.format("n3") in launched.err and launched.err.count("left-over") == 1, launched.err
    assert "left-over" not in workspace.dtrain("check", "lan.yaml").out


def test_gpus_that_others_hold_are_named_beside_all_else(workspace: Workspace) -> None:
    """And beside those that are not there, by Python without torch."""
    Gpus(workspace, 3).compute(0, os.getpid())
    workspace.write("gpus.yaml", f"instances: 2\ngpus_per_instance: 1\ndevice: cuda\ndir: {workspace.nodes}\n")
    four = workspace.dtrain("check", "gpus.yaml", "--set", "cluster.instances=4", "--set", "cluster.python=/usr/bin/python3", "--json")
    findings = json.loads(four.out)["findings"]
    assert [(finding["name"], finding["nodes"]) for finding in findings] == [
        ("torch-missing", ["node0", "node1", "node2", "node3"]),
        ("gpu-missing", ["node3"]),
        ("gpu-busy", ["node2"]),
    ]
    assert four.code == 78 and f"\n  GPU 0 is held by pid {os.getpid()} of " in findings[2]["text"], findings
    three = workspace.dtrain("check", "gpus.yaml", "--set", "cluster.instances=3")
    assert three.code == 75 and three.out.startswith("error gpu-busy\n  node2: 1 GPU wanted, 0 free\n"), three.out
    two = workspace.dtrain("check", "gpus.yaml", "--ignore", "shm-small", "--ignore", "disk-low")
    assert re.fullmatch(r"fit: 2 nodes, cluster size 2, meeting at 127\.0\.0\.1:\d+\n", two.out), two.out


def test_a_cluster_of_which_no_node_is_there(workspace: Workspace) -> None:
    workspace.write("gone.yaml", "instances: [one.invalid, two.invalid]\n")
    result = workspace.dtrain("check", "gone.yaml", "--json")
    told = json.loads(result.out)
    assert [(one["name"], one["nodes"]) for one in told["findings"]] == [("unreachable", ["one.invalid"]), ("unreachable", ["two.invalid"])]
    assert (result.code, told["facts"], told["plan"]) == (69, {}, None)


def test_what_several_nodes_say_alike_is_one_finding(workspace: Workspace) -> None:
    """All are instances of this machine, where the only port is taken."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        workspace.write("two.yaml", f"instances: 3\ndevice: cpu\nports: {port}-{port}\ndir: {workspace.nodes}\n")
        result = workspace.dtrain("check", "two.yaml", "--json")
    told = json.loads(result.out)
    assert result.code == 78 and told["plan"] is None
    (finding,) = told["findings"]
    assert (finding["name"], finding["nodes"]) == ("no-port", ["node0", "node1", "node2"])
    assert finding["text"] == f"node0, node1, node2: no port of {port}-{port} is free"


def test_a_cluster_with_ipv6_alone(lan: Lan, workspace: Workspace) -> None:
    workspace.write("place.py", PLACE)
    job = workspace.write("job.yaml", "script: place.py\ncluster: lan.yaml\n")
    with six(lan, workspace):
        fit = workspace.dtrain("check", "lan.yaml", "--ignore", "host-name-loopback")
        assert re.fullmatch(r"fit: 3 nodes, cluster size 3, meeting at \[fd77::b\]:\d+\n", fit.out), fit.out
        launch = workspace.dtrain("launch", job)
        assert launch.code == 0, launch.err
        told = [json.loads(line[line.index('["') :]) for line in workspace.dtrain("logs").out.splitlines() if '["' in line]
        assert [(one[0], one[1], one[7]) for one in told] == [(f"n{i}", 3.0, "fd77::b") for i in (1, 2, 3)], told


def test_interfaces_that_have_another_name_on_each_node(lan: Lan, workspace: Workspace) -> None:
    """Each node is told its own; one name for all, from the user, wins, and is a warning where it is wrong."""
    workspace.write("train.py", "print('here')\n")
    workspace.write("job.yaml", "script: train.py\ncluster: lan.yaml\nenv: {NCCL_SOCKET_IFNAME: eth0}\n")
    with another_name(lan, workspace):
        told = json.loads(workspace.dtrain("check", "--json", "--ignore", "host-name-loopback").out)
    assert [(one["name"], one["text"]) for one in told["findings"]] == [
        ("env-contradicts", "n2: env says NCCL_SOCKET_IFNAME=eth0, and the others reach it over ens3")
    ]
    given = [command["worker_env"] for command in told["plan"]["commands"]]
    assert [(env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) for env in given] == [
        ("eth0", "eth0"),
        ("ens3", "eth0"),
        ("eth0", "eth0"),
    ]


def test_ctrl_c_leaves_nothing(lan: Lan, workspace: Workspace) -> None:
    """While one node says nothing."""
    with silent_sshd(lan, workspace):
        check = workspace.start("check", "lan.yaml")
        workspace.until(lambda: lan.nodes[0].processes(), "a session")
        check.send_signal(signal.SIGINT)
        result = workspace.wait(check, timeout_s=20)
    assert result.code == 130 and result.err.strip() == "stopped by Ctrl-C" and result.out == "", result
    workspace.until(lambda: lan.processes() == {}, "the sessions to end", timeout_s=5.0)


def test_findings_that_nobody_can_pass_over(workspace: Workspace) -> None:
    refused = workspace.dtrain("check", "--ignore", "rendezvous-blocked")
    assert refused.code == 2 and "torch-differs" in refused.err, refused.err


def test_what_a_check_reads_is_what_a_launch_sends(workspace: Workspace) -> None:
    """Of a working directory that holds dtrain's own folder, and grows with each launch, neither takes that along."""
    workspace.write("train.py", "print('here')\n")
    own = workspace.workdir / "own"
    own.mkdir(mode=0o700)
    with (own / "large").open("wb") as large:
        large.truncate(600_000_000)
    cluster = f"{{instances: 1, gpus_per_instance: 1, device: cpu, dir: {own}}}"
    workspace.write("job.yaml", f"launcher: none\nscript: train.py\ncluster: {cluster}\n")
    check = workspace.dtrain("check")
    assert check.code == 0 and "workdir-unfit" not in check.out, check.out
    assert workspace.dtrain("launch").code == 0
    own.rename(workspace.workdir / "other")
    refused = workspace.dtrain("check")
    told = " ".join(refused.out.split())  # in lines of 80 columns
    assert refused.code == 78 and "workdir-unfit" in told and "other/large 600 MB" in told, refused.out
