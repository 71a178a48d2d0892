// SPDX-License-Identifier: Apache-2.0
// Numbers that a damaged or hostile input may have where a size or an offset stands.
#pragma once

#include <cstdint>
#include <random>

namespace callgate::testing {

inline std::uint64_t hostile_number(std::mt19937_64& random) {
  switch (random() % 6) {
    case 0: return 0;
    case 1: return ~std::uint64_t{0};
    case 2: return std::uint64_t{1} << (random() % 64);
    case 3: return (std::uint64_t{1} << (random() % 64)) - 1;
    case 4: return random() % 64;
    default: return random();
  }
}

}  // namespace callgate::testing
