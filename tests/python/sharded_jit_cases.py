"""Cases of `compat.sharded_jit` for a process with 8 CPU devices: see test_sharded_jit.py.

python sharded_jit_cases.py FILE     writes {case: "" or what failed} as JSON
"""

import functools
import json
import pathlib
import sys
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from callgate.compat.sharded_jit import PartitionSpec as P
from callgate.compat.sharded_jit import sharded_jit, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8)
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
  CASES[function.__name__] = function
  return function


def shard_shapes(array: jax.Array) -> list[tuple[int, ...]]:
  return [shard.data.shape for shard in array.addressable_shards]


def message_of(error: type[Exception], function: Callable[[], object]) -> str:
  try:
    function()
  except error as caught:
    return str(caught)
  raise AssertionError(f"expected {error.__name__}, got none")


@case
def arguments_are_split_and_results_replicated() -> None:
  f = sharded_jit(lambda x, y: x + y, in_parts=(P(2, 1), P(2, 1)), out_parts=None)
  result = f(X, X + 1)
  np.testing.assert_array_equal(result, 2 * X + 1)
  assert shard_shapes(result) == [(8, 8)] * 2


@case
def parts_are_prefixes_of_pytrees() -> None:
  def f(a, b, c):
    return a[0] + a[1] + b + c[0] + c[1][0] + c[1][1]

  m = np.arange(16).reshape(4, 4)
  args = (m, 1), m, [2, (m, m)]
  for in_parts in ((None, P(2, 1), [None, P(2, 1)]), None):
    result = sharded_jit(f, in_parts, P(2, 1))(*args)
    np.testing.assert_array_equal(result, f(*args))
    assert shard_shapes(result) == [(2, 4)] * 2
  outs = sharded_jit(
    lambda x: (x + 1, ((x + 2, x + 3), x + 4)), (P(2, 1),), (P(2, 1), ((P(1, 2), None), P(2, 1)))
  )(X)
  shapes = jax.tree.map(lambda array: shard_shapes(array)[0], outs)
  assert shapes == ((4, 8), (((8, 4), (8, 8)), (4, 8)))


@case
def every_split_of_the_devices_gives_its_tiles() -> None:
  for parts in ((8, 1), (1, 8), (2, 4), (4, 2), (3, 1), (1, 5), (2, 3), (3, 2), (1, 1)):
    x = np.arange(24 * 30).reshape(24, 30) if parts != (1, 5) else np.arange(40).reshape(4, 10)
    x = x[:, :30] if parts[1] not in (4, 8) else x[:, :24]
    result = sharded_jit(lambda x: x + 1, P(*parts), P(*parts))(x)
    np.testing.assert_array_equal(result, x + 1)
    tile = x.shape[0] // parts[0], x.shape[1] // parts[1]
    assert shard_shapes(result) == [tile] * (parts[0] * parts[1])
    assert len({str(shard.index) for shard in result.addressable_shards}) == parts[0] * parts[1]


@case
def nothing_said_is_one_device() -> None:
  result = sharded_jit(lambda x: x + 1, None, None)(1.0)
  assert float(result) == 2.0
  assert len(result.addressable_shards) == 1


@case
def a_constraint_alone_says_how_many_devices() -> None:
  def f(x):
    return with_sharding_constraint(x + 1, P(1, 2)) * 2

  result = sharded_jit(f, None, None)(X)
  np.testing.assert_array_equal(result, (X + 1) * 2)
  assert len(result.addressable_shards) == 2
  assert shard_shapes(sharded_jit(f, P(2, 1), P(2, 1))(X)) == [(4, 8)] * 2
  text = message_of(ValueError, lambda: sharded_jit(f, P(2, 2), P(2, 2))(X))
  assert "partitions=PartitionSpec(1, 2) (total partitions: 2)" in text
  assert "expected number of partitions: 4" in text


@case
def also_from_inside_jit_and_while() -> None:
  @jax.jit
  def f(x):
    body = lambda x: with_sharding_constraint(x + 1.0, P(2, 1))
    return lax.while_loop(lambda x: x[0, 0] < 10.0, body, x)

  result = sharded_jit(f, None, None)(X)
  np.testing.assert_array_equal(result, X + 10)
  assert len(result.addressable_shards) == 2


@case
def the_gradient_of_a_constraint_constrains_the_cotangent() -> None:
  def f(x):
    y, back = jax.vjp(lambda z: jnp.sin(with_sharding_constraint(z, P(2, 2))), x + 1)
    return back(y)[0]

  x = X[:4, :4]
  np.testing.assert_allclose(
    sharded_jit(f, P(4, 1), None)(x), np.sin(x + 1) * np.cos(x + 1), atol=1e-5
  )
  g = jax.grad(lambda x: with_sharding_constraint(jnp.sin(x), P(2, 2)).sum())
  text = jax.jit(sharded_jit(g, P(4, 1), None)).lower(x).as_text()
  # The value itself is not needed: what is constrained is the cotangent.
  assert text.count('[{"parts0"}, {"parts1"}]') == 1, text


@case
def transformations_agree_with_the_plain_function() -> None:
  plain = lambda x: jnp.sin(x @ x)
  f = sharded_jit(plain, P(2, 2), P(4, 1))
  x = X / 8
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  close(jax.grad(lambda x: f(x).sum())(x), jax.grad(lambda x: plain(x).sum())(x))
  stack = jnp.stack([x, x / 2])
  close(jax.vmap(f)(stack), jax.vmap(plain)(stack))
  loop = lambda f: lax.scan(lambda c, _: (f(c), None), x, length=3)[0]
  close(loop(f), loop(plain))
  close(jax.jit(f)(x), plain(x))
  close(sharded_jit(lambda x: f(x) * 2, P(2, 2), P(2, 2))(x), 2 * plain(x))


@case
def it_runs_under_pmap() -> None:
  x = np.arange(32.0, dtype=np.float32).reshape(2, 4, 4)
  for f in (
    sharded_jit(lambda x: x @ x, in_parts=P(2, 1), out_parts=None),
    sharded_jit(lambda x: with_sharding_constraint(x @ x, P(2, 1)), None, None),
  ):
    np.testing.assert_allclose(jax.pmap(f)(x), x @ x)


@case
def a_program_inside_jit_shows_its_tiles() -> None:
  f = sharded_jit(lambda x: x + 1, P(2, 1), None)
  text = jax.jit(f).lower(X).as_text()
  assert 'sdy.sharding_constraint %arg0 <@mesh, [{"parts0"}, {}]>' in text


@case
def equal_calls_trace_and_compile_once() -> None:
  traces = []

  def f(x):
    traces.append(x.shape)
    return x + 1

  g = sharded_jit(f, P(2, 1), P(2, 1))
  g(X)
  g(X + 1)
  g(g(X))
  assert traces == [(8, 8)]
  g(X[:4])
  assert traces == [(8, 8), (4, 8)]


@case
def what_is_split_already_is_not_moved() -> None:
  f = sharded_jit(lambda x: x * 1.0, P(2, 1), P(2, 1))
  x = f(X)
  with jax.transfer_guard("disallow"):
    f(x)


@case
def static_arguments_come_off_first() -> None:
  f = sharded_jit(lambda n, x: x * n, in_parts=P(2, 1), out_parts=P(2, 1), static_argnums=0)
  np.testing.assert_array_equal(f(3, X), 3 * X)
  np.testing.assert_array_equal(f(4, X), 4 * X)
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, None, None, static_argnums=3)(X))
  assert "static_argnums=(3,)" in text
  assert "only 1 positional" in text


@case
def errors_name_the_numbers() -> None:
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(9), None)(np.ones(9)))
  assert text == "sharded_jit computation requires 9 devices, but only 8 devices are available."
  text = message_of(NotImplementedError, lambda: sharded_jit(lambda x: x, None, None)(x=X))
  assert "kwargs not yet supported" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2), None)(X))
  assert "PartitionSpec(2) has 1 dimensions, but array 0 has 2" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2, 1), P(4, 1)))
  assert "2 (PartitionSpec(2, 1) in in_parts) and 4 (PartitionSpec(4, 1) in out_parts)" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, (P(2, 1), None), None)(X))
  assert "in_parts: expected a prefix" in text
  for program in (with_sharding_constraint, jax.jit(with_sharding_constraint, static_argnums=1)):
    text = message_of(NotImplementedError, lambda program=program: program(X, P(2, 1)))
    assert "inside sharded_jit" in text
  message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2, 1), None)(np.ones((3, 2))))


if __name__ == "__main__":
  failures = {}
  for name, run in CASES.items():
    try:
      run()
      failures[name] = ""
    except Exception:  # noqa: BLE001 - reported by name
      failures[name] = traceback.format_exc()
  pathlib.Path(sys.argv[1]).write_text(json.dumps(failures), encoding="utf-8")
