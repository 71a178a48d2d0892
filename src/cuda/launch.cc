// See the header.
#include "cuda/launch.h"

#include <cstring>
#include <utility>

#include "core/error.h"
#include "cuda/copies.h"

namespace callgate::cuda {
namespace {

constexpr Result kMisalignedAddress{716};
constexpr Result kOutOfResources{701};
constexpr Result kIllegalInstruction{715};

// A launch's parameters on the stack; only what does not fit there is allocated.
class Filled {
 public:
  Filled(const Launch& launch, const Call& call, std::span<const DevicePointer> scratch) {
    if (launch.bytes.size() > room_.size()) [[unlikely]] {
      large_ = std::make_unique<Chunk[]>(launch.bytes.size() / sizeof(Chunk) + 1);
      bytes_ = large_[0].bytes.data();
    }
    if (launch.starts.size() > pointer_room_.size()) [[unlikely]] {
      many_ = std::make_unique<void*[]>(launch.starts.size());
      pointers_ = many_.get();
    }
    std::memcpy(bytes_, launch.bytes.data(), launch.bytes.size());
    for (std::size_t i = 0; i < launch.starts.size(); ++i) pointers_[i] = bytes_ + launch.starts[i];
    for (const Address& address : launch.addresses) {
      DevicePointer value = address_of(address, call, scratch);
      std::memcpy(bytes_ + address.offset, &value, sizeof(value));
    }
  }
  void** pointers() noexcept { return pointers_; }

 private:
  struct Chunk {
    alignas(16) std::array<std::byte, 16> bytes;
  };

  static DevicePointer address_of(const Address& address, const Call& call,
                                  std::span<const DevicePointer> scratch) {
    if (address.of == Address::Of::kScratch) return scratch[address.index];
    bool operand = address.of == Address::Of::kOperand;
    const void* data =
        operand ? call.operands[address.index].data : call.results[address.index].data;
    return reinterpret_cast<DevicePointer>(data);
  }

  // Left as they are: clearing them would cost as much as the rest.
  alignas(16) std::array<std::byte, 1024> room_;  // NOLINT(*-member-init)
  std::array<void*, 64> pointer_room_;            // NOLINT(*-member-init)
  std::unique_ptr<Chunk[]> large_;
  std::unique_ptr<void*[]> many_;
  std::byte* bytes_ = room_.data();
  void** pointers_ = pointer_room_.data();
};

Result enqueue(const Launch& launch, Function function, Stream stream, void** parameters) {
  const Driver& cuda = driver();
  const auto& [gx, gy, gz] = launch.grid;
  const auto& [bx, by, bz] = launch.block;
  if (!launch.clustered()) [[likely]] {
    return cuda.launch(function, gx, gy, gz, bx, by, bz, launch.shared_bytes, stream, parameters,
                       nullptr);
  }
  LaunchAttribute attribute{LaunchAttributeId::kClusterDimension,
                            {},
                            {launch.cluster[0], launch.cluster[1], launch.cluster[2]},
                            {}};
  LaunchConfig config{gx, gy, gz, bx, by, bz, launch.shared_bytes, stream, &attribute, 1};
  return cuda.launch_ex(&config, function, parameters, nullptr);
}

// What may have gone wrong, from what the driver knows of the function; "" for nothing known.
std::string hint(Result result, const Launch& launch, Function function) {
  auto attribute = [function](FunctionAttribute which) {
    int value = 0;
    return driver().function_attribute(&value, which, function) == Result::kSuccess ? value : 0;
  };
  if (result == Result::kInvalidValue || result == kOutOfResources) {
    auto threads = std::uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
    int most = attribute(FunctionAttribute::kMaxThreadsPerBlock);
    if (most > 0 && threads > static_cast<std::uint64_t>(most)) {
      return "; the function runs with at most " + std::to_string(most) +
             " threads a block, since it uses " +
             std::to_string(attribute(FunctionAttribute::kNumRegs)) +
             " registers a thread: take a smaller block, or compile it with __launch_bounds__(" +
             std::to_string(threads) + ")";
    }
    if (launch.shared_bytes > 0) {
      return "; it has " + std::to_string(attribute(FunctionAttribute::kSharedSizeBytes)) +
             " bytes of shared memory of its own beside the dynamic ones: the device may not have "
             "so much for a block";
    }
  }
  if (result == kMisalignedAddress) {
    return "; an earlier launch read or wrote an address that is not a multiple of its type's size "
           "(vector types such as float4 ask for 16 bytes, which parts of arrays may not be "
           "aligned to). CUDA_LAUNCH_BLOCKING=1 tells which launch";
  }
  if (result == Result::kIllegalAddress || result == Result::kLaunchFailed ||
      result == kIllegalInstruction) {
    return "; work that the device was given before failed, maybe this kernel's. "
           "CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, tells which";
  }
  return "";
}

[[noreturn]] void launch_failed(Result result, const Launch& launch, Function function) {
  const char* call = launch.clustered() ? "cuLaunchKernelEx: " : "cuLaunchKernel: ";
  throw Error(ErrorCode::kInternal,
              call + error_text(result) + "; " + launch.text() + hint(result, launch, function));
}

}  // namespace

LaunchSite::LaunchSite(std::shared_ptr<LaunchCallee> callee, LaunchSpec spec)
    : callee_(std::move(callee)),
      site_(std::move(spec.site)),
      lanes_(std::move(spec.lanes)),
      plan_(std::move(spec.plan)) {}

LaunchSite::~LaunchSite() {
  // Relaxed: nobody else has the site any more.
  for (std::atomic<const Functions*>& slot : by_ordinal_)
    delete slot.load(std::memory_order_relaxed);  // NOLINT: owned by the slot
}

const LaunchSite::Functions& LaunchSite::functions(const Device& device) {
  std::atomic<const Functions*>& slot = by_ordinal_[device.index()];
  // Acquire: the functions were complete before they were published.
  if (const Functions* known = slot.load(std::memory_order_acquire)) [[likely]]
    return *known;
  std::lock_guard lock(mutex_);
  if (const Functions* known = slot.load(std::memory_order_acquire)) return *known;  // as above
  auto made = std::make_unique<Functions>();
  for (const Launch& launch : plan_.launches) {
    if (launch.clustered() && driver().launch_ex == nullptr) {
      throw Error("clusters of blocks", "a driver of CUDA 11.8 or later",
                  "CUDA " + std::to_string(driver().version / 1000) + "." +
                      std::to_string(driver().version % 1000 / 10));
    }
    auto [x, y, z] = launch.cluster;
    FunctionNeeds needs{launch.shared_bytes, x * y * z > 8};
    made->push_back(callee_->modules().function(device, launch.entry, needs));
  }
  slot.store(made.get(), std::memory_order_release);  // see above
  return *made.release();                             // NOLINT: the slot's now
}

void LaunchSite::run(const Call& call, Device& device, std::span<const DevicePointer> scratch) try {
  check_counts(call);
  auto* stream = static_cast<Stream>(call.context.stream);
  const Functions& found = functions(device);
  for (std::uint32_t index : plan_.zeroed) clear_on_device({&call.results[index], 1}, stream);
  if (lanes_.empty()) [[likely]]
    return run_lane(call, found, stream, scratch);
  run_lanes(call, found, stream, scratch);
} catch (const Error& error) {
  std::string text = error.what();
  for (const std::string& prefix :
       {std::string("callgate: "), "kernel '" + callee_->name() + "': "})
    if (text.starts_with(prefix)) text.erase(0, prefix.size());
  throw Error::verbatim(error.code(), callee_->describe(text, site_));
}

// A program that was made by hand, or damaged: a launch would get an address that is not there.
void LaunchSite::check_counts(const Call& call) const {
  if (call.operands.size() >= plan_.operands && call.results.size() >= plan_.results) [[likely]]
    return;
  throw Error("the program's call",
              std::to_string(plan_.operands) + " operands and " + std::to_string(plan_.results) +
                  " results at least",
              std::to_string(call.operands.size()) + " and " + std::to_string(call.results.size()));
}

void LaunchSite::run_lane(const Call& call, const Functions& functions, Stream stream,
                          std::span<const DevicePointer> scratch) const {
  for (std::size_t i = 0; i < functions.size(); ++i) {
    const Launch& launch = plan_.launches[i];
    if (launch.empty()) continue;
    Filled filled(launch, call, scratch);
    Result result = enqueue(launch, functions[i], stream, filled.pointers());
    if (result != Result::kSuccess) [[unlikely]]
      launch_failed(result, launch, functions[i]);
  }
}

void LaunchSite::run_lanes(const Call& call, const Functions& functions, Stream stream,
                           std::span<const DevicePointer> scratch) const {
  lanes_.check(call.operands, call.results);
  std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
  for (std::int64_t lane = 0; lane < lanes_.count(); ++lane) {
    lanes_.select_operands(lane, call.operands, operands);
    lanes_.select_results(lane, call.results, results);
    run_lane(Call{operands, results, call.context}, functions, stream, scratch);
  }
}

}  // namespace callgate::cuda
