"""Times of collectives against the equations of one tier, and the choice of the faster algorithm."""

import pytest

from d9d_loop.planning import Hardware, hardware_names
from d9d_loop.planning.collective_time import CollectiveName, Span, collective_seconds, link_share
from d9d_loop.planning.hardware_spec import Network, NodeLinks


@pytest.fixture
def hardware() -> Hardware:
    return Hardware.load("h100-dgx")


def test_all_reduce_in_a_node_is_two_rings(hardware: Hardware) -> None:
    """Members pass on one chunk a step, until each has the sum of one chunk, and then of all (counted step by step)."""
    rate = hardware.links.bandwidth * hardware.fitted.link_efficiency
    chunks = [[{(member, chunk)} for chunk in range(8)] for member in range(8)]
    seconds = 0.0
    for step in range(14):
        sent = [(member, (member - step) % 8) for member in range(8)]
        received = [((member + 1) % 8, chunk, set(chunks[member][chunk])) for member, chunk in sent]
        for member, chunk, parts in received:
            chunks[member][chunk] |= parts
        seconds += 1e9 / 8 / rate + hardware.links.latency
    assert all(len(parts) == 8 for member in chunks for parts in member)
    assert collective_seconds(hardware, "all_reduce", 1e9, Span(8, 8)) == pytest.approx(seconds, rel=1e-12)


def test_all_gather_takes_half_of_an_all_reduce(hardware: Hardware) -> None:
    whole = collective_seconds(hardware, "all_reduce", 1e9, Span(8, 8))
    assert 2 * collective_seconds(hardware, "all_gather", 1e9, Span(8, 8)) == pytest.approx(whole, rel=1e-12)


def test_more_members_per_node_use_more_network_adapters(hardware: Hardware) -> None:
    alone = collective_seconds(hardware, "reduce_scatter", 1e9, Span(16, 1))
    together = collective_seconds(hardware, "reduce_scatter", 1e9, Span(16, 8))
    assert together < alone / 3


def test_links_are_busy_for_the_share_of_their_rate_that_the_network_allows(hardware: Hardware) -> None:
    """8 adapters of 50 GB/s limit links of 450 GB/s to 8/9 of their rate, 4 to 4/9."""
    whole = {"link_efficiency": 0.5, "network_efficiency": 0.5}
    same = hardware.model_copy(update={"fitted": hardware.fitted.model_copy(update=whole)})
    spans = {Span(8, 8): 1.0, Span(16, 1): 0.0, Span(16, 8): 8 / 9, Span(64, 4): 4 / 9}
    assert [link_share(same, span) for span in spans] == pytest.approx(list(spans.values()))


def test_small_all_reduces_over_many_nodes_use_a_tree(hardware: Hardware) -> None:
    seconds = collective_seconds(hardware, "all_reduce", 1e3, Span(4096, 1))
    assert seconds < 30 * hardware.network.latency


@pytest.mark.parametrize("cluster", hardware_names())
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_collectives_over_two_nodes_take_at_least_as_long_as_in_one(cluster: str, name: CollectiveName) -> None:
    each = Hardware.load(cluster)
    node = each.devices_per_node
    for num_bytes in (1e3, 1e6, 1e9):
        one, two = (collective_seconds(each, name, num_bytes, Span(size, node)) for size in (node, 2 * node))
        assert two >= one


@pytest.mark.parametrize("cluster", hardware_names())
def test_an_all_reduce_is_at_least_a_scatter_and_a_gather_of_the_links(cluster: str) -> None:
    """The links of a node send and receive nearly the whole buffer, whichever algorithm is chosen."""
    each = Hardware.load(cluster)
    node, rate = each.devices_per_node, each.links.bandwidth * each.fitted.link_efficiency
    for num_nodes in (1, 2, 64):
        seconds = collective_seconds(each, "all_reduce", 1e9, Span(num_nodes * node, node))
        assert seconds >= 2 * (node - 1) / node * 1e9 / rate


def test_skew_slows_an_all_to_all_down(hardware: Hardware) -> None:
    even = collective_seconds(hardware, "all_to_all", 1e9, Span(8, 8))
    assert collective_seconds(hardware, "all_to_all", 1e9, Span(8, 8), skew=2.0) == pytest.approx(2 * even, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "stride", "expected"), [(8, 1, 8), (4, 8, 1), (16, 1, 8), (4, 4, 2), (2, 2, 2), (1, 1, 1)]
)
def test_span_counts_members_in_a_node(size: int, stride: int, expected: int) -> None:
    assert Span.of(size, stride, 8).per_node == expected


@pytest.fixture
def small(hardware: Hardware) -> Hardware:
    """Nodes of 4 devices. In a node: 40 bytes/s, 1 s. Between nodes: 20 bytes/s for a device, 100 s; 5 by the spine."""
    return hardware.model_copy(
        update={
            "devices_per_node": 4,
            "links": NodeLinks(bandwidth=80, latency=1),
            "network": Network(bandwidth=80, latency=100, oversubscription=4, rail_nodes=8),
            "fitted": hardware.fitted.model_copy(update={"link_efficiency": 0.5, "network_efficiency": 0.25}),
        }
    )


@pytest.mark.parametrize(
    ("name", "num_bytes", "span", "seconds"),
    [
        ("send", 400, Span(2, 2), 1 + 10),
        ("send", 400, Span(2, 1), 100 + 20),
        ("all_to_all", 800, Span(8, 4), 800 / 2 / 20 + (3 + 100) / 4),
        ("all_gather", 1600, Span(8, 4), 1400 / 40 + 100 + 6),  # a ring
        ("all_gather", 80, Span(8, 4), 60 / 40 + 40 / 80 + 3 + 100),  # first in nodes, then between them
        ("all_gather", 80, Span(32, 4), 60 / 40 + 70 / 80 + 3 + 700),  # there are no trees of gathers
        ("all_reduce", 80, Span(32, 4), 2 * (80 / 40 + 3 * 100 + 3)),  # a tree of 8 nodes
        ("all_gather", 8000, Span(64, 4), 7875 / 20 + 1500 + 48),  # 16 nodes use the spine
        ("all_gather", 0, Span(8, 4), 0),
        ("all_reduce", 80, Span(1, 1), 0),
    ],
)
def test_times_of_small_numbers(
    name: CollectiveName, num_bytes: float, span: Span, seconds: float, small: Hardware
) -> None:
    assert collective_seconds(small, name, num_bytes, span) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "all_to_all", "send"])
def test_without_a_switch_two_of_four_devices_have_a_third_of_the_links(name: CollectiveName, small: Hardware) -> None:
    """Each pair of a node of 4 has links of 40 / 3 bytes/s; all 4 use all links, and latencies are the same."""
    direct = small.model_copy(update={"links": small.links.model_copy(update={"switched": False})})
    whole, zero = (collective_seconds(small, name, num_bytes, Span(2, 2)) for num_bytes in (800, 1e-9))
    assert collective_seconds(direct, name, 800, Span(2, 2)) - zero == pytest.approx(3 * (whole - zero))
    if name != "send":
        assert collective_seconds(direct, name, 800, Span(4, 4)) == collective_seconds(small, name, 800, Span(4, 4))
    assert collective_seconds(direct, name, 800, Span(2, 1)) == collective_seconds(small, name, 800, Span(2, 1))


def test_rows_for_several_ranks_of_a_node_cross_the_network_once(small: Hardware) -> None:
    """80 bytes cross the network in 2 s, while 300 of 800 bytes stay in the node for 7.5 s."""
    seconds = collective_seconds(small, "all_to_all", 800, Span(8, 4), skew=2.0, network_bytes=80)
    assert seconds == pytest.approx(2 * 7.5 + (3 + 100) / 4)


def test_a_partly_used_node_counts() -> None:
    assert Span(12, 8).num_nodes == 2
