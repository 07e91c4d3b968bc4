"""Where the nodes meet: candidates, dialers, the choice, and what is said when nothing works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from dtrain import rendezvous
from dtrain.errors import PreflightFailed
from dtrain.node.wire import Address, Dialed, Listening, NodeFacts, Ports
from dtrain.rendezvous import Try
from dtrain.spec import ClusterSpec, load_job
from tests.facts import FACTS

LO = Address("lo", "127.0.0.1", 8, 0)
LO6 = Address("lo", "::1", 128, 0)
DOCKER = Address("docker0", "172.17.0.1", 16, 10000)

Answer = Callable[[str, str, Address], str]  # dialer, node, address -> cause


def _eth(number: int, net: str = "10.0.0", *, name: str = "eth0", speed: int = 1000) -> Address:
    return Address(name, f"{net}.{number}", 24, speed)


def _ib(number: int, speed: int = 200_000) -> Address:
    return _eth(number, "10.1.0", name="ib0", speed=speed)


def _cluster(folder: Path, text: str) -> ClusterSpec:
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(f"script: train.py\ncluster: {text}\n")
    return load_job(folder / "job.yaml", environ={}).cluster


def _facts(addresses: Mapping[str, tuple[Address, ...]]) -> dict[str, NodeFacts]:
    return {node: replace(FACTS, host_name=node, addresses=some) for node, some in addresses.items()}


def _tries(targets: Mapping[str, tuple[Address, ...]], answer: Answer) -> tuple[Try, ...]:
    """What the nodes would find out, by the same steps as in a start."""
    dials = rendezvous.dials(targets, dict.fromkeys(targets, 29500))
    addresses = {(node, address.address): address for node, some in targets.items() for address in some}
    return rendezvous.tries(
        dials,
        {
            dialer: Dialed(tuple(answer(dialer, target.node, addresses[target.node, target.address]) for target in some))
            for dialer, some in dials.items()
        },
        _facts(targets),
    )


def _choose(targets: Mapping[str, tuple[Address, ...]], answer: Answer) -> dict[str, str]:
    return {node: address.address for node, address in rendezvous.choose(targets, _tries(targets, answer)).items()}


def _networks(*prefixes: str) -> Answer:
    """Different machines that share the networks with these prefixes."""
    return lambda dialer, node, address: "" if address.address.startswith(prefixes) else "timed out"


def _one_machine(dialer: str, node: str, address: Address) -> str:
    return ""


# ---- candidates ----


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("{instances: [a, b]}", {"a": (LO, _eth(1), _ib(1)), "b": (LO, _eth(2), _ib(2))}),
        ("{instances: [a, b], network: 10.1.0.0/16}", {"a": (_ib(1),), "b": (_ib(2),)}),
        ("{instances: [a, b], network: eth0}", {"a": (_eth(1),), "b": (_eth(2),)}),
        ("{instances: [a, b], network: lo}", {"a": (LO,), "b": (LO,)}),
        ("{instances: [a, {host: b, address: 10.0.0.2}]}", {"a": (LO, _eth(1), _ib(1)), "b": (_eth(2),)}),
        ("{instances: [a, {host: b, address: 192.0.2.9}], network: ib0}", {"a": (_ib(1),), "b": (Address("", "192.0.2.9", 32, 0),)}),
        ("{instances: [a]}", {"a": (LO,)}),
        ("{instances: [a], network: ib0}", {"a": (LO,)}),
        ("{instances: [{host: a, address: 10.0.0.1}]}", {"a": (_eth(1),)}),
        ("{instances: 1}", {"node0": (LO,)}),
        ("{instances: 2}", {"node0": (LO,), "node1": (LO,)}),  # no port opens to the network for a job of one machine
        ("{instances: 2, network: eth0}", {"node0": (_eth(1),), "node1": (_eth(2),)}),
    ],
)
def test_candidates_are_what_the_files_leave(tmp_path: Path, cluster: str, expected: dict[str, tuple[Address, ...]]) -> None:
    spec = _cluster(tmp_path, cluster)
    facts = _facts({instance.name: (LO, _eth(number), _ib(number)) for number, instance in enumerate(spec.instances, 1)})
    assert rendezvous.candidates(spec, facts) == expected


def test_a_machine_with_ipv6_alone_meets_itself_there(tmp_path: Path) -> None:
    assert rendezvous.candidates(_cluster(tmp_path, "{instances: 1}"), _facts({"node0": (LO6,)})) == {"node0": (LO6,)}


def test_an_explicit_ipv6_address_is_found_however_it_is_written(tmp_path: Path) -> None:
    spec = _cluster(tmp_path, '{instances: [{host: a, address: "FD00:0::2"}, b]}')
    facts = _facts({"a": (LO, Address("eth0", "fd00::2", 64, 0)), "b": (LO,)})
    assert rendezvous.candidates(spec, facts)["a"] == (Address("eth0", "fd00::2", 64, 0),)


def test_a_network_that_a_node_is_not_in(tmp_path: Path) -> None:
    facts = _facts({"a": (LO, _ib(1)), "b": (LO, _eth(2))})
    with pytest.raises(PreflightFailed) as failed:
        rendezvous.candidates(_cluster(tmp_path, "{instances: [a, b], network: 10.1.0.0/24}"), facts)
    assert failed.value.message == "b: no address in network 10.1.0.0/24; it has 127.0.0.1 (lo), 10.0.0.2 (eth0)"
    assert failed.value.hint is not None and "network:" in failed.value.hint
    assert failed.value.exit_code == 78


def test_an_address_before_a_nat_is_none_of_the_node(tmp_path: Path) -> None:
    facts = _facts({"a": (LO, _eth(1)), "b": (LO, _eth(2))})
    targets = rendezvous.candidates(_cluster(tmp_path, "{instances: [a, {host: b, address: 192.0.2.9}]}"), facts)
    listening = {"a": Listening(1, {}), "b": Listening(2, {"192.0.2.9": "it is no address of this node"})}
    with pytest.raises(PreflightFailed) as failed:
        rendezvous.listened_on(targets, listening, facts)
    assert failed.value.message == ("b: cannot listen on 192.0.2.9: it is no address of this node; it has 127.0.0.1 (lo), 10.0.0.2 (eth0)")
    assert failed.value.hint is not None and "address:" in failed.value.hint


def test_one_address_that_cannot_be_listened_on_is_left_out(tmp_path: Path) -> None:
    targets = {"a": (_eth(1), _ib(1)), "b": (_eth(2),)}
    left = rendezvous.listened_on(targets, {"a": Listening(1, {"10.0.0.1": "?"}), "b": Listening(2, {})}, _facts(targets))
    assert left == {"a": (_ib(1),), "b": (_eth(2),)}


def test_ports_are_the_window_of_the_cluster_file(tmp_path: Path) -> None:
    assert rendezvous.ports_of(_cluster(tmp_path, "{instances: 2, ports: 29500-29599}")) == Ports(29500, 29599)
    assert rendezvous.ports_of(_cluster(tmp_path, "{instances: 2}")) == Ports(0, 0)


# ---- who dials whom ----


@pytest.mark.parametrize("number", [1, 2, 3, 32])
def test_up_to_32_nodes_every_pair_is_tried_both_ways(number: int) -> None:
    targets = {f"node{index}": (_eth(index),) for index in range(number)}
    pairs = [(dialer, target.node) for dialer, some in rendezvous.dials(targets, dict.fromkeys(targets, 1)).items() for target in some]
    assert sorted(pairs) == sorted(pair for one, other in combinations(targets, 2) for pair in ((one, other), (other, one)))


def test_of_more_nodes_each_dials_15_and_the_first_one_and_that_one_all() -> None:
    targets = {f"node{index}": (LO, _eth(index)) for index in range(40)}
    dials = rendezvous.dials(targets, {node: 1000 + index for index, node in enumerate(targets)})
    dialed = {dialer: [target.node for target in some[::2]] for dialer, some in dials.items()}
    assert dialed["node0"] == [f"node{index}" for index in range(1, 40)]
    assert dialed["node2"] == ["node0", *(f"node{index}" for index in range(3, 18))]
    assert dialed["node3"] == ["node0", *(f"node{index}" for index in range(4, 19))]
    assert dialed["node39"] == [f"node{index}" for index in range(15)]
    for dialer, nodes in dialed.items():
        assert len(nodes) == len(set(nodes)) and dialer not in nodes
    tried_by = [sum(f"node{index}" in nodes for nodes in dialed.values()) for index in range(40)]
    assert min(tried_by) >= 15 and tried_by[0] == 39
    assert [(target.address, target.port) for target in dials["node39"][2:4]] == [("127.0.0.1", 1001), ("10.0.0.1", 1001)]


# ---- the choice ----


def test_one_machine_meets_on_loopback() -> None:
    targets = {node: (_eth(1), LO, DOCKER) for node in ("a", "b", "c")}
    assert set(_choose(targets, _one_machine).values()) == {"127.0.0.1"}


def test_a_single_node_needs_no_proof() -> None:
    assert _choose({"a": (LO,)}, _networks()) == {"a": "127.0.0.1"}
    assert _choose({"a": (_eth(1),)}, _networks()) == {"a": "10.0.0.1"}


def test_of_two_networks_the_faster_one() -> None:
    targets = {f"n{number}": (LO, _eth(number), _ib(number)) for number in (1, 2, 3)}
    assert _choose(targets, _networks("10.0.0.", "10.1.0.")) == {"n1": "10.1.0.1", "n2": "10.1.0.2", "n3": "10.1.0.3"}


def test_a_network_is_as_fast_as_its_slowest_link() -> None:
    targets = {"n1": (_eth(1), _ib(1)), "n2": (_eth(2), _ib(2, speed=100))}
    assert _choose(targets, _networks("10.")) == {"n1": "10.0.0.1", "n2": "10.0.0.2"}


def test_a_dead_first_interface_is_passed_over() -> None:
    targets = {f"n{number}": (LO, _ib(number), _eth(number)) for number in (1, 2)}
    assert _choose(targets, _networks("10.0.0.")) == {"n1": "10.0.0.1", "n2": "10.0.0.2"}


def test_the_bridge_that_every_machine_has_proves_nothing() -> None:
    targets = {f"n{number}": (LO, DOCKER, _eth(number)) for number in (1, 2, 3)}
    assert _choose(targets, _networks("10.0.0.")) == {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}


def test_the_network_of_most_nodes_comes_before_a_faster_one() -> None:
    targets = {"n1": (_eth(1), _ib(1)), "n2": (_eth(2), _ib(2)), "n3": (_eth(3),)}
    assert _choose(targets, _networks("10.")) == {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}


def test_nodes_of_several_subnets_meet_where_they_reach_each_other() -> None:
    """Each in a subnet of its own, with a route between them, as in a cloud of several zones."""
    targets = {"n1": (_eth(1, "10.0.1"),), "n2": (_eth(1, "10.0.2"),), "n3": (Address("eth0", "10.0.3.1", 32, 0),)}
    assert _choose(targets, _networks("10.")) == {"n1": "10.0.1.1", "n2": "10.0.2.1", "n3": "10.0.3.1"}


def test_nodes_that_list_equal_networks_in_another_order_agree() -> None:
    blue, red = [tuple(_eth(number, net, name="e") for number in (1, 2)) for net in ("10.2.0", "10.3.0")]
    assert _choose({"n1": (blue[0], red[0]), "n2": (red[1], blue[1])}, _networks("10.")) == {"n1": "10.2.0.1", "n2": "10.2.0.2"}


def test_ipv4_before_ipv6_and_ipv6_where_there_is_nothing_else() -> None:
    six = [Address("eth0", f"fd00::{number}", 64, 1000) for number in (1, 2)]
    assert _choose({"n1": (six[0], _eth(1)), "n2": (six[1], _eth(2))}, _networks("10.", "fd00")) == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    assert _choose({"n1": (six[0], _eth(1)), "n2": (six[1], _eth(2))}, _networks("fd00")) == {"n1": "fd00::1", "n2": "fd00::2"}


def test_two_on_one_machine_and_one_elsewhere_do_not_meet_on_loopback() -> None:
    machine = {"n1": 1, "n2": 1, "n3": 2}

    def answer(dialer: str, node: str, address: Address) -> str:
        return "" if address.interface == "eth0" or machine[dialer] == machine[node] else "refused"

    targets = {"n1": (LO, _eth(1)), "n2": (LO, _eth(1)), "n3": (LO, _eth(2))}
    assert _choose(targets, answer) == {"n1": "10.0.0.1", "n2": "10.0.0.1", "n3": "10.0.0.2"}


def test_an_address_that_only_some_reach_does_not_count() -> None:
    def answer(dialer: str, node: str, address: Address) -> str:
        return "timed out" if address.interface == "ib0" and (dialer, node) == ("n2", "n3") else _networks("10.")(dialer, node, address)

    targets = {f"n{number}": (_eth(number), _ib(number)) for number in (1, 2, 3)}
    assert _choose(targets, answer) == {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}


# ---- what is said ----


def _fault(targets: Mapping[str, tuple[Address, ...]], answer: Answer) -> list[str]:
    with pytest.raises(PreflightFailed) as failed:
        rendezvous.choose(targets, _tries(targets, answer))
    assert failed.value.exit_code == 78
    assert failed.value.hint is not None and "ports:" in failed.value.hint and "network:" in failed.value.hint
    return failed.value.message.splitlines()


def test_a_node_of_the_other_family() -> None:
    """Its kernel says that there is no route, or knows no such family at all."""
    targets = {"n1": (LO, _eth(1)), "n2": (LO, Address("eth0", "fd00::2", 64, 1000)), "n3": (LO, _eth(3))}

    def answer(dialer: str, node: str, address: Address) -> str:
        if address == LO:
            return "refused"
        return "no route" if "n2" in (dialer, node) else ""

    assert _fault(targets, answer) == [
        "n2: reaches no other node: n3 at 10.0.0.3:29500 (eth0): no IPv4 address to dial from; "
        "n1 at 10.0.0.1:29500 (eth0): no IPv4 address to dial from",
        "n2: not reached at [fd00::2]:29500 (eth0) from n1, n3: no IPv6 address to dial from",
    ]


def test_a_firewall_before_one_node() -> None:
    def answer(dialer: str, node: str, address: Address) -> str:
        if address.interface in ("lo", "docker0"):
            return "refused"
        return "timed out" if node == "n2" else ""

    targets = {f"n{number}": (LO, DOCKER, _eth(number)) for number in (1, 2, 3)}
    assert _fault(targets, answer) == [
        "n2: not reached at 172.17.0.1:29500 (docker0) from n1, n3: refused; at 10.0.0.2:29500 (eth0) from n1, n3: timed out"
    ]


def test_one_node_that_reaches_nobody_is_the_one_to_blame() -> None:
    targets = {f"n{number}": (LO, _eth(number)) for number in range(1, 4)}
    lines = _fault(targets, lambda dialer, node, address: "no route" if dialer == "n2" or address == LO else "")
    assert lines == ["n2: reaches no other node: n3 at 10.0.0.3:29500 (eth0): no route; n1 at 10.0.0.1:29500 (eth0): no route"]


def test_two_nodes_that_do_not_reach_each_other() -> None:
    targets = {"n1": (LO, _eth(1)), "n2": (LO, Address("eth0", "fd00::2", 64, 0))}
    assert _fault(targets, lambda *_: "timed out") == [
        "n1: not reached at 10.0.0.1:29500 (eth0) from n2: timed out",
        "n2: not reached at [fd00::2]:29500 (eth0) from n1: timed out",
    ]


def test_loopback_is_named_where_nothing_else_was_tried() -> None:
    assert _fault({"n1": (LO,), "n2": (LO,)}, lambda *_: "another machine answered")[1] == (
        "n2: not reached at 127.0.0.1:29500 (lo) from n1: another machine answered"
    )


def test_an_explicit_address_that_is_not_reached_is_not_replaced() -> None:
    lines = _fault({"n1": (LO, _eth(1)), "n2": (_ib(2),)}, _networks("10.0."))
    assert lines == ["n2: not reached at 10.1.0.2:29500 (ib0) from n1: timed out"]


def test_many_faults_stay_short() -> None:
    targets = {f"n{number}": (_eth(number), _ib(number)) for number in range(64)}
    lines = _fault(targets, lambda *_: "timed out")
    assert len(lines) == 11 and lines[-1] == "and 54 more nodes"
    assert lines[0] == (
        "n0: not reached at 10.0.0.0:29500 (eth0) from n1, n2, n3, n4 and 59 more: timed out; "
        "at 10.1.0.0:29500 (ib0) from n1, n2, n3, n4 and 59 more: timed out"
    )
