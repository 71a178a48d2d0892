"""The options of `callgate.numba`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from typing import Any, Literal

from callgate._core import options as check
from callgate._kernel.options import KernelOptions

NumbaStyle = Literal["return", "inplace"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NumbaOptions(KernelOptions):
  """The options of `callgate.numba`.

  Attributes:
    style: "inplace" (`fn(out, *args)`) or "return" (`fn(*args)`). Default: what the number of
      parameters says, and where defaults leave that open, whether the function returns a value.
    cast: allow same-kind casts of what the function returns (float64 to float32, say).
    parallel: loops over `numba.prange`, and array expressions, run on Numba's threads.
    fastmath: as for `numba.njit`.
    boundscheck: an index outside an array raises IndexError.
    error_model: "python" (a division by zero raises) or "numpy" (it gives inf or nan).
  """

  style: NumbaStyle | None = None
  cast: bool = False
  parallel: bool = False
  fastmath: bool | set[str] = False
  boundscheck: bool = False
  error_model: Literal["python", "numpy"] = "python"

  def __post_init__(self) -> None:
    check.name("numba", self.name)
    check.booleans("numba", cast=self.cast, parallel=self.parallel, boundscheck=self.boundscheck)
    check.choice("numba", "error_model", self.error_model, ("python", "numpy"))
    if not isinstance(self.fastmath, (set, frozenset)):
      check.boolean("numba", "fastmath", self.fastmath)
    elif not all(isinstance(flag, str) for flag in self.fastmath):  # pyright: ignore[reportUnnecessaryIsInstance]
      check.refuse("numba", "fastmath", "a bool or a set of LLVM's flags", self.fastmath)

  def of_numba(self) -> dict[str, Any]:
    """Those of Numba's compilation that are not its defaults."""
    defaults = {"parallel": False, "fastmath": False, "boundscheck": False, "error_model": "python"}
    given = {name: getattr(self, name) for name in defaults}
    return {name: v for name, v in given.items() if v and v != defaults[name]}
