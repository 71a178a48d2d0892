# SPDX-License-Identifier: Apache-2.0
"""Taps where the system has no memory for their records: these are counted, and said once."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest
from interpreters import output_of

import callgate as cg
from callgate._tap import primitive

POLICIES = "block", "drop_new", "drop_old", "sample"
SOURCE = """
import json, resource
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

seen = {policy: [] for policy in POLICIES}
channels = {
  policy: cg.channel(
    policy, on_full=policy, rate=1e9, to=lambda value, all=seen[policy]: all.append(value.nbytes)
  )
  for policy in POLICIES
}
# Made on the device: a copy of the host's would leave room when it goes.
large, small = (jax.block_until_ready(jnp.ones(size, np.uint8)) for size in (256 << 20, 1))
compiled = {}
for policy, channel in channels.items():
  send = jax.jit(lambda x: cg.tap(x, policy)[0])
  compiled[policy] = [send.lower(x).compile() for x in (large, small)]
  jax.block_until_ready(compiled[policy][1](small))
  channel.flush()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for policy, channel in channels.items():
  for _ in range(3):
    jax.block_until_ready(compiled[policy][0](large))
  jax.block_until_ready(compiled[policy][1](small))
  errors = []
  for _ in range(2):
    try:
      channel.flush()
    except cg.ConsumerError as error:
      errors.append(str(error))
  print(json.dumps([policy, errors, channel.stats(), seen[policy]]))
"""


@pytest.fixture(scope="module")
def process() -> dict[str, Any]:
  """By policy, the errors, the counts and the sizes that came, of one process without memory."""
  lines = output_of(f"POLICIES = {POLICIES}\n{SOURCE}").splitlines()
  return {policy: rest for policy, *rest in map(json.loads, lines)}


@pytest.mark.parametrize("on_full", POLICIES)
def test_records_without_memory_are_dropped_and_reported_once(
  on_full: str, process: dict[str, Any]
) -> None:
  errors, stats, seen = process[on_full]
  assert seen == [1, 1]
  assert (stats["sent"], stats["delivered"], stats["dropped"]) == (5, 2, 3)
  assert len(errors) == 1
  said = f"channel '{on_full}': expected memory for a record of 268435456 bytes, got none"
  assert said in errors[0]


def test_taps_outside_of_programs_keep_few_programs() -> None:
  """Each function that a program is made for has its own, of more than a MiB."""
  got: list[int] = []
  for number in range(150):  # with every= a program counts
    cg.tap(jnp.float32(1), lambda value, number=number: got.append(number), every=2)
  cg.barrier()
  assert got == list(range(150))
  assert primitive._programs().cache_info().currsize <= 128
