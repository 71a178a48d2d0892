# SPDX-License-Identifier: Apache-2.0
"""Programs with taps that travel: exported ones, and the persistent compilation cache."""

from __future__ import annotations

import pytest
from interpreters import output_of

EXPORT = """
import callgate as cg, jax, jax.numpy as jnp, pathlib
from jax import export
def f(x):
  return jax.lax.scan(lambda c, y: (cg.tap(c + y, "loss", effect={effect!r}), y), 0.0, x)[0]
checks = cg.export_checks()
shape = jax.ShapeDtypeStruct((3,), jnp.float32)
exported = export.export(jax.jit(f), disabled_checks=checks)(shape)
pathlib.Path({path!r}).write_bytes(exported.serialize())
"""
RUN = """
import callgate as cg, jax.numpy as jnp, pathlib
from jax import export
exported = export.deserialize(bytearray(pathlib.Path({path!r}).read_bytes()))
infos = []
with cg.channel("loss", to=lambda value, info: infos.append((info.name, float(value)))):
  exported.call(jnp.arange(1.0, 4.0))
print(infos)
"""


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_an_exported_program_taps_in_a_process_that_never_traced_it(effect, tmp_path):
  pytest.importorskip("flatbuffers")
  path = str(tmp_path / "program.bin")
  output_of(EXPORT.format(effect=effect, path=path))
  assert b"0x" not in (tmp_path / "program.bin").read_bytes()
  assert output_of(RUN.format(path=path)).strip() == "[('loss', 1.0), ('loss', 3.0), ('loss', 6.0)]"


CACHED = """
import callgate as cg, jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
seen = []
def consumer(value):
  seen.append(float(value))
@jax.jit
def program(x):
  cg.tap(x, consumer)
  cg.check(x > 0, "expected more than 0")
  return cg.tap(x + 1, "loss", ordered=True)
with cg.channel("loss", to=consumer):
  program(jnp.float32(1))
cg.barrier()
print(sorted(seen), any("cache_hits" in name for name in hits))
"""


def test_the_persistent_cache_hits_in_the_next_process(tmp_path):
  environment = {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  first = output_of(CACHED, **environment).strip()
  second = output_of(CACHED, **environment).strip()
  assert first.startswith("[1.0, 2.0]")
  assert second == "[1.0, 2.0] True"
