# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: the dimensions of a call's arrays that are split alike, or must be whole.

A rule gives each dimension of each operand and result a factor. Dimensions with one factor are
split alike over the devices. A factor that is `whole` is not split, so an array that is split along
it is gathered first. Users write rules as text, `"i j, j k -> i k"`; programs contain them as
numbers (`Rule.text`).

A dimension stays split only if the call works the same on a part: its factor is in every result and
in some operand. So a contracted dimension is gathered, never summed in parts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from callgate._core.errors import GateDefinitionError
from callgate._core.levels import Level

Shape = tuple[int, ...]
Term = tuple[int, ...]
BY_NAME = ("shard", "gather")


@dataclasses.dataclass(frozen=True)
class Rule:
  """The factors, as numbers, of each operand's and result's dimensions."""

  operands: tuple[Term, ...]
  results: tuple[Term, ...]
  whole: frozenset[int] = frozenset()  # the factors that are not split
  least: frozenset[int] = frozenset()  # the factors with more than one element in each tile

  @property
  def text(self) -> str:
    """The rule's text in programs: "0 1,1 2->0 2|1|"."""

    def side(terms: Sequence[Term]) -> str:
      return ",".join(" ".join(map(str, term)) for term in terms)

    marked = (" ".join(map(str, sorted(some))) for some in (self.whole, self.least))
    return f"{side(self.operands)}->{side(self.results)}|{'|'.join(marked)}"

  @classmethod
  def read(cls, text: str, operands: int, results: int) -> Rule:
    """Reads a rule of these numbers of operands and results from its `text`."""
    sides, *marked = text.split("|")
    left, _, right = sides.partition("->")

    def side(part: str, count: int) -> tuple[Term, ...]:
      return tuple(tuple(map(int, term.split())) for term in part.split(",") if count)

    whole, least = (frozenset(map(int, some.split())) for some in marked)
    return cls(side(left, operands), side(right, results), whole, least)

  def closed(self) -> Rule:
    """Returns the rule with each factor whole along which a part of the call can't be computed."""
    given = set(itertools.chain(*self.operands))
    every = given.union(*self.results)
    others = ((set(term) - given) | (every - set(term)) for term in self.results)
    return dataclasses.replace(self, whole=self.whole.union(*others))

  def factors(self) -> int:
    """A number above those of all factors."""
    return 1 + max(itertools.chain((-1,), *self.operands, *self.results))

  def under(self, levels: Sequence[Level]) -> Rule:
    """Returns the rule with batch levels: lanes are independent, so each level may be split."""
    lanes = [(self.factors() + n, mask) for n, (_, mask) in enumerate(levels)]
    operands = tuple(
      (*(lane for lane, mask in lanes if mask[i]), *term) for i, term in enumerate(self.operands)
    )
    results = tuple((*(lane for lane, _ in lanes), *term) for term in self.results)
    return dataclasses.replace(self, operands=operands, results=results)


def independent(operands: Sequence[Shape], first: int = 0) -> Rule:
  """Returns a rule that keeps each array as it is, for a tap; factors count from `first`."""
  numbers = itertools.count(first)
  return Rule(tuple(tuple(next(numbers) for _ in shape) for shape in operands), ())


def gathered(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
  rule, count = independent((*operands, *results)), len(operands)
  whole = frozenset(range(rule.factors()))
  return Rule(rule.operands[:count], rule.operands[count:], whole)


def leading(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
  """Splits along the leading dimensions that all arrays share; scalars are whole."""
  extents = zip(*(shape for shape in (*operands, *results) if shape), strict=False)
  shared = sum(1 for _ in itertools.takewhile(lambda one: len(set(one)) == 1, extents))
  numbers = itertools.count(shared)

  def term(shape: Shape) -> Term:
    return (*range(shared), *(next(numbers) for _ in shape[shared:])) if shape else ()

  ins, outs = tuple(map(term, operands)), tuple(map(term, results))
  return Rule(ins, outs, frozenset(range(shared, next(numbers)))).closed()


@functools.lru_cache(maxsize=4096)
def parse(
  label: str,
  text: str,
  operands: tuple[Shape, ...],
  results: tuple[Shape, ...],
  *,
  tap: bool = False,
) -> Rule:
  """Reads a user's rule for arrays of these shapes; a tap's text needs no arrow.

  The text is like "i j, j k -> i k", with a term for each array and a name for each dimension.
  `[j]` must be whole; `_` is an unnamed dimension, and whole; `...` stands for any leading
  dimensions, aligned as NumPy broadcasts.
  """
  reader = _Reader(label, text)
  left, arrow, right = text.partition("->")
  if not arrow and not tap:
    raise reader.refusal("'->' between the operands' terms and the results'", "none")
  ins = reader.side(left, operands, "operand")
  outs = reader.side(right, results, "result")
  return Rule(ins, outs, frozenset(reader.whole)).closed()


class _Reader:
  """Reads the terms of one text; remembers the factors' names, extents and which are whole."""

  def __init__(self, label: str, text: str) -> None:
    self._said = f"{label}: sharding: {text!r}"
    self._numbers = itertools.count()
    self._known: dict[str, tuple[int, int, str]] = {}  # name: number, extent, where
    self.whole: set[int] = set()

  def refusal(self, expected: str, got: str) -> GateDefinitionError:
    return GateDefinitionError(f"{self._said}: expected {expected}, got {got}")

  def side(self, part: str, shapes: Sequence[Shape], kind: str) -> tuple[Term, ...]:
    terms = part.split(",") if part.strip() or len(shapes) == 1 else []
    if len(terms) != len(shapes):
      raise self.refusal(f"{len(shapes)} term(s) for {len(shapes)} {kind}(s)", str(len(terms)))
    pairs = zip(terms, shapes, strict=True)
    return tuple(self._term(*pair, f"{kind} {index}") for index, pair in enumerate(pairs))

  def _term(self, term: str, shape: Shape, where: str) -> Term:
    tokens, shown = term.split(), repr(term.strip())
    if "..." in tokens:
      if tokens[0] != "..." or tokens.count("...") > 1:
        raise self.refusal(f"'...' once, at the beginning of the term of {where}", shown)
      rest = len(shape) - len(tokens) + 1
      # Names dimensions from the right, as NumPy aligns them.
      tokens = [f"...{rest - n}" for n in range(rest)] + tokens[1:]
    if len(tokens) != len(shape):
      raise self.refusal(f"{len(shape)} name(s) for {where} of shape {list(shape)}", shown)
    pairs = enumerate(zip(tokens, shape, strict=True))
    factors = tuple(self._factor(*pair, f"{where}, dimension {axis}") for axis, pair in pairs)
    if len(set(factors)) != len(factors):
      raise self.refusal(f"different names in the term of {where}", shown)
    return factors

  def _factor(self, token: str, extent: int, where: str) -> int:
    name = token[1:-1] if token.startswith("[") and token.endswith("]") else token
    spread = token.startswith("...")
    if not (name.isidentifier() or spread):
      raise self.refusal(
        "names such as 'i', '[i]' for a dimension that stays whole, '_' or '...'", repr(token)
      )
    if name == "_" or (spread and extent == 1):  # an extent of 1 broadcasts
      number = next(self._numbers)
      self.whole.add(number)
      return number
    if name not in self._known:
      self._known[name] = (next(self._numbers), extent, where)
    number, known, first = self._known[name]
    if known != extent:
      raise self.refusal(f"one extent for {name!r}", f"{known} at {first} and {extent} at {where}")
    if name != token:
      self.whole.add(number)
    return number


def of_call(
  label: str, said: Any, operands: Sequence[Shape], results: Sequence[Shape], *, tap: bool = False
) -> Rule:
  """Returns the rule of a lane's call, or of a tap, for `sharding=`: None or a str."""
  if said is None or said == "gather":
    return gathered(operands, results)
  if said == "shard":
    return independent(operands) if tap else leading(operands, results)
  return parse(label, said, tuple(operands), tuple(results), tap=tap)
