// The C interface, the only place where exceptions become status codes and messages.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "group.h"
#include "mailbox.h"
#include "queue.h"
#include "trace.h"

using namespace nlc;

struct nlc_group {
  std::shared_ptr<Group> group;
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
};

struct nlc_transfer {
  std::shared_ptr<Mailbox> mailbox;
  TransferPtr transfer;
};

namespace {

thread_local std::string last_error;

template <typename Body>
int32_t guarded(Body body) {
  try {
    body();
    return NLC_OK;
  } catch (const Failure &failure) {
    last_error = failure.what();
    return failure.status;
  } catch (const std::exception &failure) {
    last_error = failure.what();
    return NLC_SYSTEM;
  }
}

size_t give(const std::string &json, char *text, size_t capacity) {
  if (capacity) {
    const size_t n = std::min(json.size(), capacity - 1);
    std::memcpy(text, json.data(), n);
    text[n] = '\0';
  }
  return json.size();
}

void run_in_turn(Group &group, const nlc_call &call) {
  const std::lock_guard<std::mutex> turn(group.turn);
  group.run(call);
}

}  // namespace

int32_t nlc_group_open(const nlc_options *options, unsigned char peer_info[NLC_PEER_INFO_BYTES],
                       nlc_group **group) {
  return guarded([&] {
    auto opened = std::make_unique<nlc_group>();
    opened->group = std::make_shared<Group>(*options, peer_info);
    *group = opened.release();
  });
}

int32_t nlc_group_connect(nlc_group *group, const unsigned char *peer_infos, int64_t timeout_ms) {
  return guarded([&] { group->group->connect(peer_infos, timeout_ms); });
}

void nlc_group_abort(nlc_group *group, const char *reason) { group->group->abort(reason); }

void nlc_group_close(nlc_group *group) {
  // It belongs to the parent; a child that exits must not leave it.
  if (group->group->forked()) return;
  if (!group->queue->idle()) group->group->abort("the group is being closed");
  group->queue->wait_idle();
  delete group;
}

void nlc_group_set_timeout(nlc_group *group, int64_t timeout_ms) {
  group->group->set_timeout(timeout_ms);
}

int32_t nlc_peer_is_dead(const unsigned char peer_info[NLC_PEER_INFO_BYTES]) {
  int32_t dead = 0;
  guarded([&] { dead = is_dead(read_peer_info(peer_info)); });
  return dead;
}

int32_t nlc_run(nlc_group *group, const nlc_call *call) {
  return guarded([&] {
    group->group->check(*call);
    group->queue->wait_idle();  // calls started earlier run first
    run_in_turn(*group->group, *call);
  });
}

int32_t nlc_start(nlc_group *group, const nlc_call *call, nlc_done done, void *context) {
  return guarded([&] {
    group->group->check(*call);
    std::vector<void *> outputs;
    std::vector<nlc_part> sends, receives;
    const int size = group->group->size();
    if (call->outputs) outputs.assign(call->outputs, call->outputs + size);
    if (call->sends) sends.assign(call->sends, call->sends + size);
    if (call->receives) receives.assign(call->receives, call->receives + size);
    group->queue->add([shared = group->group, copied = *call, outputs, sends, receives, done,
                       context]() mutable {
      if (copied.outputs) copied.outputs = outputs.data();
      if (copied.sends) copied.sends = sends.data();
      if (copied.receives) copied.receives = receives.data();
      const int32_t status = guarded([&] { run_in_turn(*shared, copied); });
      done(context, status, status == NLC_OK ? "" : last_error.c_str());
    });
  });
}

int32_t nlc_post(nlc_group *group, const nlc_call *call, nlc_done done, void *context,
                 nlc_transfer **transfer) {
  return guarded([&] {
    group->group->check(*call);
    if (!is_message(call->kind))
      throw Failure(NLC_BAD_ARGUMENT, format("%s cannot be posted", kind_name(call->kind)));
    auto posted = std::make_unique<nlc_transfer>();
    posted->mailbox = group->group->mailbox();
    posted->transfer =
        posted->mailbox->post(*call, group->group->timeout_of(*call), done, context);
    *transfer = posted.release();
  });
}

int32_t nlc_transfer_wait(nlc_transfer *transfer, int64_t timeout_ms) {
  int32_t status = NLC_OK;
  const int32_t waited = guarded([&] {
    status = transfer->mailbox->drive(*transfer->transfer, timeout_ms);
    if (status != NLC_OK) last_error = transfer->transfer->error;
  });
  return waited == NLC_OK ? status : waited;
}

int32_t nlc_transfer_rank(const nlc_transfer *transfer) { return transfer->transfer->rank; }

void nlc_transfer_free(nlc_transfer *transfer) { delete transfer; }

void *nlc_pool_allocate(size_t bytes) {
  void *memory = nullptr;
  guarded([&] { memory = Arena::of_this_process().allocate(bytes); });
  return memory;
}

void nlc_pool_free(void *memory) {
  guarded([&] { Arena::of_this_process().free(memory); });
}

int32_t nlc_pool_contains(const void *memory) { return Arena::of_this_process().contains(memory); }

void *nlc_shared_allocate(nlc_group *group, size_t bytes_per_rank) {
  void *memory = nullptr;
  guarded([&] { memory = group->group->allocate_shared(bytes_per_rank); });
  return memory;
}

void nlc_shared_free(void *memory) {
  guarded([&] { SharedOutputs::free(memory); });
}

size_t nlc_describe(nlc_group *group, char *text, size_t capacity) {
  return give(group->group->describe(), text, capacity);
}

size_t nlc_trace(char *text, size_t capacity) { return give(trace_json(), text, capacity); }

const char *nlc_error(void) { return last_error.c_str(); }

int32_t nlc_abi_version(void) { return NLC_ABI_VERSION; }
