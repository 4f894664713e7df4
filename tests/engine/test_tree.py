"""`Tree`: arithmetic name by name, merging, picking, and errors that say which side lacks what."""

import math
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from idiolect.tree import Multiple, Tree, gram, stack, unstack

NAMES = ("a", "b.weight", "b.bias", "c")
names = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
numbers = st.integers(-8, 8).map(float)


@st.composite
def trees(draw, names=names):
    chosen = draw(names)
    return Tree({k: torch.tensor(draw(st.lists(numbers, min_size=2, max_size=2))).double() for k in chosen})


@st.composite
def pairs(draw):
    """Two Trees of the same names, in whatever orders."""
    left = draw(trees())
    right = draw(trees(names=st.permutations(list(left))))
    return left, right


OPERATORS = (operator.add, operator.sub, operator.mul)


@given(pairs(), st.sampled_from(OPERATORS))
def test_operators_work_name_by_name(pair, op):
    left, right = pair
    result = op(left, right)
    assert list(result) == list(left)
    assert all(torch.equal(result[k], op(left[k], right[k])) for k in left)


@given(trees(), numbers, st.sampled_from(OPERATORS))
def test_operators_take_numbers_and_tensors_on_either_side(tree, number, op):
    for other in (number, torch.tensor(number).double()):
        assert all(torch.equal(v, op(tree[k], number)) for k, v in op(tree, other).items())
    assert all(torch.equal(v, op(number, tree[k])) for k, v in op(number, tree).items())


USES = {
    "t + m": lambda t, m: t + m,
    "m + t": lambda t, m: m + t,
    "t - m": lambda t, m: t - m,
    "m - t": lambda t, m: m - t,
    "m + m": lambda t, m: m + m,
    "m - m": lambda t, m: m - m,
    "2 m": lambda t, m: 2 * m,
    "t + 2 m": lambda t, m: t + 2 * m,
    "t m": lambda t, m: t * m,
    "-m": lambda t, m: -m,
    "m | t": lambda t, m: m | t.pick(list(t)[:1]),
}


@given(pairs(), numbers, st.sampled_from(list(USES)))
def test_a_multiple_is_what_it_comes_to(pair, number, use):
    left, right = pair
    plain = right.map(lambda v: v * number)
    for factor in (number, torch.tensor(number).double(), torch.tensor([number]).double()):
        assert isinstance(number * right, Multiple)
        found, expected = USES[use](left, factor * right), USES[use](left, plain)
        assert type(found) is Tree or use == "2 m"
        assert found.equals(expected)


def test_a_multiple_and_what_it_is_added_to_are_one_operation():
    class Counted(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    w, g = (Tree({"a": torch.randn(3), "b": torch.randn(2)}) for _ in range(2))
    with Counted() as counted:
        assert len(w - 0.1 * g) == 2
    assert counted.seen == 2  # one for each entry
    assert (pickle.loads(pickle.dumps(2 * w))).equals(w + w)


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)])
def test_a_multiple_of_whole_numbers_is_promoted(number):
    w = Tree({"a": torch.tensor([1, 2])})
    assert torch.equal((w + number * w)["a"], torch.tensor([1.5, 3.0]))
    assert torch.equal((w.to(torch.float64) + number * w)["a"], torch.tensor([1.5, 3.0]).double())


def test_a_multiple_keeps_the_graph_that_it_was_made_in():
    w = Tree({"a": torch.tensor([1.0, 2.0], requires_grad=True)})
    with torch.enable_grad():
        double = 2 * w
    with torch.no_grad():
        found = double["a"]
    assert torch.equal(torch.autograd.grad((w + double)["a"].sum() + found.sum(), w["a"])[0], torch.tensor([5.0, 5.0]))
    derived = torch.func.grad(lambda v: (v + 3 * v)["a"].sum())(w.detach())
    assert torch.equal(derived["a"], torch.tensor([4.0, 4.0]))
    rows = torch.func.vmap(lambda v: v - 3 * v)(w.detach())
    assert torch.equal(rows["a"], torch.tensor([-2.0, -4.0]))


@given(pairs())
def test_arithmetic_keeps_its_laws(pair):
    left, right = pair
    assert (left + right - right).equals(left)
    assert (left + right).equals(Tree({k: (right + left)[k] for k in left}))
    assert (-left).equals(left * -1.0)
    assert (left - left).equals(left.zeros())
    assert (left * left.ones()).equals(left)
    assert left.sq().equals(left * left)
    assert (left / 4.0 * 4.0).equals(left)


@given(pairs())
def test_dot_norm_and_flat_are_of_all_entries(pair):
    left, right = pair
    right = Tree({k: right[k] for k in left})
    assert float(left.dot(right)) == float(left.flat() @ right.flat())
    assert float(left.norm()) == pytest.approx(float(left.flat().norm()), rel=1e-15)
    assert left.size == len(left.flat())
    assert left.nbytes == 8 * left.size


@given(pairs())
def test_lerp_is_exact_at_both_ends(pair):
    left, right = pair[0] / 3.0, pair[1] / 7.0
    assert left.lerp(right, 0.0).equals(left)
    assert left.lerp(right, 1.0).equals(Tree({k: right[k] for k in left}))
    mix = left.zeros() + 0.25
    between = left.lerp(right, mix)
    assert all(torch.allclose(between[k], 0.75 * left[k] + 0.25 * right[k], rtol=1e-14) for k in left)


@given(trees(), trees())
def test_or_merges_and_the_right_side_wins(left, right):
    merged = left | right
    assert set(merged) == set(left) | set(right)
    assert list(merged)[: len(left)] == list(left)
    assert all(merged[k] is (right[k] if k in right else left[k]) for k in merged)


@given(trees(), trees())
def test_pick_and_drop_divide_a_tree(tree, other):
    shared = [k for k in tree if k in other]
    picked, dropped = tree.pick(shared), tree.drop(other)
    assert list(picked) == shared
    assert set(picked) | set(dropped) == set(tree)
    assert not set(picked) & set(dropped)
    assert (dropped | picked).keys() == tree.keys()


def test_pick_keeps_the_order_of_its_names_and_takes_a_tree():
    tree = Tree({k: torch.ones(1) for k in NAMES})
    assert list(tree.pick(["c", "a"])) == ["c", "a"]
    assert list(tree.pick(Tree({"b.bias": torch.zeros(1)}))) == ["b.bias"]


def test_under_and_prefixed_undo_each_other():
    tree = Tree({k: torch.full((1,), float(i)) for i, k in enumerate(NAMES)})
    assert tree.under("b").equals(Tree({"weight": tree["b.weight"], "bias": tree["b.bias"]}))
    assert tree.prefixed("part").under("part").equals(tree)
    assert not tree.under("a")  # below, not beginning with


def test_nothing_changes_a_tree_in_place():
    tree = Tree({"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    before = tree.clone()
    for _ in (
        tree + tree,
        tree * 3.0,
        -tree,
        tree.sq(),
        tree.clamp(0, 1),
        tree | {"a": torch.zeros(2)},
        tree.drop("a"),
    ):
        assert tree.equals(before)
    with pytest.raises(TypeError):
        tree["a"] = torch.zeros(2)  # type: ignore[index]
    with pytest.raises(AttributeError):
        tree.other = 1  # type: ignore[attr-defined]


def test_a_clone_shares_no_memory_and_is_contiguous():
    tree = Tree({"a": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()})
    copy = tree.clone()
    assert copy["a"].data_ptr() != tree["a"].data_ptr()
    assert copy["a"].is_contiguous()
    assert not copy["a"].requires_grad
    assert not tree.detach()["a"].requires_grad


def test_different_names_say_which_side_lacks_what():
    left, right = Tree({"a": torch.ones(1), "b": torch.ones(1)}), Tree({"b": torch.ones(1), "c": torch.ones(1)})
    with pytest.raises(KeyError, match="the left side lacks c; the right side lacks a") as error:
        left + right
    assert "Use pick()" in str(error.value)
    with pytest.raises(KeyError, match="the right side lacks a") as error:
        left - left.pick(["b"])
    assert "the left side" not in str(error.value)
    with pytest.raises(KeyError, match="no entry z; the Tree has a, b"):
        left.pick(["a", "z"])


def test_equals_means_names_shapes_dtypes_and_bits():
    tree = Tree({"a": torch.tensor([1.0, math.inf])})
    assert tree.equals(tree.clone())
    for other in (
        Tree({"b": tree["a"]}),
        Tree({"a": tree["a"].double()}),
        Tree({"a": tree["a"][None]}),
        Tree({"a": tree["a"] + torch.tensor([1e-7, 0])}),
    ):
        assert not tree.equals(other)


@given(st.lists(trees(names=st.just(list(NAMES))), min_size=1, max_size=4))
def test_stack_and_unstack_undo_each_other(many):
    stacked = stack(many)
    assert all(v.shape == (len(many), 2) for v in stacked.values())
    assert all(a.equals(b) for a, b in zip(unstack(stacked), many, strict=True))


def test_vmap_and_grad_look_through_a_tree():
    tree = Tree({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})
    leaves, structure = pytree.tree_flatten({"x": tree})
    assert len(leaves) == 2
    assert pytree.tree_unflatten(leaves, structure)["x"].equals(tree)
    gradient = torch.func.grad(lambda w: (w.sq() * 0.5).flat().sum())(tree)
    assert gradient.equals(tree)
    assert torch.equal(torch.vmap(lambda w: w.dot(w))(tree), torch.tensor([10.0, 20.0]))


def test_repr_shows_names_and_shapes_and_no_numbers():
    assert repr(Tree({"head.weight": torch.zeros(3, 2), "c": torch.zeros(())})) == "Tree(head.weight[3, 2], c[])"


@pytest.mark.parametrize(("rows", "size", "block"), [(3, 17, 12), (5, 8, 5), (2, 6, 1), (1, 4, 100), (4, 12, 48)])
def test_a_gram_matrix_is_that_of_the_whole_and_holds_a_block_at_a_time(rows, size, block, monkeypatch):
    monkeypatch.setattr("idiolect.tree.BLOCK", block)
    x = torch.randn(rows, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    asked = []

    def part(chosen):
        asked.append(x[:, chosen])
        return asked[-1]

    torch.testing.assert_close(gram(rows, size, part), x @ x.T, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat(asked, dim=1), x)
    assert max(t.numel() for t in asked) <= max(block, rows)
