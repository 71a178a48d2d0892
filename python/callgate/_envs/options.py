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
    n: how many environments there are. A vector environment tells it itself.
    vector: `make` returns one vector environment, whose lanes are the environments: with the
      interface of `gymnasium.make_vec`, or EnvPool's. With `sharding` each device has one.
    autoreset: when an episode that has ended begins anew. "next_step": with the next step, which
      ignores its action. "same_step": in the step that ends it, whose infos have the last
      observation as "final_obs". "disabled": by `reset(mask=)` alone. A vector environment has to
      be made with the same.
    run_on: where they are: "xla", on XLA's calling thread; "own", on a thread of callgate's; on
      the one of `callgate.thread`, where they are also made, rendered and closed; "processes",
      in as many worker processes as CPUs; or in those of `callgate.workers`, each of which has its
      share of them and steps it in one message.
    info: what of environments' infos programs get: names to anything with `.shape` and `.dtype`, to
      dtypes, or to dictionaries of such. Default: nothing.
    record: where episodes go when they end, as values with "return", "length" and "lane": a
      function, a channel, or a channel's name, as `to` of `callgate.tap`.
    record_steps: also send each step, all environments at once: "observation", "action",
      "reward", "terminated" and "truncated".
    record_video: (lane, folder), or (lane, folder, format): what this environment renders goes to
      a file an episode there. The format is "gif", which needs Pillow and is the default with it,
      "png", the default without, or "mp4", which needs the extra "video".
    sharding: a NamedSharding whose spec is the mesh's axis, or axes, over which the environments
      are split: each device steps its own. In a `jax.shard_map` over these axes a call is for those
      of its device.
    timeout: seconds after which a step fails; a reset, which may have to make environments, has 30
      at least. See `callgate.gate`.
    name: what programs and messages call them; unique. Default: as for `callgate.gate`, of `make`.
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
  """`run_on=`, checked."""
  if isinstance(run_on, (Workers, Thread)):
    return run_on
  places = "'xla', 'own', 'processes', callgate.workers(...) or callgate.thread(...)"
  run_on = check.choice(label, "run_on", run_on, ("xla", "own", "processes"), what=places)
  return shared() if run_on == "processes" else run_on


def check_records(label: str, to: Any) -> None:
  """Raises unless `record=` is something that a tap sends to."""
  if to is None or callable(to) or isinstance(to, Channel):
    return
  expected = "a function, a channel or a channel's name"
  check.text(label, "record", to, expected)
  if not to or "\n" in to:
    check.refuse(label, "record", expected, to)
