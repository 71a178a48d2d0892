# SPDX-License-Identifier: Apache-2.0
"""The table of transformations that calls of every kind go through, and its oracle.

The primitives go through all pairs: calls, taps, kernels, and parts with rules of their own. A part
that is made of them goes through `groups`, which are all pairs in a soak alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from property_checks import is_soak
from quick_xla import QUICKLY_COMPILED

import callgate as cg

F = Callable[[Any], Any]
X = jnp.array([0.4, -0.7, 1.1])


def reference(x: Any) -> Any:
  return jnp.sin(x) * (1 + jnp.sum(x))


def on_host(x: Any) -> Any:
  return np.sin(x) * (1 + np.sum(x, dtype=np.float32))


def scan(f: F) -> F:
  return lambda x: jax.lax.scan(lambda c, i: (0.5 * f(c) + i, c), x, jnp.arange(2.0))[0]


def while_loop(f: F) -> F:
  return lambda x: jax.lax.while_loop(
    lambda c: c[0] < 2, lambda c: (c[0] + 1, 0.5 * f(c[1]) + c[1]), (0, x)
  )[1]


def lanes_apart(f: F) -> F:
  """A while loop that ends after a different number of rounds in each lane."""

  def lane(n: Any, x: Any) -> Any:
    body = lambda c: (c[0] + 1, 0.5 * f(c[1]))
    return jax.lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

  return lambda x: jax.vmap(lane, (0, None))(jnp.array([2, 0, 1]), x).sum(0)


def custom_jvp(f: F) -> F:
  around = jax.custom_jvp(lambda x: f(x))
  around.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
  return around


def custom_vjp(f: F) -> F:
  around = jax.custom_vjp(lambda x: f(x))
  around.defvjp(lambda x: jax.vjp(f, x), lambda pullback, ct: pullback(ct))
  return around


def cond(f: F) -> F:
  return lambda x: jax.lax.cond(x[0] > 0, lambda y: f(y) * 2, lambda y: y + f(-y), x)


def switch(f: F) -> F:
  branches = [f, lambda y: f(y + 1), lambda y: y]
  return lambda x: jax.lax.switch((x[1] > 0).astype(int), branches, x)


TRANSFORMATIONS: dict[str, Callable[[F], F]] = {
  "jit": jax.jit,
  "nested jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + jax.jit(f)(2 * x)),
  "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, -x])).sum(0),
  "vmap of axis 1": lambda f: lambda x: jax.vmap(f, 1, -1)(jnp.stack([x, x + 1], 1)).sum(-1),
  "grad": lambda f: jax.grad(lambda x: (f(x) * X).sum()),
  "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
  "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
  "checkpoint": jax.checkpoint,
  "scan": scan,
  "while": while_loop,
  "while with lanes apart": lanes_apart,
  "cond": cond,
  "switch": switch,
  "custom_jvp": custom_jvp,
  "custom_vjp": custom_vjp,
}
FORWARD = {"jvp", "linearize"}
LOOPS = {"while", "while with lanes apart"}


def is_valid(chain: Sequence[str]) -> bool:
  """True if JAX itself takes the chain (outermost first), whatever is in the middle."""
  for i, outer in enumerate(chain):
    inside = set(chain[i + 1 :])
    if outer == "grad" and inside & LOOPS:
      return False  # no reverse mode through while_loop
    if outer == "custom_vjp" and inside & LOOPS:
      return False  # its rule is made with jax.vjp
    if outer in FORWARD | {"custom_jvp"} and "custom_vjp" in inside:
      return False  # no forward mode through custom_vjp
  return True


def build(chain: Sequence[str], f: F) -> F:
  for name in reversed(chain):
    f = TRANSFORMATIONS[name](f)
  return f


def run(chains: Sequence[Sequence[str]], f: F) -> list[np.ndarray]:
  """All the chains as one program, which compiles faster than one each."""
  program = jax.jit(
    lambda x: [build(chain, f)(x) for chain in chains],
    compiler_options=QUICKLY_COMPILED,
  )
  return [np.asarray(y) for y in program(X)]


@functools.cache
def expected(chains: tuple[Sequence[str], ...], truth: F = reference) -> list[np.ndarray]:
  return run(chains, truth)


def gate(effect: Any) -> F:
  return cg.gate(on_host, like=reference, effect=effect)


def assert_chains_agree(
  chains: Sequence[Sequence[str]],
  effect: Any = "pure",
  make: Callable[[Any], F] = gate,
  truth: F = reference,
  not_by_jax: Sequence[str] = (),
  by_jax: Sequence[Sequence[str]] | None = None,
) -> None:
  """Compares what `make(effect)` gives, on both engines, with the reference.

  `not_by_jax`: what JAX's own callbacks can't be in. `by_jax`: the chains for them, where not all.
  """
  want = dict(zip(chains, expected(tuple(chains), truth), strict=True))
  results = {"callgate": dict(zip(chains, run(chains, make(effect)), strict=True))}
  if effect == "pure":
    some = chains if by_jax is None else [chain for chain in chains if chain in by_jax]
    some = [chain for chain in some if not set(chain) & set(not_by_jax)]
    with cg.config(engine="jax"):
      results["jax"] = dict(zip(some, run(some, make(effect)), strict=True))
  for engine, found in results.items():
    for chain, a in found.items():
      b = want[chain]
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"{engine}: {chain}")


PAIRS = [pair for pair in itertools.product(TRANSFORMATIONS, repeat=2) if is_valid(pair)]
# An effect in a loop that is linearized would happen twice: refused.
EFFECT_PAIRS = [pair for pair in PAIRS if not (pair[0] == "linearize" and "while" in pair[1])]
_NAMES = list(TRANSFORMATIONS)


def diagonal(number: int, without: Sequence[str] = ()) -> list[tuple[str, str]]:
  """Pairs for effects with each transformation once as the outer and once as the inner one."""
  pairs = [(name, _NAMES[(i + number) % len(_NAMES)]) for i, name in enumerate(_NAMES)]
  return [pair for pair in pairs if pair in EFFECT_PAIRS and not set(pair) & set(without)]


def groups(*numbers: int, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Any]:
  """Chains for a part that is made of others, a list for each program: parameters of a test.

  A check takes `diagonal(number)` of each number, a soak all pairs.
  """
  return [pairs[i::4] for i in range(4)] if is_soak() else [diagonal(n) for n in numbers]


TRIPLES = [chain for chain in itertools.product(TRANSFORMATIONS, repeat=3) if is_valid(chain)]
