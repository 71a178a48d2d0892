// SPDX-License-Identifier: Apache-2.0
// The launches of a CUDA kernel's call.
#include <string_view>

#include "built_attributes.h"
#include "core/error.h"
#include "cuda/launch.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

void check(const cuda::Launch& launch, const cuda::LaunchPlan& plan) {
  for (std::uint32_t start : launch.starts)
    require(start < launch.bytes.size(), "a parameter begins inside the launch's bytes");
  for (const cuda::Address& address : launch.addresses) {
    require(address.offset + 8 <= launch.bytes.size(), "an address is inside the launch's bytes");
    const std::size_t most = address.of == cuda::Address::Of::kOperand  ? plan.operands
                             : address.of == cuda::Address::Of::kResult ? plan.results
                                                                        : plan.scratch.size();
    require(address.index < most, "an address is of an array that the call has");
  }
  require(!launch.text().empty(), "a launch says what it is");
}

}  // namespace

void launch_plan(std::string_view bytes) {
  Bytes in(bytes);
  try {
    const cuda::LaunchPlan plan = cuda::LaunchPlan::of(read_attributes(in));
    for (const cuda::Launch& launch : plan.launches) check(launch, plan);
    for (std::uint32_t result : plan.zeroed)
      require(result < plan.results, "what is zeroed is a result");
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

}  // namespace callgate::fuzz
