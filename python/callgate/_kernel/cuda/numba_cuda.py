"""`callgate.numba_cuda`: kernels of Numba for CUDA, compiled when a call is lowered."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from callgate._build.nvrtc import Image
from callgate._core import extras, factories, registry
from callgate._core.dtypes import dtype_named
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._kernel import launch as _launch
from callgate._kernel.cuda import named as _named
from callgate._kernel.cuda.named import (
  NONE,
  Bound,
  Named,
  NamedKernel,
  evaluated,
  launch_extent,
)
from callgate._kernel.cuda.options import NumbaCudaOptions
from callgate._kernel.launch import Launch, Parameter, Plan
from callgate._kernel.program import CudaCall, ptx_capability


class NumbaCudaKernel(NamedKernel):
  """A kernel of `@numba.cuda.jit`; see `callgate.numba_cuda`.

  Attributes:
    function: what the decorator made.
  """

  def __init__(self, function: Any, options: NumbaCudaOptions) -> None:
    name = options.name
    what = f"kernel '{name}'" if name else "callgate.numba_cuda"
    self._compiler = _compiler(what)
    if not self._compiler.is_dispatcher(function):
      raise GateDefinitionError(
        f"{what}: expected a kernel that @numba.cuda.jit has made, got {function!r}"
      )
    self._compiler.check_options(what, function.targetoptions)
    self.function = function
    self._grid, self._block = options.griddim, options.blockdim
    self._shared = options.sharedmem
    self._compiled: dict[tuple[str, int], tuple[str, Any, Image]] = {}
    named = [
      Named(p.name, False, NONE if p.default is p.empty else p.default)
      for p in inspect.signature(function.py_func).parameters.values()
    ]
    super().__init__(
      name if name is not None else registry.unique_name(function.py_func),
      named,
      options,
    )

  # -- plans -------------------------------------------------------------------------------------
  def plan(self, call: CudaCall) -> Plan:
    bound = self.bound(call)
    key = self._key(call, bound)
    types = self._types(key)
    built = [self._build(key, types, c) for c in call.capabilities or (0,)]
    entry, declared, _ = built[0]
    parameters = self._parameters(call, bound, types)
    have = [len(p.data) for p in parameters]
    if any(have != [d.size for d in other] for _, other, _ in built):
      raise CompileError(
        f"{self.label}: expected that Numba makes a kernel with parameters of {have} bytes, got "
        f"{[d.size for d in declared]}; this version of numba-cuda is unknown to callgate",
        "",
      )
    grid = launch_extent(self.label, "griddim", self._grid, call, lanes=True)
    block = launch_extent(self.label, "blockdim", self._block, call)
    shared = evaluated(self._shared, call)
    blocks, threads, size, _ = _launch.checked(self.label, grid, block, shared)
    launch = Launch(entry, blocks, threads, tuple(parameters), size)
    return Plan(key, tuple(image for _, _, image in built), (launch,))

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    types = self._types(key)
    return tuple(self._build(key, types, c)[2] for c in capabilities or (0,))

  def _lanes(self, call: CudaCall) -> tuple[int, ...]:
    """The leading axis of arrays under vmap="grid", which a call without a batch has too."""
    return (call.batch or 1,) if self.vmap == "grid" else ()

  def _key(self, call: CudaCall, bound: Mapping[str, Bound]) -> str:
    """The types of all parameters: what `_type_of` takes."""
    held: list[list[Any]] = []
    shared = set(self.aliases)
    for name, given in bound.items():
      if given.of == "static":
        held.append([name, str(self._compiler.scalar_type(self.label, name, given.value)), -1, 0])
        continue
      written = given.of == "result" or given.index in shared
      rank = len(given.value.shape) + len(self._lanes(call))
      held.append([name, given.value.dtype.name, rank, int(written)])
    return json.dumps(held, separators=(",", ":"))

  def _type_of(self, name: str, dtype: str, rank: int, written: int) -> Any:
    from numba.cuda import types

    if rank < 0:
      return getattr(types, "boolean" if dtype == "bool" else dtype)
    array = dtype_named(dtype)
    return self._compiler.array_type(self.label, name, array, rank, written=bool(written))

  def _types(self, key: str) -> list[Any]:
    """Numba's types of all parameters: the call's, or those that the decorator was given."""
    own = [self._type_of(*entry) for entry in json.loads(key)]
    declared = self._compiler.declared_types(self.function)
    if not declared:
      return own
    for signature in declared:
      if len(signature) == len(own) and all(map(_accepts, signature, own)):
        return [a if _rank(a) is not None else d for a, d in zip(own, signature, strict=True)]
    raise GateDefinitionError(
      f"{self.label}: expected arguments of one of the signatures that @cuda.jit was given "
      f"({'; '.join(map(str, declared))}), got {own}"
    )

  def _build(
    self, key: str, types: Sequence[Any], capability: int
  ) -> tuple[str, tuple[_named.Declared, ...], Image]:
    if (key, capability) not in self._compiled:
      self._compiled[key, capability] = self._compiler.compile_for(
        self.label,
        self.function,
        types,
        capability or ptx_capability(()),
        ptx=capability == 0,
      )
    return self._compiled[key, capability]

  def _parameters(
    self, call: CudaCall, bound: Mapping[str, Bound], types: Sequence[Any]
  ) -> list[Parameter]:
    found: list[Parameter] = []
    for given, numba_type in zip(bound.values(), types, strict=True):
      if given.of == "static":
        found += self._compiler.scalar_parameters(given.value, numba_type)
        continue
      shape = (*self._lanes(call), *given.value.shape)
      item = given.value.dtype.itemsize
      found += self._compiler.array_parameters(shape, item, cast("Any", given.of), given.index)
    return found


def _rank(numba_type: Any) -> int | None:
  return getattr(numba_type, "ndim", None)


def _accepts(declared: Any, own: Any) -> bool:
  """Whether a declared parameter takes an argument; numbers are converted."""
  if _rank(declared) is None or _rank(own) is None:
    return _rank(declared) is _rank(own)
  return declared.ndim == own.ndim and declared.dtype == own.dtype


def _compiler(what: str) -> Any:
  # A module that Numba's own, older CUDA target lacks.
  extras.library("numba.cuda.np.numpy_support", "numba-cuda", "numba-cuda", by=what)
  from callgate._kernel.cuda import numba_cuda_compile

  return numba_cuda_compile


@factories.of_one(NumbaCudaOptions)
def numba_cuda(dispatcher: Any, /, *, options: NumbaCudaOptions) -> NumbaCudaKernel:
  """Makes a JAX function of a kernel of `@numba.cuda.jit`, for CUDA devices.

  ```python
  import callgate as cg
  from numba import cuda

  @cuda.jit
  def saxpy(a, x, y, out):
    i = cuda.grid(1)
    if i < out.size:
      out[i] = a * x[i] + y[i]

  run = cg.numba_cuda(
    saxpy, griddim=lambda x, y: -(-x.size // 256), blockdim=256, out=lambda x, y: x
  )
  # jax.jit(lambda x, y: run(2.0, x, y))
  ```

  Numba compiles the kernel once for the dtypes and ranks of a call, when it is lowered, for this
  process's devices, or for `arch`; the runtime launches it on XLA's stream. Arrays are C-contiguous
  ones of Numba's, and those that are operands are read-only, unless `aliases` names them: a kernel
  that writes to one is refused when it is compiled. A number is passed by value and fixed by the
  program: a Python int is an int64, a float a float64, and NumPy's scalars have their own type; a
  kernel whose decorator has a signature gets what that says.

  A call fills the kernel's parameters in order, or by name. Those that it leaves open take the
  results, in order: they come last, behind the arrays, or `outputs` names them. For a kernel
  `(out, x)` as `callgate.numba` takes them, that is `outputs="out"`.

  Args:
    dispatcher: what the decorator made. Its options are respected (fastmath, lineinfo, opt,
      launch_bounds, max_registers, link); debug and extensions are refused.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: Numba refuses the kernel; at the first call.
    GateDefinitionError: an argument is wrong, or numba-cuda is not installed.
  """
  return NumbaCudaKernel(dispatcher, options)
