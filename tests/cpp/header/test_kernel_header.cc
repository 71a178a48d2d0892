// SPDX-License-Identifier: Apache-2.0
// include/callgate/kernel.h by itself: views, attributes, how parameters are described and made,
// errors. The runtime's part is a fake here. Written as users write kernels:
// NOLINTBEGIN(modernize-avoid-c-style-cast)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <complex>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "callgate/kernel.h"

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One call as the runtime would make it, with services that note what was asked.
class FakeCall {
 public:
  template <class T>
  void operand(std::vector<T>& values, std::vector<int64_t> dims) {
    add(operands_, values.data(), std::move(dims), cg::detail::kDType<T>);
  }
  template <class T>
  void result(std::vector<T>& values, std::vector<int64_t> dims) {
    add(results_, values.data(), std::move(dims), cg::detail::kDType<T>);
  }
  void attribute(callgate_attribute attribute) { attributes_.push_back(attribute); }

  // Runs a kernel whose i-th parameter begins at starts[i] and takes counts[i] (one, unless given).
  template <auto kFunction>
  int32_t run(std::vector<int32_t> starts, std::vector<int32_t> counts = {}) {
    counts.resize(starts.size(), 1);
    static constexpr callgate_services kServices = {&parallel, &scratch, &threads, &device, &fail};
    call_ = Call{{operands_.data(), results_.data(), attributes_.data(), starts.data(),
                  counts.data(), &kServices, this},
                 this};
    return cg::detail::Kernel<kFunction>::call(&call_);
  }

  std::string message;
  std::size_t scratch_bytes = 0, scratch_alignment = 0;
  bool has_memory = true;

 private:
  struct Call : callgate_call {
    FakeCall* self;
  };
  static FakeCall& of(const callgate_call* call) { return *static_cast<const Call*>(call)->self; }

  void add(std::vector<callgate_array>& arrays, void* data, std::vector<int64_t> dims, int dtype) {
    dims_.push_back(std::make_unique<std::vector<int64_t>>(std::move(dims)));
    const std::vector<int64_t>& kept = *dims_.back();
    arrays.push_back(
        {data, kept.data(), static_cast<int32_t>(kept.size()), static_cast<uint8_t>(dtype)});
  }

  // Two parts, the second one first: nothing may lean on the order.
  static void parallel(const callgate_call* /*call*/, int64_t begin, int64_t end, int64_t /*grain*/,
                       void (*body)(void*, int64_t, int64_t), void* data) {
    int64_t middle = begin + (end - begin) / 2;
    body(data, middle, end);
    body(data, begin, middle);
  }
  static void* scratch(const callgate_call* call, size_t bytes, size_t alignment) {
    FakeCall& self = of(call);
    self.scratch_bytes = bytes;
    self.scratch_alignment = alignment;
    if (!self.has_memory) return nullptr;
    self.memory_.resize(bytes);
    return self.memory_.data();
  }
  static int32_t threads(const callgate_call* /*call*/) { return 5; }
  static int64_t device(const callgate_call* /*call*/) { return 3; }
  static void fail(const callgate_call* call, const char* message) { of(call).message = message; }

  Call call_;
  std::vector<callgate_array> operands_, results_;
  std::vector<callgate_attribute> attributes_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> dims_;
  std::vector<char> memory_;
};

std::vector<float> iota(int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

// --- Views ---------------------------------------------------------------------------------------

struct ViewOf {
  ViewOf(std::vector<int64_t> extents, int64_t count)
      : dims(std::move(extents)),
        values(iota(count)),
        array{values.data(), dims.data(), static_cast<int32_t>(dims.size()), 11} {}
  std::vector<int64_t> dims;
  std::vector<float> values;
  callgate_array array;
};

TEST(KernelHeader, AViewKnowsItsExtentsStridesAndSize) {
  ViewOf of({2, 3, 4}, 24);
  cg::In<float, 3> x(of.array);
  EXPECT_EQ(x.rank(), 3);
  EXPECT_EQ(x.size(), 24);
  EXPECT_FALSE(x.empty());
  EXPECT_THAT((std::array{x.extent(0), x.extent(1), x.extent(2)}), ElementsAre(2, 3, 4));
  EXPECT_THAT((std::array{x.stride(0), x.stride(1), x.stride(2)}), ElementsAre(12, 4, 1));
  EXPECT_EQ(x.extents(), of.dims.data());
  EXPECT_EQ(x.data(), of.values.data());
}

TEST(KernelHeader, AViewIsIndexedInMemoryOrderAndByAxes) {
  ViewOf of({2, 3, 4}, 24);
  cg::Out<float, 3> x(of.array);
  EXPECT_EQ(x[17], 17.0F);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j)
      for (int k = 0; k < 4; ++k) EXPECT_EQ(x(i, j, k), static_cast<float>(12 * i + 4 * j + k));
  x(1, 2, 3) = -1;
  EXPECT_EQ(of.values.back(), -1.0F);
  EXPECT_EQ(std::accumulate(x.begin(), x.end(), 0.0F), 23 * 11.0F - 1);
}

TEST(KernelHeader, AViewOfRankZeroHasOneElementAndAnEmptyOneNone) {
  ViewOf scalar({}, 1), empty({3, 0}, 0);
  cg::In<float, 0> one(scalar.array);
  EXPECT_EQ(one.size(), 1);
  EXPECT_EQ(one(), 0.0F);
  cg::In<float> none(empty.array);
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(none.begin(), none.end());
}

TEST(KernelHeader, AnInIsReadOnlyAndAnOutIsNot) {
  static_assert(std::is_same_v<decltype(std::declval<cg::In<float>>()[0]), const float&>);
  static_assert(std::is_same_v<decltype(std::declval<cg::Out<float>>()[0]), float&>);
  static_assert(std::is_same_v<decltype(std::declval<cg::InOut<float>>()[0]), float&>);
  static_assert(std::is_same_v<cg::In<float>::value_type, float>);
}

template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(KernelHeader, AnIndexOutsideIsAnErrorThatNamesItsAxis) {
  if (CALLGATE_BOUNDS_CHECK == 0) GTEST_SKIP() << "built without bounds checks";
  ViewOf of({2, 3}, 6);
  cg::In<float, 2> x(of.array);
  cg::In<float> any(of.array);
  EXPECT_EQ(error_of([&] { x[5]; }), "");
  EXPECT_EQ(error_of([&] { x[6]; }), "index 6 is outside [0, 6)");
  EXPECT_EQ(error_of([&] { x[-1]; }), "index -1 is outside [0, 6)");
  EXPECT_EQ(error_of([&] { x(1, 2); }), "");
  EXPECT_EQ(error_of([&] { x(2, 0); }), "index 2 of axis 0 is outside [0, 2)");
  EXPECT_EQ(error_of([&] { x(0, -1); }), "index -1 of axis 1 is outside [0, 3)");
  EXPECT_EQ(error_of([&] { any(0, 3); }), "index 3 of axis 1 is outside [0, 3)");
  EXPECT_THAT(error_of([&] { any(0); }), HasSubstr("outside"));
  EXPECT_EQ(error_of([&] { x.extent(2); }), "index 2 is outside [0, 2)");
  cg::Ins<float> xs(&of.array, 1);
  EXPECT_EQ(error_of([&] { xs[1]; }), "index 1 is outside [0, 1)");
}

// --- Calls ---------------------------------------------------------------------------------------

void saxpy(float a, cg::In<float, 1> x, const cg::In<float, 1>& y, cg::Out<float, 1> z) {
  for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
}
void in_place(cg::InOut<double> x, cg::Context& context) {
  for (double& value : x) value += context.threads();
}
void sums(cg::Ins<float, 1> xs, cg::Outs<float, 0> totals) {
  for (int i = 0; i < xs.size(); ++i)
    totals[i]() = std::accumulate(xs[i].begin(), xs[i].end(), 0.0F);
}

TEST(KernelHeader, ACallHandsEachParameterItsArrays) {
  FakeCall call;
  std::vector<float> a{2}, x{1, 2}, y{10, 20}, z(2);
  call.operand(a, {});
  call.operand(x, {2});
  call.operand(y, {2});
  call.result(z, {2});
  EXPECT_EQ(call.run<&saxpy>({0, 1, 2, 0}), 0);
  EXPECT_THAT(z, ElementsAre(12, 24));
}

TEST(KernelHeader, AnInOutIsTheResultsMemory) {
  FakeCall call;
  std::vector<double> x{1, 2};
  call.operand(x, {2});
  call.result(x, {2});
  EXPECT_EQ(call.run<&in_place>({0, 0}), 0);
  EXPECT_THAT(x, ElementsAre(6, 7));
}

TEST(KernelHeader, VariadicParametersTakeAnyNumber) {
  FakeCall call;
  std::vector<float> x{1, 2}, y{3}, p(1), q(1);
  call.operand(x, {2});
  call.operand(y, {1});
  call.result(p, {});
  call.result(q, {});
  EXPECT_EQ(call.run<&sums>({0, 0}, {2, 2}), 0);
  EXPECT_EQ(p[0], 3);
  EXPECT_EQ(q[0], 3);
  EXPECT_EQ(call.run<&sums>({0, 0}, {0, 0}), 0);
}

void throws_error(cg::In<float> x) { throw cg::Error("%d of %s", int(x.size()), "them"); }
void throws_std(cg::In<float>) { throw std::out_of_range("too far"); }
void throws_int(cg::In<float>) { throw 7; }
void is_noexcept(cg::Out<float> x) noexcept { x[0] = 4; }

TEST(KernelHeader, AnExceptionBecomesTheCallsMessage) {
  FakeCall call;
  std::vector<float> x{1, 2};
  call.operand(x, {2});
  EXPECT_EQ(call.run<&throws_error>({0}), 1);
  EXPECT_EQ(call.message, "2 of them");
  EXPECT_EQ(call.run<&throws_std>({0}), 1);
  EXPECT_EQ(call.message, "too far");
  EXPECT_EQ(call.run<&throws_int>({0}), 1);
  EXPECT_EQ(call.message, "an exception that is not a std::exception");
  call.result(x, {2});
  EXPECT_EQ(call.run<&is_noexcept>({0}), 0);
  EXPECT_EQ(x[0], 4);
}

TEST(KernelHeader, ALongErrorIsCutAndStaysText) {
  std::string text(2000, 'x');
  EXPECT_EQ(std::strlen(cg::Error("%s", text.c_str()).what()), 511U);
}

// --- The context ---------------------------------------------------------------------------------

void squares(cg::Context context, cg::Out<float, 1> y) {
  context.parallel_for(0, y.size(), 1, [&](int64_t i) { y[i] = float(i * i); });
}
void ranges(const cg::Context& context, cg::Out<float, 1> y) {
  auto body = [&](int64_t first, int64_t last) {  // an lvalue
    for (int64_t i = first; i < last; ++i) y[i] += 1;
  };
  context.parallel_ranges(1, y.size(), 1, body);
}
void fails_in_parallel(cg::Context context, cg::Out<float, 1> y) {
  context.parallel_for(0, y.size(), 1, [&](int64_t i) {
    if (i % 2 == 1) throw cg::Error("at %d", int(i));
    y[i] = 1;
  });
}

TEST(KernelHeader, ParallelLoopsCoverTheirRangeOnce) {
  FakeCall call;
  std::vector<float> y(5);
  call.result(y, {5});
  EXPECT_EQ(call.run<&squares>({0, 0}), 0);
  EXPECT_THAT(y, ElementsAre(0, 1, 4, 9, 16));
  EXPECT_EQ(call.run<&ranges>({0, 0}), 0);
  EXPECT_THAT(y, ElementsAre(0, 2, 5, 10, 17));
}

TEST(KernelHeader, TheFirstExceptionOfAParallelLoopEndsTheKernel) {
  FakeCall call;
  std::vector<float> y(6);
  call.result(y, {6});
  EXPECT_EQ(call.run<&fails_in_parallel>({0, 0}), 1);
  EXPECT_EQ(call.message, "at 3");  // the fake runs the second half first
  EXPECT_EQ(y[0], 1);               // every part has been begun
}

void takes_scratch(cg::Context context, cg::Out<float, 1> y) {
  auto* memory = context.scratch<std::complex<double>>(y.size());
  for (int64_t i = 0; i < y.size(); ++i) memory[i] = double(i);
  for (int64_t i = 0; i < y.size(); ++i) y[i] = float(memory[y.size() - 1 - i].real());
}
void takes_too_much(cg::Context context, cg::Out<float, 1> y) {
  y[0] = context.scratch<float>(int64_t{1} << 62)[0];
}
void takes_aligned(cg::Context context, cg::Out<float, 1> y) {
  struct alignas(128) Line {
    float values[32];
  };
  context.scratch<Line>(1);
  y[0] = float(context.device());
  y[1] = context.user_data() != nullptr ? 1 : 0;
}

TEST(KernelHeader, ScratchMemoryHasTheElementsSizeAndAlignment) {
  FakeCall call;
  std::vector<float> y(3);
  call.result(y, {3});
  EXPECT_EQ(call.run<&takes_scratch>({0, 0}), 0);
  EXPECT_THAT(y, ElementsAre(2, 1, 0));
  EXPECT_EQ(call.scratch_bytes, 48U);
  EXPECT_EQ(call.scratch_alignment, 64U);
  EXPECT_EQ(call.run<&takes_aligned>({0, 0}), 0);
  EXPECT_EQ(call.scratch_alignment, 128U);
  EXPECT_EQ(y[0], 3);
  EXPECT_EQ(y[1], 1);
}

TEST(KernelHeader, NoScratchMemoryIsAnError) {
  FakeCall call;
  std::vector<float> y(3);
  call.result(y, {3});
  call.has_memory = false;
  EXPECT_EQ(call.run<&takes_scratch>({0, 0}), 1);
  EXPECT_EQ(call.message, "no memory for 3 elements of 16 bytes");
  call.has_memory = true;
  call.scratch_bytes = 0;
  EXPECT_EQ(call.run<&takes_too_much>({0, 0}), 1);  // the size would wrap around
  EXPECT_EQ(call.scratch_bytes, 0U);
}

// --- Attributes ----------------------------------------------------------------------------------

void takes_attributes(cg::Attr<int32_t> n, cg::String mode, cg::Numbers<double> weights,
                      const cg::Dict& options, cg::Out<double, 1> y) {
  std::string_view text = mode;
  y[0] = n + double(text.size());
  y[1] = std::accumulate(weights.begin(), weights.end(), 0.0);
  y[2] = options.get<double>("tolerance") + (mode == "fast" ? 1 : 0);
  y[3] = double(options.dict("inner").numbers<int64_t>("steps")[1]);
  y[4] = double(std::string(options.string("name")).size());
  y[5] = options.contains("absent") ? 1 : 0;
}

TEST(KernelHeader, AttributesReachTheirParameters) {
  int32_t n = 3;
  std::array<double, 2> weights{0.25, 0.5};
  std::array<int64_t, 2> steps{7, 8};
  double tolerance = 0.125;
  callgate_attribute inner{"steps", steps.data(), 2, CALLGATE_NUMBERS, 5};
  std::array<callgate_attribute, 3> options{{
      {"inner", &inner, 1, CALLGATE_DICTIONARY, 0},
      {"name", "abc", 3, CALLGATE_STRING, 0},
      {"tolerance", &tolerance, 1, CALLGATE_NUMBER, 12},
  }};
  FakeCall call;
  std::vector<double> y(6);
  call.result(y, {6});
  call.attribute({"n", &n, 1, CALLGATE_NUMBER, 4});
  call.attribute({"mode", "fast!", 4, CALLGATE_STRING, 0});  // not terminated at its end
  call.attribute({"weights", weights.data(), 2, CALLGATE_NUMBERS, 12});
  call.attribute({"options", options.data(), 3, CALLGATE_DICTIONARY, 0});
  ASSERT_EQ(call.run<&takes_attributes>({0, 1, 2, 3, 0}), 0) << call.message;
  EXPECT_THAT(y, ElementsAre(7, 0.75, 1.125, 8, 3, 0));

  cg::Dict dict(callgate_attribute{"options", options.data(), 3, CALLGATE_DICTIONARY, 0});
  EXPECT_EQ(dict.size(), 3U);
  EXPECT_EQ(error_of([&] { dict.get<double>("none"); }), "attribute 'none' is missing");
  EXPECT_THAT(error_of([&] { dict.get<float>("tolerance"); }),
              HasSubstr("attribute 'tolerance': expected a number of float32, got a number of "));
  EXPECT_THAT(error_of([&] { dict.string("inner"); }),
              HasSubstr("expected a string, got a dictionary"));
}

// --- What a library exports ----------------------------------------------------------------------

namespace exported {
void scale(cg::Attr<float> by, cg::In<cg::bfloat16, 2> x, cg::Out<std::complex<float>> y,
           cg::Context) {
  y[0] = std::complex<float>(x[0] * by, 0);
}
}  // namespace exported
void unnamed(cg::InOut<int8_t, 0> x, uint16_t by, cg::Ins<bool> flags) {
  for (int i = 0; i < flags.size(); ++i) x() = int8_t(x() + int8_t(by));
}
CALLGATE_KERNEL_AS(header_scale, exported::scale, by, x, y, context);
CALLGATE_KERNEL(unnamed);

const callgate_kernel* exported_as(std::string_view name) {
  for (const callgate_kernel* kernel = callgate_kernels(); kernel != nullptr; kernel = kernel->next)
    if (std::string_view(kernel->names).starts_with(name)) return kernel;
  return nullptr;
}

std::vector<std::array<int, 3>> codes(const callgate_kernel& kernel) {
  std::vector<std::array<int, 3>> found;
  for (const callgate_parameter& p :
       std::span(kernel.parameters, static_cast<std::size_t>(kernel.parameter_count)))
    found.push_back({p.kind, p.dtype, p.rank});
  return found;
}

TEST(KernelHeader, AnExportedKernelDescribesItsParameters) {
  const callgate_kernel* scale = exported_as("header_scale");
  ASSERT_NE(scale, nullptr);
  EXPECT_EQ(scale->abi, static_cast<uint32_t>(CALLGATE_ABI));
  EXPECT_STREQ(scale->names, "header_scale,by, x, y, context");
  EXPECT_THAT(
      codes(*scale),
      ElementsAre(std::array{int(CALLGATE_ATTR_NUMBER), 11, 0}, std::array{int(CALLGATE_IN), 16, 2},
                  std::array{int(CALLGATE_OUT), 15, -1}, std::array{int(CALLGATE_CONTEXT), 0, 0}));
  const callgate_kernel* other = exported_as("unnamed");
  ASSERT_NE(other, nullptr);
  EXPECT_STREQ(other->names, "unnamed");
  EXPECT_THAT(codes(*other), ElementsAre(std::array{int(CALLGATE_INOUT), 2, 0},
                                         std::array{int(CALLGATE_SCALAR), 7, 0},
                                         std::array{int(CALLGATE_INS), 1, -1}));
}

TEST(KernelHeader, ElementTypesHaveXlasCodes) {
  using cg::detail::kDType;
  EXPECT_THAT(
      (std::array{kDType<bool>, kDType<int8_t>, kDType<int16_t>, kDType<int32_t>, kDType<int64_t>,
                  kDType<uint8_t>, kDType<uint16_t>, kDType<uint32_t>, kDType<uint64_t>}),
      ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT((std::array{kDType<cg::float16>, kDType<float>, kDType<double>,
                          kDType<std::complex<float>>, kDType<cg::bfloat16>,
                          kDType<std::complex<double>>, kDType<std::string>, kDType<const float>}),
              ElementsAre(10, 11, 12, 15, 16, 18, 0, 11));
}

}  // namespace
// NOLINTEND(modernize-avoid-c-style-cast)
