// See the header.
#include "cuda/device.h"

#include <bit>
#include <new>

#include "cuda/completions.h"

namespace callgate::cuda {
namespace {

constexpr std::size_t kMebi = std::size_t{1} << 20, kSmallest = 4096;
constexpr std::size_t kKept = 256 * kMebi;  // of a pool

// Powers of two up to 1 MiB, then whole MiB: large blocks waste little.
std::size_t size_class(std::size_t bytes) {
  if (bytes <= kMebi) return std::bit_ceil(std::max(bytes, kSmallest));
  return (bytes + kMebi - 1) / kMebi * kMebi;
}

Pool& pinned() { return immortal<Pool>(); }

int attribute(DeviceHandle device, DeviceAttribute which) {
  int value = 0;
  check(driver().device_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

DeviceHandle handle_of(int ordinal) {
  DeviceHandle handle = 0;
  check(driver().device_get(&handle, ordinal), "cuDeviceGet");
  return handle;
}

Context current_context() {
  Context context = nullptr;
  check(driver().context_current(&context), "cuCtxGetCurrent");
  return context;
}

}  // namespace

Device::Device(int ordinal, Context context)
    : ordinal_(ordinal), id_(ordinal), context_(context), capability_(capability_of(ordinal)) {
  DeviceHandle handle = handle_of(ordinal);
  std::array<char, 256> name{};
  check(driver().device_name(name.data(), static_cast<int>(name.size()), handle),
        "cuDeviceGetName");
  name_ = name.data();
  multiprocessors_ = attribute(handle, DeviceAttribute::kMultiprocessorCount);
  completions_ = new Completions(*this);  // NOLINT: never destroyed, as the device
}

int Device::capability_of(int ordinal) {
  DeviceHandle handle = handle_of(ordinal);
  return attribute(handle, DeviceAttribute::kComputeCapabilityMajor) * 10 +
         attribute(handle, DeviceAttribute::kComputeCapabilityMinor);
}

int Device::count() {
  int devices = 0;
  check(driver().device_count(&devices), "cuDeviceGetCount");
  return devices;
}

Device& Device::at(int ordinal) {
  if (ordinal < 0 || ordinal >= static_cast<int>(kMostDevices) || ordinal >= count()) {
    throw Error(ErrorCode::kNotFound, "CUDA",
                "a device number below " + std::to_string(std::min<int>(count(), kMostDevices)),
                std::to_string(ordinal));
  }
  std::atomic<Device*>& slot = by_ordinal_[static_cast<std::size_t>(ordinal)];
  if (Device* known = slot.load(std::memory_order_acquire)) return *known;  // see in_use()
  std::lock_guard lock(making_);
  if (Device* known = slot.load(std::memory_order_acquire)) return *known;  // as above
  Context context = nullptr;
  check(driver().primary_context_retain(&context, handle_of(ordinal)), "cuDevicePrimaryCtxRetain");
  auto* device = new Device(ordinal, context);    // NOLINT: never destroyed
  slot.store(device, std::memory_order_release);  // see in_use()
  return *device;
}

Device& Device::of(Stream stream) {
  Context context = nullptr;
  check(driver().stream_context(stream, &context), "cuStreamGetCtx");
  for (Device* known : in_use())
    if (known->context() == context) return *known;
  Context before = current_context();
  check(driver().context_set_current(context), "cuCtxSetCurrent");
  DeviceHandle handle = 0;
  Result found = driver().context_device(&handle);
  check(driver().context_set_current(before), "cuCtxSetCurrent");
  check(found, "cuCtxGetDevice");
  Device& device = at(handle);  // a device's handle is its number
  if (device.context() != context)
    throw Error("a program on " + device.name(), "a stream of the device's primary context",
                "one of another context");
  return device;
}

Stream Device::side_stream(Direction direction) {
  std::lock_guard lock(mutex_);
  Stream& stream = side_streams_[static_cast<std::size_t>(direction)];
  if (stream == nullptr)
    check(driver().stream_create(&stream, kStreamNonBlocking), "cuStreamCreate");
  return stream;
}

Event Device::take_event() {
  Event event = nullptr;
  if (std::lock_guard lock(mutex_); !events_.empty()) {
    event = events_.back();
    events_.pop_back();
    return event;
  }
  // Who waits for it sleeps: it may be long.
  check(driver().event_create(&event, kEventBlockingSync | kEventDisableTiming), "cuEventCreate");
  return event;
}

void Device::give_back(Event event) noexcept try {
  std::lock_guard lock(mutex_);
  events_.push_back(event);
} catch (const std::bad_alloc&) {
  driver().event_destroy(event);
}

ContextScope::ContextScope(const Device& device)
    : before_(current_context()), changed_(before_ != device.context()) {
  if (changed_) check(driver().context_set_current(device.context()), "cuCtxSetCurrent");
}

ContextScope::~ContextScope() {
  if (changed_) driver().context_set_current(before_);
}

bool capturing(Stream stream) {
  CaptureStatus status = CaptureStatus::kNone;
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status == CaptureStatus::kActive;
}

StreamEvent::StreamEvent(Device& device, Stream stream)
    : device_(&device), event_(device.take_event()) {
  Result recorded = driver().event_record(event_, stream);
  if (recorded == Result::kSuccess) [[likely]]
    return;
  device.give_back(event_);
  check(recorded, "cuEventRecord");
}

// --- Memory --------------------------------------------------------------------------------------

DevicePointer Pool::take(std::size_t bytes) {
  DevicePointer block = 0;
  {
    std::lock_guard lock(mutex_);
    in_use_ += bytes;
    if (std::vector<DevicePointer>& free = free_[bytes]; !free.empty()) {
      block = free.back();
      free.pop_back();
      kept_ -= bytes;
      return block;
    }
  }
  Result result = make(block, bytes);
  if (result == Result::kOutOfMemory) {  // what others have kept may be of another size
    device_ != nullptr ? trim() : trim_memory();
    result = make(block, bytes);
  }
  if (result == Result::kSuccess) return block;
  std::lock_guard lock(mutex_);
  in_use_ -= bytes;
  check(result, device_ != nullptr ? "cuMemAlloc_v2" : "cuMemHostAlloc");
  return 0;
}

void Pool::give_back(DevicePointer block, std::size_t bytes) noexcept {
  try {
    std::lock_guard lock(mutex_);
    in_use_ -= bytes;
    if (kept_ + bytes <= kKept) {
      free_[bytes].push_back(block);
      kept_ += bytes;
      return;
    }
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): nor is there room to keep it
  }
  free({&block, 1});
}

void Pool::trim() noexcept {
  std::map<std::size_t, std::vector<DevicePointer>> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(free_);
    kept_ = 0;
  }
  for (const auto& [bytes, blocks] : all) free(blocks);
}

Result Pool::make(DevicePointer& block, std::size_t bytes) const {
  if (device_ != nullptr) return driver().mem_alloc(&block, bytes);
  void* made = nullptr;
  Result result = driver().mem_host_alloc(&made, bytes, kHostAllocPortable);
  block = reinterpret_cast<DevicePointer>(made);
  return result;
}

// In a device's context, since the thread may have none; not where the driver is gone.
void Pool::free(std::span<const DevicePointer> blocks) const noexcept {
  auto devices = Device::in_use();
  if (blocks.empty() || devices.empty()) return;
  const Device& device = device_ != nullptr ? *device_ : *devices.front();
  const Driver& cuda = driver();
  Context before = nullptr;
  if (cuda.context_current(&before) != Result::kSuccess ||
      cuda.context_set_current(device.context()) != Result::kSuccess)
    return;
  for (DevicePointer block : blocks)
    device_ != nullptr ? cuda.mem_free(block) : cuda.mem_free_host(reinterpret_cast<void*>(block));
  cuda.context_set_current(before);
}

Block::Block(Pool& pool, std::size_t bytes)
    : pool_(&pool), address_(pool.take(size_class(bytes))), size_(size_class(bytes)) {}

PinnedBlock::PinnedBlock(std::size_t bytes) : Block(pinned(), bytes) {}

MemoryInUse memory_in_use() noexcept {
  MemoryInUse in_use{pinned().in_use(), 0};
  for (Device* device : Device::in_use()) in_use.device += device->pool().in_use();
  return in_use;
}

void trim_memory() noexcept {
  pinned().trim();
  for (Device* device : Device::in_use()) device->pool().trim();
}

}  // namespace callgate::cuda
