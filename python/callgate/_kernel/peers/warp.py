# SPDX-License-Identifier: Apache-2.0
"""Warp kernels, for the CPU and for CUDA: compiled by Warp, called and launched by callgate.

A call's arguments are computed when it is lowered, for the shapes of its arrays: as a launch plan
for CUDA, and as a block of bytes of the same form for the CPU (src/kernels/packed_kernel.h).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from callgate import _callgate
from callgate._build.nvrtc import CompiledImage
from callgate._call.site import Call, CallSite, Emission
from callgate._core import options as check
from callgate._core import registry, static_values
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._kernel import launch
from callgate._kernel.callee import Types
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.cuda.kernel import evaluated
from callgate._kernel.parameters import OPERANDS, RESULTS, Kind, Parameter, Signature
from callgate._kernel.peers.options import PeerOptions
from callgate._kernel.variants import Function, Static, Variant

# The additional parameter of calls on the CPU; its name is no Python name.
_BLOCK = Parameter("callgate.block", Kind.NUMBERS, np.dtype(np.uint8), 1)


class WarpKernel(CpuKernel, launch.CudaPart):
  """A Warp kernel; see `callgate.kernel`."""

  def __init__(self, name: str, kernel: Any, options: PeerOptions) -> None:
    from callgate._kernel.peers import warp_compile as compiler  # Warp may be missing

    label = f"kernel '{name}'"
    self.function, self._compiler = kernel, compiler
    self._declared = {a.name: a for a in compiler.arguments(label, kernel)}
    self._dim, self.arch = options.dim, options.capabilities(label)
    signature = self._signature(label, options)
    count = len(signature.of(RESULTS))
    self._zeroed = tuple(options.zeroed)
    if any(position >= count for position in self._zeroed):
      check.refuse(label, "zeroed", f"flat positions of the {count} results", options.zeroed)
    super().__init__(name, signature, options)
    self.cuda = self

  def _signature(self, label: str, options: PeerOptions) -> Signature:
    arrays = [name for name, a in self._declared.items() if a.is_array]
    inouts, outputs = options.inouts, options.outputs
    if outputs is None:
      outputs = () if inouts else list(self._declared)[-1:]
    for option, names in (("outputs", outputs), ("inouts", inouts)):
      for each in names:
        if each not in arrays:
          expected = f"names of parameters that are arrays ({', '.join(arrays)})"
          check.refuse(label, option, expected, each)
    if both := sorted({*outputs} & {*inouts}):
      fault = f"expected '{both[0]}' in one of outputs and inouts, got both"
      raise GateDefinitionError(f"{label}: {fault}")
    if options.aliases:
      hint = "use inouts= for parameters that are an operand and a result"
      check.refuse(label, "aliases", f"no aliases ({hint})", options.aliases)

    def kind(name: str) -> Kind:
      return Kind.OUT if name in outputs else Kind.INOUT if name in inouts else Kind.IN

    return Signature(
      Parameter(a.name, kind(a.name), a.dtype, a.rank + len(a.inner)) if a.is_array
      else Parameter(a.name, Kind.NUMBER, a.dtype, 0)
      for a in self._declared.values()
    )  # fmt: skip

  def check_types(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> None:
    super(CpuKernel, self).check_types(site, operands, results)  # without compiling it
    for side, kinds, arrays in (("argument", OPERANDS, operands), ("result", RESULTS, results)):
      for index, (p, array) in enumerate(zip(self.signature.of(kinds), arrays, strict=True)):
        wanted = self._declared[p.name].inner
        if wanted and tuple(array.shape[-len(wanted) :]) != wanted:
          what = registry.of(self.name, site.spec, side, index)
          expected = f"expected {wanted} as its last extents, for Warp's elements"
          raise GateDefinitionError(f"{self.label}: {what}: {expected}, got {array.shape}")

  # -- one call's arguments ----------------------------------------------------------------------
  def _parameters(
    self, call: launch.CudaCall, extents: Sequence[int]
  ) -> list[launch.LaunchParameter]:
    """Returns the launch's extents, and the kernel's arguments, in order."""
    compiler, memory = self._compiler, self.signature.memory
    found = [compiler.bounds(self.function, extents)]
    for p in self.signature:
      if p.kind is Kind.NUMBER:
        found.append(launch.LaunchParameter.scalar(call.static[p.name], p.dtype))
      else:
        declared, shape = self._declared[p.name], call.array(*memory[p.name]).shape
        found.append(compiler.array(self.label, declared, shape[: declared.rank], *memory[p.name]))
    return found

  def _extents(self, call: launch.CudaCall) -> tuple[int, ...]:
    if self._dim is None:
      first = (self.signature.of(OPERANDS) or self.signature.of(RESULTS))[0]
      return (call.operands or call.results)[0].shape[: self._declared[first.name].rank]
    given: Any = evaluated(self.label, "dim", self._dim, call)
    extents = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not 1 <= len(extents) <= 4 or not all(launch.is_int(n) and n >= 0 for n in extents):
      check.refuse(self.label, "dim", "an int of at least 0, or a tuple of up to four", given)
    return tuple(map(int, extents))

  def _block(
    self, call: launch.CudaCall, extents: Sequence[int]
  ) -> tuple[np.ndarray[Any, Any], int, list[Any]]:
    """Returns both structs of a CPU call, the offset of the second, and the places of addresses."""
    bounds, *arguments = self._parameters(call, extents)
    block = bounds.data + bytes(-len(bounds.data) % 16)
    second, addresses = len(block), list[Any]()
    for declared, parameter in zip(self._declared.values(), arguments, strict=True):
      block += bytes(-(len(block) - second) % declared.alignment)
      for address in parameter.addresses:
        addresses.append((len(block) + address.offset, address.of == "result", address.index))
      block += parameter.data
    return np.frombuffer(block, np.uint8), second, addresses

  # -- for the CPU -------------------------------------------------------------------------------
  def compile(self, key: str) -> Function:
    sides = [
      tuple(jax.ShapeDtypeStruct((0,) * p.rank, p.dtype) for p in self.signature.of(side))
      for side in (OPERANDS, RESULTS)
    ]
    static = {p.name: 0 for p in self.signature.of((Kind.NUMBER,))}
    # Offsets don't depend on shapes; an option `dim` may.
    block, second, addresses = self._block(launch.CudaCall(sides[0], sides[1], static), (0,))
    address, loaded = self._compiler.load(self.label, self.function)
    made = _callgate.PackedKernel(
      address, second=second, bytes=len(block), addresses=addresses, zeroed=list(self._zeroed)
    )
    parameters = Signature((*self.signature.of((*OPERANDS, *RESULTS)), _BLOCK))
    return Function(made.address, parameters, (made, loaded), made.user_data)

  def held(
    self, variant: Variant, operands: Sequence[Any], results: Sequence[Any], static: Static,
    form: Callable[..., Any],
  ) -> dict[str, Any]:  # fmt: skip
    sides = [
      tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs) for xs in (operands, results)
    ]
    for shape in (struct.shape for side in sides for struct in side):
      if any(map(is_open, shape)):
        fault = f"the launch depends on shapes: expected known extents, got {shape}"
        raise GateDefinitionError(f"{self.label}: {fault}")
    values = {name: static_values.thaw(value) for name, value in static}
    call = launch.CudaCall(sides[0], sides[1], values)
    return {_BLOCK.name: form(self._block(call, self._extents(call))[0])}

  def emission(self, call: Call) -> Emission:
    made = super().emission(call)
    if call.devices > 1:  # more data for `retile`
      static = {name: static_values.thaw(value) for name, value in call.site.static}
      held = {**made.attributes, "tiles": launch.tiles(self.label, static)}
      made = dataclasses.replace(made, attributes=held)
    return made

  def retile(
    self, held: dict[str, Any], lanes: Sequence[str], operands: Types, results: Types, target: str
  ) -> str:
    if "plan" in held:  # for CUDA
      return super().retile(held, lanes, operands, results, target)
    call = self.tile(self, held, lanes, operands, results)
    held["attributes"] = {_BLOCK.name: self._block(call, self._extents(call))[0]}
    return target

  # -- for CUDA ----------------------------------------------------------------------------------
  def plan(self, call: launch.CudaCall) -> launch.LaunchPlan:
    compiler, extents = self._compiler, self._extents(call)
    parameters = tuple(self._parameters(call, extents))
    built = compiler.compile_for(self.label, self.function, call.capabilities)
    grid, block = compiler.grid(self.function, math.prod(extents))
    for sizes in (b.sizes for b in built if b.sizes is not None):
      if sizes != (have := [len(p.data) for p in parameters]):
        fault = f"expected a kernel by Warp with parameters of {have} bytes, got {sizes}"
        raise GateDefinitionError(
          f"{self.label}: {fault}; callgate doesn't support this version of Warp. "
          "pip install 'callgate[warp]' installs one that it supports"
        )
    launched = launch.Launch(built[0].entry, grid, block, parameters, max(b.shared for b in built))
    images = tuple(b.image for b in built)
    return launch.LaunchPlan(built[0].entry, images, (launched,), zeroed=self._zeroed)

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    built = self._compiler.compile_for(self.label, self.function, capabilities)
    return tuple(b.image for b in built) if built[0].entry == key else None
