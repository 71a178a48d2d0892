// SPDX-License-Identifier: Apache-2.0
// Addresses: which memory they mean, whether it is there, and where the host finds it.
#include "machine.h"

namespace vgpu::ptx {
namespace {

std::string hex(std::uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), kDigits[value & 15U]);
    value >>= 4;
  } while (value != 0);
  return "0x" + text;
}

[[noreturn]] void outside(const char* memory, std::uint64_t address, std::uint32_t bytes,
                          std::uint64_t size, const Instruction& instruction) {
  throw Fault{Result::kIllegalAddress, "line " + std::to_string(instruction.line) + ": " +
                                           std::to_string(bytes) + " bytes at " + hex(address) +
                                           " of " + memory + " memory, which has " +
                                           std::to_string(size)};
}

}  // namespace

void check_alignment(std::uint64_t address, std::uint32_t bytes, const Instruction& instruction) {
  std::uint32_t alignment = bytes < 16 ? bytes : 16;
  if ((address & (alignment - 1)) == 0) return;
  throw Fault{Result::kMisalignedAddress, "line " + std::to_string(instruction.line) +
                                              ": address " + hex(address) + " is not aligned to " +
                                              std::to_string(alignment) + " bytes"};
}

std::byte* Worker::find(std::uint64_t address, std::uint32_t bytes,
                        const Instruction& instruction) {
  std::optional<Range> range = grid_.memory->find(address);
  if (!range || address + bytes > range->end) {
    std::string what = "line " + std::to_string(instruction.line) + ": " + std::to_string(bytes) +
                       " bytes at " + hex(address) + " of global memory, where ";
    what += range ? "an allocation ends at " + hex(range->end) : "no allocation is";
    throw Fault{Result::kIllegalAddress, what};
  }
  ranges_[instruction.cache] = *range;
  return at(address + range->to_host);
}

std::byte* Warp::shared(std::uint64_t address, std::uint32_t bytes,
                        const Instruction& instruction) {
  std::uint64_t rank = address / kSharedStride, offset = address % kSharedStride;
  Cluster& cluster = block_.cluster();
  if (rank >= cluster.size()) outside("shared", address, bytes, 0, instruction);
  std::span<std::byte> memory = cluster.block(static_cast<std::uint32_t>(rank)).shared();
  if (offset + bytes > memory.size()) {
    outside("shared", address, bytes, memory.size(), instruction);
  }
  return memory.data() + offset;
}

std::byte* Warp::local(std::uint64_t address, std::uint32_t bytes, std::uint32_t lane,
                       const Instruction& instruction) {
  if (address + bytes > local_stride_ || address + bytes < address) {
    outside("local", address, bytes, local_stride_, instruction);
  }
  return local_.data() + std::size_t{lane} * local_stride_ + address;
}

std::byte* Warp::resolve(Space space, std::uint64_t address, std::uint32_t bytes,
                         std::uint32_t lane, const Instruction& instruction) {
  check_alignment(address, bytes, instruction);
  switch (space) {
    case Space::kGlobal:
    case Space::kConst: return worker().global(address, bytes, instruction);
    case Space::kShared:
    case Space::kSharedCluster: return shared(address, bytes, instruction);
    case Space::kLocal: return local(address, bytes, lane, instruction);
    case Space::kParam: {
      std::span<const std::byte> parameters = block_.cluster().grid().launch->parameters;
      if (address + bytes > parameters.size()) {
        outside("parameter", address, bytes, parameters.size(), instruction);
      }
      return const_cast<std::byte*>(parameters.data() + address);
    }
    case Space::kGeneric: break;
  }
  const std::uint64_t inside = address & kWindowMask;
  switch (address >> kWindowShift) {
    case 0: return worker().global(address, bytes, instruction);
    case kSharedWindow >> kWindowShift: return shared(inside, bytes, instruction);
    case kLocalWindow >> kWindowShift: return local(inside, bytes, lane, instruction);
    case kParamWindow >> kWindowShift:
      return resolve(Space::kParam, inside, bytes, lane, instruction);
    default: outside("no", address, bytes, 0, instruction);
  }
}

std::string Warp::where(const Instruction& instruction, std::uint32_t lane) const {
  const Dim block = block_.cluster().grid().launch->block;
  const Dim at = block_.index();
  const std::uint32_t thread = index_ * kLanes + lane;
  auto text = [](std::uint32_t x, std::uint32_t y, std::uint32_t z) {
    return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
  };
  return "line " + std::to_string(instruction.line) + ", block " + text(at.x, at.y, at.z) +
         ", thread " +
         text(thread % block.x, thread / block.x % block.y, thread / block.x / block.y);
}

}  // namespace vgpu::ptx
