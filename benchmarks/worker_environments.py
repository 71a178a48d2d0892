# SPDX-License-Identifier: Apache-2.0
"""The environments of `bench_envs`, which processes import from here."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def cart_pole() -> Any:
  import gymnasium

  return gymnasium.make("CartPole-v1")


def busy() -> Any:
  """One whose step is a millisecond of pure Python, in processor time: a process that waits for a
  processor gets nothing done."""
  import gymnasium

  class Busy(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
      super().reset(seed=seed)
      return np.ones(4, np.float32), {}

    def step(self, action: Any) -> Any:
      end = time.thread_time() + 0.001
      while time.thread_time() < end:
        pass
      return np.ones(4, np.float32), 1.0, False, False, {}

  return Busy()
