// A call site of a gate or tap, on any platform, and which devices make its call.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "core/call.h"
#include "core/error.h"
#include "core/lifecycle.h"
#include "core/registry.h"
#include "xla/decode.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// A call on one of an array's shards, in a program that XLA partitions over several devices. The
// partitioner (python/callgate/_sharding/partitioner.py) makes one for each device. It adds the
// device's position in the program, its partition, as the last operand, and says in the attribute
// `shards` which partitions make the call: of those that hold the same data, one may be enough.
class Shards {
 public:
  Shards() = default;
  // One digit a partition, 1 for those that make the call; "" for a call on whole arrays.
  explicit Shards(std::string runs) : runs_(std::move(runs)) {}

  // Takes the partition's number off the operands; -1 where there is none. Throws Error.
  std::int32_t take(DecodedCall& call) const {
    const void* number = take_operand(call).data;
    return number == nullptr ? -1 : read(number);
  }
  // In two steps, for a number on a device: the operand (null data where there is none), its value.
  ArrayView take_operand(DecodedCall& call) const {
    ArrayView number;
    if (runs_.empty()) return number;
    if (!call.operands().empty()) number = call.operands().back();
    if (number.dtype != DType::kU32 || number.rank != 0) {
      throw Error("a call on shards", "the partition as its last operand",
                  call.operands().empty() ? "no operand" : to_string(number));
    }
    call.drop_last_operand();
    return number;
  }
  std::int32_t read(const void* number) const {
    std::uint32_t shard = 0;
    std::memcpy(&shard, number, sizeof(shard));
    if (shard >= runs_.size()) {
      throw Error("a call on shards", "one of " + std::to_string(runs_.size()) + " partitions",
                  "number " + std::to_string(shard));
    }
    return static_cast<std::int32_t>(shard);
  }

  bool all_run() const noexcept { return runs_.find('0') == std::string::npos; }

  // Whether the partition makes the call. Else its results are zeros: the program adds all up.
  bool runs(std::int32_t shard) const noexcept {
    return shard < 0 || runs_[static_cast<std::size_t>(shard)] == '1';
  }

 private:
  std::string runs_;
};

// Of one executable, but shared: a call on its own thread that was given up may outlive that.
struct CallSite {
  std::shared_ptr<Callee> callee;
  std::shared_ptr<Site> site;
  bool poison_on_error = false;  // see settled() in ffi.h
  bool reads_context = true;
  Shards shards;
  mutable std::atomic<std::int64_t> first_run{-1};

  // Whether the run is the first that comes by.
  bool is_first(std::int64_t run) const noexcept {
    std::int64_t first = -1;  // relaxed: a number that is set once
    return first_run.compare_exchange_strong(first, run, std::memory_order_relaxed) || first == run;
  }

  // For arrays in the host's memory.
  void run(const Call& call) const {
    settled(poison_on_error, *callee, [&] { site->run(call); }, [&] { poison(call.results); });
  }
};

// Finds the callee and binds it to the site that the attributes describe. Throws Error.
inline std::shared_ptr<CallSite> make_call_site(const XLA_FFI_Attrs& attributes) {
  Attributes held = decode_attributes(attributes);
  Interrupts::watch();
  auto made = std::make_shared<CallSite>();
  made->callee = Registry::instance().find(held.text("name"));
  made->poison_on_error = held.text("on_error") == "poison";
  made->reads_context = made->callee->reads_context();
  made->shards = Shards(std::string(held.text("shards")));
  SiteSpec spec{std::string(held.text("spec")),      std::string(held.text("site")),
                Lanes::of(held.dictionary("batch")), Mesh::of(held.dictionary("mesh")),
                std::string(held.text("layout")),    std::move(held)};
  made->site = made->callee->specialise(std::move(spec));
  return made;
}

// For a call that comes when the process is ending: throws Error, unless the callee is quiet then.
inline void refuse_at_exit(const Callee& callee) {
  if (callee.quiet_at_exit()) return LateCalls::instance().add(callee.name());
  throw Error(ErrorCode::kAborted,
              "gate '" + callee.name() + "' was called while the process is ending");
}

// The failure of a call that Ctrl-C ends.
inline Error interrupted(const std::string& callee) {
  return {ErrorCode::kAborted, "Ctrl-C ended the program at its call of '" + callee + "'"};
}

}  // namespace callgate::xla_ffi
