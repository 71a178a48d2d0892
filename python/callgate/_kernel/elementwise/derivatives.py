# SPDX-License-Identifier: Apache-2.0
"""Derivatives of `callgate.elementwise`: `jvp=` expressions, and pointwise finite differences.

The coefficients of "dz = y * dx + x * dy" are its values at dx = 1, dy = 0 and at dx = 0, dy = 1.
Kernels compute them. JAX multiplies them with the tangents and adds up, which it can transpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from callgate._core.dtypes import is_complex, is_inexact
from callgate._core.errors import GateDefinitionError
from callgate._kernel.elementwise.params import Param
from callgate._kernel.elementwise.source import Code, placed, value_type, words


class Derivative(NamedTuple):
  """The derivative of a kernel's results by one of its arguments."""

  kernel: Callable[..., Any]  # computes the coefficients, one for each result
  inputs: tuple[int, ...]  # positions of the primal arguments that it takes
  outputs: tuple[int, ...]  # positions of the primal results that it takes after these
  # The results' shape if no argument gives it: the primal call's, or one number for all elements.
  size: Literal["own", "one"] | None


def derive(
  label: str, code: Code, jvp: str, like: Callable[..., Any] | None,
  make: Callable[[str, Code, Callable[..., Any] | None], Any],
) -> dict[int, Derivative]:  # fmt: skip
  """Returns derivatives by argument; `make` takes a kernel's name suffix, code and reference."""
  _check_names(label, code, jvp)
  used, found = words(jvp) | words(code.loop_prep), dict[int, Derivative]()
  results = tuple(Param(f"_d{p.name}", p.type) for p in code.outputs)
  for index, param in enumerate(code.inputs):
    if param.raw or not _has_tangent(param):
      continue
    operation, types = _operation(label, code, jvp, index), code.types
    derived = Code(code.mapped, results, operation, code.preamble, code.loop_prep, more_types=types)
    # All arguments, if the reference must compute the same, or if an element's place matters.
    placed_by = derived.knows_place
    every = like is not None or placed_by
    inputs = tuple(i for i, p in enumerate(code.inputs) if every or p.name in used)
    outputs = tuple(i for i, p in enumerate(code.outputs) if p.name in used)
    taken = (*(code.inputs[i] for i in inputs), *(code.outputs[i] for i in outputs))
    derived = dataclasses.replace(derived, inputs=taken)
    reference = None if like is None else _reference(code, like, index)
    size = None if derived.mapped else "own" if placed_by else "one"
    found[index] = Derivative(make(f"d{param.name}", derived, reference), inputs, outputs, size)
  return found


def _has_tangent(param: Param) -> bool:
  return param.own_dtype is None or is_inexact(param.own_dtype)


def _check_names(label: str, code: Code, jvp: str) -> None:
  params = (*code.inputs, *code.outputs)
  names, have = {p.name for p in params}, words(jvp)
  for param in params:
    tangent, given = f"d{param.name}", f"d{param.name}" in have
    faults = {
      f"'{tangent}' is the tangent of '{param.name}'; rename the parameter '{tangent}'":
        tangent in names,
      f"'{param.name}' is raw, so jvp= can't use the tangent of a single element; drop "
f"'{tangent}', or use defjvp or defvjp":
        param.raw and given,
      f"expected a statement for each result, such as '{tangent} = ...;', got none for "
      f"'{param.name}'":
        param in code.outputs and not given and _has_tangent(param),
    }  # fmt: skip
    for fault in (text for text, wrong in faults.items() if wrong):
      raise GateDefinitionError(f"{label}: jvp: {fault}")


def _operation(label: str, code: Code, jvp: str, index: int) -> str:
  """Returns the coefficients' code: the expression with one tangent 1, and the others 0."""
  lines: list[str] = []
  for p in code.mapped:
    start = f"{_type(p)}(1)" if p is code.inputs[index] else ""
    lines.append(f"[[maybe_unused]] const Tangent<{_type(p)}> d{p.name}{{{start}}};")
  lines += [f"Tangent<{_type(p)}> d{p.name};" for p in code.outputs]
  lines.append(placed(label, "jvp", jvp))
  return "\n".join((*lines, *(f"_d{p.name} = d{p.name}.factor();" for p in code.outputs)))


def _type(param: Param) -> str:
  return param.type if param.own_dtype is None else value_type(param.own_dtype)


def jvp(
  factors: Callable[..., list[Any]], kernel: Any, primals: Sequence[Any], tangents: Sequence[Any],
  **static: Any,
) -> Any:  # fmt: skip
  """The kernel's rule for `jax.custom_jvp` with symbolic zeros; `factors` is a function below."""
  results, tree = jax.tree.flatten(kernel(*primals, **static))
  totals: list[Any] = [None] * len(results)
  for index, tangent in enumerate(tangents):
    if isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0:
      continue
    found = factors(kernel, index, primals, results, static)
    for i, (result, factor) in enumerate(zip(results, found, strict=True)):
      if is_inexact(result.dtype):
        term = factor.astype(result.dtype) * tangent.astype(result.dtype)
        totals[i] = term if totals[i] is None else totals[i] + term
  for i, (total, result) in enumerate(zip(totals, results, strict=True)):
    zero = total is None
    totals[i] = zero_from_primal(result) if zero else jnp.broadcast_to(total, result.shape)
  return tree.unflatten(results), tree.unflatten(totals)


def by_expression(
  kernel: Any, index: int, primals: Sequence[Any], results: Sequence[Any], static: dict[str, Any]
) -> list[Any]:
  """Returns one coefficient for each result, of a shape that broadcasts to it."""
  name, dtype = kernel.user_code.inputs[index].name, primals[index].dtype
  if index not in kernel.derivatives:
    fault = f"differentiated with respect to '{name}', which is raw"
    expected = "derivatives only in the other arguments; use defjvp or defvjp for this one"
    raise GateDefinitionError(f"{kernel.label}: {fault}; expected {expected}")
  for result in results:
    # Such a derivative is linear in the tangent's real and imaginary parts, but is no factor.
    if is_complex(dtype) and is_inexact(result.dtype) and not is_complex(result.dtype):
      only = f"supports only complex results for the complex argument '{name}'"
      got = f"got a result of {result.dtype.name}; use defjvp"
      raise GateDefinitionError(f"{kernel.label}: jvp= {only}, {got}")
  derivative: Derivative = kernel.derivatives[index]
  given = [*(primals[i] for i in derivative.inputs), *(results[i] for i in derivative.outputs)]
  bindings = kernel.user_code.bindings(kernel.label, primals, static)
  keywords = {letter: dtype.name for letter, dtype in bindings.items()}
  if derivative.size is not None:
    keywords["size"] = static.get("size") if derivative.size == "own" else ()
  return jax.tree.leaves(derivative.kernel(*given, **keywords))


def by_differences(
  kernel: Any, index: int, primals: Sequence[Any], results: Sequence[Any], static: dict[str, Any]
) -> list[Any]:
  """Returns central differences of each element, with the step of `_call/derivatives.py`."""
  param, x = kernel.user_code.inputs[index], primals[index]
  if param.raw or not jnp.issubdtype(x.dtype, jnp.floating):
    only = "supports only real arguments that are not raw"
    fault = f"gradient='finite-difference' {only}; use defjvp or defvjp"
    raise GateDefinitionError(f"{kernel.label}: argument '{param.name}': {fault}")
  step = float(jnp.finfo(x.dtype).eps) ** (1 / 3) * jnp.maximum(1, jnp.abs(x))
  up, down = x + step.astype(x.dtype), x - step.astype(x.dtype)
  around = ([*primals[:index], y, *primals[index + 1 :]] for y in (up, down))
  highs, lows = (jax.tree.leaves(kernel(*given, **static)) for given in around)
  return [
    (high - low) / (up - down).astype(result.dtype) if is_inexact(result.dtype) else None
    for result, high, low in zip(results, highs, lows, strict=True)
  ]


def _reference(code: Code, like: Callable[..., Any], index: int) -> Callable[..., Any]:
  """Returns the coefficients computed by JAX, which has all their derivatives."""

  def coefficients(*args: Any, **_: Any) -> Any:
    pairs = list(zip(code.inputs, args[: len(code.inputs)], strict=True))
    shape = np.broadcast_shapes(*(jnp.shape(x) for p, x in pairs if not p.raw))
    full = [x if p.raw else jnp.broadcast_to(x, shape) for p, x in pairs]
    tangents = [jnp.ones_like(x) if i == index else zero_from_primal(x) for i, x in enumerate(full)]
    return jax.jvp(like, full, tangents)[1]

  return coefficients
