# SPDX-License-Identifier: Apache-2.0
"""Kernels, and functions of PyTorch, of the libraries that are here."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import duals
import numpy as np
from arithmetic import FUNCTIONS, a_float
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from program import Context, Part, Scope, Values, drawn

half = FUNCTIONS["half"][1]
_HALF = "{x} * 0.5 + 0.25"


def _with_sums(axis: int) -> Callable[[Any], Any]:
  """x + 0.5 * the sums of x along an axis, which stays with extent 1."""
  sums = lambda a: a + np.asarray(0.5, a.dtype) * np.sum(a, axis, keepdims=True)
  return lambda x: duals.linear(sums, x)


@dataclasses.dataclass(frozen=True)
class Native:
  """A kernel of an array.

  Attributes:
    define: text above the program.
    call: the text of a call of `{x}`.
    twin: the same in JAX.
    value: what it gives, on the oracle's values.
    library: that it needs; "" for none.
    axes: True where the operand needs an axis.
    order: how many derivatives it may stand under.
  """

  define: str
  call: str
  twin: str = _HALF
  value: Callable[[Any], Any] = half
  library: str = ""
  axes: bool = False
  order: int = 0


_CPP = """\
kernel_cpp = cg.cpp('''
void half(cg::In<float> x, cg::Out<float> y) {
  for (int64_t i = 0; i < x.size(); ++i) y.data()[i] = x.data()[i] * 0.5f + 0.25f;
}''', out=lambda x: x)
"""
_ELEMENTWISE = "kernel_elementwise = cg.elementwise('T x', 'T y', 'y = x * T(0.5) + T(0.25)')"
_TWO = "kernel_two = cg.elementwise('T x, T y', 'T z', 'z = x + T(0.5) * y')"
_SUMS = "{x} + 0.5 * jnp.sum({x}, %d, keepdims=True)"
_CFUNC = """\
import ctypes
import ctypes.util
sinf = cg.cfunc(ctypes.CDLL(ctypes.util.find_library("m")).sinf, "float sinf(float x)")
"""
_NUMBA = """\
@cg.numba(out=lambda x: x)
def kernel_numba(x):
  return x * np.float32(0.5) + np.float32(0.25)
"""
_NUMBA_INPLACE = """\
@cg.numba(like=lambda x: x * 0.5 + 0.25)
def kernel_numba_inplace(out, x):
  for i in range(x.size):
    out.flat[i] = x.flat[i] * np.float32(0.5) + np.float32(0.25)
"""
_TORCH = """\
import torch
@cg.torch
def in_torch(x):
  return torch.sin(x) * 0.5 + 0.25
"""

KERNELS = {
  "kernel cpp": Native(_CPP, "kernel_cpp({x})"),
  "kernel elementwise": Native(_ELEMENTWISE, "kernel_elementwise({x})"),
  **{
    f"kernel elementwise, broadcast along axis {axis}": Native(
      _TWO,
      f"kernel_two({{x}}, jnp.sum({{x}}, {axis}, keepdims=True))",
      _SUMS % axis,
      _with_sums(axis),
      axes=True,
    )
    for axis in (0, -1)
  },
  "kernel cfunc": Native(_CFUNC, "sinf({x})", "jnp.sin({x})", duals.sin),
  "kernel numba": Native(_NUMBA, "kernel_numba({x})", library="numba"),
  "kernel numba inplace": Native(
    _NUMBA_INPLACE, "kernel_numba_inplace({x})", library="numba", axes=True, order=2
  ),
  "torch": Native(
    _TORCH, "in_torch({x})", "jnp.sin({x}) * 0.5 + 0.25", lambda x: half(duals.sin(x)), "torch",
    order=2,
  ),
}  # fmt: skip
FOUND = [k for k, v in KERNELS.items() if not v.library or importlib.util.find_spec(v.library)]


@dataclasses.dataclass(frozen=True)
class Kernel(Part):
  """A call of one of `KERNELS`."""

  kind: str

  @property
  def part(self) -> str:  # type: ignore[override]
    return self.kind

  def definitions(self) -> Sequence[str]:
    return [KERNELS[self.kind].define]

  def text(self, x: str) -> str:
    return KERNELS[self.kind].call.format(x=x)

  def twin(self, x: str) -> str:
    return KERNELS[self.kind].twin.format(x=x)

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    return [KERNELS[self.kind].value(x)]


@drawn("part")
def kernel(scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  fits = lambda own: context.order <= own.order and (var.type.shape or not own.axes)
  kinds = [kind for kind in FOUND if fits(KERNELS[kind])]
  if not kinds:
    return False
  scope.add(Kernel(scope.draw(st.sampled_from(kinds))), [var], var.type)
  return True
