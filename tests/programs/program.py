# SPDX-License-Identifier: Apache-2.0
"""Random programs as data: bodies of steps, each an operation on variables.

An `Op` says all that there is to say of an operation: how it is written in Python (`write`), and
what it gives (`run`, on the oracle's values). The function that draws it stands
beside it, marked by `@drawn`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
  from oracle import Lane, Machine

T = TypeVar("T")

FLOATS = ("float32",)
NARROW_FLOATS = ("float16", "bfloat16")
INTEGERS = ("int32", "int8", "uint8", "uint32", "int16", "uint16")
OTHERS = ("bool", "complex64")


@dataclasses.dataclass(frozen=True)
class Array:
  shape: tuple[int, ...]
  dtype: str

  @property
  def is_float(self) -> bool:
    return self.dtype in FLOATS

  def with_shape(self, *shape: int) -> Array:
    return Array(shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Var:
  number: int
  type: Array

  @property
  def name(self) -> str:
    return f"v{self.number}"


@dataclasses.dataclass(frozen=True)
class Step:
  op: Op
  operands: tuple[Var, ...]
  results: tuple[Var, ...]


@dataclasses.dataclass(frozen=True)
class Body:
  """A function. Its steps may read the variables of the bodies around it, too."""

  parameters: tuple[Var, ...]
  steps: tuple[Step, ...]
  results: tuple[Var, ...]

  def ops(self) -> Iterator[Op]:
    """All operations, those of the bodies in it included."""
    return (op for op, _ in self.ops_within())

  def ops_within(self, around: tuple[str, ...] = ()) -> Iterator[tuple[Op, tuple[str, ...]]]:
    """All operations, each with the transformations around it.

    Collectives and references, which have no body, are around what is beside them.
    """
    named = [step.op for step in self.steps if step.op.transformation]
    beside = tuple(dict.fromkeys(op.transformation for op in named if not op.bodies()))
    for step in self.steps:
      within = (*around, *beside)
      yield step.op, within
      if step.op.transformation:
        within = (*within, step.op.transformation)
      for body in step.op.bodies():
        yield from body.ops_within(within)

  def variables(self) -> Iterator[Var]:
    """All variables, those of the bodies in it included."""
    yield from self.parameters
    for step in self.steps:
      yield from step.results
      for body in step.op.bodies():
        yield from body.variables()


@dataclasses.dataclass(frozen=True)
class Program:
  body: Body
  inputs: tuple[np.ndarray, ...]


Values = list[Any]  # an oracle's values: of one lane's operands, or results


class Op:
  """An operation. Subclasses are frozen dataclasses."""

  part = ""  # the part of callgate that it uses, as the table of results names it
  transformation = ""  # the transformation of JAX's that it is
  gives_arrays = True  # False where a result is no value of the oracle's
  refuses = False  # True if `vmap` and `grad` refuse it
  counts = False  # True if it depends on how often it has run before

  def bodies(self) -> Sequence[Body]:
    return ()

  def write(self, writer: Writer, step: Step) -> None:
    raise NotImplementedError

  def run(
    self, machine: Machine, lanes: list[Lane], envs: list[dict[int, Any]], operands: list[Values]
  ) -> list[Values]:
    """Gives each lane's results, of each lane's operands."""
    raise NotImplementedError


class Pure(Op):
  """An operation on each lane alone, without effects."""

  def text(self, *operands: str) -> str:
    raise NotImplementedError

  def value(self, *operands: Any) -> Any:
    raise NotImplementedError

  def write(self, writer: Writer, step: Step) -> None:
    writer.assign(step, self.text(*(var.name for var in step.operands)))

  def run(
    self, machine: Machine, lanes: list[Lane], envs: list[dict[int, Any]], operands: list[Values]
  ) -> list[Values]:
    return [[self.value(*values)] for values in operands]


class Part(Op):
  """A use of callgate on one operand: definitions above the program, and a call in it."""

  def definitions(self) -> Sequence[str]:
    return ()

  def text(self, x: str) -> str:
    raise NotImplementedError

  def twin(self, x: str) -> str:
    """The same without callgate."""
    return x

  def write(self, writer: Writer, step: Step) -> None:
    x = step.operands[0].name
    if not writer.twin:
      for definition in self.definitions():
        writer.above(definition)
    writer.assign(step, self.twin(x) if writer.twin else self.text(x))


class Writer:
  """Writes a program as Python. As a twin it leaves callgate out: its parts are JAX's functions."""

  def __init__(self, twin: bool = False, taken: Mapping[str, int] | None = None) -> None:
    self.twin = twin
    self.taken = taken or {}  # how many items of each feed an execution takes
    self._top: list[str] = []
    self._lines: list[str] = []
    self._indent = 0

  def line(self, text: str) -> None:
    self._lines.append("  " * self._indent + text)

  def above(self, text: str) -> None:
    """Writes at the top of the file, once, before the program."""
    if text not in self._top:
      self._top.append(text)

  def assign(self, step: Step, text: str) -> None:
    """Writes a step whose text is its only result."""
    self.line(f"{step.results[0].name} = {text}")

  def assign_all(self, step: Step, text: str) -> None:
    """Writes a step whose text is a tuple of its results."""
    self.line(f"{tuple_text(var.name for var in step.results)} = {text}")

  @contextlib.contextmanager
  def block(self, head: str) -> Iterator[None]:
    self.line(head)
    self._indent += 1
    yield
    self._indent -= 1

  def function(self, name: str, body: Body, parameters: str = "", results: str = "") -> str:
    """Writes a body as a function; gives its name."""
    parameters = parameters or ", ".join(var.name for var in body.parameters)
    with self.block(f"def {name}({parameters}):"):
      for step in body.steps:
        step.op.write(self, step)
      self.line(f"return {results or tuple_text(var.name for var in body.results)}")
    return name

  def text(self) -> str:
    return "\n".join([*self._top, *self._lines]) + "\n"


def tuple_text(names: Any) -> str:
  """The text of a tuple, `(a,)` for one."""
  names = list(names)
  return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


@dataclasses.dataclass(frozen=True)
class Context:
  """Where a body stands, as far as it says what may be in it.

  Attributes:
    depth: how many bodies it is in.
    reverse: True inside of what is differentiated in reverse mode.
    forward: True inside of what is differentiated in forward mode.
    order: how many derivatives are taken around it.
    lanes: True under `vmap`.
    branch: True where lanes may be apart: in a branch or a while loop.
    devices: True in a `shard_map`.
    axes: names that collectives may be over.
    sizes: of these axes.
    nested: what the body has to have as its last step, and in its body, and so on.
  """

  depth: int = 0
  reverse: bool = False
  forward: bool = False
  order: int = 0
  lanes: bool = False
  branch: bool = False
  devices: bool = False
  axes: tuple[str, ...] = ()
  sizes: tuple[int, ...] = ()
  nested: tuple[Draws, ...] = ()

  def into(self, **changes: Any) -> Context:
    return dataclasses.replace(self, depth=self.depth + 1, **changes)


class Scope:
  """The variables that a body's next step may read."""

  def __init__(self, draw: Callable[[Any], Any], outer: Sequence[Var], counter: list[int]) -> None:
    self.draw = draw
    self.vars: list[Var] = list(outer)
    self.steps: list[Step] = []
    self.handles: list[Var] = []  # of objects of the host, of this body and those around it
    self.refs: list[Var] = []  # of JAX, of this body and the loops, branches and jits around it
    self.tickets: list[Var] = []  # of this body's started calls, whose results none has asked for
    self.gates: list[Any] = []  # the operations that call gates, of the whole program
    self.meshes: list[int] = []  # the mesh of the program's `shard_map`s, once one is drawn
    self.drawn = DRAWN  # what draws the program's operations
    self._counter = counter

  def new(self, type_: Array) -> Var:
    self._counter[0] += 1
    return Var(self._counter[0], type_)

  def name(self, kind: str) -> str:
    """A name that no other thing of the program has."""
    self._counter[0] += 1
    return f"{kind}{self._counter[0]}"

  def add(self, op: Op, operands: Sequence[Var], *types: Array) -> tuple[Var, ...]:
    """Adds a step; gives its results."""
    results = tuple(self.new(type_) for type_ in types)
    self.steps.append(Step(op, tuple(operands), results))
    self.vars += results
    return results

  def add_hidden(self, op: Op, operands: Sequence[Var], type_: Array) -> list[Var]:
    """Adds a step whose result is no array: only the parts that know it may read it."""
    result = self.new(type_)
    self.steps.append(Step(op, tuple(operands), (result,)))
    return [result]

  def inner(self, parameters: Sequence[Var], closes: bool = True, refs: bool = False) -> Scope:
    """The scope of a body in this one; without `closes` it sees its parameters alone.

    `refs`: the body may write to the references of JAX's that are around it.
    """
    scope = Scope(self.draw, [*(self.vars if closes else ()), *parameters], self._counter)
    scope.handles += self.handles if closes else []
    scope.refs += self.refs if refs else []
    scope.gates, scope.meshes, scope.drawn = self.gates, self.meshes, self.drawn
    return scope

  def of(self, holds: Callable[[Array], bool]) -> list[Var]:
    return [var for var in self.vars if holds(var.type)]

  def pick(self, variables: Sequence[Var] | None = None) -> Var:
    """A variable, of the latest ones mostly."""
    variables = self.vars if variables is None else variables
    latest = variables[-3:] if self.draw(st.booleans()) else variables
    return self.draw(st.sampled_from(latest))

  def pick_of(self, things: Sequence[T]) -> T:
    return self.draw(st.sampled_from(things))


Draws = Callable[[Scope, Context], bool]  # adds steps; False where the scope has nothing for it
DRAWN: dict[str, list[Draws]] = {
  kind: [] for kind in ("arithmetic", "part", "transformation", "collective")
}


def drawn(kind: str) -> Callable[[Draws], Draws]:
  """Registers what draws operations of a kind."""

  def register(draws: Draws) -> Draws:
    DRAWN[kind].append(draws)
    return draws

  return register
