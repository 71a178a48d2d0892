# SPDX-License-Identifier: Apache-2.0
"""`make jax-suites`: tests that pass without `callgate.install()` and not with it are found."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "jax_suites.py"


def run(tests: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
  environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
  environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # these files need none, and import long
  return subprocess.run(
    [sys.executable, str(TOOL), str(tests), "--out", str(tests / "out"), *arguments],
    env=environment, capture_output=True, text=True, timeout=100,
  )  # fmt: skip


def write(path: Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(text), encoding="utf-8")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
  """The tool's run on a suite of two files, of the sort that JAX's are."""
  tests = tmp_path_factory.mktemp("jax") / "tests"
  write(tests.parent / "jax" / "version.py", '_version = "0.10.9"\n')
  write(
    tests / "python_callback_test.py",
    """
    import sys
    import unittest

    installed = "callgate" in sys.modules

    class Callbacks(unittest.TestCase):
      def test_same(self): ...
      def test_planted(self): self.assertFalse(installed)
      def test_mended(self): self.assertTrue(installed)
      def test_red(self): self.fail("on both sides")
      def test_left_out(self): self.skipTest("on both sides")
    """,
  )
  write(
    tests / "pallas" / "tpu_pallas_interpret_test.py",
    """
    import os
    import sys

    def test_first(): ...
    def test_dies(): "callgate" in sys.modules and os._exit(7)
    def test_behind(): ...
    """,
  )
  return run(tests)


def test_a_test_that_fails_only_after_install_is_named_and_counts(compared) -> None:
  assert compared.returncode == 1, compared.stderr
  named = "python_callback_test.py::Callbacks::test_planted: passed without, failed with"
  assert named in compared.stdout
  assert "8 tests; 3 pass without callgate.install() and not with it" in compared.stdout


def test_outcomes_alike_on_both_sides_are_counted_and_tests_that_install_mends_are_named(
  compared,
) -> None:
  assert "test_mended: failed without, passed with" in compared.stdout
  assert "on both sides: 1 skipped, 1 failed" in compared.stdout
  assert not any(name in compared.stdout for name in ("test_same", "test_red", "test_left_out"))


def test_a_process_that_dies_says_in_which_test_and_what_was_not_run(compared) -> None:
  lines = compared.stdout.splitlines()
  assert any("installed: ended with status 7 in test_dies; see " in line for line in lines)
  assert any("::test_dies: passed without, unfinished with" in line for line in lines)
  assert any("::test_behind: passed without, not run with" in line for line in lines)
  assert "::test_first" not in compared.stdout


def test_it_says_which_versions_met_and_which_files_are_not_there(compared) -> None:
  jax = importlib.metadata.version("jax")
  assert f"JAX {jax}, tests of 0.10.9; logs in " in compared.stdout
  assert "expected checkify_test.py, found no such file" in compared.stdout


def test_a_suite_without_differences_is_success_and_one_without_tests_is_not(
  tmp_path, monkeypatch
) -> None:
  write(tmp_path / "ffi_test.py", "def test_same(): ...\n")
  monkeypatch.syspath_prepend(str(TOOL.parent))
  tool = importlib.import_module("jax_suites")
  found = tool.Run({"test_same": "passed"}, 0.1, "", tmp_path / "log")
  monkeypatch.setattr(tool, "_run", lambda *_: found)
  status = {}
  for file in ("ffi_test.py", "other_test.py"):
    monkeypatch.setattr(sys, "argv", [str(TOOL), str(tmp_path), "--out", str(tmp_path), file])
    status[file] = tool.main()
  assert status == {"ffi_test.py": 0, "other_test.py": 2}


def test_tests_of_an_old_jax_run_through_their_compat_module(tmp_path) -> None:
  write(
    tmp_path / "host_callback_test.py",
    """
    from jax.experimental import host_callback as hcb
    from jax import api, test_util as jtu
    from jax.config import config
    from jax.util import prod

    def test_call(): assert hcb.call(lambda x: x + 1, 1, result_shape=1) == 2
    def test_gone(): hcb.outfeed_receiver
    """,
  )
  done = run(tmp_path, "--compat", "host_callback_2023", "host_callback_test.py")
  assert done.returncode == 0, done.stdout + done.stderr
  assert "through callgate.compat.host_callback_2023: 1 failed, 1 passed" in done.stdout
  assert "  failed: test_gone" in done.stdout


def test_the_worst_outcome_of_several_processes_counts(monkeypatch) -> None:
  monkeypatch.syspath_prepend(str(TOOL.parent))
  tool = importlib.import_module("jax_suites")
  log = "[ RUN      ] T.a\n[       OK ] T.a\n[  SKIPPED ] T.b - why\n[       OK ] T.c\n"
  log += "[  FAILED  ] T.a\n[       OK ] T.b\n[       OK ] T.c\n"
  assert tool._outcomes_of_processes(log) == {"T.a": "failed", "T.b": "skipped", "T.c": "passed"}


@pytest.mark.parametrize("ignored", [(), (signal.SIGABRT,)], ids=["", "held"])
def test_a_file_that_hangs_is_ended_even_where_it_holds_the_signal(ignored, monkeypatch) -> None:
  monkeypatch.syspath_prepend(str(TOOL.parent))
  tool = importlib.import_module("jax_suites")
  monkeypatch.setattr(tool, "DUMP_SECONDS", 0.1)
  hangs = f"""
import signal
for one in {[int(one) for one in ignored]}: signal.signal(one, signal.SIG_IGN)
print(flush=True)
while True: signal.pause()
"""
  process = subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE)
  with process:
    assert process.stdout is not None
    assert process.stdout.readline()
    assert tool._wait(process, 0.1) == "still ran after 0.1 s"
  assert process.returncode == -(signal.SIGKILL if ignored else signal.SIGABRT)
