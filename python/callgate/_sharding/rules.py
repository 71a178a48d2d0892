"""Sharding rules: which dimensions of a call's arrays belong together, and which must be whole.

A rule gives each dimension of each operand and result a factor. Dimensions with one factor are
split alike over the devices; a factor that is `whole` is not split at all, so an array that came
split along it is gathered first. Users write rules as text, `"i j, j k -> i k"`; programs hold them
as numbers (`Rule.text`), from which the partitioner reads them (`_sharding/partitioner.py`).

Split stays only what no call can tell from the whole: a factor that every result has, and some
operand. So a contracted dimension is gathered, never summed in parts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from callgate._core.encoding import Level
from callgate._core.errors import GateDefinitionError

Shape = tuple[int, ...]
Term = tuple[int, ...]
BY_NAME = ("shard", "gather")


@dataclasses.dataclass(frozen=True)
class Rule:
  """Factors, by number, of each operand's and result's dimensions.

  Attributes:
    operands: a term for each operand: the factor of each dimension.
    results: likewise.
    whole: factors that are not split.
    least: factors of which a tile keeps more than one element.
  """

  operands: tuple[Term, ...]
  results: tuple[Term, ...]
  whole: frozenset[int] = frozenset()
  least: frozenset[int] = frozenset()

  @property
  def text(self) -> str:
    """As programs hold it: "0 1,1 2->0 2|1|"."""

    def side(terms: Sequence[Term]) -> str:
      return ",".join(" ".join(map(str, term)) for term in terms)

    marked = (" ".join(map(str, sorted(some))) for some in (self.whole, self.least))
    return f"{side(self.operands)}->{side(self.results)}|{'|'.join(marked)}"

  @classmethod
  def read(cls, text: str, operands: int, results: int) -> Rule:
    """The rule of a text that `text` made, for so many operands and results."""
    sides, *marked = text.split("|")
    left, _, right = sides.partition("->")

    def side(part: str, count: int) -> tuple[Term, ...]:
      terms = tuple(tuple(map(int, term.split())) for term in part.split(","))
      return terms if count else ()

    whole, least = (frozenset(map(int, some.split())) for some in marked)
    return cls(side(left, operands), side(right, results), whole, least)

  def closed(self) -> Rule:
    """With every factor whole that a part of the result could not be computed by."""
    whole = set(self.whole)
    given = {factor for term in self.operands for factor in term}
    for term in self.results:
      whole |= {f for f in term if f not in given}
      whole |= {f for other in (*self.operands, *self.results) for f in other if f not in term}
    return dataclasses.replace(self, whole=frozenset(whole))

  def factors(self) -> int:
    """A number above those of all factors."""
    return 1 + max(itertools.chain((-1,), *self.operands, *self.results))

  def under(self, levels: Sequence[Level], results: int) -> Rule:
    """The rule of a call with batch levels: lanes are independent, so each level may be split.

    Levels are outermost first; the first `results` results have all of them.
    """
    first = self.factors()
    operands: list[Term] = []
    for index, term in enumerate(self.operands):
      lanes = (first + n for n, (_, mask) in enumerate(levels) if mask[index])
      operands.append((*lanes, *term))
    lanes = tuple(first + n for n in range(len(levels)))
    outs = tuple((*lanes, *t) if i < results else t for i, t in enumerate(self.results))
    return dataclasses.replace(self, operands=tuple(operands), results=outs)


def gathered(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
  """All arrays whole."""
  numbers = itertools.count()
  ins = tuple(tuple(next(numbers) for _ in shape) for shape in operands)
  outs = tuple(tuple(next(numbers) for _ in shape) for shape in results)
  return Rule(ins, outs, frozenset(range(next(numbers))))


def independent(operands: Sequence[Shape]) -> Rule:
  """Each array as it is, whatever the others are: what a tap needs."""
  numbers = itertools.count()
  return Rule(tuple(tuple(next(numbers) for _ in shape) for shape in operands), ())


def leading(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
  """Split along the leading dimensions that all arrays share; scalars are everybody's."""
  shapes = [shape for shape in (*operands, *results) if shape]
  shared = 0
  for extents in zip(*shapes, strict=False):
    if len(set(extents)) != 1:
      break
    shared += 1
  numbers = itertools.count(shared)
  whole: set[int] = set()

  def term(shape: Shape) -> Term:
    if not shape:
      return ()
    rest = tuple(next(numbers) for _ in shape[shared:])
    whole.update(rest)
    return (*range(shared), *rest)

  ins = tuple(term(shape) for shape in operands)
  return Rule(ins, tuple(term(shape) for shape in results), frozenset(whole)).closed()


@functools.lru_cache(maxsize=4096)
def parse(
  label: str,
  text: str,
  operands: tuple[Shape, ...],
  results: tuple[Shape, ...],
  *,
  tap: bool = False,
) -> Rule:
  """The rule that a user wrote, for arrays of these shapes.

  Args:
    label: what messages call the operation.
    text: as "i j, j k -> i k": a term for each array with a name for each of its dimensions.
      `[j]` must be whole; `_` is a dimension without a name, whole too; `...` stands for any
      leading dimensions, aligned as NumPy broadcasts.
    operands: shapes of the operands, flat.
    results: of the results.
    tap: the call has no results, and `text` needs no arrow.

  Raises:
    GateDefinitionError: the text is malformed, or doesn't fit the arrays.
  """
  left, arrow, right = text.partition("->")
  if not arrow and not tap:
    raise _refuse(label, text, "'->' between the operands' terms and the results'", "none")
  reader = _Reader(label, text)
  ins = reader.side(left, operands, "operand")
  outs = reader.side(right, results, "result")
  return Rule(ins, outs, frozenset(reader.whole)).closed()


def _refuse(label: str, text: str, expected: str, got: str) -> GateDefinitionError:
  return GateDefinitionError(f"{label}: sharding: {text!r}: expected {expected}, got {got}")


class _Reader:
  """Reads the terms of one text; remembers the factors' names, extents and which are whole."""

  def __init__(self, label: str, text: str) -> None:
    self._label, self._text = label, text
    self._numbers = itertools.count()
    self._known: dict[str, tuple[int, int, str]] = {}  # name: number, extent, where
    self.whole: set[int] = set()

  def side(self, part: str, shapes: Sequence[Shape], kind: str) -> tuple[Term, ...]:
    terms = part.split(",") if part.strip() or len(shapes) == 1 else []
    if len(terms) != len(shapes):
      raise self._fail(f"{len(shapes)} term(s) for {len(shapes)} {kind}(s)", str(len(terms)))
    return tuple(
      self._term(term, shape, f"{kind} {index}")
      for index, (term, shape) in enumerate(zip(terms, shapes, strict=True))
    )

  def _term(self, term: str, shape: Shape, where: str) -> Term:
    tokens = term.split()
    if "..." in tokens:
      if tokens[0] != "..." or tokens.count("...") > 1:
        raise self._fail(f"'...' once, at the beginning of the term of {where}", repr(term.strip()))
      rest = len(shape) - len(tokens) + 1
      # Dimensions are named from the right, as NumPy aligns them.
      tokens = [f"...{rest - n}" for n in range(max(rest, 0))] + tokens[1:]
    if len(tokens) != len(shape):
      raise self._fail(
        f"{len(shape)} name(s) for {where} of shape {list(shape)}", repr(term.strip())
      )
    factors = tuple(
      self._factor(token, extent, f"{where}, dimension {axis}")
      for axis, (token, extent) in enumerate(zip(tokens, shape, strict=True))
    )
    if len(set(factors)) != len(factors):
      raise self._fail(f"no name twice in the term of {where}", repr(term.strip()))
    return factors

  def _factor(self, token: str, extent: int, where: str) -> int:
    name = token[1:-1] if token.startswith("[") and token.endswith("]") else token
    spread = token.startswith("...")
    if not (name.isidentifier() or spread):
      raise self._fail("names such as 'i', '[i]' for a whole one, '_' or '...'", repr(token))
    if name == "_" or (spread and extent == 1):  # 1 is broadcast against whatever the others have
      number = next(self._numbers)
      self.whole.add(number)
      return number
    if name not in self._known:
      self._known[name] = (next(self._numbers), extent, where)
    number, known, first = self._known[name]
    if known != extent:
      raise self._fail(f"one extent for {name!r}", f"{known} at {first} and {extent} at {where}")
    if name != token:
      self.whole.add(number)
    return number

  def _fail(self, expected: str, got: str) -> GateDefinitionError:
    return _refuse(self._label, self._text, expected, got)


def of_tap(label: str, sharding: str, leaves: Sequence[Shape]) -> Rule:
  """The rule of a tap's leaves, in one lane, for "shard", "gather" or a rule's text."""
  if sharding == "shard":
    return independent(leaves)
  if sharding == "gather":
    return gathered(leaves, [])
  return parse(label, sharding, tuple(leaves), (), tap=True)


def of_call(label: str, sharding: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
  """The rule of one lane's call, for None, "shard", "gather" or a rule's text."""
  if sharding is None or sharding == "gather":
    return gathered(operands, results)
  if sharding == "shard":
    return leading(operands, results)
  return parse(label, sharding, tuple(operands), tuple(results))
