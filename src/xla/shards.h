// A call on one of an array's shards, in a program that XLA partitions over several devices.
//
// The partitioner of python/callgate/_sharding/partitioner.py makes one such call for each device.
// It adds the device's position in the program, its partition, as the last operand, and says in the
// attribute `shards` which partitions make the call: of those that hold the same data, one may be
// enough.
#pragma once

#include <cstring>
#include <string>
#include <utility>

#include "core/call.h"
#include "core/error.h"
#include "xla/decode.h"

namespace callgate::xla_ffi {

class Shards {
 public:
  Shards() = default;
  // One digit a partition, 1 for those that make the call; "" for a call on whole arrays.
  explicit Shards(std::string runs) : runs_(std::move(runs)) {}

  // Takes the partition's number off the operands; -1 where there is none. Throws Error.
  std::int32_t take(DecodedCall& call) const {
    const void* number = take_operand(call).data;
    if (number == nullptr) [[likely]]
      return -1;
    return read(number);
  }

  // The same in two steps, for a number that is not in the host's memory: the operand, with null
  // for its data where there is none, and its value.
  ArrayView take_operand(DecodedCall& call) const {
    ArrayView number;
    if (runs_.empty()) return number;
    if (!call.operands().empty()) number = call.operands().back();
    if (number.dtype != DType::kU32 || number.rank != 0) {
      throw Error("a call on shards", "the partition as its last operand",
                  call.operands().empty() ? "no operand" : to_string(number));
    }
    call.drop_last_operand();
    return number;
  }
  std::int32_t read(const void* number) const {
    std::uint32_t shard = 0;
    std::memcpy(&shard, number, sizeof(shard));
    if (shard >= runs_.size()) {
      throw Error("a call on shards", "one of " + std::to_string(runs_.size()) + " partitions",
                  "number " + std::to_string(shard));
    }
    return static_cast<std::int32_t>(shard);
  }

  bool all_run() const noexcept { return runs_.find('0') == std::string::npos; }

  // Whether the partition makes the call. One that doesn't has zeros for results: the program adds
  // up what its partitions have.
  bool runs(std::int32_t shard) const noexcept {
    return shard < 0 || runs_[static_cast<std::size_t>(shard)] == '1';
  }

 private:
  std::string runs_;
};

}  // namespace callgate::xla_ffi
