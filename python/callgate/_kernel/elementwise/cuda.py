"""The CUDA part of `callgate.elementwise`: the same code of an element, gone through by threads.

The source is a function that knows no device (`source.body`) and loops around it
(include/callgate/elementwise_device.h). A variant is compiled for how operands lie along the
result's elements; extents and strides are passed by the launch. Runs on lowering threads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callgate._build import cache, nvrtc, toolchain
from callgate._build.files import checksum
from callgate._core.errors import CompileError
from callgate._kernel import launch as _launch
from callgate._kernel.elementwise.layout import Layout, collapsed, layout_of
from callgate._kernel.elementwise.params import Bindings, Param
from callgate._kernel.elementwise.source import Code, body, has_complex, value_type
from callgate._kernel.launch import Address, Image, Launch, Parameter, Plan
from callgate._kernel.program import CudaCall, CudaPart
from callgate._kernel.source import cpp_type

_THREADS = 256
_BLOCKS = 1 << 14  # more elements than these have threads are gone through in strides of the grid
_HEADERS = ("elementwise_device.h", "elementwise_body.h", "complex_device.h", "small_floats.h")
# Without it a function of the user's preamble would be the host's.
_OPTIONS = ("--std=c++20", "-default-device")


@dataclasses.dataclass(frozen=True)
class CudaOptions:
  """How an elementwise kernel is compiled for CUDA.

  Attributes:
    options: for NVRTC, after callgate's own.
    arch: compute capabilities, where the process has no device.
  """

  options: tuple[str, ...] = ()
  arch: tuple[int, ...] = ()


def entry_of(name: str) -> str:
  """The function of a kernel, as profilers show it."""
  return f"callgate_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


# -- the source ----------------------------------------------------------------------------------
def device_type(dtype: np.dtype[Any]) -> str:
  """The type of a dtype's elements on the device."""
  return _on_device(cpp_type(dtype))


def _on_device(text: str) -> str:
  return text.replace("std::complex<", "callgate::elementwise::complex<").replace(
    "cg::", "callgate::small::"
  )


def cuda_unit(what: str, entry: str, code: Code, bindings: Bindings, layout: Layout) -> str:
  """A whole source for CUDA.

  Args:
    what: the kernel, for the compiler's messages.
    entry: the function's name.
    code: the user's.
    bindings: what the letters stand for.
    layout: of the call.
  """
  # CUDA has functions of these names that treat NaN otherwise.
  text = body(what, code, bindings).replace(
    "  using namespace callgate::elementwise;\n",
    "  using namespace callgate::elementwise;\n"
    "  using callgate::elementwise::max;\n"
    "  using callgate::elementwise::min;\n",
    1,
  )
  if has_complex(code, bindings):
    text = _on_device(text)
  return (
    f"// {_header_digest()}\n"
    '#include "callgate/elementwise_device.h"\n\n'
    f"{text}\nnamespace {{\n{_elements(code, bindings, layout)}}}  // namespace\n\n"
    f"{_kernel(entry, code, bindings, layout)}"
  )


@functools.cache
def _header_digest() -> str:
  """Of the headers, which the source is cached by."""
  folder = toolchain.include_dir() / "callgate"
  return cache.digest([checksum(folder / name) for name in _HEADERS])


def _strided(code: Code, layout: Layout) -> list[Param]:
  return [p for p, k in zip(code.mapped, layout.kinds, strict=True) if k == "s"]


def _elements(code: Code, bindings: Bindings, layout: Layout) -> str:
  """The struct that goes through a thread's elements."""
  fields = ["int64_t _size;"]
  fields += [f"const {device_type(p.dtype(bindings))}* {p.name};" for p in code.mapped]
  fields += [f"{device_type(p.dtype(bindings))}* {p.name};" for p in code.outputs]
  strided = _strided(code, layout)
  if strided:
    fields.append(f"const callgate::elementwise::Strides<{layout.axes}, {len(strided)}>& _strides;")
  ones = [
    f"const auto _one_{p.name} = static_cast<{_value(p, bindings)}>({p.name}[0]);"
    for p, kind in zip(code.mapped, layout.kinds, strict=True)
    if kind == "o"
  ]
  lines = [
    "const int64_t _first = callgate::elementwise::first_of_thread();",
    "const int64_t _step = callgate::elementwise::threads();",
    *ones,
    *(_packs(code, bindings, layout) if layout.vector > 1 else ["const int64_t _done = 0;"]),
    *_singles(code, bindings, layout),
  ]
  inner = "".join(f"    {line}\n" for line in lines)
  return (
    "struct Elements {\n"
    + "".join(f"  {field}\n" for field in fields)
    + "  template <class Each>\n"
    "  __device__ __forceinline__ void operator()(const Each& _each) const {\n"
    f"{inner}"
    "  }\n"
    "};\n"
  )


def _packs(code: Code, bindings: Bindings, layout: Layout) -> list[str]:
  """The loop over several neighbours at once."""
  count = layout.vector
  loads: list[str] = []
  arguments = [f"_pack * {count} + _k"]
  for param, kind in zip(code.mapped, layout.kinds, strict=True):
    if kind == "o":
      arguments.append(f"_one_{param.name}")
      continue
    pack = f"callgate::elementwise::Pack<{device_type(param.dtype(bindings))}, {count}>"
    loads.append(
      f"const {pack} _in_{param.name} = reinterpret_cast<const {pack}*>({param.name})[_pack];"
    )
    arguments.append(f"static_cast<{_value(param, bindings)}>(_in_{param.name}.values[_k])")
  stores: list[str] = []
  before: list[str] = []
  after: list[str] = []
  for param in code.outputs:
    stored = device_type(param.dtype(bindings))
    pack = f"callgate::elementwise::Pack<{stored}, {count}>"
    loads.append(f"{pack} _out_{param.name};")
    before.append(f"{_value(param, bindings)} _new_{param.name}{{}};")
    arguments.append(f"_new_{param.name}")
    after.append(f"_out_{param.name}.values[_k] = static_cast<{stored}>(_new_{param.name});")
    stores.append(f"reinterpret_cast<{pack}*>({param.name})[_pack] = _out_{param.name};")
  inner = [*before, f"_each({', '.join(arguments)});", *after]
  return [
    f"const int64_t _packs = _size / {count}, _done = _packs * {count};",
    "for (int64_t _pack = _first; _pack < _packs; _pack += _step) {",
    *(f"  {line}" for line in loads),
    "#pragma unroll",
    f"  for (int _k = 0; _k < {count}; ++_k) {{",
    *(f"    {line}" for line in inner),
    "  }",
    *(f"  {line}" for line in stores),
    "}",
  ]


def _singles(code: Code, bindings: Bindings, layout: Layout) -> list[str]:
  """The loop over elements one by one: the tail of the packs, or all."""
  arguments = ["_i"]
  before: list[str] = []
  strided = _strided(code, layout)
  if strided:
    whole = "uint64_t" if layout.wide else "uint32_t"
    before.append(f"int64_t _offsets[{len(strided)}];")
    before.append(f"_strides.template place<{whole}>(_i, _offsets);")
  for param, kind in zip(code.mapped, layout.kinds, strict=True):
    place = f"_offsets[{strided.index(param)}]" if kind == "s" else "_i"
    arguments.append(
      f"_one_{param.name}"
      if kind == "o"
      else f"static_cast<{_value(param, bindings)}>({param.name}[{place}])"
    )
  after: list[str] = []
  for param in code.outputs:
    before.append(f"{_value(param, bindings)} _new_{param.name}{{}};")
    arguments.append(f"_new_{param.name}")
    stored = device_type(param.dtype(bindings))
    after.append(f"{param.name}[_i] = static_cast<{stored}>(_new_{param.name});")
  return [
    "for (int64_t _i = _done + _first; _i < _size; _i += _step) {",
    *(f"  {line}" for line in (*before, f"_each({', '.join(arguments)});", *after)),
    "}",
  ]


def _value(param: Param, bindings: Bindings) -> str:
  return _on_device(value_type(param.dtype(bindings)))


def _kernel(entry: str, code: Code, bindings: Bindings, layout: Layout) -> str:
  """The function that a launch runs."""
  strided = _strided(code, layout)
  raws = [p for p in code.inputs if p.raw]
  params = ["int64_t _size"]
  params += [f"const {device_type(p.dtype(bindings))}* {p.name}" for p in code.mapped]
  params += [f"{device_type(p.dtype(bindings))}* {p.name}" for p in code.outputs]
  if strided:
    params.append(f"callgate::elementwise::Strides<{layout.axes}, {len(strided)}> _strides")
  for param, rank in zip(raws, layout.ranks, strict=True):
    stored = device_type(param.dtype(bindings))
    params.append(
      f"callgate::elementwise::Raw<{stored}, {_value(param, bindings)}, {rank}> {param.name}"
    )
  fields = ["_size", *(p.name for p in (*code.mapped, *code.outputs))]
  fields += ["_strides"] if strided else []
  passed = "".join(f", {p.name}" for p in raws)
  return (
    f"__global__ void __launch_bounds__({_THREADS}) {entry}(\n    "
    + ",\n    ".join(params)
    + f") {{\n  callgate_body(Elements{{{', '.join(fields)}}}, _size{passed});\n}}\n"
  )


# -- launches ------------------------------------------------------------------------------------
def parameters_of(
  code: Code, layout: Layout, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Parameter, ...]:
  """What a launch passes: see `_kernel`."""
  size = math.prod(results[0].shape)
  indices = {p.name: i for i, p in enumerate(code.inputs)}
  found = [Parameter.scalar(size, np.int64)]
  found += [Parameter.pointer("operand", indices[p.name]) for p in code.mapped]
  found += [Parameter.pointer("result", i) for i in range(len(code.outputs))]
  shapes = [operands[indices[p.name]].shape for p in _strided(code, layout)]
  axes = collapsed(shapes, results)
  if axes:
    numbers = [extent for extent, _ in axes]
    numbers += [step for _, strides in axes for step in strides]
    found.append(Parameter(struct.pack(f"<{len(numbers)}q", *numbers)))
  for param in code.inputs:
    if param.raw:
      index = indices[param.name]
      extents = tuple(operands[index].shape) or (1,)
      data = bytes(8) + struct.pack(f"<{len(extents)}q", *extents)
      found.append(Parameter(data, (Address(0, "operand", index),)))
  return tuple(found)


class ElementwisePart(CudaPart):
  """What runs an elementwise kernel on CUDA devices; tracing and lowering threads use it at once.

  Attributes:
    options: of the compilation.
  """

  def __init__(self, kernel: Any, options: CudaOptions) -> None:
    self._kernel = weakref.ref(kernel)  # which holds this
    self.options = options

  def arch(self) -> tuple[int, ...]:
    return self.options.arch

  def plan(self, call: CudaCall) -> Plan:
    kernel = self._kernel()
    assert kernel is not None  # whose call this is
    code: Code = kernel.user_code
    bound: Mapping[str, Any] = kernel.bindings(call.operands, call.static)
    layout = layout_of(
      code, [x.shape for x in call.operands], [x.dtype for x in call.operands], call.results
    )
    letters = ",".join(f"{name}={bound[name].name}" for name in code.letters)
    key = f"{letters}:{layout.text}"
    built = [self._build(kernel, key, capability) for capability in call.capabilities or (0,)]
    taken = -(-math.prod(call.results[0].shape) // layout.vector)
    blocks = min(-(-taken // _THREADS), _BLOCKS)
    grid, block, _, _ = _launch.checked(kernel.label, blocks, _THREADS)
    parameters = parameters_of(code, layout, call.operands, call.results)
    launch = Launch(built[0].entry, grid, block, parameters)
    return Plan(key, tuple(Image.of(each) for each in built), (launch,))

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    kernel = self._kernel()
    assert kernel is not None
    letters, _, layout = key.partition(":")
    names = tuple(part.partition("=")[0] for part in letters.split(",") if part)
    kinds = layout.partition(":")[0]
    if names != kernel.user_code.letters or len(kinds) != len(kernel.user_code.mapped):
      return None
    return tuple(Image.of(self._build(kernel, key, each)) for each in capabilities or (0,))

  def source(self, kernel: Any, key: str) -> str:
    """The CUDA C++ of a variant."""
    layout = Layout.parse(key.partition(":")[2])
    return cuda_unit(
      kernel.label, entry_of(kernel.name), kernel.user_code, kernel.bound_of(key), layout
    )

  def _build(self, kernel: Any, key: str, capability: int) -> nvrtc.Built:
    try:
      return nvrtc.build(
        kernel.label,
        f"{kernel.name}.cu",
        self.source(kernel, key),
        entry_of(kernel.name),
        capability,
        options=(*_OPTIONS, *self.options.options),
        include_dirs=kernel.build_options["include_dirs"],
      )
    except CompileError as error:
      raise kernel.explained(error) from None
