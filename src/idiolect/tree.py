"""`Tree`: named tensors with arithmetic. The one container for weights, gradients, control variates, statistics."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Operand = "Tree | Tensor | float"
BLOCK = 1 << 22  # entries at a time where many vectors are compared


class Tree(Mapping[str, Tensor]):
    """Named tensors. `+ - * /` work name by name, with another Tree, a tensor or a number; `|` merges, the right side
    wins. A Tree is never changed in place: every operation gives a new one (its tensors may be shared)."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = ()) -> None:
        self._tensors: dict[str, Tensor] = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        return f"Tree({', '.join(f'{k}{list(v.shape)}' for k, v in self.items())})"

    def items(self) -> ItemsView[str, Tensor]:  # dict's own views are faster than Mapping's
        return self._tensors.items()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    # arithmetic

    def _added(self, other: Any, sign: int) -> Tree:
        if isinstance(other, Multiple) and (found := other.added(self, sign)) is not None:
            return found
        return self._with(other, torch.add if sign > 0 else torch.sub)

    def _times(self, other: Any) -> Tree:
        plain = isinstance(other, int | float) or (isinstance(other, Tensor) and other.numel() == 1)
        if plain and not _traced(self):
            return Multiple(self, other)
        return self._with(other, torch.mul)

    def _with(self, other: Any, op: Callable[[Any, Any], Tensor]) -> Tree:
        if not isinstance(other, Tree):
            return Tree({k: op(v, other) for k, v in self._tensors.items()})
        if self._tensors.keys() != other._tensors.keys():
            raise KeyError(_difference(self, other))
        return Tree({k: op(v, other._tensors[k]) for k, v in self._tensors.items()})

    def __add__(self, other: Any) -> Tree:
        return self._added(other, 1)

    def __sub__(self, other: Any) -> Tree:
        return self._added(other, -1)

    def __mul__(self, other: Any) -> Tree:
        return self._times(other)

    def __truediv__(self, other: Any) -> Tree:
        return self._with(other, torch.div)

    def __radd__(self, other: Any) -> Tree:
        return self._with(other, torch.add)

    def __rsub__(self, other: Any) -> Tree:
        return self._with(other, lambda a, b: b - a)

    def __rmul__(self, other: Any) -> Tree:
        return self._times(other)

    def __neg__(self) -> Tree:
        return self.map(torch.neg)

    def __or__(self, other: Mapping[str, Tensor]) -> Tree:
        return Tree({**self._tensors, **other})

    # selection

    def pick(self, names: Iterable[str]) -> Tree:
        """The entries of these names (another Tree serves as its own list of names)."""
        try:
            return Tree({k: self._tensors[k] for k in names})
        except KeyError:
            lacking = [k for k in names if k not in self._tensors]
            raise KeyError(
                f"pick: no entry {', '.join(lacking)}; the Tree has {', '.join(self) or 'nothing'}"
            ) from None

    def drop(self, names: Iterable[str]) -> Tree:
        """All entries but these."""
        out = set(names)
        return Tree({k: v for k, v in self._tensors.items() if k not in out})

    def under(self, prefix: str) -> Tree:
        """The entries below `prefix.`, their names without it."""
        cut = len(prefix) + 1
        return Tree({k[cut:]: v for k, v in self._tensors.items() if k.startswith(prefix + ".")})

    def prefixed(self, prefix: str) -> Tree:
        """The same entries, named below `prefix.`."""
        return Tree({f"{prefix}.{k}": v for k, v in self._tensors.items()})

    # element-wise and whole-tree functions

    def map(self, fn: Callable[[Tensor], Tensor]) -> Tree:
        return Tree({k: fn(v) for k, v in self._tensors.items()})

    def zeros(self) -> Tree:
        return self.map(torch.zeros_like)

    def ones(self) -> Tree:
        return self.map(torch.ones_like)

    def sq(self) -> Tree:
        return self.map(torch.square)

    def clamp(self, low: float, high: float) -> Tree:
        return self.map(lambda v: v.clamp(low, high))

    def lerp(self, other: Tree, weight: Tree | float) -> Tree:
        """From here (weight 0) to `other` (weight 1), and at both ends to the bit."""
        at = weight if isinstance(weight, Tree) else dict.fromkeys(self, weight)
        return Tree({k: torch.lerp(v, other[k], at[k]) for k, v in self._tensors.items()})

    def dot(self, other: Tree) -> Tensor:
        """The inner product over all entries."""
        return torch.stack([v.sum() for v in (self * other).values()]).sum()

    def norm(self) -> Tensor:
        return self.dot(self).sqrt()

    def flat(self) -> Tensor:
        """All entries in one vector, in the Tree's order."""
        return torch.cat([v.reshape(-1) for v in self.values()])

    def detach(self) -> Tree:
        return self.map(Tensor.detach)

    def clone(self) -> Tree:
        return self.map(lambda v: v.detach().clone(memory_format=torch.contiguous_format))

    def to(self, *args: Any) -> Tree:
        return self.map(lambda v: v.to(*args))

    @property
    def size(self) -> int:
        """The number of elements of all entries together."""
        return sum(v.numel() for v in self.values())

    @property
    def nbytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.values())

    def equals(self, other: Tree) -> bool:
        """Same names, shapes, dtypes and bits."""
        return self.keys() == other.keys() and all(
            v.dtype == other[k].dtype and torch.equal(v, other[k]) for k, v in self.items()
        )


class Multiple(Tree):
    """A Tree times a number, not multiplied yet: what it is added to takes both in one operation, which halves what
    `w - lr * g` reads and writes. Whoever looks at its entries has them multiplied."""

    __slots__ = ("_factor", "_made", "_of")

    def __init__(self, of: Tree, factor: Tensor | float) -> None:
        self._of, self._factor = of, factor
        self._made: dict[str, Tensor] | None = None

    @property
    def _tensors(self) -> dict[str, Tensor]:  # type: ignore[override]
        if self._made is None:
            self._made = {k: torch.mul(v, self._factor) for k, v in self._of._tensors.items()}
        return self._made

    def __reduce__(self) -> tuple[type[Tree], tuple[dict[str, Tensor]]]:
        return Tree, (self._tensors,)

    def __add__(self, other: Any) -> Tree:
        if type(other) is Tree and (found := self.added(other, 1)) is not None:
            return found
        return self._added(other, 1)

    def added(self, to: Tree, sign: int) -> Tree | None:
        """`to` plus or minus this, unless it has to be multiplied for that."""
        of, into, factor = self._of._tensors, to._tensors, self._factor
        kinds = {v.dtype for v in (*of.values(), *into.values())}
        if isinstance(factor, Tensor):
            kinds.add(factor.dtype)
        same = len(kinds) == 1 and next(iter(kinds)).is_floating_point
        if self._made is not None or of.keys() != into.keys() or not same or _traced(to):
            return None
        if not isinstance(factor, Tensor):
            return Tree({k: torch.add(v, of[k], alpha=sign * factor) for k, v in into.items()})
        return Tree({k: torch.addcmul(v, of[k], factor, value=sign) for k, v in into.items()})


def _traced(tree: Tree) -> bool:
    """Whether somebody differentiates or vectorises what is computed here: then it is computed where it stands."""
    graph = torch.is_grad_enabled() and any(v.requires_grad for v in tree.values())
    return graph or torch._C._functorch.maybe_current_level() is not None


def entries(value: Tree | Tensor) -> Mapping[str, Tensor]:
    """The tensors of a Tree by their names; a tensor that stands alone has none."""
    return value if isinstance(value, Tree) else {"": value}


def stack(trees: Iterable[Tree]) -> Tree:
    """Trees of equal names stacked name by name: [K, ...]."""
    trees = list(trees)
    return Tree({k: torch.stack([t[k] for t in trees]) for k in trees[0]})


def unstack(tree: Tree) -> list[Tree]:
    """The rows of a stacked Tree, as views."""
    count = next(iter(tree.values())).shape[0]
    return [tree.map(lambda v, i=i: v[i]) for i in range(count)]  # type: ignore[misc]


def gram(rows: int, size: int, block: Callable[[slice], Tensor]) -> Tensor:
    """The inner products of all pairs of `rows` vectors of `size` entries, without all of them in memory at once:
    `block` gives their entries in a slice. [K, K]"""
    width = max(BLOCK // max(rows, 1), 1)
    found: Tensor | None = None
    for at in range(0, max(size, 1), width):
        part = block(slice(at, at + width))
        found = part @ part.T if found is None else found.addmm_(part, part.T)
    assert found is not None
    return found


def _difference(left: Tree, right: Tree) -> str:
    lacks_left = [k for k in right if k not in left]
    lacks_right = [k for k in left if k not in right]
    sides = [
        f"the {side} side lacks {', '.join(names)}"
        for side, names in (("left", lacks_left), ("right", lacks_right))
        if names
    ]
    return f"Trees of different names: {'; '.join(sides)}. Use pick() or | to give both the same names."


for _kind in (Tree, Multiple):  # vmap and grad look through them
    pytree.register_pytree_node(
        _kind,
        lambda t: (list(t.values()), list(t.keys())),
        lambda values, keys: Tree(zip(keys, values, strict=True)),
        serialized_type_name=f"idiolect.{_kind.__name__}",
    )
