// SPDX-License-Identifier: Apache-2.0
// atom and red: every operation of every type against C++, in shared and in global memory.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>

#include "kernel_test.h"
#include "ptx/numbers.h"

namespace vgpu::ptx {
namespace {

// The words before and after, packed by the caller's types: a word in shared memory for each
// thread, on which `opcode` works with %in1 (and %in2).
template <typename T>
struct Done {
  std::vector<T> before, after;
};
template <typename T, typename... More>
Done<T> apply(const std::string& opcode, const std::vector<T>& a, const std::vector<T>& b,
              const More&... more) {
  const std::string bits = std::to_string(8 * sizeof(T));
  const std::string head =
      "{ .shared .align 8 .b8 tile[256];\nmov.u32 %r0, tile;\nmad.lo.u32 %r0, %c, " +
      std::to_string(sizeof(T)) + ", %r0;\nst.shared.b" + bits + " [%r0], %in0;\n";
  const std::string values = sizeof...(More) > 0 ? "%in1, %in2;\n" : "%in1;\n";
  Done<T> done;
  done.before = each_thread<T>(head + "atom.shared." + opcode + " %out, [%r0], " + values + "}", a,
                               b, more...);
  done.after = each_thread<T>(head + "red.shared." + opcode + " [%r0], " + values + "ld.shared.b" +
                                  bits + " %out, [%r0]; }",
                              a, b, more...);
  return done;
}

template <typename T>
using Operation = std::function<T(T, T)>;
template <typename T>
void check(const std::string& opcode, const std::vector<T>& values, const Operation<T>& want) {
  auto [a, b] = pairs_of(values);
  Done<T> done = apply<T>(opcode, a, b);
  EXPECT_EQ(done.before, a) << opcode;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(done.after[i], want(a[i], b[i])) << opcode << " of " << a[i] << " and " << b[i];
  }
}

template <typename T>
void check_integers() {
  const std::string type = name_of_type<T>(), bits = "b" + std::to_string(8 * sizeof(T));
  const std::vector<T> values = edges<T>();
  using U = std::make_unsigned_t<T>;
  check<T>("add." + type, values,
           [](T a, T b) { return static_cast<T>(static_cast<U>(a) + static_cast<U>(b)); });
  check<T>("min." + type, values, [](T a, T b) { return std::min(a, b); });
  check<T>("max." + type, values, [](T a, T b) { return std::max(a, b); });
  check<T>("and." + bits, values, std::bit_and<T>{});
  check<T>("or." + bits, values, std::bit_or<T>{});
  check<T>("xor." + bits, values, std::bit_xor<T>{});
  check<T>("exch." + bits, values, [](T, T b) { return b; });
}
TEST(Atomics, OfIntegers) {
  check_integers<std::int32_t>();
  check_integers<std::uint32_t>();
  check_integers<std::int64_t>();
  check_integers<std::uint64_t>();
  check<std::uint32_t>("inc.u32", edges<std::uint32_t>(),
                       [](std::uint32_t a, std::uint32_t b) { return a >= b ? 0 : a + 1; });
  check<std::uint32_t>("dec.u32", edges<std::uint32_t>(), [](std::uint32_t a, std::uint32_t b) {
    return a == 0 || a > b ? b : a - 1;
  });
}

template <typename T>
void check_swap() {
  const std::string bits = ".b" + std::to_string(8 * sizeof(T));
  auto [a, b] = pairs_of(std::vector<T>{0, 1, 2, static_cast<T>(-1)});
  const std::vector<T> desired(a.size(), static_cast<T>(77));
  const std::string text =
      "{ .shared .align 8 .b8 tile[256];\nmov.u32 %r0, tile;\nmad.lo.u32 %r0, %c, 8, %r0;\n"
      "st.shared" +
      bits + " [%r0], %in0;\natom.shared.acq_rel.cta.cas" + bits + " %in0, [%r0], %in1, %in2;\n";
  auto before = each_thread<T>(text + "mov" + bits + " %out, %in0; }", a, b, desired);
  auto after = each_thread<T>(text + "ld.shared" + bits + " %out, [%r0]; }", a, b, desired);
  EXPECT_EQ(before, a);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(after[i], a[i] == b[i] ? T{77} : a[i]);
}
TEST(Atomics, SwapWhatIsAsExpected) {
  check_swap<std::uint16_t>();
  check_swap<std::uint32_t>();
  check_swap<std::uint64_t>();
}

template <typename F>
void check_floats(const std::string& type) {
  using L = std::numeric_limits<F>;
  auto [a, b] = pairs_of(std::vector<F>{F(0), F(-0.0), F(0.1), F(-3.5), L::max(), L::denorm_min(),
                                        L::infinity(), -L::infinity(), L::quiet_NaN()});
  Done<F> done = apply<F>("add." + type, a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const F want = a[i] + b[i];
    EXPECT_TRUE(done.after[i] == want || (std::isnan(done.after[i]) && std::isnan(want)));
    EXPECT_EQ(std::signbit(done.before[i]), std::signbit(a[i]));
  }
}
TEST(Atomics, SumsOfFloats) {
  check_floats<float>("f32");
  check_floats<double>("f64");
}

template <typename T>
void check_halves(const std::string& type) {
  std::vector<std::uint16_t> values;
  for (float each : {0.0F, 1.0F, -2.5F, 0.1F, 60000.0F, HUGE_VALF, NAN})
    values.push_back(T::from(each).bits);
  auto [a, b] = pairs_of(values);
  std::vector<std::uint32_t> c, d;  // pairs: the operands there and exchanged
  for (std::size_t i = 0; i < a.size(); ++i) {
    c.push_back(std::uint32_t{a[i]} | std::uint32_t{b[i]} << 16);
    d.push_back(std::uint32_t{b[i]} | std::uint32_t{a[i]} << 16);
  }
  const std::pair<std::string, std::function<float(float, float)>> all[] = {
      {"add.noftz.", [](float x, float y) { return x + y; }},
      {"min.", [](float x, float y) { return std::fmin(x, y); }},
      {"max.", [](float x, float y) { return std::fmax(x, y); }}};
  for (const auto& [name, operation] : all) {
    auto one = apply<std::uint16_t>(name + type, a, b);
    auto two = apply<std::uint32_t>(name + type + "x2", c, d);
    EXPECT_EQ(one.before, a);
    EXPECT_EQ(two.before, c);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const std::uint32_t want = T::from(operation(T{a[i]}.get(), T{b[i]}.get())).bits;
      auto same = [&](std::uint32_t got) {
        return got == want || (std::isnan(T{static_cast<std::uint16_t>(got)}.get()) &&
                               std::isnan(T{static_cast<std::uint16_t>(want)}.get()));
      };
      EXPECT_TRUE(same(one.after[i])) << name << type << " " << i;
      EXPECT_TRUE(same(two.after[i] & 0xFFFFU)) << name << type << " " << i;
      EXPECT_TRUE(same(two.after[i] >> 16)) << name << type << " " << i;
    }
  }
}
TEST(Atomics, OfHalvesAndPairsOfThem) {
  check_halves<Half>("f16");
  check_halves<Brain>("bf16");
}

TEST(Atomics, VectorsOfFourFloats) {
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<std::uint32_t>(256)),
                in = memory.put(std::vector<float>{1, 2, 3, 4});
  Outcome outcome = run_kernel(
      memory,
      kernel("cvt.rn.f32.u32 %r0, %t;\n"
             "atom.global.v4.f32.add {%r1, %r2, %r3, %r4}, [%in], {%r0, %r0, 0f3F800000, %r0};\n"
             "red.relaxed.gpu.global.add.v2.f32 [%in+8], {0f40000000, 0f00000000};\n"
             "st.global.u32 [%out], %r3;"),
      {out, in}, {64, 1, 1}, {4, 1, 1});
  ASSERT_EQ(outcome.message, "");
  EXPECT_EQ(memory.get<float>(in), (std::vector<float>{8065, 8066, 3 + 3 * 256, 8068}));
  auto seen = memory.get<float>(out);
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());  // each saw its own
}

TEST(Atomics, ALockOfTheBlocksOwn) {
  // One lane of each block takes the lock in turn; the sum behind it is not atomic.
  Ran ran =
      run(kernel("setp.ne.u32 %p0, %t, 0; @%p0 ret;\n"
                 "TRY: atom.global.acquire.gpu.cas.b32 %r0, [%in], 0, 1;\n"
                 "setp.ne.u32 %p1, %r0, 0; @%p1 bra TRY;\nld.volatile.global.u32 %r1, [%in+4];\n"
                 "add.u32 %r1, %r1, 1; st.volatile.global.u32 [%in+4], %r1;\n"
                 "atom.global.release.gpu.exch.b32 %r0, [%in], 0;\nst.global.u32 [%out], %r1;"),
          {32, 1, 1}, {200, 1, 1});
  ASSERT_EQ(ran.outcome.message, "");
  std::vector<std::uint32_t> order;
  for (std::size_t i = 0; i < ran.out.size(); i += 32) order.push_back(ran.out[i]);
  std::sort(order.begin(), order.end());
  for (std::uint32_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i + 1);
}

TEST(Atomics, FaultsAndWhatIsNotDefined) {
  expect_fault(kernel("red.global.add.u32 [%in+16], 1;"), Result::kIllegalAddress, "line 10");
  expect_fault(kernel("red.global.add.u32 [%in+2], 1;"), Result::kMisalignedAddress,
               "aligned to 4");
  expect_fault(kernel("atom.global.add.u64 %l0, [%in+4], 1;"), Result::kMisalignedAddress,
               "aligned to 8");
  expect_fault(kernel("atom.shared.inc.u32 %r0, [0], 1;"), Result::kIllegalAddress,
               "shared memory");
  HostMemory memory;
  for (const char* text : {"atom.global.min.f32 %r0, [%in], %r1;", "red.global.and.f32 [%in], %r1;",
                           "atom.global.u32 %r0, [%in], 1;", "atom.global.add.u16 %r0, [%in], 1;",
                           "atom.global.v2.f32.add {%r0, %r1}, [%in], {%r2};"}) {
    EXPECT_THROW(run_kernel(memory, kernel(text), {0, 0}), Error) << text;
  }
}

}  // namespace
}  // namespace vgpu::ptx
