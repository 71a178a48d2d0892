# SPDX-License-Identifier: Apache-2.0
"""`callgate.triton`: Triton kernels, compiled when a call is lowered, launched without Python."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from callgate._build import cache
from callgate._build.nvrtc import CompiledImage
from callgate._core import extras, factories, registry
from callgate._core import options as check
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._core.signatures import takes_two
from callgate._kernel import launch
from callgate._kernel.cuda.kernel import BoundLaunch, Named, NamedKernel
from callgate._kernel.cuda.options import TRITON_DEFAULTS, TritonOptions
from callgate._kernel.kernel import Kernel

# The types that a kernel's key holds by value.
_PLAIN = (bool, int, float, str, type(None))
_ALIGNMENT = 16  # bytes; Triton vectorizes access to arrays with this alignment


class TritonKernel(NamedKernel):
  """A Triton kernel; see `callgate.triton`."""

  def __init__(
    self, kernel: Any, options: TritonOptions, constants: Mapping[str, Any] | None = None
  ) -> None:
    what = options.label("callgate.triton")
    extras.library("triton", "Triton", "triton", by=what)
    from callgate._kernel.cuda import triton_compile

    self._compiler, self._options = triton_compile, options
    function = triton_compile.base_function(kernel)
    if function is None:
      kinds = "a function of @triton.jit, or one under @triton.autotune or @triton.heuristics"
      raise GateDefinitionError(f"{what}: expected {kinds}, got {kernel!r}")
    self.function, self.decorated = function, kernel
    self._automatic = triton_compile.automatic(kernel)
    named = [
      Named(p.name, True, None) if p.name in self._automatic
      else Named(p.name, p.is_constexpr, p.default)
      for p in function.params
    ]  # fmt: skip
    name = options.name or registry.unique_name(function.fn)
    super().__init__(name, named, options, constants)

  def plan(self, call: launch.CudaCall) -> launch.LaunchPlan:
    compiler, label, bound = self._compiler, self.label, self.bound(call)
    known = {n: b.value for n, b in bound.items() if n not in self._automatic}
    settings = self._settings(call, bound, known)
    meta = {**known, **settings}
    arguments: list[Any] = []
    for parameter in self.function.params:
      of, _, value = bound[parameter.name]
      if of == "static":
        arguments.append(compiler.scalar(parameter, meta[parameter.name], label))
      else:
        # XLA aligns its buffers. A batch's lanes are aligned too if a lane's size is a multiple.
        aligned = value.size * value.dtype.itemsize % _ALIGNMENT == 0
        arguments.append(compiler.pointer(parameter, value.dtype, label, aligned))
    options = {k: v for k, v in settings.items() if k not in bound}
    # The code doesn't depend on a passed value.
    held = [[a.type, a.value if a.type == "constexpr" else None, a.divisible] for a in arguments]
    ordered = dict(sorted(options.items()))
    about: dict[str, Any] = {"args": held, "options": ordered}
    if not all(isinstance(v, _PLAIN) for v in (*(v for _, v, _ in held), *options.values())):
      about = {"hash": cache.digest(repr([held, list(ordered.items())]))}
    key = json.dumps({"function": self.function.cache_key[:16], **about}, separators=(",", ":"))
    make = functools.partial(compiler.compile_for, label, self.function, arguments, options)
    built = self.made_for(key, call.capabilities, make)
    return self._plan(call, key, built, compiler.passed(arguments), bound, meta)

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    held, compiler, function = json.loads(key), self._compiler, self.function
    if held["function"] != function.cache_key[:16] or "hash" in held:
      return None
    pairs = zip(function.params, held["args"], strict=True)
    made = [compiler.TritonArgument(p.name, *given) for p, given in pairs]
    make = functools.partial(compiler.compile_for, self.label, function, made, held["options"])
    return tuple(b.image for b in self.made_for(key, capabilities, make))

  def _settings(
    self, call: launch.CudaCall, bound: Mapping[str, BoundLaunch], known: Mapping[str, Any]
  ) -> dict[str, Any]:
    compiler, label = self._compiler, self.label
    constants = {n: v for n, v in known.items() if self.named[n].constant}
    arguments = {n: v for n, v in known.items() if n not in constants}
    named = {n: getattr(self._options, n) for n in TRITON_DEFAULTS}  # options of Triton's compiler
    given = constants | {n: v for n, v in named.items() if v is not None}
    given |= self._options.options or {}
    several = compiler.candidates(label, self.decorated, arguments, given)
    found = [{**TRITON_DEFAULTS, **settings} for settings in several]
    for settings in found:
      if missing := ", ".join(sorted(self._automatic - settings.keys())):
        expected = f"expected {missing} in each configuration of @triton.autotune"
        raise GateDefinitionError(f"{label}: {expected}, got none")
    device = compiler.cuda_device()
    return compiler.chosen(
      label, self.decorated, self.function, found, known,
      None if device is None
      else lambda each: compiler.seconds_of(self._fixed(bound, each), call, device),
    )  # fmt: skip

  def _fixed(self, bound: Mapping[str, BoundLaunch], settings: Mapping[str, Any]) -> TritonKernel:
    """Returns the kernel with all static values fixed, for a measurement."""
    static = {n: b.value for n, b in bound.items() if b.of == "static"}
    results = sorted((b.position, b.value) for b in bound.values() if b.of == "result")
    own = {n: v for n, v in settings.items() if n in bound}
    options = TritonOptions(
      name=registry.free_name(f"{self.name}.tuned"), grid=self._options.grid,
      options={n: v for n, v in settings.items() if n not in bound}, arch=self.arch,
      outputs=[n for n, b in bound.items() if b.of == "result"], aliases=self.aliases,
      out=tuple(value for _, value in results) if len(results) != 1 else results[0][1],
      zeroed_outputs=self._options.zeroed_outputs,
    )  # fmt: skip
    return TritonKernel(self.function, options, {**static, **own})

  def _plan(
    self, call: launch.CudaCall, key: str, built: Sequence[Any], passed: Sequence[Any],
    bound: Mapping[str, BoundLaunch], meta: Mapping[str, Any],
  ) -> launch.LaunchPlan:  # fmt: skip
    """Returns the launch of compiled code; `meta` has all arguments, constants and options."""
    same = {(b.entry, b.threads, b.cluster, len(b.scratch)) for b in built}
    if len(same) != 1:
      fault = f"expected the same launch for all of arch=, got {sorted(same)}; pass one"
      raise CompileError(f"{self.label}: {fault}", "")
    ((entry, threads, cluster, _),) = same
    grid, zeroed = self._options.grid, self._options.zeroed_outputs
    if callable(grid):
      shapes = ((*call.operands, *call.results),) if takes_two(grid) else ()
      grid = grid(dict(meta), *shapes)
    programs = self.extent("grid", grid, call)
    blocks, block, shared, clusters = launch.checked(
      self.label, tuple(map(operator.mul, programs, cluster)), threads,
      max(b.shared for b in built), cluster if cluster != (1, 1, 1) else None,
    )  # fmt: skip
    parameters = [
      launch.LaunchParameter.pointer(cast("Any", bound[a.name].of), bound[a.name].position)
      if a.type[0] == "*"
      else launch.LaunchParameter.scalar(a.value, a.dtype)
      for a in passed
    ]
    scratch: list[int] = []
    for of_block in zip(*(b.scratch for b in built), strict=True):
      if size := max(of_block) * math.prod(programs):
        parameters.append(launch.LaunchParameter.pointer("scratch", len(scratch)))
        scratch.append(size)
      else:
        parameters.append(launch.LaunchParameter(bytes(8)))
    zeroed, positions = zeroed(dict(meta)) if callable(zeroed) else zeroed, set[int]()
    for name in (zeroed,) if isinstance(zeroed, (int, str)) else cast("Sequence[Any]", zeroed):
      target = bound.get(name) if isinstance(name, str) else None
      index = name if target is None else target.position if target.of == "result" else None
      if not isinstance(index, int) or not 0 <= index < len(call.results):
        known = f"positions of results (0 to {len(call.results) - 1})"
        expected = f"{known} or names of parameters that take them"
        check.refuse(self.label, "zeroed_outputs", expected, name)
      positions.add(index)
    launched = launch.Launch(entry, blocks, block, tuple(parameters), shared, clusters)
    images = tuple(b.image for b in built)
    return launch.LaunchPlan(key, images, (launched,), tuple(scratch), tuple(sorted(positions)))


@factories.with_constants(TritonOptions)
def triton(kernel: Any, /, *, options: TritonOptions, **constexprs: Any) -> Kernel:
  """Makes a JAX function of a Triton kernel, for CUDA devices.

  ```python
  import callgate as cg, jax, triton, triton.language as tl

  @triton.jit
  def add_kernel(x_ptr, y_ptr, n, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask)
    tl.store(out_ptr + at, total, mask=mask)

  add = cg.triton(
    add_kernel, grid=lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),), out=lambda x, y: x,
    BLOCK=1024,
  )
  # jax.jit(lambda x, y: add(x, y, x.size))
  ```

  A call fills the kernel's parameters in order or by name. The remaining parameters receive the
  results, in order: name them with `outputs`, or place them after the arrays. Numbers may follow by
  name: `add(x, y, n=x.size)` calls a kernel `(x_ptr, y_ptr, out_ptr, n)`.

  Triton compiles the kernel for the types of a call when the call is lowered, for the devices of
  this process or for `arch`. callgate launches it on XLA's stream without Python. An array becomes
  a pointer. A number is passed by value and fixed when the program is traced. callgate specializes
  numbers as Triton's launcher does (equal to 1, divisible by 16), and pointers by their alignment.

  A kernel with `@triton.autotune` is tuned when a call with a new key is first lowered, if the
  process has a device. callgate launches each configuration with zeros of the call's shapes and
  keeps the choice on disk. Without a device it takes the first configuration and logs a warning
  (logger "callgate"). Configurations with a `pre_hook` are rejected. `@triton.heuristics` functions
  get the arguments, with ShapeDtypeStructs in place of arrays.

  Args:
    kernel: a function with `@triton.jit`, also with `@triton.autotune` and `@triton.heuristics`.
    **constexprs: values of the kernel's parameters, usually of its constants.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: when a call is lowered: Triton rejects the kernel.
    GateDefinitionError: an argument is wrong, or Triton is not installed.
  """
  return Kernel(TritonKernel(kernel, options, constexprs))
