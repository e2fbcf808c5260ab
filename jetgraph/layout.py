"""Layouts: how a lifted term, which has no rank, looks like the captured program's tensor with its dimensions.

A `Value` is (term, atoms, dims).  *Atoms* are axis factors; `atoms` lists those the term varies over, in the term's
row-major order, the token axis first.  Each dimension of the captured tensor is a tuple of atoms.  Then view and
reshape only split and merge atoms, transpose and permute reorder dims, unsqueeze adds an empty dim, expand puts an atom
into a dim that is not in `atoms`.  Nothing is computed until a value is *read* in an order the term does not have.
An axis of size 1 is no axis.

The token axis T may be captured as B sequences of S positions: then it is two *token atoms*, which only ever occur
together and in that order, so that terms speak of a token and never of its batch.  They are known by structure, never
by their size: whatever enters per token (`Layouts.token_matrix`) brings them along.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jetgraph.normal_form import TermBuilder
from jetgraph.precision import Format


def is_token(atom: int) -> bool:
    """Token atoms are the negative ones."""
    return atom < 0


def clamped(bound: int, size: int) -> int:
    """A slice bound as Python reads it: negative counts from the end, what lies outside is cut."""
    return min(max(bound + size if bound < 0 else bound, 0), size)


class LayoutError(ValueError):
    """The captured program arranges a tensor in a way that has no meaning as [token, features]."""


@dataclass(frozen=True, slots=True)
class Value:
    term: int
    atoms: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]


class Layouts:
    """Operations on `Value`s of one builder.

    ``token_shape`` is the traced shape of the token axis: T, or (B, S).  ``tokens`` are its atoms, outermost first.
    """

    def __init__(self, builder: TermBuilder, token_shape: int | Sequence[int]) -> None:
        self.builder = builder
        self.token_shape = (token_shape,) if isinstance(token_shape, int) else tuple(token_shape)
        self.num_tokens = math.prod(self.token_shape)
        factors = [n for n in self.token_shape if n != 1] or [1]
        self.tokens = tuple(range(-len(factors), 0))
        self.size: dict[int, int] = dict(zip(self.tokens, factors, strict=True))
        self._next = itertools.count(1)

    # ---------------------------------------------------------------------------------------------------- basics

    def atom(self, size: int) -> int:
        atom = next(self._next)
        self.size[atom] = size
        return atom

    def value(self, term: int, shape: Sequence[int]) -> Value:
        """A term laid out row-major as ``shape``.  Of a per-token term the token dimensions are found by their sizes:
        only for tensors whose program says nothing more (uninitialised memory, unknown operators)."""
        tokens = self.token_dims(shape) if self.builder.per_token(term) else {}
        features = {i: self.atom(n) for i, n in enumerate(shape) if n != 1 and i not in tokens}
        dims = [tokens.get(i) or ((features[i],) if i in features else ()) for i in range(len(shape))]
        held = [a for a in self.tokens if any(a in dim for dim in tokens.values())]
        return Value(term, (*held, *features.values()), tuple(dims))

    def token_dims(self, shape: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Which dimensions of ``shape`` are the token axis by their sizes: one of T, or a run that is (B, S)."""
        sizes = [self.size[a] for a in self.tokens]
        for i, size in enumerate(shape):
            if size == self.num_tokens:
                return {i: self.tokens}
            if list(shape[i : i + len(sizes)]) == sizes:
                return {i + j: (a,) for j, a in enumerate(self.tokens)}
        return {}

    def token_matrix(self, term: int) -> Value:
        """A term [T, C] as a tensor with the token axis and its features as two dimensions."""
        features = self.builder.num_features(term)
        column = () if features == 1 else (self.atom(features),)
        return Value(term, (*self.tokens, *column), (self.tokens, column))

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(math.prod(self.size[a] for a in dim) for dim in value.dims)

    def features(self, value: Value) -> list[int]:
        return [a for a in value.atoms if not is_token(a)]

    def _substitute(self, value: Value, new: dict[int, tuple[int, ...]]) -> Value:
        def apply(atoms: Sequence[int]) -> tuple[int, ...]:
            return tuple(b for a in atoms for b in new.get(a, (a,)))

        return Value(value.term, apply(value.atoms), tuple(apply(dim) for dim in value.dims))

    # ----------------------------------------------------------------------------------------------------- views

    def view(self, value: Value, shape: Sequence[int]) -> Value:
        queue = [a for dim in value.dims for a in dim]
        split: dict[int, tuple[int, ...]] = {}
        dims: list[tuple[int, ...]] = []
        for size in shape:
            taken: list[int] = []
            product = 1
            while product < size:
                if not queue:
                    raise LayoutError(f"view of {self.shape(value)} as {tuple(shape)}")
                atom = queue.pop(0)
                rest = size // product
                if size % product == 0 and rest % self.size[atom] == 0:
                    taken.append(atom)
                    product *= self.size[atom]
                elif not is_token(atom) and size % product == 0 and self.size[atom] % rest == 0:
                    head, tail = self.atom(rest), self.atom(self.size[atom] // rest)
                    split[atom] = (head, tail)
                    taken.append(head)
                    queue.insert(0, tail)
                    product *= rest
                else:
                    raise LayoutError(f"view of {self.shape(value)} as {tuple(shape)} cuts an axis unevenly")
            dims.append(tuple(taken))
        if queue:
            raise LayoutError(f"view of {self.shape(value)} as {tuple(shape)}")
        resolved = self._resolve(split)
        flat = self._substitute(Value(value.term, value.atoms, ()), resolved)
        return Value(flat.term, flat.atoms, tuple(tuple(b for a in dim for b in resolved.get(a, (a,))) for dim in dims))

    def _resolve(self, split: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Splits of splits written as splits of the original atoms."""

        def leaves(atom: int) -> tuple[int, ...]:
            return tuple(b for a in split[atom] for b in leaves(a)) if atom in split else (atom,)

        return {atom: leaves(atom) for atom in split}

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        return Value(value.term, value.atoms, tuple(value.dims[i] for i in order))

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        dims = [()] * (len(shape) - len(value.dims)) + list(value.dims)
        for i, size in enumerate(shape):
            if not dims[i] and size != 1:
                dims[i] = (self.atom(size),)
        return Value(value.term, value.atoms, tuple(dims))

    # ---------------------------------------------------------------------------------------------------- reading

    def read(self, value: Value) -> int:
        """The term that holds this value row-major, [token, features]; broadcast and permutation become nodes."""
        everything = [a for dim in value.dims for a in dim]
        if self.builder.per_token(value.term) and [a for a in everything if is_token(a)] != list(self.tokens):
            raise LayoutError("tokens in another order than the batch has them")
        wanted = [a for a in everything if not is_token(a)]
        if len(set(wanted)) != len(wanted):
            raise LayoutError("one axis in two dimensions (a diagonal)")
        have = self.features(value)
        if set(have) - set(wanted):
            raise LayoutError(f"a value of shape {self.shape(value)} hides an axis it depends on")
        present = [a for a in wanted if a in have]
        term = value.term
        if present != have:
            sizes = [self.size[a] for a in have]
            term = self.builder.permute(term, sizes, [have.index(a) for a in present])
        return self.builder.broadcast(term, [(self.size[a], a in have) for a in wanted])

    # -------------------------------------------------------------------------------------------------- pointwise

    def pointwise(
        self, op: str, values: Sequence[Value], fmt: Format, attrs: dict | None = None, kernel: str = ""
    ) -> Value:
        """op on broadcast values, FP32, rounded to ``fmt`` if that is narrower."""
        rank = max(len(v.dims) for v in values)
        values = [Value(v.term, v.atoms, ((),) * (rank - len(v.dims)) + v.dims) for v in values]
        over_cat = self._over_cat(op, values, fmt, attrs, kernel)
        if over_cat is not None:
            return over_cat
        for dim in range(rank):
            values = self._refine(values, dim)
        values = self._rename_diagonals(values)
        names, dims = self._unify(values, rank)
        orders = [[names[i].get(a, a) for a in v.atoms] for i, v in enumerate(values)]
        order = self._common_order(orders)
        features = [a for a in order if not is_token(a)]
        terms = []
        for own, value in zip(orders, values, strict=True):
            mine = [a for a in own if not is_token(a)]
            term = value.term
            wanted = [a for a in features if a in mine]
            if mine != wanted:
                term = self.builder.permute(term, [self.size[a] for a in mine], [mine.index(a) for a in wanted])
            terms.append(self.builder.broadcast(term, [(self.size[a], a in mine) for a in features]))
        if op == "neg":
            term = self.builder.neg(terms[0])
        elif op == "round":
            term = self.builder.round(terms[0], fmt)
        else:
            term = self.builder.round(self.builder.pointwise(op, terms, attrs, kernel), fmt)
        return Value(term, tuple(order), dims)

    def _common_order(self, orders: list[list[int]]) -> list[int]:
        """Atom order of the result: the operand with most axes decides, axes only others have follow."""
        longest = max(orders, key=len)
        rest = dict.fromkeys(a for order in orders for a in order if a not in longest)
        merged = list(longest) + list(rest)
        return [a for a in self.tokens if a in merged] + [a for a in merged if not is_token(a)]

    def _refine(self, values: Sequence[Value], dim: int) -> list[Value]:
        """Split the atoms of one dimension of all values at the same places."""
        cuts = set()
        for value in values:
            product = 1
            for atom in reversed(value.dims[dim]):
                product *= self.size[atom]
                cuts.add(product)
        refined = []
        for value in values:
            new: dict[int, tuple[int, ...]] = {}
            low = 1
            for atom in reversed(value.dims[dim]):
                high = low * self.size[atom]
                inside = sorted(c for c in cuts if low < c < high)
                bounds = [low, *inside, high]
                if inside:
                    if is_token(atom) or any(b % a for a, b in itertools.pairwise(bounds)):
                        raise LayoutError("two operands factor one dimension in incompatible ways")
                    new[atom] = tuple(self.atom(b // a) for a, b in reversed(list(itertools.pairwise(bounds))))
                low = high
            refined.append(self._substitute(value, new) if new else value)
        return refined

    def _rename_diagonals(self, values: Sequence[Value]) -> list[Value]:
        """Give an atom that two operands use in different dimensions a new name in one of them (x[:,None]*x[None])."""
        home: dict[int, int] = {}
        renamed = []
        for value in values:
            new: dict[int, tuple[int, ...]] = {}
            for dim, atoms in enumerate(value.dims):
                for atom in atoms:
                    if home.setdefault(atom, dim) != dim:
                        if is_token(atom):
                            raise LayoutError("the token axis in two dimensions")
                        new[atom] = (self.atom(self.size[atom]),)
            renamed.append(self._substitute(value, new) if new else value)
        return renamed

    def _unify(self, values: Sequence[Value], rank: int) -> tuple[list[dict[int, int]], tuple[tuple[int, ...], ...]]:
        """Per operand the result's name for each of its atoms, and the result's dims."""
        names: list[dict[int, int]] = [{} for _ in values]
        dims: list[tuple[int, ...]] = []
        for dim in range(rank):
            present = [v.dims[dim] for v in values if v.dims[dim]]
            if not present:
                dims.append(())
                continue
            if len({len(p) for p in present}) != 1:
                raise LayoutError("operands disagree on the size of a dimension")
            chosen = []
            for j in range(len(present[0])):
                owners = [v.dims[dim][j] for v in values if v.dims[dim] and v.dims[dim][j] in v.atoms]
                if len({a if is_token(a) else 0 for a in owners}) > 1:
                    raise LayoutError("tokens and something else in one dimension")
                chosen.append(owners[0] if owners else present[0][j])
            dims.append(tuple(chosen))
            for i, value in enumerate(values):
                names[i].update(zip(value.dims[dim], chosen, strict=False))
        return names, tuple(dims)

    def _over_cat(self, op: str, values: Sequence[Value], fmt: Format, attrs: dict | None, kernel: str) -> Value | None:
        """f(cat(a, b), y) = cat(f(a, y₀), f(b, y₁)): pointwise work moves into the parts of a concatenation."""
        for value in values:
            found = self._cat_axis(value)
            if found is None:
                continue
            dim, sizes = found
            if any(len(v.dims[dim]) > 1 or (v.dims[dim] and self.shape(v)[dim] != sum(sizes)) for v in values):
                continue
            self.builder.rules["pointwise over cat"] += 1
            parts, start = [], 0
            for size in sizes:
                cut = [self.slice(v, dim, start, start + size) if v.dims[dim] else v for v in values]
                parts.append(self.pointwise(op, cut, fmt, attrs, kernel))
                start += size
            return self.cat(parts, dim)
        return None

    def _cat_axis(self, value: Value) -> tuple[int, tuple[int, ...]] | None:
        """(dim, sizes) if the term is a `cat` along an atom that is alone in a dimension of the value."""
        node = self.builder.nodes[value.term]
        if node.op != "cat":
            return None
        attrs = dict(node.attrs)
        outer = 1
        for atom in self.features(value):
            if outer == attrs["outer"]:
                if self.size[atom] != sum(attrs["sizes"]):  # type: ignore[arg-type]
                    return None
                dims = [d for d, atoms in enumerate(value.dims) if atoms == (atom,)]
                return (dims[0], attrs["sizes"]) if dims else None  # type: ignore[return-value]
            outer *= self.size[atom]
        return None

    # ------------------------------------------------------------------------------------------- slicing, joining

    def slice(self, value: Value, dim: int, start: int | None, stop: int | None) -> Value:
        dim %= len(value.dims)
        axis = value.dims[dim]
        size = self.shape(value)[dim]
        start, stop = clamped(start or 0, size), size if stop is None else clamped(stop, size)
        if (start, stop) == (0, size):
            return value
        if any(map(is_token, axis)):
            raise LayoutError("a slice of the token axis")
        if len(axis) != 1:
            value = self._merge(value, dim)
            axis = value.dims[dim]
        atom, new = axis[0], self.atom(stop - start)
        single = stop - start == 1
        dims = tuple(tuple(new if a == atom else a for a in d if not (single and a == atom)) for d in value.dims)
        if atom not in value.atoms:
            return Value(value.term, value.atoms, dims)
        features = self.features(value)
        i = features.index(atom)
        outer, inner = (math.prod(self.size[a] for a in part) for part in (features[:i], features[i + 1 :]))
        term = self.builder.slice(value.term, outer, size, inner, start, stop)
        atoms = tuple(new if a == atom else a for a in value.atoms if not (single and a == atom))
        return Value(term, atoms, dims)

    def _merge(self, value: Value, dim: int) -> Value:
        """Make one atom of the several in a dimension; they must be neighbours in the term."""
        axis = value.dims[dim]
        if any(map(is_token, axis)):
            raise LayoutError("a dimension mixes tokens and features")
        held = [a for a in axis if a in value.atoms]
        if held and len(held) != len(axis):
            value = self.value_of_read(value)
            return self._merge(value, dim) if len(value.dims[dim]) > 1 else value
        positions = [value.atoms.index(a) for a in held]
        if positions and positions != list(range(positions[0], positions[0] + len(positions))):
            value = self.value_of_read(value)
            return self._merge(value, dim) if len(value.dims[dim]) > 1 else value
        new = self.atom(math.prod(self.size[a] for a in axis))
        atoms = []
        for a in value.atoms:
            if a not in axis:
                atoms.append(a)
            elif a == axis[0]:
                atoms.append(new)
        return Value(value.term, tuple(atoms), tuple((new,) if i == dim else d for i, d in enumerate(value.dims)))

    def value_of_read(self, value: Value) -> Value:
        """The same value with its term materialised row-major."""
        term = self.read(value)
        dims: list[tuple[int, ...]] = []
        for dim, size in zip(value.dims, self.shape(value), strict=True):
            tokens = tuple(filter(is_token, dim))
            if tokens and tokens != dim:
                raise LayoutError("a dimension mixes tokens and features")
            dims.append(tokens or (() if size == 1 else (self.atom(size),)))
        held = self.tokens if self.builder.per_token(term) else ()
        return Value(term, (*held, *(a for dim in dims for a in dim if not is_token(a))), tuple(dims))

    def cat(self, values: Sequence[Value], dim: int) -> Value:
        dim %= len(values[0].dims)
        values = [self._merge(v, dim) if len(v.dims[dim]) > 1 else v for v in values]
        values = [v if v.dims[dim] else self._with_axis(v, dim) for v in values]
        if any(is_token(a) for v in values for a in v.dims[dim]):
            raise LayoutError("a concatenation along the token axis")
        pattern = self._pattern(values[0], dim)
        if pattern is None or any(self._pattern(v, dim) != pattern for v in values):
            values = [self.value_of_read(v) for v in values]
            values = [v if v.dims[dim] else self._with_axis(v, dim) for v in values]
            pattern = self._pattern(values[0], dim)
            if pattern is None or any(self._pattern(v, dim) != pattern for v in values):
                raise LayoutError("a concatenation of differently arranged tensors")
        first = values[0]
        axis = first.dims[dim][0]
        features = self.features(first)
        i = features.index(axis)
        outer, inner = (math.prod(self.size[a] for a in part) for part in (features[:i], features[i + 1 :]))
        sizes = [self.shape(v)[dim] for v in values]
        new = self.atom(sum(sizes))
        term = self.builder.cat([v.term for v in values], outer, sizes, inner)
        atoms = tuple(new if a == axis else a for a in first.atoms)
        return Value(term, atoms, tuple((new,) if d == dim else atoms_ for d, atoms_ in enumerate(first.dims)))

    def _pattern(self, value: Value, dim: int) -> tuple | None:
        """What two values must share to be joined: which dimension each atom of the term belongs to, and its size."""
        if len(value.dims[dim]) != 1 or value.dims[dim][0] not in value.atoms:
            return None
        where = {a: (d, j) for d, atoms in enumerate(value.dims) for j, a in enumerate(atoms)}
        return tuple((where[a], None if where[a][0] == dim else self.size[a]) for a in value.atoms)

    def _with_axis(self, value: Value, dim: int) -> Value:
        """Name the size-1 axis at ``dim`` so that it can be joined: it is the last factor of what comes before it."""
        new = self.atom(1)
        before = {a for d in value.dims[:dim] for a in d}
        position = max((i + 1 for i, a in enumerate(value.atoms) if a in before or is_token(a)), default=0)
        atoms = (*value.atoms[:position], new, *value.atoms[position:])
        return Value(value.term, atoms, tuple((new,) if i == dim else d for i, d in enumerate(value.dims)))
