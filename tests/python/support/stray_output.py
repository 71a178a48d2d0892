# SPDX-License-Identifier: Apache-2.0
"""Finds output that no test expects: ignored exceptions, tracebacks outside of a report.

    python stray_output.py COMMAND...    # runs it; a run that passed and printed such lines fails

An exception in a finalizer, in a thread or at the end of a process fails no test by itself: Python
prints it and goes on. `make test` runs pytest by this program, which sees the ends of pytest's
workers, too. conftest.py registers the plugin, which looks at the output that pytest captures of a
test. interpreters.py asks `expect_none` about the processes that tests start.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from typing import IO

import pytest

IGNORED = re.compile(r"Exception ignored (?:in|while|on)\b.*")
_STRAY = re.compile(rf"{IGNORED.pattern}|Traceback \(most recent call last\):|Fatal Python error.*")

# Known lines, as regular expressions, each with the reason why callgate can't prevent it.
KNOWN: dict[str, str] = {
  "<function _xla_gc_callback at": "Ctrl-C came while JAX's callback of a collection ran; Python "
  "prints the KeyboardInterrupt there, and the wait for the program raises another",
}


def stray_lines(text: str, pattern: re.Pattern[str] = IGNORED) -> list[str]:
  """The lines of a text that the pattern finds and KNOWN does not have."""
  found = (match.group() for match in pattern.finditer(text))
  return [line for line in found if not any(re.search(known, line) for known in KNOWN)]


def expect_none(text: str) -> None:
  """Fails the test if a process has printed an exception that Python ignored."""
  lines = stray_lines(text)
  assert not lines, f"expected a process without ignored exceptions, got {lines}\n{text}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
  item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
  """Fails the end of a test in which Python has ignored an exception."""
  report = yield
  lines = [line for _, text in report.sections for line in stray_lines(text)]
  if call.when == "teardown" and report.passed and lines:
    report.outcome = "failed"
    report.longrepr = f"{item.nodeid}: Python printed {lines} (stray_output.py)"
  return report


def _copy(source: IO[bytes], target: IO[bytes], seen: bytearray) -> None:
  while chunk := source.read1(1 << 16):  # type: ignore[attr-defined]
    target.write(chunk)
    target.flush()
    seen += chunk


def main(command: list[str]) -> int:
  """Runs a command with its outputs passed on; fails if it passed and has printed stray lines."""
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout is not None
  assert process.stderr is not None
  seen = [bytearray(), bytearray()]
  pairs = [(process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)]
  threads = [
    threading.Thread(target=_copy, args=(*pair, text))
    for pair, text in zip(pairs, seen, strict=True)
  ]
  for thread in threads:
    thread.start()
  status = process.wait()
  for thread in threads:
    thread.join()
  lines = [line for text in seen for line in stray_lines(text.decode(errors="replace"), _STRAY)]
  if status == 0 and lines:
    print("\nexpected a run that prints no exception outside of a test's report, got:")
    print(*(f"  {line}" for line in lines), sep="\n")
    print("mend its cause, or name it with its reason in tests/python/support/stray_output.py")
    return 1
  return status if status >= 0 else 128 - status


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
