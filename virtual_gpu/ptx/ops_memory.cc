// SPDX-License-Identifier: Apache-2.0
// ld, st, prefetches, fences and asynchronous copies, which are done at once.
#include <atomic>

#include "elementwise.h"

namespace vgpu::ptx {
namespace {

std::uint64_t address_of(Warp& warp, const Instruction& instruction, std::uint32_t lane) {
  auto offset = static_cast<std::uint64_t>(instruction.immediate);
  const std::uint32_t row = instruction.row[0];
  if (row == kNone) return offset;
  if (instruction.row[1] != kNone) {  // the base has 32 bits
    return (warp.row<const std::uint32_t>(row)[lane] + offset) & 0xFFFFFFFFU;
  }
  return warp.row<const std::uint64_t>(row)[lane] + offset;
}

struct Sixteen {
  std::uint64_t low, high;
};

template <typename T>
void load(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const auto space = static_cast<Space>(instruction.option);
  const auto bytes = static_cast<std::uint32_t>(sizeof(T) * instruction.list.size());
  each_lane(lanes, [&](std::uint32_t lane) {
    const std::byte* from =
        warp.resolve(space, address_of(warp, instruction, lane), bytes, lane, instruction);
    for (std::uint32_t row : instruction.list) {
      std::memcpy(warp.row<T>(row) + lane, from, sizeof(T));
      from += sizeof(T);
    }
  });
}

template <typename T>
void store(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const auto space = static_cast<Space>(instruction.option);
  const auto bytes = static_cast<std::uint32_t>(sizeof(T) * instruction.list.size());
  each_lane(lanes, [&](std::uint32_t lane) {
    std::byte* to =
        warp.resolve(space, address_of(warp, instruction, lane), bytes, lane, instruction);
    for (std::uint32_t row : instruction.list) {
      std::memcpy(to, warp.row<const T>(row) + lane, sizeof(T));
      to += sizeof(T);
    }
  });
}

template <template <typename> typename Access>
Instruction::Run access_of(std::uint32_t bytes) {
  switch (bytes) {
    case 1: return Access<std::uint8_t>::run;
    case 2: return Access<std::uint16_t>::run;
    case 4: return Access<std::uint32_t>::run;
    case 8: return Access<std::uint64_t>::run;
    default: return Access<Sixteen>::run;
  }
}
template <typename T>
struct Load {
  static constexpr Instruction::Run run = load<T>;
};
template <typename T>
struct Store {
  static constexpr Instruction::Run run = store<T>;
};

// How memory is ordered and cached changes nothing: accesses are done in their order.
void ignore_hints(Decoder& decoder) {
  decoder.ignore({"weak",
                  "volatile",
                  "relaxed",
                  "acquire",
                  "release",
                  "mmio",
                  "cta",
                  "cluster",
                  "gpu",
                  "sys",
                  "nc",
                  "ca",
                  "cg",
                  "cs",
                  "lu",
                  "cv",
                  "wb",
                  "wt",
                  "unified",
                  "L1::evict_normal",
                  "L1::evict_unchanged",
                  "L1::evict_first",
                  "L1::evict_last",
                  "L1::no_allocate",
                  "L2::cache_hint",
                  "L2::evict_last",
                  "L2::evict_normal",
                  "L2::evict_first",
                  "L2::64B",
                  "L2::128B",
                  "L2::256B"});
}

void put_address(Decoder& decoder, Instruction& instruction, const Address& address) {
  instruction.row[0] = address.row;
  instruction.row[1] = address.narrow ? 0 : kNone;
  instruction.immediate = address.offset;
  instruction.option = static_cast<std::uint32_t>(address.space);
  instruction.cache = decoder.new_cache();
}

// How many values an access has: .v2, .v4, .v8.
std::size_t take_vector(Decoder& decoder) {
  static constexpr std::size_t kSizes[] = {2, 4, 8, 1};
  return kSizes[decoder.take_one({"v2", "v4", "v8"}, 3)];
}

void ld(Decoder& decoder) {
  decoder.expect_operands(2, 4);
  ignore_hints(decoder);
  Space space = decoder.take_space();
  std::size_t values = take_vector(decoder);
  Type type = decoder.take_type();
  Address address = decoder.address(1, space);
  std::vector<std::uint32_t> rows = decoder.destinations(0, type);
  if (rows.size() != values) decoder.fail("expected " + std::to_string(values) + " registers");
  Instruction& instruction = decoder.emit(access_of<Load>(size_of(type)), {});
  instruction.list = std::move(rows);
  put_address(decoder, instruction, address);
}

void st(Decoder& decoder) {
  decoder.expect_operands(2, 4);
  ignore_hints(decoder);
  Space space = decoder.take_space();
  std::size_t values = take_vector(decoder);
  Type type = decoder.take_type();
  Address address = decoder.address(0, space);
  std::vector<std::uint32_t> rows = decoder.sources(1, type);
  if (rows.size() != values) decoder.fail("expected " + std::to_string(values) + " values");
  Instruction& instruction = decoder.emit(access_of<Store>(size_of(type)), {});
  instruction.list = std::move(rows);
  put_address(decoder, instruction, address);
}

void nothing(Warp&, const Instruction&, Lanes) {}

void prefetch(Decoder& decoder) {
  ignore_hints(decoder);
  decoder.ignore({"L1", "L2", "tensormap"});
  decoder.take_space();
  decoder.emit(nothing, {});
}

void fence_now(Warp&, const Instruction&, Lanes) {
  // For blocks on other threads: what was written before is seen before what is written after.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void fence(Decoder& decoder) {
  decoder.ignore({"cta", "gl", "sys", "gpu", "cluster", "sc", "acq_rel", "acquire", "release",
                  "mbarrier_init", "proxy", "alias", "async", "async::global", "async::shared::cta",
                  "sync_restrict::shared::cta::cluster", "tensormap::generic"});
  decoder.take_space();
  decoder.emit(fence_now, {});
}

// Copies from global to shared memory; what lies beyond the source's size becomes zero.
void copy_async(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const std::uint32_t bytes = instruction.option;
  each_lane(lanes, [&](std::uint32_t lane) {
    auto read = [&](std::size_t slot) -> std::uint64_t {
      std::uint32_t row = instruction.row[slot];
      if (row == kNone) return 0;
      return instruction.list[slot] != 0 ? warp.row<const std::uint32_t>(row)[lane]
                                         : warp.row<const std::uint64_t>(row)[lane];
    };
    std::uint64_t size = instruction.row[2] == kNone ? bytes : read(2);
    if (size > bytes) size = bytes;
    const auto offset = std::int64_t{static_cast<std::int32_t>(instruction.list[3])};
    std::byte* to =
        warp.resolve(Space::kShared, (read(0) + static_cast<std::uint64_t>(offset)) & kWindowMask,
                     bytes, lane, instruction);
    std::memset(to, 0, bytes);
    if (size == 0) return;
    const std::uint64_t source = read(1) + static_cast<std::uint64_t>(instruction.immediate);
    check_alignment(source, bytes, instruction);
    const std::byte* from = warp.resolve(Space::kGeneric, source, 1, lane, instruction);
    warp.resolve(Space::kGeneric, source + size - 1, 1, lane, instruction);  // its end as well
    std::memcpy(to, from, size);
  });
}

void copy_async_of(Decoder& decoder) {
  decoder.expect_operands(3, 5);
  decoder.take_space();
  decoder.take_space();
  auto bytes = static_cast<std::uint32_t>(decoder.number(2));
  if (bytes != 4 && bytes != 8 && bytes != 16) decoder.fail("expected 4, 8 or 16 bytes");
  Address to = decoder.address(0, Space::kShared), from = decoder.address(1, Space::kGlobal);
  std::uint32_t size = decoder.operands() > 3 ? decoder.source(3, Type::kU32) : kNone;
  Instruction& copy = decoder.emit(copy_async, {to.row, from.row, size});
  copy.list = {to.narrow ? 1U : 0U, from.narrow ? 1U : 0U, 1U,
               static_cast<std::uint32_t>(to.offset)};
  copy.immediate = from.offset;
  copy.option = bytes;
  copy.cache = decoder.new_cache();
}

void cp(Decoder& decoder) {
  if (!decoder.take("async")) decoder.fail("only cp.async");
  if (decoder.take("commit_group") || decoder.take("wait_group") || decoder.take("wait_all")) {
    decoder.emit(nothing, {});  // the copies are done
    return;
  }
  ignore_hints(decoder);
  copy_async_of(decoder);
}

constexpr std::string_view kAccessForms =
    "{.weak, .volatile, .relaxed, .acquire, .release}.{global, shared, shared::cluster, local, "
    "const, param}{.v2, .v4, .v8}.{b8-b128, u8-u64, s8-s64, f32, f64}; cache hints";

constexpr Opcode kOpcodes[] = {
    {"ld", ld, kAccessForms},
    {"ldu", ld, kAccessForms},
    {"st", st, kAccessForms},
    {"prefetch", prefetch, ".{global, local}.{L1, L2}"},
    {"prefetchu", prefetch, ".L1"},
    {"membar", fence, ".{cta, gl, sys}"},
    {"fence", fence, ".{sc, acq_rel, acquire, release, proxy}.{cta, cluster, gpu, sys}"},
    {"cp", cp,
     ".async.{ca, cg}.shared.global 4, 8, 16 with a source size; .commit_group, "
     ".wait_group, .wait_all"},
};

}  // namespace

std::span<const Opcode> memory_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
