// SPDX-License-Identifier: Apache-2.0
// A warp: which of its lanes run, and where. See machine.h.
//
// Lanes that are at the same place form a group. The group that is deepest in calls goes first, and
// of those the one at the lowest place: what a branch has parted meets again behind it. A group
// that would never be chosen so gets its turn now and then, for lanes that wait for each other.
#include <algorithm>

#include "machine.h"

namespace vgpu::ptx {
namespace {

constexpr std::uint32_t kPassesBeforeATurn = 1U << 12;

}  // namespace

void Warp::start(const Code& entry, Lanes lanes) {
  groups_.clear();
  while (!frames_.empty()) drop(frames_.back().get());
  alive_ = lanes;
  carry.fill(0);
  cluster_phase = 0;
  Frame* frame = new_frame(entry);
  frame->inside = lanes;
  fill(*frame);
  groups_.push_back({frame, 0, lanes});
}

Warp::State Warp::run(std::uint64_t& steps) {
  yields_ = false;
  while (steps > 0 && !yields_) {
    if (!select()) return groups_.empty() ? State::kEnded : State::kWaiting;
    run_group(steps);
  }
  return groups_.empty() ? State::kEnded : State::kRunning;
}

bool Warp::select() {
  if (groups_.size() > 1) merge();
  auto before = [](const Group& a, const Group& b) {
    return a.frame->depth != b.frame->depth ? a.frame->depth > b.frame->depth : a.at < b.at;
  };
  std::size_t best = groups_.size(), other = groups_.size();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i].waiting != Waiting::kNot) continue;
    if (best == groups_.size() || before(groups_[i], groups_[best])) {
      other = best;
      best = i;
    } else {
      other = i;
    }
  }
  if (best == groups_.size()) return false;
  if (other < groups_.size() && ++passed_over_ >= kPassesBeforeATurn) {
    passed_over_ = 0;
    best = other;
  }
  now_ = best;
  return true;
}

void Warp::merge() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (std::size_t k = groups_.size() - 1; k > i; --k) {
      Group &a = groups_[i], &b = groups_[k];
      if (a.frame != b.frame || a.at != b.at) continue;
      // Those that wait at a barrier are behind it; those that wait for each other are before.
      bool a_free = a.waiting == Waiting::kNot || a.waiting == Waiting::kTogether;
      bool b_free = b.waiting == Waiting::kNot || b.waiting == Waiting::kTogether;
      if (!a_free || !b_free) continue;
      a.lanes |= b.lanes;
      a.waiting = Waiting::kNot;
      groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
}

Lanes Warp::guarded(const Instruction& instruction, Lanes lanes) const {
  Lanes holds = true_lanes(reinterpret_cast<const std::uint8_t*>(registers_ + instruction.guard));
  return lanes & (instruction.guard_negated ? ~holds : holds);
}

void Warp::run_group(std::uint64_t& steps) {
  Group& here = groups_[now_];
  std::uint32_t limit = kNone;
  for (const Group& each : groups_) {
    if (each.frame == here.frame && each.at > here.at) limit = std::min(limit, each.at);
  }
  registers_ = here.frame->registers.data();
  const Instruction* code = here.frame->code->instructions.data();
  const Lanes lanes = here.lanes;
  std::uint32_t at = here.at;
  for (;;) {
    const Instruction& instruction = code[at++];
    Lanes active = instruction.guard == kNone ? lanes : guarded(instruction, lanes);
    --steps;
    if (active != 0) {
      if (instruction.control) {
        here.at = at;
        instruction.run(*this, instruction, active);  // `here` may be gone
        return;
      }
      instruction.run(*this, instruction, active);
    }
    if (steps == 0 || at == limit || yields_) {
      here.at = at;
      return;
    }
  }
}

void Warp::branch(Lanes taken, std::uint32_t target) {
  Group& here = group();
  Lanes rest = here.lanes & ~taken;
  if (rest == 0) {
    here.at = target;
    return;
  }
  Group other = here;
  here.lanes = rest;
  other.lanes = taken;
  other.at = target;
  groups_.push_back(other);
}

void Warp::exit(Lanes lanes) {
  alive_ &= ~lanes;
  for (Frame* frame = group().frame; frame != nullptr;) {
    Frame* parent = frame->parent;
    frame->inside &= ~lanes;
    if (frame->inside == 0) drop(frame);
    frame = parent;
  }
  group().lanes &= ~lanes;
  if (group().lanes == 0) groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(now_));
  // Lanes that waited for these need not any more.
  for (Group& each : groups_) {
    if (each.waiting == Waiting::kTogether) each.waiting = Waiting::kNot;
  }
  block_.ended(static_cast<std::uint32_t>(std::popcount(lanes)));
}

bool Warp::together(Lanes needed, const Instruction& instruction) {
  Group& here = group();
  const auto* first = here.frame->code->instructions.data();
  if ((needed & alive_ & ~here.lanes) == 0) return true;
  here.at = static_cast<std::uint32_t>(&instruction - first);
  here.waiting = Waiting::kTogether;
  here.needed = needed;
  return false;
}

void Warp::wait(Waiting reason, std::uint32_t barrier, Lanes lanes) {
  Group& here = group();
  if (here.lanes != lanes) {  // those that the guard left out go on
    Group rest = here;
    rest.lanes &= ~lanes;
    groups_.push_back(rest);
  }
  Group& waits = group();
  waits.lanes = lanes;
  waits.waiting = reason;
  waits.barrier = barrier;
}

void Warp::wake(Waiting reason, std::uint32_t barrier) {
  for (Group& each : groups_) {
    if (each.waiting == reason && each.barrier == barrier) each.waiting = Waiting::kNot;
  }
}

std::string Warp::waits_for() const {
  std::string text;
  for (const Group& each : groups_) {
    const Code& code = *each.frame->code;
    std::uint32_t at =
        std::min<std::uint32_t>(each.waiting == Waiting::kTogether ? each.at : each.at - 1,
                                static_cast<std::uint32_t>(code.instructions.size()) - 1);
    text += text.empty() ? "" : "; ";
    text += std::to_string(std::popcount(each.lanes)) + " threads of warp " +
            std::to_string(index_) + " at line " + std::to_string(code.instructions[at].line);
    if (each.waiting == Waiting::kTogether) text += " wait for lanes of their warp";
    if (each.waiting == Waiting::kBarrier)
      text += " wait at barrier " + std::to_string(each.barrier);
    if (each.waiting == Waiting::kCluster) text += " wait at the cluster's barrier";
  }
  return text;
}

}  // namespace vgpu::ptx
