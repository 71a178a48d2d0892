# SPDX-License-Identifier: Apache-2.0
"""`callgate.bars`: bars of loops whose authors did nothing for them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import run_python
from jax import lax
from jax.lax import fori_loop, scan, while_loop  # before the first block
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from recorded_bars import XS, add, counts, recorded, same

import callgate as cg
from callgate._runtime import config


def here(offset: int = 0) -> str:
  """The name of a loop in the line of the call, or so many lines on."""
  frame: Any = inspect.currentframe()
  frame = frame.f_back
  return f"{frame.f_code.co_qualname} ({'test_everywhere.py'}:{frame.f_lineno + offset})"


def drawn(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
  """Runs a jitted function in a block; its bars."""
  with recorded() as bars, cg.bars(**options):
    jax.block_until_ready(jax.jit(lambda *xs: function(*xs))(*arguments))
    cg.barrier()
  return counts(bars)


# -- loops that have one ---------------------------------------------------------------------------
def loops(x: Any) -> Any:
  """One of each; a name is that of this function and the line."""
  x, ys = scan(add, x, XS)
  x = fori_loop(0, 200, lambda i, x: x * 0.5 + i, x)
  return while_loop(lambda s: s[0] < 300, lambda s: (s[0] + 1, s[1] * 0.9), (0, x + ys.sum()))


def test_each_loop_has_a_bar_named_by_its_function_and_line() -> None:
  with recorded() as bars, cg.bars():
    got = jax.block_until_ready(jax.jit(loops)(1.0))
    cg.barrier()
  first = inspect.getsourcelines(loops)[1] + 2
  name = f"loops (test_everywhere.py:{first})"
  assert sorted(counts(bars)) == [
    (name, 100, 100),
    (name.replace(str(first), str(first + 1)), 200, 200),
    (name.replace(str(first), str(first + 2)), 300, None),
  ]
  same(got, jax.jit(loops)(1.0))


@pytest.mark.parametrize("module", [lax, jax.lax])
def test_however_a_loop_is_called(module: Any) -> None:
  def f(x: Any) -> Any:
    x = module.scan(add, x, XS)[0]
    x = jax.named_call(module.fori_loop, name="inner")(0, 100, lambda i, x: x + i, x)
    x = module.fori_loop(upper=100, lower=0, body_fun=lambda i, x: x + i, init_val=x)
    x = module.scan(f=lambda c, _: (c + 1, None), init=x, length=100)[0]
    return module.scan(add, x, XS, reverse=True, unroll=4)[0]

  assert sorted(n for _, n, _ in drawn(f, 1.0)) == [100] * 5


def test_a_number_of_steps_that_the_program_alone_knows() -> None:
  def f(n: Any, x: Any) -> Any:
    x = lax.fori_loop(0, n, lambda i, x: x + i, x)
    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 0.5), (0, x))

  assert {(n, total) for _, n, total in drawn(f, 500, 1.0)} == {(500, None), (500, 500)}
  assert drawn(f, 50, 1.0) == []
  assert len(drawn(f, 50, 1.0, min_steps=50)) == 2


@pytest.mark.parametrize(("least", "bars"), [(0, 3), (3, 3), (4, 2), (5, 1), (6, 0)])
def test_short_loops_have_none(least: int, bars: int) -> None:
  def f(x: Any) -> Any:
    x = lax.scan(add, x, XS[:3])[0]
    x = lax.fori_loop(2, 6, lambda i, x: x + i, x)
    return lax.fori_loop(np.int32(0), jnp.int32(5), lambda i, x: x + i, x)

  assert len(drawn(f, 1.0, min_steps=least)) == bars


def test_loops_of_jaxs_own_functions_have_none() -> None:
  def f(key: Any, x: Any) -> Any:
    y = jax.random.gamma(key, 2.0, (500,)), lax.map(jnp.sin, XS), jnp.interp(x, XS, XS)
    z = (
      lax.associative_scan(jnp.add, XS),
      jnp.searchsorted(XS, 3.0),
      lax.map(jnp.cos, XS, batch_size=5),
    )
    return (
      y,
      z,
      jax.pure_callback(
        lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x, vmap_method="sequential"
      ),
    )

  assert drawn(f, jax.random.key(0), 1.0, min_steps=0) == []


def test_callgates_loops() -> None:
  def f(x: Any) -> Any:
    x = cg.scan(add, x, XS)[0]
    x = cg.scan(add, x, XS, progress="own")[0]
    x = cg.scan(add, x, XS, progress=False)[0]
    x, _, _ = cg.scan(add, x, XS, until=lambda c: c > 1e9)
    x = cg.fori_loop(0, 100, lambda i, x: x + i, x)
    return cg.while_loop(lambda x: x < 1e9, lambda x: x * 1.01, x)

  bars = drawn(f, 1.0)
  assert len(bars) == 5
  assert sum(desc == "own" for desc, _, _ in bars) == 1
  assert sum("f (test_everywhere.py:" in desc for desc, _, _ in bars) == 4


# -- results ---------------------------------------------------------------------------------------
def differentiable(x: Any) -> Any:
  x, ys = lax.scan(add, x, XS)
  return lax.fori_loop(0, 120, lambda i, x: jnp.sin(x) + 0.1 * x, x) + ys.sum()


def nested(x: Any) -> Any:
  def outer(c: Any, x: Any) -> Any:
    return lax.scan(add, c, XS)[0], x

  return lax.scan(outer, x, XS)[0]


def in_a_branch(x: Any) -> Any:
  return lax.cond(x > 0, differentiable, lambda x: x, x)


TRANSFORMED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
  "none": lambda f: f,
  "grad": jax.grad,
  "value_and_grad": jax.value_and_grad,
  "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
  "linearize": lambda f: lambda x: jax.linearize(f, x)[1](1.0),
  "hessian": jax.hessian,
  "vmap": lambda f: lambda x: jax.vmap(f)(x + XS[:3]),
  "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(x + XS[:3]),
  "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
  "custom_vjp": lambda f: jax.grad(with_rule(f)),
  "jit": jax.jit,
  "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c) * 1e-3, None), x, length=3)[0],
}


def with_rule(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
  ruled = jax.custom_vjp(f)
  ruled.defvjp(lambda x: jax.vjp(f, x), lambda back, ct: back(ct))
  return ruled


@pytest.mark.parametrize(
  ("f", "name"),
  [
    *((f, name) for f in (differentiable, in_a_branch) for name in TRANSFORMED),
    *((nested, name) for name in TRANSFORMED if name != "hessian"),  # which takes seconds
  ],
)
def test_results_and_gradients_are_those_without(f: Callable[[Any], Any], name: str) -> None:
  function = TRANSFORMED[name](f)
  want = jax.jit(lambda x: function(x))(0.5)
  with recorded() as bars, cg.bars():
    got = jax.jit(lambda x: function(x))(0.5)
    jax.block_until_ready(got)
    cg.barrier()
  same(got, want)
  assert bars


# -- when ------------------------------------------------------------------------------------------
def test_programs_with_and_without_bars_are_kept_apart() -> None:
  f = jax.jit(lambda x: lax.scan(add, x, XS)[0])
  x = jnp.float32(1)
  compiled = f.lower(x).compile()

  def bars_of(call: Callable[[Any], Any]) -> int:
    with recorded() as bars:
      for _ in range(3):
        call(x).block_until_ready()
      cg.barrier()
    return len(bars)

  assert bars_of(f) == 0
  for _ in range(2):
    with cg.bars():
      assert bars_of(f) == 3
      assert bars_of(compiled) == 0
      with cg.bars(min_steps=101):
        assert bars_of(f) == 0
      with_bars = f.lower(x).compile()
    assert bars_of(f) == 0
    assert bars_of(with_bars) == 3


def test_a_block_ends_by_an_exception_and_is_its_threads() -> None:
  def other(x: Any) -> Any:
    return lax.scan(add, x, XS)[0]

  with recorded() as bars, cg.bars():
    thread = threading.Thread(target=lambda: jax.jit(other)(1.0).block_until_ready())
    thread.start()
    thread.join()
    cg.barrier()
  assert bars == []
  with pytest.raises(ZeroDivisionError), cg.bars():
    raise ZeroDivisionError
  with recorded() as bars:
    jax.jit(lambda x: other(x))(1.0).block_until_ready()
    cg.barrier()
  assert bars == []


def test_a_decorator() -> None:
  @cg.bars(min_steps=10)
  def run(x: Any, again: bool = True) -> Any:
    return run(x, again=False) if again else jax.jit(lambda x: lax.scan(add, x, XS)[0])(x)

  with recorded() as bars:
    run(1.0).block_until_ready()
    cg.barrier()
  assert len(bars) == 1


def test_a_decorated_function_in_two_threads() -> None:
  inside, both = threading.Barrier(2), [0, 0]

  @cg.bars()
  def run(number: int) -> None:
    inside.wait(30)
    if number:
      time.sleep(0.05)  # the other one leaves first

  def work(number: int) -> None:
    with recorded() if not number else contextlib.nullcontext():
      run(number)
    both[number] = int(config.least_steps_of_bars.value)

  threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert both == [config.NO_BARS] * 2
  block = cg.bars()
  block.__enter__()
  thread = threading.Thread(target=lambda: both.append(error_of(block)))
  thread.start()
  thread.join()
  block.__exit__(None, None, None)
  assert "the block must end in the thread that began it" in str(both[-1])
  assert config.least_steps_of_bars.value == config.NO_BARS


def error_of(block: Any) -> Any:
  with pytest.raises(RuntimeError) as caught:
    block.__exit__(None, None, None)
  return caught.value


def test_a_decorated_body_has_its_own_bar() -> None:
  own = cg.progress("own")(add)
  for body in (own, functools.partial(own)):
    assert drawn(lambda x, body=body: lax.scan(body, x, XS), 1.0) == [("own", 100, 100)]


def test_a_number_of_steps_that_an_export_leaves_open() -> None:
  (n,) = jax.export.symbolic_shape("n")
  f = lambda v: lax.fori_loop(0, v.shape[0], lambda i, x: x + v[i], 0.0)
  with cg.bars(min_steps=0):
    exported = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((n,), jnp.float32))
  assert exported.call(jnp.ones(7)) == 7


def test_outside_of_jit() -> None:
  with recorded() as bars, cg.bars():
    same(lax.scan(add, 1.0, XS), jax.jit(lambda x: lax.scan(add, x, XS))(1.0))
    same(lax.fori_loop(0, 100, lambda i, x: x + i, 0), jnp.int32(4950))
    cg.barrier()
  assert len(bars) == 3
  with jax.disable_jit(), cg.bars():
    same(lax.fori_loop(0, 100, lambda i, x: x + i, jnp.int32(0)), jnp.int32(4950))


def test_over_devices() -> None:
  on = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  spec = PartitionSpec("a")
  f = lambda x: lax.scan(lambda c, x: (c * 0.5 + x, None), x, XS)[0]
  x = jax.device_put(jnp.arange(4.0), NamedSharding(on, spec))
  want = f(jnp.arange(4.0))
  some = {"axis_names": {"a"}}
  for options, number in ((None, 1), ({}, None), (some, 0)):
    mapped = f
    if options is not None:
      mapped = jax.shard_map(f, mesh=on, in_specs=spec, out_specs=spec, **options)
    with recorded() as bars, cg.bars():
      np.testing.assert_array_equal(jax.jit(lambda x, g=mapped: g(x))(x), want)
      cg.barrier()
    assert number is None or len(bars) == number, options


# -- refusals --------------------------------------------------------------------------------------
def test_wrong_calls_are_errors_of_jaxs_own() -> None:
  def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
      call()
    return str(caught.value)

  for call in (
    lambda: lax.scan(add, 1.0),
    lambda: lax.scan(add),  # type: ignore[call-arg]
    lambda: lax.scan(add, 1.0, (XS, XS[:3])),
    lambda: lax.scan(3, 1.0, XS),  # type: ignore[arg-type]
    lambda: lax.fori_loop(0, 200, lambda i, x: x),  # type: ignore[call-arg]
  ):
    want = error_of(call)
    with cg.bars():
      assert error_of(call) == want


@pytest.mark.parametrize("steps", [-1, 1.5, "many", True, None])
def test_a_wrong_number_is_refused(steps: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match="bars: min_steps: expected an integer of at le"):
    cg.bars(min_steps=steps)


def test_in_a_script(tmp_path: Any) -> None:
  done = run_python(
    """
    from jax.lax import scan
    import jax, jax.numpy as jnp, callgate as cg

    def train(x):
      return scan(lambda c, _: (c * 0.5 + 1, c), x, length=1000)

    run = jax.jit(train)
    run(1.0)
    with cg.bars(min_steps=100):
      run(2.0)
    run(3.0)
    """
  )
  lines = [line for line in done.stderr.splitlines() if "train" in line]
  assert lines
  assert all("1000/1000" in line for line in lines[-1:])
  assert sum("100%" in line for line in lines) == 1
