"""Time of a collective: latency and bandwidth (alpha-beta) on each tier of the network, in s.

The group has n = g x q ranks: g in each of q nodes. S: bytes of the whole buffer on one rank.
a, B: latency and effective bandwidth of the links in a node; A, C: of the network, for one device.

    ring:          t = c (n - 1)/n S / min(B, g C) + c (g - 1) q a + c (q - 1) A
    tree:          t = 2 S / min(B, g C) + 2 (g - 1) a + 2 log2(q) A             (all-reduce over several nodes)
    hierarchical:  t = c (g - 1)/g S / B + c (q - 1)/q S / (g C) + c (g - 1) a + c (q - 1) A

with c = 1 for all-gather and reduce-scatter and c = 2 for all-reduce. A group's g members in a node use g network
adapters. Within one node, the ring is limited only by B, or by (g - 1)/(d - 1) B if the d devices of a node have no
switch, but links for each pair. The ranks of a tree form a chain in each node, so the links in
a node also carry the buffer up and down. The library is assumed to choose the faster algorithm (NCCL's tuning does). If
the group spans more nodes than a rail, C is divided by the oversubscription of the spine. Thakur, Rabenseifner and
Gropp 2005, https://doi.org/10.1177/1094342005051521; trees: Sanders, Speck and Traeff 2009,
https://doi.org/10.1016/j.parco.2009.09.001.

    all-to-all:    t = s max((g - 1)/n S / B, (n - g)/n S' / C) + ((g - 1) a + (q - 1) A) / 4

S': bytes for other nodes; less than S if a row for several ranks of a node crosses the network only once. s >= 1:
routing skew, the ratio of the rows that the busiest rank receives to the mean. The sends to other ranks are
independent; about four run at once.

    send:          t = a + S / B within a node, A + S / C between nodes
"""

from dataclasses import dataclass
from math import log2
from typing import Literal

from d9d_loop.planning.hardware_spec import Hardware

CONCURRENT_SENDS = 4
"""Sends of an all-to-all whose latencies overlap."""

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Span:
    """Distribution of a process group over nodes.

    Attributes:
        size: Number of ranks.
        per_node: Number of the group's ranks in one node.
    """

    size: int
    per_node: int

    @classmethod
    def of(cls, size: int, stride: int, devices_per_node: int) -> "Span":
        """Return the span of `size` ranks whose global ranks are `stride` apart."""
        return cls(size, max(1, min(size, devices_per_node // stride)) if stride < devices_per_node else 1)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.size // self.per_node)


def collective_seconds(
    hardware: Hardware,
    name: CollectiveName,
    num_bytes: float,
    span: Span,
    *,
    skew: float = 1.0,
    network_bytes: float | None = None,
) -> float:
    """Return the time of a collective of a group.

    Args:
        hardware: The cluster.
        name: Kind of the collective.
        num_bytes: Size of the larger buffer of one rank.
        span: Placement of the group.
        skew: Routing skew of an all-to-all: ratio of the rows that the busiest rank receives to the mean.
        network_bytes: Buffer size with one copy of a row per node, if an all-to-all sends each row to a node once; by
            default `num_bytes`.
    """
    size, inside, nodes = span.size, span.per_node, span.num_nodes
    if size == 1 or num_bytes == 0:
        return 0.0
    link, network = link_bandwidth(hardware, inside), network_bandwidth(hardware, nodes)
    alpha, latency = hardware.links.latency, hardware.network.latency
    if name == "send":
        return alpha + num_bytes / link if nodes == 1 else latency + num_bytes / network
    if name == "all_to_all":
        remote = num_bytes if network_bytes is None else network_bytes
        within, across = (inside - 1) / size * num_bytes / link, (size - inside) / size * remote / network
        return skew * max(within, across) + ((inside - 1) * alpha + (nodes - 1) * latency) / CONCURRENT_SENDS
    passes = 2 if name == "all_reduce" else 1
    if nodes == 1:
        return passes * ((size - 1) / size * num_bytes / link + (size - 1) * alpha)
    ring = passes * ((size - 1) / size * num_bytes / min(link, inside * network) + (nodes - 1) * latency)
    ring += passes * (inside - 1) * nodes * alpha
    steps = passes * ((inside - 1) * alpha + (nodes - 1) * latency)
    shares = passes * ((inside - 1) / inside / link + (nodes - 1) / nodes / (inside * network))
    tree = 2 * (num_bytes / min(link, inside * network) + log2(nodes) * latency + (inside - 1) * alpha)
    return min(ring, steps + shares * num_bytes, *([tree] if name == "all_reduce" else []))


def link_share(hardware: Hardware, span: Span) -> float:
    """Return the share of the time of a ring in which the links of a node are busy."""
    if span.per_node == 1:
        return 0.0
    if span.num_nodes == 1:
        return 1.0
    link = link_bandwidth(hardware, span.per_node)
    return min(1.0, span.per_node * network_bandwidth(hardware, span.num_nodes) / link)


def link_bandwidth(hardware: Hardware, ranks: int) -> float:
    """Return the effective bytes/s of the links of a device to the other ranks of a group in its node."""
    links, others = hardware.links, hardware.devices_per_node - 1
    share = 1.0 if links.switched or others < 1 else max(ranks - 1, 1) / others
    return share * links.bandwidth * hardware.fitted.link_efficiency


def network_bandwidth(hardware: Hardware, num_nodes: int) -> float:
    """Return the effective bytes/s of a device between `num_nodes` nodes."""
    network = hardware.network
    through_spine = network.oversubscription if num_nodes > network.rail_nodes else 1.0
    return network.bandwidth * hardware.fitted.network_efficiency / through_spine
