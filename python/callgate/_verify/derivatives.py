# SPDX-License-Identifier: Apache-2.0
"""Questions about derivatives: forward mode, reverse mode, second order, linearity.

Each tangent element is as large as its argument's element, so that a step keeps the sign. Elements
at a kink, or whose steps leave the function's domain, are left out: there the differences to both
sides disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import derivatives
from callgate._core.errors import GateDefinitionError
from callgate._verify.subject import Fault, NotAsked, Subject, difference, is_fine, said, wide

# Parts of messages that report a missing derivative, which is no fault.
_MISSING = (
  "has no derivative", "has no forward mode", "has no transpose", "expected solve_transposed=",
  "draws random numbers", "expected matvec=",
)  # fmt: skip
_STEPS = (4.0, 1.0, 0.25)  # in units of the cube root of epsilon
_HIDDEN = 0.3  # the largest share of rounding in a slope
_AGREE = 1e-2  # the largest relative difference of a derivative from its finite difference
_NOWHERE = "not differentiable at these arguments"


def linear(subject: Subject) -> str:
  """Compares calls on sums and multiples, in the arguments of `linear=`."""
  core = subject.core
  if core.linear is False:
    raise NotAsked("not declared linear")
  subject.compared()
  places = sorted(derivatives.linear_leaves(core, subject.tree))
  xs = subject.values()
  moved = {i: v for i in places if (v := _tangent(xs[i], np.random.default_rng(1))) is not None}
  if not moved:
    raise NotAsked("no linear argument has floating-point or complex numbers")
  fine = [x.dtype for x in (*(xs[i] for i in moved), *subject.results) if not is_fine(x.dtype)]
  if fine:
    raise NotAsked(f"{fine[0].name} is not precise enough")

  def at(make: Callable[[Any, Any], Any]) -> list[Any]:
    given = [make(x, moved[i]).astype(x.dtype) if i in moved else x for i, x in enumerate(xs)]
    return subject.run(subject.jitted, given)

  whole, first, second = at(lambda x, v: 2 * x + v), at(lambda x, v: x), at(lambda x, v: v)
  summed = [(2 * a + b).astype(a.dtype) for a, b in zip(first, second, strict=True)]
  if found := difference(summed, whole):
    raise Fault(f"f(2x + v) is not 2 f(x) + f(v): {found}")
  return "f(2x + v) = 2 f(x) + f(v)"


def jvp(subject: Subject) -> str:
  """Compares tangents of the results with finite differences."""
  one = _Differentiable.of(subject)
  moved = _possible(one.jvp, "forward mode")
  one.compare_values("jvp", lambda *xs: jax.jvp(one.of_arrays, xs, one.tangents())[0])
  return _near(one, lambda vs: subject.run(moved, [*one.xs, *vs]))


def vjp(subject: Subject) -> str:
  """Compares cotangents with tangents, or with finite differences if there is no forward mode."""
  one = _Differentiable.of(subject)
  back = _possible(one.vjp, "reverse mode")
  try:
    forward = _possible(one.jvp, "forward mode")
  except NotAsked:
    one.compare_values("vjp", lambda *xs: jax.vjp(one.of_arrays, *xs)[0])
    return _near_back(one, back)
  tangents = subject.run(forward, [*one.xs, *one.vs])
  if not all(np.isfinite(wide(t)).all() for t in tangents):
    raise NotAsked(_NOWHERE)
  cotangents = [_along(t, t.dtype) for t in tangents]
  _same_product(cotangents, tangents, subject.run(back, [*one.xs, *cotangents]), one.vs)
  return "as forward mode"


def second_order(subject: Subject) -> str:
  """Compares second derivatives with finite differences of first derivatives."""
  core = subject.core
  if core.gradient is not None and core.jvp_rule is None and core.vjp_rules is None:
    raise NotAsked(
      "gradient='finite-difference': differences of differences are not precise enough"
    )
  one = _Differentiable.of(subject)
  try:
    _possible(one.jvp, "forward mode")
  except NotAsked:
    _possible(one.vjp, "reverse mode")
    rng = np.random.default_rng(2)
    cotangents = [_random(y, rng) for y in subject.run(one.call, one.xs)]
    twice = one.but(lambda xs: one.pulled(xs, cotangents))
    return _near_back(twice, _possible(twice.vjp, "second order"))
  twice = one.but(lambda xs: one.pushed(xs, one.vs))
  moved = _possible(twice.jvp, "second order")
  return _near(twice, lambda vs: subject.run(moved, [*one.xs, *vs]))


# -- the function ----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, eq=False)
class _Differentiable:
  """The call as a function of its differentiable arrays, with its differentiable results.

  Attributes:
    subject: the call.
    function: a function from a list of arrays to a list of arrays.
    xs: the arrays.
    vs: a tangent for each array.
  """

  subject: Subject
  function: Callable[[Sequence[Any]], Sequence[Any]]
  xs: list[Any]
  vs: list[Any]

  @classmethod
  def of(cls, subject: Subject) -> _Differentiable:
    core, values = subject.core, subject.values()
    subject.compared()
    places = set(range(len(values)))
    if not (core.has_rule or core.traits.autograd):
      if core.linear is False:
        raise NotAsked("no derivative: no rule, like=, gradient= or linear=")
      places = set(derivatives.linear_leaves(core, subject.tree))
    if (frozen := getattr(core, "frozen", None)) is not None:
      places -= frozen(jax.tree.unflatten(subject.tree, range(len(values)))[0])
    rng = np.random.default_rng(0)
    tangents = {i: _tangent(values[i], rng) for i in sorted(places) if is_fine(values[i].dtype)}
    moved = {i: v for i, v in tangents.items() if v is not None}
    outputs = [i for i, y in enumerate(subject.results) if is_fine(y.dtype)]
    if not moved or not outputs:
      which = "argument" if not moved else "result"
      raise NotAsked(f"no {which} of a dtype that is precise enough for finite differences")
    fixed = subject.leaves()

    def function(xs: Sequence[Any]) -> list[Any]:
      given = list(fixed)
      for i, x in zip(moved, xs, strict=True):
        given[i] = x
      found = subject.flat(*given)
      return [found[i] for i in outputs]

    return cls(subject, function, [values[i] for i in moved], list(moved.values()))

  def but(self, function: Callable[[Sequence[Any]], Sequence[Any]]) -> _Differentiable:
    """Returns another function of the same arrays."""
    return dataclasses.replace(self, function=function)

  @functools.cached_property
  def call(self) -> Callable[..., Any]:
    return jax.jit(self.of_arrays)

  @functools.cached_property
  def jvp(self) -> tuple[Any, Sequence[Any]]:
    """Returns a function from arrays and tangents to the results' tangents, and its arguments."""
    count = len(self.xs)
    moved = jax.jit(lambda *given: self.pushed(given[:count], given[count:]))
    return moved, (*self.xs, *self.vs)

  @functools.cached_property
  def vjp(self) -> tuple[Any, Sequence[Any]]:
    """Returns a function from arrays and cotangents to arrays' cotangents, and its arguments."""
    count = len(self.xs)
    moved = jax.jit(lambda *given: self.pulled(given[:count], given[count:]))
    return moved, (*self.xs, *jax.eval_shape(self.call, *self.xs))

  def of_arrays(self, *xs: Any) -> list[Any]:
    return list(self.function(xs))

  def tangents(self) -> tuple[Any, ...]:
    return tuple(map(jnp.asarray, self.vs))

  def compare_values(self, what: str, program: Callable[..., Any]) -> None:
    """Raises where a program with derivatives has other results than the call."""
    run = self.subject.run
    if found := difference(run(self.call, self.xs), run(jax.jit(program), self.xs)):
      raise Fault(f"the results that jax.{what} gives beside the derivative: {found}")

  def pushed(self, xs: Sequence[Any], vs: Sequence[Any]) -> Sequence[Any]:
    primals, tangents = (tuple(map(jnp.asarray, some)) for some in (xs, vs))
    return jax.jvp(self.of_arrays, primals, tangents)[1]

  def pulled(self, xs: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
    back = jax.vjp(self.of_arrays, *map(jnp.asarray, xs))[1]
    return back([jnp.asarray(c) for c in cotangents])


def _possible(made: tuple[Any, Sequence[Any]], what: str) -> Callable[..., Any]:
  """Returns the function if it can be lowered; raises NotAsked if there is no such derivative."""
  function, given = made
  try:
    function.lower(*given)  # raises here if there is no forward mode
  except GateDefinitionError as error:
    if any(part in str(error) for part in _MISSING):
      raise NotAsked(f"no {what}: {said(error).removeprefix('GateDefinitionError: ')}") from error
    raise
  return function


# -- numbers ---------------------------------------------------------------------------------------
def _random(x: Any, rng: np.random.Generator) -> Any:
  """Returns random numbers of magnitude 0.5 to 1 and either sign, in an array's type."""
  made = rng.uniform(0.5, 1, x.shape) * rng.choice((-1, 1), x.shape)
  if x.dtype.kind == "c":
    made = made + 1j * rng.uniform(0.5, 1, x.shape) * rng.choice((-1, 1), x.shape)
  return np.asarray(made).astype(x.dtype)


def _along(tangent: Any, dtype: Any) -> Any:
  """Returns a cotangent whose elements have a tangent's signs, so that no products cancel."""
  made = np.random.default_rng(3).uniform(0.5, 1, tangent.shape)
  sizes = np.abs(wide(tangent))
  turned = np.conj(wide(tangent)) / np.where(sizes > 0, sizes, 1)
  return np.asarray(made * np.where(sizes > 0, turned, 1)).astype(dtype)


def _tangent(x: Any, rng: np.random.Generator) -> Any:
  """Returns a tangent as large as each element; None for empty or integer arrays."""
  if not is_fine(x.dtype) or x.size == 0:
    return None
  sizes = np.abs(wide(x))
  sizes = np.where(np.isfinite(sizes), sizes, 1.0)
  largest = sizes.max() or 1.0
  sizes = np.where(sizes > 0, sizes, largest)
  return (wide(_random(x, rng)) * sizes).astype(x.dtype)


def _alike(x: Any, v: Any) -> Any:
  """Returns a tangent with the structure of a square matrix: symmetric, hermitian or triangular."""
  if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
    return v
  turned = np.swapaxes(x, -1, -2)
  if np.array_equal(x, turned.conj()):
    return ((v + np.swapaxes(v, -1, -2).conj()) / 2).astype(x.dtype)
  if np.array_equal(x, turned):
    return ((v + np.swapaxes(v, -1, -2)) / 2).astype(x.dtype)
  for part in (np.tril, np.triu):
    if np.array_equal(x, part(x)):
      return part(v)
  return v


@dataclasses.dataclass(eq=False)
class _Slope:
  """The finite difference of one result.

  Attributes:
    central: the central difference of each element.
    smooth: True for elements whose differences to both sides agree.
    noise: the rounding error of `central`.
  """

  central: Any
  smooth: Any
  noise: float


def _slopes(one: _Differentiable, vs: Sequence[Any]) -> list[list[_Slope]]:
  """Returns the finite differences of all results, for each step size."""
  kinds = [x.dtype for x in (*one.xs, *one.subject.results) if is_fine(x.dtype)]
  epsilon = max(float(jnp.finfo(kind).eps) for kind in kinds)

  def at(times: float) -> list[Any]:
    pairs = zip(one.xs, vs, strict=True)
    moved = [(wide(x) + times * wide(v)).astype(x.dtype) for x, v in pairs]
    return [wide(y) for y in one.subject.run(one.call, moved)]

  here = at(0)
  found: list[list[_Slope]] = []
  with np.errstate(all="ignore"):
    for step in (factor * epsilon ** (1 / 3) for factor in _STEPS):
      results = zip(at(step), here, at(-step), strict=True)
      found.append([_slope(*of_one, step, epsilon) for of_one in results])
    # At a jump the difference stays the same for smaller steps, so the slope grows. Kinks on both
    # sides may look like a slope to one step, and not to the next.
    for wider, narrower in itertools.pairwise(found):
      for a, b in zip(wider, narrower, strict=True):
        apart = np.abs(a.central - b.central)
        most = np.maximum(np.abs(a.central), np.abs(b.central))
        a.smooth &= b.smooth & (apart <= 0.5 * most + a.noise + b.noise)
        if wider is found[-2]:
          b.smooth &= a.smooth
  return found


def _slope(up: Any, here: Any, down: Any, step: float, epsilon: float) -> _Slope:
  noise = 16 * epsilon * np.abs(here[np.isfinite(here)]).max(initial=0.0)
  after, before = up - here, here - down
  most = np.maximum(np.abs(after), np.abs(before))
  central = (up - down) / (2 * step)
  smooth = np.isfinite(central) & (np.abs(after - before) <= 0.1 * most + noise)
  return _Slope(central, np.array(smooth), noise / step)


def _near(one: _Differentiable, tangents: Callable[[Any], list[Any]]) -> str:
  """Compares tangents with finite differences of a function, in one direction.

  If they disagree and the arguments are symmetric or triangular matrices, it tries a direction that
  keeps this structure, because the callable may read only a part of such a matrix.
  """
  faults: list[str] = []
  structured = [_alike(x, v) for x, v in zip(one.xs, one.vs, strict=True)]
  changed = any(a is not b for a, b in zip(structured, one.vs, strict=True))
  for vs in (one.vs, structured) if changed else (one.vs,):
    by_result = zip(*_slopes(one, vs), strict=True)
    texts = [_apart(steps, wide(got)) for steps, got in zip(by_result, tangents(vs), strict=True)]
    if all(text is None for text in texts):
      raise NotAsked(_NOWHERE)
    wrong = [f"result {index}{text}" for index, text in enumerate(texts) if text]
    if not wrong:
      return "as finite differences" + ("" if vs is one.vs else ", in directions of its structure")
    faults += wrong
  raise Fault(faults[0])


def _apart(steps: Sequence[_Slope], got: Any) -> str | None:
  """Returns the first element of a tangent that is no slope; "" if none, None if no slope is known.

  A step is skipped if rounding hides its slope. The widest remaining step, with the least rounding,
  counts.
  """
  asked, agreed = np.zeros(got.shape, bool), np.zeros(got.shape, bool)
  for slope in steps:
    kept = [np.abs(np.where(slope.smooth, x, 0)).max(initial=0.0) for x in (slope.central, got)]
    if slope is not steps[0] and slope.noise > _HIDDEN * max(kept):
      continue
    with np.errstate(invalid="ignore"):
      near = np.abs(slope.central - got) <= _AGREE * max(kept) + slope.noise
    asked |= slope.smooth
    agreed |= slope.smooth & near
  if not np.any(asked):
    return None if got.size else ""
  if np.all(agreed == asked):
    return ""
  where = tuple(int(n) for n in np.argwhere(asked & ~agreed)[0])
  slope = next(slope for slope in (steps[1], *steps) if slope.smooth[where])
  at = f", at {list(where)}" if where else ""
  expected = f"expected {slope.central[where]:.6g} by finite differences"
  return f"{at}: {expected}, got {got[where]:.6g}"


def _near_back(one: _Differentiable, back: Callable[..., Any]) -> str:
  """Compares cotangents with finite differences: <ct, J v> equals <J^T ct, v>."""
  fault = ""
  kinds = [y.dtype for y in one.subject.run(one.call, one.xs)]
  for slopes in _slopes(one, one.vs):
    central = [np.where(s.smooth, s.central, 0) for s in slopes]
    cts = [_along(t, kind) for t, kind in zip(central, kinds, strict=True)]
    smooth = [np.where(s.smooth, c, 0).astype(c.dtype) for c, s in zip(cts, slopes, strict=True)]
    noise = sum(float(np.abs(wide(c)).sum() * s.noise) for c, s in zip(cts, slopes, strict=True))
    largest = sum(float(np.abs(wide(c) * t).sum()) for c, t in zip(smooth, central, strict=True))
    if not any(np.any(s.smooth) for s in slopes) or (fault and noise > _HIDDEN * largest):
      continue
    found = one.subject.run(back, [*one.xs, *smooth])
    known = all(np.isfinite(wide(x)).all() for x in found)
    if not known and not all(np.all(s.smooth) for s in slopes):  # 0 times the slope of a kink
      continue
    try:
      _same_product(smooth, central, found, one.vs, noise=noise)
    except Fault as error:
      fault = str(error)
      continue
    return "as finite differences"
  if not fault:
    raise NotAsked(_NOWHERE)
  raise Fault(f"{fault} by finite differences")


def _same_product(
  cts: Sequence[Any], tangents: Sequence[Any], found: Sequence[Any], vs: Sequence[Any],
  noise: float = 0.0,
) -> None:  # fmt: skip
  """Raises if the real parts of <ct, tangent> and <cotangent, v> differ."""
  terms = [
    [np.real(wide(x) * wide(y)) for x, y in zip(a, b, strict=True)]
    for a, b in ((cts, tangents), (found, vs))
  ]
  want, got = (sum(float(t.sum()) for t in side) for side in terms)
  largest = max(sum(float(np.abs(t).sum()) for t in side) for side in terms)
  if not abs(want - got) <= _AGREE * max(abs(want), abs(got)) + 1e-4 * largest + noise:
    raise Fault(f"cotangents times tangents: expected {want:.6g}, got {got:.6g}")
