# SPDX-License-Identifier: Apache-2.0
"""`callgate.cpp`: kernels from C++ source, compiled by the system's compiler on creation."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callgate import _callgate
from callgate._build import toolchain
from callgate._core import factories
from callgate._core import options as check
from callgate._core.dtypes import dtype_named
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._core.options import option
from callgate._kernel import source as _source
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.cuda import part
from callgate._kernel.files import compiled_form, installed, no_new_calls
from callgate._kernel.kernel import Kernel
from callgate._kernel.options import CompilerOptions, KernelOptions, LaunchOptions
from callgate._kernel.parameters import OPERANDS, RESULTS
from callgate._kernel.variants import Function, Static

# Kernels of one source share a turn, because they are one library. So do kernels that link
# libraries, because these may be the same. Guarded by _turns_lock.
_turns: weakref.WeakValueDictionary[str, _callgate.KernelTurn] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()
# Included before the user's source.
_HEADERS = ("algorithm", "cmath", "limits", "numeric", "vector")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CppOptions(CompilerOptions, LaunchOptions, KernelOptions):
  """The options of `callgate.cpp`; the launch options are for `cuda_source`.

  Attributes:
    thread_safe: True lets several calls run at the same time, from several devices and programs,
      and runs the lanes of vmap="each" in parallel. By default calls take turns with all kernels of
      the same source that are not thread-safe; with `libraries` also with other kernels that link
      libraries.
    cuda_source: CUDA C++ with the same kernel, for programs for CUDA. It takes the arrays of the
      C++ function, in the same order, as pointers or views. A number that the C++ function takes by
      value is a `const T*` here. A number that the CUDA kernel takes by value is the C++ function's
      `cg::Attr` of the same name.
    cuda_kernel: the kernel's name in `cuda_source`, if that has several.
  """

  cuda_source: str | None = option(None, check.text)
  cuda_kernel: str | None = option(None, check.text)


@factories.of_two(CppOptions)
def cpp(source: str, function: str | None = None, /, *, options: CppOptions) -> Kernel:
  """Makes a JAX function of a C++ function, compiled once and cached on disk.

  ```python
  import callgate as cg, jax.numpy as jnp

  saxpy = cg.cpp(\"\"\"
    void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
      for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
    }\"\"\", out=lambda a, x, y: x)

  assert saxpy(2.0, jnp.ones(3), jnp.arange(3.0)).tolist() == [2.0, 3.0, 4.0]
  ```

  Args:
    source: C++20 source with a function `void name(...)` of callgate's views (see
      callgate/kernel.h). A template is compiled for the dtypes and ranks of each call; pass
      template parameters that don't follow from these by keyword. callgate includes kernel.h,
      <algorithm>, <cmath>, <limits>, <numeric> and <vector>.
    function: the function's name, if the source has several.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: the compiler rejects the source (the message has your line numbers), or there is
      no compiler.
    GateDefinitionError: an option is wrong.
  """
  what = options.label("cpp")
  check.text("cpp", "source", source)
  check.optional_texts("cpp", function=function)
  known = _source.find(what, source, function)
  label = f"kernel '{options.name or known.name}'"
  options = check.checked(label, options)
  cuda_source, cuda_kernel = options.cuda_source, options.cuda_kernel
  build_options = options.building()
  if cuda_source is None and any(x is not None for x in (options.grid, options.block, cuda_kernel)):
    problem = "expected these options only with cuda_source=, got one without it"
    raise GateDefinitionError(f"{label}: grid, block, cuda_kernel: {problem}")
  made = CppKernel(options.named(known.name), source, function, build_options, options)
  building = part.BuildOptions(
    tuple(options.cuda_options), build_options["include_dirs"], options.capabilities(label)
  )
  if cuda_source is not None:
    made.cuda = part.SourcePart(label, cuda_source, cuda_kernel, options, building, made.aliases)
  return Kernel(made)


class CppKernel(CpuKernel):
  """A kernel from C++ source; see `callgate.cpp`."""

  def __init__(
    self,
    name: str,
    source: str,
    function: str | None,
    build_options: dict[str, Any],
    options: KernelOptions,
    compiled: Any = None,
  ) -> None:
    self.source, self.build_options, self._given_function = source, build_options, function
    self._libraries: dict[str, Path] = {}  # variants compiled here
    self._from_files: dict[str, Path] = {}  # variants from `load_kernels`
    if compiled is not None:
      self.take_compiled(compiled)
    label = f"kernel '{name}'"
    self.cpp_function = _source.find(label, source, function)
    self._template = self.cpp_function.template
    self._plain = None if self._template else self._build(label, "")
    real = self._plain or self.cpp_function
    super().__init__(name, real.parameters, options)
    if self._turn is not None:
      with _turns_lock:
        self._turn = _turns.setdefault("" if build_options["libraries"] else source, self._turn)

  def variant_key(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> str:
    takers, given = self.cpp_function.parameters.takers, dict(static)
    sides = ((takers(OPERANDS, len(operands)), operands), (takers(RESULTS, len(results)), results))
    arrays = [pair for side in sides for pair in zip(*side, strict=False)]
    values = ((p.name, p.argument(self.label, given, arrays)) for p in self._template)
    return ",".join(f"{name}={value}" for name, value in values if value is not None)

  def compile(self, key: str) -> Function:
    if self._plain is not None:
      return self._plain
    bound = dict(part.split("=", 1) for part in key.split(",") if "=" in part)
    arguments = list[str]()
    for parameter in self._template:
      name = parameter.name
      value = bound.get(name, parameter.default)
      if parameter.is_type and name in bound:
        value = _source.cpp_type(dtype_named(value))
        if not value:
          known = ", ".join(_source.TYPES)
          problem = f"C++ kernels have no type for {bound[name]}; expected one of {known}"
          raise GateDefinitionError(f"{self.label}: {name}: {problem}")
      arguments.append(value)
    function = self._build(self.label, f"<{', '.join(arguments)}>")
    for read, real in zip(self.signature, function.parameters, strict=True):
      if read.kind is not real.kind:
        why = "because callgate reads a template's parameters before it is compiled"
        expected = f"expected its type written as cg::{real.kind.cpp}<...>, {why}"
        raise GateDefinitionError(f"{self.label}: parameter '{read.name}': {expected}")
    return function

  def _build(self, label: str, instance: str) -> Function:
    """Returns the function of one instance, from a loaded file or compiled here."""
    if library := self._from_files.get(instance):
      with contextlib.suppress(CompileError):  # such as an older C library here; compile instead
        loaded = toolchain.load(library, label)
        self._libraries[instance] = library
        return Function.built(library, loaded)
    what = f"{label}, for {self.cpp_function.name}{instance}" if instance else label
    library = toolchain.build(what, self._unit(instance), **self.build_options)
    loaded = toolchain.load(library, label)
    self._libraries[instance] = library
    return Function.built(library, loaded)

  def saved_form(self) -> dict[str, Any] | None:
    native = any("native" in flag for flag in self.build_options["flags"])
    return {
      "kind": "cpp",
      "name": self.name,
      "source": self.source,
      "function": self._given_function,
      "build_options": self.build_options,
      "thread_safe": self.thread_safe,
      "cuda": part.saved(self.cuda) if isinstance(self.cuda, part.SourcePart) else None,
      "compiled": compiled_form(self._from_files | self._libraries, native=native),
    }

  def take_compiled(self, compiled: Any) -> None:
    self._from_files.update(installed(compiled))

  def _unit(self, instance: str) -> str:
    """Returns the source plus the code of a library; without the kernel's own name."""
    function = self.cpp_function
    names = [p.name for p in function.parameters]
    complexes = "#include <complex>\n" if "complex" in instance + self.source else ""
    includes = "".join(f"#include <{header}>\n" for header in _HEADERS)
    return (
      f'{includes}{complexes}#include "callgate/kernel.h"\n'
      f'#line 1 "{function.name}"\n{self.source}\n#line 1 "callgate"\n'
      "namespace { callgate_kernel callgate_made = "
      f"::callgate::detail::describe<&::{function.qualified}{instance}>"
      f'("{", ".join([function.name, *names])}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made); }\n"
    )


def restore(form: dict[str, Any]) -> CppKernel:
  """Makes a kernel of its saved form; loaded programs have everything else that a call needs."""
  kernel = CppKernel(
    form["name"],
    form["source"],
    form["function"],
    {k: tuple(v) if isinstance(v, list) else v for k, v in form["build_options"].items()},
    KernelOptions(out=no_new_calls(form["name"]), thread_safe=form["thread_safe"]),
    form["compiled"],
  )
  if form.get("cuda") is not None:
    kernel.cuda = part.restored(kernel.label, form["cuda"])
  return kernel
