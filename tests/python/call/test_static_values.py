# SPDX-License-Identifier: Apache-2.0
"""Static values: a call gets its own object, and 1 is neither True nor 1.0.

The oracle is the plain call of the function in Python.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import textwrap
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from interpreters import printed_by
from jax import export
from jax.experimental import serialize_executable
from programs import drop_programs
from switch_interval import switch_interval

import callgate as cg

X = np.zeros((), np.float32)


class Log:
  """Two of them are equal, and pickle to the same bytes."""

  def __init__(self) -> None:
    self.items: list[float] = []

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Log)

  def __hash__(self) -> int:
    return 0

  def add(self, item: Any) -> None:
    self.items.append(float(item))


@dataclasses.dataclass(frozen=True)
class Named:
  name: str
  log: Log = dataclasses.field(default_factory=Log, compare=False)

  @property
  def items(self) -> list[float]:
    return self.log.items


class Pair(NamedTuple):
  name: str
  log: Log


class Slotted:
  __slots__ = ("items",)

  def __init__(self) -> None:
    self.items: list[float] = []


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["log"])
@dataclasses.dataclass
class Node:
  value: Any
  log: Any


def note(x: Any, *, log: Any) -> Any:
  log.items.append(float(x))
  return x


# -- each call gets its own object -----------------------------------------------------------------
def of_keyword(x: Any, *, log: Any) -> Any:
  log.items.append(float(x))
  return x


def of_tuple(x: Any, *, log: Any) -> Any:
  log[1].items.append(float(x))
  return x


def of_method(x: Any, *, add: Any) -> Any:
  add(float(x))
  return x


def of_node(tree: Any) -> Any:
  tree.log.items.append(float(tree.value))
  return tree.value


def of_leaf(tree: Any) -> Any:
  tree["log"].items.append(float(tree["a"]))
  return tree["a"]


OWN: dict[str, tuple[Any, Callable[[], Any], Callable[..., Any]]] = {
  "object": (of_keyword, Log, lambda g, x, log: g(x, log=log)),
  "slots": (of_keyword, Slotted, lambda g, x, log: g(x, log=log)),
  "dataclass": (of_keyword, lambda: Named("a"), lambda g, x, log: g(x, log=log)),
  "tuple": (of_tuple, Log, lambda g, x, log: g(x, log=("a", log))),
  "named tuple": (of_tuple, Log, lambda g, x, log: g(x, log=Pair("a", log))),
  "bound method": (of_method, Log, lambda g, x, log: g(x, add=log.add)),
  "list's method": (of_method, Log, lambda g, x, log: g(x, add=log.items.append)),
  "meta field": (of_node, Log, lambda g, x, log: g(Node(x, log))),
  "leaf": (of_leaf, Log, lambda g, x, log: g({"a": x, "log": log})),
}


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("engine", ["callgate", "jax"])
@pytest.mark.parametrize("place", OWN)
def test_each_call_gets_its_own_object(place: str, engine: Any, derivative: bool) -> None:
  function, make, call = OWN[place]
  like = {"like": lambda *a, **_: jax.tree.leaves(a)[0]} if derivative else {}
  out = {} if derivative else {"out": lambda *a, **_: jax.tree.leaves(a)[0]}
  gate = cg.gate(function, effect="io", **like, **out)
  one, two, three, four = (make() for _ in range(4))
  with cg.config(engine=engine):
    jax.jit(lambda x: (call(gate, x, one), call(gate, x + 1, two)))(X)
    call(gate, X + 2, three)
    for step in range(3):
      call(gate, X + 3 + step, four)
  jax.effects_barrier()
  logs = [log.items for log in (one, two, three, four)]
  assert logs == [[0.0], [1.0], [2.0], [3.0, 4.0, 5.0]]


def test_each_run_gets_its_own_generator() -> None:
  @cg.gate(out=lambda x, **_: x, effect="io")
  def noise(x: Any, *, rng: Any) -> Any:
    return rng.normal(size=x.shape).astype(np.float32)

  def run(draw: Callable[[Any], Any]) -> list[float]:
    rng = np.random.default_rng(0)
    return [float(draw(rng)) for _ in range(2)]

  want = run(lambda rng: np.float32(rng.normal()))
  assert [run(lambda rng: noise(X, rng=rng)) for _ in range(2)] == [want, want]


# -- equal is not the same -------------------------------------------------------------------------
class One(enum.IntEnum):
  ONE = 1


class Text(str):
  __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Config:
  value: Any


SAME = [
  (1, True, 1.0, One.ONE, complex(1)),
  (0.0, -0.0, 0, False),
  (complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0)),
  ((1, 2), (1.0, 2), (True, 2), Pair(1, 2)),  # type: ignore[arg-type]
  (Config(1), Config(True), Config((1.0,)), Config((1,)), Config(-0.0), Config(0.0)),
  (frozenset({1}), frozenset({True}), frozenset({1.0})),
  ("a", Text("a"), b"a"),
  (float("nan"), float("inf"), float("-inf")),
]
GATES: dict[str, dict[str, Any]] = {
  "plain": {},
  "like": {"like": lambda x, *, k: x},
  "differences": {"gradient": "finite-difference"},
  "jvp": {},
  "vjp": {},
}


@pytest.mark.parametrize("kind", GATES)
def test_equal_values_of_other_types_and_signs_are_other_values(kind: str) -> None:
  got: list[str] = []
  gate = cg.gate(
    lambda x, *, k: got.append(repr(k)) or x,
    **({"out": lambda x, **_: x} | GATES[kind]),
    effect="pure" if kind == "differences" else "io",
  )  # fmt: skip
  if kind == "jvp":
    gate.defjvp(lambda p, t, *, k: (gate(p[0], k=k), t[0]))
  if kind == "vjp":
    gate.defvjp(lambda x, *, k: (gate(x, k=k), None), lambda _, bar: (bar,))
  values = [value for row in SAME for value in row]
  jax.jit(lambda x: [gate(x, k=k) for k in values])(X)
  jax.effects_barrier()
  assert set(got) == set(map(repr, values))
  assert kind == "differences" or len(got) == len(values)
  got.clear()
  for k in values[:8]:
    gate(X, k=k)
  jax.effects_barrier()
  assert got == list(map(repr, values[:8]))


def test_a_value_of_one_content_has_one_program() -> None:
  calls = [0]
  gate = cg.gate(lambda x, *, k: x, out=lambda x, **_: x)
  for make in (lambda: float("nan"), lambda: Config((1, "a")), lambda: Text("b")):
    for _ in range(3):
      gate(X, k=make())
    calls.append(gate._programs._kept[0].cache_info().currsize)
  assert calls == [0, 1, 2, 3]


def test_structures_differ_by_the_types_of_what_they_keep() -> None:
  got: list[str] = []
  gate = cg.gate(lambda tree: got.append(repr(tree.log)) or tree.value, out=lambda t: t.value)
  for kept in (1, True, 1.0, (0.0,), (-0.0,)):
    gate(Node(X, kept))
  keys = cg.gate(lambda tree: got.append(repr(list(tree))) or tree, out=lambda t: t)
  for key in (1, True, 1.0):
    keys({key: X})
  assert got == ["1", "True", "1.0", "(0.0,)", "(-0.0,)", "[1]", "[True]", "[1.0]"]


# -- the life of objects ---------------------------------------------------------------------------
class Big:
  """Says how often it was pickled."""

  pickled = 0

  def __init__(self) -> None:
    self.data = np.zeros(1000, np.float32)

  def __reduce__(self) -> Any:
    Big.pickled += 1
    return Big, ()


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("way", ["closure", "object", "slots", "leaf", "meta field", "eager"])
def test_objects_end_with_their_programs(way: str, derivative: bool, clean_caches: None) -> None:
  gate = cg.gate(lambda x, **_: x, out=lambda x, **_: x, effect="io")
  trees = cg.gate(lambda t: jax.tree.leaves(t)[0], out=lambda t: jax.tree.leaves(t)[0])
  if derivative:
    gate.defjvp(lambda p, t, **k: (gate(p[0], **k), t[0]))
  alive: list[Any] = []

  def once() -> None:
    big = Big()
    alive.append(weakref.ref(big))
    slotted = Slotted()
    slotted.items = big  # type: ignore[assignment]
    calls: dict[str, Callable[[Any], Any]] = {
      "closure": lambda x: gate(x, fn=lambda: big),
      "object": lambda x: gate(x, fn=big),
      "slots": lambda x: gate(x, fn=(slotted, 1)),
      "leaf": lambda x: trees({"a": x, "b": big}),
      "meta field": lambda x: trees(Node(x, big)),
    }
    if way == "eager":
      gate(X, fn=big)
    else:
      jax.jit(calls[way])(X)

  for _ in range(10):
    once()
  drop_programs()
  gc.collect()
  assert sum(one() is not None for one in alive) <= 1


def test_a_program_keeps_its_objects(clean_caches: None) -> None:
  log = Log()
  gate = cg.gate(note, out=lambda x, **_: x, effect="io")
  compiled = jax.jit(functools.partial(gate, log=log)).lower(X).compile()
  items, alive = log.items, weakref.ref(log)
  del log
  drop_programs()
  compiled(X + 1)
  jax.effects_barrier()
  assert items == [1.0]
  assert alive() is not None


def test_tracing_pickles_nothing() -> None:
  gate = cg.gate(lambda x, **_: x, out=lambda x, **_: x)
  trees = cg.gate(lambda t: t["x"], out=lambda t: t["x"])
  Big.pickled = 0
  big = Big()
  jax.jit(lambda x: gate(x, big=big) + trees({"x": x, "big": big}))(X)
  gate(X, big=big)
  assert Big.pickled == 0


# -- threads ---------------------------------------------------------------------------------------
def test_threads_trace_with_values_of_their_own() -> None:
  gate = cg.gate(lambda x, *, fn: x, out=lambda x, **_: x)
  gate.defjvp(lambda p, t, *, fn: (gate(p[0], fn=fn), t[0]))
  failed: list[BaseException] = []

  def work() -> None:
    try:
      for _ in range(15):
        jax.eval_shape(lambda x: gate(x, fn=lambda x: x), X)
        jax.jit(lambda x: gate(x, fn=lambda x: x)).lower(X)
    except BaseException as error:  # noqa: BLE001 - the test's outcome
      failed.append(error)

  with switch_interval():
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert failed == []


# -- other processes -------------------------------------------------------------------------------
DEFINED = textwrap.dedent("""
  import callgate as cg, dataclasses, jax, numpy as np, pathlib, sys
  from jax import export

  class Log:
    def __init__(self, seed):
      self.seed, self.items = seed, []

  @dataclasses.dataclass(frozen=True)
  class Config:
    log: object

  def note(x, *, log, **_):
    getattr(log, "log", log).items.append(float(x))
    return x

  gate = cg.gate(note, out=lambda x, **_: x, effect="io", name="static.note")
  X = np.float32(1)
""")
EXPORT = DEFINED + textwrap.dedent("""
  a, b, c = Log(1), Log(1), Config(Log(2))
  program = jax.jit(lambda x: (gate(x, log=a), gate(x + 1, log=b), gate(x + 2, log=c)))
  exported = export.export(program, disabled_checks=cg.export_checks())(X)
  pathlib.Path(sys.argv[1]).write_bytes(exported.serialize())
  jax.jit(lambda x: gate(x, log=b))(X)  # others of the same names
  exported.call(X)
  jax.effects_barrier()
  print(a.items, b.items, c.log.items)
""")
CALL = DEFINED + textwrap.dedent("""
  others = [Log(7), Log(8)]
  jax.jit(lambda x: [gate(x, log=log) for log in others])(X)  # of the numbers of those
  mine = Log(1), Log(1), Config(Log(2))
  jax.jit(lambda x: [gate(x, log=log) for log in mine])(X)
  jax.effects_barrier()
  logs = *mine[:2], mine[2].log, *others
  for log in logs:
    log.items.clear()
  program = export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
  program.call(X)
  jax.effects_barrier()
  print(*(log.items for log in logs))
  del mine, others, log, logs
  jax.clear_caches()
  try:
    export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes())).call(X)
  except Exception as error:
    print("has not seen" in str(error))
""")


def test_an_exported_program_calls_with_objects_of_the_content_there(tmp_path: Any) -> None:
  path = str(tmp_path / "program")
  assert printed_by(EXPORT, path).splitlines() == ["[1.0] [1.0, 2.0] [3.0]"]
  assert printed_by(CALL, path).splitlines() == ["[1.0] [2.0] [3.0] [] []", "True"]


def test_values_that_cannot_go_to_other_processes_are_refused_at_the_export() -> None:
  gate = cg.gate(lambda x, **_: x, out=lambda x, **_: x)
  program = jax.jit(lambda x: gate(x, fn=lambda: None))
  with pytest.raises(
    cg.GateDefinitionError, match=r"static value .*a function: .*functions of modules"
  ):
    export.export(program, disabled_checks=cg.export_checks())(X)
  program = jax.jit(lambda x: gate(x, fn=np.tanh, k=Config((1, "a")), e=One.ONE))
  exported = export.export(program, disabled_checks=cg.export_checks())(X)
  assert exported.call(X) == 0


def test_a_compiled_program_with_an_object_is_not_serialized() -> None:
  gate = cg.gate(lambda x, **_: x + 1, out=lambda x, **_: x)
  compiled = jax.jit(lambda x: gate(x, log=Log())).lower(X).compile()
  with pytest.raises(Exception, match="object of this process"):
    serialize_executable.serialize(compiled)
  compiled = jax.jit(lambda x: gate(x, k=Config((1, "a")), fn=np.tanh)).lower(X).compile()
  loaded = serialize_executable.deserialize_and_load(
    *serialize_executable.serialize(compiled), execution_devices=jax.devices()[:1]
  )
  assert loaded(X) == 1
