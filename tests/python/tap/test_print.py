# SPDX-License-Identifier: Apache-2.0
"""`callgate.print` against `jax.debug.print`: the same lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

PRINTS: dict[str, Callable[[Any, Any], None]] = {
  "jax": jax.debug.print,
  "callgate": cg.print,
}


def lines(program: Callable[[Any], Any], capsys: Any) -> list[list[str]]:
  """The outputs of a program with JAX's print function and with callgate's."""
  out: list[list[str]] = []
  for function in PRINTS.values():
    program(function)
    jax.effects_barrier()
    cg.barrier()
    out.append(capsys.readouterr().out.splitlines())
  return out


PROGRAMS: dict[str, Callable[[Any], Any]] = {
  "scalars": lambda p: jax.jit(lambda x: p("x = {}, {y:.3f} {x!r:>9}", x, x=x, y=x * 2))(1.5),
  "arrays": lambda p: jax.jit(lambda x: p("{} and {}", x, x > 2))(jnp.arange(5.0)),
  "no fields": lambda p: jax.jit(lambda x: p("values", x, x + 1, skip_format_check=True))(3),
  "nothing": lambda p: jax.jit(lambda x: (p("only text"), x)[1])(1),
  "pytrees": lambda p: jax.jit(lambda x: p("{t} {l}", t={"a": (x, None)}, l=[x, 2]))(1.0),
  "static": lambda p: jax.jit(lambda x: p("{} {} {o}", "text", x, o=None))(2.0),
  "bfloat16": lambda p: jax.jit(lambda x: p("{}", x.astype(jnp.bfloat16)))(jnp.ones(2)),
  "complex": lambda p: jax.jit(lambda x: p("{}", x * 1j))(jnp.float32(2)),
  "bool and int8": lambda p: jax.jit(lambda x: p("{} {}", x > 0, x.astype(jnp.int8)))(3.0),
  "vmap": lambda p: jax.vmap(lambda x: p("lane {}", x))(jnp.arange(3)),
  "scan": lambda p: jax.lax.map(lambda x: (p("{}", x, ordered=True), x)[1], jnp.arange(3)),
  "grad": lambda p: jax.grad(lambda x: (p("{}", x), x**2)[1])(3.0),
  "cond": lambda p: jax.lax.cond(True, lambda x: p("yes {}", x), lambda x: p("no {}", x), 1),
  "eager": lambda p: p("{} {}", 1, np.float32(2)),
  "partitioned": lambda p: jax.jit(lambda x: p("{}", x, partitioned=True))(jnp.arange(2)),
  "braces": lambda p: jax.jit(lambda x: p("{} {{}}", x))(1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_lines_are_those_of_jax(name, capsys):
  theirs, ours = lines(PROGRAMS[name], capsys)
  assert ours == theirs
  assert ours


def test_numpys_print_options_of_the_trace_hold(capsys):
  def program(function):
    with np.printoptions(precision=2, threshold=3):
      jax.jit(lambda x: function("{}", x))(jnp.linspace(0, 1, 7))

  theirs, ours = lines(program, capsys)
  assert ours == theirs


@pytest.mark.parametrize(
  ("args", "kwargs", "text"),
  [((1, 2), {}, "without a field"), ((1,), {"z": 2}, "without a field")],
)
def test_values_without_a_field_are_refused_while_tracing(args, kwargs, text):
  with pytest.raises(ValueError, match=text):
    cg.print("{}", *args, **kwargs)


def test_fields_without_a_value_are_refused_while_tracing():
  with pytest.raises(IndexError):
    cg.print("{} {}", 1)
  with pytest.raises(KeyError):
    cg.print("{x}")
  with pytest.raises(cg.GateDefinitionError, match="need fields"):
    cg.print("no fields", x=1, skip_format_check=True)
  with pytest.raises(ValueError, match="without a field"):
    cg.print("no fields", 1)
  with pytest.raises(cg.GateDefinitionError, match="expected text"):
    cg.print(3)


def test_ordered_prints_keep_order_across_programs(capsys):
  program = jax.jit(lambda i: cg.print("{}", i, ordered=True))
  for i in range(20):
    program(i)
  cg.barrier()
  assert capsys.readouterr().out.split() == [str(i) for i in range(20)]


@pytest.mark.parametrize("name", ["loss", None])
def test_a_field_of_the_options_name_goes_by_position(name, capsys):
  options = {} if name is None else {"name": name}
  values = np.array([1.5, 2.5], np.float32)
  cg.print("{{{name:.1f}}} {} {name[1]:>6.2f} {y}", 1.0, "two", values, y=3, **options)
  cg.barrier()
  assert capsys.readouterr().out == "{1.0} two   2.50 3\n"


def test_a_name_is_what_explain_says():
  assert "tap 'loss'" in str(cg.explain(jax.jit(lambda x: cg.print("{}", x, name="loss")), 1.0))
  with pytest.raises(
    cg.GateDefinitionError, match=r"name: expected .* a field \{name\} by position"
  ):
    jax.jit(lambda x: cg.print("{name}", name=x))(1.0)
  with pytest.raises(IndexError):
    cg.print("{name}")
