// SPDX-License-Identifier: Apache-2.0
// Bits: logic, shifts, fields, permutations of bytes.
#include <bit>

#include "elementwise.h"

namespace vgpu::ptx {
namespace {

struct And {
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Not {
  template <typename T>
  static T of(T a) {
    return static_cast<T>(~a);
  }
};
struct NotPredicate {
  static std::uint8_t of(std::uint8_t a) { return a ^ 1U; }
};
struct IsZero {
  template <typename T>
  static T of(T a) {
    return a == 0 ? 1 : 0;
  }
};

template <typename Operation>
void logic(Decoder& decoder) {
  decoder.expect_operands(3, 3);
  Type type = decoder.take_type();
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Operation, T, T, T>,
                 {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type)});
  });
}
void logic_not(Decoder& decoder) {
  decoder.expect_operands(2, 2);
  Type type = decoder.take_type();
  std::uint32_t to = decoder.destination(0, type), from = decoder.source(1, type);
  if (type == Type::kPred) {
    decoder.emit(elementwise<NotPredicate, std::uint8_t, std::uint8_t>, {to, from});
    return;
  }
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Not, T, T>, {to, from});
  });
}
void logic_cnot(Decoder& decoder) {
  Type type = decoder.take_type();
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<IsZero, T, T>,
                 {decoder.destination(0, type), decoder.source(1, type)});
  });
}

// Any function of three bits; bit 4a + 2b + c of the table is its value.
struct Table {
  static std::uint32_t of(const Instruction& instruction, std::uint32_t a, std::uint32_t b,
                          std::uint32_t c) {
    std::uint32_t result = 0;
    for (std::uint32_t entry = 0; entry < 8; ++entry) {
      if (((instruction.option >> entry) & 1U) == 0) continue;
      result |= ((entry & 4U) != 0 ? a : ~a) & ((entry & 2U) != 0 ? b : ~b) &
                ((entry & 1U) != 0 ? c : ~c);
    }
    return result;
  }
};
void lop3(Decoder& decoder) {
  decoder.expect_operands(5, 5);
  Type type = decoder.take_type();
  std::uint32_t to = decoder.destination(0, type), a = decoder.source(1, type),
                b = decoder.source(2, type), c = decoder.source(3, type);
  decoder
      .emit(elementwise_with<Table, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>,
            {to, a, b, c})
      .option = static_cast<std::uint32_t>(decoder.number(4));
}

// By more than the width: zero, or the sign.
struct ShiftLeft {
  template <typename T>
  static T of(T a, std::uint32_t by) {
    return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<std::uint64_t>(a) << by);
  }
};
struct ShiftRight {
  template <typename T>
  static T of(T a, std::uint32_t by) {
    constexpr std::uint32_t kTop = 8 * sizeof(T) - 1;
    if (by > kTop) return std::is_signed_v<T> ? static_cast<T>(a >> kTop) : T{0};
    return static_cast<T>(a >> by);
  }
};
void shl(Decoder& decoder) {
  Type type = decoder.take_type();
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(
        elementwise<ShiftLeft, T, T, std::uint32_t>,
        {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, Type::kU32)});
  });
}
void shr(Decoder& decoder) {
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    decoder.emit(
        elementwise<ShiftRight, T, T, std::uint32_t>,
        {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, Type::kU32)});
  });
}

// 64 bits, b above a; half of what is shifted.
template <bool kLeft, bool kWrap>
struct Funnel {
  static std::uint32_t of(std::uint32_t a, std::uint32_t b, std::uint32_t by) {
    const std::uint32_t shift = kWrap ? by & 31U : by < 32 ? by : 32U;
    const std::uint64_t both = std::uint64_t{b} << 32 | a;
    return static_cast<std::uint32_t>(kLeft ? (both << shift) >> 32 : both >> shift);
  }
};
void shf(Decoder& decoder) {
  using u32 = std::uint32_t;
  bool left = decoder.take_one({"l", "r"}, 0) == 0;
  bool wrap = decoder.take_one({"clamp", "wrap"}, 0) == 1;
  Type type = decoder.take_type();
  Instruction::Run run = left ? (wrap ? elementwise<Funnel<true, true>, u32, u32, u32, u32>
                                      : elementwise<Funnel<true, false>, u32, u32, u32, u32>)
                              : (wrap ? elementwise<Funnel<false, true>, u32, u32, u32, u32>
                                      : elementwise<Funnel<false, false>, u32, u32, u32, u32>);
  decoder.emit(run, {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type),
                     decoder.source(3, Type::kU32)});
}

struct Extract {
  template <typename T>
  static T of(T a, std::uint32_t position, std::uint32_t length) {
    using U = std::make_unsigned_t<T>;
    constexpr std::uint32_t kTop = 8 * sizeof(T) - 1;
    position &= 255U;
    length &= 255U;
    if (length == 0) return 0;
    const auto bits = static_cast<U>(a);
    const std::uint32_t last = position + length - 1 < kTop ? position + length - 1 : kTop;
    const bool sign = std::is_signed_v<T> && ((bits >> last) & 1U) != 0;
    U field = position > kTop ? U{0} : static_cast<U>(bits >> position);
    const std::uint32_t kept = position > kTop ? 0 : last - position + 1;
    if (kept > kTop) return static_cast<T>(field);
    const U mask = static_cast<U>((U{1} << kept) - 1);
    return static_cast<T>(sign ? field | static_cast<U>(~mask) : field & mask);
  }
};
void bfe(Decoder& decoder) {
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) >= 4) {
      decoder.emit(elementwise<Extract, T, T, std::uint32_t, std::uint32_t>,
                   {decoder.destination(0, type), decoder.source(1, type),
                    decoder.source(2, Type::kU32), decoder.source(3, Type::kU32)});
    } else {
      decoder.fail("expected 32 or 64 bits");
    }
  });
}

struct Insert {
  template <typename T>
  static T of(T field, T into, std::uint32_t position, std::uint32_t length) {
    constexpr std::uint32_t kBits = 8 * sizeof(T);
    position &= 255U;
    length &= 255U;
    if (position >= kBits || length == 0) return into;
    T mask = length >= kBits ? ~T{0} : static_cast<T>((T{1} << length) - 1);
    mask = static_cast<T>(mask << position);
    return (into & ~mask) | (static_cast<T>(field << position) & mask);
  }
};
void bfi(Decoder& decoder) {
  Type type = decoder.take_type();
  std::uint32_t to = decoder.destination(0, type), a = decoder.source(1, type),
                b = decoder.source(2, type), position = decoder.source(3, Type::kU32),
                length = decoder.source(4, Type::kU32);
  decoder.emit(size_of(type) == 4 ? elementwise<Insert, std::uint32_t, std::uint32_t, std::uint32_t,
                                                std::uint32_t, std::uint32_t>
                                  : elementwise<Insert, std::uint64_t, std::uint64_t, std::uint64_t,
                                                std::uint32_t, std::uint32_t>,
               {to, a, b, position, length});
}

struct FindTop {  // of what differs from the sign; all ones where nothing does
  template <typename T>
  static std::uint32_t of(const Instruction& instruction, T a) {
    using U = std::make_unsigned_t<T>;
    constexpr auto kTop = static_cast<int>(8 * sizeof(T)) - 1;
    U bits = static_cast<U>(std::is_signed_v<T> && a < T{0} ? ~a : a);
    if (bits == 0) return ~0U;
    int top = kTop - std::countl_zero(bits);
    return static_cast<std::uint32_t>(instruction.option != 0 ? kTop - top : top);
  }
};
void bfind(Decoder& decoder) {
  bool amount = decoder.take("shiftamt");
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    std::uint32_t to = decoder.destination(0, Type::kU32), from = decoder.source(1, type);
    decoder.emit(elementwise_with<FindTop, std::uint32_t, T>, {to, from}).option = amount ? 1 : 0;
  });
}

struct Reverse {
  template <typename T>
  static T of(T a) {
    T result = 0;
    for (std::size_t i = 0; i < 8 * sizeof(T); ++i) {
      result = static_cast<T>(result << 1) | ((a >> i) & 1U);
    }
    return result;
  }
};
struct CountLeadingZeros {
  template <typename T>
  static std::uint32_t of(T a) {
    return static_cast<std::uint32_t>(std::countl_zero(a));
  }
};
struct CountOnes {
  template <typename T>
  static std::uint32_t of(T a) {
    return static_cast<std::uint32_t>(std::popcount(a));
  }
};
void brev(Decoder& decoder) {
  Type type = decoder.take_type();
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Reverse, T, T>,
                 {decoder.destination(0, type), decoder.source(1, type)});
  });
}
template <typename Operation>
void count(Decoder& decoder) {
  Type type = decoder.take_type();
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Operation, std::uint32_t, T>,
                 {decoder.destination(0, Type::kU32), decoder.source(1, type)});
  });
}

// Bytes of b:a, chosen by fours of bits, or by one of six patterns.
enum class Permute : std::uint8_t {
  kAny,
  kForward4,
  kBackward4,
  kReplicate8,
  kEdgeLeft,
  kEdgeRight,
  kReplicate16
};
template <Permute kMode>
struct PermuteBytes {
  static std::uint32_t of(std::uint32_t a, std::uint32_t b, std::uint32_t control) {
    const std::uint64_t all = std::uint64_t{b} << 32 | a;
    const std::uint32_t start = control & 3U;
    std::uint32_t result = 0;
    for (std::uint32_t i = 0; i < 4; ++i) {
      std::uint32_t choice = chosen(i, start, control);
      auto byte = static_cast<std::uint32_t>(all >> (8 * (choice & 7U))) & 255U;
      if ((choice & 8U) != 0) byte = (byte & 128U) != 0 ? 255U : 0U;
      result |= byte << (8 * i);
    }
    return result;
  }
  static std::uint32_t chosen(std::uint32_t i, std::uint32_t start, std::uint32_t control) {
    switch (kMode) {
      case Permute::kAny: return (control >> (4 * i)) & 15U;
      case Permute::kForward4: return start + i;
      case Permute::kBackward4: return (start - i) & 7U;
      case Permute::kReplicate8: return start;
      case Permute::kEdgeLeft: return i > start ? i : start;
      case Permute::kEdgeRight: return i < start ? i : start;
      case Permute::kReplicate16: return 2 * (start & 1U) + (i & 1U);
    }
    return 0;
  }
};
void prmt(Decoder& decoder) {
  using u32 = std::uint32_t;
  static constexpr Instruction::Run kRuns[] = {
      elementwise<PermuteBytes<Permute::kForward4>, u32, u32, u32, u32>,
      elementwise<PermuteBytes<Permute::kBackward4>, u32, u32, u32, u32>,
      elementwise<PermuteBytes<Permute::kReplicate8>, u32, u32, u32, u32>,
      elementwise<PermuteBytes<Permute::kEdgeLeft>, u32, u32, u32, u32>,
      elementwise<PermuteBytes<Permute::kEdgeRight>, u32, u32, u32, u32>,
      elementwise<PermuteBytes<Permute::kReplicate16>, u32, u32, u32, u32>,
      elementwise<PermuteBytes<Permute::kAny>, u32, u32, u32, u32>};
  Type type = decoder.take_type();
  std::size_t mode = decoder.take_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}, 6);
  decoder.emit(kRuns[mode], {decoder.destination(0, type), decoder.source(1, type),
                             decoder.source(2, type), decoder.source(3, Type::kU32)});
}

// Products of small integers in a word, added up. Options: 1, a has signs; 2, b has; 4, the upper
// half of b (dp2a).
template <bool kFour>
struct Dot {
  static std::uint32_t of(const Instruction& instruction, std::uint32_t a, std::uint32_t b,
                          std::uint32_t c) {
    auto part = [](std::uint32_t word, std::uint32_t shift, std::uint32_t bits, bool sign) {
      std::uint32_t value = (word >> shift) & ((1U << bits) - 1);
      std::uint32_t top = 1U << (bits - 1);
      return sign ? (value ^ top) - top : value;
    };
    const bool a_sign = (instruction.option & 1U) != 0, b_sign = (instruction.option & 2U) != 0;
    if ((instruction.option & 4U) != 0) b >>= 16;
    std::uint32_t sum = c;
    for (std::uint32_t i = 0; i < (kFour ? 4U : 2U); ++i) {
      sum += part(a, (kFour ? 8 : 16) * i, kFour ? 8 : 16, a_sign) * part(b, 8 * i, 8, b_sign);
    }
    return sum;
  }
};
template <bool kFour>
void dot(Decoder& decoder) {
  using u32 = std::uint32_t;
  u32 option = !kFour && decoder.take_one({"lo", "hi"}, 0) == 1 ? 4U : 0U;
  Type a = decoder.take_type(), b = decoder.take_type();
  option |= (is_signed(a) ? 1U : 0U) | (is_signed(b) ? 2U : 0U);
  u32 to = decoder.destination(0, Type::kB32), x = decoder.source(1, Type::kB32),
      y = decoder.source(2, Type::kB32), z = decoder.source(3, Type::kB32);
  decoder.emit(elementwise_with<Dot<kFour>, u32, u32, u32, u32>, {to, x, y, z}).option = option;
}

constexpr Opcode kOpcodes[] = {
    {"and", logic<And>, ".{pred, b16-b64}"},
    {"or", logic<Or>, ".{pred, b16-b64}"},
    {"xor", logic<Xor>, ".{pred, b16-b64}"},
    {"not", logic_not, ".{pred, b16-b64}"},
    {"cnot", logic_cnot, ".{b16-b64}"},
    {"lop3", lop3, ".b32"},
    {"shl", shl, ".{b16-b64}"},
    {"shr", shr, ".{b16-b64, u16-u64, s16-s64}"},
    {"shf", shf, ".{l, r}.{clamp, wrap}.b32"},
    {"bfe", bfe, ".{u32, u64, s32, s64}"},
    {"bfi", bfi, ".{b32, b64}"},
    {"bfind", bfind, "{.shiftamt}.{u32, u64, s32, s64}"},
    {"brev", brev, ".{b32, b64}"},
    {"clz", count<CountLeadingZeros>, ".{b32, b64}"},
    {"popc", count<CountOnes>, ".{b32, b64}"},
    {"prmt", prmt, ".b32{.f4e, .b4e, .rc8, .ecl, .ecr, .rc16}"},
    {"dp4a", dot<true>, ".{u32, s32}.{u32, s32}"},
    {"dp2a", dot<false>, ".{lo, hi}.{u32, s32}.{u32, s32}"},
};

}  // namespace

std::span<const Opcode> bit_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
