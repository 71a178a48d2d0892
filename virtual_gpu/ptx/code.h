// SPDX-License-Identifier: Apache-2.0
// What a function is compiled to, and what its instructions are called with.
//
// A warp's 32 lanes go through an instruction together. A register is a row of 32 lanes in the
// frame's register file; an instruction holds the offsets of its rows. Constants, special registers
// and addresses of shared variables are rows too, filled before the first instruction, so that an
// instruction has nothing but rows to read.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ptx.h"
#include "types.h"

namespace vgpu::ptx {

inline constexpr std::uint32_t kLanes = 32;
using Lanes = std::uint32_t;  // a bit for each lane
inline constexpr Lanes kAllLanes = ~Lanes{0};
inline constexpr std::uint32_t kNone = ~std::uint32_t{0};

class Warp;
struct Code;
struct CallSite;

struct Instruction {
  using Run = void (*)(Warp& warp, const Instruction& instruction, Lanes lanes);
  Run run = nullptr;
  // Offsets of rows. What each stands for is the instruction's business; destinations come first.
  std::array<std::uint32_t, 6> row{kNone, kNone, kNone, kNone, kNone, kNone};
  std::uint32_t guard = kNone;  // a predicate's row
  bool guard_negated = false;
  bool control = false;  // may change which lanes run, or where
  std::uint32_t option = 0;
  std::uint32_t target = 0;  // of a branch: an instruction
  std::uint32_t cache = 0;   // which entry of the worker's cache of ranges
  std::uint32_t line = 0;
  std::int64_t immediate = 0;
  std::vector<std::uint32_t> list;  // rows of vectors and fragments; targets of brx
  std::shared_ptr<const CallSite> call;
};

struct Constant {
  std::uint32_t row, bytes;
  std::uint64_t low, high;
};

// Rows that depend on the warp, the block or the launch.
enum class SpecialKind : std::uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId,
  kNwarpId,
  kSmId,
  kNsmId,
  kGridId,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kClusterIdX,
  kClusterIdY,
  kClusterIdZ,
  kNclusterIdX,
  kNclusterIdY,
  kNclusterIdZ,
  kClusterCtaIdX,
  kClusterCtaIdY,
  kClusterCtaIdZ,
  kClusterNctaIdX,
  kClusterNctaIdY,
  kClusterNctaIdZ,
  kClusterCtaRank,
  kClusterNctaRank,
  kDynamicSharedSize,
  kTotalSharedSize,
  kAggregateSharedSize,
  kZero,
  kSharedAddress,         // `index`: of a shared variable of the program
  kSharedGenericAddress,  // the same, generic
  kLocalAddress,          // `index`: bytes from the frame's first
  kLocalGenericAddress,
};

struct Special {
  std::uint32_t row, bytes;
  SpecialKind kind;
  std::uint64_t index = 0;
};

// Results and parameters of a call: where they lie in the caller's and the callee's local memory.
struct Passed {
  std::uint32_t caller, callee, bytes;
};
struct CallSite {
  const Code* callee = nullptr;                    // null where a register says which
  std::vector<std::uint32_t> results, parameters;  // the caller's offsets
  std::vector<std::uint32_t> result_bytes, parameter_bytes;
};

struct Code {
  std::string name;
  std::vector<Instruction> instructions;
  std::vector<Constant> constants;
  std::vector<Special> specials;
  std::uint32_t register_bytes = 0;
  std::uint32_t local_bytes = 0;  // of a lane: variables, and `.param` ones
  std::vector<std::uint32_t> result_offsets, parameter_offsets;  // of a .func, in its local bytes
};

struct SharedVariable {
  std::string name;
  std::uint64_t bytes;
  std::uint32_t alignment;
  bool dynamic;  // behind all others, as long as the launch says
  std::uint64_t offset = 0;
};

// An entry and all that it may call.
struct Program {
  const Code* entry = nullptr;
  std::vector<std::unique_ptr<Code>> codes;
  std::vector<SharedVariable> shared;
  std::uint64_t static_shared = 0;      // bytes
  std::uint64_t dynamic_offset = 0;     // where dynamic shared memory begins
  std::uint32_t caches = 0;             // how many entries of the cache of ranges are used
  std::vector<const Code*> by_address;  // functions whose address is taken, by the module's numbers
};

// Generic addresses say by their highest byte which memory they mean; 0 is global.
inline constexpr std::uint32_t kWindowShift = 56;
inline constexpr std::uint64_t kSharedWindow = std::uint64_t{1} << kWindowShift;
inline constexpr std::uint64_t kLocalWindow = std::uint64_t{2} << kWindowShift;
inline constexpr std::uint64_t kParamWindow = std::uint64_t{3} << kWindowShift;
inline constexpr std::uint64_t kFunctionWindow = std::uint64_t{4} << kWindowShift;
inline constexpr std::uint64_t kWindowMask = (std::uint64_t{1} << kWindowShift) - 1;
// The shared memories of a cluster's blocks follow each other at this distance.
inline constexpr std::uint64_t kSharedStride = std::uint64_t{1} << 24;

}  // namespace vgpu::ptx
