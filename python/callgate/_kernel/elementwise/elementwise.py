# SPDX-License-Identifier: Apache-2.0
"""`callgate.elementwise`: kernels from an expression, with broadcasting and derivatives."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._build import toolchain
from callgate._call.options import CallOptions, Vmap, shared
from callgate._call.site import CallSite
from callgate._core import factories, registry
from callgate._core import options as check
from callgate._core.dtypes import dtype_named
from callgate._core.encoding import is_open
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._core.options import option
from callgate._core.where import where
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.elementwise import derivatives, params
from callgate._kernel.elementwise.cuda import ElementwisePart
from callgate._kernel.elementwise.source import BoundCode, Code, cpu_unit
from callgate._kernel.kernel import Kernel
from callgate._kernel.launch import PREFIX
from callgate._kernel.options import CompilerOptions, KernelOptions
from callgate._kernel.parameters import Kind, Parameter
from callgate._kernel.variants import Function, Given, Static
from callgate._sharding import rules
from callgate._sharding.rules import Rule

# These flags change no number: no code reads errno or the floating-point exception flags.
_FLAGS = ("-fno-math-errno", "-fno-trapping-math")
# Complex products and quotients use the plain formulas, as in XLA.
_COMPLEX_FLAGS = ("-fcx-fortran-rules",)
_LINEAR = (
  "\njvp= is compiled with a type for tangents `dx` that supports only linear operations: sums, "
  "differences, and products and quotients with numbers. Write a zero tangent as 0, and declare "
  "variables that hold tangents with auto"
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ElementwiseOptions(CompilerOptions, CallOptions):
  """The options of `callgate.elementwise`.

  Attributes:
    preamble: C++ code in front of the kernel: functions, types, includes.
    loop_prep: statements before each range of elements; the operation sees their variables.
    after_loop: statements after each range of elements.
    jvp: the derivative's code: statements that set the tangent `dz` of each result `z` from the
      arguments, the results and the arguments' tangents `dx`. `dz` must be linear in these.
    like: a JAX function with the same signature, the reference. It gives derivatives if there is no
      `jvp`, derivatives of higher order in any case, and the values that `check` compares with.
    sharding: the dimensions that may stay split over devices. Default: all, as the operands
      broadcast. "gather", or a rule or function as for `callgate.gate`, splits fewer.
    gradient: "finite-difference" computes derivatives by central differences of each element.
    debug: True compiles for the CPU with "-O0 -g" and checks the bounds of raw arguments.
  """

  out: Any = dataclasses.field(init=False, default=None)
  vmap: Vmap | Callable[..., Any] = dataclasses.field(init=False, default="each")
  linear: bool | int | Sequence[int] = dataclasses.field(init=False, default=False)
  preamble: str = option("", check.text)
  loop_prep: str = option("", check.text)
  after_loop: str = option("", check.text)
  jvp: str | None = option(None, check.text)


@factories.of_code(ElementwiseOptions)
def elementwise(
  in_params: str, out_params: str, operation: str, name: str | None = None, *,
  options: ElementwiseOptions,
) -> "ElementwiseKernel":  # fmt: skip
  """Makes a JAX function of C++ code for one element; arguments broadcast as in NumPy.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  power = cg.elementwise(
    "T x, T y", "T z", "z = pow(x, y)",
    jvp="dz = y * pow(x, y - 1) * dx + z * log(x) * dy",
  )
  assert power(jnp.array([[2.0], [3.0]]), jnp.arange(2.0)).tolist() == [[1.0, 2.0], [1.0, 3.0]]
  assert jax.grad(power)(3.0, 2.0) == 6.0
  ```

  The same code is compiled for the CPU and, by CUDA's run-time compiler, for GPUs.

  Args:
    in_params: the arguments, such as "T x, raw float32 y": a type and a name each. The type is a
      dtype's name, or a letter for any dtype; arguments of one letter have the same dtype. A `raw`
      argument is the whole array, which the code indexes itself.
    out_params: the results, in the same form, without `raw`.
    operation: C++ statements that set the results' elements. `i` is the element's index in the
      result in row-major order; `n` and `_ind.size()` are the number of elements.
    name: the name in compiled programs. Default: the calling module's name and "elementwise".

  Returns:
    A `Kernel`. Calls take the arguments by position or name, `size=` if all arguments are raw, and
    a letter's dtype by keyword (`T="float32"`) if no argument has that letter. They return an
    array, or a tuple for several results.

  Raises:
    CompileError: in a call: the compiler rejects the code for these dtypes, or there is no
      compiler.
    GateDefinitionError: a parameter or an option is wrong.
  """
  name = check.name("elementwise", name)
  name = name or registry.free_name(f"{where().module}.elementwise")
  label = f"kernel '{name}'"
  texts = {"in_params": in_params, "out_params": out_params, "operation": operation}
  for what, text in texts.items():
    check.text(label, what, text)
  options = check.checked(label, options)
  inputs = params.parse(label, "in_params", in_params)
  outputs = params.parse(label, "out_params", out_params)
  if not outputs:
    raise GateDefinitionError(f"{label}: out_params: expected at least one result, got none")
  names = [p.name for p in (*inputs, *outputs)]
  for twice in (name for name in names if names.count(name) > 1):
    raise GateDefinitionError(f"{label}: expected different names, got '{twice}' twice")
  for position in options.aliases or ():
    if 0 <= position < len(inputs) and inputs[position].raw:
      why = "so elements would read the results of other elements; use an argument that is not raw"
      raise GateDefinitionError(f"{label}: aliases: '{inputs[position].name}' is raw, {why}")
  around = (options.preamble, options.loop_prep, options.after_loop)
  code = Code(inputs, outputs, operation, *around)
  return ElementwiseKernel(ElementwiseCallee(name, code, options))


class ElementwiseCallee(CpuKernel):
  """The core of an `ElementwiseKernel`.

  Attributes:
    user_code: the user's code.
    derivatives: the derivative of each argument that has one, by position.
    build_options: flags, include_dirs, libraries and library_dirs for the compiler.
  """

  hint = ""  # added to the compiler's message

  def __init__(self, name: str, code: Code, options: ElementwiseOptions) -> None:
    self.user_code, self.made_with, label = code, options, f"kernel '{name}'"
    self.build_options = options.building(*_FLAGS)
    signature = [Parameter(p.name, Kind.IN, p.own_dtype) for p in code.inputs]
    signature += [Parameter(p.name, Kind.OUT, p.own_dtype) for p in code.outputs]
    out = functools.partial(_result_types, label, code)
    super().__init__(name, signature, shared(KernelOptions, options, thread_safe=True, out=out))
    self.cuda = ElementwisePart(self, options.cuda_options, options.capabilities(label))
    if not code.knows_place:
      kernel: Any = weakref.proxy(self)  # the batched program holds a reference
      self.vmap_rule = functools.partial(CpuKernel.batch_loop, kernel)
    self.derivatives: dict[int, derivatives.Derivative] = {}
    if options.jvp is not None:
      make = functools.partial(_coefficients, self)
      self.derivatives = derivatives.derive(label, code, options.jvp, options.like, make)
    if options.jvp is not None or (options.gradient is not None and options.like is None):
      by = derivatives.by_differences if options.jvp is None else derivatives.by_expression
      self.set_jvp(functools.partial(derivatives.jvp, by, self), symbolic_zeros=True)

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    code, rest = self.user_code, dict(kwargs)
    given: dict[str, np.dtype[Any]] = {}
    for letter in (name for name in code.letters if name in rest):
      value = rest.pop(letter)
      try:
        given[letter] = dtype_named(value) if isinstance(value, str) else np.dtype(value)
      except TypeError:
        check.refuse(self.label, letter, "a dtype", value)
    size = rest.pop("size", None)
    operands, _ = super()._arguments(args, rest)
    leaves = [jax.tree.leaves(operand)[0] for operand in operands]
    arrays = params.convert(self.label, code.inputs, leaves, given)
    static: dict[str, Any] = {letter: dtype.name for letter, dtype in given.items()}
    if size is not None or not code.mapped:
      static["size"] = _size(self.label, code, size)
    return tuple(arrays), tuple(sorted(static.items()))

  def source(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the C++ code that a call with these arguments runs."""
    operands, static = self._arguments(args, kwargs)
    results = jax.tree.leaves(self.out(*operands, **dict(static)))
    return self._source(self.variant_key(operands, results, static))

  def sharding_rule(self, site: Any, operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    if self.sharding is not None:
      return super().sharding_rule(site, operands, results)
    if self.user_code.knows_place:
      return rules.gathered(operands, results)
    ins, outs = (", ".join(["..."] * len(shapes)) for shapes in (operands, results))
    rule = rules.parse(self.label, f"{ins} -> {outs}", tuple(operands), tuple(results))
    if all(shape == results[0] for shape in operands):
      return rule
    # The code depends on which arrays vary along the innermost axis, so that axis must not change.
    inner = [f for f, extent in zip(rule.results[0], results[0], strict=True) if extent != 1]
    return dataclasses.replace(rule, least=frozenset(inner[-1:]))

  # -- variants ----------------------------------------------------------------------------------
  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    # Compiles for the CPU only if programs run there; other machines may have no compiler.
    if jax.default_backend() == "cpu":
      super().check_call(site, structs)

  def variant_key(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> str:
    shapes = [x.shape for p, x in zip(self.user_code.inputs, operands, strict=True) if not p.raw]
    # One flag for each array: "1" if it varies along the result's innermost axis of several
    # elements.
    kinds, result = "1" * len(shapes), results[0].shape
    back = next((i for i, extent in enumerate(reversed(result), 1) if extent != 1), 0)
    if back and is_open(result[-back]):  # if that is 1, another axis is the innermost
      one = {1}.issuperset
      kinds = "".join("1" if s == result else "0" if one(s) else "?" for s in shapes)
    elif back and 0 not in result:
      kinds = "".join("01"[len(shape) >= back and shape[-back] != 1] for shape in shapes)
    return f"{self.letters_text(operands, dict(static))}:{kinds}"

  def letters_text(self, operands: Sequence[Any], static: Mapping[str, Any]) -> str:
    """Returns the dtypes of a call's letters as text, which begins the keys of variants."""
    bindings = self.user_code.bindings(self.label, operands, static)
    return ",".join(f"{letter}={bindings[letter].name}" for letter in sorted(bindings))

  def define_variant(self, key: str) -> bool:
    return (key.startswith(PREFIX) or self.has_key(key)) and super().define_variant(key)

  def has_key(self, key: str) -> bool:
    """Returns True if a program from another process may mean a variant of this kernel."""
    _, kinds, *_ = f"{key}:".split(":")
    code = self.user_code
    return tuple(_letters(key)) == code.letters and len(kinds) == len(code.mapped)

  def bound(self, key: str, spelled: Callable[[str], str] = str) -> BoundCode:
    """Returns the code of a variant, by its key: "T=float32,S=int8:..."."""
    bindings = {name: dtype_named(dtype) for name, dtype in _letters(key).items()}
    return BoundCode(self.user_code, bindings, spelled)

  @contextlib.contextmanager
  def explaining(self) -> Generator[None]:
    """Adds a hint for the user to the compiler's message."""
    try:
      yield
    except CompileError as error:
      if not self.hint:
        raise
      raise CompileError(f"{error}{self.hint}", error.output) from None

  def compile(self, key: str) -> Function:
    more = _COMPLEX_FLAGS if self.bound(key).has_complex else ()
    options = {**self.build_options, "flags": (*more, *self.build_options["flags"])}
    with self.explaining():
      library = toolchain.build(self.label, self._source(key), **options)
    return Function.built(library, toolchain.load(library))

  def _source(self, key: str) -> str:
    return cpu_unit(self.label, self.bound(key), key.partition(":")[2])


class ElementwiseKernel(Kernel):
  """A kernel from code for one element; see `callgate.elementwise`."""

  def code(self, *args: Any, **kwargs: Any) -> str:
    """Returns the C++ code that a call with these arguments runs.

    ```python
    import callgate as cg, jax.numpy as jnp

    twice = cg.elementwise("T x", "T y", "y = x + x")
    assert "using T = float;" in twice.code(jnp.ones(3))
    ```

    Args:
      *args: the arguments of a call, as arrays or jax.ShapeDtypeStructs.
      **kwargs: the keyword arguments of a call.

    Returns:
      The source: the function for one element, and the loops around it.

    Raises:
      GateDefinitionError: a call with these arguments would raise it.
    """
    return self._core.source(args, kwargs)


def _coefficients(
  of: ElementwiseCallee, suffix: str, code: Code, like: Callable[..., Any] | None
) -> ElementwiseCallee:
  """Makes the kernel of a derivative's coefficients, compiled with the same options as `of`."""
  compiler = {f.name: getattr(of.made_with, f.name) for f in dataclasses.fields(CompilerOptions)}
  options = ElementwiseOptions(**compiler, like=like)
  made = ElementwiseCallee(f"{of.name}.{suffix}", code, options)
  made.hint, made.part_of = _LINEAR, of
  label = of.label

  def refuse(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    fault = "jvp= defines only the first derivative"
    like = "a JAX function of the same arguments, for higher derivatives"
    raise GateDefinitionError(f"{label}: {fault}; pass like= as well, {like}")

  if like is None:
    made.set_jvp(refuse)
  return made


def _letters(key: str) -> dict[str, str]:
  parts = (part.partition("=") for part in key.partition(":")[0].split(",") if part)
  return {name: dtype for name, _, dtype in parts}


def _result_types(label: str, code: Code, *operands: Any, **static: Any) -> Any:
  """Returns the dtypes of the results and their shape, to which the arguments broadcast."""
  bound = code.bindings(label, operands, static)
  shapes = [x.shape for p, x in zip(code.inputs, operands, strict=True) if not p.raw]
  try:
    shape = jnp.broadcast_shapes(*shapes) if shapes else static.get("size", ())
  except ValueError:
    named = ", ".join(f"'{p.name}' {list(s)}" for p, s in zip(code.mapped, shapes, strict=True))
    fault = f"expected arguments whose shapes broadcast, got {named}"
    raise GateDefinitionError(f"{label}: {fault}") from None
  results = [jax.ShapeDtypeStruct(shape, p.dtype(bound)) for p in code.outputs]
  return results[0] if len(results) == 1 else tuple(results)


def _size(label: str, code: Code, size: Any) -> tuple[int, ...]:
  if names := ", ".join(repr(p.name) for p in code.mapped):
    shape = f"the results have the shape to which {names} broadcast"
    expected = "pass size= only if all arguments are raw"
    raise GateDefinitionError(f"{label}: got size={size!r}, but {shape}; {expected}")
  extents = tuple(size) if isinstance(size, (tuple, list)) else (size,)
  if not all(is_open(e) or (isinstance(e, (int, np.integer)) and e >= 0) for e in extents):
    got = "none" if size is None else repr(size)
    expected = "expected size=, an integer or a shape, since no argument has the results' shape"
    raise GateDefinitionError(f"{label}: {expected}; got {got}")
  return tuple(e if is_open(e) else int(e) for e in extents)
