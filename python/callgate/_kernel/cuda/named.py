"""CUDA kernels whose parameters have names and get their types from a call: Numba's and Triton's.

A call gives arrays, which become pointers or array structs, and numbers, which the program fixes;
the parameters that it leaves open take the results. `NamedKernel` binds the one to the other; what
a subclass adds is how a kernel is compiled for it. What a PTX text declares of a kernel's
parameters is what the driver goes by, so what a compiler says of them is held against it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import signatures, static_values
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel import launch
from callgate._kernel.cuda.kernel import CudaKernel
from callgate._kernel.cuda.options import NamedOptions
from callgate._kernel.launch import Extent
from callgate._kernel.program import CudaCall
from callgate._kernel.variants import Static

# Where a program holds the dtypes of NumPy's scalars among its static values.
_TYPES = "_dtypes"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Named:
  """A parameter of a kernel's function.

  Attributes:
    name: as in its source.
    constant: it takes no array.
    default: a static value; `NONE` where there is none.
  """

  name: str
  constant: bool = False
  default: Any = dataclasses.field(default_factory=lambda: NONE)


class _None:
  """Stands for a default that there isn't, since None may be one."""

  def __repr__(self) -> str:
    return "none"


NONE = _None()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Bound:
  """What a parameter is given in a call.

  Attributes:
    of: an operand, a result, or a static value.
    index: which operand or result.
    value: the type of an array, a ShapeDtypeStruct; or the static value: a number of Python's or
      NumPy's, or whatever the call gave.
  """

  of: str
  index: int
  value: Any


class NamedKernel(CudaKernel):
  """A kernel of named parameters.

  Attributes:
    named: the parameters of the function, in order.
    outputs: names of those that take results; () for the last ones that a call leaves open.
    constants: static values of parameters, given when the kernel was made.
  """

  def __init__(
    self,
    name: str,
    named: Sequence[Named],
    options: NamedOptions,
    constants: Mapping[str, Any] | None = None,
  ) -> None:
    self.named = tuple(named)
    self.constants = dict(constants or {})
    outputs = options.outputs or ()
    self.outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    super().__init__(name, None, options)
    self._check_names()
    self.parameters = tuple(
      p.name for p in self.named if p.name not in self.constants and p.name not in self.outputs
    )

  def _check_names(self) -> None:
    known = {p.name: p for p in self.named}
    for option, names in (("outputs", self.outputs), ("constants", self.constants)):
      for name in names:
        if name not in known:
          raise GateDefinitionError(
            f"{self.label}: {option}: expected names of parameters ({', '.join(known)}), got "
            f"'{name}'"
          )
    for name in self.outputs:
      if name in self.constants or known[name].constant:
        raise GateDefinitionError(
          f"{self.label}: outputs: expected parameters that take arrays, got '{name}', which is "
          "static"
        )

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    places = [p.name for p in self.named if p.name in self.parameters]
    if len(args) > len(places):
      raise GateDefinitionError(
        f"{self.label}: expected at most {len(places)} arguments ({', '.join(places)}), got "
        f"{len(args)}"
      )
    given = dict(zip(places, args, strict=False))
    for name, value in kwargs.items():
      if name in given or name not in places:
        what = "twice" if name in given else "which it doesn't take"
        raise GateDefinitionError(
          f"{self.label}: got argument '{name}' {what}; expected {', '.join(places)}"
        )
      given[name] = value
    arrays = [n for n in places if n in given and _is_array(given[n])]
    self._check_given(given, arrays)
    return tuple(given[n] for n in arrays), self._frozen(given, arrays)

  def _check_given(self, given: Mapping[str, Any], arrays: Sequence[str]) -> None:
    for parameter in self.named:
      if parameter.constant and parameter.name in arrays:
        raise GateDefinitionError(
          f"{self.label}: argument '{parameter.name}': expected a value that is known when the "
          f"program is traced, since the kernel is compiled for it; got an array "
          f"({given[parameter.name]})"
        )
      missing = parameter.name not in given and parameter.name in self.parameters
      if missing and parameter.default is NONE and (parameter.constant or self.outputs):
        raise GateDefinitionError(f"{self.label}: expected argument '{parameter.name}', got none")
    if self.outputs:
      return
    order = [p.name for p in self.named]
    last = max((order.index(name) for name in arrays), default=-1)
    for name in order[:last]:
      if name in self.parameters and name not in given and self._default(name) is NONE:
        raise GateDefinitionError(
          f"{self.label}: parameter '{name}' is left open before '{order[last]}', which got an "
          "array; results go to the last parameters, or to those that outputs= names"
        )

  def _default(self, name: str) -> Any:
    return next(p.default for p in self.named if p.name == name)

  def _frozen(self, given: Mapping[str, Any], arrays: Sequence[str]) -> Static:
    static: dict[str, Any] = {}
    types: list[str] = []
    for name, value in given.items():
      if name in arrays:
        continue
      if isinstance(value, np.generic):
        types.append(f"{name}={value.dtype.name}")
      if isinstance(value, (bool, int, float, complex, np.generic)):
        static[name] = static_values.number(self.label, name, value, None, what="argument")
        continue
      try:
        hash(value)
      except TypeError:
        raise GateDefinitionError(
          f"{self.label}: argument '{name}': expected an array or a hashable static value, got "
          f"{type(value).__name__}"
        ) from None
      static[name] = value
    if types:
      static[_TYPES] = ",".join(types)
    return tuple(sorted(static.items()))

  # -- plans -------------------------------------------------------------------------------------
  def bound(self, call: CudaCall) -> dict[str, Bound]:
    """What each parameter is given in a call, by name, in the order of the function.

    A result that shares its memory with an operand needs no parameter of its own.
    """
    static = self._static(call)
    open_ = [p.name for p in self.named if p.name not in static and p.name not in self.outputs]
    ins, results = len(call.operands), list(range(len(call.results)))
    wanted = ins + (0 if self.outputs else len(results))
    shared = set(self.aliases.values())
    own = [r for r in results if r not in shared]
    have = len(open_) + len(self.outputs) - sum(self._default(n) is not NONE for n in open_)
    if shared and have <= ins + len(own):
      results, wanted = own, ins + (0 if self.outputs else len(own))
    for name in reversed(list(open_)):
      if len(open_) > wanted and self._default(name) is not NONE:
        static[name] = self._default(name)
        open_.remove(name)
    takers = list(self.outputs) or open_[ins:]
    if len(open_) != wanted or len(takers) != len(results):
      raise GateDefinitionError(
        f"{self.label}: expected a parameter for each of {ins} arrays and {len(results)} results, "
        f"got ({', '.join(open_)}) for arrays{self._takers()}"
      )
    places = dict(zip(takers, results, strict=True))
    return {p.name: self._bound(p.name, open_, places, static, call) for p in self.named}

  def _takers(self) -> str:
    return f" and ({', '.join(self.outputs)}) for results" if self.outputs else " and results"

  def _static(self, call: CudaCall) -> dict[str, Any]:
    values = {**self.constants, **call.static}
    types = str(values.pop(_TYPES, ""))
    for entry in filter(None, types.split(",")):
      name, _, dtype = entry.partition("=")
      values[name] = np.asarray(values[name], dtype_named(dtype))[()]
    return values

  def _bound(
    self,
    name: str,
    open_: Sequence[str],
    takers: Mapping[str, int],
    static: Mapping[str, Any],
    call: CudaCall,
  ) -> Bound:
    if name in static:
      return Bound("static", -1, static[name])
    if name in takers:
      return Bound("result", takers[name], call.results[takers[name]])
    index = [n for n in open_ if n not in takers].index(name)
    return Bound("operand", index, call.operands[index])


def _is_array(value: Any) -> bool:
  """NumPy's scalars are numbers here, and what JAX made are arrays."""
  return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or (
    hasattr(value, "__jax_array__")
  )


def evaluated(given: Any, call: CudaCall) -> Any:
  """An option of a launch: as given, or what a function of the operands' types says.

  Static arguments that the function has parameters for are passed by name.
  """
  if not callable(given):
    return given
  return given(*call.operands, **signatures.accepted(given, call.static, filled=len(call.operands)))


def launch_extent(
  label: str, what: str, given: Any, call: CudaCall, *, lanes: bool = False
) -> Extent:
  """A grid or block.

  Args:
    label: of the kernel.
    what: the option, for messages.
    given: an int, a tuple, or a function: see `evaluated`.
    call: the call.
    lanes: set the z axis to the lanes that vmap="grid" gives the launch.
  """
  x, y, z = launch.extent(label, what, evaluated(given, call))
  return x, y, call.batch if lanes and call.batch is not None and z == 1 else z


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PARAM = re.compile(
  r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+\d+)\b"
  r"(?P<pointer>\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?"
  r"\s+[\w$]+(?:\[(?P<count>\d+)\])?"
)


@dataclasses.dataclass(frozen=True)
class Declared:
  """One parameter of a kernel, as declared.

  Attributes:
    size: in bytes.
    align: its alignment in bytes.
  """

  size: int
  align: int


def entries(ptx: str) -> dict[str, tuple[Declared, ...]]:
  """The kernels of a PTX text by name, each with its parameters."""
  text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
  return {m[1]: tuple(map(_declared, _PARAM.finditer(m[2] or ""))) for m in _ENTRY.finditer(text)}


def _declared(match: re.Match[str]) -> Declared:
  size = int(re.sub(r"\D", "", match["type"])) // 8
  align = int(match["align"]) if match["align"] else size
  return Declared(size * int(match["count"] or 1), align)


def offsets(declared: tuple[Declared, ...]) -> tuple[int, ...]:
  """Where each parameter lies in the block that a launch passes."""
  found: list[int] = []
  end = 0
  for parameter in declared:
    end = -(-end // parameter.align) * parameter.align
    found.append(end)
    end += parameter.size
  return tuple(found)
