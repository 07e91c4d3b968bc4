"""mpirun's command line, what a node lets through as its daemon, and which nodes are refused."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.errors import PreflightFailed
from dtrain.launchers import check, node_commands
from dtrain.launchers.mpirun import hosts
from dtrain.node import mpi
from dtrain.node.folder import JobFolder
from dtrain.node.wire import Address, MpiNode, NodeFacts
from dtrain.node.worker import place_of
from dtrain.plan import LaunchPlan, Rendezvous, make_plan
from dtrain.spec import load_job
from tests.facts import FACTS

OPEN_MPI = "mpirun (Open MPI) 4.1.4"


def _facts(version: str = OPEN_MPI, *, mpirun: str = "/usr/bin/mpirun", orted: str = "/usr/bin/orted", bundle: str = "/b") -> NodeFacts:
    return replace(FACTS, gpus=(), bundle=bundle, mpirun=mpirun, mpi_daemon=orted, mpi_version=version)


def _plan(folder: Path, addresses: dict[str, str], counts: list[int], bundle: str = "/b") -> LaunchPlan:
    (folder / "train.py").touch()
    instances = ", ".join(f"{{host: {node}, gpus: {count}}}" for node, count in zip(addresses, counts, strict=True))
    (folder / "job.yaml").write_text(f"script: train.py\nlauncher: mpirun\ncluster: {{instances: [{instances}], device: cpu}}\n")
    chosen = {node: Address("eth0", address, 24, 1000) for node, address in addresses.items()}
    facts = dict.fromkeys(addresses, _facts(bundle=bundle))
    return make_plan(load_job(folder / "job.yaml", environ={}), facts, Rendezvous(chosen, 29500))


def _argv(folder: Path, plan: LaunchPlan) -> str:
    first, *others = node_commands(load_job(folder / "job.yaml", environ={}), plan, "job")
    assert [other.argv for other in others] == [()] * len(others)
    return shlex.join(first.argv)


def test_each_node_has_its_share_of_the_ranks_in_order(tmp_path: Path) -> None:
    plan = _plan(tmp_path, {"a": "10.0.0.1", "b": "10.0.0.2"}, [1, 3])
    assert _argv(tmp_path, plan) == (
        "/usr/bin/mpirun --noprefix --bind-to none --map-by slot"
        " --host 10.0.0.1:1 -np 1 --wdir / /usr/bin/python3 /b worker /j mpirun"
        " : --host 10.0.0.2:3 -np 3 --wdir / /usr/bin/python3 /b worker /j mpirun"
    )


def test_instances_of_one_machine_get_aliases_that_are_no_names(tmp_path: Path) -> None:
    plan = _plan(tmp_path, {"a": "10.0.0.1", "b": "10.0.0.1", "c": "10.0.0.3", "d": "10.0.0.1"}, [1, 1, 1, 1])
    assert hosts(plan) == ("10.0.0.1", "127.1.0.1", "10.0.0.3", "127.1.0.3")


def test_mpi_traffic_keeps_to_the_address_that_was_proved(tmp_path: Path) -> None:
    """Each node to its own. Open MPI 4 takes every interface where the network is a /32."""
    plan = _plan(tmp_path, {"a": "10.0.0.1", "b": "10.0.0.2"}, [1, 1])
    for command, address in zip(
        node_commands(load_job(tmp_path / "job.yaml", environ={}), plan, "job"), ("10.0.0.1", "10.0.0.2"), strict=True
    ):
        assert command.env["OMPI_MCA_oob_tcp_if_include"] == command.worker_env["OMPI_MCA_btl_tcp_if_include"] == f"{address}/31"


def test_a_plan_that_mpirun_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightFailed, match=r"^b: mpirun needs an IPv4 address.*fd00::2\nhint: set network:"):
        _argv(tmp_path, _plan(tmp_path, {"a": "10.0.0.1", "b": "fd00::2"}, [1, 1]))
    with pytest.raises(PreflightFailed, match=r"^a: mpirun cannot start .* a space in it\nhint: set dir:"):
        _argv(tmp_path, _plan(tmp_path, {"a": "10.0.0.1"}, [1], bundle="/my files/b"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_facts("", mpirun=""), r"^b: mpirun is not installed, or not on the PATH there\nhint: apt-get install openmpi-bin"),
        (_facts(orted=""), r"^b: orted is not installed.*\nhint: apt-get install openmpi-bin"),
        (_facts("mpirun (Open MPI) 5.0.3"), r"^the nodes have different Open MPI: 4\.1\.4 on a; 5\.0\.3 on b\nhint: install the same"),
        (_facts("HYDRA build details:"), r"^b: /usr/bin/mpirun is not Open MPI; it calls itself HYDRA.*\nhint: .*update-alternatives"),
        (_facts(""), r"^b: /usr/bin/mpirun is not Open MPI; it calls itself nothing"),
    ],
)
def test_nodes_without_the_same_open_mpi_are_refused(wrong: NodeFacts, message: str) -> None:
    check("mpirun", {"a": _facts(), "b": _facts("mpirun (Open MPI) 4.0.3")})
    with pytest.raises(PreflightFailed, match=message):
        check("mpirun", {"a": _facts(), "b": wrong})
    check("torchrun", {"a": _facts(), "b": wrong})


def test_open_mpi_5_everywhere_is_refused_too() -> None:
    with pytest.raises(PreflightFailed, match=r"^dtrain runs Open MPI 4; there is 5\.0\.3 on a, b"):
        check("mpirun", dict.fromkeys("ab", _facts("mpirun (Open MPI) 5.0.3")))


# As mpirun 4.1.4 gives it to its launch agent, once a shell has split it.
DAEMON = shlex.split(
    "orted -mca orte_leave_session_attached 1 -mca ess env -mca ess_base_jobid 450887680 -mca ess_base_vpid 2 -mca ess_base_num_procs 3"
    " -mca orte_node_regex vm,[3:127].1.0.1,[3:127].1.0.2@0(3) -mca orte_hnp_uri 450887680.0;tcp://10.0.0.1:37667 -mca plm rsh"
)
NODE = MpiNode("/usr/bin/orted", 2, 3, "10.0.0.1", 60.0, {})


def test_the_daemon_of_this_node_and_job_is_let_through() -> None:
    assert mpi.daemon_argv(NODE, DAEMON) == ("/usr/bin/orted", *DAEMON[1:])


def _with(name: str, value: str) -> list[str]:
    return [value if before == name else word for before, word in zip(["", *DAEMON], DAEMON, strict=False)]


@pytest.mark.parametrize(
    "wanted",
    [
        [],
        ["/bin/sh", "-c", "id"],
        ["/tmp/orted", *DAEMON[1:]],
        [*DAEMON, "-mca", "orte_launch_agent", "/bin/sh"],
        [*DAEMON, "-mca", "plm", "rsh"],
        [*DAEMON, "--daemonize"],
        DAEMON[:-3],
        _with("ess_base_vpid", "1"),  # another node's
        _with("ess_base_num_procs", "4"),
        _with("orte_hnp_uri", "450887680.0;tcp://10.0.0.9:37667"),  # somebody else's mpirun
        _with("orte_hnp_uri", "450887680.0;tcp://10.0.0.1,10.0.0.9:37667"),
        _with("orte_hnp_uri", "file:/tmp/uri"),
        _with("orte_node_regex", "vm;id"),
        _with("plm", "rsh\n"),
    ],
)
def test_nothing_else_is_started_as_a_daemon(wanted: list[str]) -> None:
    with pytest.raises(ValueError, match="daemon of this job"):
        mpi.daemon_argv(NODE, wanted)


def test_settings_of_the_users_other_mpi_jobs_reach_no_mpirun() -> None:
    seen = mpi.environment({"PATH": "/bin", "OMPI_MCA_plm": "slurm", "SLURM_JOB_ID": "7", "PMIX_RANK": "3"}, JobFolder("/jobs/x"))
    assert {name: value for name, value in seen.items() if "ALLOW_RUN_AS_ROOT" not in name} == {
        "PATH": "/bin",
        "OMPI_MCA_orte_tmpdir_base": "/jobs/x",
    }


def test_every_launcher_places_a_worker() -> None:
    """Numbers of whoever started dtrain itself, as from within another job, mean nothing."""
    theirs = {"RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "NODE_RANK": "1"}
    open_mpi = {f"OMPI_COMM_WORLD_{name}": str(number) for number, name in enumerate(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), 1)}
    place = place_of("mpirun", {**theirs, **open_mpi})
    assert (place.rank, place.local_rank) == (1, 3)
    assert [place.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2", "3", "4"]
    assert place_of("torchrun", {**theirs, **open_mpi}).rank == 7
    alone = place_of("none", theirs)
    assert (alone.rank, alone.local_rank) == (1, 0)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & set(alone.environ)


def test_nodes_whose_addresses_are_open_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("script: train.py\nlauncher: mpirun\ncluster: {instances: [a, b]}\n")
    spec = load_job(tmp_path / "job.yaml", environ={})
    first, _ = node_commands(spec, make_plan(spec), "job")
    assert first.mpi is not None and first.mpi.hosts == {"<address of a>": "a", "<address of b>": "b"}
