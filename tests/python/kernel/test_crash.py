# SPDX-License-Identifier: Apache-2.0
"""`callgate.config(crash_report=True)`: what a process says before it dies in a kernel."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap

import pytest
from interpreters import output_of, run_python

KERNEL = """
  import jax, jax.numpy as jnp, numpy as np
  import callgate as cg
  jax.config.update("jax_num_cpu_devices", 1)

  def kernel(body, **options):
    return cg.cpp('''
      #include <atomic>
      #include <csignal>
      #include <cstdlib>
      #include <thread>
      __attribute__((noinline)) int deeper(volatile int* x, int n) {
        volatile int y[1000] = {*x};
        return n == 0 ? 0 : deeper(y, n + 1) + y[n % 1000];
      }
      void crasher(cg::Context& context, cg::In<float, 2> x, cg::Out<float> z) { ''' + body
      + " }", "crasher", name="my crasher", out=lambda x: x, **options)
"""


def die(
  body: str, call: str = "jax.jit(k)(x)", before: str = "", **options: str
) -> tuple[int, str]:
  """Exit code and stderr of a process that calls a kernel of that body with x of float32[2,3]."""
  source = textwrap.dedent(KERNEL) + textwrap.dedent(before)
  arguments = "".join(f", {name}={value}" for name, value in options.items())
  source += f"\nk = kernel({body!r}{arguments})\ncg.config(crash_report=True)\n"
  source += f"x = np.ones((2, 3), np.float32)\njax.block_until_ready({call})\n"
  done = run_python(source)
  return done.returncode, done.stderr


def report(stderr: str) -> str:
  """The report's lines."""
  return stderr[stderr.index("callgate: SIG") :]


NULL = "*(volatile float*)nullptr = 1;"


def test_a_null_pointer_is_reported_with_the_kernel_and_its_arrays() -> None:
  code, stderr = die(NULL)
  assert code == -signal.SIGSEGV
  assert re.search(
    r"callgate: SIGSEGV at address 0x0 in kernel 'my crasher', called at .+:\d+ \(.+\)\n"
    r"  operand 0 'x': float32\[2,3\] at 0x[0-9a-f]+-0x[0-9a-f]+\n"
    r"  result 0 'z': float32\[2,3\] at 0x[0-9a-f]+-0x[0-9a-f]+\n",
    stderr,
  ), stderr


@pytest.mark.parametrize(
  ("body", "number"),
  [
    ("std::abort();", signal.SIGABRT),
    ("std::raise(SIGFPE);", signal.SIGFPE),
    ("std::raise(SIGBUS);", signal.SIGBUS),
    ("__builtin_trap();", None),  # SIGILL or SIGTRAP's like, by processor
  ],
  ids=["abort", "arithmetic", "bus", "illegal"],
)
def test_other_signals_are_reported(body: str, number: signal.Signals | None) -> None:
  number = number or signal.SIGILL
  code, stderr = die(body)
  assert code == -number
  assert f"callgate: {number.name} in kernel 'my crasher'" in stderr


def test_an_address_close_to_an_array_is_said_to_be() -> None:
  # A large array ends where its mapping ends, or soon after: the loop runs on until it faults.
  body = "volatile float* p = const_cast<float*>(x.data()); for (;; p += 1024) *p = *p;"
  code, stderr = die(body, call="jax.jit(k)(np.ones((1 << 20, 64), np.float32))")
  assert code == -signal.SIGSEGV
  assert "operand 0 'x': float32[1048576,64]" in report(stderr)


def test_without_the_option_nothing_is_printed() -> None:
  source = (
    textwrap.dedent(KERNEL)
    + f"""
k = kernel({NULL!r})
with cg.config(crash_report=True):
  pass
jax.block_until_ready(jax.jit(k)(np.ones((2, 3), np.float32)))
"""
  )
  done = run_python(source)
  assert done.returncode == -signal.SIGSEGV
  assert "callgate" not in done.stderr


def test_faulthandler_still_has_its_say() -> None:
  for before in (
    "import faulthandler; faulthandler.enable()",
    "cg.config(crash_report=True); import faulthandler; faulthandler.enable()",
  ):
    code, stderr = die(NULL, before=before)
    assert code == -signal.SIGSEGV
    assert "SIGSEGV at address 0x0 in kernel 'my crasher'" in stderr
    assert "Fatal Python error: Segmentation fault" in stderr
    assert stderr.count("callgate: SIG") == 1


def test_a_crash_outside_of_kernels_is_left_to_others() -> None:
  code = run_python(
    """
    import ctypes, callgate as cg
    cg.config(crash_report=True)
    ctypes.string_at(0)
    """
  )
  assert code.returncode == -signal.SIGSEGV
  assert "callgate" not in code.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="XLA has one thread on one core")
def test_a_crash_on_one_of_xlas_threads_in_a_parallel_loop_is_the_kernels() -> None:
  body = """
    auto caller = std::this_thread::get_id();
    std::atomic<int> started{0};
    context.parallel_for(0, 2, 1, [&](int64_t) {
      ++started;
      while (started < 2) std::this_thread::yield();
      if (std::this_thread::get_id() != caller) *(volatile float*)nullptr = 1;
    });"""
  before = "jax.jit(lambda x: x @ x)(jnp.ones((300, 300))).block_until_ready()"
  code, stderr = die(body, before=before)
  assert code == -signal.SIGSEGV
  assert "SIGSEGV at address 0x0 in kernel 'my crasher'" in stderr


def test_a_crash_on_a_thread_that_the_kernel_started_names_the_kernels_that_run() -> None:
  code, stderr = die("std::thread([] { *(volatile float*)nullptr = 1; }).join();")
  assert code == -signal.SIGSEGV
  assert "on a thread that callgate did not start, while there ran\nkernel 'my crasher'" in stderr


def test_a_stack_overflow_is_reported() -> None:
  code, stderr = die("int start = 1; z[0] = deeper(&start, 1);")
  assert code == -signal.SIGSEGV
  assert "SIGSEGV" in report(stderr)
  assert "in kernel 'my crasher'" in report(stderr)


def test_a_lane_of_a_vmap_is_reported_with_its_own_shape() -> None:
  code, stderr = die(NULL, call="jax.jit(jax.vmap(k))(np.ones((5, 2, 3), np.float32))")
  assert code == -signal.SIGSEGV
  assert ", one of the 5 lanes of a vmap\n  operand 0 'x': float32[2,3]" in stderr


def test_a_checked_call_is_reported_too() -> None:
  code, stderr = die(NULL, before="cg.config(check_memory=True)")
  assert code == -signal.SIGSEGV
  assert "in kernel 'my crasher'" in stderr


def test_kernels_run_as_before_under_the_option() -> None:
  printed = output_of(
    textwrap.dedent(KERNEL)
    + textwrap.dedent("""
    k = kernel("for (int64_t i = 0; i < x.size(); ++i) z[i] = 2 * x[i];", thread_safe=True)
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    with cg.config(crash_report=True):
      assert (jax.jit(jax.vmap(k))(x) == 2 * x).all()
    cg.config(crash_report=True)
    cg.config(crash_report=True)
    assert (jax.jit(k)(x[0]) == 2 * x[0]).all()
    cg.config(crash_report=False)
    print("fine")
    """)
  )
  assert printed == "fine\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_handlers_of_before_are_restored() -> None:
  printed = output_of(
    """
    import callgate as cg
    def caught():
      with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("SigCgt"))
    before = caught()
    with cg.config(crash_report=True):
      during = caught()
    print(before == caught(), before == during)
    """
  )
  assert printed == "True False\n"
