// SPDX-License-Identifier: Apache-2.0
// Kernels and their call sites: what belongs to which parameter, lanes, failures, services.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/error.h"
#include "fake_attributes.h"
#include "fake_executor.h"
#include "fake_kernel.h"
#include "kernels/kernel.h"

namespace callgate {
namespace {

using fake::Arrays;
using fake::in_out;
using fake::message;
using fake::operand;
using fake::parameter;
using fake::result;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The message that `body` throws.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

std::string bind_error(const std::shared_ptr<KernelCallee>& kernel, KernelSpec spec) {
  return error_of([&] { kernel->bind(std::move(spec)); });
}

// --- Descriptions --------------------------------------------------------------------------------

TEST(KernelInfo, ItsSignatureIsAsInTheSource) {
  auto all =
      fake::kernel("k", nullptr,
                   {parameter(CALLGATE_IN, 11, 1), parameter(CALLGATE_OUT, 12, -1),
                    parameter(CALLGATE_INOUT, 5, 0), parameter(CALLGATE_SCALAR, 11, 0),
                    parameter(CALLGATE_INS, 0, 2), parameter(CALLGATE_OUTS, 1, -1),
                    parameter(CALLGATE_ATTR_NUMBER, 4, 0), parameter(CALLGATE_ATTR_STRING, 0, 0),
                    parameter(CALLGATE_ATTR_NUMBERS, 12, 0),
                    parameter(CALLGATE_ATTR_DICTIONARY, 0, 0), parameter(CALLGATE_CONTEXT, 0, 0)});
  EXPECT_EQ(signature(all->info()),
            "In<float32,1>,Out<float64,*>,InOut<int64,0>,float32,Ins<,2>,Outs<bool,*>,Attr<int32>,"
            "String,Numbers<float64>,Dict,Context");
  EXPECT_EQ(signature(fake::kernel("k", nullptr, {})->info()), "");
}

TEST(KernelInfo, AParameterIsNamedOrNumbered) {
  EXPECT_EQ(parameter_name(fake::kernel("k", nullptr, in_out(), {"x", "z"})->info(), 1), "'z'");
  EXPECT_EQ(parameter_name(fake::kernel("k", nullptr, in_out())->info(), 1), "1");
}

constexpr callgate_parameter kTwo[] = {{CALLGATE_IN, 11, 1}, {CALLGATE_OUT, 11, 1}};

TEST(ExportedKernels, AreReadInOrderOfDefinition) {
  static callgate_kernel first{CALLGATE_ABI, 2, "first, x , z", kTwo, &fake::twice, nullptr};
  static callgate_kernel second{CALLGATE_ABI, 0, "second", nullptr, nullptr, &first};
  auto kernels = exported_kernels(
      "lib.so", [] { return std::as_const(second).next ? &std::as_const(second) : nullptr; });
  ASSERT_EQ(kernels.size(), 2U);
  EXPECT_EQ(kernels[0].name, "first");
  EXPECT_THAT(kernels[0].parameter_names, ElementsAre("x", "z"));
  EXPECT_EQ(kernels[0].parameters.size(), 2U);
  EXPECT_EQ(kernels[0].function, &fake::twice);
  EXPECT_EQ(kernels[1].name, "second");
  EXPECT_TRUE(kernels[1].parameter_names.empty());
}

TEST(ExportedKernels, AnotherBinaryInterfaceIsRefusedBeforeAnythingElseIsRead) {
  static callgate_kernel other{CALLGATE_ABI + 1, -1, nullptr, nullptr, nullptr, nullptr};
  std::string text = error_of([] {
    exported_kernels("lib.so",
                     [] { return std::as_const(other).abi ? &std::as_const(other) : nullptr; });
  });
  EXPECT_THAT(text, HasSubstr("library 'lib.so'"));
  EXPECT_THAT(text, HasSubstr("got " + std::to_string(CALLGATE_ABI + 1)));
}

TEST(ExportedKernels, EitherAllParametersHaveNamesOrNone) {
  static callgate_kernel odd{CALLGATE_ABI, 2, "odd, x", kTwo, nullptr, nullptr};
  std::string text = error_of([] {
    exported_kernels("lib.so",
                     [] { return std::as_const(odd).abi ? &std::as_const(odd) : nullptr; });
  });
  EXPECT_THAT(text, HasSubstr("CALLGATE_KERNEL(odd, x)"));
  EXPECT_THAT(text, HasSubstr("each of the 2 parameters, or none, got 1"));
}

// --- Binding -------------------------------------------------------------------------------------

// The arguments of the last call of `record`.
struct SeenByKernel {
  std::vector<int> starts, counts;
  std::vector<std::string> attributes;
  void* user_data = nullptr;
};
SeenByKernel seen;
constexpr int kSeenParameters = 5;

std::int32_t record(const callgate_call* call) {
  seen.starts.assign(call->starts, call->starts + kSeenParameters);
  seen.counts.assign(call->counts, call->counts + kSeenParameters);
  seen.user_data = call->user_data;
  return 0;
}

TEST(KernelSite, GivesEachParameterItsPlace) {
  auto kernel =
      fake::kernel("k", &record,
                   {parameter(CALLGATE_SCALAR, 11, 0), parameter(CALLGATE_IN),
                    parameter(CALLGATE_INOUT), parameter(CALLGATE_OUT), parameter(CALLGATE_IN)});
  auto site = kernel->bind({});
  std::vector<float> a(1), b(2), c(2), d(2), e(2);
  Arrays in, out;
  in.add(DType::kF32, a, {}).add(b).add(c).add(d);
  out.add(c).add(e);
  ASSERT_TRUE(fake::call(*site, in, out).ok());
  // Operands: scalar 0, in 1, inout 2, in 3. Results: inout 0, out 1. An InOut is seen as a result.
  EXPECT_THAT(seen.starts, ElementsAre(0, 1, 0, 1, 3));
  EXPECT_THAT(seen.counts, ElementsAre(1, 1, 1, 1, 1));
}

TEST(KernelSite, GivesVariadicParametersTheirGroups) {
  auto kernel =
      fake::kernel("k", &record,
                   {parameter(CALLGATE_IN), parameter(CALLGATE_INS), parameter(CALLGATE_IN),
                    parameter(CALLGATE_OUTS), parameter(CALLGATE_OUT)});
  KernelSpec spec;
  spec.groups = {3, 0};
  auto site = kernel->bind(std::move(spec));
  std::vector<float> x(2);
  Arrays in, out;
  for (int i = 0; i < 5; ++i) in.add(x);
  out.add(x);
  ASSERT_TRUE(fake::call(*site, in, out).ok());
  EXPECT_THAT(seen.starts, ElementsAre(0, 1, 4, 0, 0));
  EXPECT_THAT(seen.counts, ElementsAre(1, 3, 1, 0, 1));
}

TEST(KernelSite, MissingOrOddGroupsAreErrorsThatNameTheParameter) {
  auto kernel =
      fake::kernel("k", &record, {parameter(CALLGATE_INS), parameter(CALLGATE_OUTS)}, {"xs", "zs"});
  using Groups = std::vector<std::int64_t>;
  for (const Groups& groups : {Groups{}, Groups{2}, Groups{2, -1}}) {
    KernelSpec spec;
    spec.groups = groups;
    EXPECT_THAT(bind_error(kernel, std::move(spec)),
                HasSubstr(groups.empty() ? "kernel 'k', parameter 'xs'" : "parameter 'zs'"));
  }
}

TEST(KernelSite, AProgramOfAnotherSignatureIsRefused) {
  auto kernel = fake::kernel("k", &fake::twice, in_out());
  KernelSpec same;
  same.signature = signature(kernel->info());
  EXPECT_NE(kernel->bind(std::move(same)), nullptr);
  KernelSpec other;
  other.signature = "In<float64,*>,Out<float64,*>";
  std::string text = bind_error(kernel, std::move(other));
  EXPECT_THAT(text, HasSubstr("called by a program that was compiled before"));
  EXPECT_THAT(text, HasSubstr("In<float64,*>"));
  EXPECT_THAT(text, HasSubstr("In<float32,*>"));
}

TEST(KernelSite, AnotherNumberOfArraysIsAnErrorAndNotACall) {
  auto kernel =
      fake::kernel("k", [](const callgate_call*) -> std::int32_t { std::abort(); }, in_out());
  auto site = kernel->bind({});
  std::vector<float> x(2);
  Arrays none, one, two;
  one.add(x);
  two.add(x).add(x);
  EXPECT_THAT(message(fake::call(*site, none, one)),
              HasSubstr("expected 1 operands and 1 results, got 0 operands and 1 results"));
  EXPECT_FALSE(fake::call(*site, one, two).ok());
  EXPECT_FALSE(fake::call(*site, two, one).ok());
}

std::int32_t record_attributes(const callgate_call* call) {
  seen.attributes.clear();
  for (int i = 0; i < 4; ++i) seen.attributes.emplace_back(call->attributes[call->starts[i]].name);
  return 0;
}

std::shared_ptr<KernelCallee> with_attributes() {
  return fake::kernel("k", &record_attributes,
                      {parameter(CALLGATE_ATTR_STRING, 0, 0),
                       parameter(CALLGATE_ATTR_NUMBER, static_cast<int>(DType::kS64), 0),
                       parameter(CALLGATE_ATTR_NUMBERS, static_cast<int>(DType::kF64), 0),
                       parameter(CALLGATE_ATTR_DICTIONARY, 0, 0)},
                      {"mode", "order", "weights", "more"});
}

// All four, but for `without`; `order` of the type given.
KernelSpec attributes(std::string_view without = "", DType order = DType::kS64) {
  KernelSpec spec;
  std::int64_t two = 2;
  double weights[] = {0.5, 1.5};
  if (without != "weights") spec.attributes.add_numbers("weights", DType::kF64, weights, 2);
  if (without != "mode") spec.attributes.add_string("mode", "fast");
  if (without != "more") spec.attributes.add_dictionary("more", Attributes());
  if (without != "order") spec.attributes.add_number("order", order, &two);
  return spec;
}

TEST(KernelSite, FindsAttributesByTheParametersNames) {
  auto site = with_attributes()->bind(attributes());
  Arrays none;
  ASSERT_TRUE(fake::call(*site, none, none).ok());
  EXPECT_THAT(seen.attributes, ElementsAre("mode", "order", "weights", "more"));
}

TEST(KernelSite, AMissingAttributeOrOneOfAnotherTypeIsAnErrorThatNamesIt) {
  for (std::string_view name : {"mode", "order", "weights", "more"}) {
    std::string text = bind_error(with_attributes(), attributes(name));
    EXPECT_THAT(text, HasSubstr("parameter '" + std::string(name) + "'"));
    EXPECT_THAT(text, HasSubstr("got none"));
  }
  EXPECT_THAT(
      bind_error(with_attributes(), attributes("", DType::kS32)),
      HasSubstr("parameter 'order': expected an attribute for Attr, got one of another type"));
  KernelSpec text_for_number = attributes("order");
  text_for_number.attributes.add_string("order", "2");
  EXPECT_THAT(bind_error(with_attributes(), std::move(text_for_number)),
              HasSubstr("parameter 'order'"));
}

TEST(KernelSite, ParametersWithoutNamesHaveAttributesByNumber) {
  auto kernel = fake::kernel("k", &record, {parameter(CALLGATE_ATTR_STRING, 0, 0)});
  KernelSpec spec;
  spec.attributes.add_string("0", "x");
  EXPECT_NE(kernel->bind(std::move(spec)), nullptr);
}

TEST(KernelSite, HandsOutTheUserData) {
  int mine = 0;
  KernelInfo info;
  info.name = "k";
  info.function = &record;
  info.user_data = &mine;
  info.parameters.assign(kSeenParameters, parameter(CALLGATE_CONTEXT, 0, 0));
  Arrays none;
  auto callee = std::make_shared<KernelCallee>(info, nullptr);
  ASSERT_TRUE(fake::call(*callee->bind({}), none, none).ok());
  EXPECT_EQ(seen.user_data, &mine);
}

TEST(KernelCallee, IsNoGate) {
  auto kernel = fake::kernel("k", &record, {});
  EXPECT_THAT(error_of([&] { kernel->specialise({}); }),
              HasSubstr("the program's call of 'k': expected a gate, got a kernel of that name"));
}

TEST(KernelCallee, KeepsWhatItsFunctionNeeds) {
  auto library = std::make_shared<int>(0);
  std::weak_ptr<int> alive = library;
  KernelInfo info;
  info.name = "k";
  info.function = &record;
  auto kernel = std::make_shared<KernelCallee>(info, nullptr, std::move(library));
  auto site = kernel->bind({});
  kernel.reset();
  EXPECT_FALSE(alive.expired());  // the call site holds it
  site.reset();
  EXPECT_TRUE(alive.expired());
}

// --- Failures ------------------------------------------------------------------------------------

std::int32_t fail_twice(const callgate_call* call) {
  std::string text = "the first";
  call->services->fail(call, text.c_str());
  text = "gone";  // it was copied
  call->services->fail(call, "the second");
  return 1;
}

TEST(KernelSite, AFailureHasTheFirstMessageAndIsDescribed) {
  auto kernel = fake::kernel("k", &fail_twice, {});
  Arrays none;
  Outcome outcome = fake::call(*kernel->bind({}), none, none);
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ(outcome.error().code, ErrorCode::kInternal);
  EXPECT_EQ(outcome.error().message, "kernel 'k': the first");
  auto described =
      fake::kernel("k", &fail_twice, {}, {},
                   [](const std::string& message, const std::string& site,
                      const std::string& lane) { return site + lane + " said " + message; });
  KernelSpec spec;
  spec.site = "a.py:3 (f)";
  EXPECT_EQ(message(fake::call(*described->bind(std::move(spec)), none, none)),
            "a.py:3 (f) said the first");
}

TEST(KernelSite, AFailureNeedsNoMessageAndAMessageNoFailure) {
  Arrays none;
  auto silent = fake::kernel("k", [](const callgate_call*) { return std::int32_t{7}; }, {});
  EXPECT_THAT(message(fake::call(*silent->bind({}), none, none)), HasSubstr("without a message"));
  auto fine = fake::kernel("k",
                           [](const callgate_call* call) {
                             call->services->fail(call, "never mind");
                             return std::int32_t{0};
                           },
                           {});
  EXPECT_TRUE(fake::call(*fine->bind({}), none, none).ok());
}

TEST(KernelSite, OneOfTheMessagesOfSeveralThreadsCounts) {
  auto kernel = fake::kernel("k",
                             [](const callgate_call* call) {
                               call->services->parallel_for(
                                   call, 0, 64, 1,
                                   [](void* data, std::int64_t, std::int64_t) {
                                     const auto* mine = static_cast<const callgate_call*>(data);
                                     mine->services->fail(mine, "one of them");
                                   },
                                   const_cast<callgate_call*>(call));
                               return std::int32_t{1};
                             },
                             {parameter(CALLGATE_CONTEXT, 0, 0)});
  fake::Threads threads(4);
  Arrays none;
  EXPECT_EQ(message(fake::call(*kernel->bind({}), none, none, &threads)),
            "kernel 'k': one of them");
}

// --- Services ------------------------------------------------------------------------------------

TEST(KernelServices, WithoutAnExecutorThereIsOneThreadAndNoDevice) {
  auto kernel =
      fake::kernel("k",
                   [](const callgate_call* call) {
                     result(call, 0)[0] = static_cast<float>(call->services->threads(call));
                     result(call, 0)[1] = static_cast<float>(call->services->device(call));
                     return std::int32_t{0};
                   },
                   {parameter(CALLGATE_OUT)});
  std::vector<float> z(2);
  Arrays none, out;
  out.add(z);
  ASSERT_TRUE(fake::call(*kernel->bind({}), none, out).ok());
  EXPECT_THAT(z, ElementsAre(1, -1));
  fake::Threads threads(4);
  ASSERT_TRUE(fake::call(*kernel->bind({}), none, out, &threads).ok());
  EXPECT_THAT(z, ElementsAre(4, 5));
}

TEST(KernelServices, AKernelsLoopRunsOnTheExecutorsThreads) {
  auto kernel = fake::kernel(
      "k",
      [](const callgate_call* call) {
        call->services->parallel_for(
            call, 0, fake::size(call->operands[0]), 4,
            [](void* data, std::int64_t first, std::int64_t last) {
              const auto* mine = static_cast<const callgate_call*>(data);
              for (std::int64_t i = first; i < last; ++i)
                result(mine, 1)[i] = 2 * operand(mine, 0)[i];
            },
            const_cast<callgate_call*>(call));
        return std::int32_t{0};
      },
      in_out());
  std::vector<float> x(1000), z(1000), want(1000);
  std::iota(x.begin(), x.end(), 0.0F);
  std::ranges::transform(x, want.begin(), [](float value) { return 2 * value; });
  Arrays in, out;
  in.add(x);
  out.add(z);
  fake::Threads threads(4);
  ASSERT_TRUE(fake::call(*kernel->bind({}), in, out, &threads).ok());
  EXPECT_EQ(z, want);
  EXPECT_EQ(threads.scheduled, 3);
}

// --- Lanes ---------------------------------------------------------------------------------------

KernelSpec lanes(const std::string& text) {
  KernelSpec spec;
  spec.lanes = fake::lanes(text);
  return spec;
}

// In x, In y, Out z, all of one element a lane: z = x - y
std::int32_t minus(const callgate_call* call) {
  result(call, 2)[0] = operand(call, 0)[0] - operand(call, 1)[0];
  return 0;
}

std::vector<callgate_parameter> two_in() {
  return {parameter(CALLGATE_IN), parameter(CALLGATE_IN), parameter(CALLGATE_OUT)};
}

TEST(KernelLanes, RunOnceEachOnTheirPartOfTheArrays) {
  auto site = fake::kernel("k", &minus, two_in())->bind(lanes("2:10;3:01"));
  std::vector<float> x = {10, 20}, y = {1, 2, 3}, z(6);
  Arrays in, out;
  in.add(x).add(y);
  out.add(DType::kF32, z, {2, 3});
  ASSERT_TRUE(fake::call(*site, in, out).ok());
  EXPECT_THAT(z, ElementsAre(9, 8, 7, 19, 18, 17));
}

// A site is shared by the executables of an exported program, one for each size that it served.
TEST(KernelLanes, OpenExtentsAreThoseOfEachCall) {
  auto site = fake::kernel("k", &minus, two_in())->bind(lanes("-1:10;3:01"));
  for (std::vector<float> x : {std::vector<float>{10, 20}, {30}, {1, 2, 3}}) {
    std::vector<float> y = {1, 2, 3}, z(3 * x.size()), wanted;
    for (float a : x)
      for (float b : y) wanted.push_back(a - b);
    Arrays in, out;
    in.add(x).add(y);
    out.add(DType::kF32, z, {std::ssize(x), 3});
    ASSERT_TRUE(fake::call(*site, in, out).ok());
    EXPECT_EQ(z, wanted);
  }
}

TEST(KernelLanes, ArraysWithoutTheLanesAxesAreRefused) {
  auto site = fake::kernel("k", &minus, two_in())->bind(lanes("2:11"));
  std::vector<float> x(2), y(3), z(2);
  Arrays in, out;
  in.add(x).add(y);
  out.add(z);
  EXPECT_THAT(error_of([&] { fake::call(*site, in, out).raise(); }), HasSubstr("operand 1"));
}

TEST(KernelLanes, NoLanesIsNoCall) {
  auto site = fake::kernel(
                  "k", [](const callgate_call*) -> std::int32_t { std::abort(); }, in_out())
                  ->bind(lanes("0:1"));
  std::vector<float> none;
  Arrays in, out;
  in.add(none);
  out.add(none);
  EXPECT_TRUE(fake::call(*site, in, out).ok());
}

std::atomic<int> inside{0}, most{0};

// In x, Out z. Says how many lanes run at once; fails for negative x, with x as its message.
std::int32_t watch(const callgate_call* call) {
  int now = inside.fetch_add(1) + 1;
  for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
  }
  std::this_thread::yield();
  float x = operand(call, 0)[0];
  result(call, 1)[0] = 2 * x;
  inside.fetch_sub(1);
  if (x >= 0) return 0;
  call->services->fail(call, std::to_string(static_cast<int>(x)).c_str());
  return 1;
}

Outcome run_watched(bool thread_safe, std::vector<float>& x, std::vector<float>& z,
                    Executor* executor) {
  KernelInfo info;
  info.name = "k";
  info.function = &watch;
  info.parameters = in_out();
  info.thread_safe = thread_safe;
  auto site =
      std::make_shared<KernelCallee>(info, nullptr)->bind(lanes(std::to_string(x.size()) + ":1"));
  Arrays in, out;
  in.add(x);
  out.add(z);
  most = 0;
  return fake::call(*site, in, out, executor);
}

TEST(KernelLanes, RunOneByOneUnlessTheKernelIsThreadSafe) {
  fake::Threads threads(4);
  std::vector<float> x(200), z(200);
  std::iota(x.begin(), x.end(), 0.0F);
  ASSERT_TRUE(run_watched(/*thread_safe=*/false, x, z, &threads).ok());
  EXPECT_EQ(threads.scheduled, 0);
  EXPECT_EQ(most, 1);
  ASSERT_TRUE(run_watched(/*thread_safe=*/true, x, z, &threads).ok());
  EXPECT_EQ(threads.scheduled, 3);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(z[i], 2 * x[i]);
}

TEST(KernelLanes, TheFirstFailingLaneStopsThoseThatComeAfterIt) {
  std::vector<float> x(10, 1.0F), z(10);
  x[4] = -40;
  x[7] = -70;
  EXPECT_EQ(message(run_watched(/*thread_safe=*/false, x, z, nullptr)),
            "kernel 'k' in lane 4: -40");
  EXPECT_EQ(z[3], 2);
  EXPECT_EQ(z[5], 0);
}

TEST(KernelLanes, OfSeveralFailingLanesOnSeveralThreadsTheLowestIsReported) {
  // Parts of 16 lanes; the first lane of each fails, and all of them wait for each other, so that
  // none is stopped by another before it has failed.
  struct Meeting {
    static std::int32_t meet(const callgate_call* call) {
      static std::atomic<int> met{0};
      met.fetch_add(1);
      while (met.load() < 4) std::this_thread::yield();
      call->services->fail(call, std::to_string(static_cast<int>(operand(call, 0)[0])).c_str());
      return 1;
    }
  };
  KernelInfo info;
  info.name = "k";
  info.function = &Meeting::meet;
  info.parameters = in_out();
  info.thread_safe = true;
  std::vector<float> x(4), z(4);
  std::iota(x.begin(), x.end(), 10.0F);
  auto site = std::make_shared<KernelCallee>(info, nullptr)->bind(lanes("4:1"));
  Arrays in, out;
  in.add(x);
  out.add(z);
  fake::Threads threads(4);
  EXPECT_EQ(message(fake::call(*site, in, out, &threads)), "kernel 'k' in lane 0: 10");
}

}  // namespace
}  // namespace callgate
