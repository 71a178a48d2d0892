// SPDX-License-Identifier: Apache-2.0
// Binds a kernel to a call, runs its lanes, and reads the kernels of a library.
#include "kernels/kernel.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

namespace callgate {
namespace {

// The arrays that each kind of parameter takes, by the kind's number.
struct ParameterKind {
  const char* name;
  bool operands = false, results = false, variadic = false;
};

const ParameterKind& kind_of(const callgate_parameter& parameter) {
  static constexpr std::array<ParameterKind, 11> kKinds = {{{"In", true},
                                                            {"Out", false, true},
                                                            {"InOut", true, true},
                                                            {"", true},
                                                            {"Ins", true, false, true},
                                                            {"Outs", false, true, true},
                                                            {"Attr"},
                                                            {"String"},
                                                            {"Numbers"},
                                                            {"Dict"},
                                                            {"Context"}}};
  return kKinds[static_cast<std::size_t>(parameter.kind)];
}

}  // namespace

std::shared_ptr<KernelTurn> turn_of_library(const void* address) {
  struct Turns {
    std::mutex mutex;
    std::map<const void*, std::weak_ptr<KernelTurn>> by_library;
  };
  auto& turns = immortal<Turns>();  // kernels may be created throughout the process's life
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fbase == nullptr) return nullptr;
  std::scoped_lock lock(turns.mutex);
  std::weak_ptr<KernelTurn>& known = turns.by_library[info.dli_fbase];
  std::shared_ptr<KernelTurn> turn = known.lock();
  if (turn == nullptr) known = turn = std::make_shared<KernelTurn>();
  return turn;
}

std::string signature(const KernelInfo& kernel) {
  std::string text;
  for (const callgate_parameter& p : kernel.parameters) {
    if (!text.empty()) text += ',';
    const ParameterKind& kind = kind_of(p);
    std::string dtype(p.dtype == 0 ? "" : name(static_cast<DType>(p.dtype)));
    text += kind.name;
    if (p.kind == CALLGATE_SCALAR)
      text += dtype;
    else if (kind.operands || kind.results)
      text += '<' + dtype + ',' + (p.rank < 0 ? "*" : std::to_string(p.rank)) + '>';
    else if (!dtype.empty())
      text += '<' + dtype + '>';
  }
  return text;
}

std::string parameter_name(const KernelInfo& kernel, std::size_t index) {
  if (index < kernel.parameter_names.size()) return "'" + kernel.parameter_names[index] + "'";
  return std::to_string(index);
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(part.size() + 1, text.size()));
    std::size_t first = part.find_first_not_of(" \t\n");
    if (first == std::string_view::npos) continue;
    parts.emplace_back(part.substr(first, part.find_last_not_of(" \t\n") + 1 - first));
  }
  return parts;
}

std::vector<KernelInfo> exported_kernels(const std::string& library,
                                         const callgate_kernel* (*table)()) {
  std::vector<KernelInfo> kernels;
  for (const callgate_kernel* kernel = table(); kernel != nullptr; kernel = kernel->next) {
    // The version comes first, because the rest of the struct may differ.
    if (kernel->abi != CALLGATE_ABI)
      throw Error("library '" + library + "'",
                  "kernels of binary interface " + std::to_string(CALLGATE_ABI) +
                      " (CALLGATE_ABI in callgate/kernel.h)",
                  std::to_string(kernel->abi) + "; build it again with this version's header");
    KernelInfo info;
    info.function = kernel->function;
    info.parameters.assign(kernel->parameters, kernel->parameters + kernel->parameter_count);
    std::vector<std::string>& names = info.parameter_names = split(kernel->names);
    info.name = names.front();
    names.erase(names.begin());
    if (!names.empty() && names.size() != info.parameters.size())
      throw Error("library '" + library + "', CALLGATE_KERNEL(" + kernel->names + ")",
                  "a name for each of the " + std::to_string(info.parameters.size()) +
                      " parameters, or none",
                  std::to_string(names.size()));
    kernels.push_back(std::move(info));
  }
  std::ranges::reverse(kernels);
  return kernels;
}

KernelCallee::KernelCallee(KernelInfo info, Describe describe, std::shared_ptr<void> keep)
    : KernelCalleeBase(std::move(describe)), info_(std::move(info)), keep_(std::move(keep)) {
  if (info_.turn == nullptr) info_.turn = std::make_shared<KernelTurn>();
}

KernelSite::KernelSite(std::shared_ptr<KernelCallee> callee, KernelSpec spec)
    : callee_(std::move(callee)),
      info_(callee_->info()),
      site_(std::move(spec.site)),
      lanes_(std::move(spec.lanes)),
      attributes_(std::move(spec.attributes)) {
  const std::string where = "kernel '" + info_.name + "'";
  if (std::string have = signature(info_); !spec.signature.empty() && spec.signature != have)
    throw Error(where + ", called by a program that was compiled before",
                "the parameters (" + spec.signature + ")", "(" + have + ")");
  auto group = spec.groups.begin();
  for (std::size_t i = 0; i < info_.parameters.size(); ++i) {
    const callgate_parameter& parameter = info_.parameters[i];
    const ParameterKind& kind = kind_of(parameter);
    const std::string label = parameter_name(info_, i);
    std::int32_t start = 0, count = 1;
    if (kind.variadic) {
      const std::int64_t given = group != spec.groups.end() ? *group++ : -1;
      if (given < 0 || !std::in_range<std::int32_t>(given))
        throw Error(std::string(where).append(", parameter ").append(label), "its number of arrays",
                    std::to_string(given));
      count = static_cast<std::int32_t>(given);
    }
    auto take = [&](std::vector<std::string>& labels) {
      start = static_cast<std::int32_t>(labels.size());
      for (std::int32_t k = 0; k < count; ++k) {
        labels.push_back(label);
        if (kind.variadic) labels.back().append("[").append(std::to_string(k)).append("]");
      }
    };
    if (kind.operands) take(labels_.operands);
    if (kind.results) take(labels_.results);
    labels_.updated.resize(labels_.results.size(), parameter.kind == CALLGATE_INOUT);
    if (parameter.kind >= CALLGATE_ATTR_NUMBER && parameter.kind <= CALLGATE_ATTR_DICTIONARY) {
      start = static_cast<std::int32_t>(ordered_.size());
      ordered_.push_back(attribute_of(i));
    }
    starts_.push_back(start);
    counts_.push_back(count);
  }
  bound_.attributes = ordered_.data();
  bound_.starts = starts_.data();
  bound_.counts = counts_.data();
  bound_.user_data = info_.user_data;
}

const callgate_attribute& KernelSite::attribute_of(std::size_t index) const {
  const callgate_parameter& parameter = info_.parameters[index];
  const callgate_attribute* value = attributes_.find(
      index < info_.parameter_names.size() ? info_.parameter_names[index] : std::to_string(index));
  if (value != nullptr && value->kind == parameter.kind - CALLGATE_ATTR_NUMBER &&
      (parameter.dtype == 0 || value->dtype == parameter.dtype))
    return *value;
  throw Error("kernel '" + info_.name + "', parameter " + parameter_name(info_, index),
              std::string("an attribute for ") + kind_of(parameter).name,
              value == nullptr ? "none" : "one of another type");
}

void KernelSite::run_reported(const Call& call, Executor* executor,
                              std::chrono::nanoseconds delay) {
  auto has_turn = std::make_shared<std::atomic<bool>>(info_.thread_safe);
  StallWatch watch(delay, callee_, [text = to_string(call.operands), has_turn] {
    if (has_turn->load(std::memory_order_relaxed)) return text;  // a late value is fine here
    return text +
           ", which waits for another call to end (without thread_safe=True they take turns),";
  });
  KernelTurn::Hold turn;
  if (!info_.thread_safe) turn = info_.turn->take();
  has_turn->store(true, std::memory_order_relaxed);
  run_lanes(call, executor);
}

void KernelSite::run_each_lane(const Call& call, Executor* executor) {
  const LanesOfCall lanes(lanes_, call.operands, call.results);
  std::mutex mutex;  // guards the failure
  std::atomic<bool> stop{false};
  std::int64_t failed_lane = INT64_MAX;
  std::exception_ptr error;  // the failed lane's
  auto body = [&](std::int64_t first, std::int64_t last) {
    std::int64_t lane = first;
    try {
      std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
      for (; lane < last; ++lane) {
        if (stop.load(std::memory_order_relaxed)) return;  // only saves time
        lanes->select_operands(lane, call.operands, operands);
        lanes->select_results(lane, call.results, results);
        run_lane(Call{operands, results, call.context}, executor, {&*lanes, lane});
      }
    } catch (const std::exception&) {
      stop.store(true, std::memory_order_relaxed);
      std::scoped_lock lock(mutex);
      if (lane >= failed_lane) return;
      failed_lane = lane;
      error = std::current_exception();
    }
  };
  parallel_for(info_.thread_safe ? executor : nullptr, 0, lanes->count(), 1, body);
  if (error != nullptr) std::rethrow_exception(error);
}

void KernelSite::run_in_modes(const Call& call, Executor* executor, KernelLane lane) {
  auto recorded = [&](const Call& made, ScratchSource* scratch) {
    if (!kernel_mode(KernelMode::kCrashReport)) return invoke(made, executor, scratch, lane);
    const std::int64_t lanes = lane.of == nullptr ? 1 : lane.of->count();
    KernelRecord record{info_.name.c_str(), site_.c_str(), lanes, labels_, made};
    RunningKernel running(&record);
    invoke(made, executor, scratch, lane);
  };
  if (!kernel_mode(KernelMode::kCheckMemory)) return recorded(call, /*scratch=*/nullptr);
  std::string found = check_memory(labels_, info_.repeatable, call, recorded);
  if (!found.empty()) fail(found, lane);
}

void KernelSite::fail(const std::string& message, KernelLane lane) const {
  const std::string which = lane.of == nullptr ? "" : lane.of->name(lane.number);
  throw Error::verbatim(ErrorCode::kInternal, callee_->describe(message, site_, which));
}

std::unique_ptr<KernelSite> KernelCallee::bind(KernelSpec spec) {
  return std::make_unique<KernelSite>(shared_from_this(), std::move(spec));
}

}  // namespace callgate
