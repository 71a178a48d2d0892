// See the header.
#include "core/kernel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "core/error.h"

namespace callgate {
namespace {

constexpr std::array<const char*, 11> kKinds = {
    "In", "Out", "InOut", "", "Ins", "Outs", "Attr", "String", "Numbers", "Dict", "Context"};

bool variadic(const callgate_parameter& parameter) {
  return parameter.kind == CALLGATE_INS || parameter.kind == CALLGATE_OUTS;
}
bool takes_operands(const callgate_parameter& parameter) {
  return parameter.kind == CALLGATE_IN || parameter.kind == CALLGATE_INOUT ||
         parameter.kind == CALLGATE_SCALAR || parameter.kind == CALLGATE_INS;
}
bool takes_results(const callgate_parameter& parameter) {
  return parameter.kind == CALLGATE_OUT || parameter.kind == CALLGATE_INOUT ||
         parameter.kind == CALLGATE_OUTS;
}
bool takes_attribute(const callgate_parameter& parameter) {
  return parameter.kind >= CALLGATE_ATTR_NUMBER && parameter.kind <= CALLGATE_ATTR_DICTIONARY;
}

std::string_view dtype_name(std::int32_t code) {
  return name(dtype_from_code(code).value_or(DType::kInvalid));
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    std::size_t comma = std::min(text.find(','), text.size());
    std::string_view part = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
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
    std::string dtype = p.dtype != 0 ? std::string(dtype_name(p.dtype)) : std::string();
    text += kKinds[static_cast<std::size_t>(p.kind)];
    if (p.kind == CALLGATE_SCALAR) {
      text += dtype;
    } else if (takes_operands(p) || takes_results(p)) {
      text += '<' + dtype + ',' + (p.rank < 0 ? "*" : std::to_string(p.rank)) + '>';
    } else if (!dtype.empty()) {
      text += '<' + dtype + '>';
    }
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
    if (kernel->abi != CALLGATE_ABI) {
      throw Error(ErrorCode::kInvalidArgument, "library '" + library + "'",
                  "kernels of binary interface " + std::to_string(CALLGATE_ABI) +
                      " (CALLGATE_ABI in callgate/kernel.h)",
                  std::to_string(kernel->abi) + "; build it again with this version's header");
    }
    KernelInfo info;
    info.function = kernel->function;
    info.parameters.assign(kernel->parameters, kernel->parameters + kernel->parameter_count);
    std::vector<std::string> names = split(kernel->names);
    info.name = names.front();
    names.erase(names.begin());
    if (!names.empty() && names.size() != info.parameters.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "library '" + library + "', CALLGATE_KERNEL(" + kernel->names + ")",
                  "a name for each of the " + std::to_string(info.parameters.size()) +
                      " parameters, or none",
                  std::to_string(names.size()));
    }
    info.parameter_names = std::move(names);
    kernels.push_back(std::move(info));
  }
  std::ranges::reverse(kernels);
  return kernels;
}

// The call as the kernel sees it, and what its services need.
class KernelFrame : public callgate_call {
 public:
  KernelFrame(const KernelSite& site, const Call& call, Executor* executor) noexcept
      : callgate_call{reinterpret_cast<const callgate_array*>(call.operands.data()),
                      reinterpret_cast<const callgate_array*>(call.results.data()),
                      site.ordered_.data(),
                      site.starts_.data(),
                      site.counts_.data(),
                      &kServices,
                      site.callee_->info().user_data},
        executor_(executor) {}
  KernelFrame(const KernelFrame&) = delete;
  KernelFrame& operator=(const KernelFrame&) = delete;
  ~KernelFrame() {
    for (void* memory : scratch_) std::free(memory);
  }

  std::string take_message() {
    return message_.empty() ? "it failed without a message" : std::move(message_);
  }

 private:
  // A kernel's threads may all ask.
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static KernelFrame& of(const callgate_call* call) noexcept {
    return *static_cast<KernelFrame*>(const_cast<callgate_call*>(call));
  }
  static void run_parallel(const callgate_call* call, std::int64_t begin, std::int64_t end,
                           std::int64_t grain, void (*body)(void*, std::int64_t, std::int64_t),
                           void* data) {
    parallel_for(of(call).executor_, begin, end, grain, body, data);
  }
  static void* allocate(const callgate_call* call, std::size_t bytes, std::size_t alignment) {
    std::size_t step = std::max<std::size_t>(alignment, 64);
    if (bytes > SIZE_MAX - step) return nullptr;
    void* memory = std::aligned_alloc(step, (bytes / step + 1) * step);
    if (memory == nullptr) return nullptr;
    std::scoped_lock lock(mutex());
    of(call).scratch_.push_back(memory);
    return memory;
  }
  static std::int32_t threads(const callgate_call* call) {
    return of(call).executor_ == nullptr ? 1 : of(call).executor_->threads();
  }
  static std::int64_t device(const callgate_call* call) {
    return of(call).executor_ == nullptr ? -1 : of(call).executor_->device();
  }
  static void fail(const callgate_call* call, const char* message) {
    std::scoped_lock lock(mutex());
    if (of(call).message_.empty()) of(call).message_ = message;
  }
  static constexpr callgate_services kServices = {&run_parallel, &allocate, &threads, &device,
                                                  &fail};

  Executor* executor_;
  std::vector<void*> scratch_;
  std::string message_;
};

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
  if (std::string have = signature(kernel); !spec.signature.empty() && spec.signature != have) {
    throw Error(ErrorCode::kInvalidArgument,
                where + ", as a program that was compiled before calls it",
                "the parameters (" + spec.signature + ")", "(" + have + ")");
  }
  std::vector<std::string> groups = split(spec.groups);
  std::size_t group = 0;
  std::int32_t operands = 0, results = 0;
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i) {
    const callgate_parameter& parameter = kernel.parameters[i];
    std::int32_t count = 1;
    if (variadic(parameter)) {
      std::string text = group < groups.size() ? groups[group++] : std::string();
      auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
      if (text.empty() || error != std::errc() || count < 0) {
        throw Error(ErrorCode::kInvalidArgument, where + ", parameter " + parameter_name(kernel, i),
                    "its number of arrays", "'" + spec.groups + "'");
      }
    }
    std::int32_t start = 0;
    if (takes_operands(parameter)) start = std::exchange(operands, operands + count);
    if (takes_results(parameter)) start = std::exchange(results, results + count);
    if (takes_attribute(parameter)) {
      const std::string name =
          i < kernel.parameter_names.size() ? kernel.parameter_names[i] : std::to_string(i);
      const callgate_attribute* value = attributes_.find(name);
      int kind = parameter.kind - CALLGATE_ATTR_NUMBER;
      if (value == nullptr || value->kind != kind ||
          (parameter.dtype != 0 && value->dtype != parameter.dtype)) {
        throw Error(
            ErrorCode::kInvalidArgument, where + ", parameter " + parameter_name(kernel, i),
            std::string("an attribute for ") + kKinds[static_cast<std::size_t>(parameter.kind)],
            value == nullptr ? "none" : "one of another type");
      }
      start = static_cast<std::int32_t>(ordered_.size());
      ordered_.push_back(*value);
    }
    starts_.push_back(start);
    counts_.push_back(count);
  }
}

Outcome KernelSite::run(const Call& call, Executor* executor) {
  return lanes_.empty() ? run_lane(call, executor) : run_lanes(call, executor);
}

Outcome KernelSite::run_lane(const Call& call, Executor* executor) {
  KernelFrame frame(*this, call, executor);
  if (callee_->info().function(&frame) == 0) [[likely]]
    return Outcome::success();
  return failed(frame.take_message());
}

Outcome KernelSite::failed(std::string message) const {
  return Outcome::failure(ErrorCode::kInternal, callee_->describe(message, site_));
}

Outcome KernelSite::run_lanes(const Call& call, Executor* executor) {
  lanes_.check(call.operands, call.results);
  struct Shared {
    KernelSite* site;
    const Call* call;
    Executor* executor;
    std::mutex mutex;
    std::atomic<bool> stop{false};
    std::int64_t failed_lane = INT64_MAX;
    Outcome outcome = Outcome::success();
  } shared{this, &call, executor, {}, {}, INT64_MAX, Outcome::success()};
  auto body = [](void* data, std::int64_t first, std::int64_t last) {
    auto& state = *static_cast<Shared*>(data);
    std::vector<ArrayView> operands(state.call->operands.size());
    std::vector<ArrayView> results(state.call->results.size());
    const Lanes& lanes = state.site->lanes_;
    for (std::int64_t lane = first; lane < last; ++lane) {
      if (state.stop.load(std::memory_order_relaxed)) return;  // only saves time
      lanes.select_operands(lane, state.call->operands, operands);
      lanes.select_results(lane, state.call->results, results);
      Outcome outcome =
          state.site->run_lane(Call{operands, results, state.call->context}, state.executor);
      if (outcome.ok()) continue;
      state.stop.store(true, std::memory_order_relaxed);
      std::scoped_lock lock(state.mutex);
      if (lane < state.failed_lane) {
        state.failed_lane = lane;
        state.outcome = std::move(outcome);
      }
    }
  };
  if (callee_->info().thread_safe) {
    parallel_for(executor, 0, lanes_.count(), 1, body, &shared);
  } else {
    body(&shared, 0, lanes_.count());
  }
  return std::move(shared.outcome);
}

std::shared_ptr<Site> KernelCallee::specialise(SiteSpec /*spec*/) {
  throw Error(ErrorCode::kInvalidArgument, "the program's call of '" + name() + "'", "a gate",
              "a kernel of that name");
}

std::unique_ptr<KernelSite> KernelCallee::bind(KernelSpec spec) {
  return std::make_unique<KernelSite>(shared_from_this(), std::move(spec));
}

}  // namespace callgate
