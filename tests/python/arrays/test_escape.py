# SPDX-License-Identifier: Apache-2.0
"""Views of XLA's memory: inputs can't be written, and what outlives its call is made safe."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_memory import SCALAR, SIZE, leaked, names, numbers, reuse_memory, run

import callgate as cg


# -- inputs are read-only ---
def set_item(x: Any) -> None:
  x[...] = 1


WRITES = {
  "an assignment": set_item,
  "a ufunc's out": lambda x: np.add(x, 1, out=x),
  "setflags": lambda x: x.setflags(write=True),
  "a slice": lambda x: set_item(x[1:]),
  "a slice's setflags": lambda x: x[1:].setflags(write=True),
  "another dtype": lambda x: set_item(x.view(np.uint8)),
  "a reshaped view": lambda x: set_item(x.reshape(2, -1)),
  "asarray": lambda x: set_item(np.asarray(x)),
  "a memoryview": lambda x: memoryview(x).__setitem__(0, 1.0),
  "frombuffer": lambda x: set_item(np.frombuffer(x, np.float32)),
  "the ctypes buffer": lambda x: np.ctypeslib.as_ctypes(x),
  "DLPack": lambda x: set_item(np.from_dlpack(x)),
  "DLPack's setflags": lambda x: np.from_dlpack(x).setflags(write=True),
  "the array interface": lambda x: set_item(
    np.asarray(types.SimpleNamespace(__array_interface__=x.__array_interface__, base=x))
  ),
  "sort": lambda x: x.sort(),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("arrays", ["numpy", "buffer"])
def test_an_input_cannot_be_written_through(way: str, arrays: str) -> None:
  x = numbers(8)
  refused: list[BaseException] = []

  def write(view: Any) -> Any:
    try:
      WRITES[way](np.asarray(view) if arrays == "buffer" else view)
    except (ValueError, TypeError, BufferError) as error:
      refused.append(error.with_traceback(None))
    np.testing.assert_array_equal(np.asarray(view), x)
    return np.float32(0)

  run(write, x, arrays=arrays)
  assert refused


def test_check_writes_finds_a_write_through_a_pointer() -> None:
  def poke(victim: Any) -> Any:
    import ctypes

    ctypes.memset(victim.ctypes.data, 1, 4)
    return np.float32(0)

  with (
    cg.config(check_writes=True),
    pytest.raises(cg.InputWriteError, match=r"gate 'look\d+': argument 'victim' was written to"),
  ):
    run(poke, numbers(8))


def test_check_writes_lets_readers_and_results_alone() -> None:
  @cg.gate(out=lambda x: x, style="inplace")
  def double(out: Any, x: Any) -> None:
    np.add(x, x, out=out)

  with cg.config(check_writes=True), cg.errors():
    np.testing.assert_array_equal(jax.jit(double)(numbers(8)), 2 * numbers(8))


@pytest.mark.parametrize("style", ["inplace", "return"])
@pytest.mark.parametrize("run_on", ["xla", "processes"])
def test_check_writes_lets_aliases_alone(style: Any, run_on: Any) -> None:
  with cg.config(check_writes=True), cg.errors():
    double = cg.gate(
      doubled_in_place if style == "inplace" else doubled,
      out=lambda x: x,
      style=style,
      aliases={0: 0},
      run_on=run_on,
    )
    np.testing.assert_array_equal(jax.jit(double)(numbers(8)), 2 * numbers(8))
    np.testing.assert_array_equal(
      jax.jit(jax.vmap(double))(numbers(8).reshape(2, 4)), 2 * numbers(8).reshape(2, 4)
    )


def doubled_in_place(out: Any, x: Any) -> None:
  np.add(out, out, out=out)


def doubled(x: Any) -> Any:
  return x + x


# -- views that outlive their call ---
class Slots:
  __slots__ = ("array",)

  def __init__(self, array: Any) -> None:
    self.array = array


class Subclass(np.ndarray):
  pass


def in_object_array(x: Any) -> Any:
  cell = np.empty(1, object)
  cell[0] = x
  return cell


# How a view is kept, and how to read it afterwards as numbers()[5:-5].
KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
  "the view": (lambda x: x, lambda kept: kept[5:-5]),
  "a slice": (lambda x: x[5:-5], lambda kept: kept),
  "a slice of a slice": (lambda x: x[2:-2][3:-3], lambda kept: kept),
  "a reversed slice": (lambda x: x[-6:4:-1], lambda kept: kept[::-1]),
  "a reshaped view": (lambda x: x.reshape(2, -1), lambda kept: kept.ravel()[5:-5]),
  "other bytes": (lambda x: x.view(np.uint8), lambda kept: kept.view(np.float32)[5:-5]),
  "a subclass": (lambda x: x.view(Subclass), lambda kept: np.asarray(kept)[5:-5]),
  "a masked array": (lambda x: np.ma.masked_array(x[5:-5]), lambda kept: kept.data),
  "a list of views": (lambda x: [x[5:9], x[9:-5]], np.concatenate),
  "a tuple in a dict": (lambda x: {"a": (x[5:-5],)}, lambda kept: kept["a"][0]),
  "an attribute": (lambda x: Slots(x[5:-5]), lambda kept: kept.array),
  "a closure": (lambda x: lambda: x[5:-5], lambda kept: kept()),
  "a generator": (lambda x: (part for part in [x[5:-5]]), next),
  "a bound method": (lambda x: x[5:-5].copy, lambda kept: kept()),
  "an object array": (lambda x: in_object_array(x[5:-5]), lambda kept: kept[0]),
  "strides": (
    lambda x: np.lib.stride_tricks.as_strided(x[5:], (SIZE - 10,), (4,)),
    lambda kept: kept,
  ),
  "windows": (
    lambda x: np.lib.stride_tricks.sliding_window_view(x, 11),
    lambda kept: kept[:, 5],
  ),
  "an array over a memoryview": (lambda x: np.asarray(memoryview(x[5:-5])), lambda kept: kept),
  "a memoryview and an array over it": (
    lambda x: (lambda view: (view, np.asarray(view), memoryview(view)))(memoryview(x[5:-5])),
    lambda kept: kept[1],
  ),
  "an array from DLPack": (lambda x: np.from_dlpack(x)[5:-5], lambda kept: kept),
}


@pytest.mark.parametrize(
  ("way", "arrays"),
  [(way, "numpy") for way in KEPT]
  + [(way, "buffer") for way in ("the view", "a slice", "a memoryview and an array over it")],
)
def test_a_kept_view_is_reported_and_stays_readable(way: str, arrays: str) -> None:
  keep, read = KEPT[way]
  kept, said = leaked(
    lambda x: keep(np.asarray(x)),
    numbers(),
    match=r"gate 'look\d+': argument 'weights'",
    arrays=arrays,
  )
  assert "still points" not in said
  got = read(kept)
  assert got.dtype == np.float32
  np.testing.assert_array_equal(got, numbers()[5:-5])


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x[5:-5], np.from_dlpack])
def test_a_kept_memoryview_is_released(of: Callable[[Any], Any]) -> None:
  kept, said = leaked(lambda x: memoryview(of(x)), numbers())
  assert "a memoryview, which can't, was released" in said
  with pytest.raises(ValueError, match="released"):
    kept[0]


def test_a_kept_buffer_goes_on_with_a_copy() -> None:
  kept, _ = leaked(lambda x: x, numbers(), match="argument 'weights'", arrays="buffer")
  np.testing.assert_array_equal(kept, numbers())


@pytest.mark.parametrize("style", ["inplace", "context"])
def test_a_kept_result_is_reported_and_the_users_copy_is_their_own(style: str) -> None:
  store: list[Any] = []

  def leak(*arguments: Any) -> None:
    *_, out, x = arguments
    out[:] = x
    store.append(out[1:])

  gate = cg.gate(leak, out=lambda x: x, style=style, name=f"look{next(names)}")
  with pytest.raises(cg.EscapedViewError, match=r"gate 'look\d+': result 0"), cg.errors():
    jax.block_until_ready(jax.jit(lambda x: gate(x) + 1)(numbers()))
  reuse_memory()
  np.testing.assert_array_equal(store[0], numbers()[1:])


def test_the_kept_argument_is_the_one_named() -> None:
  store: list[Any] = []

  @cg.gate(out=SCALAR, effect="io", name=f"three{next(names)}")
  def three(a: Any, params: Any, *, mask: Any) -> Any:
    store.append(params["w"][1][1:])
    return np.float32(0)

  params = {"b": numbers(4), "w": [numbers(4), numbers(4)]}
  with pytest.raises(cg.EscapedViewError) as caught, cg.errors():
    jax.jit(lambda p: three(numbers(4), p, mask=numbers(4)))(params)
  assert "argument 'params'['w'][1]" in str(caught.value)
  assert "'a'" not in str(caught.value)
  assert "mask" not in str(caught.value)


def test_views_in_an_exceptions_frames_are_made_safe_without_hiding_the_exception() -> None:
  def fail(x: Any) -> Any:
    part = x[5:-5]
    raise KeyError(part.size)

  with pytest.raises(KeyError) as caught:
    run(fail, numbers())
  reuse_memory()
  frame = caught.traceback[-1].frame
  np.testing.assert_array_equal(frame.f_locals["part"], numbers()[5:-5])
  np.testing.assert_array_equal(frame.f_locals["x"], numbers())


def test_the_programs_own_input_survives_an_escape() -> None:
  operands = {"x": jnp.asarray(numbers())}
  host = np.asarray(operands["x"])
  store: list[Any] = []
  gate = cg.gate(store.append, out=SCALAR, effect="io")
  with pytest.raises((cg.EscapedViewError, cg.ResultError)), cg.errors():
    jax.jit(gate)(operands["x"])
  np.testing.assert_array_equal(operands["x"] + 0, numbers())
  np.testing.assert_array_equal(host, numbers())


def test_a_kept_jax_array_never_shows_other_memory() -> None:
  store: list[Any] = []

  def leak(x: Any) -> Any:
    store.append(x)
    return np.float32(0)

  with contextlib.suppress(cg.EscapedViewError):  # the array may be a copy already
    run(leak, numbers(), arrays="jax")
  reuse_memory()
  if not store[0].is_deleted():
    np.testing.assert_array_equal(store[0], numbers())


@pytest.mark.parametrize("read", ["a tensor", "an array over it"])
def test_a_kept_torch_tensor_holds_a_copy(read: str) -> None:
  pytest.importorskip("torch", reason="PyTorch is not installed")
  over = (lambda x: x) if read == "a tensor" else (lambda x: x.numpy())
  kept, said = leaked(lambda x: over(x[5:-5]), numbers(), arrays="torch")
  assert "still points" not in said or read == "a tensor"
  np.testing.assert_array_equal(np.asarray(kept), numbers()[5:-5])


def test_a_view_that_another_threads_frame_holds_is_made_safe() -> None:
  go_on = threading.Event()
  seen: list[Any] = []

  def hold(part: Any) -> None:
    go_on.wait(60)
    seen.append(part.copy())

  threads: list[threading.Thread] = []

  def leak(x: Any) -> Any:
    threads.append(threading.Thread(target=hold, args=(x[5:-5],)))
    threads[0].start()
    return np.float32(0)

  with pytest.raises(cg.EscapedViewError):
    run(leak, numbers())
  reuse_memory()
  go_on.set()
  threads[0].join()
  np.testing.assert_array_equal(seen[0], numbers()[5:-5])


# -- no false alarms ---
def test_a_pool_inside_the_gate_is_no_escape() -> None:
  def halves(x: Any) -> Any:
    middle = len(x) // 2
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      return np.float32(sum(pool.map(np.max, [x[:middle], x[middle:]])))

  for _ in range(20):
    run(halves, numbers(1000))


def test_a_thread_that_drops_its_view_a_moment_later_is_no_escape() -> None:
  with concurrent.futures.ThreadPoolExecutor(2) as pool:

    def look(x: Any) -> Any:
      done = threading.Event()

      def use(part: Any) -> None:
        done.set()
        time.sleep(0.001)
        part.sum()

      pool.submit(use, x[1:])
      done.wait()
      return np.float32(0)

    for _ in range(10):
      run(look, numbers(1000))


def test_a_reference_cycle_is_no_escape() -> None:
  def look(x: Any) -> Any:
    cycle: list[Any] = [x]
    cycle.append(cycle)
    return np.float32(0)

  run(look, numbers(10))


@pytest.fixture
def collections_of_all() -> Iterator[Callable[[], int]]:
  """Counts collections of the oldest generation, while none comes by itself."""
  gc.disable()
  yield lambda: gc.get_stats()[2]["collections"]
  gc.enable()


def test_a_cycle_of_each_call_takes_no_collection_of_all_objects(collections_of_all: Any) -> None:
  def look(x: Any) -> Any:
    def total(low: int, high: int) -> Any:  # refers to itself, and to x
      middle = (low + high) // 2
      return x[low] if high - low == 1 else total(low, middle) + total(middle, high)

    return total(0, x.size)

  program = jax.jit(cg.gate(look, out=SCALAR))
  before = collections_of_all()
  for _ in range(10):
    assert program(numbers(8)) == numbers(8).sum()
  assert collections_of_all() == before


def test_an_old_cycle_is_no_escape_and_takes_one_collection_a_call(
  collections_of_all: Any,
) -> None:
  def look(x: Any) -> Any:
    cycle: list[Any] = [x]
    cycle.append(cycle)
    gc.collect(0)
    gc.collect(1)  # it is in the oldest generation now
    return np.float32(0)

  program = jax.jit(cg.gate(look, out=SCALAR))
  for _ in range(3):
    before = collections_of_all()
    jax.block_until_ready(program(numbers(10)))
    assert collections_of_all() <= before + 1  # an increment of Python 3.14 may find it sooner


def test_a_view_that_is_kept_beside_a_cycle_is_still_found() -> None:
  store: list[Any] = []

  def look(x: Any) -> Any:
    cycle: list[Any] = [x]
    cycle.append(cycle)
    if x[0]:
      store.append(x)
    return np.float32(0)

  program = jax.jit(cg.gate(look, out=SCALAR))
  for first in (0, 1, 0, 1):
    x = numbers(10) + first
    if first:
      with pytest.raises(cg.EscapedViewError), cg.errors():
        jax.block_until_ready(program(x))
    else:
      jax.block_until_ready(program(x))
  assert [one[0] for one in store] == [1, 1]


def test_a_handled_exception_inside_the_gate_is_no_escape() -> None:
  def look(x: Any) -> Any:
    with contextlib.suppress(ValueError):
      x[0] = 1
    return np.float32(0)

  run(look, numbers(10))


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("thread", ["xla", "own"])
def test_a_failed_program_inside_the_gate_is_no_escape(
  thread: Any, claims: bool, passes: bool
) -> None:
  def fail(x: Any) -> Any:
    raise ValueError(float(x))

  inner = jax.jit(cg.gate(fail, out=lambda x: x))

  def look(x: Any) -> Any:
    claiming = cg.errors() if claims else contextlib.nullcontext()
    with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError), claiming:
      inner(x[0] if passes else 1.0)
    return np.float32(1)

  gate = cg.gate(look, out=SCALAR, thread=thread)
  for _ in range(3):
    assert jax.jit(lambda x: gate(x))(jnp.ones(8)) == 1


@pytest.mark.parametrize("arrays", ["numpy", "buffer"])
def test_copies_may_be_kept(arrays: str) -> None:
  store: list[Any] = []

  def look(x: Any) -> Any:
    store.append(np.array(x))
    return np.float32(0)

  run(look, numbers(10), arrays=arrays)
  np.testing.assert_array_equal(store[0], numbers(10))


# -- a view that nobody kept serves the next call again ---
CHANGES: dict[str, Callable[[Any], object]] = {
  "nothing": lambda x: None,
  "its shape": lambda x: setattr(x, "shape", (2, 2)),
  "its strides": lambda x: setattr(x, "strides", (0,)),
  "its dtype": lambda x: setattr(x, "dtype", np.int32),
  "its writeable flag": lambda x: x.setflags(write=False),
  "its aligned flag": lambda x: x.setflags(align=False),
}


@pytest.mark.filterwarnings("ignore:Setting the")  # NumPy advises against these
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("vmap", ["each", "whole"])
def test_the_next_call_does_not_see_changes_of_a_calls_views(change: str, vmap: Any) -> None:
  seen: list[Any] = []

  def add(out: Any, x: Any) -> None:
    for array in (out, x):
      seen.append((array.shape, array.strides, array.dtype, array.flags.writeable))
    seen.append((out.flags.aligned, x.flags.aligned))
    out[...] = x + 1
    CHANGES[change](out)
    CHANGES[change](x)

  gate = cg.gate(add, out=lambda x: x, effect="io", style="inplace", name=f"look{next(names)}")
  program = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, carry: gate(carry), x))
  np.testing.assert_array_equal(program(numbers(4)), numbers(4) + 4)
  assert len(seen) == 12
  assert all(seen[i] == seen[i % 3] for i in range(12)), seen


def test_views_show_each_lane_and_each_iteration() -> None:
  def double(out: Any, x: Any) -> None:
    np.multiply(x, 2, out=out)

  gate = cg.gate(double, out=lambda x: x, vmap="each", style="inplace", name=f"look{next(names)}")
  program = jax.jit(jax.vmap(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: gate(c), x)))
  x = numbers(12).reshape(4, 3)
  np.testing.assert_array_equal(program(x), 8 * x)


def test_a_weak_reference_to_a_view_dies_with_its_call() -> None:
  references: list[weakref.ref[Any]] = []

  def look(x: Any) -> Any:
    assert [reference() for reference in references] == [None] * len(references)
    references.append(weakref.ref(x))
    return x + 1

  gate = cg.gate(look, out=lambda x: x, effect="io", name=f"look{next(names)}")
  program = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, carry: gate(carry), x))
  np.testing.assert_array_equal(program(numbers(4)), numbers(4) + 4)
  assert len(references) == 4


def test_two_threads_in_one_call_site_have_views_of_their_own() -> None:
  both = threading.Barrier(2, timeout=60)

  def add(out: Any, x: Any) -> None:
    both.wait()
    out[...] = x + 1
    both.wait()  # the other has written

  options: Any = {"effect": "io", "serial": False, "style": "inplace"}
  gate = cg.gate(add, out=lambda x: x, name=f"look{next(names)}", **options)
  program = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, carry: gate(carry), x))
  compiled = program.lower(numbers(4)).compile()
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first, second = pool.map(lambda start: np.asarray(compiled(start)), [numbers(4), -numbers(4)])
  np.testing.assert_array_equal(first, numbers(4) + 8)
  np.testing.assert_array_equal(second, 8 - numbers(4))


def test_a_call_within_a_call_of_its_own_site_has_views_of_its_own() -> None:
  """The site is one executable's: the inner call runs it again while the outer one is in it."""
  depth = 0

  def add(out: Any, x: Any) -> None:
    nonlocal depth
    depth += 1
    inner = np.asarray(compiled(x + 10)) if depth < 4 else np.asarray(x)
    depth -= 1
    out[...] = x + inner

  gate = cg.gate(
    add,
    out=lambda x: x,
    effect="io",
    style="inplace",
    thread="own",
    name=f"look{next(names)}",
  )
  compiled = jax.jit(lambda x: gate(x)).lower(numbers(4)).compile()
  np.testing.assert_array_equal(compiled(numbers(4)), 5 * numbers(4) + 90)


def test_a_jax_array_that_was_kept_is_deleted_and_the_message_says_so() -> None:
  kept: list[Any] = []

  def keep(x: Any) -> Any:
    kept.append(x)
    return x

  gate = cg.gate(keep, out=lambda x: x, arrays="jax")
  said = r"a jax\.Array, which can't, was deleted"
  with pytest.raises(cg.EscapedViewError, match=said), cg.errors():
    jax.jit(gate)(jnp.ones(3))
  assert kept[0].is_deleted()
