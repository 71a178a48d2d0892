# SPDX-License-Identifier: Apache-2.0
"""Taps where the system has no memory for their records: these are counted, and said once."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from interpreters import output_of

import callgate as cg
from callgate._tap import primitive

SOURCE = """
import json, resource
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

seen = []
channel = cg.channel("t", on_full="{on_full}", rate=1e9, to=lambda value: seen.append(value.nbytes))
# Made on the device: a copy of the host's would leave room when it goes.
large, small = (jax.block_until_ready(jnp.ones(size, np.uint8)) for size in (256 << 20, 1))
send = jax.jit(lambda x: cg.tap(x, "t")[0])
compiled = [send.lower(x).compile() for x in (large, small)]
jax.block_until_ready(compiled[1](small))
channel.flush()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for _ in range(3):
  jax.block_until_ready(compiled[0](large))
jax.block_until_ready(compiled[1](small))
errors = []
for _ in range(2):
  try:
    channel.flush()
  except cg.ConsumerError as error:
    errors.append(str(error))
print(json.dumps([errors, channel.stats(), seen]))
"""


@pytest.mark.parametrize("on_full", ["block", "drop_new", "drop_old", "sample"])
def test_records_without_memory_are_dropped_and_reported_once(on_full: str) -> None:
  out = output_of(SOURCE.replace("{on_full}", on_full))
  errors, stats, seen = json.loads(out)
  assert seen == [1, 1]
  assert (stats["sent"], stats["delivered"], stats["dropped"]) == (5, 2, 3)
  assert len(errors) == 1
  assert "channel 't': expected memory for a record of 268435456 bytes, got none" in errors[0]


def test_taps_outside_of_programs_keep_few_programs() -> None:
  """Each function that a program is made for has its own, of more than a MiB."""
  got: list[int] = []
  for number in range(150):  # with every= a program counts
    cg.tap(jnp.float32(1), lambda value, number=number: got.append(number), every=2)
  cg.barrier()
  assert got == list(range(150))
  assert primitive._programs().cache_info().currsize <= 128
