// SPDX-License-Identifier: Apache-2.0
// Branches, loops, calls, ends, and instructions that change nothing here.
#include <algorithm>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using u32 = std::uint32_t;

TEST(Control, NestedBranchesByEveryBit) {
  std::string body = "mov.u32 %r1, 0;\n";
  u32 label = 0;
  // A tree of branches: at each leaf the path that led there.
  auto tree = [&](auto&& self, int bit) -> void {
    if (bit < 0) return;
    const std::string own = std::to_string(label++);
    body += "shr.u32 %r0, %t, " + std::to_string(bit) + "; and.b32 %r0, %r0, 1;\n" +
            "setp.eq.u32 %p0, %r0, 1; shl.b32 %r1, %r1, 1; @%p0 bra SET" + own + ";\n";
    self(self, bit - 1);
    body += "bra.uni END" + own + ";\nSET" + own + ": or.b32 %r1, %r1, 1;\n";
    self(self, bit - 1);
    body += "END" + own + ":\n";
  };
  tree(tree, 4);
  auto out = result(kernel(body + "activemask.b32 %r2; setp.eq.u32 %p1, %r2, -1;\n"
                                  "@!%p1 mov.u32 %r1, 99; st.global.u32 [%out], %r1;"));
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], i);
}

TEST(Control, LoopsWithinLoopsOfDifferentLength) {
  auto out = result(
      kernel("mov.u32 %r0, 0; mov.u32 %r1, 0;\nOUTER: setp.ge.u32 %p0, %r0, %t; @%p0 bra DONE;\n"
             "mov.u32 %r2, 0;\nINNER: setp.gt.u32 %p1, %r2, %r0; @%p1 bra NEXT;\n"
             "add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra INNER;\n"
             "NEXT: add.u32 %r0, %r0, 1; bra OUTER;\nDONE: st.global.u32 [%out], %r1;"),
      {70, 1, 1});
  for (u32 i = 0; i < out.size(); ++i) {
    u32 want = 0;
    for (u32 j = 0; j < i; ++j) want += j * (j + 1) / 2;
    EXPECT_EQ(out[i], want);
  }
}

TEST(Control, AGuardStopsAnyInstruction) {
  auto out =
      result(kernel("setp.lt.u32 %p0, %t, 7; mov.u32 %r0, 1; @%p0 add.u32 %r0, %r0, 10;\n"
                    "@!%p0 mov.b64 %l0, 5; @%p0 mov.b64 %l0, 6; cvt.u32.u64 %r1, %l0;\n"
                    "mad.lo.u32 %r0, %r1, 100, %r0; @%p0 st.global.u32 [%out], %r0; @!%p0 exit;\n"
                    "add.u32 %r0, %r0, 1000; st.global.u32 [%out], %r0;"));
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], i < 7 ? 1611U : 0U);
}

TEST(Control, TablesOfLabelsHaveEnds) {
  const std::string table =
      "TABLE: .branchtargets A, B, A;\n@%p0 brx.idx.uni %r0, TABLE;\n"
      "mov.u32 %r1, 7; bra.uni END;\nA: mov.u32 %r1, 1; bra END;\n"
      "B: mov.u32 %r1, 2;\nEND: st.global.u32 [%out], %r1;";
  auto out = result(kernel("rem.u32 %r0, %t, 4; setp.lt.u32 %p0, %r0, 3;\n" + table));
  const u32 want[] = {1, 2, 1, 7};
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], want[i % 4]);
  expect_fault(kernel("rem.u32 %r0, %t, 4; setp.lt.u32 %p0, %r0, 4;\n" + table),
               Result::kIllegalInstruction, "brx.idx with index 3 of 3");
}

TEST(Calls, ParametersAndResultsOfAllSizes) {
  auto out = result(
      ".func (.param .b64 sum, .param .b32 other) add(.param .align 8 .b8 a[16], .param .b16 b) {\n"
      ".reg .b64 %l<5>; .reg .b16 %h; .reg .b32 %r;\n"
      "ld.param.v2.u64 {%l0, %l1}, [a]; ld.param.u16 %h, [b]; cvt.u64.u16 %l2, %h;\n"
      "add.u64 %l0, %l0, %l1; add.u64 %l0, %l0, %l2; st.param.b64 [sum], %l0;\n"
      "ld.param.u32 %r, [a+8]; st.param.b32 [other], %r; ret.uni; }\n" +
      kernel("{ .param .align 8 .b8 a[16]; .param .b16 b; .param .b64 s; .param .b32 o;\n"
             ".reg .b16 %h; .reg .b64 %w; cvt.u64.u32 %w, %t;\n"
             "st.param.b64 [a], %w; st.param.b64 [a+8], 1000; cvt.u16.u32 %h, %t;\n"
             "st.param.b16 [b], %h; call.uni (s, o), add, (a, b);\n"
             "ld.param.b64 %l0, [s]; ld.param.b32 %r1, [o]; }\n"
             "cvt.u32.u64 %r0, %l0; mad.lo.u32 %r0, %r1, 10, %r0; st.global.u32 [%out], %r0;"));
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], 11000 + 2 * i);
}

TEST(Calls, LanesReturnAtDifferentTimesAndSomeEnd) {
  auto out = result(
      ".func (.param .b32 r) count(.param .b32 n) {\n.reg .b32 %r<4>; .reg .pred %p<4>;\n"
      "ld.param.u32 %r0, [n]; mov.u32 %r1, 0; setp.eq.u32 %p2, %r0, 5; @%p2 exit;\n"
      "LOOP: setp.ge.u32 %p0, %r1, %r0; @%p0 bra OUT; add.u32 %r1, %r1, 1; bra LOOP;\n"
      "OUT: st.param.b32 [r], %r1; ret; }\n" +
      kernel("{ .param .b32 a; .param .b32 b; st.param.b32 [a], %t;\n"
             "call (b), count, (a); ld.param.b32 %r0, [b]; }\n"
             "vote.ballot.b32 %r1, %p9; activemask.b32 %r1; xor.b32 %r0, %r0, %r1;\n"
             "st.global.u32 [%out], %r0;"));
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], i == 5 ? 0U : i ^ 0xFFFFFFDFU);
}

TEST(Calls, Faults) {
  const std::string endless =
      ".func deeper() { .reg .b32 %r; call deeper, (); ret; }\n" + kernel("call deeper, ();");
  expect_fault(endless, Result::kIllegalAddress, "nested more than 512 deep");
  expect_fault(kernel("mov.u64 %l0, 5; PROTO: .callprototype _ (); call %l0, (), PROTO;"),
               Result::kIllegalInstruction, "a call of what is no function");
  const std::string silent = ".func silent() { ret; }\n";
  expect_fault(silent + kernel("{ .param .b32 r; call (r), silent, (); }"), Result::kLaunchFailed,
               "for 1 results, it has 0");
  expect_fault(silent + kernel("{ .param .b32 a; call silent, (a); }"), Result::kLaunchFailed,
               "with 1 parameters, it has 0");
  HostMemory memory;
  for (const char* text :
       {"call nowhere, ();", "bra NOWHERE;", "brx.idx %r0, NOWHERE;", "call (%r0), kernel, ();"}) {
    EXPECT_THROW(run_kernel(memory, kernel(text), {0, 0}), Error) << text;
  }
}

TEST(Ends, OfAThreadAndOfALaunch) {
  auto out = result(kernel("st.global.u32 [%out], 1; setp.gt.u32 %p0, %t, 40; @%p0 ret;\n"
                           "st.global.u32 [%out], 2; setp.gt.u32 %p0, %t, 10; @%p0 exit;\n"
                           "st.global.u32 [%out], 3;"),
                    {64, 1, 1});
  for (u32 i = 0; i < 64; ++i) EXPECT_EQ(out[i], i > 40 ? 1U : i > 10 ? 2U : 3U);
  expect_fault(kernel("setp.eq.u32 %p0, %t, 33; @%p0 trap;"), Result::kLaunchFailed,
               "thread (33, 0, 0)", {64, 1, 1});
  expect_fault(kernel("brkpt;"), Result::kLaunchFailed, "line 10");
}

TEST(Nothing, IsWhatTheseDo) {
  auto out = result(kernel(
      "mov.u32 %r0, 5; nanosleep.u32 %r0; nanosleep.u32 1000; pmevent 1; pmevent.mask 3;\n"
      "setmaxnreg.inc.sync.aligned.u32 64; griddepcontrol.launch_dependents;\n"
      "griddepcontrol.wait; discard.global.L2 [%in], 128;\n"
      "applypriority.global.L2::evict_normal [%in], 128;\n"
      "createpolicy.fractional.L2::evict_last.b64 %l0, 0f3F800000;\n"
      "prefetch.global.L1 [%in]; prefetch.L2 [%in]; prefetchu.L1 [%in];\n"
      "membar.cta; membar.gl; membar.sys; fence.sc.cta; fence.acq_rel.gpu;\n"
      "fence.proxy.async; fence.mbarrier_init.release.cluster;\nst.global.u32 [%out], %r0;"));
  for (u32 each : out) EXPECT_EQ(each, 5U);
}

}  // namespace
}  // namespace vgpu::ptx
