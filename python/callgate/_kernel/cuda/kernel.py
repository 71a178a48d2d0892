"""Kernels that run on CUDA devices alone: what `callgate.cuda` and its siblings make.

A subclass says what a call launches, `plan`; all else, from the call to the transformations, is as
for kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.core import Tracer

from callgate._call.operation import Effect, Vmap
from callgate._call.site import CallSite
from callgate._core.errors import GateDefinitionError
from callgate._kernel.kernel import Kernel
from callgate._kernel.launch import Image, Plan
from callgate._kernel.parameters import Kind, Parameter, check_types, refuse_packed
from callgate._kernel.program import CudaCall, CudaPart, parse_arch
from callgate._kernel.variants import CallTypes, Function, Static


class CudaKernel(Kernel, CudaPart):
  """A kernel for CUDA devices; called like any JAX function.

  Attributes:
    name, parameters, effect, vmap: as for every kernel.
  """

  def __init__(
    self,
    name: str,
    signature: Sequence[Parameter] | None,
    *,
    out: Any = None,
    like: Callable[..., Any] | None = None,
    effect: Effect = "pure",
    aliases: Mapping[int, int] | None = None,
    vmap: Vmap | Callable[..., Any] = "each",
    sharding: Any = None,
    linear: bool | int | Sequence[int] = False,
    gradient: Literal["finite-difference"] | None = None,
    arch: str | int | Sequence[str | int] | None = None,
  ) -> None:
    """See the functions that make kernels.

    Args:
      name: unique among the live operations of the process.
      signature: the parameters in order: IN, OUT and INOUT for arrays, NUMBER for what a program
        fixes; None for any number of arrays, and static values by any keyword.
      out: as for `callgate.gate`; also all that follow.
      like: a JAX function with the same meaning.
      effect: "pure", "io" or "ordered".
      aliases: results that share an operand's memory.
      vmap: "each" (a launch for each lane), "whole", "broadcast", "grid" (one launch, with the
        lanes along the grid's z axis) or a rule.
      sharding: which dimensions may stay split over devices.
      linear: positions of the arguments in which it is linear.
      gradient: "finite-difference" or None.
      arch: what to compile for where the process has no device: "sm_90", 90, or several.
    """
    self._arch = parse_arch(f"kernel '{name}'", arch)
    super().__init__(
      name,
      signature,
      out=out,
      like=like,
      effect=effect,
      aliases=aliases,
      vmap=vmap,
      sharding=sharding,
      linear=linear,
      gradient=gradient,
    )
    self.cuda = self

  # -- what subclasses say -----------------------------------------------------------------------
  def plan(self, call: CudaCall) -> Plan:
    raise NotImplementedError

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    del key, capabilities
    return None

  def arch(self) -> tuple[int, ...]:
    return self._arch

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    self._refuse_traced(args, kwargs)
    return super()._arguments(args, kwargs)

  def _refuse_traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A parameter by value is fixed when the program is traced."""
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

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in site.results]
    refuse_packed(self.label, structs, results)
    if self.signature is not None:
      check_types(self, self.signature, site, structs, results)

  # -- the CPU, which it has no code for ---------------------------------------------------------
  def compile(self, types: CallTypes) -> tuple[str, Function]:
    del types
    raise self._no_cpu()

  def emission(
    self, site: CallSite, avals_in: Sequence[Any], avals_out: Sequence[Any], levels: Any
  ) -> Any:
    del site, avals_in, avals_out, levels
    raise self._no_cpu()

  def on_host(self, out: Any, /, *args: Any, **static: Any) -> None:
    del out, args, static
    raise self._no_cpu()

  def define_variant(self, key: str) -> bool:
    return super().define_variant(key) if key.startswith("cuda:") else False

  def _no_cpu(self) -> GateDefinitionError:
    return GateDefinitionError(
      f"{self.label}: expected a program for platform cuda, which is all that the kernel has code "
      "for; got one for platform cpu. callgate.cpp(source, cuda_source=...) makes kernels for "
      "both, and jax.lax.platform_dependent chooses between functions"
    )
