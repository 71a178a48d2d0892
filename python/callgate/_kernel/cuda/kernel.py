"""Kernels that run on CUDA devices alone: what `callgate.cuda` and its siblings make.

A subclass says what a call launches, `plan`, and `images` where a plan's key alone tells them; all
else, from the call to the transformations, is as for kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from callgate._call.site import CallSite
from callgate._core.errors import GateDefinitionError
from callgate._core.signatures import accepted
from callgate._kernel.cuda.options import CudaOptions
from callgate._kernel.kernel import Kernel
from callgate._kernel.parameters import Kind, Parameter, check_types, refuse_packed
from callgate._kernel.program import CudaCall, CudaPart, parse_arch
from callgate._kernel.variants import Static


class CudaKernel(Kernel, CudaPart):
  """A kernel for CUDA devices; called like any JAX function.

  Attributes:
    name, parameters, effect, vmap: as for every kernel.
  """

  def __init__(
    self, name: str, signature: Sequence[Parameter] | None, options: CudaOptions
  ) -> None:
    """See the functions that make kernels.

    Args:
      name: unique among the live operations of the process.
      signature: the parameters in order: IN, OUT and INOUT for arrays, NUMBER for what a program
        fixes; None for any number of arrays, and static values by any keyword.
      options: see `CudaOptions`; its `name` is not looked at.
    """
    self._arch = parse_arch(f"kernel '{name}'", options.arch)
    super().__init__(name, signature, options)
    self.cuda = self

  def arch(self) -> tuple[int, ...]:
    return self._arch

  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    given = [p for p in self.signature or () if p.is_given]
    values = {**dict(zip((p.name for p in given), args, strict=False)), **kwargs}
    for parameter in given:
      value = values.get(parameter.name)
      if parameter.kind is Kind.NUMBER and isinstance(value, Tracer):
        raise GateDefinitionError(
          f"{self.label}: argument '{parameter.name}': expected a number that is known when the "
          f"program is traced, since the kernel takes it by value; got a traced array ({value}). "
          f"Declare it as `const T* {parameter.name}` to pass an array"
        )
    return super()._arguments(args, kwargs)

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in site.results]
    refuse_packed(self.label, structs, results)
    if self.signature is not None:
      check_types(self, self.signature, site, structs, results)


def evaluated(given: Any, call: CudaCall) -> Any:
  """An option of a launch: as given, or what a function of the operands' types says.

  Static arguments that the function has parameters for are passed by name.
  """
  if not callable(given):
    return given
  return given(*call.operands, **accepted(given, call.static, filled=len(call.operands)))
