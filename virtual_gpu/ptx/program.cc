// SPDX-License-Identifier: Apache-2.0
// An entry and all that it calls become a program. See program.h.
#include "program.h"

#include <algorithm>

namespace vgpu::ptx {

void ProgramBuilder::build(const FunctionText& entry) {
  program_.entry = code_of(entry);
  while (!waiting_.empty()) {
    auto [text, code] = waiting_.back();
    waiting_.pop_back();
    Builder(*this, *text, *code).build();
    if (!indirect_ || !program_.by_address.empty()) continue;
    // A call through a register may reach any function of the module.
    for (const auto& each : module_.text().functions) {
      program_.by_address.push_back(each->has_body && !each->is_entry ? code_of(*each) : nullptr);
    }
  }
  lay_out_shared();
}

const Code* ProgramBuilder::code_of(const FunctionText& function) {
  auto [found, is_new] = codes_.try_emplace(&function, nullptr);
  if (is_new) {
    program_.codes.push_back(std::make_unique<Code>());
    found->second = program_.codes.back().get();
    waiting_.emplace_back(&function, program_.codes.back().get());
  }
  return found->second;
}

std::uint64_t ProgramBuilder::shared_index(const Variable& variable,
                                           const std::string& unique_name) {
  auto [found, is_new] = shared_.try_emplace(unique_name, program_.shared.size());
  if (is_new) {
    bool dynamic = variable.bytes() == 0 && variable.is_array;
    program_.shared.push_back({variable.name, variable.bytes(), variable.aligned(), dynamic});
  }
  return found->second;
}

// Static variables in the order of their first use, dynamic ones behind them, all at one place.
void ProgramBuilder::lay_out_shared() {
  std::uint64_t at = 0;
  auto align = [&at](std::uint64_t alignment) {
    at = (at + alignment - 1) / alignment * alignment;
  };
  for (SharedVariable& each : program_.shared) {
    if (each.dynamic) continue;
    align(each.alignment);
    each.offset = at;
    at += each.bytes;
  }
  program_.static_shared = at;
  for (const SharedVariable& each : program_.shared) {
    if (each.dynamic) align(std::max<std::uint32_t>(each.alignment, 16));
  }
  program_.dynamic_offset = at;
  for (SharedVariable& each : program_.shared) {
    if (each.dynamic) each.offset = at;
  }
}

}  // namespace vgpu::ptx
