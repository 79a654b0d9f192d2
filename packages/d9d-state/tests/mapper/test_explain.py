from d9d_state import concat, drop, identity, keep, parallel, rename, sequential, transpose


def test_explain_shows_every_tensor_once() -> None:
    mapper = parallel(
        sequential(concat(["q", "k"], "qk", sizes=[1, 2]), transpose("qk")),
        rename("a", "b"),
        identity("c"),
        drop("d"),
        keep("e"),
    )
    assert mapper.explain().splitlines() == [
        "5 tensors -> 4 tensors, 5 groups",
        "  q, k -> concat(dim=0, sizes=[1, 2]) -> (value 2)",
        "  (value 2) -> transpose(0, 1) -> qk",
        "  a -> b",
        "  c -> c",
        "  d -> (dropped)",
        "  (kept) -> e",
    ]
