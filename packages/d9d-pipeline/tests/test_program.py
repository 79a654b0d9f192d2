from d9d_pipeline import DualPipeV, ForwardOnly, Interleaved, OneForwardOneBackward, ZeroBubbleV, build


def test_text_has_one_line_per_rank() -> None:
    program = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=3)
    assert str(program) == "rank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2"
    assert str(build(ForwardOnly(2), num_ranks=1, num_microbatches=2)) == "rank 0: 0.F0 0.F1 1.F0 1.F1"
    assert " 2.F2+1.B0 " in str(build(DualPipeV(), num_ranks=2, num_microbatches=4))


def test_stages_of_returns_the_stages_of_a_rank() -> None:
    loop = build(Interleaved(2), num_ranks=3, num_microbatches=3)
    v = build(ZeroBubbleV(), num_ranks=3, num_microbatches=3)
    assert [loop.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert loop.trains
    assert not build(ForwardOnly(), num_ranks=3, num_microbatches=3).trains
