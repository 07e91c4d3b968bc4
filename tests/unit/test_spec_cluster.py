"""Cluster files as people write them, right and wrong."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from dtrain.errors import SpecError
from dtrain.spec import ClusterSpec, Instance, SshOptions, is_cluster_file, load_cluster, this_machine


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cluster(text: str) -> ClusterSpec:
    Path("lab.yaml").write_text(textwrap.dedent(text))
    return load_cluster(Path("lab.yaml"))


def private_file(name: str) -> None:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.touch(mode=0o600)


def test_a_full_cluster_file(tmp_path: Path) -> None:
    private_file("keys/lab")
    spec = cluster("""
        instances:
          - trn[09-10].lab
          - {host: 10.0.0.5, gpus: [4, 5], address: 192.168.7.5, python: /opt/conda/bin/python, ssh: {user: root, port: 2222}}
        gpus_per_instance: 8
        device: cuda
        python: python3.12
        dir: /scratch/me
        network: 192.168.7.0/24
        ports: 29500-29599
        ssh: {user: ubuntu, identity_file: keys/lab, proxy_jump: bastion, host_keys: accept-new}
    """)
    key = str(tmp_path / "keys/lab")
    shared = SshOptions("ubuntu", None, key, "bastion", "accept-new")
    assert spec == ClusterSpec(
        path=tmp_path / "lab.yaml",
        instances=(
            Instance("trn09.lab", "trn09.lab", 8, None, "python3.12", shared),
            Instance("trn10.lab", "trn10.lab", 8, None, "python3.12", shared),
            Instance(
                "10.0.0.5",
                "10.0.0.5",
                (4, 5),
                "192.168.7.5",
                "/opt/conda/bin/python",
                SshOptions("root", 2222, key, "bastion", "accept-new"),
            ),
        ),
        device="cuda",
        dir="/scratch/me",
        network="192.168.7.0/24",
        ports="29500-29599",
        ssh=shared,
    )


def test_an_instance_is_activated_as_the_cluster_says_or_by_lines_of_its_own() -> None:
    spec = cluster("instances: [a, {host: b, activate: module load torch}]\nactivate: |\n  . venv/bin/activate\n  export A=1\n")
    assert [instance.activate for instance in spec.instances] == [". venv/bin/activate\nexport A=1\n", "module load torch"]
    assert cluster("instances: 1\nactivate: x").instances[0].activate == "x"


def test_a_number_of_instances_is_played_by_this_machine() -> None:
    spec = cluster("instances: 3\ngpus_per_instance: 2")
    assert [(i.name, i.host, i.gpus) for i in spec.instances] == [("node0", None, 2), ("node1", None, 2), ("node2", None, 2)]


def test_this_machine_is_what_one_instance_means() -> None:
    assert this_machine().instances == cluster("instances: 1").instances
    assert this_machine().path is None


def test_an_instance_may_give_back_what_the_cluster_sets() -> None:
    spec = cluster("instances: [{host: a, gpus: auto, ssh: {host_keys: strict}}]\ngpus_per_instance: [0]\nssh: {host_keys: accept-new}")
    assert (spec.instances[0].gpus, spec.instances[0].ssh.host_keys) == ("auto", "strict")


def test_a_key_of_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    private_file(".ssh/lab")
    assert cluster("instances: 1\nssh: {identity_file: ~/.ssh/lab}").ssh.identity_file == f"{tmp_path}/.ssh/lab"


def test_a_key_whose_private_half_the_agent_has_is_named_by_its_public_file() -> None:
    Path("lab.pub").touch()
    assert cluster("instances: 1\nssh: {identity_file: lab}").ssh.identity_file == os.path.abspath("lab")
    Path("lab.pub").chmod(0o644)  # a public half need not be kept from others
    assert cluster("instances: 1\nssh: {identity_file: lab.pub}").ssh.identity_file == os.path.abspath("lab.pub")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("trn[01-03].lab", ["trn01.lab", "trn02.lab", "trn03.lab"]),
        ("a[1,3-5]", ["a1", "a3", "a4", "a5"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[7]", ["a7"]),
        ("08", ["08"]),
    ],
)
def test_ranges_keep_their_zeros_and_their_order(text: str, hosts: list[str]) -> None:
    assert [instance.host for instance in cluster(f"instances:\n- {text}\n").instances] == hosts


# (what is in lab.yaml, where the mistake is, a part of the message, a part of the hint)
WRONG = [
    ("instances: 0", "1:12", "instances must be from 1", "this machine"),
    ("instances: 5000", "1:12", "instances must be from 1 to 4096", ""),
    ("instances: 08", "1:12", "instances must be a whole number or a list, not '08'", "write 8"),
    ("instances: '2'", "1:12", "not '2'", "remove the quotes"),
    ("instances: a", "1:12", "not 'a'", "write [a]"),
    ("instances:", "1:1", "but nothing is there", ""),
    ("instances: []", "1:12", "instances is empty", "list the hosts"),
    ("device: cpu", "1:1", "lacks the key 'instances'", "add it"),
    ("instances: 1\ndevice: gpu", "2:9", "device must be 'auto', 'cuda' or 'cpu', not 'gpu'", "did you mean 'cuda'?"),
    ("instances:\n- a\n- b\n- a", "4:3", "the host 'a' stands here a second time", "remove one"),
    ("instances:\n- a[1-3]\n- {host: a2}", "3:10", "the host 'a2' stands here a second time", "remove one"),
    ("instances: ['a[1,1]']", "1:13", "the host 'a1' stands here a second time", "remove one"),
    ("instances: ['a[1-3']", "1:13", "a bracket without its partner", "trn[01-16].lab"),
    ("instances: ['a[x-y]']", "1:13", "the range [x-y], which cannot be read", "[01-16]"),
    ("instances: ['a[]']", "1:13", "which cannot be read", "[01-16]"),
    ("instances: ['a[5-1]']", "1:13", "counts down", "write 1-5"),
    ("instances: ['a[1-016]']", "1:13", "padded to two widths", "write 001-016"),
    ("instances: ['a[1-999999999]']", "1:13", "more than 4096 hosts", "check"),
    ("instances: ['a[1-99][1-99]']", "1:13", "more than 4096 hosts", "check"),
    ("instances: ['a[1-4000]', 'b[1-4000]']", "1:26", "stands for more than 4096 hosts", "check"),
    ("instances: [me@a]", "1:13", "'me@a' is no host name", "{host: a, ssh: {user: me}}"),
    ("instances: ['a:22']", "1:13", "'a:22' is no host name", "{host: a, ssh: {port: 22}}"),
    ("instances: ['::1']", "1:13", "'::1' is no host name", "~/.ssh/config"),
    ("instances: [../a]", "1:13", "'../a' is no host name", "letters"),
    ("instances: [-oProxyCommand]", "1:13", "is no host name", "letters"),
    ("instances: [a, [b]]", "1:16", "instances[1] must be text or a mapping, not a list", ""),
    ("instances: [{gpus: 1}]", "1:13", "instances[0] lacks the key 'host'", "add it"),
    ("instances: [{host: 'a[1-2]', address: 10.0.0.1}]", "1:39", "one address for 2 hosts", "of its own"),
    ("instances: [{host: a, address: b}]", "1:32", "address 'b' is no IP address", "number"),
    ("instances: [{host: a, gpus: 0}]", "1:29", "instances[0].gpus must be from 1 to 1024, not 0", "device: cpu"),
    ("instances: [{host: a, gpus: on}]", "1:29", "gpus must be a whole number, a list or 'auto', not 'on'", ""),
    ("instances: [{host: a, gpus: [0, x]}]", "1:33", "instances[0].gpus[1] must be a whole number, not 'x'", ""),
    ("instances: 1\ngpus_per_instance: atuo", "2:20", "or 'auto', not 'atuo'", "did you mean 'auto'?"),
    ("instances: 1\ngpus_per_instance: []", "2:20", "gpus_per_instance is an empty list", "auto"),
    ("instances: 1\ngpus_per_instance: [1, 1]", "2:24", "GPU 1 stands here a second time", "remove one"),
    ("instances: 2\ngpus_per_instance: [0, 1]", "2:20", "gpus_per_instance gives the same GPUs to 2 instances", "how many each"),
    ("instances: 1\ngpus_per_instance: [-1]", "2:21", "there is no GPU -1", "from 0"),
    ("instances: 1\npython: venv/bin/python", "2:9", "neither an absolute path", "/opt/conda"),
    ("instances: 1\npython: python3 -u", "2:9", "neither an absolute path", "/opt/conda"),
    ("instances: 1\ndir: scratch", "2:6", "no absolute path", "/var/tmp"),
    ("instances: 1\ndir: /", "2:6", "no absolute path", "/var/tmp"),
    ("instances: 1\ndir: //", "2:6", "no absolute path", "/var/tmp"),
    ("instances: 1\nnetwork: 10.0.0.0/99", "2:10", "no network", "/24"),
    ("instances: 1\nnetwork: 10.0.0.5", "2:10", "one address, not a network", "/24"),
    ("instances: 1\nnetwork: a b", "2:10", "neither a network nor an interface", "eth0"),
    ("instances: 1\nports: 29500", "2:8", "no range of ports", "29500-29599"),
    ("instances: 1\nports: 9-3", "2:8", "no range of ports", "lowest first"),
    ("instances: 1\nports: 1-65536", "2:8", "no range of ports", "65535"),
    ("instances: 1\nssh: {port: 0}", "2:13", "ssh.port must be from 1 to 65535, not 0", "22"),
    ("instances: 1\nssh: {user: ''}", "2:13", "ssh.user is empty", "remove the key"),
    ("instances: 1\nssh: {usr: a}", "2:7", "unknown key 'usr'", "did you mean 'user'?"),
    ("instances: 1\nssh: {host_keys: off}", "2:18", "ssh.host_keys must be 'strict' or 'accept-new', not 'off'", ""),
    ("instances: 1\nenv: {A: 1}", "2:1", "unknown key 'env'", "job file"),
    ("instances: 1\nactivate: ''", "2:11", "activate is empty", "such as `activate: source "),
    ("instances: 1\nactivate: [a]", "2:11", "activate must be text, not a list", ""),
    ("instances: 1\nzzz: x", "2:1", "unknown key 'zzz'", "known here: instances"),
    ("script: train.py", "1:1", "this is a job file", "instances"),
]


@pytest.mark.parametrize(("text", "where", "message", "hint"), WRONG, ids=[f"{row[2]} {row[1]}" for row in WRONG])
def test_a_mistake_is_named_once_with_its_place_and_a_hint(text: str, where: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        cluster(text)
    (problem,) = caught.value.problems
    assert problem.where == f"lab.yaml:{where}"
    assert message in problem.message
    assert hint in (problem.hint or "")


@pytest.mark.parametrize("network", ["auto", "eth0", "enp0s31f6.5", "fd00::/8", "10.1.2.3/24"])
def test_networks_that_are_right(network: str) -> None:
    assert cluster(f"instances: 1\nnetwork: {network}").network == network


@pytest.mark.parametrize("python", ["python3", "/a b/python", "~/venv/bin/python"])
def test_pythons_that_are_right(python: str) -> None:
    assert cluster(f"instances: 1\npython: {python}").instances[0].python == python


def test_a_file_with_instances_is_a_cluster_file() -> None:
    Path("lab.yaml").write_text("instances: wrong\nmore: wrong")
    Path("job.yaml").write_text("script: train.py\ncluster: {instances: 1}")
    assert is_cluster_file(Path("lab.yaml"))
    assert not is_cluster_file(Path("job.yaml"))
    with pytest.raises(SpecError, match="there is no such file"):
        is_cluster_file(Path("none.yaml"))
