# SPDX-License-Identifier: Apache-2.0
"""The CUDA part of `callgate.elementwise`: the same code for an element, in the device's threads.

The loops are in include/callgate/elementwise_device.h. A variant is compiled for the layout of the
operands relative to the result. The launch passes extents and strides.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from callgate._build import nvrtc, toolchain
from callgate._build.nvrtc import CompiledImage
from callgate._kernel.elementwise.source import BoundCode, Code, body, element, lines
from callgate._kernel.launch import CudaCall, CudaPart, Launch, LaunchParameter, LaunchPlan

_THREADS = 256
_VECTOR = 16  # bytes of one load or store of a thread
_BLOCKS = 1 << 14  # larger arrays are processed in strides of the grid
_HEADERS = ("elementwise_device.h", "elementwise_body.h", "complex_device.h", "small_floats.h")
# Without this option a function in the user's preamble would be a host function.
_OPTIONS = ("--std=c++20", "-default-device")


def entry_of(name: str) -> str:
  """Returns the kernel's function name, for profilers."""
  return f"callgate_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


# -- the source ----------------------------------------------------------------------------------
def _on_device(text: str) -> str:
  spelled = text.replace("std::complex<", "callgate::elementwise::complex<")
  return spelled.replace("cg::", "callgate::small::")


def cuda_unit(what: str, entry: str, bound: BoundCode, layout: Layout) -> str:
  """Returns a complete CUDA source; `entry` is the function's name, `what` the kernel's."""
  code, in_library = bound.code, "callgate::elementwise::"
  # CUDA has functions of these names that handle NaN differently.
  using = "  using namespace callgate::elementwise;\n"
  own = "".join(f"  using callgate::elementwise::{name};\n" for name in ("max", "min"))
  text = body(what, bound).replace(using, using + own, 1)
  if bound.has_complex:
    text = _on_device(text)  # including the user's part
  single = [p for p, kind in zip(code.mapped, layout.kinds, strict=True) if kind == "o"]
  ones = (f"const auto _one_{p.name} = static_cast<{bound.value(p)}>({p.name}[0]);" for p in single)
  fields = [
    "int64_t _size",
    *bound.pointers,
  ]  # the fields of the struct, and the kernel's parameters
  names = ["_size", *(p.name for p in (*code.mapped, *code.outputs))]
  params = list(fields)
  if strided := layout.kinds.count("s"):
    strides = f"{in_library}Strides<{layout.axes}, {strided}>"
    fields.append(f"const {strides}& _strides")
    params.append(f"{strides} _strides")
    names.append("_strides")
  raws = [p for p in code.inputs if p.raw]
  params += [
    f"{in_library}Raw<{bound.stored(p)}, {bound.value(p)}, {rank}> {p.name}"
    for p, rank in zip(raws, layout.ranks, strict=True)
  ]
  # The digest becomes part of the compiled source's key.
  return f"""// {toolchain.headers_digest(*_HEADERS)}
#include "callgate/elementwise_device.h"

{text}
namespace {{
struct Elements {{  // those of a thread, to go through
{lines(2, (f"{field};" for field in fields))}
  template <class Each>
  __device__ __forceinline__ void operator()(const Each& _each) const {{
    const int64_t _first = callgate::elementwise::first_of_thread();
    const int64_t _step = callgate::elementwise::threads();
{lines(4, ones)}
{_packs(bound, layout) if layout.vector > 1 else "    const int64_t _done = 0;"}
{_singles(bound, layout)}
  }}
}};
}}  // namespace

__global__ void __launch_bounds__({_THREADS}) {entry}(
    {", ".join(params)}) {{
  callgate_body(Elements{{{", ".join(names)}}}, _size{"".join(f", {p.name}" for p in raws)});
}}
"""


def _packs(bound: BoundCode, layout: Layout) -> str:
  """Returns the loop over several neighbors at once."""
  count, loads, stores = layout.vector, list[str](), list[str]()
  arguments = [f"_pack * {count} + _k"]
  for p, kind in zip(bound.code.mapped, layout.kinds, strict=True):
    if kind == "o":
      arguments.append(f"_one_{p.name}")
    else:
      pack = f"callgate::elementwise::Pack<{bound.stored(p)}, {count}>"
      loads.append(f"const {pack} _in_{p.name} = reinterpret_cast<const {pack}*>({p.name})[_pack];")
      arguments.append(f"static_cast<{bound.value(p)}>(_in_{p.name}.values[_k])")
  for p in bound.code.outputs:
    pack = f"callgate::elementwise::Pack<{bound.stored(p)}, {count}>"
    loads.append(f"{pack} _out_{p.name};")
    stores.append(f"reinterpret_cast<{pack}*>({p.name})[_pack] = _out_{p.name};")
  return f"""    const int64_t _packs = _size / {count}, _done = _packs * {count};
    for (int64_t _pack = _first; _pack < _packs; _pack += _step) {{
{lines(6, loads)}
#pragma unroll
      for (int _k = 0; _k < {count}; ++_k) {{
{lines(8, element(bound, arguments, "_out_{}.values[_k]"))}
      }}
{lines(6, stores)}
    }}"""


def _singles(bound: BoundCode, layout: Layout) -> str:
  """Returns the loop over single elements: the rest after the packs, or all."""
  arguments, strided = ["_i"], 0
  for p, kind in zip(bound.code.mapped, layout.kinds, strict=True):
    place = f"_offsets[{strided}]" if kind == "s" else "_i"
    strided += kind == "s"
    loaded = f"static_cast<{bound.value(p)}>({p.name}[{place}])"
    arguments.append(f"_one_{p.name}" if kind == "o" else loaded)
  whole = "uint64_t" if layout.wide else "uint32_t"
  offsets = (f"int64_t _offsets[{strided}];", f"_strides.template place<{whole}>(_i, _offsets);")
  inner = [*(offsets if strided else ()), *element(bound, arguments, "{}[_i]")]
  return f"""    for (int64_t _i = _done + _first; _i < _size; _i += _step) {{
{lines(6, inner)}
    }}"""


# -- layouts of arrays ----------------------------------------------------------------------------
class Layout(NamedTuple):
  """The layout of a call's arrays, as far as a variant depends on it."""

  # For each argument that is not raw: "f" for the result's elements, "o" for one element, "s" for
  # broadcast.
  kinds: str
  axes: int  # the number of axes of kind "s", after joining neighbors; 0 for none
  vector: int  # elements that a thread processes at once
  wide: bool  # True if the number of elements needs more than 32 bits
  ranks: tuple[int, ...]  # the ranks of the raw arguments

  @property
  def text(self) -> str:
    """Returns its text in a variant's key."""
    start = f"{self.kinds}:{self.axes}:{self.vector}:{int(self.wide)}:"
    return start + ",".join(map(str, self.ranks))

  @staticmethod
  def parse(text: str) -> Layout:
    kinds, axes, vector, wide, ranks = text.split(":")
    numbers = tuple(map(int, filter(None, ranks.split(","))))
    return Layout(kinds, int(axes), int(vector), wide == "1", numbers)


def layout_of(code: Code, operands: Sequence[Any], results: Sequence[Any]) -> Layout:
  """Returns the layout of a call, by the types of all its arguments, including raw ones."""
  size = math.prod(results[0].shape)
  mapped = [x for p, x in zip(code.inputs, operands, strict=True) if not p.raw]
  own = [math.prod(x.shape) for x in mapped]
  kinds = "".join("f" if each == size else "o" if each == 1 else "s" for each in own)
  full = [x for x, kind in zip(mapped, kinds, strict=True) if kind == "f"]
  items = [np.dtype(x.dtype).itemsize for x in (*full, *results)]
  vector = 1 if "s" in kinds else max(1, _VECTOR // max(items))
  # Lanes in a loop of the runtime begin at multiples of their size. Other arrays are whole buffers,
  # which are aligned.
  if code.knows_place and any(size * item % (vector * item) for item in items):
    vector = 1
  strided = [x.shape for x, kind in zip(mapped, kinds, strict=True) if kind == "s"]
  ranks = tuple(len(x.shape) for p, x in zip(code.inputs, operands, strict=True) if p.raw)
  return Layout(kinds, len(collapsed(strided, results)), vector, size >= 2**31, ranks)


def collapsed(
  shapes: Sequence[Sequence[int]], results: Sequence[Any]
) -> list[tuple[int, list[int]]]:
  """Returns the result's axes, innermost first, with operands' strides, neighbors joined."""
  axes: list[tuple[int, list[int]]] = []
  steps = [1] * len(shapes)
  for back, extent in enumerate(reversed(results[0].shape if shapes else ()), 1):
    strides = [0] * len(shapes)
    for k, shape in enumerate(shapes):
      if len(shape) >= back and shape[-back] != 1:
        strides[k] = steps[k]
        steps[k] *= shape[-back]
    if extent == 1:
      continue
    if axes and strides == [s * axes[-1][0] for s in axes[-1][1]]:
      axes[-1] = (axes[-1][0] * extent, axes[-1][1])
    else:
      axes.append((extent, strides))
  return axes


# -- launches ------------------------------------------------------------------------------------
def _parameters(
  code: Code, layout: Layout, operands: Sequence[Any], results: Sequence[Any]
) -> Iterator[LaunchParameter]:
  """Yields the parameters of a launch, see `cuda_unit`."""
  indices = {p.name: i for i, p in enumerate(code.inputs)}
  yield LaunchParameter.scalar(math.prod(results[0].shape), np.int64)
  yield from (LaunchParameter.pointer("operand", indices[p.name]) for p in code.mapped)
  yield from (LaunchParameter.pointer("result", i) for i in range(len(code.outputs)))
  kinds = zip(code.mapped, layout.kinds, strict=True)
  if axes := collapsed([operands[indices[p.name]].shape for p, k in kinds if k == "s"], results):
    numbers = [extent for extent, _ in axes] + [step for _, strides in axes for step in strides]
    yield LaunchParameter(np.array(numbers, "<i8").tobytes())
  for index, param in enumerate(code.inputs):
    if param.raw:
      yield LaunchParameter.pointer("operand", index, operands[index].shape or (1,))


class ElementwisePart(CudaPart):
  """Runs an elementwise kernel on CUDA devices; several threads use it at once."""

  def __init__(self, kernel: Any, options: Sequence[str], arch: tuple[int, ...]) -> None:
    self._kernel = weakref.proxy(
      kernel
    )  # the kernel keeps this object, and callers keep the kernel
    self._options, self.arch = (*_OPTIONS, *options), arch  # options of NVRTC

  def plan(self, call: CudaCall) -> LaunchPlan:
    code: Code = self._kernel.user_code
    layout = layout_of(code, call.operands, call.results)
    key = f"{self._kernel.letters_text(call.operands, call.static)}:{layout.text}"
    built = self._built(key, call.capabilities)
    taken = -(-math.prod(call.results[0].shape) // layout.vector)
    blocks = min(-(-taken // _THREADS), _BLOCKS)
    parameters = tuple(_parameters(code, layout, call.operands, call.results))
    launch = Launch(built[0].entry, (blocks, 1, 1), (_THREADS, 1, 1), parameters)
    return LaunchPlan(key, tuple(each.image for each in built), (launch,))

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    if not self._kernel.has_key(key):
      return None
    return tuple(built.image for built in self._built(key, capabilities))

  def _built(self, key: str, capabilities: tuple[int, ...]) -> list[nvrtc.Built]:
    kernel = self._kernel
    entry, layout = entry_of(kernel.name), Layout.parse(key.partition(":")[2])
    source = cuda_unit(kernel.label, entry, kernel.bound(key, _on_device), layout)
    with kernel.explaining():
      return [
        nvrtc.build(
          kernel.label, f"{kernel.name}.cu", source, entry, each,
          options=self._options, include_dirs=kernel.build_options["include_dirs"],
        )
        for each in capabilities or (0,)
      ]  # fmt: skip
