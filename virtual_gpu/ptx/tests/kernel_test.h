// SPDX-License-Identifier: Apache-2.0
// Kernels in tests: memory that the host can look into, and one instruction in many threads.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ptx/ptx.h"

namespace vgpu::ptx {

// Allocations with nothing before and behind them that a kernel may touch.
class HostMemory final : public Memory {
 public:
  std::optional<Range> find(std::uint64_t address) override {
    std::scoped_lock lock(mutex_);
    auto it = blocks_.upper_bound(address);
    if (it == blocks_.begin()) return std::nullopt;
    --it;
    if (address >= it->first + it->second.size()) return std::nullopt;
    return Range{it->first, it->first + it->second.size(),
                 reinterpret_cast<std::uint64_t>(it->second.data()) - it->first};
  }
  std::uint64_t allocate(std::size_t bytes, std::size_t) override {
    std::scoped_lock lock(mutex_);
    std::uint64_t address = next_;
    next_ += (bytes + 511) / 256 * 256;
    blocks_[address].resize(bytes);
    return address;
  }
  void free(std::uint64_t address) override {
    std::scoped_lock lock(mutex_);
    blocks_.erase(address);
  }
  template <typename T>
  std::uint64_t put(const std::vector<T>& values) {
    std::uint64_t address = allocate(values.size() * sizeof(T), 256);
    std::memcpy(blocks_[address].data(), values.data(), values.size() * sizeof(T));
    return address;
  }
  template <typename T>
  std::vector<T> get(std::uint64_t address) {
    const auto& block = blocks_.at(address);
    std::vector<T> values(block.size() / sizeof(T));
    std::memcpy(values.data(), block.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::vector<std::byte>> blocks_;
  std::uint64_t next_ = 0x10000;
};

// The head that every text has.
inline std::string module_text(std::string_view body) {
  return ".version 8.0\n.target sm_80\n.address_size 64\n" + std::string(body);
}

// Says that the running test has had these instructions run. See coverage.cc.
void note(const std::string& text);

// Runs the module's entry `kernel`, whose parameters are all of 64 bits.
inline Outcome run_kernel(HostMemory& memory, const std::string& text,
                          const std::vector<std::uint64_t>& parameters, Dim block = {32, 1, 1},
                          Dim grid = {1, 1, 1}, std::uint32_t shared = 0, Dim cluster = {1, 1, 1},
                          bool cooperative = false) {
  auto module = load(module_text(text), memory);
  Function* function = module->function("kernel");
  if (function == nullptr) throw Error("no entry 'kernel'");
  note(module_text(text));
  return function->run(
      {grid, block, cluster, shared, cooperative, std::as_bytes(std::span(parameters))});
}

// Runs `body` once for each element: %in0, %in1, ... hold the inputs' elements and %out becomes the
// result's. All are registers of untyped bits; %p0 to %p9 are predicates, %r0 to %r9 have 32 bits,
// %h0 to %h9 16 and %l0 to %l9 64. Inputs and results of 8 bits are in registers of 16. Warps are
// always full: the last elements run several times.
template <typename Out, typename... In>
std::vector<Out> each_thread(std::string_view body, const std::vector<In>&... in) {
  HostMemory memory;
  const std::size_t count = std::get<0>(std::tie(in...)).size();
  const std::size_t padded = (count + 31) / 32 * 32;
  auto bits = [](std::size_t bytes) { return std::to_string(8 * bytes); };
  auto bits_of_register = [&](std::size_t bytes) { return bits(bytes == 1 ? 2 : bytes); };
  std::string parameters_text = ".param .u64 out", loads, registers;
  std::vector<std::uint64_t> parameters{memory.allocate(padded * sizeof(Out), 256)};
  std::size_t number = 0;
  auto input = [&]<typename T>(std::vector<T> values) {
    values.resize(padded, values.back());
    const std::string index = std::to_string(number++);
    parameters_text += ", .param .u64 p" + index;
    registers += ".reg .b" + bits_of_register(sizeof(T)) + " %in" + index + ";\n";
    loads += "ld.param.u64 %address, [p" + index + "];\nmad.wide.u32 %address, %i, " +
             std::to_string(sizeof(T)) + ", %address;\nld.global.b" + bits(sizeof(T)) + " %in" +
             index + ", [%address];\n";
    parameters.push_back(memory.put(values));
  };
  (input(in), ...);
  const std::string text =
      ".visible .entry kernel(" + parameters_text +
      ") {\n.reg .pred %p<10>;\n.reg .b64 %address, %l<10>;\n.reg .b32 %i, %c, %r<10>;\n"
      ".reg .b16 %h<10>;\n" +
      registers + ".reg .b" + bits_of_register(sizeof(Out)) +
      " %out;\nmov.u32 %i, %ctaid.x;\nmov.u32 %c, %tid.x;\nmad.lo.u32 %i, %i, 32, %c;\n" + loads +
      std::string(body) + "\nld.param.u64 %address, [out];\nmad.wide.u32 %address, %i, " +
      std::to_string(sizeof(Out)) + ", %address;\nst.global.b" + bits(sizeof(Out)) +
      " [%address], %out;\nret;\n}\n";
  Outcome outcome = run_kernel(memory, text, parameters, {32, 1, 1},
                               {static_cast<std::uint32_t>(padded / 32), 1, 1});
  if (outcome.result != Result::kSuccess) throw Error(outcome.message);
  std::vector<Out> result = memory.get<Out>(parameters[0]);
  result.resize(count);
  return result;
}

// All pairs of the values: {first of each pair}, {second of each}.
template <typename T>
std::array<std::vector<T>, 2> pairs_of(const std::vector<T>& values) {
  std::array<std::vector<T>, 2> pairs;
  for (const T& a : values) {
    for (const T& b : values) {
      pairs[0].push_back(a);
      pairs[1].push_back(b);
    }
  }
  return pairs;
}

// Where integers overflow and change their signs.
template <typename T>
std::vector<T> edges() {
  using L = std::numeric_limits<T>;
  return {T{0},
          T{1},
          T{2},
          T{3},
          T{7},
          static_cast<T>(-1),
          static_cast<T>(-2),
          static_cast<T>(-7),
          L::max(),
          L::min(),
          static_cast<T>(L::max() / 3),
          static_cast<T>(L::min() + 1),
          static_cast<T>(0x5A5A5A5A5A5A5A5AULL)};
}
template <typename T>
std::string name_of_type() {
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(8 * sizeof(T));
}

// %t is the thread's number in the block; %g in the grid; %out its place in the first parameter.
inline std::string kernel(const std::string& body, const std::string& declarations = "") {
  return ".visible .entry kernel(.param .u64 p0, .param .u64 p1) {\n" + declarations +
         ".reg .pred %p<10>; .reg .b32 %r<20>, %t, %g, %b; .reg .b64 %l<20>, %out, %in;\n"
         "mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mov.u32 %g, %ntid.x;\n"
         "mad.lo.u32 %g, %b, %g, %t;\n"
         "ld.param.u64 %out, [p0]; ld.param.u64 %in, [p1];\n"
         "mad.wide.u32 %out, %g, 4, %out;\n" +
         body + "\nret;\n}\n";
}

struct Ran {
  Outcome outcome;
  std::vector<std::uint32_t> out;
};
inline Ran run(const std::string& text, Dim block = {32, 1, 1}, Dim grid = {1, 1, 1},
               std::uint32_t shared = 0, Dim cluster = {1, 1, 1}, bool cooperative = false,
               const std::vector<std::uint32_t>& in = {0, 0, 0, 0}) {
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<std::uint32_t>(block.count() * grid.count()));
  Outcome outcome =
      run_kernel(memory, text, {out, memory.put(in)}, block, grid, shared, cluster, cooperative);
  return {outcome, memory.get<std::uint32_t>(out)};
}
inline std::vector<std::uint32_t> result(const std::string& text, Dim block = {32, 1, 1},
                                         Dim grid = {1, 1, 1}) {
  Ran ran = run(text, block, grid);
  EXPECT_EQ(ran.outcome.message, "");
  return ran.out;
}

inline void expect_fault(const std::string& text, Result result, const std::string& said,
                         Dim block = {32, 1, 1}) {
  Ran ran = run(text, block);
  EXPECT_EQ(ran.outcome.result, result) << ran.outcome.message;
  EXPECT_NE(ran.outcome.message.find(said), std::string::npos) << ran.outcome.message;
}

}  // namespace vgpu::ptx
