// Byte messages between the nodes of one group, the basis of the hierarchical collectives.
//
// Each pair of nodes has one link. Messages arrive in the order they were posted, and a receive of
// n bytes matches a send of n bytes (both sides split a transfer into the same messages). Sends of
// all links are put on the wire in the order they were posted, with few bytes in flight to each:
// many senders that fill one receiver's queue collapse (incast). A destination that accepts nothing
// at the moment does not delay the others. Only poll() blocks, and only up to its timeout. A
// transport is used by one thread at a time.
//
// Destroying an idle transport leaves in order, within at most a second: completed transfers
// arrive, and only nodes that still wait for this one are notified. After poll() has thrown or
// give_up() was called, no posted memory is accessed any more, and poll() throws the same error
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hmac.h"

namespace nlc {

struct Request {
  bool done = false;  // send: the memory may be reused; receive: the bytes have arrived
};

// A failed link, thrown by poll(). `node` indexes the addresses given to connect().
struct LinkFailure : std::runtime_error {
  LinkFailure(int node, const std::string &why) : std::runtime_error(why), node(node) {}
  int node;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Address of this end for its peers; opaque, at most 200 bytes, no zero bytes.
  virtual std::string address() const = 0;

  // Connect to every other node at its address. Nodes prove to each other that they hold `key`:
  // other connections are refused. Throws LinkFailure (a node's process is gone) or
  // std::runtime_error with the nodes missing after timeout_ms.
  virtual void connect(const std::vector<std::string> &addresses, int my_node, const Key &key,
                       int64_t timeout_ms) = 0;

  // Empty messages complete at once and are not sent.
  virtual void post_send(int node, const void *data, size_t bytes, Request *request) = 0;
  virtual void post_receive(int node, void *data, size_t bytes, Request *request) = 0;

  // Make progress; if there is none, wait up to timeout_us, or until the eventfd or non-blocking
  // pipe given to wake_on() is written. Returns true if anything moved.
  virtual bool poll(int timeout_us) = 0;
  virtual void wake_on(int eventfd) = 0;

  // Tell every node the reason for giving up (best effort, at most 300 bytes), out of band: their
  // poll() throws LinkFailure with this text. Also called with a reason sent by another node.
  virtual void give_up(const std::string &reason) noexcept = 0;

  // The node with unfinished requests that was silent for longest, or -1: the one to blame for a
  // wait that takes too long.
  virtual int awaited() const = 0;

  // Tell every node which one this node has waited for: its own index for a rank on it, -1 for
  // none. A node that does not answer may be the stuck one.
  virtual void tell_awaited(int node) = 0;

  // The node that delays `node`, according to the reports: itself, or the end of the chain of
  // waiting nodes.
  virtual int stuck_behind(int node) const = 0;

  virtual std::string describe() const = 0;  // for users: "tcp, window 64 KiB, eth0"
  virtual uint64_t bytes_sent() const = 0;   // payload
};

// Create a transport by name: "tcp", "ofi" (libfabric, loaded at run time). Throws
// std::runtime_error with the reason and the remedy if it is not available.
std::unique_ptr<Transport> make_transport(const std::string &name);

}  // namespace nlc
