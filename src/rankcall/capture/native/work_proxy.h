// Works that stand in for a back end's own, to learn when the caller has waited for it.
//
// They may outlive their group and the recording, and a forked child may drop a copy of one: they
// refer to nothing but a recorder, which is never freed, and own everything else.
#pragma once

#include <atomic>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "completion.h"

namespace rankcall {
namespace {

// Answers as the Work that it stands in for does.
class WorkProxy : public c10d::Work {
 public:
  explicit WorkProxy(c10::intrusive_ptr<c10d::Work> inner)
      : c10d::Work(-1, inner->retrieveOpType()), inner_(std::move(inner)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const bool result = inner_->wait(timeout);
    // Functional collectives keep works in a registry, under the pointer they were given.
    c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(this));
    return result;
  }
  bool isCompleted() override { return inner_->isCompleted(); }
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

 protected:
  const c10::intrusive_ptr<c10d::Work> inner_;
};

// For a Work that has no future: the return of wait() is the end of the op.
class WaitedWork final : public WorkProxy {
 public:
  WaitedWork(c10::intrusive_ptr<c10d::Work> inner, Issued issued)
      : WorkProxy(std::move(inner)), issued_(std::move(issued)) {}
  ~WaitedWork() override {
    if (!over_.exchange(true)) abandon(*issued_.recorder, issued_.index);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool result;
    try {
      result = WorkProxy::wait(timeout);
    } catch (const std::exception& error) {
      over(failure(*issued_.recorder, error.what()));
      throw;
    } catch (...) {
      over(failure(*issued_.recorder, "unknown error"));
      throw;
    }
    over(Outcome{layout::kCompleted, now_ns()});
    return result;
  }
  bool isCompleted() override {
    const bool completed = inner_->isCompleted();
    if (completed) over(inner_->exception() ? failure(*issued_.recorder, "failed") : Outcome{layout::kCompleted, now_ns()});
    return completed;
  }

 private:
  void over(Outcome outcome) noexcept {
    if (over_.exchange(true)) return;
    if (issued_.receiver && outcome.status == layout::kCompleted) {
      try {
        outcome.peer = inner_->sourceRank();
        outcome.seq = issued_.receiver->next_p2p(outcome.peer, issued_.tag, false);
      } catch (...) {
      }
    }
    end_record(*issued_.recorder, issued_.index, outcome);
  }

  const Issued issued_;
  std::atomic<bool> over_{false};
};

// For an op on a device that is timed: once it was waited for, the caller's stream stands behind it.
class TimedWork final : public WorkProxy {
 public:
  TimedWork(c10::intrusive_ptr<c10d::Work> inner, Recorder* recorder, Spans::Owned span)
      : WorkProxy(std::move(inner)), recorder_(recorder), span_(std::move(span)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const bool result = WorkProxy::wait(timeout);
    if (!over_.exchange(true) && !recorder_->is_inherited()) recorder_->device_times.end_here(std::move(span_));
    return result;
  }

 private:
  Recorder* const recorder_;
  Spans::Owned span_;
  std::atomic<bool> over_{false};
};

}  // namespace
}  // namespace rankcall
