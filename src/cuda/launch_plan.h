// What one call of a kernel launches, decoded once from the attributes that programs hold
// (python/callgate/_kernel/launch.py writes it). Immutable; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/attributes.h"

namespace callgate::cuda {

// An address that a call fills in.
struct Address {
  enum class Of : std::uint8_t { kOperand, kResult, kScratch };
  std::size_t offset = 0;  // in the launch's bytes
  Of of = Of::kOperand;
  std::uint32_t index = 0;
};

struct Launch {
  std::string entry;
  std::array<unsigned, 3> grid{}, block{};
  unsigned shared_bytes = 0;
  std::array<unsigned, 3> cluster{};  // 0s for none
  std::vector<std::byte> bytes;       // of all parameters, each aligned
  std::vector<std::uint32_t> starts;  // where each parameter begins
  std::vector<Address> addresses;

  bool empty() const noexcept { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  bool clustered() const noexcept { return cluster[0] != 0; }
  // "grid (4, 1, 1), block (256, 1, 1), shared 0 bytes"
  std::string text() const;
};

struct LaunchPlan {
  std::vector<Launch> launches;
  std::vector<std::size_t> scratch;   // bytes of each block
  std::vector<std::uint32_t> zeroed;  // results
  // How many of each a call must have at least.
  std::size_t operands = 0, results = 0;

  // Throws Error for attributes of another form.
  static LaunchPlan of(const Attributes& held);
};

}  // namespace callgate::cuda
