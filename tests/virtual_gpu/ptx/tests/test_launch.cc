// Launches: grids, blocks, branches, calls, shared and local memory, faults.
#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

TEST(Launch, EachThreadRunsOnce) {
  std::vector<std::uint32_t> values(1000);
  for (std::uint32_t i = 0; i < 1000; ++i) values[i] = i * 7;
  EXPECT_EQ(each_thread<std::uint32_t>("add.u32 %out, %in0, %in0;", values)[999], 999U * 14);
}

}  // namespace
}  // namespace vgpu::ptx
