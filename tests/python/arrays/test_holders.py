# SPDX-License-Identifier: Apache-2.0
"""A holder of XLA's address is named, and can't read other numbers a second time."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import ctypes
import dataclasses
import functools
import itertools
import pickle
import queue
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_memory import SCALAR, leaked, names, numbers, reuse_memory

import callgate as cg

SIZE = 1 << 12


def tree(x: Any) -> Any:
  spatial = pytest.importorskip("scipy.spatial", reason="SciPy is not installed")
  return spatial.cKDTree(x.view(np.float64).reshape(-1, 2))


def balls(x: Any) -> Any:
  neighbors = pytest.importorskip("sklearn.neighbors", reason="scikit-learn is not installed")
  return neighbors.KDTree(x.view(np.float64).reshape(-1, 2))


def arrow(x: Any) -> Any:
  return pytest.importorskip("pyarrow", reason="pyarrow is not installed").py_buffer(x)


def jax_array(x: Any) -> Any:
  return jax.device_put(x, jax.devices("cpu")[0])


def held_memoryview(x: Any) -> Any:
  view = memoryview(x)
  return view, pickle.PickleBuffer(view)


# How an address is kept, how to read the first number through it, and what the error calls it.
HIDDEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
  "flat": (lambda x: x.flat, lambda kept: kept[0], "x.flat"),
  "flat of a part": (lambda x: x[1:].flat, lambda kept: kept[0] - 1, "x.flat"),
  "a part and its flat": (
    lambda x: (lambda part: (part, part.flat))(x[1:]),
    lambda kept: kept[1][0] - 1,
    "x.flat",
  ),
  "nditer": (lambda x: np.nditer(x), lambda kept: kept.value, "x.flat"),
  "ctypes": (
    lambda x: x.ctypes,
    lambda kept: ctypes.c_float.from_address(kept.data).value,
    "_ctypes",
  ),
  "a pointer of ctypes": (
    lambda x: x.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
    lambda kept: kept[0],
    "c_float",
  ),
  "a pointer with an attribute": (
    lambda x: (lambda pointer: setattr(pointer, "keep", x) or pointer)(
      ctypes.c_void_p(x.ctypes.data)
    ),
    lambda kept: ctypes.c_float.from_address(kept.value).value,
    "c_void_p",
  ),
  "a pickle's buffer": (
    lambda x: pickle.PickleBuffer(x),
    lambda kept: np.frombuffer(kept, np.float32)[0],
    "PickleBuffer",
  ),
  "a memoryview that is read": (
    held_memoryview,
    lambda kept: np.frombuffer(kept[1], np.float32)[0],
    "memoryview",
  ),
  "SciPy's tree": (tree, lambda kept: kept.query([0.0, 0.0])[0], "cKDTree"),
  "scikit-learn's tree": (balls, lambda kept: kept.query([[0.0, 0.0]])[0][0, 0], "memoryview"),
  "pyarrow's buffer": (arrow, lambda kept: np.frombuffer(kept, np.float32)[0], "x.flat"),
  "a jax.Array": (jax_array, lambda kept: kept[0], "x.flat"),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_a_holder_of_an_address_is_named_and_gets_private_copies_from_then_on(way: str) -> None:
  keep, read, holder = HIDDEN[way]
  store: list[Any] = []

  @cg.gate(out=SCALAR, effect="io", name=f"hidden{next(names)}")
  def leak(weights: Any) -> Any:
    store.append(keep(weights))
    return np.float32(0)

  program = jax.jit(lambda x: leak(x * 1))
  with pytest.raises(cg.EscapedViewError) as caught, cg.errors():
    jax.block_until_ready(program(numbers(SIZE)))
  assert "still points to XLA's memory of argument 'weights'" in str(caught.value)
  assert holder in str(caught.value)
  truth = read(keep(numbers(SIZE)))
  with cg.errors():
    for _ in range(2):
      jax.block_until_ready(program(numbers(SIZE)))
  reuse_memory()
  assert [read(kept) for kept in store[1:]] == [truth, truth]


def test_the_same_holder_of_another_argument_is_not_blamed() -> None:
  store: list[Any] = []

  @cg.gate(out=SCALAR, effect="io", name=f"hidden{next(names)}")
  def leak(a: Any, b: Any) -> Any:
    store.extend([a, b.flat])
    return np.float32(0)

  with pytest.raises(cg.EscapedViewError) as caught, cg.errors():
    jax.block_until_ready(jax.jit(leak)(numbers(8), numbers(8)))
  assert "argument 'a', argument 'b': a view" in str(caught.value)
  assert "XLA's memory of argument 'b':" in str(caught.value)


@pytest.mark.parametrize("arrays", ["buffer", "torch"])
def test_an_address_behind_other_kinds_of_arrays_is_found(arrays: str) -> None:
  if arrays == "torch":
    pytest.importorskip("torch", reason="PyTorch is not installed")
  store: list[Any] = []
  gate = cg.gate(
    lambda x: (store.append(np.asarray(x).flat), np.float32(0))[1],
    out=SCALAR,
    effect="io",
    arrays=arrays,
  )
  program = jax.jit(lambda x: gate(x * 1))
  with pytest.raises(cg.EscapedViewError, match="something else still points"), cg.errors():
    jax.block_until_ready(program(numbers(SIZE)))
  with cg.errors():
    jax.block_until_ready(program(numbers(SIZE)))
  reuse_memory()
  np.testing.assert_array_equal(np.array(list(store[1])), numbers(SIZE))


@pytest.mark.parametrize("style", ["inplace", "context"])
@pytest.mark.parametrize("arrays", ["numpy", "buffer"])
def test_a_result_that_something_points_to_is_private_afterwards(style: str, arrays: str) -> None:
  store: list[Any] = []

  def leak(*arguments: Any) -> None:
    *_, out, x = arguments
    np.add(np.asarray(out), x, out=np.asarray(out))  # with the alias: out holds x
    store.append(np.asarray(out).flat)

  gate = cg.gate(leak, out=lambda x: x, style=style, arrays=arrays, aliases={0: 0})
  program = jax.jit(lambda x: gate(x * 1) + 0)
  with pytest.raises(cg.EscapedViewError, match=r"still points to .* of result 0"), cg.errors():
    jax.block_until_ready(program(numbers(SIZE)))
  with cg.errors():
    for _ in range(2):
      np.testing.assert_array_equal(program(numbers(SIZE)), 2 * numbers(SIZE))
  reuse_memory()
  for kept in store[1:]:
    np.testing.assert_array_equal(np.array(list(kept)), 2 * numbers(SIZE))


def test_an_exception_beside_a_kept_address_stays_itself_and_makes_inputs_private() -> None:
  store: list[Any] = []

  @cg.gate(out=SCALAR, effect="io", name=f"hidden{next(names)}")
  def fail(x: Any) -> Any:
    store.append(x.flat)
    raise KeyError("my own")

  program = jax.jit(lambda x: fail(x * 1))
  for _ in range(2):
    with pytest.raises(KeyError, match="my own"), cg.errors():
      jax.block_until_ready(program(numbers(SIZE)))
  reuse_memory()
  assert store[1][7] == 7


def test_an_exceptions_own_views_leave_the_inputs_as_they_are() -> None:
  addresses: list[int] = []

  @cg.gate(out=SCALAR, effect="io", name=f"hidden{next(names)}")
  def fail(x: Any) -> Any:
    addresses.append(x.flags.writeable)
    part = x[1:]
    part.no_such_attribute  # noqa: B018  # the exception holds it, as its `obj`

  program = jax.jit(lambda x: fail(x * 1))
  for _ in range(3):
    with pytest.raises(AttributeError), cg.errors():
      jax.block_until_ready(program(numbers(SIZE)))
  assert addresses == [False] * 3  # a private copy could be written to


# -- holders that are not to blame ---
class Plain:
  pass


class WithSlots(Plain):
  __slots__ = ("a", "b")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
  array: Any


class Pair(NamedTuple):
  first: Any
  second: Any


class Fields(dict[str, Any]):
  pass


class Parts(tuple[Any, ...]):
  pass


class Local(threading.local):
  array: Any = None


class MyError(Exception):
  pass


class Generic(collections.UserList[Any]):
  pass


def with_attribute(holder: Any, x: Any) -> Any:
  holder.a = x
  return holder


def in_queue(x: Any) -> Any:
  waiting: Any = queue.SimpleQueue()
  waiting.put(x)
  return waiting


def in_context(x: Any) -> Any:
  variable: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
  context = contextvars.copy_context()
  context.run(variable.set, x)
  return context


async def waiting(x: Any) -> Any:
  await asyncio.sleep(0)
  return x


@functools.cache
def cached(key: int) -> Any:
  return kept_by_cache[key]


kept_by_cache: dict[int, Any] = {}


def in_cache(x: Any) -> Any:
  kept_by_cache[id(x)] = x
  cached(id(x))
  return None


def in_exception(x: Any) -> Any:
  try:
    raise MyError(x)
  except MyError as error:
    return error


PLAIN: dict[str, Callable[[Any], Any]] = {
  "an attribute": lambda x: with_attribute(Plain(), x),
  "a slot": lambda x: with_attribute(WithSlots(), x),
  "a frozen dataclass": Frozen,
  "a named tuple": lambda x: Pair(x, x),
  "a subclass of dict": lambda x: Fields(x=x),
  "a subclass of tuple": lambda x: Parts([x, x[1:]]),
  "a user's list": lambda x: Generic([x]),
  "an array's attribute": lambda x: with_attribute(np.ma.masked_array([1.0]), x),
  "an attribute of a function": lambda x: with_attribute(lambda: 0, x),
  "a class's attribute": lambda x: type("Made", (), {"x": x}),
  "a module's attribute": lambda x: with_attribute(types.ModuleType("made"), x),
  "a namespace": lambda x: types.SimpleNamespace(x=x),
  "a thread's locals": lambda x: with_attribute(Local(), x),
  "a deque": lambda x: collections.deque([x]),
  "a defaultdict": lambda x: collections.defaultdict(lambda: x, a=x),
  "an OrderedDict": lambda x: collections.OrderedDict(a=x),
  "a partial": lambda x: functools.partial(print, x, end=x),
  "a method": lambda x: types.MethodType(print, x),
  "an iterator": lambda x: itertools.chain(iter([x]), itertools.repeat(x)),
  "a coroutine": waiting,
  "a queue": in_queue,
  "a context": in_context,
  "a cache": in_cache,
  "an exception": in_exception,
  "an object array, twice": lambda x: (lambda cell: (cell.__setitem__(0, x), cell[:], cell.view()))(
    np.empty(1, object)
  ),
}


@pytest.mark.parametrize("way", PLAIN)
def test_a_holder_of_pythons_is_not_blamed(way: str) -> None:
  kept, said = leaked(PLAIN[way], numbers(8))
  assert "holds a private copy of the data." in said
  kept_by_cache.clear()
  cached.cache_clear()
  if isinstance(kept, types.CoroutineType):
    kept.close()  # or it warns, wherever it is collected


# -- copy=True ---
@pytest.mark.parametrize("arrays", ["numpy", "buffer", "jax", "torch"])
def test_copies_may_be_kept_whole(arrays: str) -> None:
  if arrays == "torch":
    pytest.importorskip("torch", reason="PyTorch is not installed")
  store: list[Any] = []
  program = jax.jit(
    cg.gate(
      lambda x: (store.append(x), np.float32(0))[1],
      out=SCALAR,
      effect="io",
      arrays=arrays,
      copy=True,
      thread="own",
    )
  )
  with cg.errors():
    for k in range(2):
      jax.block_until_ready(program(numbers(SIZE) + k))
  reuse_memory()
  for k in range(2):
    np.testing.assert_array_equal(np.asarray(store[k]), numbers(SIZE) + k)


def test_copies_under_vmap_and_of_pytrees_are_one_a_lane() -> None:
  store: list[Any] = []

  @cg.gate(out=lambda tree: tree["a"], copy=True)
  def keep(tree: Any) -> Any:
    tree["a"] += 1  # its own
    store.append(tree["a"].flat)
    return tree["a"]

  x = numbers(12).reshape(3, 4)
  with cg.errors():
    np.testing.assert_array_equal(jax.jit(jax.vmap(keep))({"a": x}), x + 1)
  reuse_memory()
  np.testing.assert_array_equal([list(kept) for kept in store], x + 1)


def test_a_copying_gates_results_are_still_looked_after() -> None:
  store: list[Any] = []

  @cg.gate(out=lambda x: x, style="inplace", copy=True, name=f"hidden{next(names)}")
  def leak(out: Any, x: Any) -> None:
    out[:] = x
    store.extend([out, x])

  with pytest.raises(cg.EscapedViewError, match=r"hidden\d+': result 0: a view"), cg.errors():
    jax.block_until_ready(jax.jit(leak)(numbers(8)))


@pytest.mark.parametrize("arrays", ["cupy", "numba"])
def test_arrays_of_a_gpu_alone_are_refused(arrays: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match="copy=True: expected arrays in host memory"):
    cg.gate(lambda x: x, out=lambda x: x, arrays=arrays, copy=True)


def test_a_report_of_what_threads_do_keeps_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
  began = threading.Event()

  def slow(frame: Any) -> list[str]:
    if not began.is_set():
      began.set()
      time.sleep(0.3)  # the call ends meanwhile, and its frame holds the argument
    return traceback.StackSummary.extract(traceback.walk_stack(frame)).format()

  monkeypatch.setattr(traceback, "format_stack", slow)

  def gate(x: np.ndarray) -> np.ndarray:
    assert began.wait(60)
    return x + 1

  with cg.config(stall_seconds=0.05):
    result = jax.jit(cg.gate(gate, out=lambda x: x))(jnp.float32([1, 2]))
    np.testing.assert_array_equal(result, [2, 3])
