# SPDX-License-Identifier: Apache-2.0
"""`callgate.triton`: kernels of Triton, compiled when a call is traced, launched without Python."""

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
_ALIGNMENT = 16  # bytes; Triton vectorises what it knows to be so aligned


class TritonKernel(NamedKernel):
  """A kernel of Triton; see `callgate.triton`."""

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
        # XLA's buffers are aligned, and so are the lanes of a batch if one's size is a multiple.
        aligned = value.size * value.dtype.itemsize % _ALIGNMENT == 0
        arguments.append(compiler.pointer(parameter, value.dtype, label, aligned))
    options = {k: v for k, v in settings.items() if k not in bound}
    # The code doesn't depend on the value of what is passed.
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
    named = {n: getattr(self._options, n) for n in TRITON_DEFAULTS}  # of Triton's compiler
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
    """The same kernel with all static values fixed, for a measurement."""
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
    """The launch of what was compiled; `meta` has all arguments, constants and options."""
    same = {(b.entry, b.threads, b.cluster, len(b.scratch)) for b in built}
    if len(same) != 1:
      fault = f"expected the same launch for all of arch=, got {sorted(same)}; give one"
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

  Triton compiles the kernel once for the types of a call, when it is lowered, for this process's
  devices, or for `arch`; the runtime launches it on XLA's stream. An array becomes a pointer. A
  number is passed by value, fixed by the program, and specialised as Triton's launcher does it: on
  being 1, and on being divisible by 16; so are pointers, unless a batch's lanes may lie otherwise.

  A call fills the kernel's parameters in order, or by name. Unfilled parameters receive the
  results, in order: they come last, behind the arrays (numbers may follow, by name), or `outputs`
  names them. `add(x, y, n=x.size)` is a call of a kernel `(x_ptr, y_ptr, out_ptr, n)`.

  A kernel under `@triton.autotune` is tuned where the process has a device, at the first lowering
  for each of Triton's keys: every configuration that the pruning leaves is launched with zeros of
  the call's shapes, and the choice is kept on disk. Without a device the first configuration is
  taken, which the logger "callgate" warns of. Configurations have no `pre_hook`.
  `@triton.heuristics` get the arguments with ShapeDtypeStructs for arrays.

  Args:
    kernel: a function of `@triton.jit`, also under `@triton.autotune` and `@triton.heuristics`.
    **constexprs: values of the kernel's parameters, above all of its constants.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: Triton refuses the kernel; at the first call.
    GateDefinitionError: an argument is wrong, or Triton is not installed.
  """
  return Kernel(TritonKernel(kernel, options, constexprs))
