// SPDX-License-Identifier: Apache-2.0
// Instructions that do the same in each lane, and the choice of one by type.
//
// An operation is a struct with a static `of`, whose parameters are the lane's values: rows 1, 2,
// ... of the instruction; its result goes to row 0.
#pragma once

#include <type_traits>

#include "decoder.h"
#include "machine.h"

namespace vgpu::ptx {

template <typename Operation, typename To, typename... From>
void elementwise(Warp& warp, const Instruction& instruction, Lanes lanes) {
  To* to = warp.row<To>(instruction.row[0]);
  [&]<std::size_t... N>(std::index_sequence<N...>) {
    std::tuple<const From*...> from{warp.row<const From>(instruction.row[N + 1])...};
    each_lane(lanes,
              [&](std::uint32_t lane) { to[lane] = Operation::of(std::get<N>(from)[lane]...); });
  }(std::index_sequence_for<From...>{});
}

// The same for an operation that looks at the instruction: `of(instruction, values...)`.
template <typename Operation, typename To, typename... From>
void elementwise_with(Warp& warp, const Instruction& instruction, Lanes lanes) {
  To* to = warp.row<To>(instruction.row[0]);
  [&]<std::size_t... N>(std::index_sequence<N...>) {
    std::tuple<const From*...> from{warp.row<const From>(instruction.row[N + 1])...};
    each_lane(lanes, [&](std::uint32_t lane) {
      to[lane] = Operation::of(instruction, std::get<N>(from)[lane]...);
    });
  }(std::index_sequence_for<From...>{});
}

// The C++ type of an integer or bit type, handed to `body` as std::type_identity.
template <typename Body>
auto with_integer(Decoder& decoder, Type type, Body&& body) {
  switch (type) {
    case Type::kB8:
    case Type::kU8: return body(std::type_identity<std::uint8_t>{});
    case Type::kB16:
    case Type::kU16: return body(std::type_identity<std::uint16_t>{});
    case Type::kB32:
    case Type::kU32: return body(std::type_identity<std::uint32_t>{});
    case Type::kB64:
    case Type::kU64: return body(std::type_identity<std::uint64_t>{});
    case Type::kS8: return body(std::type_identity<std::int8_t>{});
    case Type::kS16: return body(std::type_identity<std::int16_t>{});
    case Type::kS32: return body(std::type_identity<std::int32_t>{});
    case Type::kS64: return body(std::type_identity<std::int64_t>{});
    default: decoder.fail("not for ." + std::string(name_of(type)));
  }
}

// The unsigned type of so many bytes.
template <typename Body>
auto with_bytes(Decoder& decoder, std::uint32_t bytes, Body&& body) {
  switch (bytes) {
    case 1: return body(std::type_identity<std::uint8_t>{});
    case 2: return body(std::type_identity<std::uint16_t>{});
    case 4: return body(std::type_identity<std::uint32_t>{});
    case 8: return body(std::type_identity<std::uint64_t>{});
    default: decoder.fail("not for " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace vgpu::ptx
