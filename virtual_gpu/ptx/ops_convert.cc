// SPDX-License-Identifier: Apache-2.0
// cvt: between integers, between floats, and from one to the other.
//
// Each conversion reads a lane's value as a 64-bit integer or a double, which hold every value of
// the smaller types, and writes with one rounding.
#include <bit>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "numbers.h"

namespace vgpu::ptx {
namespace {

// instruction.option of a conversion.
enum Option : std::uint32_t {
  kRounding = 7,   // a Rounding
  kFlush = 8,      // .ftz
  kSaturate = 16,  // .sat
  kRelu = 32,
  kFinite = 64,  // .satfinite
};
Rounding rounding_of(const Instruction& instruction) {
  return static_cast<Rounding>(instruction.option & kRounding);
}

// -- Reading floats ---------------------------------------------------------------------------

// What numbers.h has a fast way for: a float's value, to the nearest.
bool is_simple(double value, Rounding rounding, Overflow overflow) {
  return rounding == Rounding::kNearest && overflow == Overflow::kInfinity &&
         static_cast<double>(static_cast<float>(value)) == value;
}

template <Type kType>
struct FloatType;
template <>
struct FloatType<Type::kF16> {
  using Row = Half;
  static double get(Half value) { return value.get(); }
  static Half put(double value, Rounding rounding, Overflow overflow) {
    if (is_simple(value, rounding, overflow)) return Half::from(static_cast<float>(value));
    return {static_cast<std::uint16_t>(pack(value, kHalfFormat, rounding, overflow))};
  }
};
template <>
struct FloatType<Type::kBF16> {
  using Row = Brain;
  static double get(Brain value) { return value.get(); }
  static Brain put(double value, Rounding rounding, Overflow overflow) {
    if (is_simple(value, rounding, overflow)) return Brain::from(static_cast<float>(value));
    return {static_cast<std::uint16_t>(pack(value, kBrainFormat, rounding, overflow))};
  }
};
template <>
struct FloatType<Type::kTF32> {
  using Row = std::uint32_t;
  static double get(std::uint32_t value) { return std::bit_cast<float>(value); }
  static std::uint32_t put(double value, Rounding rounding, Overflow overflow) {
    return pack(value, kTf32Format, rounding, overflow) << 13;
  }
};
template <>
struct FloatType<Type::kF32> {
  using Row = float;
  static double get(float value) { return value; }
  static float put(double value, Rounding rounding, Overflow overflow) {
    if (rounding == Rounding::kNearestAway || overflow == Overflow::kSaturate) {
      return std::bit_cast<float>(pack(value, Format{8, 23, true}, rounding, overflow));
    }
    RoundingScope scope(rounding);
    volatile double exact = value;  // converted now, not by the compiler
    return static_cast<float>(exact);
  }
};
template <>
struct FloatType<Type::kF64> {
  using Row = double;
  static double get(double value) { return value; }
  static double put(double value, Rounding, Overflow) { return value; }
};

double prepared(const Instruction& instruction, double value, bool is_single) {
  if ((instruction.option & kFlush) != 0 && is_single && std::fabs(value) < 0x1p-126) {
    value = std::copysign(0.0, value);
  }
  return value;
}
// .sat and .relu are of results.
double limited(const Instruction& instruction, double value) {
  if ((instruction.option & kSaturate) != 0) {
    return std::isnan(value) || value < 0 ? 0.0 : value > 1 ? 1.0 : value;
  }
  if ((instruction.option & kRelu) != 0 && value < 0) return 0.0;
  return value;
}

template <Type kTo, Type kFrom>
struct FloatToFloat {
  using To = FloatType<kTo>;
  using From = FloatType<kFrom>;
  static typename To::Row of(const Instruction& instruction, typename From::Row from) {
    double value = prepared(instruction, From::get(from), kFrom == Type::kF32);
    value = limited(instruction, value);
    auto overflow = (instruction.option & kFinite) != 0 ? Overflow::kSaturate : Overflow::kInfinity;
    typename To::Row to = To::put(value, rounding_of(instruction), overflow);
    if constexpr (kTo == Type::kF32) return (instruction.option & kFlush) != 0 ? flushed(to) : to;
    return to;
  }
};

// .rni and its like between floats of one type: to an integer's value.
double to_integral(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::kZero: return std::trunc(value);
    case Rounding::kDown: return std::floor(value);
    case Rounding::kUp: return std::ceil(value);
    default: {
      double rounded = std::floor(value);
      double rest = value - rounded;
      if (rest > 0.5 || (rest == 0.5 && std::fmod(rounded, 2) != 0)) rounded += 1;
      return std::copysign(rounded, value);
    }
  }
}
template <Type kType>
struct ToIntegral {
  using F = FloatType<kType>;
  static typename F::Row of(const Instruction& instruction, typename F::Row from) {
    double value = prepared(instruction, F::get(from), kType == Type::kF32);
    if (!std::isnan(value)) value = to_integral(value, rounding_of(instruction));
    return F::put(limited(instruction, value), Rounding::kNearest, Overflow::kInfinity);
  }
};

// Beyond the type's ends: the ends. NaN: 0, but the highest bit alone where one type has 64 bits.
template <typename I, Type kFrom>
struct FloatToInteger {
  static I of(const Instruction& instruction, typename FloatType<kFrom>::Row from) {
    double value = prepared(instruction, FloatType<kFrom>::get(from), kFrom == Type::kF32);
    if (std::isnan(value)) {
      constexpr bool kWide = sizeof(I) == 8 || kFrom == Type::kF64;
      return static_cast<I>(kWide ? std::uint64_t{1} << (8 * sizeof(I) - 1) : 0);
    }
    value = to_integral(value, rounding_of(instruction));
    constexpr I kLow = std::numeric_limits<I>::min(), kHigh = std::numeric_limits<I>::max();
    if (value <= static_cast<double>(kLow)) return kLow;
    if (value >= std::ldexp(1.0, std::numeric_limits<I>::digits)) return kHigh;
    return static_cast<I>(value);
  }
};

template <Type kTo, typename I>
struct IntegerToFloat {
  using To = FloatType<kTo>;
  static typename To::Row of(const Instruction& instruction, I from) {
    const Rounding rounding = rounding_of(instruction);
    if constexpr (sizeof(I) == 8) return from_long(from, rounding, instruction);
    return To::put(limited(instruction, static_cast<double>(from)), rounding, Overflow::kInfinity);
  }
  // 64 bits are more than a double's 53: rounded at once, or, for smaller types, kept odd.
  static typename To::Row from_long(I from, Rounding rounding, const Instruction& instruction) {
    if constexpr (kTo == Type::kF64) {
      RoundingScope scope(rounding);
      volatile I exact = from;
      return limited(instruction, static_cast<double>(exact));
    } else {
      RoundingScope scope(Rounding::kZero);
      volatile I exact = from;
      volatile double cut = static_cast<double>(exact);
      double value = cut;
      if (std::isfinite(value) &&
          std::fabs(value) < std::ldexp(1.0, std::numeric_limits<I>::digits) &&
          static_cast<I>(value) != from) {
        value = std::bit_cast<double>(std::bit_cast<std::uint64_t>(value) | 1U);
      }
      std::fesetround(FE_TONEAREST);
      return To::put(limited(instruction, value), rounding, Overflow::kInfinity);
    }
  }
};

template <typename To, typename From>
struct IntegerToInteger {
  static To of(const Instruction& instruction, From from) {
    if ((instruction.option & kSaturate) == 0) return static_cast<To>(from);
    using W = __int128;
    const W value = from, low = std::numeric_limits<To>::min(),
            high = std::numeric_limits<To>::max();
    return static_cast<To>(value < low ? low : value > high ? high : value);
  }
};

// -- Decoding ---------------------------------------------------------------------------------

bool is_integer(Type type) { return !is_float(type); }

template <typename Body>
auto with_float(Decoder& decoder, Type type, Body&& body) {
  switch (type) {
    case Type::kF16: return body(std::integral_constant<Type, Type::kF16>{});
    case Type::kBF16: return body(std::integral_constant<Type, Type::kBF16>{});
    case Type::kTF32: return body(std::integral_constant<Type, Type::kTF32>{});
    case Type::kF32: return body(std::integral_constant<Type, Type::kF32>{});
    case Type::kF64: return body(std::integral_constant<Type, Type::kF64>{});
    default: decoder.fail("no conversion with ." + std::string(name_of(type)));
  }
}

Instruction::Run run_of(Decoder& decoder, Type to, Type from, bool integral) {
  if (is_integer(to) && is_integer(from)) {
    return with_integer(decoder, to, [&]<typename T>(std::type_identity<T>) {
      return with_integer(decoder, from,
                          [&]<typename F>(std::type_identity<F>) -> Instruction::Run {
                            return elementwise_with<IntegerToInteger<T, F>, T, F>;
                          });
    });
  }
  if (is_integer(to)) {
    return with_integer(decoder, to, [&]<typename T>(std::type_identity<T>) {
      return with_float(
          decoder, from, [&]<Type F>(std::integral_constant<Type, F>) -> Instruction::Run {
            return elementwise_with<FloatToInteger<T, F>, T, typename FloatType<F>::Row>;
          });
    });
  }
  if (is_integer(from)) {
    return with_float(decoder, to, [&]<Type T>(std::integral_constant<Type, T>) {
      return with_integer(
          decoder, from, [&]<typename F>(std::type_identity<F>) -> Instruction::Run {
            return elementwise_with<IntegerToFloat<T, F>, typename FloatType<T>::Row, F>;
          });
    });
  }
  return with_float(decoder, to, [&]<Type T>(std::integral_constant<Type, T>) {
    using Row = typename FloatType<T>::Row;
    if (integral) return Instruction::Run{elementwise_with<ToIntegral<T>, Row, Row>};
    return with_float(
        decoder, from, [&]<Type F>(std::integral_constant<Type, F>) -> Instruction::Run {
          return elementwise_with<FloatToFloat<T, F>, Row, typename FloatType<F>::Row>;
        });
  });
}

std::uint32_t take_options(Decoder& decoder, bool& integral) {
  std::uint32_t options = 0;
  std::size_t of_float = decoder.take_one({"rn", "rz", "rm", "rp", "rna"}, 5);
  std::size_t to_integer = decoder.take_one({"rni", "rzi", "rmi", "rpi"}, 4);
  integral = to_integer < 4;
  if (integral) of_float = to_integer;
  if (of_float < 5) options |= static_cast<std::uint32_t>(of_float);
  if (decoder.take("ftz")) options |= kFlush;
  if (decoder.take("sat")) options |= kSaturate;
  if (decoder.take("relu")) options |= kRelu;
  if (decoder.take("satfinite")) options |= kFinite;
  return options;
}

// Two values into one row: the first operand is the upper.
template <typename T>
struct JoinHalves {
  static std::uint32_t of(T high, T low) { return std::uint32_t{high.bits} << 16 | low.bits; }
};
void to_pair(Decoder& decoder, Type to, std::uint32_t options) {
  Type part = to == Type::kF16x2 ? Type::kF16 : Type::kBF16;
  std::uint32_t rows[2];
  for (std::size_t i = 0; i < 2; ++i) {
    rows[i] = decoder.temporary(part);
    decoder
        .emit(run_of(decoder, part, Type::kF32, false),
              {rows[i], decoder.source(i + 1, Type::kF32)})
        .option = options;
  }
  decoder.emit(elementwise<JoinHalves<Half>, std::uint32_t, Half, Half>,
               {decoder.destination(0, to), rows[0], rows[1]});
}

// Eight-bit floats come and go in pairs.
template <bool kE4M3>
constexpr Format kSmall = kE4M3 ? kE4M3Format : kE5M2Format;
template <bool kE4M3>
std::uint32_t small_of(const Instruction& instruction, double value) {
  if ((instruction.option & kRelu) != 0 && value < 0) value = 0;
  return pack(value, kSmall<kE4M3>, Rounding::kNearest, Overflow::kSaturate);
}
template <bool kE4M3>
struct SmallFromFloats {
  static std::uint16_t of(const Instruction& instruction, float high, float low) {
    return static_cast<std::uint16_t>(small_of<kE4M3>(instruction, high) << 8 |
                                      small_of<kE4M3>(instruction, low));
  }
};
template <bool kE4M3>
struct SmallFromHalves {
  static std::uint16_t of(const Instruction& instruction, std::uint32_t pair) {
    auto half = [](std::uint32_t bits) { return Half{static_cast<std::uint16_t>(bits)}.get(); };
    return SmallFromFloats<kE4M3>::of(instruction, half(pair >> 16), half(pair));
  }
};
template <bool kE4M3>
struct HalvesFromSmall {
  static std::uint32_t of(const Instruction& instruction, std::uint16_t pair) {
    auto half = [&](std::uint32_t bits) {
      double value = unpack(bits & 255U, kSmall<kE4M3>);
      if ((instruction.option & kRelu) != 0 && value < 0) value = 0;
      return std::uint32_t{Half::from(value).bits};
    };
    return half(pair) | half(static_cast<std::uint32_t>(pair) >> 8) << 16;
  }
};
void small_floats(Decoder& decoder, Type to, Type from, std::uint32_t options) {
  using u16 = std::uint16_t;
  using u32 = std::uint32_t;
  if (to == Type::kF16x2) {
    auto run = from == Type::kE4M3x2 ? elementwise_with<HalvesFromSmall<true>, u32, u16>
                                     : elementwise_with<HalvesFromSmall<false>, u32, u16>;
    u32 row = decoder.destination(0, to), pair = decoder.source(1, from);
    decoder.emit(run, {row, pair}).option = options;
    return;
  }
  const bool e4m3 = to == Type::kE4M3x2;
  u32 row = decoder.destination(0, to);
  if (from == Type::kF16x2) {
    auto run = e4m3 ? elementwise_with<SmallFromHalves<true>, u16, u32>
                    : elementwise_with<SmallFromHalves<false>, u16, u32>;
    decoder.emit(run, {row, decoder.source(1, from)}).option = options;
  } else if (from == Type::kF32) {
    auto run = e4m3 ? elementwise_with<SmallFromFloats<true>, u16, float, float>
                    : elementwise_with<SmallFromFloats<false>, u16, float, float>;
    u32 high = decoder.source(1, from), low = decoder.source(2, from);
    decoder.emit(run, {row, high, low}).option = options;
  } else {
    decoder.fail("from .f32 or .f16x2");
  }
}

// cvt.pack.sat.u8.s32.b32 d, a, b, c: c's lower bytes move up, a and b go below.
template <typename T>
struct PackSaturated {
  static std::uint32_t of(std::int32_t a, std::int32_t b, std::uint32_t c) {
    constexpr std::uint32_t kBits = 8 * sizeof(T);
    auto cut = [](std::int32_t value) {
      std::int32_t low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
      value = value < low ? low : value > high ? high : value;
      return static_cast<std::uint32_t>(static_cast<std::make_unsigned_t<T>>(value));
    };
    std::uint32_t above = kBits == 16 ? 0 : c << 16;
    return above | cut(a) << kBits | cut(b);
  }
};
void cvt_pack(Decoder& decoder) {
  using u32 = std::uint32_t;
  decoder.take("sat");
  Type to = decoder.take_type(), from = decoder.take_type();
  bool has_c = decoder.maybe_type().has_value();
  if (from != Type::kS32) decoder.fail("from .s32");
  if (to != Type::kU8 && to != Type::kS8 && to != Type::kU16 && to != Type::kS16) {
    decoder.fail("to .u8, .s8, .u16 or .s16");
  }
  auto run = to == Type::kU8
                 ? elementwise<PackSaturated<std::uint8_t>, u32, std::int32_t, std::int32_t, u32>
             : to == Type::kS8
                 ? elementwise<PackSaturated<std::int8_t>, u32, std::int32_t, std::int32_t, u32>
             : to == Type::kU16
                 ? elementwise<PackSaturated<std::uint16_t>, u32, std::int32_t, std::int32_t, u32>
                 : elementwise<PackSaturated<std::int16_t>, u32, std::int32_t, std::int32_t, u32>;
  decoder.emit(run, {decoder.destination(0, Type::kB32), decoder.source(1, Type::kS32),
                     decoder.source(2, Type::kS32),
                     has_c ? decoder.source(3, Type::kB32) : decoder.constant(4, 0)});
}

void cvt(Decoder& decoder) {
  if (decoder.take("pack")) return cvt_pack(decoder);
  bool integral = false;
  const std::uint32_t options = take_options(decoder, integral);
  const Type to = decoder.take_type(), from = decoder.take_type();
  auto is_small = [](Type type) { return type == Type::kE4M3x2 || type == Type::kE5M2x2; };
  if (is_small(to) || is_small(from)) return small_floats(decoder, to, from, options);
  if (to == Type::kF16x2 || to == Type::kBF16x2) return to_pair(decoder, to, options);
  decoder.expect_operands(2, 2);
  if (integral && is_float(to) && to != from)
    decoder.fail("rounding to integers between two types");
  std::uint32_t row = decoder.destination(0, to), source = decoder.source(1, from);
  decoder.emit(run_of(decoder, to, from, integral), {row, source}).option = options;
}

constexpr Opcode kOpcodes[] = {
    {"cvt", cvt,
     "{.rn, .rz, .rm, .rp, .rna, .rni, .rzi, .rmi, .rpi}{.ftz}{.sat, .satfinite, .relu} between "
     "u8-u64, s8-s64, f16, bf16, tf32, f32, f64; .{f16x2, bf16x2}.f32; .{e4m3x2, e5m2x2}.{f32, "
     "f16x2} and back; .pack.sat.{u8, s8, u16, s16}.s32{.b32}"},
};

}  // namespace

std::span<const Opcode> conversion_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
