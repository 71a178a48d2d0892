"""`callgate.triton`: kernels of Triton, compiled when a call is traced, launched without Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from callgate._build import cache
from callgate._build.nvrtc import Image
from callgate._core import extras, factories, registry
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._core.signatures import takes_two
from callgate._kernel import launch as _launch
from callgate._kernel.cuda.named import NONE, Bound, Named, NamedKernel
from callgate._kernel.cuda.options import TRITON_DEFAULTS, TritonOptions
from callgate._kernel.launch import Launch, Parameter, Plan
from callgate._kernel.program import CudaCall, ptx_capability

# What a kernel's key holds by value.
_PLAIN = (bool, int, float, str, type(None))
_ALIGNMENT = 16  # bytes; Triton vectorises what it knows to be so aligned


class TritonKernel(NamedKernel):
  """A kernel of Triton; see `callgate.triton`.

  Attributes:
    function: the `@triton.jit` function below all decorators.
    decorated: as given.
    compile_options: of Triton, such as num_warps.
  """

  def __init__(
    self, kernel: Any, options: TritonOptions, constants: Mapping[str, Any] | None = None
  ) -> None:
    name = options.name
    what = f"kernel '{name}'" if name else "callgate.triton"
    self._compiler = _compiler(what)
    function = self._compiler.base_function(kernel)
    if function is None:
      raise GateDefinitionError(
        f"{what}: expected a function of @triton.jit, or one under @triton.autotune or "
        f"@triton.heuristics, got {kernel!r}"
      )
    self.function = function
    self.decorated = kernel
    self.compile_options = options.of_triton()
    self._grid, self._zeroed = options.grid, options.zeroed_outputs
    self._takes_shapes = callable(options.grid) and takes_two(options.grid)
    self._compiled: dict[tuple[str, int], Any] = {}
    named = [
      Named(p.name, p.is_constexpr, p.default if p.has_default else NONE) for p in function.params
    ]
    automatic = self._compiler.automatic(kernel)
    named = [Named(p.name, True, None) if p.name in automatic else p for p in named]
    self._automatic = frozenset(automatic)
    super().__init__(
      name if name is not None else registry.unique_name(function.fn),
      named,
      options,
      constants,
    )

  # -- plans -------------------------------------------------------------------------------------
  def plan(self, call: CudaCall) -> Plan:
    bound = self.bound(call)
    known = {n: b.value for n, b in bound.items() if n not in self._automatic}
    settings = self._settings(call, bound, known)
    meta = {**known, **settings}
    arguments = self._typed(bound, meta)
    options = {k: v for k, v in settings.items() if k not in bound}
    key = self._key(arguments, options)
    capabilities = call.capabilities or (0,)
    built = [self._build(arguments, options, key, c) for c in capabilities]
    launch, scratch = self._launch(call, built, arguments, bound, meta)
    images = tuple(self._image(b, c) for b, c in zip(built, capabilities, strict=True))
    return Plan(key, images, (launch,), scratch, self._zeroed_of(call, bound, meta))

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    held = json.loads(key)
    if held["function"] != self.function.cache_key[:16] or "hash" in held:
      return None
    make = self._compiler.Argument
    arguments = [
      make(p.name, *given) for p, given in zip(self.function.params, held["args"], strict=True)
    ]
    chosen = capabilities or (0,)
    return tuple(
      self._image(self._build(arguments, held["options"], key, each), each) for each in chosen
    )

  def _settings(
    self, call: CudaCall, bound: Mapping[str, Bound], known: Mapping[str, Any]
  ) -> dict[str, Any]:
    from callgate._kernel.cuda import triton_configs

    constants = {p.name for p in self.named if p.constant}
    arguments = {n: v for n, v in known.items() if n not in constants}
    given = {n: v for n, v in known.items() if n in constants}
    found = triton_configs.candidates(
      self.label, self.decorated, arguments, {**given, **self.compile_options}
    )
    found = [{**TRITON_DEFAULTS, **settings} for settings in found]
    for settings in found:
      missing = sorted(n for n in self._automatic if n not in settings)
      if missing:
        raise GateDefinitionError(
          f"{self.label}: expected a value of {', '.join(missing)} from each configuration of "
          "@triton.autotune, got one without"
        )
    device = triton_configs.cuda_device()

    def measure(settings: Mapping[str, Any]) -> float:
      single = self._fixed(bound, settings)
      return triton_configs.seconds_of(single, call, device)

    return triton_configs.chosen(
      self.label,
      self.decorated,
      self.function,
      found,
      known,
      None if device is None else measure,
    )

  def _fixed(self, bound: Mapping[str, Bound], settings: Mapping[str, Any]) -> TritonKernel:
    """The same kernel with all static values fixed, for a measurement."""
    static = {n: b.value for n, b in bound.items() if b.of == "static"}
    results = sorted((b.index, b.value) for b in bound.values() if b.of == "result")
    own = {n: v for n, v in settings.items() if n in bound}
    options = TritonOptions(
      name=registry.free_name(f"{self.name}.tuned"),
      grid=self._grid,
      options={n: v for n, v in settings.items() if n not in bound},
      zeroed_outputs=self._zeroed,
      outputs=[n for n, b in bound.items() if b.of == "result"],
      out=tuple(value for _, value in results) if len(results) != 1 else results[0][1],
      aliases=self.aliases,
      arch=self.arch(),
    )
    return TritonKernel(self.function, options, {**static, **own})

  def _typed(self, bound: Mapping[str, Bound], meta: Mapping[str, Any]) -> list[Any]:
    """The arguments as Triton's compiler takes them."""
    arguments: list[Any] = []
    for parameter in self.function.params:
      given = bound[parameter.name]
      if given.of == "static":
        value = meta[parameter.name]
        arguments.append(self._compiler.scalar(parameter, value, self.label))
        continue
      # XLA's buffers are aligned, and so are the lanes of a batch if one's size is a multiple.
      size = given.value.size * given.value.dtype.itemsize
      aligned = size % _ALIGNMENT == 0
      arguments.append(self._compiler.pointer(parameter, given.value.dtype, self.label, aligned))
    return arguments

  def _key(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    # The code doesn't depend on the value of what is passed.
    held = [[a.type, a.value if a.type == "constexpr" else None, a.divisible] for a in arguments]
    about: dict[str, Any] = {"function": self.function.cache_key[:16]}
    if all(isinstance(v, _PLAIN) for _, v, _ in held) and all(
      isinstance(v, _PLAIN) for v in options.values()
    ):
      about |= {"args": held, "options": dict(sorted(options.items()))}
    else:
      about["hash"] = cache.digest(repr([held, sorted(options.items())]))
    return json.dumps(about, separators=(",", ":"))

  def _build(
    self, arguments: Sequence[Any], options: Mapping[str, Any], key: str, capability: int
  ) -> Any:
    if (key, capability) not in self._compiled:
      target = capability or ptx_capability(())
      self._compiled[key, capability] = self._compiler.compile_for(
        self.label, self.function, arguments, options, target
      )
    return self._compiled[key, capability]

  def _image(self, built: Any, capability: int) -> Image:
    return Image(built.cubin, capability) if capability else Image(built.ptx, 0)

  def _launch(
    self,
    call: CudaCall,
    built: Sequence[Any],
    arguments: Sequence[Any],
    bound: Mapping[str, Bound],
    meta: Mapping[str, Any],
  ) -> tuple[Launch, tuple[int, ...]]:
    first = built[0]
    same = {(b.entry, b.threads, b.cluster, len(b.scratch)) for b in built}
    if len(same) != 1:
      raise CompileError(
        f"{self.label}: expected the same launch for all of arch=, got {sorted(same)}; give one",
        "",
      )
    x, y, z = self._extent(call, meta)
    cx, cy, cz = first.cluster
    grid = (x * cx, y * cy, z * cz)
    several = (cx, cy, cz) != (1, 1, 1)
    blocks, block, shared, cluster = _launch.checked(
      self.label, grid, first.threads, max(b.shared for b in built), first.cluster if several else
      None,
    )  # fmt: skip
    parameters = [
      Parameter.pointer(cast("Any", bound[a.name].of), bound[a.name].index)
      if a.type[0] == "*"
      else Parameter.scalar(a.value, self._compiler.scalar_dtype(a))
      for a in self._compiler.passed(arguments)
    ]
    scratch: list[int] = []
    for index in range(len(first.scratch)):
      size = max(b.scratch[index] for b in built) * x * y * z
      if size:
        parameters.append(Parameter.pointer("scratch", len(scratch)))
        scratch.append(size)
      else:
        parameters.append(Parameter.null())
    return Launch(first.entry, blocks, block, tuple(parameters), shared, cluster), tuple(scratch)

  def _extent(self, call: CudaCall, meta: Mapping[str, Any]) -> tuple[int, int, int]:
    grid = self._grid
    if callable(grid):
      shapes = (*call.operands, *call.results)
      grid = grid(dict(meta), shapes) if self._takes_shapes else grid(dict(meta))
    x, y, z = _launch.extent(self.label, "grid", grid)
    return x, y, call.batch if call.batch is not None and z == 1 else z

  def _zeroed_of(
    self, call: CudaCall, bound: Mapping[str, Bound], meta: Mapping[str, Any]
  ) -> tuple[int, ...]:
    given = self._zeroed(dict(meta)) if callable(self._zeroed) else self._zeroed
    names = (given,) if isinstance(given, (int, str)) else tuple(cast("Sequence[Any]", given))
    found: set[int] = set()
    for name in names:
      target = bound.get(name) if isinstance(name, str) else None
      index = name if target is None else target.index if target.of == "result" else None
      if not isinstance(index, int) or not 0 <= index < len(call.results):
        raise GateDefinitionError(
          f"{self.label}: zeroed_outputs: expected positions of results (0 to "
          f"{len(call.results) - 1}) or names of parameters that take them, got {name!r}"
        )
      found.add(index)
    return tuple(sorted(found))


def _compiler(what: str) -> Any:
  extras.library("triton", "Triton", "triton", by=what)
  from callgate._kernel.cuda import triton_compile

  return triton_compile


@factories.with_constants(TritonOptions)
def triton(kernel: Any, /, *, options: TritonOptions, **constexprs: Any) -> TritonKernel:
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
  Python or NumPy number is passed by value, fixed by the program, and specialised as Triton's
  launcher does it: on being 1, and on being divisible by 16; so are pointers, except where the
  lanes of a batch may lie otherwise.

  A call fills the kernel's parameters in order, or by name. Those that it leaves open take the
  results, in order: they come last, behind the arrays (numbers may follow, by name), or `outputs`
  names them. `add(x, y, n=x.size)` is a call of a kernel `(x_ptr, y_ptr, out_ptr, n)`.

  A kernel under `@triton.autotune` is tuned where the process has a device, at the first lowering
  for each of Triton's keys: every configuration that the pruning leaves is launched with arrays of
  zeros of the call's shapes, and the choice is kept on disk. Without a device the first
  configuration is taken, which a warning of the logger "callgate" says. Configurations have no
  `pre_hook`. `@triton.heuristics` get the arguments with ShapeDtypeStructs for arrays.

  Args:
    kernel: a function of `@triton.jit`, also under `@triton.autotune` and `@triton.heuristics`.
    **constexprs: values of the kernel's parameters, above all of its constants.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: Triton refuses the kernel; at the first call.
    GateDefinitionError: an argument is wrong, or Triton is not installed.
  """
  return TritonKernel(kernel, options, constexprs)
