// Transports between processes: every node is a forked process on the loopback interface.
//
//   ENGINE=packages/collectives/src/nearlinear_collectives/engine; cd tests/collectives/engine
//   ENGINE=../../../$ENGINE
//   g++ -std=c++20 -g -O1 -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all
//       -I$ENGINE -I$ENGINE/third_party/libfabric transport_test.cc
//       $ENGINE/{transport,tcp,ofi,base}.cc -ldl -pthread -o transport_test
//   ./transport_test [tcp|ofi] [scenario ...]     (default: all scenarios but the slow ones)
//   ./transport_test tcp -scenario ...            (the default without the named ones)
//
// Exit status: 0 if all passed, 77 if the transport is not available.
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "tcp_mesh.h"
#include "transport.h"

using namespace nlc;
using Bytes = std::vector<unsigned char>;

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "node %d: %s:%d: %s\n", me, __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                    \
    }                                                                                   \
  } while (0)

namespace {

constexpr int kNodes = 8;
const Key kKey = hmac_sha256("transport_test", "key");
std::string transport_name = "tcp";
int me = -1;  // this process's node

// Memory shared by the forked processes.
struct Board {
  char addresses[kNodes][256];
  std::atomic<int> arrived[512];
  std::atomic<int> flag;
};
Board *board;
int meetings = 0;

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Wait until `count` processes have arrived.
void meet(int count) {
  std::atomic<int> &here = board->arrived[meetings++];
  CHECK(meetings < 512);
  for (++here; here < count;) sleep_ms(1);
}

std::unique_ptr<Transport> create() { return make_transport(transport_name); }

std::vector<std::string> exchange(const std::string &address, int nodes) {
  std::snprintf(board->addresses[me], sizeof board->addresses[me], "%s", address.c_str());
  meet(nodes);
  std::vector<std::string> all(board->addresses, board->addresses + nodes);
  meet(nodes);
  return all;
}

std::unique_ptr<Transport> join(int nodes) {
  std::unique_ptr<Transport> net = create();
  CHECK(!net->address().empty() && net->address().size() <= 200);
  net->connect(exchange(net->address(), nodes), me, kKey, 20'000);
  return net;
}

// Barrier: no process continues before all have arrived.
std::unique_ptr<Transport> join_together(int nodes) {
  std::unique_ptr<Transport> net = join(nodes);
  meet(nodes);
  return net;
}

// Fill message `id` with words chosen so that moved, duplicated and lost bytes are detected.
void fill(Bytes &bytes, uint64_t id) {
  uint64_t word = (id + 1) * 0x9e3779b97f4a7c15ULL;
  const auto next = [&word] {
    word += 0xbf58476d1ce4e5b9ULL;
    return word >> 56 ^ word >> 29 ^ word;
  };
  size_t at = 0;
  for (uint64_t mixed; bytes.size() - at >= sizeof mixed; at += sizeof mixed) {
    mixed = next();
    std::memcpy(&bytes[at], &mixed, sizeof mixed);
  }
  for (uint64_t mixed = next(); at < bytes.size(); mixed >>= 8) bytes[at++] = mixed & 0xff;
}

struct Item {  // a message in flight
  uint64_t id;
  int node;
  bool sent_here;
  Bytes bytes;
  Request request{};
};

void post(Transport &net, Item &item) {
  if (item.sent_here) {
    fill(item.bytes, item.id);
    net.post_send(item.node, item.bytes.data(), item.bytes.size(), &item.request);
  } else {
    net.post_receive(item.node, item.bytes.data(), item.bytes.size(), &item.request);
  }
}

void finish(Transport &net, std::list<Item> &items) {
  while (!items.empty()) {
    net.poll(1000);
    std::erase_if(items, [](Item &item) {
      if (!item.request.done) return false;
      if (item.sent_here) {
        // Reuse the memory, which is allowed by now.
        item.bytes.assign(item.bytes.size(), 0xee);
      } else {
        Bytes sent(item.bytes.size());
        fill(sent, item.id);
        CHECK(item.bytes == sent);
      }
      return true;
    });
  }
}

void await(Transport &net, const Request &request) {
  while (!request.done) net.poll(1000);
}

// Poll until the transport reports an error, which it must repeat when polled again.
LinkFailure await_failure(Transport &net) {
  for (;;) {
    try {
      net.poll(10'000);
    } catch (const LinkFailure &failure) {
      try {
        net.poll(0);
      } catch (const LinkFailure &again) {
        CHECK(again.node == failure.node && !std::strcmp(again.what(), failure.what()));
        return failure;
      }
      CHECK(!"a failure stays");
    }
  }
}

bool says(const std::exception &error, const std::string &text) {
  if (std::strstr(error.what(), text.c_str())) return true;
  std::fprintf(stderr, "node %d: '%s' lacks '%s'\n", me, error.what(), text.c_str());
  return false;
}

size_t random_size(std::mt19937_64 &random) {
  switch (random() % 8) {
    case 0: return 0;
    case 1: return 1;
    case 2: return 4093;
    case 3: return 65'537;
    case 4: return random() % 3'000'000;
    default: return random() % 20'000;
  }
}

// --- scenarios: each runs in every node ---------------------------------------------------------

// Post this node's part of one random schedule at random times.
void random_schedules(int nodes) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::unique_ptr<Transport> net = join(nodes);
    std::mt19937_64 random(seed), rhythm(seed * 100 + static_cast<uint64_t>(me));
    uint64_t sent = 0;
    std::list<Item> items;
    for (uint64_t id = 0; id < 150; ++id) {
      const int from = static_cast<int>(random() % static_cast<uint64_t>(nodes));
      const int shift = 1 + static_cast<int>(random() % static_cast<uint64_t>(nodes - 1));
      const int to = (from + shift) % nodes;
      const size_t bytes = random_size(random);
      if (me != from && me != to) continue;
      items.push_back({id, me == from ? to : from, me == from, Bytes(bytes)});
      post(*net, items.back());
      if (me == from) sent += bytes;
      if (rhythm() % 4 == 0) net->poll(static_cast<int>(rhythm() % 300));
      if (rhythm() % 50 == 0) sleep_ms(3);
    }
    finish(*net, items);
    CHECK(net->bytes_sent() == sent);
  }
}

// The pattern of the collectives: step k sends to node + k and receives from node - k.
void all_to_all(int nodes) {
  const std::unique_ptr<Transport> net = join(nodes);
  uint64_t round = 0;
  for (const size_t bytes : {0, 1, 7, 1009, 65'536, 1'048'583, 5'000'011}) {
    std::list<Item> items;
    ++round;
    for (int k = 1; k < nodes; ++k) {
      const int to = (me + k) % nodes, from = (me - k + nodes) % nodes;
      for (uint64_t piece = 0; piece < 3; ++piece) {
        auto id = [=](int a, int b) {
          return ((round * 8 + piece) * 8 + static_cast<uint64_t>(a)) * 8 +
                 static_cast<uint64_t>(b);
        };
        items.push_back({id(me, to), to, true, Bytes(bytes + piece)});
        post(*net, items.back());
        items.push_back({id(from, me), from, false, Bytes(bytes + piece)});
        post(*net, items.back());
      }
    }
    finish(*net, items);
  }
  CHECK(net->describe().find(transport_name == "tcp" ? "tcp, window" : "libfabric") == 0);
}

// Node 0 posts a message for node 2 after one for node 1, which does not receive yet.
void a_busy_destination_holds_nobody_up(int nodes) {
  const std::unique_ptr<Transport> net = join(nodes);
  Bytes large(16 << 20), small(1);
  Request first, second;
  if (me == 0) {
    net->post_send(1, large.data(), large.size(), &first);
    net->post_send(2, small.data(), small.size(), &second);
    await(*net, second);
    await(*net, first);
  } else if (me == 1) {
    while (!board->flag) sleep_ms(1);
    net->post_receive(0, large.data(), large.size(), &first);
    await(*net, first);
  } else {
    net->post_receive(0, small.data(), small.size(), &first);
    await(*net, first);
    board->flag = 1;
  }
  meet(nodes);
}

void give_up_reaches_all(int nodes) {
  const std::string reason = "rank 5 died in all_gather #41 of 4 MiB: " + std::string(400, 'x');
  std::unique_ptr<Transport> net = join_together(nodes);
  if (me == 2) {
    net->give_up(reason);
    net->give_up("a second reason is not told");
    net.reset();
  } else {
    Bytes bytes(1 << 20);
    Request request;
    net->post_receive(2, bytes.data(), bytes.size(), &request);
    const LinkFailure failure = await_failure(*net);
    CHECK(reason.substr(0, 300) == failure.what());
    net->give_up(failure.what());  // forwarded, as the engine does
  }
  meet(nodes);
}

// Node 3 waits for 2, which waits for 1, which waits for a rank of its own node: 1 delays all.
void the_end_of_a_row_is_blamed(int nodes) {
  std::unique_ptr<Transport> net = join_together(nodes);
  if (me == 1) net->tell_awaited(1);
  if (me == 2) net->tell_awaited(1);
  if (me == 3) net->tell_awaited(2);
  meet(nodes);
  const Clock::time_point end = after_ms(5000);
  if (me == 0) {
    while (net->stuck_behind(3) != 1 && Clock::now() < end) net->poll(1000);
    CHECK(net->stuck_behind(3) == 1 && net->stuck_behind(2) == 1 && net->stuck_behind(1) == 1);
  }
  meet(nodes);
  if (me == 1) net->tell_awaited(3);
  if (me == 2) net->tell_awaited(-1);
  meet(nodes);
  if (me == 0) {
    while (net->stuck_behind(3) != 2 && Clock::now() < end) net->poll(1000);
    CHECK(net->stuck_behind(3) == 2 && net->stuck_behind(2) == 2);
    while (net->stuck_behind(1) != 2 && Clock::now() < end) net->poll(1000);
    CHECK(net->stuck_behind(1) == 2);
  }
  meet(nodes);
}

void kill_while(int nodes, bool busy) {
  const std::unique_ptr<Transport> net = join_together(nodes);
  if (me == 1 && fork() == 0) {  // another process ends it at any moment
    sleep_ms(static_cast<int>(std::random_device()() % 50));
    kill(getppid(), SIGKILL);
    _exit(0);
  }
  try {
    for (uint64_t round = 0;; ++round) {
      std::list<Item> items;
      for (int k = 1; busy && k < nodes; ++k) {
        items.push_back({round, (me + k) % nodes, true, Bytes(300'001)});
        post(*net, items.back());
        items.push_back({round, (me - k + nodes) % nodes, false, Bytes(300'001)});
        post(*net, items.back());
      }
      if (busy)
        finish(*net, items);
      else
        net->poll(1000);
    }
  } catch (const LinkFailure &failure) {
    CHECK(failure.node == 1 && says(failure, "connection closed by node 1"));
  }
  meet(nodes - 1);
}
void killed_while_busy(int nodes) { kill_while(nodes, true); }
void killed_while_idle(int nodes) { kill_while(nodes, false); }

// A child of the killed process survives; it must not keep the connections open.
void killed_with_a_child(int nodes) {
  const std::unique_ptr<Transport> net = join_together(nodes);
  if (me == 1) {
    const pid_t child = fork();
    if (child == 0) {
      while (!board->flag) sleep_ms(5);
      _exit(0);
    }
    kill(getpid(), SIGKILL);
  }
  const LinkFailure failure = await_failure(*net);
  CHECK(failure.node == 1);
  meet(nodes - 1);
  board->flag = 1;
}

// Connect, although node 1 is dead, which must be the reported failure.
void connect_with_dead_node_1(Transport &net, const std::vector<std::string> &addresses) {
  try {
    net.connect(addresses, me, kKey, 20'000);
    CHECK(!"connected with the dead");
  } catch (const LinkFailure &failure) {
    CHECK(failure.node == 1 && says(failure, "node 1"));
  }
}

void killed_before_connecting(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  if (me == 1) kill(getpid(), SIGKILL);
  connect_with_dead_node_1(*net, addresses);
  meet(nodes - 1);
}

void killed_while_connecting(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  if (me == 1) {
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::microseconds(std::random_device()() % 2000));
      kill(getpid(), SIGKILL);
    }).detach();
  }
  try {
    net->connect(addresses, me, kKey, 20'000);
    while (me == 1) sleep_ms(1);
    throw LinkFailure(await_failure(*net));
  } catch (const LinkFailure &failure) {
    CHECK(failure.node == 1 && says(failure, "node 1"));
  }
  meet(nodes - 1);
}

// Node 0 finds node 1 dead and closes its data connection, before node 2 has a control connection
// with either.
void the_dead_is_blamed_not_its_finder(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  if (me == 1) kill(getpid(), SIGKILL);
  if (me == 0) {
    const tcp::Party party{tcp::choose_interface(), me, nodes, kKey};
    tcp::Call call(2, tcp::kData, addresses[2]);
    call.dial(party);
    for (bool done = false; !done; done = call.advance(party)) {
      pollfd wait{call.fd.get(), call.events(), 0};
      CHECK(::poll(&wait, 1, 20'000) == 1);
    }
    call.fd = tcp::Socket();
  } else {
    connect_with_dead_node_1(*net, addresses);
  }
  meet(nodes - 1);
}

void a_missing_node_is_named(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  if (me == 2) {  // alive, but never joins
    meet(nodes);
    return;
  }
  try {
    net->connect(addresses, me, kKey, 300);
    CHECK(!"connected with nobody");
  } catch (const LinkFailure &) {
    CHECK(!"node 2 lives");
  } catch (const std::runtime_error &error) {
    CHECK(says(error, "0.3 s") && says(error, "node 2") && !std::strstr(error.what(), "node 1"));
  }
  meet(nodes);
}

// One node gives up connecting; nodes with a longer timeout are notified at once.
void a_failed_start_is_told(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  if (me != 2) {
    try {
      net->connect(addresses, me, kKey, me == 0 ? 300 : 30'000);
      CHECK(!"connected with nobody");
    } catch (const LinkFailure &failure) {
      CHECK(me == 1 && failure.node == 0 && !std::strcmp(failure.what(), "node 2 is missing"));
    } catch (const std::runtime_error &) {
      CHECK(me == 0);
      net->give_up("node 2 is missing");
    }
  }
  meet(nodes);
}

// Nodes of two jobs, or of a job and an impostor, refuse each other and say why.
void another_key_is_refused(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  try {
    net->connect(addresses, me, me == 0 ? kKey : hmac_sha256("another", "key"), 300);
    CHECK(!"connected with another key");
  } catch (const std::runtime_error &error) {
    CHECK(says(error, "does not hold this group's key"));
  }
  meet(nodes);
}

void strangers_are_ignored(int nodes) {
  const std::unique_ptr<Transport> net = create();
  const std::vector<std::string> addresses = exchange(net->address(), nodes);
  std::vector<tcp::Socket> strangers;
  const tcp::Address port = tcp::parse_address(addresses[0].substr(0, addresses[0].find(' ')));
  if (me == nodes - 1) {
    tcp::Hello hello;
    hello.kind = tcp::kControl;
    hello.member = 1;
    hello.members = nodes;
    const std::string noise(1000, 'G'), raw(reinterpret_cast<char *>(&hello), sizeof hello);
    tcp::Hello unlikely = hello;
    unlikely.member = nodes + 3;
    const std::string absurd(reinterpret_cast<char *>(&unlikely), sizeof unlikely);
    const std::string unproven = raw + std::string(sizeof(Key), '\0');
    for (const std::string &words :
         {std::string(), noise, raw.substr(0, 11), raw, absurd, unproven}) {
      tcp::Socket one(socket(port.family(), SOCK_STREAM, 0));
      CHECK(::connect(one.get(), port.raw(), port.bytes()) == 0);
      CHECK(send(one.get(), words.data(), words.size(), 0) == static_cast<ssize_t>(words.size()));
      strangers.push_back(std::move(one));
    }
  }
  meet(nodes);
  std::thread liar;
  if (me == nodes - 1) {
    liar = std::thread([&] {  // a stranger that returns the member's own proof
      const tcp::Socket one(socket(port.family(), SOCK_STREAM, 0));
      CHECK(::connect(one.get(), port.raw(), port.bytes()) == 0);
      tcp::Hello hello;
      hello.kind = tcp::kControl;
      hello.member = 1;
      hello.members = nodes;
      tcp::Answer answer;
      CHECK(send(one.get(), &hello, sizeof hello, 0) == sizeof hello);
      CHECK(recv(one.get(), &answer, sizeof answer, MSG_WAITALL) == sizeof answer);
      CHECK(answer.hello.member == 0 && !equal(answer.proof, kKey) && !equal(answer.proof, Key{}));
      CHECK(send(one.get(), answer.proof.data(), answer.proof.size(), 0) == sizeof answer.proof);
      char byte;
      CHECK(recv(one.get(), &byte, 1, 0) <= 0);  // refused
      board->flag = 1;
    });
  }
  while (me > 0 && !board->flag) sleep_ms(1);  // node 0 listens until all others are connected
  net->connect(addresses, me, kKey, 20'000);
  if (liar.joinable()) liar.join();
  std::list<Item> items;
  for (int k = 1; k < nodes; ++k) {
    items.push_back({1, (me + k) % nodes, true, Bytes(100'003)});
    post(*net, items.back());
    items.push_back({1, (me - k + nodes) % nodes, false, Bytes(100'003)});
    post(*net, items.back());
  }
  finish(*net, items);
  meet(nodes);
  if (me == nodes - 1) {  // the listener is closed by now
    const tcp::Socket late(socket(port.family(), SOCK_STREAM, 0));
    CHECK(::connect(late.get(), port.raw(), port.bytes()) != 0 && errno == ECONNREFUSED);
  }
}

// A node that is done leaves at once: its messages arrive, the others continue without it, and only
// nodes that still need it get an error.
void leaving_in_order(int nodes) {
  std::unique_ptr<Transport> net = join(nodes);
  auto message = [](int node, bool send) { return Item{7, node, send, Bytes(700'001)}; };
  std::list<Item> items;
  if (me == 0) {
    for (int node = 1; node < nodes; ++node) {
      items.push_back(message(node, true));
      post(*net, items.back());
    }
    finish(*net, items);
    net.reset();
    meet(nodes);
    meet(nodes);
    return;
  }
  items.push_back(message(0, false));
  post(*net, items.back());
  while (!items.back().request.done) net->poll(1000);
  finish(*net, items);
  meet(nodes);
  for (int i = 0; i < 8; ++i) {  // longer than the grace period for vanished nodes
    sleep_ms(100);
    items.push_back(message(3 - me, true));
    post(*net, items.back());
    items.push_back(message(3 - me, false));
    post(*net, items.back());
    finish(*net, items);
  }
  Request request;
  Bytes large(8 << 20);  // too large for the socket buffers of a closed connection
  if (me == 1)
    net->post_receive(0, large.data(), 1, &request);
  else
    net->post_send(0, large.data(), large.size(), &request);
  const LinkFailure failure = await_failure(*net);
  CHECK(failure.node == 0 && says(failure, "connection closed by node 0"));
  meet(nodes);
}

// A node that leaves in the middle of a transfer has not left in order: all nodes get an error.
void leaving_in_the_middle(int nodes) {
  std::unique_ptr<Transport> net = join_together(nodes);
  if (me == 1) {
    char byte;
    Request request;
    net->post_receive(0, &byte, 1, &request);
    net.reset();
  } else {
    const LinkFailure failure = await_failure(*net);
    CHECK(failure.node == 1 && says(failure, "connection closed by node 1"));
  }
  meet(nodes);
}

// The sender leaves in order, from its point of view, after a part of the receiver's data.
void part_of_a_message(int nodes) {
  std::unique_ptr<Transport> net = join_together(nodes);
  Bytes bytes(2);
  Request request;
  if (me == 0) {
    net->post_send(1, bytes.data(), 1, &request);
    await(*net, request);
    net.reset();
  } else {
    sleep_ms(200);
    net->post_receive(0, bytes.data(), 2, &request);
    CHECK(await_failure(*net).node == 0 && !request.done);
  }
  meet(nodes);
}

// Completed sends arrive even if the sender is gone before they are received.
void last_words_arrive(int nodes) {
  std::unique_ptr<Transport> net = join_together(nodes);
  for (const size_t bytes : {1, 10'007, 30'011}) {
    std::list<Item> items;
    items.push_back({bytes, 1 - me, me == 0, Bytes(bytes)});
    if (me == 1) sleep_ms(100);
    post(*net, items.back());
    finish(*net, items);
  }
}

void nothing_leaks(int nodes) {
  auto open_files = [] {
    using Directory = std::filesystem::directory_iterator;
    return std::distance(Directory("/proc/self/fd"), Directory());
  };
  auto cycle = [=] {
    const std::unique_ptr<Transport> net = join(nodes);
    std::list<Item> items;
    items.push_back({1, (me + 1) % nodes, true, Bytes(50'000)});
    items.push_back({1, (me + nodes - 1) % nodes, false, Bytes(50'000)});
    for (Item &item : items) post(*net, item);
    finish(*net, items);
  };
  cycle();
  const auto before = open_files();
  for (int i = 0; i < 50; ++i) cycle();
  CHECK(open_files() == before);
}

void wakes_up(int nodes) {
  const std::unique_ptr<Transport> net = join(nodes);
  const Fd bell(eventfd(0, EFD_CLOEXEC));
  net->wake_on(bell.get());
  CHECK(!net->poll(1000));
  std::thread ringer([&] {
    sleep_ms(50);
    eventfd_write(bell.get(), 1);
  });
  CHECK(!net->poll(2'000'000'000));  // the scenario's alarm fires if nothing wakes it
  ringer.join();
  eventfd_t count;
  CHECK(eventfd_read(bell.get(), &count) != 0 && errno == EAGAIN);
  net->wake_on(-1);
  eventfd_write(bell.get(), 1);
  CHECK(!net->poll(1000) && eventfd_read(bell.get(), &count) == 0);
  meet(nodes);
}

void misuse_is_named(int nodes) {
  const std::unique_ptr<Transport> net = join(nodes);
  char byte = 0;
  Request request;
  for (const int node : {-1, me, nodes}) {
    try {
      net->post_send(node, &byte, 1, &request);
      CHECK(!"sent to nobody");
    } catch (const std::runtime_error &error) {
      CHECK(says(error, "no link"));
    }
  }
  meet(nodes);
}

// A receiver that computes for long fills its window, which is no failure. (Slow: it must outlast
// every timeout of the sockets.)
void a_busy_receiver_is_waited_for(int nodes) {
  const std::unique_ptr<Transport> net = join(nodes);
  std::list<Item> items;
  items.push_back({9, 1 - me, me == 0, Bytes(30 << 20)});
  if (me == 1) sleep_ms(25'000);
  post(*net, items.back());
  finish(*net, items);
}

// --- one process ------------------------------------------------------------------------------

void interfaces_are_chosen(int) {
  setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "lo", 1);
  CHECK(tcp::host_text(tcp::choose_interface().address) == "127.0.0.1");
  setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "nosuch0", 1);
  try {
    create();
    CHECK(!"made without an interface");
  } catch (const std::runtime_error &error) {
    CHECK(says(error, "NEARLINEAR_COLLECTIVES_INTERFACE") && says(error, "nosuch0") &&
          says(error, "lo"));
  }
  unsetenv("NEARLINEAR_COLLECTIVES_INTERFACE");
  setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo", 1);
  CHECK(tcp::choose_interface().name == "lo");
  unsetenv("GLOO_SOCKET_IFNAME");
  CHECK(!tcp::choose_interface().name.empty());
  for (const char *text : {"10.0.0.3:4711", "[fd00::3]:4711", "[::1]:65535"})
    CHECK(tcp::address_text(tcp::parse_address(text)) == text);
  for (const char *text : {"", "10.0.0.3", "10.0.0.3:", "10.0.0.3:99999", "::1:80", "host:80"}) {
    try {
      tcp::parse_address(text);
      CHECK(!"parsed nonsense");
    } catch (const std::runtime_error &) {
    }
  }
}

void unknown_transports_are_named(int) {
  try {
    make_transport("pigeon");
    CHECK(!"made a pigeon");
  } catch (const std::runtime_error &error) {
    CHECK(says(error, "pigeon") && says(error, "tcp"));
  }
}

struct Scenario {
  const char *name;
  void (*run)(int nodes);
  std::vector<int> nodes;
  int dies = -1;      // node that dies
  bool slow = false;  // runs only if it is named
};

const std::vector<Scenario> scenarios = {
    {"random_schedules", random_schedules, {2, 3, 5}},
    {"all_to_all", all_to_all, {1, 2, 4}},
    {"a_busy_destination_holds_nobody_up", a_busy_destination_holds_nobody_up, {3}},
    {"give_up_reaches_all", give_up_reaches_all, {4}},
    {"the_end_of_a_row_is_blamed", the_end_of_a_row_is_blamed, {4}},
    {"killed_while_busy", killed_while_busy, {2, 3, 3, 3, 4}, 1},
    {"killed_while_idle", killed_while_idle, {3}, 1},
    {"killed_with_a_child", killed_with_a_child, {3}, 1},
    {"killed_before_connecting", killed_before_connecting, {3}, 1},
    {"killed_while_connecting", killed_while_connecting, {3, 3, 3, 3, 3, 3}, 1},
    {"the_dead_is_blamed_not_its_finder", the_dead_is_blamed_not_its_finder, {3}, 1},
    {"a_missing_node_is_named", a_missing_node_is_named, {3}},
    {"a_failed_start_is_told", a_failed_start_is_told, {3}},
    {"strangers_are_ignored", strangers_are_ignored, {3}},
    {"another_key_is_refused", another_key_is_refused, {2}},
    {"leaving_in_order", leaving_in_order, {3}},
    {"leaving_in_the_middle", leaving_in_the_middle, {3}},
    {"part_of_a_message", part_of_a_message, {2}},
    {"last_words_arrive", last_words_arrive, {2}},
    {"nothing_leaks", nothing_leaks, {3}},
    {"wakes_up", wakes_up, {2}},
    {"misuse_is_named", misuse_is_named, {2}},
    {"interfaces_are_chosen", interfaces_are_chosen, {1}},
    {"unknown_transports_are_named", unknown_transports_are_named, {1}},
    {"a_busy_receiver_is_waited_for", a_busy_receiver_is_waited_for, {2}, -1, true},
};

bool run(const Scenario &scenario, int nodes) {
  board =
      new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
          Board{};
  std::vector<pid_t> processes;
  for (int node = 0; node < nodes; ++node) {
    processes.push_back(fork());
    if (processes.back() != 0) continue;
    me = node;
    alarm(120);  // treat a hang as a failure
    try {
      scenario.run(nodes);
    } catch (const std::exception &error) {
      std::fprintf(stderr, "node %d: %s\n", me, error.what());
      std::exit(1);
    }
    std::exit(0);
  }
  bool good = true;
  for (int node = 0; node < nodes; ++node) {
    int status = 0;
    waitpid(processes[static_cast<size_t>(node)], &status, 0);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (node == scenario.dies ? killed : WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    std::fprintf(stderr, "%s: node %d of %d ended with status %#x\n", scenario.name, node, nodes,
                 status);
    good = false;
    for (const pid_t process : processes) kill(process, SIGKILL);
  }
  munmap(board, sizeof(Board));
  return good;
}

}  // namespace

int main(int count, char **arguments) {
  setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "lo", 0);
  if (count > 1) transport_name = arguments[1];
  const std::vector<std::string> named(arguments + std::min(count, 2), arguments + count);
  try {
    create();
  } catch (const std::exception &error) {
    std::printf("%s\n", error.what());
    return 77;
  }
  int failures = 0, ran = 0;
  for (const Scenario &scenario : scenarios) {
    const auto listed = [&](const std::string &name) {
      return std::find(named.begin(), named.end(), name) != named.end();
    };
    const bool by_name = !named.empty() && named[0][0] != '-';
    if (by_name ? !listed(scenario.name)
                : scenario.slow || listed('-' + std::string(scenario.name)))
      continue;
    for (const int nodes : scenario.nodes) {
      const Clock::time_point start = Clock::now();
      const bool good = run(scenario, nodes);
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      std::printf("%s %s, %d nodes (%.2f s)\n", good ? "ok  " : "FAIL", scenario.name, nodes,
                  seconds);
      std::fflush(stdout);
      failures += !good;
      ++ran;
    }
  }
  return ran == 0 || failures > 0;
}
