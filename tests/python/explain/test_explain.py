# SPDX-License-Identifier: Apache-2.0
"""`callgate.explain`: what a program's calls are said to cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import callgate as cg

sort = cg.gate(np.sort, out=lambda x: x, name="explained sort")


def the_call(f: Any, *args: Any) -> cg.ExplainedCall:
  (call,) = cg.explain(f, *args).calls
  return call


def test_a_gate_in_loops_and_lanes() -> None:
  def step(c: Any, x: Any) -> Any:
    return c, jax.vmap(sort)(x)  # explained here

  call = the_call(lambda xs: jax.lax.scan(step, 0, xs)[1], jnp.ones((5, 100, 64)))
  assert (call.kind, call.name, call.effect) == ("gate", "explained sort", "pure")
  assert (call.loops, call.lanes) == ((5,), 100)
  assert call.copies == 100 * 64 * 4
  assert (call.waits, call.gil, call.gathers) == (True, True, None)
  line = Path(__file__).read_text(encoding="utf-8").split("# explained here")[0].count("\n") + 1
  assert f"test_explain.py:{line} (" in call.source
  assert any("vmap='whole'" in text for text in call.advice)


def test_a_loop_of_unknown_length_and_branches() -> None:
  def f(x: Any) -> Any:
    body = lambda c: (c[0] + 1, jax.lax.cond(c[0] > 1, sort, lambda x: x, c[1]))
    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

  assert the_call(jax.jit(f), jnp.ones(3)).loops == (None,)


def test_kernels_and_taps() -> None:
  square = cg.elementwise("T x", "T y", "y = x * x", name="explained square")

  def f(x: Any) -> Any:
    y = cg.tap(square(x), lambda y: None, name="explained tap")
    return y.sum()

  report = cg.explain(f, jnp.ones(32768))
  kernel, tap = report.calls
  assert (kernel.kind, kernel.copies, kernel.gil) == ("kernel", 0, False)
  assert (tap.kind, tap.name, tap.copies, tap.waits, tap.gil) == (
    "tap", "explained tap", 131072, False, False,
  )  # fmt: skip
  assert report.dispatch == "JAX's C++ path"


def test_calls_that_are_decided_without_python() -> None:
  knob = cg.knob("explained", 1.0)

  def f(x: Any) -> Any:
    cg.check(x.sum() > 0, "a sum above 0")
    return cg.breakpoint(x.sum() < 0, out="x", x=x) * knob.read()

  check, stop, read = cg.explain(f, jnp.ones(3)).calls
  assert (check.kind, check.name, check.gil, check.copies) == ("check", "a sum above 0", False, 0)
  assert (stop.kind, stop.gil) == ("breakpoint", False)
  assert (read.kind, read.gil) == ("gate", False)


def test_options_that_copy() -> None:
  inplace = cg.gate(
    lambda out, x: np.copyto(out, x), style="inplace", out=lambda x: x, name="explained inplace"
  )
  assert the_call(inplace, jnp.ones(1 << 16)).copies == 0
  returned = the_call(sort, jnp.ones(1 << 16))
  assert any("style='inplace'" in text for text in returned.advice)
  slow = cg.gate(np.sort, out=lambda x: x, timeout=5.0, name="explained timeout")
  call = the_call(slow, jnp.ones(4))
  assert call.copies == 32
  assert any("timeout=" in text for text in call.advice)


def test_jaxs_own_callbacks() -> None:
  def f(x: Any) -> Any:
    x = jax.pure_callback(np.sin, x, x)
    jax.debug.print("x={x}", x=x)
    return io_callback(np.cos, x, x, ordered=True)

  report = cg.explain(f, jnp.ones(4))
  pure, printed, io = report.calls
  assert (pure.kind, pure.effect, pure.waits) == ("JAX callback", "pure", True)
  assert any("callgate.install()" in text for text in pure.advice)
  assert (printed.effect, io.effect) == ("io", "ordered")
  assert "due to effects of others" in report.dispatch
  cg.install()
  try:
    assert not any("install" in text for text in cg.explain(f, jnp.ones(4)).calls[0].advice)
  finally:
    cg.uninstall()


def test_gathers_of_a_program() -> None:
  mesh = jax.make_mesh((4,), ("d",))
  x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, jax.P("d")))
  split = cg.gate(np.tanh, out=lambda x: x, sharding="i j -> i j", name="explained split")
  whole = cg.gate(np.tanh, out=lambda x: x, sharding="gather", name="explained whole")
  kernel = cg.elementwise("T x", "T y", "y = x", sharding="gather", name="explained kernel")
  f = jax.jit(lambda x: (split(x), whole(x) + 1))
  report = cg.explain(f, x)
  assert (report.devices, report.platform) == (4, "cpu")
  by_name = {call.name: call for call in report.calls}
  assert by_name["explained split"].gathers == 0
  assert by_name["explained whole"].gathers in (512, 1024)
  (call,) = cg.explain(jax.jit(lambda x: kernel(x) + 1), x).calls
  assert call.gathers == 512
  assert any("sharding=" in text for text in by_name["explained whole"].advice)


def test_dispatch_of_effects() -> None:
  assert cg.explain(jnp.sin, 1.0).dispatch == "JAX's C++ path, as without calls"
  with cg.config(fast_dispatch=False):
    io = cg.gate(np.sort, out=lambda x: x, effect="io", name="explained io")
    assert "fast_dispatch=False" in cg.explain(io, jnp.ones(3)).dispatch
  knob = cg.knob("explained knob", 1.0)
  assert cg.explain(lambda x: x + knob.read(), 1.0).dispatch == "JAX's C++ path"
  looks = cg.explain(lambda x: x + cg.stop_requested(), 1.0)
  assert looks.dispatch.startswith("JAX's Python path")
  assert "cg.stop" in looks.dispatch


def test_the_report_as_text_and_as_data() -> None:
  report = cg.explain(jax.jit(jax.vmap(sort)), jax.ShapeDtypeStruct((20, 3), np.float32))
  text = str(report)
  assert (
    text.splitlines()[0] == "1 calls on 1 cpu device; dispatch: JAX's C++ path, as without calls"
  )
  assert "gate 'explained sort'" in text
  assert "20 lanes" in text
  assert json.loads(json.dumps(report.to_dict()))["calls"][0]["lanes"] == 20


def test_it_runs_nothing_and_refuses_what_is_no_function() -> None:
  called: list[int] = []
  gate = cg.gate(lambda x: called.append(1), out=(), effect="io", name="explained idle")
  cg.explain(gate, jnp.ones(3))
  assert not called
  with pytest.raises(cg.GateDefinitionError, match="explain: f: expected"):
    cg.explain(3)
