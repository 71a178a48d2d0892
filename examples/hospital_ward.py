# SPDX-License-Identifier: Apache-2.0
"""Finds the best number of beds for a hospital ward, simulated in pure Python on workers.

XLA can't run a discrete-event simulation with its loops, heaps and branches. Here each lane of a
compiled program simulates one seed and one number of beds, and worker processes share the lanes.
The program computes means over seeds, costs, and the cheapest number of beds.

    python examples/hospital_ward.py
"""

from __future__ import annotations

import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

ARRIVALS_A_DAY, DAYS_OF_STAY, DAYS = 4.0, 3.0, 100
COST_OF_A_BED, COST_OF_A_REFUSAL = 1.0, 6.0  # per day; per refused patient


def simulate(seed: Any, beds: Any) -> Any:
  """Simulates a ward; returns the share of patients that found no bed, and the mean occupancy."""
  random = np.random.default_rng(int(seed))
  clock, refused, came, occupied = 0.0, 0, 0, 0.0
  leaving: list[float] = []  # when the patients in the ward leave
  while clock < DAYS:
    clock += random.exponential(1 / ARRIVALS_A_DAY)
    while leaving and leaving[0] <= clock:
      heapq.heappop(leaving)
    came += 1
    if len(leaving) < beds:
      occupied += (stay := random.exponential(DAYS_OF_STAY))
      heapq.heappush(leaving, clock + stay)
    else:
      refused += 1
  return np.float32(refused / came), np.float32(occupied / clock)


def erlang_b(beds: int) -> float:
  """The share of refused patients by Erlang's formula of 1917, for comparison."""
  load, share = ARRIVALS_A_DAY * DAYS_OF_STAY, 1.0
  for servers in range(1, beds + 1):
    share = load * share / (servers + load * share)
  return share


def main(seeds: int = 24) -> None:
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  with cg.workers() as processes:
    ward = cg.gate(simulate, out=(scalar, scalar), run_on=processes)

    @jax.jit
    def plan(beds: jax.Array) -> Any:
      over_seeds = jax.vmap(ward, (0, None))
      refused, occupied = jax.vmap(over_seeds, (None, 0))(jnp.arange(seeds), beds)
      share = refused.mean(1)
      cost = COST_OF_A_BED * beds + COST_OF_A_REFUSAL * ARRIVALS_A_DAY * share
      return share, occupied.mean(1), cost, beds[jnp.argmin(cost)]

    beds = jnp.arange(6, 20, 2)
    share, occupied, cost, best = plan(beds)
  print("beds  refused  Erlang  occupied  cost a day")
  for row in zip(beds.tolist(), share, occupied, cost, strict=True):
    print(f"{row[0]:4d} {row[1]:8.3f} {erlang_b(row[0]):7.3f} {row[2]:9.2f} {row[3]:11.2f}")
  print(f"cheapest: {int(best)} beds, of {len(beds) * seeds} simulated wards")
  truth = np.array([erlang_b(n) for n in beds.tolist()])
  assert np.abs(np.asarray(share) - truth).max() < 0.04


if __name__ == "__main__":
  main()
