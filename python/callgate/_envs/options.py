# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.envs`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from callgate._core import options as check
from callgate._places.threads import Thread
from callgate._places.workers import Workers, shared
from callgate._tap.channel import Channel

RunOn = Literal["xla", "own", "processes"] | Workers | Thread
Autoreset = Literal["next_step", "same_step", "disabled"]
Folder = str | os.PathLike[str]
VideoFormat = Literal["gif", "png", "mp4"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EnvsOptions:
  """The options of `callgate.envs`.

  Attributes:
    n: the number of environments. A vector environment has its own number.
    vector: True if `make` returns one vector environment, as `gymnasium.make_vec` or EnvPool does.
      Its environments are the lanes. With `sharding` each device has one vector environment.
    autoreset: when an ended episode starts anew. "next_step": with the next step, which ignores its
      action. "same_step": in the step that ends it; its infos have the final observation as
      "final_obs". "disabled": only by `reset(mask=)`. A vector environment must be made with the
      same mode.
    run_on: where the environments run. "xla": on XLA's calling thread; "own": on a thread of
      callgate; a `callgate.thread`, which also makes, renders and closes them; "processes": in a
      pool with one worker process for each CPU; `callgate.workers`. Each worker process steps its
      share of the environments, with one message per step.
    info: the entries of the environments' infos that programs get: a dictionary from names to
      objects with `.shape` and `.dtype`, to dtypes, or to such dictionaries. Default: none.
    record: a function, a channel, or a channel's name, as `to` of `callgate.tap`. It gets each
      episode at its end, as a value with "return", "length" and "lane".
    record_steps: sends each step, too, of all environments together: "observation", "action",
      "reward", "terminated" and "truncated".
    record_video: (lane, folder), or (lane, folder, format): writes this environment's pictures into
      a file for each episode. The format is "gif" (needs Pillow; the default with Pillow), "png"
      (the default without), or "mp4" (needs the extra "video").
    sharding: a NamedSharding whose spec is the mesh axis, or axes, over which the environments are
      split. Each device steps its own environments. In a `jax.shard_map` over these axes, a call
      applies to the environments of its device.
    timeout: seconds after which a step fails. A reset has at least 30 seconds, because it may have
      to make environments. See `callgate.gate`.
    name: the unique name in programs and messages. Default: as for `callgate.gate`, of `make`.
  """

  n: int = check.option(1, check.count, least=1, most=2**31 - 2)
  vector: bool = check.option(False, check.boolean)
  autoreset: Autoreset = check.option("next_step", check.choice, allowed=get_args(Autoreset))
  run_on: RunOn = "xla"
  info: Mapping[str, Any] | None = None
  record: Callable[..., Any] | Channel | str | None = None
  record_steps: bool = check.option(False, check.boolean)
  record_video: tuple[int, Folder] | tuple[int, Folder, VideoFormat] | None = None
  sharding: jax.sharding.NamedSharding | None = None
  timeout: float | None = check.option(None, check.seconds)
  name: str | None = None


def place_given(label: str, run_on: Any) -> Any:
  """Checks `run_on=` and returns its place."""
  if isinstance(run_on, (Workers, Thread)):
    return run_on
  places = "'xla', 'own', 'processes', callgate.workers(...) or callgate.thread(...)"
  run_on = check.choice(label, "run_on", run_on, ("xla", "own", "processes"), what=places)
  return shared() if run_on == "processes" else run_on


def check_records(label: str, to: Any) -> None:
  """Raises unless a tap can send to `record=`."""
  if to is None or callable(to) or isinstance(to, Channel):
    return
  expected = "a function, a channel or a channel's name"
  check.text(label, "record", to, expected)
  if not to or "\n" in to:
    check.refuse(label, "record", expected, to)
