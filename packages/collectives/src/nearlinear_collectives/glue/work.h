// Work objects of collectives and messages, completed or in progress.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <utility>
#include <vector>

#include "../engine/nearlinear_collectives.h"

namespace nearlinear {

using c10d::Work;

// Contiguous copies of strided tensors, and references that keep a call's memory alive.
class Staging {
 public:
  void *input(const at::Tensor &tensor) {
    kept_.push_back(tensor.contiguous());
    return kept_.back().data_ptr();
  }
  void *output(const at::Tensor &tensor) {
    kept_.push_back(tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options()));
    if (!tensor.is_contiguous()) copies_.emplace_back(tensor, kept_.back());
    return kept_.back().data_ptr();
  }
  void *in_place(const at::Tensor &tensor) {
    void *data = input(tensor);
    if (!tensor.is_contiguous()) copies_.emplace_back(tensor, kept_.back());
    return data;
  }
  void finish() {
    for (auto &[tensor, stand_in] : copies_) tensor.copy_(stand_in);
    kept_.clear();
    copies_.clear();
  }

 private:
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

inline std::exception_ptr engine_exception(int32_t status, const std::string &text) {
  if (status == NLC_BAD_ARGUMENT)
    return std::make_exception_ptr(c10::ValueError({__func__, __FILE__, __LINE__}, text));
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
}

// DDP's reducer and its hooks expect a future of a list of tensors.
inline c10::intrusive_ptr<c10::ivalue::Future> tensor_list_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

// Name of an operation in the profiler's timelines.
inline const char *event_name(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::BROADCAST: return "nearlinear:broadcast";
    case c10d::OpType::ALLREDUCE: return "nearlinear:all_reduce";
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE: return "nearlinear:all_gather";
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE: return "nearlinear:reduce_scatter";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE: return "nearlinear:all_to_all";
    case c10d::OpType::GATHER: return "nearlinear:gather";
    case c10d::OpType::SCATTER: return "nearlinear:scatter";
    case c10d::OpType::REDUCE: return "nearlinear:reduce";
    case c10d::OpType::BARRIER: return "nearlinear:barrier";
    case c10d::OpType::SEND: return "nearlinear:send";
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE: return "nearlinear:receive";
    default: return "nearlinear";
  }
}

// The profiler records an event from the construction of a work to its end.
class EngineWork : public Work {
 public:
  EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, Staging staging)
      : Work(rank, type, event_name(type), outputs),
        outputs_(std::move(outputs)),
        staging_(std::move(staging)) {}

  void run(nlc_group *group, const nlc_call &call) {
    const int32_t status = nlc_run(group, &call);
    if (status != NLC_OK) std::rethrow_exception(engine_exception(status, nlc_error()));
    staging_.finish();
    finish();
  }

  void start(nlc_group *group, const nlc_call &call) {
    launch([&](void *context) { return nlc_start(group, &call, &EngineWork::done, context); });
  }

  // Post a message.
  void post(nlc_group *group, const nlc_call &call) {
    nlc_transfer *transfer = nullptr;
    launch([&](void *context) {
      return nlc_post(group, &call, &EngineWork::done, context, &transfer);
    });
    transfer_.reset(transfer);
  }

  // The rank that a message came from.
  int sourceRank() const override {
    TORCH_CHECK(transfer_, "only a receive has a source rank");
    return nlc_transfer_rank(transfer_.get());
  }

  // The waiting thread itself drives a message, which is faster than a change of threads.
  bool wait(std::chrono::milliseconds timeout) override {
    if (transfer_ && !isCompleted()) {
      const int32_t status = nlc_transfer_wait(transfer_.get(), timeout.count());
      if (status != NLC_OK) std::rethrow_exception(engine_exception(status, nlc_error()));
    }
    const bool done = Work::wait(timeout);
    if (future_) future_->wait();  // after wait(), the caller may read the future
    return done;
  }

  std::vector<at::Tensor> result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) {
      future_ = tensor_list_future();
      future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
  }

 private:
  template <typename Call>
  void launch(Call call) {
    future_ = tensor_list_future();
    auto self = c10::intrusive_ptr<EngineWork>::unsafe_reclaim_from_nonowning(this);
    const int32_t status = call(self.get());
    if (status != NLC_OK) std::rethrow_exception(engine_exception(status, nlc_error()));
    self.release();  // done() takes it back
  }

  static void done(void *context, int32_t status, const char *error) {
    auto self = c10::intrusive_ptr<EngineWork>::reclaim(static_cast<EngineWork *>(context));
    std::exception_ptr failure = status == NLC_OK ? nullptr : engine_exception(status, error);
    if (!failure) {
      try {
        self->staging_.finish();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    self->finish(failure);
    if (failure)
      self->future_->setErrorIfNeeded(failure);
    else
      self->future_->markCompleted(c10::IValue(self->outputs_));
  }

  std::vector<at::Tensor> outputs_;
  Staging staging_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  struct FreeTransfer {
    void operator()(nlc_transfer *transfer) const { nlc_transfer_free(transfer); }
  };
  std::unique_ptr<nlc_transfer, FreeTransfer> transfer_;  // of a message
};

// A work that was complete when it was created.
class DoneWork : public Work {
 public:
  DoneWork(int rank, std::vector<at::Tensor> outputs)
      : Work(rank, c10d::OpType::UNKNOWN), outputs_(std::move(outputs)) {
    finish();
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = tensor_list_future();
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  std::vector<at::Tensor> outputs_;
};

// Several works as one: the calls of a coalescing block, or of a coalesced collective.
class ManyWorks : public Work {
 public:
  ManyWorks(int rank, std::vector<c10::intrusive_ptr<Work>> works, std::vector<at::Tensor> outputs)
      : Work(rank, c10d::OpType::COALESCED),
        works_(std::move(works)),
        outputs_(std::move(outputs)) {}

  bool isCompleted() override {
    for (auto &work : works_)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    for (const auto &work : works_)
      if (!work->isSuccess()) return false;
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto &work : works_)
      if (auto failure = work->exception()) return failure;
    return nullptr;
  }
  void synchronize() override {
    for (auto &work : works_) work->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto &work : works_)
      if (!work->wait(timeout)) return false;
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto all = tensor_list_future();
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> parts(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (auto &work : works_) parts.push_back(work->getFuture());
    c10::collectAll(parts)->addCallback([all, outputs = outputs_](c10::ivalue::Future &done) {
      if (done.hasError())
        all->setError(done.exception_ptr());
      else
        all->markCompleted(c10::IValue(outputs));
    });
    return all;
  }

 private:
  std::vector<c10::intrusive_ptr<Work>> works_;
  std::vector<at::Tensor> outputs_;
};

}  // namespace nearlinear
