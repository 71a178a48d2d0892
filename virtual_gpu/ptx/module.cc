// SPDX-License-Identifier: Apache-2.0
// Modules: their variables in the driver's memory, and their entries. See ptx.h.
#include <algorithm>
#include <bit>
#include <cstring>

#include "machine.h"
#include "program.h"

namespace vgpu::ptx {

ModuleState::ModuleState(std::string_view text, Memory& memory)
    : text_(parse(text)), memory_(memory) {
  for (const Variable& each : text_.variables) place(each);
  for (const Variable& each : text_.variables) {
    if (!each.initial.empty()) initialise(each);
  }
}

ModuleState::~ModuleState() {
  for (const auto& [name, global] : globals_) memory_.free(global.address);
}

void ModuleState::place(const Variable& variable) {
  if (variable.space == Space::kShared) {
    shared_[variable.name] = &variable;
    return;
  }
  if (globals_.contains(variable.name)) return;
  std::uint64_t bytes = variable.bytes();
  if (variable.is_array && variable.length == 0) {  // as long as its initialiser
    bytes = variable.initial.size() * size_of(variable.type);
  }
  std::uint64_t address = memory_.allocate(std::max<std::uint64_t>(bytes, 1),
                                           std::max<std::uint32_t>(variable.aligned(), 16));
  if (address == 0) {
    throw Error("line " + std::to_string(variable.line) + ": no memory for " + variable.name);
  }
  globals_[variable.name] = {address, bytes};
}

void ModuleState::initialise(const Variable& variable) {
  const Global& global = globals_.find(variable.name)->second;
  std::optional<Range> range = memory_.find(global.address);
  std::uint32_t bytes = size_of(variable.type);
  if (!range || variable.initial.size() * bytes > global.bytes) {
    throw Error("line " + std::to_string(variable.line) + ": too many values for " + variable.name);
  }
  auto* to = reinterpret_cast<std::byte*>(global.address + range->to_host);
  for (const Operand& each : variable.initial) {
    std::uint64_t value = value_of(each, variable);
    std::memcpy(to, &value, std::min<std::uint32_t>(bytes, 8));
    to += bytes;
  }
}

std::uint64_t ModuleState::value_of(const Operand& operand, const Variable& variable) const {
  if (operand.kind == Operand::Kind::kInteger || operand.kind == Operand::Kind::kFloat) {
    bool is_integer = operand.kind == Operand::Kind::kInteger;
    if (is_integer && !is_float(variable.type)) return operand.integer;
    double number = is_integer ? static_cast<double>(static_cast<std::int64_t>(operand.integer))
                               : operand.number;
    if (size_of(variable.type) == 8) return std::bit_cast<std::uint64_t>(number);
    if (size_of(variable.type) == 4) {
      return std::bit_cast<std::uint32_t>(static_cast<float>(number));
    }
    return operand.integer;
  }
  auto offset = static_cast<std::uint64_t>(operand.offset);
  if (const Global* found = global(operand.name)) return found->address + offset;
  if (const FunctionText* found = find(operand.name)) return kFunctionWindow + number_of(*found);
  throw Error("line " + std::to_string(variable.line) + ": no variable " + operand.name);
}

const FunctionText* ModuleState::find(std::string_view name) const {
  auto found = std::find_if(text_.functions.begin(), text_.functions.end(),
                            [&](const auto& each) { return each->name == name; });
  return found == text_.functions.end() ? nullptr : found->get();
}
const Global* ModuleState::global(std::string_view name) const {
  auto found = globals_.find(name);
  return found == globals_.end() ? nullptr : &found->second;
}
const Variable* ModuleState::shared(std::string_view name) const {
  auto found = shared_.find(name);
  return found == shared_.end() ? nullptr : found->second;
}
std::size_t ModuleState::number_of(const FunctionText& function) const {
  auto found = std::find_if(text_.functions.begin(), text_.functions.end(),
                            [&](const auto& each) { return each.get() == &function; });
  return static_cast<std::size_t>(found - text_.functions.begin());
}

namespace {

class Entry final : public Function {
 public:
  Entry(ModuleState& module, const FunctionText& text) : text_(text), memory_(module.memory()) {
    ProgramBuilder(module, program_).build(text);
    std::size_t at = 0;
    for (const Variable& each : text.parameters) {
      at = (at + each.aligned() - 1) / each.aligned() * each.aligned();
      parameters_.push_back({at, each.bytes()});
      at += each.bytes();
    }
    parameter_bytes_ = at;
  }
  const std::string& name() const override { return text_.name; }
  std::span<const Parameter> parameters() const override { return parameters_; }
  std::size_t parameter_bytes() const override { return parameter_bytes_; }
  std::size_t static_shared() const override { return program_.static_shared; }
  std::size_t local_bytes() const override { return program_.entry->local_bytes; }
  std::size_t registers() const override {
    // Rows for every name; a compiler would share them.
    return std::min<std::size_t>(program_.entry->register_bytes / (4 * kLanes), 64);
  }
  std::uint32_t max_threads() const override {
    for (const auto* limit : {text_.required_threads, text_.max_threads}) {
      if (limit[0] != 0) return std::min(limit[0] * limit[1] * limit[2], 1024U);
    }
    return 1024;
  }
  std::optional<Dim> required_cluster() const override {
    const std::uint32_t* cluster = text_.required_cluster;
    if (cluster[0] == 0) return std::nullopt;
    return Dim{cluster[0], cluster[1], cluster[2]};
  }
  Outcome run(const Launch& launch) override {
    if (launch.parameters.size() < parameter_bytes_) {
      return {Result::kLaunchFailed, "kernel '" + name() + "' has parameters of " +
                                         std::to_string(parameter_bytes_) + " bytes, got " +
                                         std::to_string(launch.parameters.size())};
    }
    return run_grid(program_, launch, memory_);
  }

 private:
  const FunctionText& text_;
  Memory& memory_;
  Program program_;
  std::vector<Parameter> parameters_;
  std::size_t parameter_bytes_ = 0;
};

class LoadedModule final : public Module {
 public:
  LoadedModule(std::string_view text, Memory& memory) : state_(text, memory) {}
  Function* function(std::string_view name) override {
    std::scoped_lock lock(mutex_);
    auto found = entries_.find(name);
    if (found == entries_.end()) {
      const FunctionText* text = state_.find(name);
      if (text == nullptr || !text->is_entry || !text->has_body) return nullptr;
      found = entries_.emplace(name, std::make_unique<Entry>(state_, *text)).first;
    }
    return found->second.get();
  }
  std::optional<Global> global(std::string_view name) override {
    const Global* found = state_.global(name);
    return found == nullptr ? std::nullopt : std::optional(*found);
  }
  std::vector<std::string> functions() const override {
    std::vector<std::string> names;
    for (const auto& each : state_.text().functions) {
      if (each->is_entry && each->has_body) names.push_back(each->name);
    }
    return names;
  }

 private:
  ModuleState state_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Entry>, std::less<>> entries_;
};

}  // namespace

std::unique_ptr<Module> load(std::string_view text, Memory& memory) {
  return std::make_unique<LoadedModule>(text, memory);
}

}  // namespace vgpu::ptx
