# SPDX-License-Identifier: Apache-2.0
"""Progress bars themselves: the decorator, what bars show and where, and how they end."""

from __future__ import annotations

import collections
import functools
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
from interpreters import output_of, run_python
from programs import drop_programs
from recorded_bars import XS, add, counts, done, drawn_by, recorded, same, summed

import callgate as cg
from callgate._core import names
from callgate._loops import bars, draw, progress


# -- the decorator ---------------------------------------------------------------------------------
def test_the_decorator_gives_any_loop_of_jax_a_bar() -> None:
  @cg.progress("scanned", every=3)
  def step(carry: Any, x: Any) -> Any:
    return carry + x, None

  @cg.progress
  def index_step(i: Any, value: Any) -> Any:
    return value + i

  @cg.progress("limited", total=99)
  def value_step(value: Any) -> Any:
    return value + 1

  with recorded() as bars:
    assert float(jax.jit(lambda: jax.lax.scan(step, 0.0, XS))()[0]) == 4950
    assert int(jax.jit(lambda: jax.lax.fori_loop(0, 10, index_step, 0))()) == 45
    assert int(jax.jit(lambda n: jax.lax.while_loop(lambda c: c < n, value_step, 0))(12)) == 12
  assert counts(bars) == [("scanned", 100, 100), (None, 10, 10), ("limited", 12, 99)]


@pytest.mark.parametrize("options", [{"until": lambda c: c > 20}, {"stoppable": True}])
def test_a_loop_that_may_end_early_has_its_decorated_bodys_bar(options: Any) -> None:
  @cg.progress("decorated", every=7)
  def step(carry: Any, x: Any, scale: float = 1.0) -> Any:
    return carry + scale * x, None

  @functools.wraps(step)
  def twice(carry: Any, x: Any) -> Any:
    return step(carry, 2 * x)

  with recorded() as bars:
    for body in (step, functools.partial(step, scale=1.0)):
      last, _, steps = jax.jit(lambda f=body: cg.scan(f, 0.0, XS, **options))()
      assert (float(last), int(steps)) == ((21.0, 7) if "until" in options else (4950.0, 100))
    assert cg.scan(step, 0.0, XS, **options, progress="given")[2] == steps
    assert cg.scan(twice, 0.0, XS[:3], **options)[0] == 6
  total = int(steps)
  assert counts(bars) == [("decorated", total, 100)] * 2 + [("given", total, 100)]


def test_a_marked_body_inside_another_call_counts_step_by_step() -> None:
  step = jax.checkpoint(cg.progress("deep", total=100)(add))
  with recorded() as bars:
    got = done(jax.jit(lambda: jax.lax.scan(step, 0.0, XS))())
  same(got, jax.jit(lambda: jax.lax.scan(jax.checkpoint(add), 0.0, XS))())
  assert counts(bars) == [("deep", 100, 100)]


def test_a_marked_body_that_is_jitted_is_the_loops_own() -> None:
  step = jax.jit(cg.progress("jitted")(add))
  with recorded() as bars:
    got = done(jax.jit(lambda: jax.lax.scan(step, 0.0, XS))())
  same(got, jax.jit(lambda: jax.lax.scan(jax.jit(add), 0.0, XS))())
  assert counts(bars) == [("jitted", 100, 100)]


# -- what bars show --------------------------------------------------------------------------------
def test_noted_values_stand_behind_the_bar() -> None:
  def note(step: np.ndarray) -> np.ndarray:
    progress.note("loss", np.float32(1 / (1 + step)))
    progress.note("step", int(step))
    return step

  gate = cg.gate(note, out=lambda x: x, effect="io")
  body = lambda c, x: (c + gate(x), None)
  with recorded() as bars:
    done(jax.jit(lambda: cg.scan(body, 0, jnp.arange(8), progress="all"))())
    draw.flush()
    named = cg.Progress("named", show=["loss", "absent"])
    done(jax.jit(lambda: cg.scan(body, 0, jnp.arange(8), progress=named))())
    draw.flush()
    quiet = cg.Progress("none", show=())
    done(jax.jit(lambda: cg.scan(body, 0, jnp.arange(8), progress=quiet))())
  assert bars[0].postfix == {"loss": "0.125", "step": "7"}
  assert bars[1].postfix == {"loss": "0.125"}
  assert bars[2].postfix == {}


def test_a_log_file_gets_one_line_of_a_short_loop() -> None:
  file = io.StringIO()
  done(jax.jit(summed(cg.scan, progress=cg.Progress("logged", file=file)))(1.0))
  cg.barrier()
  lines = file.getvalue().splitlines()
  assert len(lines) == 1
  assert lines[0].startswith("logged: 100% 100/100 [")
  assert "\r" not in file.getvalue()


@pytest.mark.parametrize("total", [None, 200])
def test_without_a_total_or_beyond_it_a_log_file_gets_tqdms_line(total: int | None) -> None:
  file, tqdms = io.StringIO(), io.StringIO()
  for desc in ("search", None):
    bar = cg.Progress(desc, total=total, file=file)
    done(jax.jit(lambda: cg.while_loop(lambda n: n < 300, lambda n: n + 1, 0, progress=bar))())
    cg.barrier()
    with tqdm.tqdm(desc=desc, total=total, file=tqdms) as other:
      other.update(300)
  lines = tqdms.getvalue().strip().split("\n")
  counted = [line.split("\r")[-1].split(" [")[0] for line in lines]
  assert [line.split(" [")[0] for line in file.getvalue().splitlines()] == counted
  assert counted == ["search: 300it", "300it"]


def test_the_last_line_has_the_last_value() -> None:
  file = io.StringIO()

  def body(n: Any, _: Any) -> Any:
    cg.tap(n, lambda value: time.sleep(1e-4), name="seen")
    return n + 1, None

  done(jax.jit(lambda: cg.scan(body, 0, length=900, progress=cg.Progress("last", file=file)))())
  cg.barrier()
  assert "seen=899" in file.getvalue().splitlines()[-1]


def test_a_value_that_was_tapped_to_a_lambda_has_a_readable_label() -> None:
  progress.noted.clear()
  with recorded() as bars:
    body = lambda c, x: (c + cg.tap(x, lambda value: None), None)
    done(jax.jit(lambda: cg.scan(body, 0.0, XS, progress="lambda"))())
    cg.barrier()
    done(jax.jit(lambda: cg.scan(add, 0.0, XS, progress=cg.Progress(show=["<lambda>"])))())
  assert bars[1].postfix == {"value": "99"}


def test_a_terminal_gets_tqdms_bar() -> None:
  class Terminal(io.StringIO):
    def isatty(self) -> bool:
      return True

  file = Terminal()
  done(jax.jit(summed(cg.scan, progress=cg.Progress("drawn", file=file)))(1.0))
  cg.barrier()
  assert "drawn: 100%|" in file.getvalue()
  assert "100/100" in file.getvalue()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"desc": 3}, "Progress: desc: expected a string, got 3"),
    ({"every": 0}, "Progress: every: expected an integer of at least 1, got 0"),
    ({"total": -1}, "Progress: total: expected an integer of at least 0, got -1"),
    ({"show": "loss"}, "Progress: show: expected a sequence of names, got 'loss'"),
    ({"file": 1}, "Progress: file: expected an object with write(), got 1"),
    ({"mininterval": -1.0}, "Progress: mininterval: expected 0 or more seconds, got -1.0"),
  ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
  with pytest.raises(cg.GateDefinitionError) as caught:
    cg.Progress(**options)
  assert str(caught.value) == message


def test_progress_of_another_type_is_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="expected None, a bool, a description"):
    cg.scan(add, 0.0, XS, progress=3)  # type: ignore[arg-type]


# -- ends ------------------------------------------------------------------------------------------
def test_a_program_that_fails_closes_its_bar_where_it_stood() -> None:
  def fail(x: np.ndarray) -> np.ndarray:
    if x == 6:
      raise ValueError("six")
    return x

  gate = cg.gate(fail, out=lambda x: x, effect="io")
  body = lambda c, x: (c + gate(x), None)
  failing = cg.Progress("failing", every=1)
  with recorded() as bars:
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="six"):
      done(jax.jit(lambda: cg.scan(body, 0, jnp.arange(10), progress=failing))())
    draw.flush()
    done(jax.jit(summed(cg.scan, progress="next"))(1.0))
  assert counts(bars) == [("failing", 6, 10), ("next", 100, 100)]


def test_a_bar_that_cannot_be_drawn_harms_no_program(capfd: pytest.CaptureFixture[str]) -> None:
  def make(**arguments: Any) -> Any:
    raise RuntimeError("no ink")

  draw.flush()
  with drawn_by(make):
    got = jax.jit(summed(cg.scan, progress="unseen"))(1.0)
    done(got)
  assert "no ink" in capfd.readouterr().err
  same(got, jax.jit(summed(jax.lax.scan))(1.0))


def test_a_bar_whose_file_is_closed_is_told_of_once_and_others_are_drawn(
  capfd: pytest.CaptureFixture[str],
) -> None:
  lost, drawn = io.StringIO(), io.StringIO()
  bars = [cg.Progress("lost", file=lost), cg.Progress("drawn", file=drawn)]
  program = jax.jit(lambda x: sum(summed(cg.scan, progress=bar)(x) for bar in bars))
  lost.close()
  for _ in range(2):
    done(program(1.0))
    draw.flush()
    said = capfd.readouterr().err.splitlines()
    assert said == [
      "callgate: the progress bar 'lost' is no longer drawn; its loop continues: ValueError: "
      "I/O operation on closed file."
    ]
  assert drawn.getvalue().count("drawn: 100%") >= 2


def test_a_process_that_ends_in_the_middle_of_a_loop_ends_cleanly() -> None:
  process = run_python(
    """
    import contextlib, jax, jax.numpy as jnp, numpy as np, threading, time
    import callgate as cg
    entered = threading.Event()
    def wait(x):
      entered.set()
      time.sleep(0.01)
      return x
    gate = cg.gate(wait, out=lambda x: x, effect="io", thread="own")
    body = lambda c, x: (c + gate(x), None)
    f = jax.jit(lambda c: cg.scan(body, c, jnp.arange(100), progress="cut"))
    def run():
      with contextlib.suppress(Exception):  # the runtime has closed
        jax.block_until_ready(f(0))
    threading.Thread(target=run, daemon=True).start()
    assert entered.wait(60)
    print("end")
    """
  )
  assert (process.returncode, process.stdout) == (0, "end\n"), process.stderr
  assert "Traceback" not in process.stderr


def test_the_bar_of_a_finished_program_is_whole_when_the_process_ends_right_after() -> None:
  process = run_python(
    """
    import jax, callgate as cg
    loop = lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=100, progress="last")[0]
    f = jax.jit(loop).lower(0).compile()
    jax.block_until_ready(f(0))
    """
  )
  assert process.returncode == 0, process.stderr
  assert "last: 100% 100/100" in process.stderr


def test_the_thread_ends_when_no_bar_is_left_and_the_next_bar_starts_it_again() -> None:
  printed = output_of(
    """
    import io, threading, jax, jax.numpy as jnp
    import callgate as cg
    from callgate._loops import draw, progress
    draw._LINGER = 1
    file = io.StringIO()
    bar = cg.Progress("t", file=file)
    f = jax.jit(lambda c: cg.scan(lambda c, x: (c + x, None), c, jnp.arange(5.0), progress=bar))
    def drawing():
      return [t for t in threading.enumerate() if t.name == "callgate-progress"]
    assert not drawing()
    for turn in range(3):
      jax.block_until_ready(f(0.0))
      for thread in drawing():
        thread.join(30)
        assert not thread.is_alive()
    print(file.getvalue().count("t: 100% 5/5"))
    """
  )
  assert printed.strip() == "3"


class Slotted:
  """A file that takes no weak reference."""

  __slots__ = ("text",)

  def __init__(self) -> None:
    self.text = ""

  def write(self, text: str) -> None:
    self.text += text

  def flush(self) -> None:
    pass

  def getvalue(self) -> str:
    return self.text


@pytest.mark.parametrize("make", [io.StringIO, Slotted])
def test_a_file_is_kept_as_long_as_a_program_that_draws_to_it(
  engine: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
  newest = collections.deque[Any](maxlen=1)
  monkeypatch.setattr(progress, "_newest", newest)

  def kept(count: int) -> int:
    for _ in range(count):
      file = make()
      bar = cg.Progress("kept", file=file)
      program = jax.jit(summed(cg.scan, progress=bar)).lower(1.0).compile()
      newest.clear()
      drop_programs()  # with the trace, which has the bar
      done(program(1.0))
      cg.barrier()
      assert file.getvalue().count("kept: 100%") == 1
      del file, bar, program
    drop_programs()
    return len(names._objects)

  assert kept(1) == kept(2)


@pytest.mark.parametrize("make", [io.StringIO, Slotted])
def test_a_bar_whose_program_is_gone_is_drawn(make: Callable[[], Any]) -> None:
  file = make()
  done(jax.jit(summed(cg.scan, progress=cg.Progress("gone", file=file)))(1.0))
  drop_programs()
  cg.barrier()
  assert file.getvalue().count("gone: 100%") == 1


def test_a_bar_is_drawn_where_the_terminal_has_no_columns() -> None:
  bar = bars.Redrawn(total=10, file=io.StringIO(), ncols=0)
  assert "0/10" in str(bar)
  bar.close()


@pytest.mark.parametrize("how", ["progress", "stoppable", "save"])
def test_mistakes_of_a_body_are_told_in_the_users_terms(how: str, tmp_path: Path) -> None:
  def scan(body: Callable[..., Any], init: Any, folder: str) -> None:
    options: Any = {how: cg.Checkpoints(tmp_path / folder) if how == "save" else True}
    cg.scan(body, init, XS, **options)

  expected = r"scan: f: expected .* a pair \(carry, y\), got "
  with pytest.raises(TypeError, match=expected):
    scan(lambda c, x: c, 0.0, "carry")
  with pytest.raises(TypeError, match=expected):
    scan(lambda c, x: (c, x, 1), 0.0, "three")
  with pytest.raises(TypeError, match=r"state\.carry\['a'\] has type float32"):
    scan(lambda c, x: ({"a": c["a"].astype(int)}, x), {"a": jnp.float32(0)}, "type")
