"""Where the nodes meet: which addresses are worth a try, who tries them, and what the tries prove. Only decisions; start.py acts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface, ip_network
from typing import TypeAlias

from dtrain.errors import PreflightFailed
from dtrain.node.network import LOSES_LARGE, NO_ROUTE
from dtrain.node.wire import Address, Dialed, DialTarget, Listening, NodeFacts, Ports
from dtrain.plan import at_port
from dtrain.spec import ClusterSpec, Instance

Network: TypeAlias = IPv4Network | IPv6Network

_ALL_PAIRS = 32  # nodes; among more of them each dials the next ones and the first, so that the dials grow as the nodes do
_NEXT_ONES = 15
_MOST_FAULTS = 10
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Try:
    """One dial of the proof."""

    dialer: str
    node: str
    address: str
    port: int
    cause: str  # "" where the node answered


def ports_of(cluster: ClusterSpec) -> Ports:
    if cluster.ports == "auto":
        return Ports(0, 0)
    first, last = map(int, cluster.ports.split("-"))
    return Ports(first, last)


def candidates(cluster: ClusterSpec, facts: Mapping[str, NodeFacts]) -> dict[str, tuple[Address, ...]]:
    """The addresses of each node that are worth a try.

    Raises:
        PreflightFailed: a node has none.
    """
    is_one_machine = len(cluster.instances) == 1 or (cluster.network == "auto" and all(one.host is None for one in cluster.instances))
    found = {
        instance.name: _candidates(instance, cluster.network, is_one_machine, facts[instance.name].addresses)
        for instance in cluster.instances
    }
    faults = [f"{node}: no address in network {cluster.network}; {_has(facts[node])}" for node, addresses in found.items() if not addresses]
    if faults:
        raise _failed(faults, "set network: in the cluster file to a network or interface that all nodes share, or to auto", "no-address")
    return found


def _candidates(instance: Instance, network: str, is_one_machine: bool, addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    if instance.address is not None:
        wanted = ip_address(instance.address)
        unlisted = Address("", str(wanted), wanted.max_prefixlen, 0)  # whether the node can listen there decides
        return (next((address for address in addresses if ip_address(address.address) == wanted), unlisted),)
    if is_one_machine and (loopback := tuple(filter(_is_loopback, addresses))):
        return loopback[:1]  # nothing listens to the network then
    if network == "auto":
        return addresses
    if "/" in network:
        inside = ip_network(network, strict=False)
        return tuple(address for address in addresses if ip_address(address.address) in inside)
    return tuple(address for address in addresses if address.interface == network)


def listened_on(
    wanted: Mapping[str, tuple[Address, ...]], listening: Mapping[str, Listening], facts: Mapping[str, NodeFacts]
) -> dict[str, tuple[Address, ...]]:
    """The candidates that the nodes do listen on.

    Raises:
        PreflightFailed: a node listens on none of them.
    """
    open_ = {node: tuple(address for address in some if address.address not in listening[node].failed) for node, some in wanted.items()}
    faults = [
        f"{node}: cannot listen on {address}: {cause}; {_has(facts[node])}"
        for node in wanted
        if not open_[node]
        for address, cause in listening[node].failed.items()
    ]
    if faults:
        raise _failed(
            faults,
            "set address: in the cluster file to an address that the node itself has, not one before a NAT, or leave it out",
            "no-address",
        )
    return open_


def dials(targets: Mapping[str, tuple[Address, ...]], ports: Mapping[str, int]) -> dict[str, tuple[DialTarget, ...]]:
    """What each node dials: all candidates of the nodes after it and of the first node; the first node those of all."""
    nodes = tuple(targets)
    return {
        dialer: tuple(DialTarget(node, address.address, ports[node]) for node in _dialed_by(index, nodes) for address in targets[node])
        for index, dialer in enumerate(nodes)
    }


def _dialed_by(index: int, nodes: Sequence[str]) -> list[str]:
    if index == 0:
        return list(nodes[1:])
    num_dialed = len(nodes) - 1 if len(nodes) <= _ALL_PAIRS else _NEXT_ONES
    next_ones = [nodes[(index + step) % len(nodes)] for step in range(1, num_dialed + 1)]
    return next_ones if nodes[0] in next_ones else [nodes[0], *next_ones]


def tries(dialed: Mapping[str, tuple[DialTarget, ...]], replies: Mapping[str, Dialed], facts: Mapping[str, NodeFacts]) -> tuple[Try, ...]:
    return tuple(
        Try(dialer, target.node, target.address, target.port, _cause(cause, target, facts[dialer]))
        for dialer, reply in replies.items()
        for target, cause in zip(dialed[dialer], reply.causes, strict=True)
    )


def _cause(cause: str, target: DialTarget, dialer: NodeFacts) -> str:
    """Why a node has no route to another: it may have no address of that family at all."""
    if cause != NO_ROUTE:
        return cause
    wanted = ip_address(target.address)
    has = {ip_address(address.address).version for address in dialer.addresses if not _is_loopback(address)}
    if wanted.is_loopback or not has or wanted.version in has:
        return cause
    return f"no IPv{wanted.version} address to dial from"


def choose(targets: Mapping[str, tuple[Address, ...]], tried: Sequence[Try]) -> dict[str, Address]:
    """One address for each node, out of those at which everybody who tried reached it.

    Loopback if all nodes are one machine; else an address in the network that most nodes share, the faster one of two.

    Raises:
        PreflightFailed: there is none for a node.
    """
    unreached = {(one.node, one.address) for one in tried if one.cause}
    proved = {node: [address for address in some if (node, address.address) not in unreached] for node, some in targets.items()}
    if not all(proved.values()):
        raise _not_reached(targets, tried)
    at_home = {node: [address for address in some if _is_loopback(address)] for node, some in proved.items()}
    if all(at_home.values()):
        return {node: some[0] for node, some in at_home.items()}
    usable = {node: [address for address in some if not _is_loopback(address)] or some for node, some in proved.items()}
    ranks = _ranks(usable)
    return {node: min(some, key=lambda address: ranks[_network(address)]) for node, some in usable.items()}


def _ranks(usable: Mapping[str, Sequence[Address]]) -> dict[Network, tuple[int, int, int, int]]:
    """The best network has the lowest rank, which is the same for all nodes, so that they agree on one where one exists."""
    nodes: dict[Network, set[str]] = {}
    speeds: dict[Network, list[int]] = {}
    for node, some in usable.items():
        for address in some:
            nodes.setdefault(_network(address), set()).add(node)
            speeds.setdefault(_network(address), []).append(address.speed_mbit)
    return {network: (-len(nodes[network]), -min(speeds[network]), network.version, position) for position, network in enumerate(nodes)}


def _network(address: Address) -> Network:
    return ip_interface(f"{address.address}/{address.prefix_length}").network


def _is_loopback(address: Address) -> bool:
    return ip_address(address.address).is_loopback


# ---- what went wrong ----


def _not_reached(targets: Mapping[str, tuple[Address, ...]], tried: Sequence[Try]) -> PreflightFailed:
    interfaces = {(node, address.address): address.interface for node, some in targets.items() for address in some}
    cut_off = _cut_off(tried)
    faults = []
    for dialer in cut_off:
        texts = [f"{one.node} at {_where(one, interfaces)}: {one.cause}" for one in _telling(tried) if one.dialer == dialer]
        faults.append(f"{dialer}: reaches no other node: {_some(texts, '; ')}")
    for node, some in targets.items():
        failed = [one for one in tried if one.node == node and one.cause and one.dialer not in cut_off]
        if {one.address for one in failed}.issuperset(address.address for address in some):
            dialers: dict[tuple[str, str], list[str]] = {}
            for one in _telling(failed):
                dialers.setdefault((_where(one, interfaces), one.cause), []).append(one.dialer)
            texts = [f"at {where} from {_some(names)}: {cause}" for (where, cause), names in dialers.items()]
            faults.append(f"{node}: not reached {_some(texts, '; ')}")
    if any(one.cause == LOSES_LARGE for one in tried):
        return _failed(faults, "give all links between the nodes one MTU, or let the ICMP of their routers through", "packets-lost")
    return _failed(
        faults,
        "let TCP through between the nodes (ports: in the cluster file keeps to the ports that a firewall leaves open), "
        "or choose other addresses with network: or address:",
        "rendezvous-blocked",
    )


def _cut_off(tried: Sequence[Try]) -> list[str]:
    """Nodes that reach nobody where others do: the fault is theirs, not that of all they dialled."""
    reached = {(one.dialer, one.node) for one in tried if not one.cause}
    dialed: dict[str, set[str]] = {}
    for one in tried:
        dialed.setdefault(one.dialer, set()).add(one.node)
    reached_by = {node: {dialer for dialer, other in reached if other == node} for _, node in reached}
    return [
        dialer
        for dialer, nodes in dialed.items()
        if not any((dialer, node) in reached for node in nodes) and all(reached_by.get(node) for node in nodes)
    ]


def _telling(tried: Iterable[Try]) -> list[Try]:
    """The failed ones that say why: those of loopback only where nothing else failed, and alone those that nearly went well."""
    failed = [one for one in tried if one.cause]
    large = [one for one in failed if one.cause == LOSES_LARGE]
    return large or [one for one in failed if not ip_address(one.address).is_loopback] or failed


def _where(one: Try, interfaces: Mapping[tuple[str, str], str]) -> str:
    interface = interfaces[one.node, one.address]
    where = at_port(one.address, one.port)
    return f"{where} ({interface})" if interface else where


def _has(facts: NodeFacts) -> str:
    return f"it has {_some([f'{address.address} ({address.interface})' for address in facts.addresses])}"


def _some(texts: Sequence[str], between: str = ", ") -> str:
    shown = between.join(texts[:_MOST_NAMES])
    return shown if len(texts) <= _MOST_NAMES else f"{shown} and {len(texts) - _MOST_NAMES} more"


def _failed(faults: Sequence[str], hint: str, finding: str) -> PreflightFailed:
    more = [f"and {len(faults) - _MOST_FAULTS} more nodes"] if len(faults) > _MOST_FAULTS else []
    return PreflightFailed("\n".join([*faults[:_MOST_FAULTS], *more]), hint=hint, finding=finding)
