// SPDX-License-Identifier: Apache-2.0
// Arithmetic of integers.
//
// Everything is done in unsigned numbers of 64 or 128 bits, so that overflow wraps as on a device.
#include <limits>

#include "elementwise.h"

namespace vgpu::ptx {
namespace {

using u128 = unsigned __int128;
using s128 = __int128;

template <typename T>
std::uint64_t wide(T value) {
  return static_cast<std::uint64_t>(static_cast<std::make_unsigned_t<T>>(value));
}
template <typename T>
T narrow(std::uint64_t value) {
  return static_cast<T>(static_cast<std::make_unsigned_t<T>>(value));
}
template <typename T>
bool is_negative(T value) {
  return std::is_signed_v<T> && value < T{0};
}

struct Add {
  template <typename T>
  static T of(T a, T b) {
    return narrow<T>(wide(a) + wide(b));
  }
};
struct Subtract {
  template <typename T>
  static T of(T a, T b) {
    return narrow<T>(wide(a) - wide(b));
  }
};
struct AddSaturating {
  static std::int32_t of(std::int32_t a, std::int32_t b) { return clamp(std::int64_t{a} + b); }
  static std::int32_t clamp(std::int64_t value) {
    constexpr std::int64_t kLow = std::numeric_limits<std::int32_t>::min();
    constexpr std::int64_t kHigh = std::numeric_limits<std::int32_t>::max();
    return static_cast<std::int32_t>(value < kLow ? kLow : value > kHigh ? kHigh : value);
  }
};
struct SubtractSaturating {
  static std::int32_t of(std::int32_t a, std::int32_t b) {
    return AddSaturating::clamp(std::int64_t{a} - b);
  }
};
struct Multiply {
  template <typename T>
  static T of(T a, T b) {
    return narrow<T>(wide(a) * wide(b));
  }
};
struct MultiplyHigh {
  template <typename T>
  static T of(T a, T b) {
    if constexpr (sizeof(T) == 8) {
      if constexpr (std::is_signed_v<T>) return static_cast<T>((s128{a} * b) >> 64);
      return static_cast<T>((u128{wide(a)} * wide(b)) >> 64);
    } else {
      return static_cast<T>((std::int64_t{a} * std::int64_t{b}) >> (8 * sizeof(T)));
    }
  }
};
// Without a sign, bits beyond 63 of a product of two u32 are none.
template <>
std::uint32_t MultiplyHigh::of(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>((std::uint64_t{a} * b) >> 32);
}

template <typename T>
using Doubled =
    std::conditional_t<sizeof(T) == 2,
                       std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>,
                       std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;

struct MultiplyWide {
  template <typename T>
  static Doubled<T> of(T a, T b) {
    return static_cast<Doubled<T>>(Doubled<T>{a} * Doubled<T>{b});
  }
};
template <>
std::uint32_t MultiplyWide::of(std::uint16_t a, std::uint16_t b) {
  return std::uint32_t{a} * b;
}
struct MultiplyAdd {
  template <typename T>
  static T of(T a, T b, T c) {
    return narrow<T>(wide(a) * wide(b) + wide(c));
  }
};
struct MultiplyHighAdd {
  template <typename T>
  static T of(T a, T b, T c) {
    return Add::of(MultiplyHigh::of(a, b), c);
  }
};
struct MultiplyHighAddSaturating {
  static std::int32_t of(std::int32_t a, std::int32_t b, std::int32_t c) {
    return AddSaturating::of(MultiplyHigh::of(a, b), c);
  }
};
struct MultiplyWideAdd {
  template <typename T>
  static Doubled<T> of(T a, T b, Doubled<T> c) {
    return Add::of(MultiplyWide::of(a, b), c);
  }
};
// By zero: all ones, as devices give it; nothing defines it.
struct Divide {
  template <typename T>
  static T of(T a, T b) {
    if (b == 0) return narrow<T>(~std::uint64_t{0});
    if (is_negative(b) && wide(b) == wide(narrow<T>(~std::uint64_t{0}))) {
      return narrow<T>(0 - wide(a));
    }
    return static_cast<T>(a / b);
  }
};
struct Remainder {
  template <typename T>
  static T of(T a, T b) {
    if (b == 0) return a;
    if (is_negative(b) && wide(b) == wide(narrow<T>(~std::uint64_t{0}))) return 0;
    return static_cast<T>(a % b);
  }
};
struct Minimum {
  template <typename T>
  static T of(T a, T b) {
    return a < b ? a : b;
  }
};
struct Maximum {
  template <typename T>
  static T of(T a, T b) {
    return a < b ? b : a;
  }
};
// .relu: zero in place of what is below it
template <typename Operation>
struct NotNegative {
  template <typename T>
  static T of(T a, T b) {
    T value = Operation::of(a, b);
    return is_negative(value) ? T{0} : value;
  }
};
struct Negate {
  template <typename T>
  static T of(T a) {
    return narrow<T>(0 - wide(a));
  }
};
struct Absolute {
  template <typename T>
  static T of(T a) {
    return is_negative(a) ? Negate::of(a) : a;
  }
};
struct AbsoluteDifference {
  template <typename T>
  static T of(T a, T b, T c) {
    return Add::of(c, a < b ? Subtract::of(b, a) : Subtract::of(a, b));
  }
};
// The low 24 bits of both; the product's bits 0 to 31, or 16 to 47.
template <typename T, bool kHigh>
struct Multiply24 {
  static T of(T a, T b) {
    auto low = [](T value) { return static_cast<T>(static_cast<T>(wide(value) << 8) >> 8); };
    auto product = static_cast<std::uint64_t>(std::int64_t{low(a)} * std::int64_t{low(b)});
    return narrow<T>(kHigh ? product >> 16 : product);
  }
};
template <typename T, bool kHigh>
struct Multiply24Add {
  static T of(T a, T b, T c) { return Add::of(Multiply24<T, kHigh>::of(a, b), c); }
};

// Both halves of 32 bits for themselves.
template <typename T, typename Operation>
struct Halves {
  static std::uint32_t of(std::uint32_t a, std::uint32_t b) {
    auto half = [](std::uint32_t word, int shift) { return static_cast<T>(word >> shift); };
    auto bits = [](T value) { return std::uint32_t{static_cast<std::uint16_t>(value)}; };
    return bits(Operation::of(half(a, 0), half(b, 0))) |
           bits(Operation::of(half(a, 16), half(b, 16))) << 16;
  }
};

template <typename Operation>
void binary(Decoder& decoder) {
  decoder.expect_operands(3, 3);
  Type type = decoder.take_type();
  if (type == Type::kU16x2 || type == Type::kS16x2) {
    bool has_sign = type == Type::kS16x2;
    decoder.emit(has_sign ? elementwise<Halves<std::int16_t, Operation>, std::uint32_t,
                                        std::uint32_t, std::uint32_t>
                          : elementwise<Halves<std::uint16_t, Operation>, std::uint32_t,
                                        std::uint32_t, std::uint32_t>,
                 {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type)});
    return;
  }
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Operation, T, T, T>,
                 {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type)});
  });
}
template <typename Operation>
void unary(Decoder& decoder) {
  decoder.expect_operands(2, 2);
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Operation, T, T>,
                 {decoder.destination(0, type), decoder.source(1, type)});
  });
}

template <typename Operation, typename T = std::int32_t>
void saturating(Decoder& decoder) {
  if (decoder.take_type() != Type::kS32) decoder.fail(".sat is for .s32");
  decoder.emit(elementwise<Operation, T, T, T>,
               {decoder.destination(0, Type::kS32), decoder.source(1, Type::kS32),
                decoder.source(2, Type::kS32)});
}

void add(Decoder& decoder) {
  decoder.take("sat") ? saturating<AddSaturating>(decoder) : binary<Add>(decoder);
}
void sub(Decoder& decoder) {
  decoder.take("sat") ? saturating<SubtractSaturating>(decoder) : binary<Subtract>(decoder);
}
template <typename Operation>
void extreme(Decoder& decoder) {
  decoder.take("relu") ? binary<NotNegative<Operation>>(decoder) : binary<Operation>(decoder);
}
void absolute(Decoder& decoder) { unary<Absolute>(decoder); }
void neg(Decoder& decoder) { unary<Negate>(decoder); }
void divide(Decoder& decoder) { binary<Divide>(decoder); }

void mul(Decoder& decoder) {
  decoder.expect_operands(3, 3);
  std::size_t part = decoder.take_one({"lo", "hi", "wide"}, 3);
  if (part == 0) return binary<Multiply>(decoder);
  if (part == 1) return binary<MultiplyHigh>(decoder);
  if (part == 3) decoder.fail("expected .lo, .hi or .wide");
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
      decoder.emit(elementwise<MultiplyWide, Doubled<T>, T, T>,
                   {decoder.destination(0, bits_of(2 * sizeof(T))), decoder.source(1, type),
                    decoder.source(2, type)});
    } else {
      decoder.fail(".wide is for 16 and 32 bits");
    }
  });
}

void mad(Decoder& decoder) {
  decoder.expect_operands(4, 4);
  bool saturates = decoder.take("sat");
  std::size_t part = decoder.take_one({"lo", "hi", "wide"}, 3);
  if (part == 3) decoder.fail("expected .lo, .hi or .wide");
  Type type = decoder.take_type();
  if (saturates && (part != 1 || type != Type::kS32)) decoder.fail(".sat is for .hi.s32");
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    Instruction::Run run =
        part == 0 ? elementwise<MultiplyAdd, T, T, T, T> : elementwise<MultiplyHighAdd, T, T, T, T>;
    Type sum = type;
    if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
      if (part == 2) {
        run = elementwise<MultiplyWideAdd, Doubled<T>, T, T, Doubled<T>>;
        sum = bits_of(2 * sizeof(T));
      }
    }
    if constexpr (std::is_same_v<T, std::int32_t>) {
      if (saturates) run = elementwise<MultiplyHighAddSaturating, T, T, T, T>;
    }
    decoder.emit(run, {decoder.destination(0, sum), decoder.source(1, type),
                       decoder.source(2, type), decoder.source(3, sum)});
  });
}

void rem(Decoder& decoder) { binary<Remainder>(decoder); }

void sad(Decoder& decoder) {
  decoder.expect_operands(4, 4);
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<AbsoluteDifference, T, T, T, T>,
                 {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type),
                  decoder.source(3, type)});
  });
}

template <typename T>
Instruction::Run run24(bool high, bool adds) {
  if (adds) {
    return high ? elementwise<Multiply24Add<T, true>, T, T, T, T>
                : elementwise<Multiply24Add<T, false>, T, T, T, T>;
  }
  return high ? elementwise<Multiply24<T, true>, T, T, T>
              : elementwise<Multiply24<T, false>, T, T, T>;
}
void multiply24(Decoder& decoder, bool adds) {
  bool high = decoder.take_one({"lo", "hi"}, 0) == 1;
  Type type = decoder.take_type();
  if (size_of(type) != 4) decoder.fail("expected .u32 or .s32");
  auto run = is_signed(type) ? run24<std::int32_t>(high, adds) : run24<std::uint32_t>(high, adds);
  std::uint32_t to = decoder.destination(0, type), a = decoder.source(1, type),
                b = decoder.source(2, type), c = adds ? decoder.source(3, type) : kNone;
  decoder.emit(run, {to, a, b, c});
}
void mul24(Decoder& decoder) { multiply24(decoder, /*adds=*/false); }
void mad24(Decoder& decoder) { multiply24(decoder, /*adds=*/true); }

constexpr Opcode kOpcodes[] = {
    {"rem", rem, ".{u16-u64, s16-s64}"},
    {"sad", sad, ".{u16-u64, s16-s64}"},
    {"mul24", mul24, ".{lo, hi}.{u32, s32}"},
    {"mad24", mad24, ".{lo, hi}.{u32, s32}"},
    {"add", add, ".{u16-u64, s16-s64, u16x2, s16x2}; .sat.s32", fits_integers},
    {"sub", sub, ".{u16-u64, s16-s64}; .sat.s32", fits_integers},
    {"mul", mul, ".{lo, hi, wide}.{u16-u64, s16-s64}", fits_integers},
    {"mad", mad, ".{lo, hi, wide}.{u16-u64, s16-s64}; .hi.sat.s32", fits_integers},
    {"div", divide, ".{u16-u64, s16-s64}", fits_integers},
    {"min", extreme<Minimum>, "{.relu}.{u16-u64, s16-s64, u16x2, s16x2}", fits_integers},
    {"max", extreme<Maximum>, "{.relu}.{u16-u64, s16-s64, u16x2, s16x2}", fits_integers},
    {"abs", absolute, ".{s16-s64}", fits_integers},
    {"neg", neg, ".{s16-s64}", fits_integers},
};

}  // namespace

std::span<const Opcode> integer_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
