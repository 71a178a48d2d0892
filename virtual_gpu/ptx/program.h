// SPDX-License-Identifier: Apache-2.0
// Modules and the programs of their entries, while they are compiled.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "code.h"
#include "decoder.h"
#include "ptx.h"
#include "syntax.h"

namespace vgpu::ptx {

// A module's variables have addresses, its functions numbers.
class ModuleState {
 public:
  ModuleState(std::string_view text, Memory& memory);
  ~ModuleState();
  ModuleState(const ModuleState&) = delete;

  const ModuleText& text() const { return text_; }
  Memory& memory() { return memory_; }
  const FunctionText* find(std::string_view name) const;
  const Global* global(std::string_view name) const;
  const Variable* shared(std::string_view name) const;  // of the module, not of a function
  std::size_t number_of(const FunctionText& function) const;

 private:
  void place(const Variable& variable);
  void initialise(const Variable& variable);
  std::uint64_t value_of(const Operand& operand, const Variable& variable) const;

  ModuleText text_;
  Memory& memory_;
  std::map<std::string, Global, std::less<>> globals_;
  std::map<std::string, const Variable*, std::less<>> shared_;
};

// Compiles an entry and all that it calls.
class ProgramBuilder {
 public:
  ProgramBuilder(ModuleState& module, Program& program) : module_(module), program_(program) {}
  void build(const FunctionText& entry);

  ModuleState& module() { return module_; }
  Program& program() { return program_; }
  const Code* code_of(const FunctionText& function);  // compiled now or later
  std::uint64_t shared_index(const Variable& variable, const std::string& unique_name);
  std::uint32_t new_cache() { return program_.caches++; }
  void calls_by_address() { indirect_ = true; }

 private:
  void lay_out_shared();

  ModuleState& module_;
  Program& program_;
  std::map<const FunctionText*, const Code*> codes_;
  std::vector<std::pair<const FunctionText*, Code*>> waiting_;
  std::map<std::string, std::uint64_t> shared_;
  bool indirect_ = false;
};

}  // namespace vgpu::ptx
