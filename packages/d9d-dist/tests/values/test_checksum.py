import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist.values.checksum import checksum


@given(st.binary(min_size=1, max_size=70), st.integers(0, 8 * 70 - 1))
def test_a_checksum_depends_on_every_bit(data: bytes, bit: int) -> None:
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data) // 8 * 8, 8)]
    rest = int.from_bytes(data[len(words) * 8 :], "little")
    expected = sum((2 * (index + 1) + 1) * word for index, word in enumerate(words)) + rest
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert int(checksum(tensor)) % 2**64 == expected % 2**64
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    assert int(checksum(torch.frombuffer(changed, dtype=torch.uint8))) != int(checksum(tensor))


def test_a_checksum_supports_any_dtype_and_layout() -> None:
    for tensor in (torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(()), torch.randn(6, 4).t(), torch.empty(0)):
        assert checksum(tensor).shape == ()
        assert torch.equal(checksum(tensor), checksum(tensor.contiguous()))


def test_a_checksum_depends_on_the_order() -> None:
    values = torch.arange(8.0).to(torch.complex64)
    assert int(checksum(values)) != int(checksum(values.flip(0)))
