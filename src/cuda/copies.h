// What the ways in which arrays are copied to and from a device have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "core/array_view.h"
#include "cuda/device.h"

namespace callgate::cuda {

constexpr std::size_t round_up(std::size_t bytes, std::size_t alignment) noexcept {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Gives the views extents that live as long as what is returned.
std::vector<std::int64_t> own_dims(std::initializer_list<std::span<ArrayView>> groups);

// The stream of a device's that copies of one direction take beside the program's; never destroyed.
// The device's context is current. Throws Error.
enum class Direction : std::uint8_t { kToHost, kToDevice };
Stream side_stream(const Device& device, Direction direction);

}  // namespace callgate::cuda
