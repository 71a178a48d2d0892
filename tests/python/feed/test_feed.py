# SPDX-License-Identifier: Apache-2.0
"""Feeds in programs: what they give, in which order, under every transformation, and their errors.

NumPy's own arrays and loops are the truth; `engine` runs a test on JAX's callbacks as well.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreters import output_of
from property_checks import examples

import callgate as cg

LANES = jnp.arange(3)


def numbers(count: int = 1000, start: int = 0) -> Iterator[np.float32]:
  return (np.float32(i) for i in range(start, start + count))


def scan(feed: cg.Feed, length: int) -> Any:
  return jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=length)[1]


# -- order ---
# Each program gives the items that it took, in the order of the program.
PROGRAMS: dict[str, tuple[Callable[[cg.Feed], Any], Any]] = {
  "plain": (lambda f: f.next(), 0),
  "two reads": (lambda f: [f.next(), f.next()], [0, 1]),
  "nested jit": (lambda f: [jax.jit(f.next)(), jax.jit(jax.jit(f.next))()], [0, 1]),
  "scan": (lambda f: scan(f, 5), [0, 1, 2, 3, 4]),
  "unrolled scan": (
    lambda f: jax.lax.scan(lambda c, _: (c, f.next()), 0, length=5, unroll=2)[1],
    [0, 1, 2, 3, 4],
  ),
  "scan of scan": (
    lambda f: jax.lax.scan(lambda c, _: (c, (f.next(), scan(f, 2))), 0, length=2)[1],
    ([0, 3], [[1, 2], [4, 5]]),
  ),
  "fori": (lambda f: jax.lax.fori_loop(0, 4, lambda i, c: 10 * c + f.next(), 0.0), 123),
  "while": (
    lambda f: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (f.next(), c[0]), (-1.0, -1.0)),
    (3, 2),
  ),
  "while, in the condition": (
    lambda f: jax.lax.while_loop(lambda c: f.next() < 3, lambda c: c + 1, 0),
    3,
  ),
  "cond": (
    lambda f: [
      jax.lax.cond(True, lambda: f.next(), lambda: -1.0),
      jax.lax.cond(False, lambda: f.next(), lambda: -1.0),
      f.next(),
    ],
    [0, -1, 1],
  ),
  "switch": (
    lambda f: jax.lax.switch(1, [lambda: (0.0, 0.0), lambda: (f.next(), f.next())]),
    (0, 1),
  ),
  "unused": (lambda f: (f.next(), f.next())[1], 1),
  "grad": (lambda f: jax.value_and_grad(lambda x: x * (f.next() + 2))(3.0), (6, 2)),
  "grad of scan": (
    lambda f: jax.value_and_grad(
      lambda w: jax.lax.scan(lambda c, _: (c + w * f.next(), None), 0.0, length=4)[0]
    )(2.0),
    (12, 6),
  ),
  "grad of checkpoint of scan": (
    lambda f: jax.value_and_grad(
      jax.checkpoint(
        lambda w: jax.lax.scan(lambda c, _: (c + w**2 * f.next(), None), 0.0, length=4)[0]
      )
    )(2.0),
    (24, 24),
  ),
  "grad of scan of jit": (
    lambda f: jax.value_and_grad(
      lambda w: jax.lax.scan(lambda c, _: (c + w * jax.jit(f.next)(), None), 0.0, length=4)[0]
    )(2.0),
    (12, 6),
  ),
  "jvp": (lambda f: jax.jvp(lambda x: x * f.next() + f.next(), (2.0,), (3.0,)), (1, 0)),
  "jvp of the item alone": (lambda f: jax.jvp(lambda x: f.next(), (2.0,), (3.0,)), (0, 0)),
  "linearize": (lambda f: jax.linearize(lambda x: x * (f.next() + 2), 3.0)[1](1.0), 2),
  "checkpoint": (
    lambda f: jax.value_and_grad(jax.checkpoint(lambda x: jnp.square(x) * (f.next() + 1)))(3.0),
    (9, 6),
  ),
  "grad of scan of checkpoint": (
    lambda f: jax.value_and_grad(
      lambda w: jax.lax.scan(
        jax.checkpoint(lambda c, _: (c + w**2 * f.next(), None)), 0.0, length=3
      )[0]
    )(2.0),
    (12, 12),
  ),
}
VMAPS: dict[str, tuple[Callable[[cg.Feed], Any], Any]] = {
  "vmap": (lambda f: jax.vmap(lambda x: f.next())(LANES), [0, 1, 2]),
  "vmap of jit": (lambda f: jax.vmap(jax.jit(lambda x: f.next()))(LANES), [0, 1, 2]),
  "vmap twice": (
    lambda f: jax.vmap(lambda x: jax.vmap(lambda y: f.next())(LANES))(LANES[:2]),
    [[0, 1, 2], [3, 4, 5]],
  ),
  "no lanes": (lambda f: (jax.vmap(lambda x: f.next())(jnp.zeros(0)).sum(), f.next()), (0, 0)),
  "scan of vmap": (
    lambda f: jax.lax.scan(lambda c, _: (c, jax.vmap(lambda x: f.next())(LANES)), 0, length=2)[1],
    [[0, 1, 2], [3, 4, 5]],
  ),
  "vmap of scan": (
    lambda f: jax.vmap(lambda x: scan(f, 2))(LANES),
    [[0, 3], [1, 4], [2, 5]],
  ),
  "vmap of grad": (
    lambda f: jax.vmap(jax.grad(lambda x: x * f.next()))(LANES.astype(float)),
    [0, 1, 2],
  ),
  "vmap with other axes": (
    lambda f: jax.vmap(lambda x: x + f.next(), in_axes=1, out_axes=1)(jnp.zeros((2, 3))),
    [[0, 1, 2], [0, 1, 2]],
  ),
}
# Only callgate's effects have rules for these.
APART: dict[str, tuple[Callable[[cg.Feed], Any], Any]] = {
  "vmap of cond, a predicate a lane": (
    lambda f: jax.vmap(lambda x: jax.lax.cond(x != 1, lambda: f.next(), lambda: -1.0))(LANES),
    [0, -1, 1],
  ),
  "vmap of while": (
    lambda f: jax.vmap(
      lambda n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f.next()), (0, -1.0))
    )(LANES),
    ([0, 1, 2], [-1, 0, 2]),
  ),
}


def check(actual: Any, expected: Any) -> None:
  for got, want in zip(jax.tree.leaves(actual), _match(actual, expected), strict=True):
    np.testing.assert_array_equal(got, np.asarray(want, got.dtype))


def _match(actual: Any, expected: Any) -> list[Any]:
  """The expected value of each leaf of `actual`: lists stand for arrays where those are."""
  if isinstance(actual, jax.Array):
    return [expected]
  return [leaf for a, e in zip(actual, expected, strict=True) for leaf in _match(a, e)]


NOT_IN_JAX = {
  "checkpoint",
  "grad of scan",
  "grad of scan of jit",
  "grad of scan of checkpoint",
  "grad of checkpoint of scan",
}


@functools.cache
def compiled(engine: str) -> dict[str, Any]:
  """All programs as one, which compiles faster than one each; each with a feed of its own."""
  used = {
    name: program
    for name, (program, _) in (PROGRAMS | VMAPS).items()
    if engine == "callgate" or name not in NOT_IN_JAX
  }
  with contextlib.ExitStack() as stack:
    feeds = {name: stack.enter_context(cg.feed(numbers())) for name in used}
    run = jax.jit(lambda: {name: program(feeds[name]) for name, program in used.items()})
    return jax.block_until_ready(run())


@pytest.mark.parametrize("name", [*PROGRAMS, *VMAPS])
def test_programs_take_items_in_their_order(engine: str, name: str) -> None:
  """Compiled, and each operation on its own."""
  program, expected = (PROGRAMS | VMAPS)[name]
  if engine == "jax" and name in NOT_IN_JAX:
    pytest.skip("JAX refuses its ordered callbacks here, or calls them once for all steps")
  check(compiled(engine)[name], expected)
  with cg.feed(numbers()) as feed:
    check(program(feed), expected)


@pytest.mark.parametrize("name", APART)
def test_lanes_that_part_take_items_only_where_they_get_to(name: str) -> None:
  program, expected = APART[name]
  with cg.feed(numbers()) as feed:
    check(jax.jit(lambda: program(feed))(), expected)


def test_a_cached_program_goes_on_where_it_ended(engine: str) -> None:
  traced: list[int] = []
  with cg.feed(numbers()) as feed:

    @jax.jit
    def program() -> Any:
      traced.append(1)
      return scan(feed, 3)

    got = [x for _ in range(4) for x in program().tolist()]
    assert [*got, float(feed.next())] == list(range(13))
  assert len(traced) == 1


def test_a_compiled_program_and_the_host_take_turns() -> None:
  with cg.feed(numbers()) as feed:
    compiled = jax.jit(lambda: feed.next()).lower().compile()
    assert [float(take()) for take in (compiled, feed.next) * 3] == list(range(6))


def test_two_feeds_are_independent(engine: str) -> None:
  with cg.feed(numbers()) as one, cg.feed(numbers(start=500), prefetch=7) as other:
    program = jax.jit(
      lambda: jax.lax.scan(lambda c, _: (c, (one.next(), other.next())), 0, length=9)
    )
    left, right = program()[1]
    assert left.tolist() == list(range(9))
    assert right.tolist() == list(range(500, 509))


def test_a_feed_may_read_a_feed_and_run_jax_programs() -> None:
  def doubled(inner: cg.Feed) -> Iterator[Any]:
    product = jax.jit(lambda x: (x * jnp.ones((300, 300))) @ jnp.eye(300))
    while True:
      try:
        with cg.errors():
          yield 2 * product(inner.next())[0, 0]
      except cg.EndOfFeed:
        return

  with cg.feed(numbers(10)) as inner, cg.feed(doubled(inner)) as outer:
    assert jax.jit(lambda: scan(outer, 10))().tolist() == list(range(0, 20, 2))


@examples(9)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_any_sequence_of_calls_sees_every_item_once(
  lengths: list[int], prefetch: int, default: bool
) -> None:
  total = sum(lengths)
  count = total - 2 if default else total
  options: dict[str, Any] = {"default": -1.0} if default else {}
  with cg.feed(numbers(max(count, 1)), prefetch=prefetch, **options) as feed:
    got = [x for n in lengths for x in jax.jit(lambda n=n: scan(feed, n))().tolist()]
  assert got == [i if i < max(count, 1) else -1 for i in range(total)]


# -- items ---
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32"]


@pytest.mark.parametrize(
  "dtype",
  [*DTYPES, "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 4)])
def test_items_arrive_bit_for_bit(dtype: Any, shape: tuple[int, ...]) -> None:
  random = np.random.default_rng(0)
  items = [(8 * random.random(shape)).astype(dtype) for _ in range(4)]
  with cg.feed(items) as feed:
    got = jax.jit(lambda: [feed.next() for _ in items])()
  for a, b in zip(got, items, strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == b.tobytes()


Batch = collections.namedtuple("Batch", ["x", "rest"])


def test_items_are_pytrees_of_whatever_holds_numbers(engine: str) -> None:
  items = [
    Batch(
      np.full((2, 3), i, np.float32), {"n": i, "flag": i > 0, "w": [jnp.arange(2) + i], "no": None}
    )
    for i in range(4)
  ]
  with cg.feed(items) as feed:
    assert feed.shape.rest["n"] == jax.ShapeDtypeStruct((), jnp.int32)
    for item in items:
      got = jax.jit(feed.next)()
      assert isinstance(got, Batch)
      jax.tree.map(np.testing.assert_array_equal, got, item)


def test_python_scalars_get_jax_s_default_dtypes() -> None:
  with cg.feed([(True, 1, 2.0, 3j)]) as feed:
    got = feed.next()
  assert [x.dtype for x in got] == [jnp.asarray(x).dtype for x in (True, 1, 2.0, 3j)]


def test_labels_of_64_bits_are_jax_s_integers(engine: str) -> None:
  labels = np.array([0, 2**31 - 1, -(2**31)])
  items = [{"y": labels, "n": np.uint64(i), "m": i} for i in range(3)]
  with cg.feed(items, default={"y": np.int64(-1), "n": 7, "m": 0}) as feed:
    assert [x.dtype for x in jax.tree.leaves(feed.shape)] == ["int32", "uint32", "int32"]
    rows = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=4)[1])()
  assert rows["y"].tolist() == [labels.tolist()] * 3 + [[-1] * 3]
  assert rows["n"].tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_integer_outside_of_the_range_is_its_item_s_error(bad: int) -> None:
  items = [{"y": np.array([1, 2])}, {"y": np.array([3, 4])}]
  items[bad]["y"][1] = 2**31
  with cg.feed(items) as feed:
    program = jax.jit(feed.next)
    came = r"got int64\[2\] with 2147483648 at \[1\], outside int32's range"
    where = rf"item {bad}\['y'\]: expected int32\[2\], {came}"
    for _ in range(bad):
      program()
    with pytest.raises(cg.ResultError, match=where), cg.errors():
      jax.block_until_ready(program())


def test_python_numbers_and_integers_take_the_feed_s_dtype() -> None:
  with cg.feed([np.float32(0.5), 1, True, 2.5]) as feed:
    assert [float(feed.next()) for _ in range(4)] == [0.5, 1.0, 1.0, 2.5]
  with cg.feed([np.uint8(1), 255, np.int64(3), 2.5]) as feed:
    assert [int(feed.next()) for _ in range(3)] == [1, 255, 3]
    hint = r"item 3: expected uint8\[\], got float32\[\]\ncallgate: raised in"
    with pytest.raises(cg.ResultError, match=hint), cg.errors():
      jax.block_until_ready(feed.next())


def test_with_x64_doubles_are_doubles() -> None:
  printed = output_of(
    """
    import jax, numpy as np
    jax.config.update("jax_enable_x64", True)
    import callgate as cg
    with cg.feed([(1.5, np.float64(0.1), 2**40)]) as feed:
      got = jax.jit(feed.next)()
    print([str(x.dtype) for x in got], float(got[1]), int(got[2]))
    """
  )
  assert printed == f"['float64', 'float64', 'int64'] 0.1 {2**40}\n"


def test_an_iterator_may_reuse_its_buffer() -> None:
  def one_buffer() -> Iterator[Any]:
    buffer = np.zeros(5, np.float32)
    for i in range(20):
      buffer[:] = i
      yield buffer

  with cg.feed(one_buffer(), prefetch=8) as feed:
    assert jax.jit(lambda: scan(feed, 20))()[:, 3].tolist() == list(range(20))


def test_items_of_all_forms_keep_their_order() -> None:
  """Plain arrays and scalars go a way of their own, without Python."""

  def items() -> Iterator[Any]:
    for i in range(0, 60, 6):
      yield np.array(i, np.float32)  # plain
      yield np.float32(i + 1)  # plain
      yield i + 2
      yield np.array([i + 3], np.float64).reshape(())  # cast
      yield jnp.float32(i + 4)
      yield np.array(i + 5, np.float16)[...]
    raise LookupError("no more")

  with cg.feed(items(), prefetch=4, cast=True) as feed:
    program = jax.jit(lambda: scan(feed, 20))
    np.testing.assert_array_equal([*program(), *program(), *program()], np.arange(60))
    with pytest.raises(LookupError, match="no more"), cg.errors():
      jax.block_until_ready(feed.next())
    stats = feed.stats()
    assert (stats["produced"], stats["served"], stats["queued"]) == (60, 60, 0)


@pytest.mark.parametrize("form", [np.asarray, np.asfortranarray, lambda x: x.astype(float)])
def test_arrays_of_all_layouts_are_fed(form: Callable[[np.ndarray], np.ndarray]) -> None:
  arrays = [np.arange(6, dtype=np.float32).reshape(2, 3) + i for i in range(9)]
  given = (form(x if i % 2 else x[:, ::-1]) for i, x in enumerate(arrays))
  expected = np.stack([x if i % 2 else x[:, ::-1] for i, x in enumerate(arrays)])
  with cg.feed(given, shape=jax.ShapeDtypeStruct((2, 3), np.float32), cast=True) as feed:
    np.testing.assert_array_equal(jax.jit(lambda: scan(feed, 9))(), expected)


def test_objects_that_give_a_new_iterator_each_time_serve_several_epochs() -> None:
  class Loader:
    """As a DataLoader: batches, and a length."""

    def __init__(self, data: Any, size: int) -> None:
      self.data, self.size = data, size

    def __len__(self) -> int:
      return len(self.data) // self.size

    def __iter__(self) -> Iterator[Any]:
      return (self.data[i * self.size : (i + 1) * self.size] for i in range(len(self)))

  loader = Loader(np.arange(12, dtype=np.int32), 3)
  for _ in range(2):
    with cg.feed(loader) as feed:
      got = jax.jit(lambda f=feed: scan(f, len(loader)))()
    np.testing.assert_array_equal(got, loader.data.reshape(4, 3))


def test_torch_s_loaders_are_fed_as_they_are() -> None:
  torch = pytest.importorskip("torch")
  data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
  loader = torch.utils.data.DataLoader(
    data, batch_size=2, collate_fn=lambda rows: (torch.stack([r[0] for r in rows]), len(rows))
  )
  with cg.feed(loader) as feed:
    x, n = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=3)[1])()
  np.testing.assert_array_equal(x.reshape(6, 2), np.arange(12.0).reshape(6, 2))
  assert n.tolist() == [2, 2, 2]


# -- many devices ---
def test_a_program_over_several_devices_takes_each_item_once() -> None:
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
  x = jax.device_put(jnp.arange(8.0), split)
  with cg.feed(np.float32([i, 10 * i]) for i in range(10)) as feed:
    step = lambda c, _: (c + feed.next()[1], None)
    program = jax.jit(lambda x: jax.lax.scan(step, x, length=3)[0])
    np.testing.assert_array_equal(program(x), np.arange(8.0) + 30)
    lanes = jax.jit(jax.vmap(lambda x: x * 0 + feed.next()[0]))(x[:4])
    np.testing.assert_array_equal(lanes, [3, 4, 5, 6])
    np.testing.assert_array_equal(program(x), np.arange(8.0) + 70 + 80 + 90)
    with pytest.raises(cg.EndOfFeed), cg.errors():
      program(x)


def test_a_feed_s_program_and_others_share_a_process() -> None:
  with cg.feed(itertools.count()) as feed:
    mixed = jax.jit(lambda x: (x + feed.next(), jnp.sin(x)))
    for i in range(3):
      total, sine = mixed(1.0)
      assert (float(total), float(sine)) == (1 + i, pytest.approx(np.sin(1.0)))
