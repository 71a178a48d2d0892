# SPDX-License-Identifier: Apache-2.0
"""`callgate.run`: what a block leaves in its folder, however it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import interpreters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import until

import callgate as cg
from callgate._core import opened
from callgate._runs import files


def said(run: Any) -> dict[str, Any]:
  return files.read(run.folder)


def values(path: Path, name: str) -> list[float]:
  with cg.open_stream(path) as stream:
    return [float(record.leaves[""]) for record in stream if record.name == name]


@jax.jit
def step(x: Any) -> Any:
  cg.tap(x, "loss")
  return x * 2


# -- what belongs to it ----------------------------------------------------------------------------
def test_the_folder_has_a_stream_and_the_runs_own_file(tmp_path):
  before = time.time_ns()
  with cg.run("digits", folder=tmp_path, config={"rate": 0.1}, notes="first", tags=["a"]) as run:
    assert run.state == "running"
    assert said(run)["state"] == "running"
    x = 1.0
    for _ in range(3):
      x = step(x)
    run.summary["accuracy"] = 0.97
    assert said(run)["summary"] == {"accuracy": 0.97}  # at once
  assert run.folder == tmp_path / "digits"
  assert values(run.folder / "stream.loss.cgs", "loss") == [1, 2, 4]
  about = said(run)
  assert (about["name"], about["state"], about["error"]) == ("digits", "finished", None)
  assert (about["config"], about["notes"], about["tags"]) == ({"rate": 0.1}, "first", ["a"])
  assert before < about["started_ns"] < about["ended_ns"] < time.time_ns()
  assert sorted(path.name for path in run.folder.iterdir()) == ["run.json", "stream.loss.cgs"]
  with cg.open_stream(run.folder / "stream.loss.cgs") as stream:
    list(stream)
    assert stream.ended


def test_each_run_has_a_folder_of_its_own(tmp_path):
  folders: list[str] = []
  for name in ("a/b: c", "a/b: c", "..", "/", "ä"):
    with cg.run(name, folder=tmp_path / "new" / "runs") as run:
      folders.append(run.folder.name)
      assert run.folder.parent == tmp_path / "new" / "runs"
      assert said(run)["name"] == name
  assert folders == ["a-b-c", "a-b-c-2", "run", "run-2", "ä"]


def test_channels_of_the_block_have_their_own_consumers_too(tmp_path):
  seen: list[float] = []
  open_before = cg.channel("before", to=seen.append)
  with cg.run("r", folder=tmp_path) as run:
    step(1.0)  # without a channel
    with cg.channel("loss", to=[seen.append, cg.sinks.JSONL("loss.jsonl")]):
      step(2.0)
    step(3.0)  # without one again
    with cg.channel("loss", to=[cg.sinks.Stream("loss.cgs"), lambda loss: None]):
      step(4.0)
    cg.tap(5.0, "before")
  cg.tap(6.0, "before")
  open_before.close()
  assert seen == [2, 5, 6]
  assert values(run.folder / "stream.loss.cgs", "loss") == [1, 2, 3, 4]
  assert values(run.folder / "stream.before.cgs", "before") == [5]
  assert values(run.folder / "loss.cgs", "loss") == [4]
  assert len((run.folder / "loss.jsonl").read_text().splitlines()) == 1
  assert not cg.channel_stats()["loss"]["pending"]
  with cg.channel("loss", to=seen.append):  # the name is free again
    step(7.0)
  assert seen[-1] == 7


def test_records_of_a_program_that_is_traced_before_the_block_belong_to_it(tmp_path):
  step(0.0)
  with cg.channel("loss", to=lambda loss: None):  # takes what has waited
    cg.barrier()
  for name in ("one", "two"):
    with cg.run(name, folder=tmp_path) as run:
      step(1.0)
    assert values(run.folder / "stream.loss.cgs", "loss") == [1]


def test_a_channels_name_may_be_any(tmp_path):
  names = ["train/loss", "train_loss", "a*b?[c]", "{process}", "é" * 100, "x" * 300]
  with cg.run("r", folder=tmp_path) as run:
    for index, name in enumerate(names):
      cg.tap(float(index), name)
  for index, name in enumerate(names):
    assert values(files.stream_path(run.folder, name, None), name) == [index]


def test_relative_paths_are_of_the_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  gate = cg.gate(lambda x: np.float32(x), out=np.float32(0), effect="io", name="run.gate")
  with cg.run("r") as run:
    saves = cg.Checkpoints("saved", every=2)
    with cg.record("calls.cgr"), cg.channel("t", to=[cg.sinks.CSV("t.csv"), cg.sinks.Npy("t.npy")]):
      cg.tap(1.0, "t")
      gate(2.0)
    jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=4, save=saves)[0])(0)
    absolute = cg.sinks.JSONL(tmp_path / "elsewhere.jsonl")
  assert run.folder == tmp_path / "runs" / "r"
  names = {path.name for path in run.folder.iterdir()}
  made = {"saved", "calls.cgr", "t.csv", "t.npy"}
  assert names == made | {"run.json", "stream.t.cgs"}  # and no stream of the carries
  assert cg.Checkpoints(run.folder / "saved").steps() == (2, 4)
  assert absolute._target == str(tmp_path / "elsewhere.jsonl")
  assert cg.sinks.JSONL("after.jsonl")._target == str(tmp_path / "after.jsonl")
  with cg.replay(run.folder / "calls.cgr"):
    gate(2.0)


def test_alerts_checks_and_knobs_are_in_its_file(tmp_path):
  rate = cg.knob("run.rate", 0.5)
  with cg.run("r", folder=tmp_path) as run:
    jax.vmap(lambda x: cg.alert(x > 1, "x is {x}", x=x))(jnp.arange(3.0))
    rate.set(0.25)
    step(rate.read())
    with pytest.raises(cg.CheckError), cg.errors():
      jax.jit(lambda x: cg.check(x > 1, "expected more than {x}", x=x))(0.0)
  about = said(run)
  assert [(one["text"], one["lane"]) for one in about["alerts"]] == [("x is 2.0", [2])]
  assert [one["text"] for one in about["checks"]] == ["expected more than 0.0"]
  assert about["knobs"]["run.rate"] == 0.25
  assert said(run)["state"] == "finished"


@pytest.mark.parametrize("error", [None, ValueError("the block's")])
def test_alerts_that_were_left_out_are_told_at_the_end(error, tmp_path):
  run = cg.run("r", folder=tmp_path)
  text = f"left out of {error}"

  def block() -> None:
    with run:
      jax.vmap(lambda x: cg.alert(x >= 0, text))(jnp.arange(130))
      if error is not None:
        raise error

  with contextlib.nullcontext() if error is None else pytest.raises(ValueError):
    block()
  assert sum(1 + one["left_out"] for one in said(run)["alerts"]) == 130


def test_each_run_counts_alerts_anew(tmp_path):
  flood = jax.jit(jax.vmap(lambda x: cg.alert(x >= 0, "a flood")))
  flood(jnp.arange(130))
  for _ in range(2):
    with cg.run("r", folder=tmp_path) as run:
      flood(jnp.arange(130))
    assert [one["left_out"] for one in said(run)["alerts"]] == [0] * 100 + [29]
  heard: list[Any] = []
  with cg.on_alert(heard.append):
    flood(jnp.arange(3))
    cg.barrier()
  assert len(heard) == 3


def test_alerts_from_before_the_block_are_not_the_runs(tmp_path):
  heard: list[Any] = []

  def hear(one: Any) -> None:
    time.sleep(0.05)  # the others wait
    heard.append((str(one), opened.run() is None))

  with cg.on_alert(hear):
    jax.vmap(lambda x: (cg.alert(x >= 0, "before"), x)[1])(jnp.arange(5)).block_until_ready()
    with cg.run("r", folder=tmp_path) as run:
      cg.alert(True, "within")
  assert heard == [("before", True)] * 5 + [("within", False)]
  assert [one["text"] for one in said(run)["alerts"]] == ["within"]


def test_a_knobs_changes_are_in_the_stream(tmp_path):
  rate = cg.knob("run.changes", 0.5)
  with cg.run("r", folder=tmp_path) as run:
    step(1.0)
    rate.set(0.125)
  assert values(run.folder / "stream.loss.cgs", "knob:run.changes") == [0.125]


def test_a_summary_is_a_mapping(tmp_path):
  with cg.run("r", folder=tmp_path) as run:
    run.summary["float32"] = jnp.float32(0.97)
    run.summary.update(best={"step": np.int64(3)}, gone=1)
    del run.summary["gone"]
    assert dict(run.summary) == {"float32": 0.97, "best": {"step": 3}}
    with pytest.raises(cg.GateDefinitionError, match="run: summary: 'f': expected numbers"):
      run.summary["f"] = lambda: 0
    with pytest.raises(cg.GateDefinitionError, match="summary: expected a string"):
      run.summary[3] = 0
  run.summary["after"] = [1, 2]
  assert said(run)["summary"] == {"float32": 0.97, "best": {"step": 3}, "after": [1, 2]}


def test_a_summary_reads_as_it_was_given(tmp_path):
  given = {
    "inf": float("inf"), "array": np.arange(3), "jax": jnp.float32(0.1), "path": Path("x"),
    "pair": (1, {"a": float("nan")}), "set": {3},
  }  # fmt: skip
  with cg.run("r", folder=tmp_path) as run:
    run.summary.update(given)
  assert all(run.summary[name] is one for name, one in given.items())
  assert repr(run.summary) == repr(given)
  assert said(run)["summary"] == {
    "inf": "Infinity", "array": "int64[3]: [0, 1, 2]", "jax": 0.1, "path": "x",
    "pair": [1, {"a": "NaN"}], "set": [3],
  }  # fmt: skip


# -- its config ------------------------------------------------------------------------------------
@dataclasses.dataclass
class Model:
  width: int
  kind: type = dict


class Pair(NamedTuple):
  a: int
  b: Path


def test_a_config_is_what_json_has(tmp_path):
  config = {
    "none": None, "flags": (True, np.bool_(False)), "half": np.float16(0.1), "inf": float("inf"),
    "nan": jnp.float32("nan"), 3: jnp.arange(3), "large": np.zeros((4, 5)), "bf": jnp.bfloat16(1.5),
    "model": Model(3), "pair": Pair(1, Path("x")), "set": {1}, "dtype": np.dtype("int8"),
    "key": jax.random.key(1), "text": np.str_("t"),
  }  # fmt: skip
  with cg.run("r", folder=tmp_path, config=config) as run:
    pass
  assert run.config == said(run)["config"]
  assert run.config == {
    "none": None, "flags": [True, False], "half": 0.1, "inf": "Infinity", "nan": "NaN",
    "3": "int32[3]: [0, 1, 2]", "large": "float64[4, 5]", "bf": 1.5,
    "model": {"width": 3, "kind": "dict"}, "pair": {"a": 1, "b": "x"}, "set": [1], "dtype": "int8",
    "key": "uint32[2]: [0, 1]", "text": "t",
  }  # fmt: skip
  with cg.run("r", folder=tmp_path, config=Model(5)) as run:
    assert run.config == {"width": 5, "kind": "dict"}


def test_equal_sets_are_equal_configs(tmp_path):
  one, other = {0, 8}, {8, 0}  # which share a place of the table, so the first to come is first
  assert list(one) != list(other)
  for numbers in (one, other):
    config = {"a": numbers, "b": [frozenset(numbers), {"tanh", "relu"}]}
    with cg.run("r", folder=tmp_path, config=config) as run:
      assert run.config == {"a": [0, 8], "b": [[0, 8], ["relu", "tanh"]]}


def test_what_json_has_not_is_refused_by_its_key(tmp_path):
  deep: list[Any] = []
  deep.append(deep)
  for config, words in (
    ({"a": {"b": [1, object()]}}, r"run: config: 'a.b\[1\]': expected numbers.*got <object"),
    ({"a": {(1, 2): 3}}, r"run: config: 'a': key \(1, 2\): expected a string"),
    ({None: 3}, r"run: config: key None: expected a string"),
    ({"1": 1, 1: 2}, r"run: config: key 1: expected different keys, got '1' twice"),
    ({"deep": deep}, "more than 32 levels"),
    ([1], r"run: config: expected a mapping by name or a dataclass, got \[1\]"),
  ):
    with pytest.raises(cg.GateDefinitionError, match=words):
      cg.run("r", folder=tmp_path, config=config)
  with pytest.raises(cg.GateDefinitionError, match=r"config: 'x': .*got a traced array"):
    jax.jit(lambda x: (cg.run("r", folder=tmp_path, config={"x": x}), x)[1])(1.0)
  assert list(tmp_path.iterdir()) == []


# -- how it ends -----------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_the_block_is_its_crash(error, tmp_path):
  run = cg.run("r", folder=tmp_path)

  def crash() -> None:
    with run:
      step(1.0)
      raise error

  with pytest.raises(type(error)):
    crash()
  about = said(run)
  assert (run.state, about["state"]) == ("crashed", "crashed")
  assert about["error"] == type(error).__name__ + (f": {error}" if str(error) else "")
  assert "test_run.py" in about["traceback"]
  assert values(run.folder / "stream.loss.cgs", "loss") == [1]
  with cg.run("r", folder=tmp_path) as run:  # the next is a run as any
    pass
  assert run.state == "finished"


def test_a_good_exit_is_no_crash(tmp_path):
  with pytest.raises(SystemExit), cg.run("r", folder=tmp_path) as run:
    sys.exit(0)
  assert said(run)["state"] == "finished"


def test_the_errors_of_programs_under_way_are_the_blocks(tmp_path):
  def fail(x: Any) -> Any:
    time.sleep(0.05)
    raise ValueError("of the gate")

  gate = cg.gate(fail, like=lambda x: x, effect="io")
  failed = (ValueError, jax.errors.JaxRuntimeError)  # the latter where XLA runs it at once
  with pytest.raises(failed, match="of the gate"), cg.run("r", folder=tmp_path) as run:
    jax.jit(gate)(1.0)
  assert said(run)["error"].startswith("ValueError: of the gate")

  def lost(value: Any) -> None:
    raise KeyError("of the consumer")

  with pytest.raises(KeyError), cg.run("r", folder=tmp_path) as run:
    cg.tap(1.0, lost)
  assert "of the consumer" in said(run)["error"]


def test_a_gates_own_exception_is_what_it_crashed_by(tmp_path):
  gate = cg.gate(lambda x: 1 / 0, like=lambda x: x, effect="io")
  with pytest.raises(jax.errors.JaxRuntimeError), cg.run("r", folder=tmp_path) as run:
    jax.jit(gate)(1.0).block_until_ready()
  assert said(run)["error"].startswith("ZeroDivisionError")


def test_one_run_is_open_at_a_time(tmp_path):
  with cg.run("outer", folder=tmp_path) as outer:
    inner = cg.run("inner", folder=tmp_path)
    with pytest.raises(cg.GateError, match="expected no other run in this process, got 'inner'"):
      inner.__enter__()
    with pytest.raises(cg.GateError, match="expected no other run"):
      outer.__enter__()
  with pytest.raises(cg.GateError, match="a run can be entered once, got 'outer' again"):
    outer.__enter__()
  with inner:
    pass
  assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "outer"]


def test_a_block_is_that_of_all_threads(tmp_path):
  with cg.run("r", folder=tmp_path) as run:
    threads = [threading.Thread(target=step, args=(float(i),)) for i in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert sorted(values(run.folder / "stream.loss.cgs", "loss")) == list(range(8))


KILLED = """
import os, signal, sys
import callgate as cg, jax
run = cg.run("r", folder=sys.argv[1]).__enter__()
jax.jit(lambda x: cg.tap(x, "loss"))(1.0)
run.summary["best"] = 1.0
cg.barrier()
print("ready", flush=True)
ENDS = {
  "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: os._exit(0),
  "leave": lambda: None, "raise": lambda: 1 / 0, "wait": input,
}
ENDS[sys.argv[2]]()
"""


@pytest.mark.parametrize("how", ["kill", "exit", "leave", "raise"])
def test_a_process_that_ends_within_the_block_has_crashed(how, tmp_path):
  process = interpreters.start(KILLED, tmp_path, how, environment={"JAX_PLATFORMS": "cpu"})
  out, _ = process.communicate(timeout=60)
  assert "ready" in out
  about = files.read(tmp_path / "r")
  assert about["state"] == "crashed"
  words = "killed, or out of memory" if how in ("kill", "exit") else "ended within the block"
  assert words in about["error"]
  assert about["summary"] == {"best": 1.0}
  assert values(tmp_path / "r" / "stream.loss.cgs", "loss") == [1]


def test_a_process_that_lives_runs_until_it_is_killed(tmp_path):
  process = interpreters.start(KILLED, tmp_path, "wait", environment={"JAX_PLATFORMS": "cpu"})
  try:
    until(lambda: (tmp_path / "r" / "stream.loss.cgs").exists())
    assert files.read(tmp_path / "r")["state"] == "running"
    process.send_signal(signal.SIGKILL)
    until(lambda: files.read(tmp_path / "r")["state"] == "crashed")  # a dead one that is not reaped
  finally:
    process.kill()
    process.communicate()


def test_a_number_of_a_process_that_another_one_has_now_is_not_the_runs(tmp_path):
  with cg.run("r", folder=tmp_path) as run:
    about = json.loads((run.folder / "run.json").read_text())
    for change, state in (
      ({}, "running"), ({"began": 1}, "crashed"), ({"boot": "another"}, "crashed"),
      ({"id": 2**22 - 1}, "crashed"), ({"host": "elsewhere", "began": 1}, "running"),
    ):  # fmt: skip
      files.write(tmp_path, {**about, "process": about["process"] | change})
      assert files.read(tmp_path)["state"] == state, change
  files.write(tmp_path, {**about, "process": None})
  assert files.read(tmp_path)["state"] == "crashed"


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"state": 3}', "[" * 100_000])
def test_a_file_of_another_kind_is_refused(text, tmp_path):
  (tmp_path / "run.json").write_text(text)
  with pytest.raises(ValueError, match=r"run\.json: expected"):
    files.read(tmp_path)


FORKED = """
import os, sys
import callgate as cg
with cg.run("r", folder=sys.argv[1]) as run:
  run.summary["a"] = 1
  child = os.fork()
  if child == 0:
    try:
      run.summary["a"] = 2
    except cg.GateError as error:
      run.__exit__(None, None, None)
      os._exit(0 if "which was forked from it" in str(error) else 2)
    os._exit(1)
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), open(run.folder / "run.json").read())
"""


def test_a_forks_child_leaves_the_run_to_its_parent(tmp_path):
  out = interpreters.succeed(FORKED, tmp_path, environment={"JAX_PLATFORMS": "cpu"})
  status, _, text = out.partition(" ")
  assert (status, json.loads(text)["state"]) == ("0", "running")
  about = files.read(tmp_path / "r")
  assert (about["state"], about["summary"]) == ("finished", {"a": 1})


def test_a_folder_that_can_not_be_made_is_an_error_and_no_run_is_open(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError):
    cg.run("r", folder=tmp_path / "file").__enter__()
  (tmp_path / "r").mkdir()
  (tmp_path / "r-2").mkdir()
  with cg.channel("loss", to=lambda loss: None):
    run = cg.run("r", folder=tmp_path)
    run._stream_of = lambda name: 1 / 0
    with pytest.raises(ZeroDivisionError):
      run.__enter__()
  assert (run.state, run.folder.name) == ("crashed", "r-3")
  with cg.run("r", folder=tmp_path):
    pass


@pytest.mark.parametrize("error", [None, ZeroDivisionError("the block's"), SystemExit(0)])
def test_a_run_whose_folder_is_gone_is_closed_all_the_same(error, tmp_path):
  run = cg.run("r", folder=tmp_path)

  def block() -> None:
    with run:
      step(1.0)
      shutil.rmtree(run.folder)
      if error is not None:
        raise error

  with pytest.raises(OSError if error is None else type(error)) as caught:
    block()
  if error is not None:
    assert caught.value is error
    assert "<callgate.run 'r', " in error.__notes__[0]
    assert "FileNotFoundError" in error.__notes__[0]
  assert run.state == "crashed"
  with cg.run("next", folder=tmp_path) as run:
    pass
  assert said(run)["state"] == "finished"


def test_a_result_that_can_not_be_written_is_refused_and_leaves_the_others(tmp_path):
  with cg.run("r", folder=tmp_path) as run:
    run.summary["a"] = 1
    (run.folder / "run.json").rename(run.folder / "kept")
    (run.folder / "run.json").mkdir()
    with pytest.raises(OSError):
      run.summary["b"] = 2
    with pytest.raises(OSError):
      run.summary["a"] = 3
    with pytest.raises(OSError):
      del run.summary["a"]
    (run.folder / "run.json").rmdir()
    assert dict(run.summary) == {"a": 1}
    run.summary["c"] = 4
  assert (said(run)["state"], said(run)["summary"]) == ("finished", {"a": 1, "c": 4})


def test_an_alert_that_can_not_be_written_is_told_and_is_the_barriers_error(tmp_path):
  heard: list[Any] = []
  with cg.on_alert(heard.append), cg.run("r", folder=tmp_path) as run:
    (run.folder / "run.json").unlink()
    (run.folder / "run.json").mkdir()
    cg.alert(True, "look")
    with pytest.raises(OSError):
      cg.barrier()
    (run.folder / "run.json").rmdir()
  assert heard == ["look"]
  assert [one["text"] for one in said(run)["alerts"]] == ["look"]


GONE = """
import shutil, sys
import callgate as cg
run = cg.run("r", folder=sys.argv[1]).__enter__()
shutil.rmtree(run.folder)
"""


def test_a_folder_that_is_gone_at_the_end_of_the_process_is_a_line(tmp_path):
  process = interpreters.start(GONE, tmp_path, environment={"JAX_PLATFORMS": "cpu"})
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 0
  assert errors.startswith("callgate: <callgate.run 'r', crashed, in ")
  assert errors.count("\n") == 1


def test_a_channel_that_nobody_reads_holds_nothing_up(tmp_path):
  with cg.run("r", folder=tmp_path) as run, cg.channel("unread") as unread:
    cg.tap(1.0, "unread")
    cg.barrier()
    assert unread.stats()["pending"] == 1
    seen = unread.records()
    assert next(seen).value == 1
    cg.tap(2.0, "unread")
    assert next(seen).value == 2
  assert values(run.folder / "stream.unread.cgs", "unread") == [1, 2]
  waiting = cg.channel("unread")
  with cg.run("r", folder=tmp_path):
    cg.tap(1.0, "unread")
  assert waiting.stats()["pending"] == 1
  waiting.close()


# -- several processes -----------------------------------------------------------------------------
GROUP = """
import sys
import jax
import callgate as cg
index, count, port = map(int, sys.argv[1:4])
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
from process_groups import report
with cg.run("r", folder=sys.argv[4], config={"rate": 1}) as run:
  with cg.channel("own", to=cg.sinks.JSONL("own-{process}.jsonl")):
    jax.jit(lambda x: cg.tap(x, "own"))(float(index))
report(folder=str(run.folder))
"""


def test_processes_share_a_folder(tmp_path):
  groups = pytest.importorskip("process_groups")
  script = tmp_path / "group.py"
  script.write_text(GROUP)
  ended = groups.run_group(script, 2, str(tmp_path / "runs"), folder=tmp_path, devices=1)
  assert [one.status for one in ended] == [0, 0], [one.errors for one in ended]
  (folder,) = {one.reports["folder"] for one in ended}
  assert folder == str(tmp_path / "runs" / "r")
  names = sorted(path.name for path in Path(folder).iterdir())
  assert names == [
    "own-0.jsonl",
    "own-1.jsonl",
    "run.json",
    "stream.own.p0.cgs",
    "stream.own.p1.cgs",
  ]
  assert files.read(Path(folder))["processes"] == 2
  assert values(Path(folder) / "stream.own.p1.cgs", "own") == [1]


SAVES = """
import callgate as cg, jax, sys
from jax import export
tapped = jax.jit(lambda x: cg.tap(2 * x, "loss"))
program = export.export(tapped, disabled_checks=cg.export_checks())
open(sys.argv[1], "wb").write(program(1.0).serialize())
"""
LOADS = """
import callgate as cg, sys
from jax import export
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
for value in (3.0, 4.0):
  with cg.run("r", folder=sys.argv[2]) as run:
    program.call(value)
  with cg.open_stream(run.folder / "stream.loss.cgs") as stream:
    print([float(record.leaves[""]) for record in stream])
"""


def test_taps_of_an_exported_program_have_a_stream_in_a_run(tmp_path):
  path = tmp_path / "program"
  interpreters.succeed(SAVES, path, environment={"JAX_PLATFORMS": "cpu"})
  shown = interpreters.succeed(LOADS, path, tmp_path, environment={"JAX_PLATFORMS": "cpu"})
  assert shown == "[6.0]\n[8.0]\n"
