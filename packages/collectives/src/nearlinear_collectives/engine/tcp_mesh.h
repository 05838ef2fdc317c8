// Makes two connections to every other node, one for data and one for control.
//
// Each node connects one of the two and accepts the other (the lower index connects data), so that
// both sides of a pair notice when the other's process is gone: its port refuses the connection.
#pragma once

#include <algorithm>
#include <list>
#include <string>
#include <vector>

#include "tcp_handshake.h"

namespace nlc::tcp {

class Mesh {
 public:
  struct Connection {
    int node;
    Kind kind;
    Socket fd;
  };

  Mesh(int listener, const Interface &from, const std::vector<std::string> &addresses, int my_node,
       const Key &key)
      : listener_(listener),
        addresses_(addresses),
        party_{from, my_node, static_cast<int>(addresses.size()), key},
        answered_(addresses.size(), false) {
    answered_[at(my_node)] = true;
    for (int node = 0; node < party_.members; ++node)
      if (node != my_node)
        calls_.emplace_back(node, node > my_node ? kData : kControl, addresses[at(node)]);
  }

  bool complete() const {
    return calls_.empty() && std::count(answered_.begin(), answered_.end(), false) == 0;
  }

  // Wait up to timeout_ms for progress; return the connections that are complete. Throws
  // LinkFailure for a node whose process is gone.
  std::vector<Connection> step(int timeout_ms) {
    const Clock::time_point start = Clock::now();
    Clock::time_point until = start + std::chrono::milliseconds(timeout_ms);
    for (Call &call : calls_) {
      if (!call.fd && call.next() <= start) named(call, [&] { call.dial(party_); });
      if (!call.fd) until = std::min(until, call.next());
    }
    std::vector<pollfd> waits{{listener_, POLLIN, 0}};
    for (const Call &call : calls_) waits.push_back({call.fd.get(), call.events(), 0});
    for (const Guest &guest : guests_) waits.push_back({guest.fd.get(), POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (::poll(waits.data(), waits.size(), static_cast<int>(std::max<int64_t>(left, 0))) <= 0)
      return {};

    std::vector<Connection> made;
    size_t i = 1;
    for (auto call = calls_.begin(); call != calls_.end();) {
      bool done = false;
      if (waits[i++].revents) named(*call, [&] { done = call->advance(party_); });
      if (done) made.push_back({call->member, call->kind, std::move(call->fd)});
      call = done ? calls_.erase(call) : std::next(call);
    }
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      const bool done = waits[i++].revents && guest->listen(party_, [this](const Hello &theirs) {
        return !answered_[at(theirs.member)] &&
               theirs.kind == (theirs.member < party_.me ? kData : kControl);
      });
      if (done && guest->fd) {
        const Hello &theirs = guest->hello();
        answered_[at(theirs.member)] = true;
        made.push_back({theirs.member, static_cast<Kind>(theirs.kind), std::move(guest->fd)});
      }
      guest = done ? guests_.erase(guest) : std::next(guest);
    }
    if (waits[0].revents) accept_guests(listener_, guests_);
    return made;
  }

  // Missing nodes with their state, for an error: "node 3 (10.0.0.4:4711: no answer)".
  std::string missing() const {
    std::string text;
    for (int node = 0; node < party_.members; ++node) {
      std::string why = answered_[at(node)] ? "" : "its connection has not arrived here";
      for (const Call &call : calls_)
        if (call.member == node) why = call.trouble();
      if (why.empty()) continue;
      text += format("%snode %d (%s: %s)", text.empty() ? "" : ", ", node,
                     addresses_[at(node)].c_str(), why.c_str());
    }
    return text;
  }

 private:
  // Continue a call, with the node in the text of a failure.
  template <class Step>
  static void named(const Call &call, Step step) {
    try {
      step();
    } catch (const LinkFailure &failure) {
      throw LinkFailure(call.member, format("node %d: %s", call.member, failure.what()));
    }
  }

  static size_t at(int node) { return static_cast<size_t>(node); }

  int listener_;
  std::vector<std::string> addresses_;
  Party party_;
  std::vector<bool> answered_;  // nodes whose outgoing connection is complete
  std::list<Call> calls_;
  std::list<Guest> guests_;
};

}  // namespace nlc::tcp
