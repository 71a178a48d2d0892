# SPDX-License-Identifier: Apache-2.0
"""Padded arrays in taps: whoever gets a record gets what counts, in whatever form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from split_arrays import mesh, put

import callgate as cg

X = np.arange(12, dtype=np.float32).reshape(4, 3)
# Rows of one of these sizes count.
COUNTS = [3, 0, 4, 1, 1, 2]


def send(channel: Any, *, dtype: Any = jnp.float32, counts: Any = COUNTS) -> None:
  """A tap of X in a loop, of whose rows `counts` count in turn, and of whose columns two."""
  program = jax.jit(
    lambda x, ns: jax.lax.map(
      lambda n: (cg.tap({"x": x, "n": n}, channel, logical_shape={"x": (n, 2), "n": None}), n)[1],
      ns,
    )
  )
  jax.block_until_ready(program(jnp.asarray(X).astype(dtype), jnp.array(counts, jnp.int32)))


WANTED = [X[:n, :2].tolist() for n in COUNTS]


def test_functions_and_batches_get_what_counts() -> None:
  single: list[Any] = []
  batches: list[Any] = []
  with cg.channel("padded", to=lambda v: single.append(v["x"].tolist())) as channel:
    send(channel)
  assert single == WANTED
  keep = lambda v, info: batches.append((v["x"], v["n"].tolist(), info.seq.tolist()))
  for batch in (True, 2):
    batches.clear()
    with cg.channel("padded", to=keep, batch=batch) as channel:
      send(channel, counts=[1, 1, 1, 4])
    lengths = [len(x) for x, _, _ in batches]
    # Takes what is there: the three may come in one batch or more, the last one's rows differ.
    assert (sum(lengths), lengths[-1]) == (4, 1)
    assert batch is True or max(lengths) <= batch
    assert [x.shape[1:] for x, _, _ in batches] == [(n[0], 2) for _, n, _ in batches]
    assert [row.tolist() for x, _, _ in batches for row in x] == [
      X[:n, :2].tolist() for n in (1, 1, 1, 4)
    ]
    assert [number for _, _, seq in batches for number in seq] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int4, jnp.uint2, jnp.float8_e4m3fn, bool])
def test_lines_and_streams_hold_what_counts(dtype: Any, tmp_path: Path) -> None:
  whole = np.asarray(jnp.asarray(X % 2).astype(dtype).astype(jnp.float32))
  wanted = [whole[:n, :2].tolist() for n in COUNTS]

  def program(x: jax.Array, channel: Any) -> None:
    for n in COUNTS:
      jax.jit(lambda x, n: cg.tap(x, channel, name="x", logical_shape=(n, 2)))(x, n)

  with cg.channel("padded", to=cg.sinks.JSONL(tmp_path / "a.jsonl")) as channel:
    program(jnp.asarray(X % 2).astype(dtype), channel)
  lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
  assert [line["value"] for line in lines] == wanted
  with cg.channel("padded", to=cg.sinks.Stream(tmp_path / "a.cgs")) as channel:
    program(jnp.asarray(X % 2).astype(dtype), channel)
  with cg.open_stream(tmp_path / "a.cgs") as stream:
    found = [record.leaves for record in stream]
  assert [list(leaves) for leaves in found] == [[""]] * len(COUNTS)
  assert [np.asarray(leaves[""], np.float32).tolist() for leaves in found] == wanted


def test_stats_count_what_counts() -> None:
  stats = cg.sinks.Stats()
  with cg.channel("padded", to=stats) as channel:
    send(channel)
  summary = stats.result()
  (name,) = [name for name in summary if name.endswith("/x")]
  values = np.concatenate([np.ravel(one) for one in WANTED])
  assert len(summary) == 2
  assert summary[name]["count"] == values.size
  assert summary[name]["mean"] == pytest.approx(values.mean())
  assert summary[name]["max"] == values.max()


def test_npy_takes_rows_of_one_shape_and_says_which_came_else(tmp_path: Path) -> None:
  path = tmp_path / "{name}.npy"
  with cg.channel("padded", to=cg.sinks.Npy(path)) as channel:
    send(channel, counts=[2, 2, 2])
  (file,) = tmp_path.glob("*x.npy")
  assert np.load(file).tolist() == [X[:2, :2].tolist()] * 3
  channel = cg.channel("padded", to=cg.sinks.Npy(tmp_path / "b{name}.npy"))
  send(channel, counts=[2, 3, 2])
  with pytest.raises(cg.ConsumerError, match=r"rows of <f4\[2,2\], got rows of <f4\[3,2\]"):
    channel.close()
  (file,) = tmp_path.glob("b*x.npy")
  assert np.load(file).tolist() == [X[:2, :2].tolist()] * 2
  assert channel.stats()["lost"] == 1


@pytest.mark.parametrize("axes", [("a", "b"), ("b", None), (None, None)])
def test_shards_hold_their_part_of_what_counts(axes: tuple[Any, ...], tmp_path: Path) -> None:
  x = np.arange(128, dtype=np.float32).reshape(16, 8)
  stats = cg.sinks.Stats()
  sinks = [stats, cg.sinks.JSONL(tmp_path / "a.jsonl"), cg.sinks.Stream(tmp_path / "a.cgs")]
  batched: list[Any] = []
  channel = cg.channel("padded", to=sinks)
  batches = cg.channel("batches", to=batched.append, batch=True)

  @jax.jit
  def program(x: jax.Array, n: jax.Array) -> Any:
    cg.tap(x, channel, name="x", logical_shape=(n, 5))
    return cg.tap(x, batches, name="x", logical_shape=(n, 5))

  jax.block_until_ready(program(put(x, mesh(), *axes), jnp.int32(10)))
  channel.close()
  batches.close()
  wanted = sorted(np.ravel(x[:10, :5]).tolist())
  assert stats.result()["x"]["count"] == len(wanted)
  lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
  assert sorted(n for line in lines for n in np.ravel(line["value"]).tolist()) == wanted
  with cg.open_stream(tmp_path / "a.cgs") as stream:
    assert sorted(n for one in stream for n in np.ravel(one.leaves[""]).tolist()) == wanted
  assert sorted(n for one in batched for n in np.ravel(one).tolist()) == wanted


def test_in_a_partly_manual_shard_map_padded_arrays_are_gathered() -> None:
  on = mesh()
  x = np.arange(128, dtype=np.float32).reshape(16, 8)
  seen: list[Any] = []

  @jax.jit
  def program(x: jax.Array, n: jax.Array) -> jax.Array:
    tap = lambda x: cg.tap(x, seen.append, logical_shape=(n, 5))
    return jax.shard_map(tap, mesh=on, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(x)

  jax.block_until_ready(program(put(x, on, "a", "b"), jnp.int32(3)))
  cg.barrier()
  places = {tuple(np.ravel(one).tolist()) for one in seen}
  assert places == {tuple(x[i : i + 3, :5].ravel().tolist()) for i in range(0, 16, 4)}


def test_lanes_have_sizes_of_their_own(tmp_path: Path) -> None:
  stats = cg.sinks.Stats()
  with cg.channel("padded", to=[stats, cg.sinks.JSONL(tmp_path / "a.jsonl")]) as channel:
    tap = lambda x, n: cg.tap(x, channel, name="x", logical_shape=(n, None), where=n != 2)
    jax.jit(jax.vmap(tap, (None, 0)))(X, jnp.array([1, 2, 4]))
  lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
  assert [(line["lane"], line["value"]) for line in lines] == [
    ([0], X[:1].tolist()),
    ([2], X.tolist()),
  ]
  assert stats.result()["x"]["count"] == 3 + 12


# -- sizes that the array has not ----------------------------------------------------------------
@pytest.mark.parametrize("size", [5, -1, np.int64(5)])
def test_a_known_size_is_refused_before_anything_runs(size: Any) -> None:
  with pytest.raises(cg.GateDefinitionError) as error:
    jax.jit(lambda x: cg.tap(x, print, logical_shape=(size, None)))(X)
  assert "logical_shape" in str(error.value)


@pytest.mark.parametrize("size", [5, -1])
@pytest.mark.parametrize("kind", ["function", "batch", "jsonl", "stats", "npy", "stream"])
def test_a_traced_size_is_an_error_of_its_record(size: int, kind: str, tmp_path: Path) -> None:
  sinks: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda v: None,
    "batch": lambda: lambda v: None,
    "jsonl": lambda: cg.sinks.JSONL(tmp_path / "a.jsonl"),
    "stats": cg.sinks.Stats,
    "npy": lambda: cg.sinks.Npy(tmp_path / "{name}.npy"),
    "stream": lambda: cg.sinks.Stream(tmp_path / "a.cgs"),
  }
  channel = cg.channel("padded", to=sinks[kind](), batch=True if kind == "batch" else None)
  send(channel, counts=[2, size, 2])
  with pytest.raises(Exception, match=rf"a size from 0 to 4, got {size}"):
    channel.close()
  assert channel.stats()["lost"] == 1


@pytest.mark.parametrize(
  "size", [np.int64(2**32 + 2), np.int64(-(2**32) + 1), np.uint64(2**63), np.uint32(2**32 - 1)]
)
def test_sizes_of_any_width_are_none_that_the_array_has(size: Any) -> None:
  with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
    jax.jit(lambda n: cg.tap(jnp.arange(4.0), lambda v: None, logical_shape=(n,)))(size)
  with pytest.raises(ValueError, match=r"expected a size from 0 to 4, got -?2147483"):
    cg.barrier()


@pytest.mark.parametrize("kind", ["function", "sink", "batch", "jsonl", "stats", "npy", "stream"])
@pytest.mark.parametrize("lanes", [False, True])
def test_a_wrong_size_takes_no_other_record_along(kind: str, lanes: bool, tmp_path: Path) -> None:
  class Own(cg.sinks.Sink):
    def write(self, records: Any) -> None:
      seen.extend(record.value for record in records)

  seen: list[Any] = []
  stats = cg.sinks.Stats()
  to: dict[str, Any] = {
    "function": seen.append,
    "batch": seen.extend,
    "sink": Own(),
    "jsonl": cg.sinks.JSONL(tmp_path / "a.jsonl"),
    "stats": stats,
    "npy": cg.sinks.Npy(tmp_path / "a.npy"),
    "stream": cg.sinks.Stream(tmp_path / "a.cgs"),
  }
  channel = cg.channel("padded", to=to[kind], batch=kind == "batch" or None)
  counts = jnp.array([2, 9, 2, -1, 2], jnp.int32)
  tap = lambda n: cg.tap(X, channel, name="x", logical_shape=(n, None))
  if lanes:
    jax.block_until_ready(jax.jit(jax.vmap(tap))(counts))
  else:
    jax.block_until_ready(jax.jit(lambda ns: jax.lax.map(tap, ns))(counts))
  with pytest.raises(Exception, match="a size from 0 to 4, got 9"):
    channel.close()
  if kind == "jsonl":
    seen = (tmp_path / "a.jsonl").read_text().splitlines()
  elif kind == "npy":
    seen = list(np.load(tmp_path / "a.npy"))
  elif kind == "stream":
    with cg.open_stream(tmp_path / "a.cgs") as stream:
      seen = [one for one in stream if one.leaves[""].shape == (2, 3)]
  assert (stats.result()["x"]["records"] if kind == "stats" else len(seen)) == 3
  assert channel.stats()["lost"] == 2


def test_roles_are_cut_alike() -> None:
  seen: dict[str, Any] = {}
  roles = ("primal", "tangent", "cotangent")

  def loss(x: jax.Array, n: jax.Array) -> jax.Array:
    keep = lambda v, info: seen.update({info.role: v.tolist()})
    return jnp.sum(cg.tap(x, keep, logical_shape=(n,), roles=roles, where=n > 0) ** 2)

  x, n = jnp.arange(4.0), jnp.int32(2)
  for apply in (jax.jit(jax.grad(loss)), lambda *a: jax.vmap(jax.grad(loss))(x[None], n[None])):
    seen.clear()
    jax.block_until_ready(apply(x, n))
    cg.barrier()
    assert seen["primal"] == [0, 1]
    assert seen["cotangent"] == [0, 2]
  seen.clear()
  jax.block_until_ready(jax.jit(lambda x, n: jax.jvp(lambda x: loss(x, n), (x,), (x,)))(x, n))
  cg.barrier()
  assert seen == {"primal": [0, 1], "tangent": [0, 1]}


@pytest.mark.parametrize("axes", [("a", "b"), ("b", None)])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 8), (0, 8), (16, 8), (16, 1)])
def test_shards_make_up_what_counts(axes: tuple[Any, ...], sizes: tuple[int, int]) -> None:
  x = np.arange(128, dtype=np.float32).reshape(16, 8)
  found: list[cg.Record] = []
  tap = lambda x, r, c: cg.tap(x, lambda v, i: found.append(cg.Record(v, i)), logical_shape=(r, c))
  jax.block_until_ready(jax.jit(tap)(put(x, mesh(), *axes), *sizes))
  cg.barrier()
  np.testing.assert_array_equal(cg.assemble(found), x[: sizes[0], : sizes[1]])


def test_tuples_of_arrays_have_tuples_of_shapes() -> None:
  x, y = jnp.arange(4.0), jnp.arange(3.0)
  seen: list[Any] = []
  for value, shape in (
    ((x, y), ((2,), (1,))),
    ((x, y), ((2,), None)),
    ((x, y), [(2,), (1,)]),
    ({"a": x, "b": (x, y)}, {"a": (2,), "b": ((1,), None)}),
  ):
    jax.jit(lambda v, s=shape: cg.tap(v, seen.append, logical_shape=s))(value)
  cg.barrier()
  assert [[len(one) for one in jax.tree.leaves(value)] for value in seen] == [
    [2, 1],
    [2, 3],
    [2, 1],
    [2, 1, 3],
  ]
