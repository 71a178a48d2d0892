# SPDX-License-Identifier: Apache-2.0
"""How long callables, names and memory live: as long as a program can call them, and no longer."""

from __future__ import annotations

import collections
import ctypes
import gc
import resource
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import drop_programs, drop_programs_until
from waiting import until

import callgate as cg
from callgate import _callgate
from callgate._core import encoding, method_objects
from callgate._tap import target as _target

X = np.float32(1)
pytestmark = pytest.mark.usefixtures("young_heap")


class Callable:
  """A callable that a weak reference can watch."""

  def __call__(self, x: Any) -> Any:
    return x + x


def collect() -> None:
  gc.collect()
  _callgate.drain()
  gc.collect()


def wait_for_the_end_of(watch: weakref.ref[Any]) -> None:
  """A program that has just run is let go of by XLA's own threads."""

  def is_gone() -> bool:
    collect()
    return watch() is None

  until(is_gone, "gone")


def test_a_gate_that_was_never_compiled_dies_with_its_last_reference() -> None:
  function = Callable()
  watch = weakref.ref(function)
  gate = cg.gate(function, out=lambda x: x)
  del function
  assert watch() is not None
  del gate
  collect()
  assert watch() is None


@pytest.mark.parametrize("thread", ["xla", "own"])
def test_a_program_keeps_its_gate_of_a_tree_and_frees_it(thread: str) -> None:
  function = (lambda f: lambda x: {"y": f(x)})(Callable())
  watch = weakref.ref(function)
  gate = cg.gate(function, out=lambda x: {"y": x}, thread=thread)
  compiled = jax.jit(lambda x: gate(x)).lower(X).compile()  # noqa: F821
  del function, gate
  jax.clear_caches()
  collect()
  assert watch() is not None
  assert jax.tree.leaves(jax.block_until_ready(compiled(X))) == [2]
  del compiled
  jax.clear_caches()
  wait_for_the_end_of(watch)


def test_the_arguments_of_a_call_do_not_outlive_it() -> None:
  class Token:
    pass

  watch: list[Any] = []

  @cg.gate(out=lambda x: x, effect="io")
  def make(x: Any) -> Any:
    token = Token()
    watch.append(weakref.ref(token))
    return x

  jax.block_until_ready(jax.jit(make)(X))
  assert watch[0]() is None


def test_many_gates_created_and_dropped_leave_nothing_behind() -> None:
  collect()
  before = set(_callgate.registered_names())
  for i in range(2_000):
    cg.gate(Callable(), out=lambda x: x, name=f"short-lived {i}")
  collect()
  assert set(_callgate.registered_names()) <= before
  assert not [name for name in cg.stats() if name.startswith("short-lived")]


def lanes_apart(gate: Any) -> Any:
  return jax.vmap(lambda x: jax.lax.cond(x > 0, gate, lambda x: x, x))


# Uses of a gate that a user, or a cell of a notebook, drops with it. The contract has more: in a
# program, and under `vmap`.
DROPPED: dict[str, Any] = {
  "called": lambda gate: gate(X),
  "grad": lambda gate: jax.grad(gate)(X),
  "jit of grad": lambda gate: jax.jit(jax.grad(jax.checkpoint(lambda x: gate(x) ** 2)))(X),
  "scan": lambda gate: jax.jit(
    lambda x: jax.lax.scan(lambda c, _: (gate(c), None), x, None, length=3)
  )(X),
  "cond": lambda gate: jax.jit(lambda x: jax.lax.cond(x > 0, gate, lambda x: x, x))(X),
  "vmap of cond": lambda gate: jax.jit(lanes_apart(gate))(X[None]),
}


@pytest.mark.parametrize(
  ("how", "kind"),
  [
    *((how, "pure") for how in DROPPED),
    *(("scan", kind) for kind in ("io", "ordered")),
    *(("vmap of cond", kind) for kind in ("io", "ordered")),
    *(("jit of grad", kind) for kind in ("torch", "kernel")),
  ],
)
def test_gates_that_are_dropped_with_their_programs_do_not_pile_up(how: str, kind: str) -> None:
  """Though JAX's caches are never cleared."""

  def make(function: Callable) -> Any:
    if kind == "torch":
      return cg.torch(function)
    if kind == "kernel":  # the function is what it is compared with
      return cg.elementwise("T x", "T y", "y = x + x", jvp="dy = dx + dx", like=function)
    gate = cg.gate(function, out=lambda x: x, effect=kind)
    gate.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
    return gate

  if kind == "torch":
    pytest.importorskip("torch", reason="PyTorch is not installed")
  before = set(_callgate.registered_names())
  watches: list[weakref.ref[Any]] = []
  for _ in range(3):
    function = Callable()
    watches.append(weakref.ref(function))
    DROPPED[how](make(function))
    del function
  for watch in watches:
    wait_for_the_end_of(watch)
  assert set(_callgate.registered_names()) <= before


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_lanes_apart_outside_of_programs_are_freed_with_jaxs_caches(
  effect: Any, clean_caches: None
) -> None:
  function = Callable()
  watch = weakref.ref(function)
  jax.block_until_ready(lanes_apart(cg.gate(function, out=lambda x: x, effect=effect))(X[None]))
  jax.effects_barrier()
  del function
  drop_programs_until(lambda: watch() is None)


@pytest.mark.parametrize(("how", "ordered"), [("called", False), ("grad", False), ("scan", True)])
def test_consumers_that_are_dropped_with_their_programs_do_not_pile_up(
  how: str, ordered: bool
) -> None:
  """Though JAX's caches are never cleared."""
  before = set(_callgate.registered_names())
  watches: list[weakref.ref[Any]] = []
  for _ in range(3):
    consumer = Callable()
    watches.append(weakref.ref(consumer))
    DROPPED[how](lambda x, consumer=consumer: cg.tap(x, consumer, ordered=ordered))
    cg.barrier()
    del consumer
  for watch in watches:
    wait_for_the_end_of(watch)
  assert set(_callgate.registered_names()) <= before


def test_a_consumer_that_refers_to_its_own_channel_or_tap_is_collected() -> None:
  class Owner:
    def __init__(self, number: int) -> None:
      self.channel = cg.channel(f"lifetime {number}", to=self.consume)
      self.tap = _target.of_function(self.consume)

    def consume(self, value: Any) -> None:
      pass

  watches: list[weakref.ref[Any]] = []
  for number in range(3):
    owner = Owner(number)
    owner.channel.close()
    watches.append(weakref.ref(owner))
    del owner
  for watch in watches:
    wait_for_the_end_of(watch)


def thread_states() -> int:
  """The threads that the interpreter knows, by its own list."""
  api, pointer = ctypes.pythonapi, ctypes.c_void_p
  get = ctypes.PYFUNCTYPE(pointer)(("PyInterpreterState_Get", api))
  head = ctypes.PYFUNCTYPE(pointer, pointer)(("PyInterpreterState_ThreadHead", api))
  following = ctypes.PYFUNCTYPE(pointer, pointer)(("PyThreadState_Next", api))
  count, state = 0, head(get())
  while state:
    count, state = count + 1, following(state)
  return count


def test_the_threads_of_closed_channels_leave_nothing_behind() -> None:
  tapped = jax.jit(lambda x: cg.tap(x, "threads"))
  seen: list[float] = []
  with cg.channel("threads"):
    tapped(X)  # XLA's thread, which stays
  before = thread_states()
  for _ in range(20):
    with cg.channel("threads", to=lambda x: seen.append(float(x))):
      tapped(X)
  assert seen == [1.0] * 20
  assert thread_states() <= before


def test_the_threads_of_gates_leave_nothing_behind() -> None:
  """Nested threads are given back, five seconds after their last call."""
  depth = 5

  def nest(x: Any) -> Any:
    return x if x == depth else np.asarray(program(x + 1))

  program = jax.jit(cg.gate(nest, out=lambda x: x, thread="own"))
  program(np.float32(depth))  # JAX lets a program's first call come to its end before others
  before = thread_states()
  assert program(np.float32(0)) == depth
  assert thread_states() > before + 2  # more than are kept
  until(lambda: thread_states() <= before + 2, "their states given back")


# -- names ---
def test_a_name_of_a_live_gate_is_refused() -> None:
  first = cg.gate(Callable(), out=lambda x: x, name="taken")
  with pytest.raises(ValueError, match="'taken' is taken by another live gate"):
    cg.gate(Callable(), out=lambda x: x, name="taken")
  assert jax.jit(first)(X) == 2
  assert "taken" in cg.stats()


def test_a_name_is_free_again_when_its_gate_is_gone() -> None:
  for factor in (2, 3):
    gate = cg.gate(lambda x, factor=factor: factor * x, out=lambda x: x, name="reused")
    assert jax.jit(gate)(X) == factor
    del gate
    jax.clear_caches()
    collect()
  assert "reused" not in _callgate.registered_names()


def test_a_program_goes_on_calling_its_own_gate_when_the_name_has_a_new_owner() -> None:
  def named(factor: int) -> cg.Gate:
    return cg.gate(lambda x: np.float32(factor * x), out=lambda x: x, name="inherited")

  old = named(2)
  compiled = jax.jit(lambda x: old(x)).lower(X).compile()  # noqa: F821
  del old
  jax.clear_caches()
  collect()
  new = named(3)
  assert jax.jit(new)(X) == 3
  assert compiled(X) == 2


# -- memory ---
def growth(calls: int, warm_up: int) -> int:
  """Bytes by which `calls` calls of a few kinds of gates raise the process's peak."""
  x = jnp.zeros(16)
  simple = cg.gate(lambda x: x + 1, out=lambda x: x)
  tree = cg.gate(lambda t: {"y": t["x"]}, out=lambda t: {"y": t["x"]})

  def fill(out: Any, x: Any) -> None:
    np.add(x, 1, out=out)

  inplace = cg.gate(fill, out=lambda x: x, style="inplace")

  @jax.jit
  def program(x: Any, n: Any) -> Any:
    return jax.lax.fori_loop(0, n, lambda _, x: tree({"x": inplace(simple(x))})["y"], x)

  jax.block_until_ready(program(x, warm_up // 3))
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  jax.block_until_ready(program(x, calls // 3))
  return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_calls_do_not_grow_the_process() -> None:
  assert growth(60_000, warm_up=30_000) < 1 << 20


@pytest.mark.slow
def test_a_million_calls_grow_the_process_by_less_than_a_mebibyte() -> None:
  assert growth(1_000_000, warm_up=100_000) < 1 << 20


class Slotted:
  """Takes no weak reference."""

  __slots__ = ("factor",)

  def __init__(self, factor: float) -> None:
    self.factor = factor

  @cg.gate(out=lambda x: x)
  def times(self, x: Any) -> Any:
    return x * self.factor


def test_objects_that_take_no_weak_reference_go_with_their_programs(clean_caches: None) -> None:
  def kept(count: int) -> int:
    for factor in range(count):
      one = Slotted(float(factor))
      program = jax.jit(lambda x, one=one: one.times(x)).lower(2.0).compile()
      del one
      drop_programs()  # the program is called though nobody else has the object
      assert program(2.0) == 2 * factor
      del program
    drop_programs()
    return len(method_objects._objects) + len(method_objects._names)

  assert kept(2) == kept(4)


def test_objects_of_other_processes_are_kept_up_to_a_number(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(method_objects, "_MOST", 2)
  monkeypatch.setattr(method_objects, "_learned", collections.OrderedDict())
  for number in range(4):
    encoding.learn({f"object#{number}": Slotted(number)})
  assert method_objects.find("object#3").value.factor == 3
  assert list(method_objects._learned) == ["object#2", "object#3"]


def test_calls_outside_of_programs_keep_the_latest_functions_alone(clean_caches: None) -> None:
  kept = []
  for _ in range(70):
    f = lambda x: x + 1
    cg.call(f, jax.ShapeDtypeStruct((), np.float32), np.float32(1))
    kept.append(weakref.ref(f))
    del f
  until(lambda: sum(ref() is not None for ref in kept) <= 64, "the first functions are gone")
