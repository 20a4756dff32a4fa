// A Work whose end is the return of its wait(): the twin of capture/python/waited.py.
#pragma once

#include <atomic>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "ends.h"

namespace rankcall {
namespace {

// Stands in for a Work that has no future: the return of wait() is the end of the op.
class WaitedWork final : public c10d::Work {
 public:
  WaitedWork(c10::intrusive_ptr<c10d::Work> inner, const Issued& issued)
      : c10d::Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), issued_(issued) {}
  ~WaitedWork() override {
    if (over_.exchange(true)) return;
    Outcome outcome{layout::kStarted, 0};
    outcome.abandoned = true;
    ended(*issued_.recorder, issued_.index, issued_.span, outcome);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool result;
    try {
      result = inner_->wait(timeout);
    } catch (const std::exception& error) {
      over(failure(*issued_.recorder, error.what()));
      throw;
    }
    over(Outcome{layout::kCompleted, now_ns()});
    // Functional collectives keep works in a registry, under the pointer they were given.
    c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(this));
    return result;
  }
  bool isCompleted() override {
    const bool completed = inner_->isCompleted();
    if (completed) over(inner_->exception() ? failure(*issued_.recorder, "failed") : Outcome{layout::kCompleted, now_ns()});
    return completed;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  void over(Outcome outcome) noexcept {
    if (over_.exchange(true)) return;
    if (issued_.any_source && outcome.status == layout::kCompleted) {
      try {
        outcome.peer = inner_->sourceRank();
        outcome.seq = issued_.group->next_p2p(outcome.peer, issued_.tag, false);
      } catch (...) {
      }
    }
    ended(*issued_.recorder, issued_.index, issued_.span, outcome);
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  Issued issued_;
  std::atomic<bool> over_{false};
};

}  // namespace
}  // namespace rankcall
