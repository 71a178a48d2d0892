"""Derivatives of `callgate.elementwise`: `jvp=` expressions, and pointwise finite differences.

An expression such as "dz = y * dx + x * dy" is linear in dx and dy, so that its coefficients are
its values at dx = 1, dy = 0 and at dx = 0, dy = 1. Kernels compute these, one for each argument;
what multiplies and adds them up is JAX, which can transpose that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from callgate._core.dtypes import is_complex, is_inexact
from callgate._core.errors import GateDefinitionError
from callgate._kernel.elementwise.params import Param
from callgate._kernel.elementwise.source import Code, placed, value_type, words


@dataclasses.dataclass(frozen=True)
class Derivative:
  """How a kernel's results change with one of its arguments.

  Attributes:
    kernel: computes the coefficients, one for each result.
    inputs: positions of the primal arguments that it takes.
    outputs: positions of the primal results that it takes after them.
    size: where no argument gives its results a shape, whether they have the primal call's "own" or
      are "one" number for all elements.
  """

  kernel: Callable[..., Any]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  size: Literal["own", "one"] | None

  def coefficients(
    self, primals: Sequence[Any], results: Sequence[Any], letters: dict[str, str], size: Any
  ) -> list[Any]:
    """One array for each result, of a shape that broadcasts to it."""
    given = [*(primals[i] for i in self.inputs), *(results[i] for i in self.outputs)]
    keywords: dict[str, Any] = dict(letters)
    if self.size is not None:
      keywords["size"] = size if self.size == "own" else ()
    return _list(self.kernel(*given, **keywords))


def derive(
  label: str,
  code: Code,
  jvp: str,
  like: Callable[..., Any] | None,
  make: Callable[[str, Code, Callable[..., Any] | None], Any],
) -> dict[int, Derivative]:
  """A `Derivative` for each argument that has one.

  Args:
    label: of the kernel.
    code: the kernel's own.
    jvp: the user's expression.
    like: the user's reference, for derivatives of the coefficients.
    make: makes a kernel, from what its name ends in, its code and its reference.
  """
  _check_names(label, code, jvp)
  used = words(jvp) | words(code.loop_prep)
  found: dict[int, Derivative] = {}
  for index, param in enumerate(code.inputs):
    own = param.own_dtype
    if param.raw or (own is not None and not is_inexact(own)):
      continue
    template = _code_of(label, code, jvp, index, code.inputs, ())
    # All of them where the reference is to compute the same, or the place of an element counts.
    placed_by = dataclasses.replace(template, inputs=code.mapped).knows_place
    every = like is not None or placed_by
    inputs = tuple(i for i, p in enumerate(code.inputs) if every or p.name in used)
    outputs = tuple(i for i, p in enumerate(code.outputs) if p.name in used)
    taken = [code.inputs[i] for i in inputs]
    derived = _code_of(label, code, jvp, index, taken, [code.outputs[i] for i in outputs])
    reference = None if like is None else _reference(code, like, index)
    kernel = make(f"d{param.name}", derived, reference)
    size = None if derived.mapped else "own" if placed_by else "one"
    found[index] = Derivative(kernel, inputs, outputs, size)
  return found


def _check_names(label: str, code: Code, jvp: str) -> None:
  names = {p.name for p in (*code.inputs, *code.outputs)}
  have = words(jvp)
  for param in (*code.inputs, *code.outputs):
    if f"d{param.name}" in names:
      raise GateDefinitionError(
        f"{label}: jvp: 'd{param.name}' is the tangent of '{param.name}' here; expected no "
        "parameter of that name"
      )
    if param.raw and f"d{param.name}" in have:
      raise GateDefinitionError(
        f"{label}: jvp: '{param.name}' is raw, so that one element's tangent says too little; "
        "expected no derivative with respect to it, or a rule given to defjvp or defvjp"
      )
  for param in code.outputs:
    own = param.own_dtype
    if f"d{param.name}" not in have and (own is None or is_inexact(own)):
      raise GateDefinitionError(
        f"{label}: jvp: expected a statement for each result, such as 'd{param.name} = ...;', "
        f"got none for '{param.name}'"
      )


def _code_of(
  label: str, code: Code, jvp: str, index: int, inputs: Sequence[Param], outputs: Sequence[Param]
) -> Code:
  """The code of the kernel of coefficients: the expression where one tangent is 1, the others 0."""
  lines: list[str] = []
  for i, param in enumerate(code.inputs):
    if not param.raw:
      start = f"{_type(param)}(1)" if i == index else ""
      lines.append(f"[[maybe_unused]] const Tangent<{_type(param)}> d{param.name}{{{start}}};")
  lines += [f"Tangent<{_type(p)}> d{p.name};" for p in code.outputs]
  lines.append(placed(label, "jvp", jvp))
  lines += [f"_d{p.name} = d{p.name}.factor();" for p in code.outputs]
  return Code(
    inputs=(*inputs, *outputs),
    outputs=tuple(Param(f"_d{p.name}", p.type) for p in code.outputs),
    operation="\n".join(lines),
    preamble=code.preamble,
    loop_prep=code.loop_prep,
    more_types=code.types,
  )


def _type(param: Param) -> str:
  """The type of a parameter's values in C++."""
  return param.type if param.own_dtype is None else value_type(param.own_dtype)


def rule(kernel: Any, primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> Any:
  """The kernel's derivative by its `derivatives`; as `jax.custom_jvp` with symbolic zeros."""
  out = kernel(*primals, **static)
  results = _list(out)
  totals: list[Any] = [None] * len(results)
  letters = {name: dtype.name for name, dtype in kernel.bindings(primals, static).items()}
  for index, (param, tangent) in enumerate(zip(kernel.user_code.inputs, tangents, strict=True)):
    if isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0:
      continue
    if index not in kernel.derivatives:
      raise GateDefinitionError(
        f"{kernel.label}: differentiated with respect to '{param.name}', which is raw; expected a "
        "derivative in the other arguments alone, or a rule given to defjvp or defvjp"
      )
    _check_complex(kernel.label, param, tangent, results)
    factors = kernel.derivatives[index].coefficients(primals, results, letters, static.get("size"))
    for k, (result, factor) in enumerate(zip(results, factors, strict=True)):
      totals[k] = _add(totals[k], factor, tangent, result)
  return out, _in_tree(out, [_full(t, r) for t, r in zip(totals, results, strict=True)])


def _check_complex(label: str, param: Param, tangent: Any, results: Sequence[Any]) -> None:
  """Such a derivative is no factor: it is linear in the tangent's parts, not in the tangent."""
  for result in results:
    if is_complex(tangent.dtype) and is_inexact(result.dtype) and not is_complex(result.dtype):
      raise GateDefinitionError(
        f"{label}: jvp= takes derivatives of complex results with respect to complex "
        f"'{param.name}', got a result of {result.dtype.name}; give a rule to defjvp"
      )


def differences(kernel: Any, primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> Any:
  """The same by central differences, each element by itself.

  The step is that of `derivatives._jvp_by_differences`.
  """
  out = kernel(*primals, **static)
  results = _list(out)
  totals: list[Any] = [None] * len(results)
  for index, (param, tangent) in enumerate(zip(kernel.user_code.inputs, tangents, strict=True)):
    if isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0:
      continue
    if param.raw or not jnp.issubdtype(tangent.dtype, jnp.floating):
      raise GateDefinitionError(
        f"{kernel.label}: argument '{param.name}': gradient='finite-difference' takes derivatives "
        "with respect to real arguments that are not raw; give a rule to defjvp or defvjp"
      )
    x = primals[index]
    step = float(jnp.finfo(x.dtype).eps) ** (1 / 3) * jnp.maximum(1, jnp.abs(x))
    up, down = x + step.astype(x.dtype), x - step.astype(x.dtype)
    ends = [_list(kernel(*primals[:index], y, *primals[index + 1 :], **static)) for y in (up, down)]
    for k, (result, high, low) in enumerate(zip(results, *ends, strict=True)):
      if is_inexact(result.dtype):
        slope = (high - low) / (up - down).astype(result.dtype)
        totals[k] = _add(totals[k], slope, tangent, result)
  return out, _in_tree(out, [_full(t, r) for t, r in zip(totals, results, strict=True)])


def _reference(code: Code, like: Callable[..., Any], index: int) -> Callable[..., Any]:
  """The coefficients by JAX, of which it knows all further derivatives."""

  def coefficients(*args: Any, **static: Any) -> Any:
    primals = args[: len(code.inputs)]
    shape = np.broadcast_shapes(
      *(jnp.shape(x) for p, x in zip(code.inputs, primals, strict=True) if not p.raw)
    )
    full = [
      x if p.raw else jnp.broadcast_to(x, shape) for p, x in zip(code.inputs, primals, strict=True)
    ]
    tangents = [
      jnp.ones_like(x) if i == index else _zero(jnp.shape(x), x.dtype) for i, x in enumerate(full)
    ]
    del static
    return jax.jvp(like, full, tangents)[1]

  return coefficients


def _add(total: Any, factor: Any, tangent: Any, result: Any) -> Any:
  if not is_inexact(result.dtype):
    return None
  part = factor.astype(result.dtype) * tangent.astype(result.dtype)
  return part if total is None else total + part


def _full(total: Any, result: Any) -> Any:
  if total is None:
    return _zero(result.shape, result.dtype)
  return jnp.broadcast_to(total, result.shape)


def _zero(shape: tuple[int, ...], dtype: Any) -> Any:
  if is_inexact(dtype):
    return jnp.zeros(shape, dtype)
  return np.zeros(shape, jax.dtypes.float0)


def _list(out: Any) -> list[Any]:
  return list(out) if isinstance(out, tuple) else [out]


def _in_tree(out: Any, leaves: list[Any]) -> Any:
  return tuple(leaves) if isinstance(out, tuple) else leaves[0]
