"""Hashes of tensors: any flipped bit changes them, nothing else does."""

import pytest
import torch

from lockstep.callbacks.tensor_hashes import COLUMNS, hash_of_each, hashes


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit of its bytes turned over."""
    copy = tensor.clone().contiguous()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (4 * COLUMNS + 3,)])
def test_every_flipped_bit_of_a_parameter_changes_its_hash_alone(shape, dtype):
    torch.manual_seed(0)
    tensor, beside = (torch.randn(shape) * 50).abs().to(dtype), torch.randn(6)
    before = hashes([beside, tensor])
    bits = tensor.numel() * tensor.element_size() * 8
    for bit in {0, 7, bits // 2, bits - 8, bits - 1, *torch.randint(bits, (8,)).tolist()}:
        after = hashes([beside, flipped(tensor, bit)])
        assert after[0] == before[0] and after[1] != before[1], bit
    assert torch.equal(hashes([beside, tensor.clone()]), before)


def test_the_signs_of_two_words_do_not_cancel():
    words = torch.arange(1.0, 9.0)
    for first, second in ((1, 3), (3, 5), (0, 2)):
        changed = words.clone()
        changed[[first, second]] *= -1
        assert hashes([changed]) != hashes([words])
    assert hashes([-words]) != hashes([words])


def test_a_step_up_beside_a_step_down_in_the_same_tensor_is_seen():
    """What rounding differs by: sums of the words alone would not see it."""
    tensor = torch.ones(4 * COLUMNS)
    bits = tensor.clone().view(torch.int32)
    bits[10] += 1
    bits[500] -= 1
    assert hashes([bits.view(torch.float32)]) != hashes([tensor])


def test_the_order_of_memory_does_not_count_and_the_order_of_values_does():
    image = torch.arange(2.0 * 3 * 4 * 4).view(2, 3, 4, 4)
    assert hashes([image.to(memory_format=torch.channels_last)]) == hashes([image])
    assert hashes([image.flip(0)]) != hashes([image])


def test_views_that_begin_between_words_have_the_hash_of_a_copy():
    tensor = torch.arange(100.0)
    assert hashes([tensor[1:]]) == hashes([tensor[1:].clone()])


def test_none_and_no_tensor_at_all():
    assert hashes([None, torch.ones(2), None]).tolist()[::2] == [0, 0] and hashes([]).shape == (0,)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 32, 32), (6, 3, 96, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_each_image_has_its_own_hash_wherever_it_stands(shape, dtype):
    torch.manual_seed(1)
    batch = (torch.rand(shape) * 200).to(dtype)
    before = hash_of_each(batch)
    assert before.shape == (6,) and len(set(before.tolist())) == 6
    assert torch.equal(hash_of_each(batch[2:5]), before[2:5])
    size = batch[0].numel() * batch.element_size() * 8
    for bit in (0, size - 1, size // 2):
        after = hash_of_each(torch.stack([*batch[:4], flipped(batch[4:5], bit)[0], batch[5]]))
        assert (after != before).nonzero().view(-1).tolist() == [4]


def test_the_hashes_of_today_are_those_of_tomorrow():
    """Files hold them: another way of computing them would need another version of the file."""
    assert hashes([torch.arange(10.0), torch.arange(3 * COLUMNS, dtype=torch.int32)]).tolist() == [
        8228547315860242432,
        -1294178805396767072,
    ]
    assert hash_of_each(torch.arange(6.0).view(2, 3)).tolist() == [-5624068222920687616, -3405114399719948288]
