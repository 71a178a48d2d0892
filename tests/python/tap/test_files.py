# SPDX-License-Identifier: Apache-2.0
"""Taps through channels into native sinks and streams: what was sent is what is read."""

from __future__ import annotations

import json
import signal
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
from interpreters import start

import callgate as cg
from callgate import _callgate

STEPS = 200


def train(name: str) -> None:
  """Taps a scalar, a dict and lanes of a vmap, STEPS times each."""

  def step(w, x):
    cg.tap(jnp.sum(w), name, name="total")
    cg.tap({"w": w, "n": x.astype(jnp.int32)}, name, name="state")
    jax.vmap(lambda v: cg.tap(v, name, name="lane", where=v > 0.5))(w)
    return w + 0.01, None

  jax.block_until_ready(jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(float(STEPS))))(W))


W = jnp.array([0.0, 1.0, 2.0])


def expected() -> list[np.ndarray]:
  w, out = np.asarray(W), []
  for _ in range(STEPS):
    out.append(w)
    w = w + np.float32(0.01)
  return out


def test_jsonl_statistics_and_functions_agree_on_what_was_sent(tmp_path):
  seen: dict[str, list[cg.Record]] = {}
  stats = cg.sinks.Stats()

  def remember(value, info):
    seen.setdefault(info.name, []).append(cg.Record(value, info))

  path = tmp_path / "taps.jsonl"
  with cg.channel("files", to=[remember, stats, cg.sinks.JSONL(path)]):
    train("files")
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  w = expected()
  totals = [float(np.sum(x, dtype=np.float32)) for x in w]
  np.testing.assert_allclose([r.value for r in seen["total"]], totals, rtol=1e-6)
  np.testing.assert_allclose([r["value"] for r in rows if r["name"] == "total"], totals, rtol=1e-6)
  states = [r for r in rows if r["name"] == "state"]
  assert [r["value"]["n"] for r in states] == list(range(STEPS))
  np.testing.assert_allclose([r["value"]["w"] for r in states], w, rtol=1e-5)
  lanes = sum(int((x > 0.5).sum()) for x in w)
  assert len(seen["lane"]) == lanes == sum(r["name"] == "lane" for r in rows)
  assert {tuple(r["lane"]) for r in rows if r["name"] == "lane"} == {(0,), (1,), (2,)}
  assert {r.info.seq for r in seen["total"]} == {r["seq"] for r in rows if r["name"] == "total"}
  result = stats.result()
  total = next(v for k, v in result.items() if k.startswith("total"))
  leaf = next(iter(total.values())) if "count" not in total else total
  assert leaf["count"] == STEPS


def test_a_stream_gives_back_records_columns_and_order(tmp_path):
  path = tmp_path / "run.cgs"
  with cg.channel("files", to=_callgate.stream_sink(str(path))):
    train("files")
  with cg.open_stream(path) as stream:
    records = list(stream)
  w = expected()
  states = [r for r in records if r.name == "state"]
  np.testing.assert_allclose([r.leaves["['w']"] for r in states], w, rtol=1e-5)
  assert [int(r.leaves["['n']"]) for r in states] == list(range(STEPS))
  assert len([r for r in records if r.name == "lane"]) == sum(int((x > 0.5).sum()) for x in w)
  with cg.open_stream(path) as stream:
    columns = stream.columns("total")
  assert len(columns["seq"]) == STEPS
  assert (np.diff(columns["time_ns"]) >= 0).all()


def test_a_killed_program_leaves_a_stream_that_reads_to_its_last_whole_record(tmp_path):
  path = tmp_path / "killed.cgs"
  source = textwrap.dedent(
    f"""
    import jax, callgate as cg
    from callgate import _callgate
    channel = cg.channel("files", to=_callgate.stream_sink({str(path)!r}))
    body = lambda i, c: (cg.tap(i, "files"), c)[1]
    program = jax.jit(lambda a, b: jax.lax.fori_loop(a, b, body, 0))
    for k in range(10**6):
      jax.block_until_ready(program(100 * k, 100 * k + 100))
      if k == 20:
        channel.flush()
        print("go", flush=True)
    """
  )
  process = start(source, environment={"JAX_PLATFORMS": "cpu"})
  try:
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
  finally:
    process.kill()
    process.communicate()
  with cg.open_stream(path) as stream:
    values = [int(r.leaves[""]) for r in stream]
  assert len(values) >= 2100
  assert values == list(range(len(values)))
