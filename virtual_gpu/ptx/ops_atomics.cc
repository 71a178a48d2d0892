// SPDX-License-Identifier: Apache-2.0
// atom and red: what other threads can't see half done.
//
// Warps of a block take turns, but blocks run on several host threads, so each is a loop of compare
// and exchange on the host. All are as strong as can be; what the program asks for is less or
// equal.
#include <bit>
#include <cmath>

#include "elementwise.h"
#include "numbers.h"

namespace vgpu::ptx {
namespace {

enum class Kind : std::uint8_t {
  kAnd,
  kOr,
  kXor,
  kExchange,
  kAdd,
  kIncrement,
  kDecrement,
  kMinimum,
  kMaximum
};

template <typename T>
T extreme(Kind kind, T a, T b) {
  return (a < b) == (kind == Kind::kMinimum) ? a : b;
}

// How a row's bits are a number.
template <typename T>
struct Number {  // integers
  using Bits = std::make_unsigned_t<T>;
  static Bits apply(Kind kind, Bits old, Bits value) {
    switch (kind) {
      case Kind::kAnd: return old & value;
      case Kind::kOr: return old | value;
      case Kind::kXor: return old ^ value;
      case Kind::kExchange: return value;
      case Kind::kAdd: return static_cast<Bits>(old + value);
      case Kind::kIncrement: return old >= value ? Bits{0} : static_cast<Bits>(old + 1);
      case Kind::kDecrement: return old == 0 || old > value ? value : static_cast<Bits>(old - 1);
      default: return static_cast<Bits>(extreme(kind, static_cast<T>(old), static_cast<T>(value)));
    }
  }
};
template <typename T>
T plus(T a, T b) {
  return a + b;
}
Half plus(Half a, Half b) { return Half::from(a.get() + b.get()); }
Brain plus(Brain a, Brain b) { return Brain::from(a.get() + b.get()); }
template <typename T>
float as_float(T value) {
  return value.get();
}
template <typename T>
struct FloatNumber {  // f32, f64
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static Bits apply(Kind, Bits old, Bits value) {
    return std::bit_cast<Bits>(plus(std::bit_cast<T>(old), std::bit_cast<T>(value)));
  }
};
template <typename T>
struct HalfNumber {  // f16, bf16
  using Bits = std::uint16_t;
  static Bits apply(Kind kind, Bits old, Bits value) {
    if (kind == Kind::kAdd) return plus(T{old}, T{value}).bits;
    const float a = as_float(T{old}), b = as_float(T{value});
    if (std::isnan(a)) return value;
    if (std::isnan(b)) return old;
    return (a < b) == (kind == Kind::kMinimum) ? old : value;
  }
};
template <typename T>
struct PairNumber {  // f16x2, bf16x2: each half for itself would do; both at once do too
  using Bits = std::uint32_t;
  static Bits apply(Kind kind, Bits old, Bits value) {
    auto half = [&](int shift) {
      return std::uint32_t{HalfNumber<T>::apply(kind, static_cast<std::uint16_t>(old >> shift),
                                                static_cast<std::uint16_t>(value >> shift))};
    };
    return half(0) | half(16) << 16;
  }
};

template <typename Bits>
Bits exchange_if(std::byte* at, Bits expected, Bits desired) {
  auto* word = reinterpret_cast<Bits*>(at);
  __atomic_compare_exchange_n(word, &expected, desired, /*weak=*/false, __ATOMIC_SEQ_CST,
                              __ATOMIC_SEQ_CST);
  return expected;
}

std::uint64_t address_of(Warp& warp, const Instruction& instruction, std::uint32_t lane) {
  const std::uint32_t row = instruction.row[1];
  auto offset = static_cast<std::uint64_t>(instruction.immediate);
  if (row == kNone) return offset;
  if (instruction.row[2] != kNone) {
    return (warp.row<const std::uint32_t>(row)[lane] + offset) & 0xFFFFFFFFU;
  }
  return warp.row<const std::uint64_t>(row)[lane] + offset;
}

// Rows: result, address, whether that is narrow; list: the values, then the results of vectors.
template <typename N, std::size_t kKind>
void atomic(Warp& warp, const Instruction& instruction, Lanes lanes) {
  using Bits = typename N::Bits;
  constexpr auto kWhat = static_cast<Kind>(kKind);
  const auto space = static_cast<Space>(instruction.option);
  const std::size_t values = instruction.list.size() / 2;
  each_lane(lanes, [&](std::uint32_t lane) {
    std::byte* at =
        warp.resolve(space, address_of(warp, instruction, lane),
                     static_cast<std::uint32_t>(sizeof(Bits) * values), lane, instruction);
    for (std::size_t i = 0; i < values; ++i, at += sizeof(Bits)) {
      const Bits value = warp.row<const Bits>(instruction.list[i])[lane];
      Bits old = __atomic_load_n(reinterpret_cast<Bits*>(at), __ATOMIC_SEQ_CST);
      for (;;) {
        Bits found = exchange_if(at, old, N::apply(kWhat, old, value));
        if (found == old) break;
        old = found;
      }
      warp.row<Bits>(instruction.list[values + i])[lane] = old;
    }
  });
}

template <typename Bits>
void compare_and_swap(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const auto space = static_cast<Space>(instruction.option);
  each_lane(lanes, [&](std::uint32_t lane) {
    std::byte* at = warp.resolve(space, address_of(warp, instruction, lane),
                                 static_cast<std::uint32_t>(sizeof(Bits)), lane, instruction);
    const Bits expected = warp.row<const Bits>(instruction.list[0])[lane];
    const Bits desired = warp.row<const Bits>(instruction.list[1])[lane];
    warp.row<Bits>(instruction.row[0])[lane] = exchange_if(at, expected, desired);
  });
}

template <typename N, std::size_t... K>
Instruction::Run pick(std::size_t kind, std::index_sequence<K...>) {
  static constexpr Instruction::Run kRuns[] = {atomic<N, K>...};
  return kRuns[kind];
}

bool is_single_or_double(Type type) { return type == Type::kF32 || type == Type::kF64; }

Instruction::Run run_of(Decoder& decoder, std::size_t kind, Type type) {
  constexpr std::make_index_sequence<9> kKinds{};
  const bool adds = kind == static_cast<std::size_t>(Kind::kAdd);
  const bool extreme = kind >= static_cast<std::size_t>(Kind::kMinimum);
  if (is_float(type) && !adds && (!extreme || is_single_or_double(type))) {
    decoder.fail("not for floats");
  }
  switch (type) {
    case Type::kF32: return pick<FloatNumber<float>>(kind, kKinds);
    case Type::kF64: return pick<FloatNumber<double>>(kind, kKinds);
    case Type::kF16: return pick<HalfNumber<Half>>(kind, kKinds);
    case Type::kBF16: return pick<HalfNumber<Brain>>(kind, kKinds);
    case Type::kF16x2: return pick<PairNumber<Half>>(kind, kKinds);
    case Type::kBF16x2: return pick<PairNumber<Brain>>(kind, kKinds);
    default:
      return with_integer(decoder, type,
                          [&]<typename T>(std::type_identity<T>) -> Instruction::Run {
                            if constexpr (sizeof(T) >= 4) return pick<Number<T>>(kind, kKinds);
                            decoder.fail("expected 32 or 64 bits");
                          });
  }
}

Instruction::Run swap_of(Decoder& decoder, Type type) {
  switch (size_of(type)) {
    case 2: return compare_and_swap<std::uint16_t>;
    case 4: return compare_and_swap<std::uint32_t>;
    case 8: return compare_and_swap<std::uint64_t>;
    default: decoder.fail("expected 16, 32 or 64 bits");
  }
}

void put_address(Decoder& decoder, Instruction& instruction, const Address& address) {
  instruction.row[1] = address.row;
  instruction.row[2] = address.narrow ? 0 : kNone;
  instruction.immediate = address.offset;
  instruction.option = static_cast<std::uint32_t>(address.space);
  instruction.cache = decoder.new_cache();
}

// `first`: where the address stands; 0 for red, which has no result.
void atomic_of(Decoder& decoder, std::size_t first) {
  decoder.ignore({"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys",
                  "noftz", "ftz", "L2::cache_hint", "weak"});
  Space space = decoder.take_space();
  static constexpr std::size_t kSizes[] = {2, 4, 8, 1};
  const std::size_t values = kSizes[decoder.take_one({"v2", "v4", "v8"}, 3)];
  const bool swaps = decoder.take("cas");
  std::size_t kind =
      decoder.take_one({"and", "or", "xor", "exch", "add", "inc", "dec", "min", "max"}, 9);
  if (!swaps && kind == 9) decoder.fail("expected an operation");
  const Type type = decoder.take_type();
  const Address address = decoder.address(first, space);
  if (swaps) {
    std::uint32_t expected = decoder.source(first + 1, type);
    std::uint32_t desired = decoder.source(first + 2, type);
    std::uint32_t to = first == 0 ? decoder.temporary(type) : decoder.destination(0, type);
    Instruction& swap = decoder.emit(swap_of(decoder, type), {to});
    swap.list = {expected, desired};
    return put_address(decoder, swap, address);
  }
  std::vector<std::uint32_t> rows = decoder.sources(first + 1, type), results;
  if (rows.size() != values) decoder.fail("expected " + std::to_string(values) + " values");
  if (first == 0) {
    for (std::size_t i = 0; i < values; ++i) results.push_back(decoder.temporary(type));
  } else {
    results = decoder.destinations(0, type);
  }
  if (results.size() != values) decoder.fail("expected " + std::to_string(values) + " results");
  rows.insert(rows.end(), results.begin(), results.end());
  Instruction& instruction = decoder.emit(run_of(decoder, kind, type), {results[0]});
  instruction.list = std::move(rows);
  put_address(decoder, instruction, address);
}

void atom(Decoder& decoder) { atomic_of(decoder, 1); }
void red(Decoder& decoder) { atomic_of(decoder, 0); }

constexpr std::string_view kForms =
    "{.relaxed, .acquire, .release, .acq_rel}{.cta, .cluster, .gpu, .sys}{.global, .shared}"
    "{.v2, .v4, .v8}.{and, or, xor, exch, add, inc, dec, min, max, cas}.{b32, b64, u32, u64, s32, "
    "s64}; .cas.b16; .add.{f16, bf16, f16x2, bf16x2, f32, f64}; .{min, max}.{f16, bf16, f16x2, "
    "bf16x2}";

constexpr Opcode kOpcodes[] = {{"atom", atom, kForms}, {"red", red, kForms}};

}  // namespace

std::span<const Opcode> atomic_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
