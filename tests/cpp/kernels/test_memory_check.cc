// SPDX-License-Identifier: Apache-2.0
// The findings of a checked call, in kernels that do just that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_attributes.h"
#include "fake_executor.h"
#include "fake_kernel.h"
#include "kernels/kernel.h"
#include "kernels/kernel_debug.h"

namespace callgate {
namespace {

using fake::Arrays;
using fake::in_out;
using fake::message;
using fake::operand;
using fake::parameter;
using fake::result;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class MemoryCheckTest : public ::testing::Test {
 protected:
  void SetUp() override { set_kernel_mode(KernelMode::kCheckMemory, true); }
  void TearDown() override { set_kernel_mode(KernelMode::kCheckMemory, false); }

  // The site of a kernel with parameters x and z.
  std::unique_ptr<KernelSite> site(callgate_function function, bool repeatable = true,
                                   std::vector<callgate_parameter> parameters = in_out(),
                                   KernelSpec spec = {}) {
    KernelInfo info;
    info.name = "k";
    info.function = function;
    info.parameter_names = {"x", "z"};
    info.parameter_names.resize(parameters.size(), "more");
    info.parameters = std::move(parameters);
    info.repeatable = repeatable;
    return std::make_shared<KernelCallee>(std::move(info), nullptr)->bind(std::move(spec));
  }

  // The message of a call on x = 1..4.
  std::string found(callgate_function function, bool repeatable = true) {
    x_ = {1, 2, 3, 4};
    z_ = {-1, -1, -1, -1};
    Arrays in, out;
    in.add(x_);
    out.add(z_);
    return message(fake::call(*site(function, repeatable), in, out));
  }

  std::vector<float> x_, z_;
};

TEST_F(MemoryCheckTest, AKernelThatMindsItsOwnMemoryPasses) {
  EXPECT_EQ(found(&fake::twice), "");
  EXPECT_THAT(z_, ElementsAre(2, 4, 6, 8));
  EXPECT_EQ(found(&fake::twice, /*repeatable=*/false), "");
  EXPECT_THAT(z_, ElementsAre(2, 4, 6, 8));
}

TEST_F(MemoryCheckTest, WritesAfterTheEndAreFoundAndHarmNobody) {
  auto past = [](const callgate_call* call) {
    for (int i = 0; i < 6; ++i) result(call, 1)[i] = 1;
    return std::int32_t{0};
  };
  std::string text = found(past);
  EXPECT_THAT(text,
              HasSubstr("kernel 'k': memory check: 'z' (result 0, float32[4]) wrote outside"));
  EXPECT_THAT(text, HasSubstr("8 bytes, the first of them 0 bytes after its end, where element 4"));
  EXPECT_THAT(z_, Each(-1));  // nothing was published
}

// y[i] = x[i], `past` bytes further than the arrays go, and from `before` bytes before them on.
std::size_t copied_bytes = 0, copied_past = 0, copied_before = 0, copied_shift = 0;

std::int32_t copy_too_much(const callgate_call* call) {
  auto* to = static_cast<char*>(call->results[0].data) - copied_before;
  const auto* from = static_cast<const char*>(call->operands[0].data) - copied_before;
  std::memcpy(to, from + copied_shift, copied_before + copied_bytes + copied_past);
  return 0;
}

// The finding when a guard of x is copied to the one of y, or of the memory behind it.
std::string copied(DType dtype, std::size_t width, std::size_t past, std::size_t before = 0,
                   std::size_t shift = 0, bool repeatable = true) {
  copied_bytes = 7 * width, copied_past = past, copied_before = before, copied_shift = shift;
  std::vector<std::uint8_t> x(7 * width, 1), y(7 * width);
  Arrays in, out;
  in.add(dtype, x, {7});
  out.add(dtype, y, {7});
  KernelInfo info;
  info.name = "k";
  info.function = &copy_too_much;
  info.parameters = {parameter(CALLGATE_IN, static_cast<int>(dtype)),
                     parameter(CALLGATE_OUT, static_cast<int>(dtype))};
  info.repeatable = repeatable;
  return message(fake::call(*std::make_shared<KernelCallee>(info, nullptr)->bind({}), in, out));
}

std::string outside(std::size_t bytes, std::size_t distance, const char* side) {
  return "wrote outside it: " + std::to_string(bytes) + " bytes, the first of them " +
         std::to_string(distance) + " bytes " + side;
}

TEST_F(MemoryCheckTest, WhatIsCopiedFromOneGuardToAnotherIsSeenInEveryType) {
#define X(identifier, code, name, bits)                                                    \
  if (constexpr std::size_t width = (bits) / 8; width != 0) {                              \
    constexpr DType type = DType::k##identifier;                                           \
    EXPECT_EQ(copied(type, width, 0), "") << name;                                         \
    for (bool repeatable : {true, false}) {                                                \
      EXPECT_THAT(copied(type, width, width, 0, 0, repeatable),                            \
                  HasSubstr(outside(width, 0, "after its end, where element 7 would be"))) \
          << name;                                                                         \
      EXPECT_THAT(copied(type, width, 384, 0, 0, repeatable),                              \
                  HasSubstr(outside(384, 0, "after its end")))                             \
          << name;                                                                         \
      EXPECT_THAT(copied(type, width, 0, width, 0, repeatable),                            \
                  HasSubstr(outside(width, 1, "before its start, where element -1")))      \
          << name;                                                                         \
      EXPECT_THAT(copied(type, width, width, 0, width, repeatable),                        \
                  HasSubstr(outside(width, 0, "after its end")))                           \
          << name;                                                                         \
    }                                                                                      \
  }
  CALLGATE_DTYPES(X)
#undef X
}

TEST_F(MemoryCheckTest, OfManyArraysNoTwoHaveTheSameGuards) {
  // Each result's guard gets what the one before it has; types of one, two and four bytes.
  auto rotate = [](const callgate_call* call) {
    std::size_t bytes = call->results[0].dtype == static_cast<int>(DType::kF32)    ? 4
                        : call->results[0].dtype == static_cast<int>(DType::kBF16) ? 2
                                                                                   : 1;
    auto data = [&](int i) { return static_cast<char*>(call->results[i].data); };
    std::vector<char> last(data(299) + bytes, data(299) + 2 * bytes);
    for (int i = 299; i > 0; --i) std::memcpy(data(i) + bytes, data(i - 1) + bytes, bytes);
    std::memcpy(data(0) + bytes, last.data(), bytes);
    for (int i = 0; i < 300; ++i) std::memset(data(i), 0, bytes);
    return std::int32_t{0};
  };
  for (DType type : {DType::kF32, DType::kBF16, DType::kU8, DType::kF8E4M3FN}) {
    std::vector<float> z(1);
    Arrays none, out;
    for (int i = 0; i < 300; ++i) out.add(type, z, {1});
    KernelSpec spec;
    spec.groups = {300};
    std::vector<callgate_parameter> parameters = {parameter(CALLGATE_OUTS, static_cast<int>(type))};
    auto checked = site(rotate, true, parameters, std::move(spec));
    EXPECT_THAT(message(fake::call(*checked, none, out)), HasSubstr("and 292 more")) << name(type);
  }
}

TEST_F(MemoryCheckTest, ScratchBlocksHaveGuardsOfTheirOwn) {
  auto past = [](const callgate_call* call) {
    auto* a = static_cast<char*>(call->services->scratch(call, 64, 64));
    auto* b = static_cast<char*>(call->services->scratch(call, 64, 64));
    std::memcpy(b, a, 65);
    return fake::twice(call);
  };
  EXPECT_THAT(found(past), HasSubstr("scratch memory of 64 bytes: wrote outside it: 1 bytes"));
}

TEST_F(MemoryCheckTest, ReadsOutsideOfFloatsShowAsNan) {
  auto beyond = [](const callgate_call* call) {
    for (int i = 0; i < 4; ++i) result(call, 1)[i] = operand(call, 0)[i + 1];
    return std::int32_t{0};
  };
  EXPECT_EQ(found(beyond, /*repeatable=*/false), "");
  EXPECT_TRUE(std::isnan(z_[3]));
}

TEST_F(MemoryCheckTest, WritesBeforeTheStartAreFound) {
  auto before = [](const callgate_call* call) {
    fake::twice(call);
    result(call, 1)[-2] = 1;
    return std::int32_t{0};
  };
  std::string text = found(before);
  EXPECT_THAT(text, HasSubstr("'z' (result 0, float32[4])"));
  EXPECT_THAT(text, HasSubstr("4 bytes, the first of them 5 bytes before its start, where element "
                              "-2 would be"));
}

TEST_F(MemoryCheckTest, AWriteOfOneByteIsFound) {
  auto byte = [](const callgate_call* call) {
    fake::twice(call);
    reinterpret_cast<char*>(result(call, 1) + 4)[5] = 0;
    return std::int32_t{0};
  };
  EXPECT_THAT(found(byte), HasSubstr("1 bytes, the first of them 5 bytes after its end"));
}

TEST_F(MemoryCheckTest, WritesToInputsAreFound) {
  auto input = [](const callgate_call* call) {
    fake::twice(call);
    operand(call, 0)[2] = 0;
    return std::int32_t{0};
  };
  EXPECT_THAT(found(input), HasSubstr("'x' (operand 0, float32[4]) is an input and was written to, "
                                      "the first time at element [2]"));
  EXPECT_THAT(x_, ElementsAre(1, 2, 3, 4));
}

TEST_F(MemoryCheckTest, ElementsThatNobodyWritesAreFound) {
  auto some = [](const callgate_call* call) {
    result(call, 1)[0] = result(call, 1)[3] = 1;
    return std::int32_t{0};
  };
  for (bool repeatable : {true, false}) {
    std::string text = found(some, repeatable);
    EXPECT_THAT(text, HasSubstr("'z' (result 0, float32[4]) was not written completely: 2 of 4 "));
    EXPECT_THAT(text, HasSubstr("the first is [1]"));
  }
}

template <typename T>
std::int32_t fill_all_but_last(const callgate_call* call) {
  auto* data = static_cast<T*>(call->results[0].data);
  for (std::int64_t i = 0; i + 1 < fake::size(call->results[0]); ++i) data[i] = static_cast<T>(i);
  return 0;
}

TEST_F(MemoryCheckTest, IntegersTakeEveryValueAndAreStillTold) {
  // All 256 values of a byte are results, the patterns too; only the last element is not written.
  std::vector<std::uint8_t> bytes(257);
  Arrays none, out;
  out.add(DType::kU8, bytes, {257});
  auto checked = site(&fill_all_but_last<std::uint8_t>, true, {parameter(CALLGATE_OUT, 6)});
  EXPECT_THAT(message(fake::call(*checked, none, out)), HasSubstr("1 of 257 elements"));
  EXPECT_THAT(message(fake::call(*checked, none, out)), HasSubstr("the first is [256]"));
}

TEST_F(MemoryCheckTest, WithEffectsSmallIntegersAreNotLookedAt) {
  std::vector<std::uint8_t> bytes(257);
  Arrays none, out;
  out.add(DType::kU8, bytes, {257});
  auto once = site(&fill_all_but_last<std::uint8_t>, false, {parameter(CALLGATE_OUT, 6)});
  EXPECT_EQ(message(fake::call(*once, none, out)), "");
  std::vector<std::int32_t> words(8);
  Arrays wide;
  wide.add(DType::kS32, words, {2, 4});
  auto four = site(&fill_all_but_last<std::int32_t>, false, {parameter(CALLGATE_OUT, 4)});
  EXPECT_THAT(message(fake::call(*four, none, wide)), HasSubstr("the first is [1,3]"));
}

std::atomic<int> runs{0};

TEST_F(MemoryCheckTest, OnlyKernelsWithoutEffectsRunAgain) {
  auto count = [](const callgate_call* call) {
    runs.fetch_add(1);
    return fake::twice(call);
  };
  runs = 0;
  EXPECT_EQ(found(count, /*repeatable=*/false), "");
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(found(count, /*repeatable=*/true), "");
  EXPECT_EQ(runs, 3);
}

TEST_F(MemoryCheckTest, ResultsMadeOfWhatNobodyWroteAreFound) {
  auto accumulate = [](const callgate_call* call) {
    for (int i = 0; i < 4; ++i) result(call, 1)[i] += operand(call, 0)[i];
    return std::int32_t{0};
  };
  EXPECT_THAT(found(accumulate), HasSubstr("'z' (result 0, float32[4]) depends on memory that was "
                                           "never written"));
  auto beyond = [](const callgate_call* call) {
    for (int i = 0; i < 4; ++i) result(call, 1)[i] = operand(call, 0)[i + 1];
    return std::int32_t{0};
  };
  EXPECT_THAT(found(beyond), HasSubstr("the first such element is [3]"));
  auto scratch = [](const callgate_call* call) {
    fake::twice(call);
    result(call, 1)[2] = static_cast<float*>(call->services->scratch(call, 16, 64))[0];
    return std::int32_t{0};
  };
  EXPECT_THAT(found(scratch), HasSubstr("the first such element is [2]"));
}

TEST_F(MemoryCheckTest, ResultsThatAreOthersEachTimeAreNobodysFault) {
  auto random = [](const callgate_call* call) {
    for (int i = 0; i < 4; ++i) result(call, 1)[i] = static_cast<float>(runs.fetch_add(1));
    return std::int32_t{0};
  };
  EXPECT_EQ(found(random), "");
}

TEST_F(MemoryCheckTest, ScratchMemoryIsGuardedToo) {
  auto past = [](const callgate_call* call) {
    fake::twice(call);
    static_cast<char*>(call->services->scratch(call, 100, 64))[100] = 0;
    return std::int32_t{0};
  };
  EXPECT_THAT(found(past), HasSubstr("scratch memory of 100 bytes: wrote outside it: 1 bytes"));
  auto inside = [](const callgate_call* call) {
    std::memset(call->services->scratch(call, 100, 128), 0, 100);
    return fake::twice(call);
  };
  EXPECT_EQ(found(inside), "");
}

TEST_F(MemoryCheckTest, TheKernelsOwnFailureComesFirst) {
  auto fails = [](const callgate_call* call) {
    call->services->fail(call, "no luck");
    return std::int32_t{1};
  };
  EXPECT_EQ(found(fails), "kernel 'k': no luck");
}

std::int32_t add_one(const callgate_call* call) {
  result(call, 0)[0] += 1;
  return 0;
}

TEST_F(MemoryCheckTest, AnInOutStartsAsItsOperandEachTimeAndMayStayAsItIs) {
  std::vector<float> x = {5, 6};
  Arrays in, out;
  in.add(x);
  out.add(x);  // one memory, as XLA aliases them
  auto checked = site(&add_one, true, {parameter(CALLGATE_INOUT)});
  EXPECT_EQ(message(fake::call(*checked, in, out)), "");
  EXPECT_THAT(x, ElementsAre(6, 6));
  std::vector<float> other = {1, 2}, z = {7, 8};
  Arrays apart, updated;
  apart.add(other);
  updated.add(z);
  EXPECT_EQ(message(fake::call(*checked, apart, updated)), "");
  EXPECT_THAT(z, ElementsAre(8, 8));
}

TEST_F(MemoryCheckTest, AnAliasedOperandMayBeWrittenTo) {
  std::vector<float> x = {1, 2, 3};
  Arrays in, out;
  in.add(x);
  out.add(x);
  EXPECT_EQ(message(fake::call(*site(&fake::twice), in, out)), "");
  EXPECT_THAT(x, ElementsAre(2, 4, 6));
}

TEST_F(MemoryCheckTest, EmptyArraysHaveGuardsToo) {
  std::vector<float> none;
  Arrays in, out;
  in.add(none);
  out.add(DType::kF32, none, {0, 3});
  EXPECT_EQ(message(fake::call(*site(&fake::twice), in, out)), "");
  auto write = [](const callgate_call* call) {
    result(call, 1)[0] = 1;
    return std::int32_t{0};
  };
  EXPECT_THAT(message(fake::call(*site(write), in, out)), HasSubstr("float32[0,3]) wrote outside"));
}

TEST_F(MemoryCheckTest, EachLaneIsCheckedByItself) {
  // Writes into the next lane's result, which lies right behind.
  auto spill = [](const callgate_call* call) {
    result(call, 1)[0] = operand(call, 0)[0];
    if (operand(call, 0)[0] == 2) result(call, 1)[1] = 0;
    return std::int32_t{0};
  };
  std::vector<float> x = {0, 1, 2, 3}, z(4);
  Arrays in, out;
  in.add(x);
  out.add(z);
  KernelSpec spec;
  spec.lanes = fake::lanes("4:1");
  auto checked = site(spill, true, in_out(), std::move(spec));
  EXPECT_THAT(message(fake::call(*checked, in, out)), HasSubstr("'z' (result 0, float32[])"));
}

TEST_F(MemoryCheckTest, VariadicParametersAreNamedWithTheirPosition) {
  auto past = [](const callgate_call* call) {
    for (int i = 0; i < 2; ++i) static_cast<float*>(call->results[i].data)[0] = 1;
    static_cast<float*>(call->results[1].data)[1] = 1;
    return std::int32_t{0};
  };
  KernelSpec spec;
  spec.groups = {2};
  std::vector<float> a(1), b(1);
  Arrays none, out;
  out.add(a).add(b);
  auto checked = site(past, true, {parameter(CALLGATE_OUTS)}, std::move(spec));
  EXPECT_THAT(message(fake::call(*checked, none, out)), HasSubstr("'x'[1] (result 1, float32[1])"));
}

TEST_F(MemoryCheckTest, ManyFindingsAreCounted) {
  auto past = [](const callgate_call* call) {
    for (int i = 0; i < 12; ++i) static_cast<float*>(call->results[i].data)[1] = 1;
    return std::int32_t{0};
  };
  KernelSpec spec;
  spec.groups = {12};
  std::vector<float> z(1);
  Arrays none, out;
  for (int i = 0; i < 12; ++i) out.add(z);
  auto checked = site(past, true, {parameter(CALLGATE_OUTS)}, std::move(spec));
  EXPECT_THAT(message(fake::call(*checked, none, out)), HasSubstr("and 4 more"));
}

TEST_F(MemoryCheckTest, ItIsOffAgainAfterwards) {
  set_kernel_mode(KernelMode::kCheckMemory, false);
  auto untouched = [](const callgate_call*) { return std::int32_t{0}; };
  EXPECT_EQ(found(untouched), "");
}

TEST_F(MemoryCheckTest, EveryTypeIsToldWrittenFromUnwritten) {
#define X(identifier, code, name, bits)                                                       \
  if (!is_packed(DType::k##identifier)) {                                                     \
    std::vector<std::uint8_t> memory(3 * (bits) / 8);                                         \
    Arrays none, out;                                                                         \
    out.add(DType::k##identifier, memory, {3});                                               \
    auto zero = [](const callgate_call* call) {                                               \
      std::memset(call->results[0].data, 0, 3 * (bits) / 8);                                  \
      return std::int32_t{0};                                                                 \
    };                                                                                        \
    auto nothing = [](const callgate_call*) { return std::int32_t{0}; };                      \
    auto written = site(zero, true, {parameter(CALLGATE_OUT, code)});                         \
    auto left = site(nothing, true, {parameter(CALLGATE_OUT, code)});                         \
    EXPECT_EQ(message(fake::call(*written, none, out)), "") << name;                          \
    EXPECT_THAT(message(fake::call(*left, none, out)), HasSubstr("3 of 3 elements")) << name; \
  }
  CALLGATE_DTYPES(X)
#undef X
}

}  // namespace
}  // namespace callgate
