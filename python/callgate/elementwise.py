"""`callgate.elementwise`: pointwise kernels from one expression, broadcasting and derivatives."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from callgate import (
  _callgate,
  _elementwise_cuda,
  _elementwise_derivatives,
  _elementwise_params,
  _names,
  _options,
  _rules,
  _toolchain,
)
from callgate._cuda_program import PREFIX, parse_arch
from callgate._elementwise_cuda import CudaOptions
from callgate._elementwise_params import Param, dtype_named
from callgate._elementwise_source import Code, cpu_unit, has_complex
from callgate._operation import Effect
from callgate._parameters import Kind, Parameter, from_codes
from callgate._primitive import CallSite
from callgate._rules import Rule
from callgate._toolchain import CompileError
from callgate.cpp import caller_module
from callgate.errors import GateDefinitionError
from callgate.kernel import CallTypes, Function, Kernel, Static

# Neither changes a number: errno and the flags of floating-point exceptions are not looked at.
_FLAGS = ("-fno-math-errno", "-fno-trapping-math")
# Products and quotients of complex numbers by the plain formulas, as XLA has them.
_COMPLEX_FLAGS = ("-fcx-fortran-rules",)


class ElementwiseKernel(Kernel):
  """A kernel from the code of one element; see `callgate.elementwise`.

  Attributes:
    user_code: as given.
    derivatives: for each argument that has one, by its position.
    build_options: flags, include_dirs, libraries and library_dirs of its compilation.
    cuda_options: of its compilation for CUDA.
  """

  def __init__(
    self,
    name: str,
    code: Code,
    *,
    build_options: Mapping[str, Any],
    cuda_options: CudaOptions,
    jvp: str | None = None,
    like: Callable[..., Any] | None = None,
    gradient: Literal["finite-difference"] | None = None,
    **options: Any,
  ) -> None:
    self.user_code = code
    self.build_options = dict(build_options)
    self.cuda_options = cuda_options
    self.derivatives: dict[int, _elementwise_derivatives.Derivative] = {}
    signature = [Parameter(p.name, Kind.IN, p.own_dtype) for p in code.inputs]
    signature += [Parameter(p.name, Kind.OUT, p.own_dtype) for p in code.outputs]
    super().__init__(
      name,
      signature,
      out=functools.partial(_result_types, f"kernel '{name}'", code),
      like=like,
      gradient=gradient,
      thread_safe=True,
      **options,
    )
    self.cuda = _elementwise_cuda.ElementwisePart(self, cuda_options)
    if not code.knows_place:
      self.vmap_rule = functools.partial(_batch_in_front, weakref.ref(self))
    if jvp is not None:
      make = functools.partial(_derivative_kernel, name, self.build_options, cuda_options)
      self.derivatives = _elementwise_derivatives.derive(self.label, code, jvp, like, make)
      self._set_rule(_elementwise_derivatives.rule)
    elif gradient is not None and like is None:
      self._set_rule(_elementwise_derivatives.differences)

  def _set_rule(self, rule: Callable[..., Any]) -> None:
    def jvp(primals: Any, tangents: Any, **static: Any) -> Any:
      return rule(self, primals, tangents, **static)

    self.rules.set_jvp(self.label, jvp, symbolic_zeros=True)

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    code, rest = self.user_code, dict(kwargs)
    static: dict[str, Any] = {
      letter: _letter(self.label, letter, rest.pop(letter))
      for letter in code.letters
      if letter in rest
    }
    given = {letter: dtype_named(name) for letter, name in static.items()}
    size = rest.pop("size", None)
    operands, _ = super()._arguments(args, rest)
    leaves = [jax.tree.leaves(operand)[0] for operand in operands]
    arrays = _elementwise_params.convert(self.label, code.inputs, leaves, given)
    if size is not None or not code.mapped:
      static["size"] = _size(self.label, code, size)
    return tuple(arrays), tuple(sorted(static.items()))

  def bindings(self, operands: Sequence[Any], static: Mapping[str, Any]) -> dict[str, Any]:
    """The dtypes that letters stand for in a call."""
    return _bindings(self.label, self.user_code, operands, static)

  def code(self, *args: Any, **kwargs: Any) -> str:
    """The C++ that a call with these arguments runs.

    ```python
    import callgate as cg, jax.numpy as jnp

    twice = cg.elementwise("T x", "T y", "y = x + x")
    assert "using T = float;" in twice.code(jnp.ones(3))
    ```

    Args:
      *args: as for a call; jax.ShapeDtypeStructs do as well.
      **kwargs: likewise.

    Returns:
      The source: the function that says what happens to an element, and the loops around it.

    Raises:
      GateDefinitionError: a call with these arguments would raise it.
    """
    operands, static = self._arguments(args, kwargs)
    results = jax.tree.leaves(self.out(*operands, **dict(static)))
    return self._source(self.variant_key(self.types_of(operands, results, static)))

  def sharding_rule(self, site: Any, operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    if self.sharding is not None:
      return super().sharding_rule(site, operands, results)
    if self.user_code.knows_place:
      return _rules.gathered(operands, results)
    ins, outs = (", ".join(["..."] * len(shapes)) for shapes in (operands, results))
    rule = _rules.parse(self.label, f"{ins} -> {outs}", tuple(operands), tuple(results))
    if all(shape == results[0] for shape in operands):
      return rule
    # The code is made for what varies along the innermost axis, which therefore must stay one.
    inner = [f for f, extent in zip(rule.results[0], results[0], strict=True) if extent != 1]
    return dataclasses.replace(rule, least=frozenset(inner[-1:]))

  # -- variants ----------------------------------------------------------------------------------
  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    # Compiles for the CPU, for which a machine whose programs run elsewhere may have no compiler.
    # There a program for the CPU does so when it is lowered.
    if jax.default_backend() == "cpu":
      super().check_call(site, structs)

  def types_of(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> CallTypes:
    code = self.user_code
    bound = self.bindings(operands, dict(static))
    letters = ",".join(f"{name}={bound[name].name}" for name in code.letters)
    shapes = [x.shape for p, x in zip(code.inputs, operands, strict=True) if not p.raw]
    key = f"{letters}:{_varying(shapes, results[0].shape)}"
    return dataclasses.replace(super().types_of(operands, results, static), static=(("key", key),))

  def variant_key(self, types: CallTypes) -> str:
    return dict(types.static)["key"]

  def types_of_key(self, key: str) -> CallTypes:
    return CallTypes((), (), (("key", key),))

  def define_variant(self, key: str) -> bool:
    if key.startswith(PREFIX):
      return super().define_variant(key)
    letters, _, varies = key.partition(":")
    names = tuple(part.partition("=")[0] for part in letters.split(",") if part)
    fits = names == self.user_code.letters and len(varies) == len(self.user_code.mapped)
    return fits and super().define_variant(key)

  def bound_of(self, key: str) -> dict[str, np.dtype[Any]]:
    """A variant's letters, from its key."""
    return _bound_of(key)

  def explained(self, error: CompileError) -> CompileError:
    """What the compiler said, with what the user should know of it."""
    return error

  def compile(self, types: CallTypes) -> tuple[str, Function]:
    key = self.variant_key(types)
    options = dict(self.build_options)
    if has_complex(self.user_code, _bound_of(key)):
      options["flags"] = (*_COMPLEX_FLAGS, *options["flags"])
    library = _toolchain.build(self.label, self._source(key), **options)
    loaded = _toolchain.load(library)
    table = ctypes.cast(loaded.callgate_kernels, ctypes.c_void_p).value
    assert table is not None
    ((_, address, codes, names),) = _callgate.read_library(str(library), table)
    return key, Function(address, tuple(from_codes(codes, names)), keep=loaded)

  def _source(self, key: str) -> str:
    return cpu_unit(self.label, self.user_code, _bound_of(key), key.partition(":")[2])


class _DerivativeKernel(ElementwiseKernel):
  """The coefficients of a derivative."""

  def compile(self, types: CallTypes) -> tuple[str, Function]:
    try:
      return super().compile(types)
    except CompileError as error:
      raise self.explained(error) from None

  def explained(self, error: CompileError) -> CompileError:
    return CompileError(
      f"{error}\njvp= is compiled for tangents `dx` of a type that takes only what is linear: "
      "sums, differences, and products and quotients with numbers; a tangent that is nowhere is "
      "written 0, and a variable that holds one is declared auto",
      error.output,
    )


def _derivative_kernel(
  name: str,
  build_options: Mapping[str, Any],
  cuda_options: CudaOptions,
  suffix: str,
  code: Code,
  like: Callable[..., Any] | None,
) -> ElementwiseKernel:
  kernel = _DerivativeKernel(
    f"{name}.{suffix}", code, build_options=build_options, cuda_options=cuda_options, like=like
  )
  if like is None:

    def refuse(primals: Any, tangents: Any) -> Any:
      del primals, tangents
      raise GateDefinitionError(
        f"kernel '{name}': jvp= gives the first derivative, and this one is a derivative of it; "
        "expected like= as well: a JAX function of the same arguments, from which the higher "
        "derivatives come"
      )

    kernel.rules.set_jvp(kernel.label, refuse)
  return kernel


def _bindings(
  label: str, code: Code, operands: Sequence[Any], static: Mapping[str, Any]
) -> dict[str, np.dtype[Any]]:
  given = {name: dtype_named(static[name]) for name in code.letters if name in static}
  bound = _elementwise_params.bind(label, code.inputs, operands, given)
  for letter in code.letters:
    if letter not in bound:
      user = next((p.name for p in code.outputs if p.type == letter), letter)
      raise GateDefinitionError(
        f"{label}: the type {letter} of '{user}' is unknown, since no argument has it; expected it "
        f"by keyword, such as {letter}='float32'"
      )
  return bound


def _bound_of(key: str) -> dict[str, np.dtype[Any]]:
  """A variant's letters, from its key."""
  parts = (part.partition("=") for part in key.partition(":")[0].split(",") if part)
  return {name: dtype_named(dtype) for name, _, dtype in parts}


def _result_types(label: str, code: Code, *operands: Any, **static: Any) -> Any:
  """The results' shape, to which the arguments broadcast, and dtypes."""
  bound = _bindings(label, code, operands, static)
  shapes = [x.shape for p, x in zip(code.inputs, operands, strict=True) if not p.raw]
  shape = static.get("size") if not shapes else None
  if shape is None:
    shape = _elementwise_params.broadcast(label, code.mapped, shapes)
  results = [jax.ShapeDtypeStruct(shape, p.dtype(bound)) for p in code.outputs]
  return results[0] if len(results) == 1 else tuple(results)


def _varying(shapes: Sequence[Sequence[int]], result: Sequence[int]) -> str:
  """Which operands vary along the innermost axis that has more than one element."""
  if 0 in result or all(extent == 1 for extent in result):
    return "1" * len(shapes)
  back = next(i for i, extent in enumerate(reversed(result), 1) if extent != 1)
  return "".join("01"[len(shape) >= back and shape[-back] != 1] for shape in shapes)


def _letter(label: str, letter: str, value: Any) -> str:
  try:
    return np.dtype(dtype_named(value) if isinstance(value, str) else value).name
  except TypeError:
    raise GateDefinitionError(f"{label}: {letter}: expected a dtype, got {value!r}") from None


def _size(label: str, code: Code, size: Any) -> tuple[int, ...]:
  if code.mapped:
    raise GateDefinitionError(
      f"{label}: got size={size!r}, but the results have the shape to which "
      f"{', '.join(repr(p.name) for p in code.mapped)} broadcast; expected size= where all "
      "arguments are raw"
    )
  extents = tuple(size) if isinstance(size, (tuple, list)) else (size,)
  if not all(isinstance(e, (int, np.integer)) and e >= 0 for e in extents):
    raise GateDefinitionError(
      f"{label}: expected size=, an integer or a shape, since no argument gives the results "
      f"theirs; got {'none' if size is None else repr(size)}"
    )
  return tuple(int(e) for e in extents)


def _batch_in_front(
  reference: weakref.ref[ElementwiseKernel], size: int, batched: Sequence[bool], *args: Any,
  **static: Any,
) -> tuple[Any, Any]:  # fmt: skip
  """A batch axis is one more axis to broadcast, in front of all others."""
  kernel = reference()
  assert kernel is not None  # the program that is batched holds it
  ranks = [jnp.ndim(x) - flag for x, flag in zip(args, batched, strict=True)]
  shapes = [x.shape[flag:] for x, flag in zip(args, batched, strict=True)]
  core = np.broadcast_shapes(*shapes)
  moved: list[Any] = []
  for i, (x, flag, rank) in enumerate(zip(args, batched, ranks, strict=True)):
    if i in kernel.aliases:  # memory for every lane
      moved.append(jnp.broadcast_to(x, (size, *core)))
    elif flag:
      moved.append(x.reshape((size, *(1,) * (len(core) - rank), *x.shape[1:])))
    else:
      moved.append(x)
  out = kernel.apply_raw(tuple(moved), {}, tuple(sorted(static.items())))
  return out, jax.tree.map(lambda _: True, out)


def elementwise(
  in_params: str,
  out_params: str,
  operation: str,
  name: str | None = None,
  *,
  preamble: str = "",
  loop_prep: str = "",
  after_loop: str = "",
  jvp: str | None = None,
  like: Callable[..., Any] | None = None,
  effect: Effect = "pure",
  aliases: Mapping[int, int] | None = None,
  sharding: Any = None,
  gradient: Literal["finite-difference"] | None = None,
  flags: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  libraries: Sequence[str] = (),
  library_dirs: Sequence[str | os.PathLike[str]] = (),
  debug: bool = False,
  cuda_options: Sequence[str] = (),
  arch: str | int | Sequence[str | int] | None = None,
) -> ElementwiseKernel:
  """Makes a JAX function of the C++ for one element; arguments broadcast as NumPy's do.

  The same code is compiled for the CPU, and by CUDA's run-time compiler for GPUs.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  power = cg.elementwise(
    "T x, T y", "T z", "z = pow(x, y)",
    jvp="dz = y * pow(x, y - 1) * dx + z * log(x) * dy",
  )
  assert power(jnp.array([[2.0], [3.0]]), jnp.arange(2.0)).tolist() == [[1.0, 2.0], [1.0, 3.0]]
  assert jax.grad(power)(3.0, 2.0) == 6.0
  ```

  Args:
    in_params: the arguments, such as "T x, raw float32 y": a dtype's name, or a letter that stands
      for one and is bound by each call; then a name. A `raw` argument is no element but the whole
      array, which the code indexes itself.
    out_params: the results, likewise; none is raw.
    operation: C++ statements that give the results' elements. `i` is the element's index in the
      result in row-major order, `n` and `_ind.size()` are their number.
    name: what programs call the kernel by. Default: the calling module's name and "elementwise".
    preamble: C++ in front of the kernel: functions, types, includes.
    loop_prep: statements in front of each run of elements, whose variables the operation sees.
    after_loop: statements behind each run of elements.
    jvp: the derivative: statements that give the tangent `dz` of each result `z` from the
      arguments, the results and the arguments' tangents `dx`, in which they are linear.
    like: a JAX-traceable reference of the same signature: gives derivatives where there is no
      `jvp`, and those of higher order where there is; and `check`'s truth.
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    aliases: flat input position to flat output position: both are one memory.
    sharding: which dimensions of the arrays may stay split over devices. Default: all, as operands
      broadcast. "gather", or a rule or function as for `callgate.gate`, for less.
    gradient: "finite-difference": derivatives by central differences, element by element.
    flags: for the compiler, after callgate's own.
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of raw arguments; on the CPU.
    cuda_options: for CUDA's run-time compiler, after callgate's own; "--use_fast_math", say.
    arch: what to compile for, in programs for CUDA, where the process has no device: "sm_90", 90,
      or several. Default: PTX, which any device runs.

  Returns:
    A `Kernel`. Its calls take the arguments by position or name; `size=` where all are raw; and the
    dtype of a letter by keyword (`T="float32"`) where no argument has it. They return an array, or
    a tuple of them for several results.

  Raises:
    CompileError: the compiler refuses the code, at the first call with such dtypes; or there is no
      compiler.
    GateDefinitionError: a parameter or an option is wrong.
  """
  name = _options.name("elementwise", name)
  if name is None:
    name = _names.free_name(f"{caller_module()}.elementwise")
  label = f"kernel '{name}'"
  _options.texts(
    label, in_params=in_params, out_params=out_params, operation=operation, preamble=preamble,
    loop_prep=loop_prep, after_loop=after_loop,
  )  # fmt: skip
  inputs = _elementwise_params.parse(label, "in_params", in_params)
  outputs = _elementwise_params.parse(label, "out_params", out_params)
  _elementwise_params.check(label, inputs, outputs)
  _check_aliases(label, inputs, _options.aliases(label, aliases))
  _options.boolean(label, "debug", debug)
  _options.optional_texts(label, jvp=jvp)
  defaults = _toolchain.DEBUG_FLAGS if debug else _toolchain.DEFAULT_FLAGS
  return ElementwiseKernel(
    name,
    Code(inputs, outputs, operation, preamble, loop_prep, after_loop),
    build_options={
      "flags": (*defaults, *_FLAGS, *_options.strings(label, "flags", flags)),
      "include_dirs": _options.strings(label, "include_dirs", include_dirs),
      "libraries": _options.strings(label, "libraries", libraries),
      "library_dirs": _options.strings(label, "library_dirs", library_dirs),
    },
    cuda_options=CudaOptions(
      _options.strings(label, "cuda_options", cuda_options), parse_arch(label, arch)
    ),
    jvp=jvp,
    like=like,
    effect=effect,
    aliases=aliases,
    sharding=sharding,
    gradient=gradient,
  )


def _check_aliases(label: str, inputs: Sequence[Param], aliases: Mapping[int, int]) -> None:
  for position in aliases:
    if 0 <= position < len(inputs) and inputs[position].raw:
      raise GateDefinitionError(
        f"{label}: aliases: '{inputs[position].name}' is raw, so that elements would read what "
        "others have written; expected an argument that is not"
      )
