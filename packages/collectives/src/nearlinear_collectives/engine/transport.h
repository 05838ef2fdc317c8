// Byte messages between the nodes of one group: what the hierarchical collectives stand on.
//
// Each pair of nodes has one link: messages arrive in the order they were posted, and a receive
// of n bytes matches a send of n bytes (both sides cut a transfer into the same messages).
// Sends are put on the wire in the order they were posted over all links, with few bytes in flight
// to each: many senders that fill one receiver's queue collapse (incast). A destination that takes
// nothing for now does not hold up the others. Nothing blocks but poll(), and only for as long as
// it is told to. A transport is used by one thread at a time. Destroying one that is idle leaves in
// order, in at most a second: what is done arrives, and only those who still wait for this node are
// told. Once poll() has thrown or give_up() was called, no posted memory is touched any more, and
// poll() throws the same again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace nlc {

struct Request {
  bool done = false;  // send: the memory may be reused; receive: the bytes are there
};

// A link failed: thrown by poll(). `node` indexes the addresses given to connect().
struct LinkFailure : std::runtime_error {
  LinkFailure(int node, const std::string &why) : std::runtime_error(why), node(node) {}
  int node;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Where peers reach this end; opaque, at most 200 bytes, no zero bytes.
  virtual std::string address() const = 0;

  // Connects to every other node, with its address. `cookie` is the group's nonce: a stranger's
  // connection is refused. Throws LinkFailure (a node's process is gone) or std::runtime_error
  // naming the nodes that are missing after timeout_ms.
  virtual void connect(const std::vector<std::string> &addresses, int my_node, uint64_t cookie,
                       int64_t timeout_ms) = 0;

  // Empty messages are done at once: nothing travels for them.
  virtual void post_send(int node, const void *data, size_t bytes, Request *request) = 0;
  virtual void post_receive(int node, void *data, size_t bytes, Request *request) = 0;

  // Makes what progress there is; if there is none, waits for some up to timeout_us, or until
  // the eventfd or non-blocking pipe given to wake_on() is written. True if anything moved.
  virtual bool poll(int timeout_us) = 0;
  virtual void wake_on(int eventfd) = 0;

  // Tells every node why this one gives up (best effort, at most 300 bytes), out of band: their
  // poll() throws LinkFailure with this text. Also called with a reason another node sent.
  virtual void give_up(const std::string &reason) noexcept = 0;

  // The node with unfinished requests of which nothing was heard for longest, or -1: who to blame
  // for a wait that takes too long.
  virtual int awaited() const = 0;

  // Tells every node which one this node has waited for long: its own for a rank on it, -1 for none
  // any more. A node that says nothing may be the one that is stuck.
  virtual void tell_awaited(int node) = 0;

  // Who holds `node` up, by what was told: itself, or the end of the row of those who wait.
  virtual int stuck_behind(int node) const = 0;

  virtual std::string describe() const = 0;  // one line for people: "tcp, window 64 KiB, eth0"
  virtual uint64_t bytes_sent() const = 0;   // payload
};

// Transports by name: "tcp", "ofi" (libfabric, loaded at run time). Throws std::runtime_error
// with the reason and the remedy when it cannot be had here.
std::unique_ptr<Transport> make_transport(const std::string &name);

}  // namespace nlc
