// Messages over libfabric: reliable datagrams with tags, the interface of Amazon's EFA.
//
// Verified with libfabric's tcp and shm providers. The efa provider uses the same calls but is
// untested, for lack of an EFA adapter. One idle TCP connection per pair of nodes (tcp_control.h)
// does the rendezvous and reports nodes that gave up or died, because libfabric's endpoints have no
// connections that could break.
#include "transport.h"

#if !__has_include(<rdma/fabric.h>)

namespace nlc {

std::unique_ptr<Transport> make_ofi_transport() {
  throw std::runtime_error(
      "this engine was compiled without libfabric's headers (add third_party/libfabric to the "
      "include path): use NEARLINEAR_COLLECTIVES_TRANSPORT=tcp");
}

}  // namespace nlc

#else

#include <deque>
#include <optional>

#include "ofi_endpoint.h"
#include "tcp_control.h"

namespace nlc {
namespace {

constexpr int64_t kWindow = 4 << 20;  // bytes in flight to one node
constexpr auto kGracePeriod = std::chrono::milliseconds(500);

struct Operation {
  fi_context2 context;  // first member: libfabric returns its address
  Request *request;
  char *data;
  size_t bytes;
  int node;
  bool send;
  uint64_t tag;
  ofi::Owned<fid_mr> memory;
};

struct Link {
  fi_addr_t address = FI_ADDR_UNSPEC;
  uint32_t sent = 0, received = 0;  // messages posted so far; used as tags
  int pending = 0;
  int64_t in_flight = 0;       // bytes sent but not known to have arrived
  bool full = false;           // accepts nothing at the moment
  Clock::time_point active{};  // last time something was posted or arrived

  bool idle() const { return pending == 0; }
};

class OfiTransport : public Transport {
 public:
  OfiTransport() : window_(setting_number("WINDOW", kWindow)) {
    const std::string requested = setting("PROVIDER");
    const std::string host = tcp::host_text(control_.interface().address);
    ofi::Info info = ofi::find_provider(requested.empty() ? "efa" : requested, host);
    if (!info && requested.empty()) info = ofi::find_provider("tcp", host);
    if (!info)
      throw Failure(NLC_SYSTEM, "libfabric has no provider '" +
                                    (requested.empty() ? "tcp" : requested) +
                                    "' with reliable tagged messages here (see fi_info -l): set "
                                    "NEARLINEAR_COLLECTIVES_PROVIDER to another, or "
                                    "NEARLINEAR_COLLECTIVES_TRANSPORT=tcp");
    endpoint_ = ofi::Endpoint(std::move(info));
    address_ = control_.address() + ' ' + endpoint_.name();
    if (address_.size() > 200)
      throw Failure(NLC_SYSTEM, format("libfabric's %s has addresses of %zu letters, too long for "
                                       "this transport",
                                       endpoint_.provider(), address_.size()));
  }

  ~OfiTransport() override {
    if (::getpid() != pid_) {  // a forked child must not close the parent's connections
      for (Operation &operation : operations_) (void)operation.memory.release();
      endpoint_.abandon();
      return;
    }
    bool idle = control_.connected() && !failure_ && unsent_.empty() && unposted_.empty();
    for (const Link &link : links_) idle &= link.idle();
    try {
      control_.leave(idle, {});
      // Transfers that are complete here may need this end's help to complete there.
      const Clock::time_point until = Clock::now() + kGracePeriod;
      while (idle && endpoint_ && control_.others_stay() && Clock::now() < until) {
        control_.wait(500, [](int, uint32_t) {});
        progress();
      }
    } catch (const std::exception &) {
      // The other nodes see the connections close without a message.
    }
    close();
  }

  std::string address() const override { return address_; }

  void connect(const std::vector<std::string> &addresses, int my_node, const Key &key,
               int64_t timeout_ms) override {
    std::vector<std::string> doors, names;
    for (const std::string &address : addresses) {
      const size_t space = address.find(' ');
      doors.push_back(address.substr(0, space));
      names.push_back(space == std::string::npos ? "" : address.substr(space + 1));
    }
    control_.connect(doors, my_node, key, timeout_ms);
    links_.resize(addresses.size());
    for (size_t node = 0; node < links_.size(); ++node) {
      if (static_cast<int>(node) == my_node) continue;
      links_[node].address = endpoint_.find(names[node]);
      if (links_[node].address == FI_ADDR_UNSPEC)
        throw Failure(NLC_SYSTEM, format("libfabric does not accept the address of node %zu: do "
                                         "all nodes use the provider %s?",
                                         node, endpoint_.provider()));
    }
    const Key tag = hmac_sha256(text_of(key), "tag");  // the tag crosses the network
    group_tag_ = (static_cast<uint64_t>(tag[0] & 0x7f) << 8 | tag[1]) << 48;
  }

  void post_send(int node, const void *data, size_t bytes, Request *request) override {
    Link &link = link_to(node);
    *request = Request{bytes == 0};
    if (bytes == 0 || failure_) return;
    Operation *operation = make_operation(node, const_cast<void *>(data), bytes, request, true);
    operation->tag = tag(control_.my_node(), link.sent++);
    unsent_.push_back(operation);
  }

  void post_receive(int node, void *data, size_t bytes, Request *request) override {
    Link &link = link_to(node);
    *request = Request{bytes == 0};
    if (bytes == 0 || failure_) return;
    Operation *operation = make_operation(node, data, bytes, request, false);
    operation->tag = tag(node, link.received++);
    unposted_.push_back(operation);
    post_receives();
  }

  bool poll(int timeout_us) override {
    if (failure_) throw LinkFailure(*failure_);
    bool moved = step(0);
    if (moved || timeout_us <= 0) return moved;
    // Few providers can wake a sleeper, so sleep in short intervals that grow.
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(timeout_us);
    int64_t left = timeout_us;
    for (int64_t nap = 5; !moved && !woken_ && left > 0; nap = std::min<int64_t>(nap * 2, 100)) {
      moved = step(std::min(nap, left));
      left = std::chrono::ceil<std::chrono::microseconds>(until - Clock::now()).count();
    }
    return moved;
  }

  void wake_on(int eventfd) override { control_.wake_on(eventfd); }

  void give_up(const std::string &reason) noexcept override {
    try {
      control_.give_up(reason);
    } catch (const std::exception &) {
      // Best effort: the other nodes notice the closed connections.
    }
    if (!failure_) failure_.emplace(control_.my_node(), reason);
    close();
  }

  int awaited() const override { return tcp::quietest(links_); }
  void tell_awaited(int node) override { control_.tell_awaited(node); }
  int stuck_behind(int node) const override { return control_.stuck_behind(node); }

  std::string describe() const override {
    const uint32_t version = ofi::Library::get().version();
    return format("libfabric %u.%u (%s on %s), window %s", FI_MAJOR(version), FI_MINOR(version),
                  endpoint_.provider(), endpoint_.info().domain_attr->name,
                  bytes_text(static_cast<uint64_t>(window_)).c_str());
  }

  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  // From here on the adapter does not access this process's memory.
  void close() noexcept {
    endpoint_.stop();
    operations_.clear();  // memory registrations must be closed before the domain
    endpoint_.close();
  }

  Link &link_to(int node) {
    if (node < 0 || static_cast<size_t>(node) >= links_.size() ||
        links_[static_cast<size_t>(node)].address == FI_ADDR_UNSPEC)
      throw Failure(NLC_BAD_ARGUMENT, format("no link with node %d", node));
    return links_[static_cast<size_t>(node)];
  }

  // Tag that identifies one message among all that reach a node, independent of arrival order.
  uint64_t tag(int sender, uint32_t sequence) const {
    return group_tag_ | static_cast<uint64_t>(sender) << 32 | sequence;
  }

  Operation *make_operation(int node, void *data, size_t bytes, Request *request, bool send) {
    if (bytes > endpoint_.info().ep_attr->max_msg_size)
      throw Failure(NLC_BAD_ARGUMENT,
                    format("libfabric's %s carries messages of at most %s", endpoint_.provider(),
                           bytes_text(endpoint_.info().ep_attr->max_msg_size).c_str()));
    if (free_.empty()) free_.push_back(&operations_.emplace_back());
    Operation *operation = free_.back();
    free_.pop_back();
    operation->request = request;
    operation->data = static_cast<char *>(data);
    operation->bytes = bytes;
    operation->node = node;
    operation->send = send;
    Link &link = links_[static_cast<size_t>(node)];
    ++link.pending;
    link.active = Clock::now();
    return operation;
  }

  void *describe_memory(Operation &operation) {
    if (!(endpoint_.info().domain_attr->mr_mode & FI_MR_LOCAL)) return nullptr;
    if (!operation.memory) {
      // Register memory for this transfer only: it may be unmapped and mapped anew between two
      // transfers, without notice.
      fid_mr *memory;
      ofi::Library::get().check(
          ::fi_mr_reg(endpoint_.domain(), operation.data, operation.bytes,
                      operation.send ? FI_SEND : FI_RECV, 0, ++keys_, 0, &memory, nullptr),
          "cannot register memory (see ulimit -l)");
      operation.memory.reset(memory);
    }
    return ::fi_mr_desc(operation.memory.get());
  }

  void post_receives() {
    for (; !unposted_.empty(); unposted_.pop_front()) {
      Operation &one = *unposted_.front();
      if (!accepted(one, ::fi_trecv(endpoint_.messages(), one.data, one.bytes, describe_memory(one),
                                    FI_ADDR_UNSPEC, one.tag, 0, &one.context)))
        return;
    }
  }

  void post_sends() {
    for (Link &link : links_) link.full = false;
    for (auto next = unsent_.begin(); next != unsent_.end();) {
      Operation &one = **next;
      Link &link = links_[static_cast<size_t>(one.node)];
      const auto in_flight = link.in_flight + static_cast<int64_t>(one.bytes);
      link.full |= link.in_flight > 0 && in_flight > window_;
      // A link that is still being established accepts nothing either.
      link.full |= !link.full && !accepted(one, ::fi_tsend(endpoint_.messages(), one.data,
                                                           one.bytes, describe_memory(one),
                                                           link.address, one.tag, &one.context));
      if (link.full) {
        ++next;
      } else {
        link.in_flight = in_flight;
        next = unsent_.erase(next);
      }
    }
  }

  bool accepted(const Operation &operation, ssize_t code) {
    if (code == 0) return true;
    if (code != -FI_EAGAIN) fail(operation, "libfabric: " + ofi::Library::get().error(code));
    return false;
  }

  bool step(int64_t timeout_us) {
    woken_ = control_.wait(timeout_us, [](int, uint32_t) {});
    bool moved = progress();
    post_receives();
    post_sends();
    const Clock::time_point quiet = Clock::now() - kGracePeriod;
    for (size_t node = 0; node < links_.size(); ++node)
      if (control_.has_left(static_cast<int>(node)) && !links_[node].idle() &&
          links_[node].active < quiet)
        control_.data_ended(static_cast<int>(node), "");
    try {
      control_.check([this](int node) { return !links_[static_cast<size_t>(node)].idle(); });
    } catch (const LinkFailure &failure) {
      failure_ = failure;
      close();
      throw;
    }
    return moved;
  }

  bool progress() {
    bool moved = false;
    fi_cq_msg_entry entries[32];
    for (;;) {
      const ssize_t n = ::fi_cq_read(endpoint_.completions(), entries, 32);
      for (ssize_t i = 0; i < n; ++i)
        complete(*static_cast<Operation *>(entries[i].op_context), entries[i].len);
      moved |= n > 0;
      if (n == -FI_EAVAIL)
        take_error();
      else if (n < 32)
        return moved;
    }
  }

  void complete(Operation &operation, size_t bytes) {
    if (!operation.send && bytes != operation.bytes)
      return fail(operation,
                  format("it sent %zu bytes where %zu were expected", bytes, operation.bytes));
    operation.request->done = true;
    Link &link = links_[static_cast<size_t>(operation.node)];
    --link.pending;
    link.active = Clock::now();
    control_.heard_from(operation.node);
    if (operation.send) {
      bytes_sent_ += operation.bytes;
      link.in_flight -= static_cast<int64_t>(operation.bytes);
    }
    operation.memory.reset();
    free_.push_back(&operation);
  }

  void take_error() {
    fi_cq_err_entry error{};
    if (::fi_cq_readerr(endpoint_.completions(), &error, 0) < 1 || !error.op_context) return;
    char detail[128] = "";
    const char *text = ::fi_cq_strerror(endpoint_.completions(), error.prov_errno, error.err_data,
                                        detail, sizeof detail);
    fail(*static_cast<Operation *>(error.op_context),
         format("libfabric: %s (%s)", ofi::Library::get().error(error.err).c_str(),
                text ? text : detail));
  }

  // The operation stays pending, because its node still waits for it whatever happens next.
  void fail(const Operation &operation, const std::string &why) {
    control_.data_ended(operation.node, why);
  }

  const int64_t window_;
  const int pid_ = ::getpid();
  tcp::Control control_;
  ofi::Endpoint endpoint_;
  std::string address_;
  std::vector<Link> links_;
  // As many as were ever in use at once; addresses must be stable.
  std::deque<Operation> operations_;
  std::vector<Operation *> free_;
  std::deque<Operation *> unsent_, unposted_;
  uint64_t group_tag_ = 0;
  uint64_t keys_ = 0;
  uint64_t bytes_sent_ = 0;
  std::optional<LinkFailure> failure_;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_ofi_transport() { return std::make_unique<OfiTransport>(); }

}  // namespace nlc

#endif
