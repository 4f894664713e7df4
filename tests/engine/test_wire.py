"""The wire: nested values as bytes and back, to the bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect.engine import wire
from idiolect.tree import Tree

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    value = torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=random).to(dtype)
    return value.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else value


values = st.recursive(
    tensors() | st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
        | st.dictionaries(st.text("ab.", max_size=3), tensors(), max_size=3).map(Tree)
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Tree):
        return isinstance(b, Tree) and list(a) == list(b) and a.equals(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    return a == b


@given(values)
def test_an_arena_gives_back_what_it_was_filled_with(value):
    arena = wire.Arena(size=1)
    packed = arena.fill(value)
    assert same(value, wire.unpack(packed, arena.get))
    assert arena.used <= wire.room(value) <= len(arena.buffer)


@given(values, values)
def test_an_arena_is_filled_again_from_its_start(first, second):
    arena = wire.Arena()
    arena.fill(first)
    arena.grown = False
    packed = arena.fill(second)
    assert same(second, wire.unpack(packed, arena.get))
    assert not arena.grown  # 64 KiB hold either


def test_a_larger_value_grows_the_arena_once():
    arena = wire.Arena(64)
    arena.grown = False
    arena.fill(torch.ones(1000))
    assert arena.grown
    arena.grown = False
    arena.fill(torch.ones(1500))  # the new buffer has room to spare
    assert not arena.grown


def test_a_tensor_that_stands_twice_is_written_once():
    weights = torch.ones(256)
    arena = wire.Arena()
    packed = arena.fill({"a": weights, "b": Tree({"x": weights}), "c": weights.view(16, 16)})
    assert arena.used == 2 * 1024  # as [256] and as [16, 16]
    assert same({"a": weights, "b": Tree({"x": weights}), "c": weights.view(16, 16)}, wire.unpack(packed, arena.get))
    assert wire.nbytes([weights, weights.detach(), {"x": weights}]) == 1024
    assert wire.nbytes([weights, weights.clone()]) == 2048


def test_bits_survive():
    odd = torch.tensor([math.nan, -0.0, math.inf, 5e-324], dtype=torch.float64)
    arena = wire.Arena()
    (back,) = wire.unpack(arena.fill([odd]), arena.get)
    assert torch.equal(back.view(torch.int64), odd.view(torch.int64))


def test_entries_begin_where_wide_types_may():
    arena = wire.Arena()
    packed = arena.fill([torch.ones(3, dtype=torch.uint8), torch.ones(5, dtype=torch.float64), torch.ones(1)])
    assert [entry[1][0] % wire.ALIGNED for entry in packed[1]] == [0, 0, 0]


def test_channels_last_arrives_contiguous_with_the_same_numbers():
    image = torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last)
    arena = wire.Arena()
    (back,) = wire.unpack(arena.fill([image]), arena.get)
    assert back.is_contiguous()
    assert torch.equal(back, image)


def test_what_needs_gradients_arrives_without():
    arena = wire.Arena()
    (back,) = wire.unpack(arena.fill([torch.ones(2, requires_grad=True)]), arena.get)
    assert not back.requires_grad


EXAMPLE = {
    "model": Tree({"w": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.float64)}),
    "flag": torch.zeros((), dtype=torch.uint8),
}


def filled(number):
    return {
        "model": Tree({"w": torch.full((3, 2), number), "b": torch.full((2,), number, dtype=torch.float64)}),
        "flag": torch.tensor(int(number), dtype=torch.uint8),
    }


def test_records_lie_side_by_side():
    layout = wire.Layout(EXAMPLE)
    buffer = wire.shared_bytes(3 * layout.size)
    for record in (2, 0, 1):
        layout.write(buffer, record * layout.size, filled(record + 1.0))
    for record in range(3):
        assert same(filled(record + 1.0), layout.read(buffer, record * layout.size))


def test_a_record_may_be_written_from_its_own_views():
    """A method that keeps the old model beside the new one hands back a view of what is about to be overwritten."""
    layout = wire.Layout({"new": torch.zeros(4), "old": torch.zeros(4)})
    buffer = wire.shared_bytes(layout.size)
    layout.write(buffer, 0, {"new": torch.ones(4), "old": torch.zeros(4)})
    mine = layout.read(buffer, 0)
    layout.write(buffer, 0, {"new": mine["old"], "old": mine["new"]})
    assert same({"new": torch.zeros(4), "old": torch.ones(4)}, layout.read(buffer, 0))


@given(values)
def test_a_layout_gives_back_what_was_written(value):
    layout = wire.Layout(value)
    buffer = wire.shared_bytes(layout.size)
    layout.write(buffer, 0, value)
    assert same(value, layout.read(buffer, 0))


def test_a_record_of_other_entries_is_refused():
    layout = wire.Layout({"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(ValueError):
        layout.write(wire.shared_bytes(layout.size), 0, {"a": torch.zeros(2)})
