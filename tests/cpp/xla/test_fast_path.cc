// SPDX-License-Identifier: Apache-2.0
// The fast path allocates nothing.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "core/call.h"
#include "core/error.h"
#include "fake_callee.h"
#include "fake_kernel.h"
#include "fake_xla.h"

namespace callgate {
namespace {

template <typename Body>
std::size_t count_allocations(Body&& body) {
  std::size_t before = fake::allocations();
  body();
  return fake::allocations() - before;
}

// Allocations of one call of a trivial site with so many operands and results.
std::size_t allocations_of_a_call(std::size_t operands, std::size_t results) {
  auto callee = std::make_shared<fake::FunctionCallee>(
      "trivial", [](const Call&) { return Outcome::success(); }, fake::FunctionCallee::Options{});
  Registry::instance().add(callee);
  fake::Loaded<fake::Program> program("trivial");
  float memory[6] = {};
  fake::Array array{XLA_FFI_DataType_F32, {2, 3}, memory};
  fake::Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &program.context(),
                    std::vector(operands, array), std::vector(results, array));
  EXPECT_TRUE(fake::take(xla_ffi::gate_execute(frame.get())).ok());  // remembered of its run
  XLA_FFI_Error* error = nullptr;
  std::size_t count = count_allocations([&] { error = xla_ffi::gate_execute(frame.get()); });
  EXPECT_TRUE(fake::take(error).ok());
  return count;
}

// The same for a kernel.
std::size_t allocations_of_a_kernel(std::size_t operands, std::size_t results,
                                    callgate_function function) {
  std::vector<callgate_parameter> parameters(operands, fake::parameter(CALLGATE_IN));
  parameters.insert(parameters.end(), results, fake::parameter(CALLGATE_OUT));
  auto kernel = fake::kernel("trivial kernel", function, std::move(parameters));
  Registry::instance().add(kernel);
  fake::Loaded<fake::KernelProgram> program("trivial kernel");
  float memory[6] = {};
  fake::Array array{XLA_FFI_DataType_F32, {2, 3}, memory};
  fake::Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &program.context(),
                    std::vector(operands, array), std::vector(results, array));
  EXPECT_TRUE(fake::take(xla_ffi::kernel_execute(frame.get())).ok());  // what threads keep
  XLA_FFI_Error* error = nullptr;
  std::size_t count = count_allocations([&] { error = xla_ffi::kernel_execute(frame.get()); });
  EXPECT_TRUE(fake::take(error).ok());
  return count;
}

TEST(FastPath, TheCounterCounts) {
  static std::unique_ptr<int> kept;  // clang leaves out the allocation of a local one
  EXPECT_EQ(count_allocations([&] { kept = std::make_unique<int>(1); }), 1U);
  EXPECT_EQ(count_allocations([] {}), 0U);
}

TEST(FastPath, ACallOfUpTo16BuffersASideAllocatesNothing) {
  EXPECT_EQ(allocations_of_a_call(0, 0), 0U);
  EXPECT_EQ(allocations_of_a_call(2, 1), 0U);
  EXPECT_EQ(allocations_of_a_call(16, 16), 0U);
}

TEST(FastPath, ASideOfMoreBuffersAllocatesOnce) {
  EXPECT_EQ(allocations_of_a_call(17, 1), 1U);
  EXPECT_EQ(allocations_of_a_call(1, 40), 1U);
  EXPECT_EQ(allocations_of_a_call(100, 100), 2U);
}

TEST(FastPath, AKernelsCallAllocatesNothing) {
  auto nothing = [](const callgate_call*) { return std::int32_t{0}; };
  EXPECT_EQ(allocations_of_a_kernel(0, 0, nothing), 0U);
  EXPECT_EQ(allocations_of_a_kernel(16, 16, nothing), 0U);
  EXPECT_EQ(allocations_of_a_kernel(17, 1, nothing), 1U);
}

TEST(FastPath, NorDoesTheBookOfItsScratchMemory) {
  auto scratch = [](const callgate_call* call) {
    call->services->scratch(call, 1000, 64);
    call->services->scratch(call, 3000, 64);
    return std::int32_t{0};
  };
  EXPECT_EQ(allocations_of_a_kernel(1, 1, scratch), 0U);
}

}  // namespace
}  // namespace callgate
