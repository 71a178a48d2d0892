"""CUDA source as the CUDA part of a kernel: its signature, its variants and its launches.

`callgate.cuda` makes kernels of nothing else; `callgate.cpp(..., cuda_source=)` gives one to a
kernel in C++.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from callgate._build import nvrtc
from callgate._build.nvrtc import Image
from callgate._core import static_values
from callgate._core.errors import GateDefinitionError
from callgate._core.signatures import accepted
from callgate._kernel import launch as _launch
from callgate._kernel.cuda import source as _source
from callgate._kernel.cuda.source import CudaFunction, CudaParameter
from callgate._kernel.launch import Address, Launch, Plan
from callgate._kernel.launch import Parameter as Argument
from callgate._kernel.options import LaunchOptions
from callgate._kernel.parameters import Kind, Parameter
from callgate._kernel.program import CudaCall, CudaPart
from callgate._kernel.source import TemplateParameter, deduced


@dataclasses.dataclass(frozen=True)
class BuildOptions:
  """How a source is compiled.

  Attributes:
    options: for NVRTC.
    include_dirs: folders of headers.
    arch: compute capabilities, where the process has no device.
  """

  options: tuple[str, ...] = ()
  include_dirs: tuple[str, ...] = ()
  arch: tuple[int, ...] = ()


class SourcePart(CudaPart):
  """A kernel in CUDA C++; tracing and lowering threads use it at once.

  Attributes:
    label: for messages.
    source, kernel, aliases: as given.
    function: what was read of it.
    launching, building: the options.
  """

  def __init__(
    self,
    label: str,
    source: str,
    kernel: str | None,
    launching: LaunchOptions,
    building: BuildOptions,
    aliases: Mapping[int, int],
  ) -> None:
    self.label = label
    self.source = source
    self.kernel = kernel
    self.aliases = dict(aliases)
    self.launching = launching
    self.building = building
    function = _source.find(label, source, kernel)
    self.function = _with_roles(label, function, aliases, launching.scratch or {})
    self._built: dict[tuple[str, int], nvrtc.Built] = {}
    self._lock = threading.Lock()
    self._check_constant()

  def _check_constant(self) -> None:
    """What is no function of the call can be checked at once."""
    given = self.launching
    if not any(map(callable, (given.grid, given.block, given.shared, given.cluster))):
      _launch.checked(self.label, given.grid, given.block, given.shared, given.cluster)

  def arch(self) -> tuple[int, ...]:
    return self.building.arch

  # -- the signature -----------------------------------------------------------------------------
  def signature(self) -> list[Parameter]:
    """What a call gives and gets, in the order of the source."""
    kinds = {"in": Kind.IN, "out": Kind.OUT, "inout": Kind.INOUT, "number": Kind.NUMBER}
    parameters: list[Parameter] = []
    for p in self.function.parameters:
      if p.role == "scratch":
        continue
      dtype = self._dtype(p.element)
      rank = int(p.rank) if p.rank.isdigit() else -1
      if p.role == "number":
        self._check_number(p, dtype)
        rank = 0
      parameters.append(Parameter(p.name, kinds[p.role], dtype, rank))
    return parameters

  def _check_number(self, parameter: CudaParameter, dtype: Any) -> None:
    if dtype is None and not self._is_template(parameter.element):
      raise GateDefinitionError(
        f"{self.label}: parameter '{parameter.name}': expected a pointer, a view (cg::In<float, "
        f"1>) or a number by value, got the type '{parameter.element}'"
      )

  def _dtype(self, element: str) -> np.dtype[Any] | None:
    return _source.element_dtype(self.function.bound.get(element, element))

  def _is_template(self, name: str) -> bool:
    return any(p.name == name for p in self.function.template)

  # -- variants ----------------------------------------------------------------------------------
  def expression(self, call: CudaCall) -> str:
    """The function for a call, as C++ names it: "scale<float, 4>"."""
    function = self.function
    if not function.template:
      return function.qualified
    arguments: list[str] = []
    for parameter in function.template:
      value = function.bound.get(parameter.name) or self._given(parameter.name, call.static)
      value = value or self._deduced(parameter, call)
      if value:
        arguments.append(value)
      elif parameter.default:
        break  # and so have those that follow
      else:
        kind = "typename" if parameter.is_type else "int"
        raise GateDefinitionError(
          f"{self.label}: expected the template parameter '{kind} {parameter.name}' by keyword "
          f"({parameter.name}=...) or in the kernel's name ({function.name}<...>), since it is no "
          "array's element type or rank"
        )
    return f"{function.qualified}<{', '.join(arguments)}>"

  def _given(self, name: str, static: Mapping[str, Any]) -> str:
    if name not in static:
      return ""
    value = static[name]
    if isinstance(value, (bool, int, np.integer)) or str(value).lstrip("-").isdigit():
      return str(int(value))
    try:
      return self._type(name, _source.dtype_by_name(value))
    except TypeError:
      raise GateDefinitionError(
        f"{self.label}: template parameter '{name}': expected a dtype or an integer, got {value!r}"
      ) from None

  def _deduced(self, parameter: TemplateParameter, call: CudaCall) -> str:
    arrays = ((p, array.dtype, len(array.shape)) for p, array in self._arrays(call))
    found = deduced(parameter, arrays)
    if found is None:
      return ""
    return str(found) if isinstance(found, int) else self._type(parameter.name, found)

  def _type(self, name: str, dtype: Any) -> str:
    known = _source.cuda_type(dtype)
    if not known:
      raise GateDefinitionError(
        f"{self.label}: template parameter '{name}': CUDA has no type for {dtype}"
      )
    return known

  def _arrays(self, call: CudaCall) -> Iterator[tuple[CudaParameter, Any]]:
    """Parameters that are arrays, with theirs; an operand and a result in one count as both."""
    for roles, arrays in ((("in", "inout"), call.operands), (("out", "inout"), call.results)):
      side = [p for p in self.function.parameters if p.role in roles]
      if len(side) != len(arrays):
        what = "operands" if "in" in roles else "results"
        raise GateDefinitionError(
          f"{self.label}: expected {len(side)} {what} ({', '.join(p.name for p in side)}), as the "
          f"CUDA source has them, got {len(arrays)}"
        )
      yield from zip(side, arrays, strict=True)

  def built(self, expression: str, capability: int) -> nvrtc.Built:
    """The image of one variant, compiled at its first use."""
    with self._lock:
      known = self._built.get((expression, capability))
    if known is None:
      known = nvrtc.build(
        self.label,
        self.function.name,
        self.source,
        expression,
        capability,
        options=self.building.options,
        include_dirs=self.building.include_dirs,
      )
      with self._lock:
        self._built[expression, capability] = known
    return known

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    return tuple(self.built(key, each).image for each in capabilities or (0,))

  # -- launches ----------------------------------------------------------------------------------
  def plan(self, call: CudaCall) -> Plan:
    for _ in self._arrays(call):  # raises where there are more or fewer
      pass
    expression = self.expression(call)
    values = {
      name: self._evaluated(name, getattr(self.launching, name), call)
      for name in ("grid", "block", "shared", "cluster")
    }
    grid, block, shared, cluster = _launch.checked(self.label, **values)
    if call.batch is not None:
      if grid[2] != 1:
        raise GateDefinitionError(
          f"{self.label}: vmap='grid': expected a grid whose z is 1, since the lanes are along it; "
          f"got {grid}"
        )
      grid = (grid[0], grid[1], call.batch)
    if call.results and all(0 in r.shape for r in call.results):  # nothing to write
      grid = (0, grid[1], grid[2])
    builds = [self.built(expression, each) for each in call.capabilities or (0,)]
    scratch = self._scratch(call)
    launch = Launch(
      builds[0].entry, grid, block, tuple(self._parameters(call, list(scratch))), shared, cluster
    )
    return Plan(
      expression,
      tuple(b.image for b in builds),
      (launch,),
      scratch=tuple(size * (call.batch or 1) for size in scratch.values()),
      zeroed=tuple(self.launching.zeroed),
    )

  def _evaluated(self, option: str, value: Any, call: CudaCall) -> Any:
    """An option's value for a call: functions get the operands, and the static values they name."""
    if not callable(value):
      return value
    return value(*call.operands, **accepted(value, call.static, filled=len(call.operands)))

  def _scratch(self, call: CudaCall) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, value in (self.launching.scratch or {}).items():
      size = self._evaluated("scratch", value, call)
      if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 0:
        raise GateDefinitionError(
          f"{self.label}: scratch: '{name}': expected a number of bytes, got {size!r}"
        )
      sizes[name] = int(size)
    return sizes

  def _parameters(self, call: CudaCall, scratch: Sequence[str]) -> Iterator[Argument]:
    operands, results = iter(enumerate(call.operands)), iter(enumerate(call.results))
    for p in self.function.parameters:
      if p.role == "number":
        yield self._number(p, call)
      elif p.role == "scratch":
        yield Argument.pointer("scratch", scratch.index(p.name))
      elif p.role == "in":
        index, array = next(operands)
        yield _array(p, array, Address(0, "operand", index))
      else:
        if p.role == "inout":
          next(operands)
        index, array = next(results)
        yield _array(p, array, Address(0, "result", index))

  def _number(self, parameter: CudaParameter, call: CudaCall) -> Argument:
    if parameter.name not in call.static:
      raise GateDefinitionError(
        f"{self.label}: parameter '{parameter.name}', a number by value: expected a static value "
        f"of that name, got {', '.join(call.static) or 'none'}; declare it as a pointer for an "
        "array"
      )
    element = parameter.element
    dtype = self._dtype(element)
    if dtype is None:  # of a template: that of an array with the same element type
      dtype = next((a.dtype for p, a in self._arrays(call) if p.element == element), None)
    if dtype is None and element in call.static:
      dtype = _source.dtype_by_name(call.static[element])
    if dtype is None:
      raise GateDefinitionError(
        f"{self.label}: parameter '{parameter.name}': expected to know the type '{element}' from "
        "an array or a keyword"
      )
    value = call.static[parameter.name]
    frozen = static_values.number(self.label, parameter.name, value, dtype, what="argument")
    return Argument.scalar(frozen.value, dtype)


def _array(parameter: CudaParameter, array: Any, address: Address) -> Argument:
  """A pointer, or a view: the pointer and the extents (include/callgate/kernel_device.h)."""
  extents = array.shape if parameter.is_view else ()
  return Argument(bytes(8) + struct.pack(f"<{len(extents)}q", *extents), (address,))


def _with_roles(
  label: str, function: CudaFunction, aliases: Mapping[int, int], scratch: Mapping[str, Any]
) -> CudaFunction:
  """What pointers to non-const elements are: results, operands in place, or scratch memory."""
  parameters: list[CudaParameter] = []
  operands = results = 0
  for p in function.parameters:
    if p.name in scratch:
      if p.role != "out" or p.is_view:
        raise GateDefinitionError(f"{label}: scratch: expected '{p.name}' to be a pointer `T*`")
      p = dataclasses.replace(p, role="scratch")
    elif p.role == "out" and not p.is_view and aliases.get(operands) == results:
      p = dataclasses.replace(p, role="inout")
    operands += p.role in ("in", "inout")
    results += p.role in ("out", "inout")
    parameters.append(p)
  unknown = [name for name in scratch if name not in {p.name for p in parameters}]
  if unknown:
    raise GateDefinitionError(
      f"{label}: scratch: expected names of the kernel's parameters, got '{unknown[0]}'"
    )
  return dataclasses.replace(function, parameters=tuple(parameters))


def build_options(
  options: Sequence[str], include_dirs: Sequence[str | os.PathLike[str]], arch: tuple[int, ...]
) -> BuildOptions:
  """The options as they are kept: folders by their absolute paths."""
  return BuildOptions(tuple(options), tuple(os.path.abspath(d) for d in include_dirs), arch)


def saved(part: SourcePart) -> dict[str, Any]:
  """A part as files hold it: for programs, which hold the launches."""
  return {
    "source": part.source,
    "function": part.kernel,
    "options": part.building.options,
    "include_dirs": part.building.include_dirs,
    "arch": part.building.arch,
    "aliases": sorted(part.aliases.items()),
  }


def restored(label: str, form: Mapping[str, Any]) -> SourcePart:
  """The part that `saved` was given, but for its launches."""
  building = build_options(form["options"], form["include_dirs"], tuple(form["arch"]))
  aliases = {int(operand): int(result) for operand, result in form["aliases"]}
  launching = LaunchOptions(grid=1, block=1)
  return SourcePart(label, form["source"], form["function"], launching, building, aliases)
