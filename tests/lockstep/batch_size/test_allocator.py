"""Where torch's caching allocator would place blocks; beside the allocator itself in tests/nullgpu/test_memory.py."""

import torch

from lockstep.batch_size.allocator import PlayedAllocator, Range, Stream, column_sum_bytes, workspace_bytes

MIB = 2**20


def test_a_block_goes_into_the_smallest_gap_and_to_the_end_last():
    addresses = Range(page=100)
    starts = [addresses.take(size) for size in (30, 10, 20, 10, 20)]
    assert starts == [0, 30, 40, 60, 70] and addresses.end == 100
    addresses.free(0)
    addresses.free(40)
    assert addresses.take(15) == 40  # of 20, where 30 are free too
    assert addresses.take(6) == 0 and addresses.take(5) == 55  # 30 and 5 are free: the smaller one
    assert addresses.take(25) == 90 and addresses.end == 200  # 24 and the last 10, which grow


def test_gaps_beside_each_other_become_one():
    addresses = Range(page=10)
    for start in [addresses.take(10) for _ in range(4)]:
        addresses.free(start)
    assert addresses.gaps == {0: 40} and addresses.take(40) == 0 and addresses.end == 40
    addresses.free(0)
    [first, second, third] = [addresses.take(10) for _ in range(3)]
    addresses.free(first)
    addresses.free(third)
    addresses.free(second)
    assert addresses.gaps == {0: 40} and addresses.taken == {}


def test_whole_pages_of_gaps_are_given_back_and_taken_again():
    addresses = Range(page=10)
    for size in (25, 5, 25):
        addresses.take(size)
    addresses.free(0)
    addresses.free(30)
    addresses.give_back()
    assert addresses.gaps == {20: 5} and addresses.reserved == 10 and addresses.end == 60
    assert addresses.take(4) == 20  # a page around it is there still
    assert addresses.take(14) == 0 and addresses.reserved == 30 and addresses.gaps == {14: 6, 24: 1}
    assert addresses.take(28) == 30 and addresses.reserved == 60
    assert addresses.take(7) == 58 and addresses.end == 70  # 6 and 1 are too small


def test_a_gap_beside_pages_that_were_given_back_counts_with_them():
    addresses = Range(page=10)
    for size in (4, 16, 10, 5, 5):
        addresses.take(size)
    addresses.free(4)
    addresses.give_back()
    addresses.free(30)
    assert addresses.gaps == {4: 6, 30: 5}
    assert addresses.take(5) == 30
    addresses.free(30)
    assert addresses.take(6) == 4 and addresses.reserved == 30


def test_small_blocks_lie_apart_in_pages_of_their_own():
    stream = Stream()
    stream.take(1)
    assert (stream.small.end, stream.large.end) == (2 * MIB, 0)
    assert list(stream.small.taken.values()) == [512]
    stream.take(MIB)
    stream.take(MIB + 1)
    assert (stream.small.end, stream.large.end, stream.reserved) == (2 * MIB, 20 * MIB, 22 * MIB)
    assert list(stream.large.taken.values()) == [MIB + 512]


def test_what_cublas_has_goes_by_the_gpu():
    assert [workspace_bytes(capability) for capability in (7.5, 8.0, 9.0, 10.0)] == [8519680, 8519680, 2**25, 2**25]


def test_a_sum_of_columns_takes_memory_while_it_runs():
    assert column_sum_bytes(33280, 768) == 108 * MIB  # 288 parts × 768 columns × 32 × 4 floats
    assert column_sum_bytes(16, 64) == 0  # a block alone
    allocator = PlayedAllocator(workspace_bytes(8.0))
    with allocator:
        bias = torch.empty(33280, 768).sum([0])
        large = allocator.streams[torch.cpu.current_stream()].large
    assert bias.shape == (768,) and allocator.peaks()[""] < 100 * MIB and large.end == 220 * MIB
    assert large.taken == {}


def test_a_thread_takes_a_workspace_for_its_first_product():
    allocator, matrix = PlayedAllocator(workspace_bytes(9.0)), torch.empty(8, 8)
    with allocator:
        assert (matrix + matrix).shape == (8, 8) and allocator.now() // MIB == 0
        assert all((matrix @ matrix).shape == (8, 8) for _ in range(2))
        assert allocator.now() // MIB == 32
        with torch.no_grad():
            assert all((matrix @ matrix).shape == (8, 8) for _ in range(2))
        assert allocator.now() // MIB == 64


def test_what_was_given_back_was_reserved_all_the_same():
    allocator = PlayedAllocator(0)
    with allocator:
        first = torch.empty(90 * MIB, dtype=torch.uint8)
        del first
        allocator.give_back()
        kept = torch.empty(30 * MIB, dtype=torch.uint8)
        assert allocator.reserved() == {"": 100 * MIB}
        more = torch.empty(90 * MIB, dtype=torch.uint8)
    assert allocator.reserved() == {"": 120 * MIB} and kept.nbytes + more.nbytes == 120 * MIB


def test_what_is_freed_in_a_stream_is_not_given_to_another():
    allocator, other = PlayedAllocator(workspace_bytes(9.0)), torch.cpu.Stream()

    def reserved() -> tuple[int, int]:
        return allocator.reserved()[""] // MIB, allocator.streams[other].reserved // MIB

    with allocator:
        with torch.cpu.stream(other):
            own = torch.empty(30 * MIB, dtype=torch.uint8)
        assert reserved() == (40, 40) and allocator.now() == 30 * MIB
        del own
        kept = torch.empty(30 * MIB, dtype=torch.uint8)
        assert reserved() == (80, 40)
        kept.untyped_storage().resize_(0)
        again = torch.empty(30 * MIB, dtype=torch.uint8)
        assert reserved() == (80, 40) and again.nbytes == 30 * MIB
    assert allocator.peaks() == {"": 30 * MIB}
