# SPDX-License-Identifier: Apache-2.0
"""Right and wrong uses of callgate, for type checkers: test_types.py compares what they report.

A line that ends in `# error` is wrong for all of them, one with `# error: pyright` for it alone.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import torch

import callgate as cg

x = jnp.ones(3)


# -- a gate has the parameters of its function -----------------------------------------------------
@cg.gate(out=lambda x, order: x)
def ranked(x: np.ndarray | Any, *, order: int = 2) -> np.ndarray:
  return x[:order]


assert_type(ranked(x), jax.Array)
ranked(x, order=3)
ranked(x=2.0)
ranked(x, ordr=3)  # error
ranked(x, order="3")  # error
ranked(x, 3)  # error
ranked()  # error
assert_type(jax.vmap(ranked)(x), jax.Array)
jax.jit(ranked)(x)


@cg.gate(like=jnp.cumsum)
def plain(x, axis=0):
  return np.cumsum(x, axis)


plain(x, axis=1)
plain(x, axes=1)  # error


@cg.gate(out=x)
def strict(x: np.ndarray) -> np.ndarray:
  return x


strict(np.ones(3))
strict(x)  # error


# -- methods have it without the object ------------------------------------------------------------
class Solver:
  tolerance = 1e-3

  @cg.gate(out=lambda x, steps: x)
  def solved(self, x: np.ndarray | Any, *, steps: int = 1) -> np.ndarray:
    return x[:steps] * self.tolerance


assert_type(Solver().solved(x), jax.Array)
Solver().solved(x, steps=2)
Solver().solved(x, stps=2)  # error
Solver().solved(x, x)  # error
assert_type(Solver.solved(Solver(), x), jax.Array)
Solver.solved.check(Solver(), x)
Solver().solved.check(x)  # error
jax.jit(Solver().solved)(x)


# -- and returns what that does, in JAX's arrays ---------------------------------------------------
@cg.gate(out=lambda x: (x, x))
def both(x: Any) -> tuple[np.ndarray, np.float32]:
  return x, np.float32(1)


@cg.gate(effect="io")
def nothing(x: Any) -> None:
  pass


assert_type(nothing(x), tuple[()])
first, second = both(x)
assert_type(first, jax.Array)


@cg.gate(out=lambda x: {"mean": x})
def named(x: Any) -> dict[str, np.ndarray]:
  return {"mean": x}


assert_type(named(x)["mean"], jax.Array)


@cg.gate(out=lambda x: x)
def unknown(x: Any) -> Any:
  return x


unknown(x)["mean"].block_until_ready()


# -- the parameters that callgate fills are none of the call's -------------------------------------
@cg.gate(out=lambda x: x, style="inplace")
def inplace(out: np.ndarray, x: Any, scale: float = 1) -> None:
  out[...] = x


@cg.gate(out=lambda x: x, style="context")
def in_context(context: cg.Context, out: np.ndarray, x: Any) -> None:
  out[...] = x


inplace(x)
inplace(x, scale=2)
inplace(x, x, 2)  # error
inplace(x, scal=2)  # error
in_context(x)
in_context(x, x, x)  # error


# -- all ways to make one --------------------------------------------------------------------------
def add(x: Any, y: Any) -> np.ndarray:
  return x + y


def add_into(out: np.ndarray, x: Any, y: Any) -> None:
  out[...] = x + y


cg.gate(add, out=x)(x, y=x)
cg.gate(add, out=x)(x, z=x)  # error
cg.gate(add_into, out=x, style="inplace")(x, y=x)
cg.gate(add_into, out=x, style="inplace")(x, x, x)  # error
cg.gate(add, out=x, effekt="io")  # error
cg.gate(add, out=x, effect="oi")  # error
cg.gate(add_into, out=x, style="inplaced")  # error
cg.gate(np.sort, out=x)(x, axs=1)  # error
kept: cg.Gate = cg.gate(add, out=x)
kept(1, 2, 3)


@ranked.defjvp
def rule(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
  return primals[0], tangents[0]


rule((x,), (x,))
rule((x,))  # error

assert_type(cg.call(np.sort, x, x), jax.Array)
assert_type(cg.call(np.sort, (x, x), x, effect="io"), tuple[jax.Array, ...])
cg.call(np.sort, lambda x: {"a": x}, x)["a"].block_until_ready()


# -- kernels ---------------------------------------------------------------------------------------
@cg.numba(out=lambda x: x)
def doubled(x: Any, *, times: int = 2) -> np.ndarray:
  return x * times


@cg.numba(out=lambda x: x, parallel=True)
def written(out: np.ndarray, x: Any, *, times: int = 2) -> None:
  out[:] = x * times


@cg.numba(out=lambda x: x)
def unannotated(out, x, *, times=2):
  for i in range(x.size):
    out[i] = x[i] * times


assert_type(doubled(x), jax.Array)
doubled(x, times=3)
doubled(x, time=3)  # error
written(x, times=3)
written(x, x, times=3)  # error
unannotated(x, times=3)
unannotated(x, time=3)  # error: pyright
cg.numba(add, out=x)(x, z=x)  # error
cg.numba(add, out=x, fastmat=True)  # error
kernel: cg.Kernel = cg.cpp("void f(cg::In<float> x, cg::Out<float> y) { y[0] = x[0]; }")
kernel(1, 2, 3)


# -- PyTorch ---------------------------------------------------------------------------------------
@cg.torch
def distance(x: torch.Tensor | Any, y: torch.Tensor | Any) -> torch.Tensor:
  return torch.linalg.vector_norm(x - y)


@cg.torch(random=True)
def noise(x: torch.Tensor | Any) -> torch.Tensor:
  return x + torch.randn(3)


@cg.torch(out=x, style="inplace")
def halved(out: torch.Tensor, x: torch.Tensor | Any) -> None:
  torch.mul(x, 0.5, out=out)


assert_type(distance(x, y=x), jax.Array)
distance(x)  # error
distance(x, z=x)  # error
assert_type(noise(x, rng=jax.random.key(0)), jax.Array)
halved(x)
halved(x, x)  # error
model = cg.torch(torch.nn.Linear(3, 3))
assert_type(model.params, dict[str, jax.Array])
model(model.params, x)
model.parms  # error  # noqa: B018


# -- what passes through ---------------------------------------------------------------------------
assert_type(cg.tap(x, print), jax.Array)
assert_type(cg.tap((x, {"y": x}), "channel", every=2), tuple[jax.Array, dict[str, jax.Array]])
cg.tap(x, print, evry=2)  # error
cg.print("{}", x, orderd=True)
