# SPDX-License-Identifier: Apache-2.0
"""Braess's paradox: a compiled program balances traffic with shortest paths from NetworkX.

Drivers choose the fastest path, and each road slows down with the number of its cars. The
Frank-Wolfe method finds the equilibrium: NetworkX finds the path that is fastest now, and some
drivers switch. A new road makes everyone slower (Braess, 1968). Small changes of the times don't
change the path, so the gate's derivative is zero; JAX's gradient tells what a wider road saves.
"""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import networkx
import numpy as np

import callgate as cg

matplotlib.use("Agg")  # draws to files, needs no display
import matplotlib.pyplot as plt

CARS = 4000
ROADS = [("home", "A"), ("home", "B"), ("A", "work"), ("B", "work"), ("A", "B")]
FREE = jnp.array([0.0, 45.0, 45.0, 0.0, 0.0])  # minutes on the empty road
DELAY = jnp.array([0.01, 0.0, 0.0, 0.01, 0.0])  # minutes more for each car


@cg.gate(out=lambda times: times)
def all_by_the_shortest_way(times):
  graph = networkx.DiGraph()
  graph.add_weighted_edges_from((*road, time) for road, time in zip(ROADS, times, strict=True))
  way = networkx.shortest_path(graph, "home", "work", weight="weight")
  used = set(itertools.pairwise(way))
  return np.array([CARS if road in used else 0 for road in ROADS], np.float32)


@all_by_the_shortest_way.defjvp
def _(primals, tangents):
  flow = all_by_the_shortest_way(*primals)
  return flow, jnp.zeros_like(flow)


def balance(shortcut, delay):
  """Flows in balance, if the road from A to B takes `shortcut` minutes, and the mean time."""
  free = FREE.at[4].set(shortcut)

  def step(flow, _):
    times = free + delay * flow
    change = all_by_the_shortest_way(times) - flow
    curvature = jnp.sum(delay * change**2)
    length = jnp.where(curvature > 0, -jnp.sum(times * change) / jnp.maximum(curvature, 1e-9), 0)
    return flow + jnp.clip(length, 0, 1) * change, None

  flow = jax.lax.scan(step, all_by_the_shortest_way(free), length=20)[0]
  return flow, jnp.sum(flow * (free + delay * flow)) / CARS


def draw(flows, titles, path):
  places = {"home": (0, 0), "A": (1, 1), "B": (1, -1), "work": (2, 0)}
  figure, plots = plt.subplots(1, 2, figsize=(9, 3.2))
  for plot, flow, title in zip(plots, flows, titles, strict=True):
    graph = networkx.DiGraph(ROADS)
    width = [1 + 5 * f / CARS for f in flow]
    style = {"node_size": 1100, "node_color": "#c5cae9", "edge_color": "#3f51b5"}
    networkx.draw(graph, places, plot, edgelist=ROADS, width=width, with_labels=True, **style)
    labels = {road: f"{f:.0f}" for road, f in zip(ROADS, flow, strict=True)}
    networkx.draw_networkx_edge_labels(graph, places, labels, ax=plot)
    plot.set_title(title)
  Path(path).parent.mkdir(exist_ok=True)
  figure.savefig(path, dpi=100)


flows, minutes = jax.jit(jax.vmap(balance, (0, None)))(jnp.array([100.0, 0.0]), DELAY)
names = "no road A-B", "a road A-B"
titles = [f"{what}: {m:.1f} minutes" for what, m in zip(names, minutes, strict=True)]
print("\n".join(titles))
gain = jax.jit(jax.grad(lambda delay: balance(100.0, delay)[1]))(DELAY)
print(f"a tenth less delay from home to A saves {gain[0] * 0.001:.2f} minutes")
draw(flows, titles, "out/traffic.png")
