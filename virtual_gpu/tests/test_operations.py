# SPDX-License-Identifier: Apache-2.0
"""JAX's operations on the virtual GPU agree with the CPU, each compiled by XLA for both.

`OPERATIONS` has for each name a function, its arguments, and the tolerance, or None for
that of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

Operation = tuple[Callable[..., Any], tuple[Any, ...], float | None]
OPERATIONS: dict[str, Operation] = {}
_random = np.random.default_rng(0)
_BF16, _F16, _F64 = jnp.bfloat16, np.float16, np.float64


def _add(name: str, function: Callable[..., Any], *args: Any, tol: float | None = None) -> None:
  assert name not in OPERATIONS, name
  OPERATIONS[name] = (function, args, tol)


def _names(text: str) -> list[str]:
  return text.split()


def _any(*shape: int, dtype: Any = np.float32) -> Any:
  return _random.standard_normal(shape or (37, 5)).astype(dtype)


def _positive(dtype: Any = np.float32) -> Any:
  return (np.abs(_any()) + 0.1).astype(dtype)


def _unit() -> Any:
  return np.clip(_any() / 4, -0.99, 0.99)


def _ints(low: int = -50, high: int = 50, dtype: Any = np.int32, shape: Any = (37, 5)) -> Any:
  return _random.integers(low, high, shape).astype(dtype)


def _elementwise() -> None:
  for name in _names(
    "sin cos tan exp exp2 expm1 tanh sinh cosh arctan sign floor ceil round trunc square abs "
    "negative isnan isfinite cbrt arcsinh"
  ):
    _add(name, getattr(jnp, name), _any() * 3)
  for name in _names("log log1p log2 log10 sqrt reciprocal"):
    _add(name, getattr(jnp, name), _positive())
  for name in _names("arcsin arccos arctanh"):
    _add(name, getattr(jnp, name), _unit())
  for name in _names(
    "add subtract multiply divide maximum minimum arctan2 hypot copysign nextafter logaddexp "
    "fmod remainder floor_divide"
  ):
    _add(name, getattr(jnp, name), _any(), _any() + 0.01)
  _add("rsqrt", lax.rsqrt, _positive())
  _add("power", jnp.power, _positive(), _any())
  _add("integer_pow", lambda x: x**7, _any())
  _add("where", lambda x, y: jnp.where(x > y, x, y - 1), _any(), _any())
  _add("clip", lambda x: jnp.clip(x, -0.5, 0.5), _any())
  for name in _names("erf lgamma digamma"):
    _add(name, getattr(lax, name), _positive(), tol=3e-5)
  _add("erf_inv", lax.erf_inv, _unit(), tol=3e-5)
  _add("erfc", lax.erfc, _any())
  _add("bessel_i1e", lax.bessel_i1e, _any())
  _add("igamma", lax.igamma, _positive(), _positive(), tol=1e-4)
  betainc = jax.scipy.special.betainc
  _add("betainc", betainc, _positive(), _positive(), np.abs(_unit()), tol=1e-4)
  for name in _names("relu gelu silu sigmoid softplus elu selu softmax log_softmax logsumexp"):
    _add(f"nn.{name}", getattr(jax.nn, name), _any())
  _add("round to even", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), _any() * 4)
  _add("reduce_precision", lambda x: lax.reduce_precision(x, 5, 7), _any())
  _add("complex", lambda x, y: jnp.abs(lax.complex(x, y) * lax.complex(y, x) + 1), _any(), _any())
  _add("complex exp", lambda x, y: jnp.exp(lax.complex(x, y)).imag, _any(), _any())


def _dtypes() -> None:
  for dtype in (_F16, _BF16, _F64):
    of = np.dtype(dtype).name
    for name in _names("sin exp log tanh sqrt"):
      _add(f"{name}.{of}", getattr(jnp, name), _positive(dtype))
    x, y = _any(dtype=dtype), _any(dtype=dtype)
    _add(f"add.{of}", jnp.add, x, y)
    _add(f"divide.{of}", jnp.divide, x, _positive(dtype))
    _add(f"sum.{of}", jnp.sum, x)
    _add(f"max.{of}", lambda x: x.max(0), x)
    _add(f"less.{of}", lambda x, y: x < y, x, y)
    _add(f"power.{of}", jnp.power, _positive(dtype), x)
  for name in _names(
    "add subtract multiply floor_divide remainder maximum minimum bitwise_and bitwise_or "
    "bitwise_xor gcd"
  ):
    _add(f"{name}.int32", getattr(jnp, name), _ints(), _ints(1, 9))
  for name in _names("int8 uint8 int16 uint16 uint32 int64 uint64"):
    x, y = _ints(1, 50, name), _ints(1, 9, name)
    _add(f"arithmetic.{name}", lambda x, y: x * y + x // y - x % y, x, y)
  shifts = lambda x, y: (x << y, x >> y, lax.shift_right_logical(x, y))
  _add("shifts", shifts, _ints(), _ints(0, 8))
  for name in _names("population_count clz bitwise_not"):
    _add(name, getattr(lax, name), _ints())
  _add("booleans", lambda x: ~(x > 0) & (x < 1), _any())
  everything = (np.float32, _F16, _BF16, _F64, np.int8, np.int32, np.int64, np.uint8, np.bool_)
  for dtype in (*everything, np.uint32):
    cast = lambda x, dtype=dtype: [x.astype(dtype).astype(to) for to in everything]
    _add(f"casts.{np.dtype(dtype).name}", cast, np.abs(_any() * 20))
  for name in ("float8_e4m3fn", "float8_e5m2"):
    _add(f"casts.{name}", lambda x, to=name: x.astype(to).astype(np.float32), _any() * 20)
  _add("bitcast", lambda x: lax.bitcast_convert_type(x, np.uint8), _any())


def _reductions() -> None:
  for name in _names("sum prod max min mean var std argmax argmin any all median"):
    for axis in (None, 0, 1):
      reduce = lambda x, name=name, axis=axis: getattr(jnp, name)(x, axis=axis)
      _add(f"{name} over {axis}", reduce, _any())
  large = _any(300, 700)
  _add("sum of many", jnp.sum, large, tol=1e-4)
  _add("sum of rows", lambda x: x.sum(1), large, tol=1e-4)
  _add("sum of columns", lambda x: x.sum(0), large, tol=1e-4)
  _add("sum in the middle", lambda x: x.sum(1), _any(7, 33, 65))
  _add("two results", lambda x: (x.sum(0), x.max(0)), _any(65, 33))
  _add("norm", jnp.linalg.norm, _any(1000))
  _add("count_nonzero", jnp.count_nonzero, _ints(0, 2))
  _add("sum.int32", lambda x: x.sum(1), _ints())
  _add("xor", lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)), _ints())
  _add("layer norm", jax.nn.standardize, _any(64, 256), tol=1e-4)
  for name in _names("cumsum cumprod cummax cummin cumlogsumexp"):
    _add(name, getattr(lax, name), _any())
  _add("cumsum of many", jnp.cumsum, _ints(0, 9, shape=(5000,)))
  _add("associative_scan", lambda x: lax.associative_scan(jnp.add, x), _any(100))
  pooled = lambda x, how: lax.reduce_window(x, -np.inf, lax.max, (3, 3), (2, 2), how)
  _add("reduce_window", lambda x: pooled(x, "SAME"), _any(20, 20))
  _add("select_and_scatter", jax.grad(lambda x: pooled(x, "VALID").sum()), _any(20, 20))


def _shapes() -> None:
  x, y = _any(), _any()
  _add("transpose", lambda x: x.T, _any(70, 90))
  _add("transpose of three", lambda x: x.transpose(2, 0, 1), _any(7, 33, 65))
  _add("transpose.bfloat16", lambda x: x.T + 1, _any(70, 90, dtype=_BF16))
  _add("transpose.int8", lambda x: x.T, _ints(dtype=np.int8))
  _add("reshape", lambda x: x.reshape(5, 37) * 2, x)
  _add("broadcast", lambda x: jnp.broadcast_to(x[:, None], (37, 3, 5)), x)
  _add("concatenate", lambda x, y: jnp.concatenate([x, y, x * 2], 0), x, y)
  _add("stack", lambda x, y: jnp.stack([x, y], 1), x, y)
  _add("pad", lambda x: jnp.pad(x, ((1, 2), (3, 0))), x)
  _add("pad between", lambda x: lax.pad(x, np.float32(0), ((1, 2, 1), (-1, 0, 2))), x)
  _add("flip", lambda x: x[::-1, ::-1] * 1, x)
  _add("slice", lambda x: x[3:30:4, 1:] + 1, x)
  _add("roll", lambda x: jnp.roll(x, 3, 0), x)
  _add("tile", lambda x: jnp.tile(x, (2, 3)), x)
  _add("repeat", lambda x: jnp.repeat(x, 3, 0), x)
  _add("iota", lambda: lax.iota(np.int32, 1000))
  _add("arange", lambda: jnp.arange(0, 3, 0.1))
  _add("linspace", lambda: jnp.linspace(0, 1, 50))
  _add("eye", lambda: jnp.eye(9))
  _add("tril", lambda x: jnp.tril(x, -1), _any(20, 20))
  _add("meshgrid", lambda x: jnp.meshgrid(x, x), _any(9))
  _add("one_hot", lambda x: jax.nn.one_hot(x, 9), _ints(0, 9, shape=(20,)))


def _indices() -> None:
  x, few, many = _any(), _ints(0, 37, shape=(9,)), _ints(0, 37, shape=(99,))
  _add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 1), (4, 3)), x, np.int64(7))
  ones = np.ones((2, 2), np.float32)
  update = lambda x, i: lax.dynamic_update_slice(x, ones, (i, 1))
  _add("dynamic_update_slice", update, x, np.int64(7))
  _add("take", lambda x, i: x[i], x, few)
  _add("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 0), x, _ints(0, 37))
  beyond = lambda x, i: x.at[i].get(mode="fill", fill_value=3)
  _add("gather out of bounds", beyond, x, _ints(30, 60, shape=(9,)))
  _add("scatter", lambda x, i: x.at[i].set(5.0), x, np.array([3, 7, 1]))
  _add("scatter add", lambda x, i: x.at[i].add(1.5), x, many)
  for dtype, tol in ((_BF16, 0.05), (_F16, 0.05), (_F64, None), (np.int8, None)):
    values = (_any() * 9).astype(dtype)
    _add(f"scatter add.{np.dtype(dtype).name}", lambda x, i: x.at[i].add(1), values, many, tol=tol)
  for name in _names("max min multiply"):
    _add(f"scatter {name}", lambda x, i, n=name: getattr(x.at[i], n)(0.5), x, many)
  _add("bincount", lambda x: jnp.bincount(x, length=9), _ints(0, 9, shape=(500,)))
  segments = _ints(0, 9, shape=(500,))
  _add("segment_sum", lambda x, i: jax.ops.segment_sum(x, i, 9), _any(500), segments, tol=1e-4)
  _add("histogram", lambda x: jnp.histogram(x, 7)[0], _any(500))
  _add("nonzero", lambda x: jnp.nonzero(x > 0, size=20), _any(50))
  _add("searchsorted", lambda x, y: jnp.searchsorted(jnp.sort(x), y), _any(100), _any(9))


def _orders() -> None:
  _add("sort", jnp.sort, _any())
  _add("sort of columns", lambda x: jnp.sort(x, 0), _any())
  _add("sort of many", jnp.sort, _any(5000))
  _add("sort.int64", jnp.sort, _ints(dtype=np.int64))
  _add("sort of pairs", lambda x, y: lax.sort((x, y), num_keys=1), _any(500), _any(500))
  _add("argsort", jnp.argsort, _any())
  _add("lexsort", lambda x, y: jnp.lexsort((x, y)), _ints(0, 5, shape=(99,)), _any(99))
  _add("top_k", lambda x: lax.top_k(x, 3), _any())
  _add("unique", lambda x: jnp.unique(x, size=9), _ints(0, 9, shape=(99,)))
  _add("quantile", lambda x: jnp.quantile(x, 0.3), _any(100))


def _randoms() -> None:
  names = "uniform normal bits exponential gumbel laplace cauchy logistic rademacher"
  for name in names.split():
    _add(f"random.{name}", lambda n=name: getattr(random, n)(random.key(3), (41,)), tol=1e-4)
  key = random.key
  _add("random.split", lambda: random.key_data(random.split(key(1), 5)))
  _add("random.fold_in", lambda: random.key_data(random.fold_in(key(1), 7)))
  _add("random.randint", lambda: random.randint(key(1), (50,), 0, 99))
  _add("random.permutation", lambda: random.permutation(key(1), 50))
  _add("random.choice", lambda: random.choice(key(1), 50, (9,)))
  _add("random.bernoulli", lambda: random.bernoulli(key(1), 0.3, (50,)))
  _add("random.categorical", lambda x: random.categorical(key(1), x), _any())
  _add("random.gamma", lambda: random.gamma(key(1), 2.0, (9,)), tol=1e-4)
  _add("random.poisson", lambda: random.poisson(key(1), 4.0, (9,)))
  _add("random.truncated_normal", lambda: random.truncated_normal(key(1), -1, 1, (9,)), tol=1e-4)
  _add("random.uniform.float64", lambda: random.uniform(key(3), (41,), np.float64))
  _add("random.normal.bfloat16", lambda: random.normal(key(3), (41,), _BF16), tol=0.02)


def _control() -> None:
  x = _any()
  counted = lambda s: (s[0] + 1, s[1] * 1.5)
  _add("while", lambda x: lax.while_loop(lambda s: s[0] < 7, counted, (0, x))[1], x)
  grown = lambda x: lax.while_loop(lambda x: x.sum() < 1000, lambda x: x * 2 + 1, x)
  _add("while of values", lambda x: grown(jnp.abs(x)), x)
  _add("fori_loop", lambda x: lax.fori_loop(0, 5, lambda i, x: x.at[i].add(i), x), x)
  _add("scan", lambda x: lax.scan(lambda c, v: (c + v, c * v), jnp.zeros(5, x.dtype), x), x)
  branches = (lambda x: x * 2, lambda x: x - 1)
  _add("cond", lambda x: lax.cond(x.sum() > 0, *branches, x), x)
  _add("switch", lambda x, i: lax.switch(i, [*branches, jnp.cos], x), x, np.int32(2))
  _add("map", lambda x: lax.map(lambda row: jnp.sin(row).sum(), x), x)
  _add("vmap of cond", jax.vmap(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)), x)
  _add("grad", jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2)), x)
  _add("hessian", jax.hessian(lambda x: jnp.sum(jnp.sin(x) ** 2)), _any(5))
  twice = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
  _add("checkpoint", jax.grad(lambda x: twice(x).sum()), x)


def _products() -> None:
  _add("dot", lambda x, y: x @ y, _any(64), _any(64), tol=1e-4)
  _add("matrix by vector", lambda x, y: x @ y, _any(20, 30), _any(30), tol=1e-4)
  _add("matmul", lambda x, y: x @ y, _any(64, 48), _any(48, 32), tol=1e-4)
  _add("matmul of few", lambda x, y: x @ y, _any(3, 4), _any(4, 2), tol=1e-4)
  of_bf16 = _any(64, 64, dtype=_BF16)
  _add("matmul.bfloat16", lambda x, y: x @ y, of_bf16, of_bf16, tol=0.3)
  einsum = lambda x, y: jnp.einsum("bij,bjk->bik", x, y)
  _add("einsum", einsum, _any(3, 8, 9), _any(3, 9, 7), tol=1e-4)
  _add("matmul.int32", lambda x, y: x @ y, _ints(shape=(9, 9)), _ints(shape=(9, 9)))
  _add("outer", jnp.outer, _any(9), _any(7))


for group in (
  _elementwise, _dtypes, _reductions, _shapes, _indices, _orders, _randoms, _control, _products
):  # fmt: skip
  group()


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
  with jax.enable_x64(True):
    yield


def _run(function: Any, args: Any, platform: str) -> list[np.ndarray]:
  device = jax.devices(platform)[0]
  with jax.default_device(device):
    got = jax.jit(function)(*(jax.device_put(x, device) for x in args))
  return [np.asarray(leaf) for leaf in jax.tree.leaves(got)]


def _tolerance(dtype: Any) -> float:
  if dtype.kind in "biu":
    return 0.0
  if dtype.name == "bfloat16":
    return 2e-2
  return {1: 0.3, 2: 4e-3, 4: 1e-5, 8: 1e-6 if dtype.kind == "c" else 1e-12}[dtype.itemsize]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_agrees_with_the_cpu(name: str) -> None:
  function, args, tol = OPERATIONS[name]
  got, wanted = _run(function, args, "cuda"), _run(function, args, "cpu")
  for mine, theirs in zip(got, wanted, strict=True):
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    near = tol if tol and mine.dtype.kind not in "biu" else _tolerance(mine.dtype)
    wide = np.complex128 if mine.dtype.kind == "c" else np.float64
    exact = mine.dtype.kind in "biu"
    a, b = (mine, theirs) if exact else (mine.astype(wide), theirs.astype(wide))
    np.testing.assert_allclose(a, b, rtol=near, atol=near)
