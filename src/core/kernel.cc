// See the header.
#include "core/kernel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/kernel_debug.h"
#include "core/threads.h"

namespace callgate {
namespace {

// What a parameter of a kind takes, by the kind's number.
struct ParameterKind {
  const char* name;
  bool operands = false, results = false, variadic = false;
};
constexpr std::array<ParameterKind, 11> kParameterKinds = {{{"In", true},
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

const ParameterKind& kind_of(const callgate_parameter& parameter) {
  return kParameterKinds[static_cast<std::size_t>(parameter.kind)];
}

// The parts between commas, without the spaces around them; empty ones are left out.
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

}  // namespace

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

std::vector<KernelInfo> exported_kernels(const std::string& library,
                                         const callgate_kernel* (*table)()) {
  std::vector<KernelInfo> kernels;
  for (const callgate_kernel* kernel = table(); kernel != nullptr; kernel = kernel->next) {
    // The version comes first: the rest of the struct may be another one.
    if (kernel->abi != CALLGATE_ABI)
      throw Error("library '" + library + "'",
                  "kernels of binary interface " + std::to_string(CALLGATE_ABI) +
                      " (CALLGATE_ABI in callgate/kernel.h)",
                  std::to_string(kernel->abi) + "; build it again with this version's header");
    KernelInfo info;
    info.function = kernel->function;
    info.parameters.assign(kernel->parameters, kernel->parameters + kernel->parameter_count);
    std::vector<std::string> names = split(kernel->names);
    info.name = names.front();
    names.erase(names.begin());
    if (!names.empty() && names.size() != info.parameters.size())
      throw Error("library '" + library + "', CALLGATE_KERNEL(" + kernel->names + ")",
                  "a name for each of the " + std::to_string(info.parameters.size()) +
                      " parameters, or none",
                  std::to_string(names.size()));
    info.parameter_names = std::move(names);
    kernels.push_back(std::move(info));
  }
  std::ranges::reverse(kernels);
  return kernels;
}

static_assert(sizeof(callgate_array) == sizeof(ArrayView));
static_assert(offsetof(callgate_array, data) == offsetof(ArrayView, data));
static_assert(offsetof(callgate_array, dims) == offsetof(ArrayView, dims));
static_assert(offsetof(callgate_array, rank) == offsetof(ArrayView, rank));
static_assert(offsetof(callgate_array, dtype) == offsetof(ArrayView, dtype));

KernelSite::KernelSite(std::shared_ptr<KernelCallee> callee, KernelSpec spec)
    : callee_(std::move(callee)),
      site_(std::move(spec.site)),
      lanes_(std::move(spec.lanes)),
      attributes_(std::move(spec.attributes)) {
  const KernelInfo& kernel = callee_->info();
  std::string where = "kernel '" + kernel.name + "'";
  if (std::string have = signature(kernel); !spec.signature.empty() && spec.signature != have)
    throw Error(where + ", as a program that was compiled before calls it",
                "the parameters (" + spec.signature + ")", "(" + have + ")");
  auto group = spec.groups.begin();
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i) {
    const callgate_parameter& parameter = kernel.parameters[i];
    const ParameterKind& kind = kind_of(parameter);
    const std::string label = parameter_name(kernel, i);
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
    updated_.resize(labels_.results.size(), parameter.kind == CALLGATE_INOUT ? 1 : 0);
    if (parameter.kind >= CALLGATE_ATTR_NUMBER && parameter.kind <= CALLGATE_ATTR_DICTIONARY) {
      start = static_cast<std::int32_t>(ordered_.size());
      bind_attribute(i);
    }
    starts_.push_back(start);
    counts_.push_back(count);
  }
  bound_.attributes = ordered_.data();
  bound_.starts = starts_.data();
  bound_.counts = counts_.data();
  bound_.user_data = kernel.user_data;
}

void KernelSite::bind_attribute(std::size_t index) {
  const KernelInfo& kernel = callee_->info();
  const callgate_parameter& parameter = kernel.parameters[index];
  const callgate_attribute* value =
      attributes_.find(index < kernel.parameter_names.size() ? kernel.parameter_names[index]
                                                             : std::to_string(index));
  int kind = parameter.kind - CALLGATE_ATTR_NUMBER;
  if (value == nullptr || value->kind != kind ||
      (parameter.dtype != 0 && value->dtype != parameter.dtype)) {
    throw Error("kernel '" + kernel.name + "', parameter " + parameter_name(kernel, index),
                std::string("an attribute for ") + kind_of(parameter).name,
                value == nullptr ? "none" : "one of another type");
  }
  ordered_.push_back(*value);
}

void KernelSite::run(const Call& call, Executor* executor) {
  // A program that was made by hand, or damaged: a kernel would read what is not there.
  if (call.operands.size() != labels_.operands.size() ||
      call.results.size() != labels_.results.size()) [[unlikely]] {
    auto text = [](std::size_t operands, std::size_t results) {
      return std::to_string(operands) + " operands and " + std::to_string(results) + " results";
    };
    fail("expected " + text(labels_.operands.size(), labels_.results.size()) + ", got " +
         text(call.operands.size(), call.results.size()));
  }
  if (std::int64_t delay = kernel_stall_ns.load(std::memory_order_relaxed); delay != 0) [[unlikely]]
    return run_reported(call, executor, std::chrono::nanoseconds(delay));
  if (callee_->info().thread_safe) return run_lanes(call, executor);
  KernelTurn::Hold turn = callee_->info().turn->take();
  run_lanes(call, executor);
}

// Also says of a call that it waits for its turn.
void KernelSite::run_reported(const Call& call, Executor* executor,
                              std::chrono::nanoseconds delay) {
  auto has_turn = std::make_shared<std::atomic<bool>>(callee_->info().thread_safe);
  StallWatch watch(delay, callee_, [text = to_string(call.operands), has_turn] {
    if (has_turn->load(std::memory_order_relaxed)) return text;  // for a reader: late is fine
    return text +
           ", which waits for another call to end (without thread_safe=True they take turns),";
  });
  KernelTurn::Hold turn;
  if (!callee_->info().thread_safe) turn = callee_->info().turn->take();
  has_turn->store(true, std::memory_order_relaxed);
  run_lanes(call, executor);
}

void KernelSite::run_lane(const Call& call, Executor* executor) {
  if (!any_kernel_mode()) [[likely]]
    return invoke(call, executor, /*scratch=*/nullptr);
  auto recorded = [&](const Call& made, ScratchSource* scratch) {
    if (!kernel_mode(KernelMode::kCrashReport)) return invoke(made, executor, scratch);
    KernelRecord record{callee_->name().c_str(), site_.c_str(), lanes_.count(), labels_,
                        made.operands,           made.results};
    RunningKernel running(&record);
    invoke(made, executor, scratch);
  };
  if (!kernel_mode(KernelMode::kCheckMemory)) return recorded(call, /*scratch=*/nullptr);
  std::string found = check_memory({labels_, updated_, callee_->info().repeatable}, call, recorded);
  if (!found.empty()) fail(found);
}

inline void KernelSite::invoke(const Call& call, Executor* executor, ScratchSource* scratch) {
  callgate_call filled = bound_;
  filled.operands = reinterpret_cast<const callgate_array*>(call.operands.data());
  filled.results = reinterpret_cast<const callgate_array*>(call.results.data());
  KernelFrame frame(filled, executor, scratch);
  if (callee_->info().function(&frame) != 0) [[unlikely]]
    fail(frame.message());
}

void KernelSite::fail(const std::string& message) const {
  throw Error::verbatim(ErrorCode::kInternal, callee_->describe(message, site_));
}

void KernelSite::run_lanes(const Call& call, Executor* executor) {
  if (lanes_.empty()) [[likely]]
    return run_lane(call, executor);
  lanes_.check(call.operands, call.results);
  std::mutex mutex;  // guards what failed
  std::atomic<bool> stop{false};
  std::int64_t failed_lane = INT64_MAX;
  std::exception_ptr error;  // the failed lane's
  auto body = [&](std::int64_t first, std::int64_t last) {
    std::int64_t lane = first;
    try {
      std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
      for (; lane < last; ++lane) {
        if (stop.load(std::memory_order_relaxed)) return;  // only saves time
        lanes_.select_operands(lane, call.operands, operands);
        lanes_.select_results(lane, call.results, results);
        run_lane(Call{operands, results, call.context}, executor);
      }
    } catch (const std::exception&) {
      stop.store(true, std::memory_order_relaxed);
      std::scoped_lock lock(mutex);
      if (lane >= failed_lane) return;
      failed_lane = lane;
      error = std::current_exception();
    }
  };
  if (callee_->info().thread_safe)
    parallel_for(executor, 0, lanes_.count(), 1, body);
  else
    body(0, lanes_.count());
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace callgate
