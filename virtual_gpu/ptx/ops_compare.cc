// SPDX-License-Identifier: Apache-2.0
// Comparisons and choices: setp, set, selp, slct, testp, copysign.
#include <bit>
#include <cmath>

#include "elementwise.h"
#include "numbers.h"

namespace vgpu::ptx {
namespace {

// `unordered` comparisons of floats hold where one is NaN.
enum class Compare : std::uint8_t { kEq, kNe, kLt, kLe, kGt, kGe };

template <Compare kCompare, bool kUnordered, typename T>
bool holds(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return kUnordered;
  }
  switch (kCompare) {
    case Compare::kEq: return a == b;
    case Compare::kNe: return a != b;
    case Compare::kLt: return a < b;
    case Compare::kLe: return a <= b;
    case Compare::kGt: return a > b;
    case Compare::kGe: return a >= b;
  }
}

// What comparisons see of the types of rows: floats of 16 bits as 32.
template <typename T>
T value_of(T value, bool /*flush*/) {
  return value;
}
float value_of(float value, bool flush) { return flush ? flushed(value) : value; }
float value_of(Half value, bool /*flush*/) { return value.get(); }
float value_of(Brain value, bool /*flush*/) { return value.get(); }

template <Compare kCompare, bool kUnordered, typename T>
struct Holds {
  static std::uint8_t of(const Instruction& instruction, T a, T b) {
    bool flush = instruction.option != 0;
    return holds<kCompare, kUnordered>(value_of(a, flush), value_of(b, flush)) ? 1 : 0;
  }
};
template <bool kBoth, typename T>
struct Numbers {  // num: neither is NaN; nan: one is
  static std::uint8_t of(const Instruction&, T a, T b) {
    bool nan = std::isnan(value_of(a, false)) || std::isnan(value_of(b, false));
    return nan != kBoth ? 1 : 0;
  }
};

template <typename T>
Instruction::Run comparison(Decoder& decoder, std::string_view name, bool is_float) {
  auto run = []<typename Operation>(std::type_identity<Operation>) -> Instruction::Run {
    return elementwise_with<Operation, std::uint8_t, T, T>;
  };
  using C = Compare;
  if (name == "eq") return run(std::type_identity<Holds<C::kEq, false, T>>{});
  if (name == "ne") return run(std::type_identity<Holds<C::kNe, false, T>>{});
  if (name == "lt" || (!is_float && name == "lo"))
    return run(std::type_identity<Holds<C::kLt, false, T>>{});
  if (name == "le" || (!is_float && name == "ls"))
    return run(std::type_identity<Holds<C::kLe, false, T>>{});
  if (name == "gt" || (!is_float && name == "hi"))
    return run(std::type_identity<Holds<C::kGt, false, T>>{});
  if (name == "ge" || (!is_float && name == "hs"))
    return run(std::type_identity<Holds<C::kGe, false, T>>{});
  if (name == "equ") return run(std::type_identity<Holds<C::kEq, true, T>>{});
  if (name == "neu") return run(std::type_identity<Holds<C::kNe, true, T>>{});
  if (name == "ltu") return run(std::type_identity<Holds<C::kLt, true, T>>{});
  if (name == "leu") return run(std::type_identity<Holds<C::kLe, true, T>>{});
  if (name == "gtu") return run(std::type_identity<Holds<C::kGt, true, T>>{});
  if (name == "geu") return run(std::type_identity<Holds<C::kGe, true, T>>{});
  if constexpr (!std::is_integral_v<T>) {
    if (name == "num") return run(std::type_identity<Numbers<true, T>>{});
    if (name == "nan") return run(std::type_identity<Numbers<false, T>>{});
  }
  decoder.fail("no comparison ." + std::string(name));
}

constexpr std::string_view kComparisons[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",
                                             "lo",  "ls",  "hi",  "hs",  "equ", "neu",
                                             "ltu", "leu", "gtu", "geu", "num", "nan"};

std::string_view take_comparison(Decoder& decoder) {
  for (std::string_view name : kComparisons) {
    if (decoder.take(name)) return name;
  }
  decoder.fail("expected a comparison");
}

Instruction::Run run_of(Decoder& decoder, std::string_view name, Type type) {
  switch (type) {
    case Type::kF32: return comparison<float>(decoder, name, true);
    case Type::kF64: return comparison<double>(decoder, name, true);
    case Type::kF16:
    case Type::kF16x2: return comparison<Half>(decoder, name, true);
    case Type::kBF16:
    case Type::kBF16x2: return comparison<Brain>(decoder, name, true);
    default:
      return with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
        return comparison<T>(decoder, name, false);
      });
  }
}

struct Not {
  static std::uint8_t of(std::uint8_t a) { return a ^ 1U; }
};
template <int kOperator>  // and, or, xor
struct Combine {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(kOperator == 0 ? a & b : kOperator == 1 ? a | b : a ^ b);
  }
};
constexpr Instruction::Run kCombine[] = {
    elementwise<Combine<0>, std::uint8_t, std::uint8_t, std::uint8_t>,
    elementwise<Combine<1>, std::uint8_t, std::uint8_t, std::uint8_t>,
    elementwise<Combine<2>, std::uint8_t, std::uint8_t, std::uint8_t>};

template <typename T, int kShift>
struct HalfOf {
  static T of(std::uint32_t word) { return {static_cast<std::uint16_t>(word >> kShift)}; }
};

struct Comparison {
  std::string_view name;
  std::size_t combine;  // 3: with nothing
  bool flush;
  Type type;
};

// The row of the predicate; `first` is the operand compared first.
std::uint32_t compare(Decoder& decoder, const Comparison& what, std::uint32_t a, std::uint32_t b,
                      std::size_t combined, bool inverted) {
  std::uint32_t found = decoder.temporary(Type::kPred);
  decoder.emit(run_of(decoder, what.name, what.type), {found, a, b}).option = what.flush ? 1 : 0;
  if (inverted) decoder.emit(elementwise<Not, std::uint8_t, std::uint8_t>, {found, found});
  if (what.combine < 3) {
    decoder.emit(kCombine[what.combine], {found, found, decoder.source(combined, Type::kPred)});
  }
  return found;
}

struct CopyPredicate {
  static std::uint8_t of(std::uint8_t a) { return a; }
};
void put_predicate(Decoder& decoder, const Operand& to, std::uint32_t row) {
  decoder.emit(elementwise<CopyPredicate, std::uint8_t, std::uint8_t>,
               {decoder.destination(to, Type::kPred), row});
}

Comparison take_what(Decoder& decoder) {
  Comparison what{};
  what.name = take_comparison(decoder);
  what.combine = decoder.take_one({"and", "or", "xor"}, 3);
  what.flush = decoder.take("ftz");
  what.type = decoder.take_type();
  decoder.expect_operands(what.combine < 3 ? 4 : 3, what.combine < 3 ? 4 : 3);
  return what;
}

// Both halves of a word, one predicate for each.
void setp_pairs(Decoder& decoder, const Comparison& what) {
  const Operand& to = decoder.operand(0);
  if (to.kind != Operand::Kind::kPair) decoder.fail("expected p|q");
  std::uint32_t a = decoder.source(1, Type::kB32), b = decoder.source(2, Type::kB32);
  for (std::size_t half = 0; half < 2; ++half) {
    std::uint32_t x = decoder.temporary(Type::kF16), y = decoder.temporary(Type::kF16);
    auto cut = half == 0 ? elementwise<HalfOf<Half, 0>, Half, std::uint32_t>
                         : elementwise<HalfOf<Half, 16>, Half, std::uint32_t>;
    decoder.emit(cut, {x, a});
    decoder.emit(cut, {y, b});
    put_predicate(decoder, to.parts[half], compare(decoder, what, x, y, 3, false));
  }
}

void setp(Decoder& decoder) {
  Comparison what = take_what(decoder);
  if (what.type == Type::kF16x2 || what.type == Type::kBF16x2) return setp_pairs(decoder, what);
  std::uint32_t a = decoder.source(1, what.type), b = decoder.source(2, what.type);
  const Operand& to = decoder.operand(0);
  if (to.kind != Operand::Kind::kPair && what.combine == 3) {
    std::uint32_t row = decoder.destination(to, Type::kPred);
    decoder.emit(run_of(decoder, what.name, what.type), {row, a, b}).option = what.flush ? 1 : 0;
    return;
  }
  if (to.kind != Operand::Kind::kPair) {
    return put_predicate(decoder, to, compare(decoder, what, a, b, 3, false));
  }
  std::uint32_t first = compare(decoder, what, a, b, 3, false);
  std::uint32_t second = compare(decoder, what, a, b, 3, true);
  put_predicate(decoder, to.parts[0], first);
  put_predicate(decoder, to.parts[1], second);
}

template <typename T, T kTrue>
struct FromPredicate {
  static T of(std::uint8_t predicate) { return predicate != 0 ? kTrue : T{}; }
};

// All ones or 1.0 where it holds.
void set(Decoder& decoder) {
  Comparison what{};
  what.name = take_comparison(decoder);
  what.combine = decoder.take_one({"and", "or", "xor"}, 3);
  what.flush = decoder.take("ftz");
  Type to = decoder.take_type();
  what.type = decoder.take_type();
  if (what.type == Type::kF16x2 || what.type == Type::kBF16x2) decoder.fail("not for pairs");
  std::uint32_t row =
      compare(decoder, what, decoder.source(1, what.type), decoder.source(2, what.type), 3, false);
  Instruction::Run run = nullptr;
  if (to == Type::kF32) {
    run = elementwise<FromPredicate<std::uint32_t, 0x3F800000U>, std::uint32_t, std::uint8_t>;
  } else if (to == Type::kF16) {
    run = elementwise<FromPredicate<std::uint16_t, 0x3C00>, std::uint16_t, std::uint8_t>;
  } else if (to == Type::kBF16) {
    run = elementwise<FromPredicate<std::uint16_t, 0x3F80>, std::uint16_t, std::uint8_t>;
  } else if (to == Type::kU32 || to == Type::kS32) {
    run = elementwise<FromPredicate<std::uint32_t, 0xFFFFFFFFU>, std::uint32_t, std::uint8_t>;
  } else if (to == Type::kU16 || to == Type::kS16) {
    run = elementwise<FromPredicate<std::uint16_t, 0xFFFF>, std::uint16_t, std::uint8_t>;
  } else {
    decoder.fail("not to ." + std::string(name_of(to)));
  }
  decoder.emit(run, {decoder.destination(0, to), row});
}

struct Select {
  template <typename T>
  static T of(T a, T b, std::uint8_t predicate) {
    return predicate != 0 ? a : b;
  }
};
void selp(Decoder& decoder) {
  decoder.expect_operands(4, 4);
  Type type = decoder.take_type();
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Select, T, T, T, std::uint8_t>,
                 {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type),
                  decoder.source(3, Type::kPred)});
  });
}

// The first where the third is not negative.
struct SelectBySign {
  template <typename T>
  static T of(const Instruction&, T a, T b, std::int32_t sign) {
    return sign >= 0 ? a : b;
  }
  template <typename T>
  static T of(const Instruction& instruction, T a, T b, float sign) {
    return value_of(sign, instruction.option != 0) >= 0 ? a : b;
  }
};
void slct(Decoder& decoder) {
  decoder.expect_operands(4, 4);
  const bool flush = decoder.take("ftz");
  Type type = decoder.take_type(), by = decoder.take_type();
  if (by != Type::kS32 && by != Type::kF32) decoder.fail("expected .s32 or .f32 to choose by");
  with_bytes(decoder, size_of(type), [&]<typename T>(std::type_identity<T>) {
    auto run = by == Type::kS32 ? elementwise_with<SelectBySign, T, T, T, std::int32_t>
                                : elementwise_with<SelectBySign, T, T, T, float>;
    decoder
        .emit(run, {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type),
                    decoder.source(3, by)})
        .option = flush ? 1 : 0;
  });
}

template <typename T>
struct Test {
  static std::uint8_t of(const Instruction& instruction, T value) {
    int kind = std::fpclassify(value);
    switch (instruction.option) {
      case 0: return kind != FP_INFINITE && kind != FP_NAN;
      case 1: return kind == FP_INFINITE;
      case 2: return kind != FP_NAN;
      case 3: return kind == FP_NAN;
      case 4: return kind == FP_NORMAL || kind == FP_ZERO;
      default: return kind == FP_SUBNORMAL;
    }
  }
};
void testp(Decoder& decoder) {
  std::size_t what =
      decoder.take_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"}, 6);
  if (what == 6) decoder.fail("expected what to test");
  Type type = decoder.take_type();
  Instruction::Run run = type == Type::kF32 ? elementwise_with<Test<float>, std::uint8_t, float>
                                            : elementwise_with<Test<double>, std::uint8_t, double>;
  std::uint32_t to = decoder.destination(0, Type::kPred), from = decoder.source(1, type);
  decoder.emit(run, {to, from}).option = static_cast<std::uint32_t>(what);
}

// The second with the sign of the first.
struct CopySign {
  template <typename T>
  static T of(T sign, T value) {
    constexpr T kSign = T{1} << (8 * sizeof(T) - 1);
    return (sign & kSign) | (value & ~kSign);
  }
};
void copysign(Decoder& decoder) {
  Type type = decoder.take_type();
  auto run = type == Type::kF32
                 ? elementwise<CopySign, std::uint32_t, std::uint32_t, std::uint32_t>
                 : elementwise<CopySign, std::uint64_t, std::uint64_t, std::uint64_t>;
  decoder.emit(run,
               {decoder.destination(0, type), decoder.source(1, type), decoder.source(2, type)});
}

constexpr std::string_view kComparable =
    ".{eq, ne, lt, le, gt, ge, lo, ls, hi, hs, equ, neu, ltu, leu, gtu, geu, num, nan}{.and, .or, "
    ".xor}{.ftz}.{b16-b64, u16-u64, s16-s64, f16, bf16, f32, f64}, .{f16x2, bf16x2} to p|q; p|q";

constexpr Opcode kOpcodes[] = {
    {"setp", setp, kComparable},
    {"set", set, ".(as setp).{u16, s16, u32, s32, f16, bf16, f32}.(types of setp)"},
    {"selp", selp, ".{b16-b64, u16-u64, s16-s64, f16, bf16, f32, f64}"},
    {"slct", slct, "{.ftz}.{b16-b64, u16-u64, s16-s64, f32, f64}.{s32, f32}"},
    {"testp", testp, ".{finite, infinite, number, notanumber, normal, subnormal}.{f32, f64}"},
    {"copysign", copysign, ".{f32, f64}"},
};

}  // namespace

std::span<const Opcode> comparison_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
