// Latency between two cores: a cache line moves back and forth between them.
//
//   core_distance FIRST SECOND MEASUREMENTS     prints one-way nanoseconds, a line per measurement
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 5000 };

static _Alignas(64) atomic_long ping, pong;
static long total_rounds;

static void pin_to(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (pthread_setaffinity_np(pthread_self(), sizeof cores, &cores) != 0) {
    fprintf(stderr, "core %d cannot be used\n", core);
    exit(1);
  }
}

static void *answer(void *core) {
  pin_to((int)(intptr_t)core);
  for (long i = 1; i <= total_rounds; ++i) {
    while (atomic_load(&ping) != i) {
    }
    atomic_store(&pong, i);
  }
  return NULL;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **arguments) {
  if (count != 4) {
    fprintf(stderr, "usage: %s FIRST SECOND MEASUREMENTS\n", arguments[0]);
    return 2;
  }
  const int measurements = atoi(arguments[3]);
  total_rounds = (long)measurements * ROUNDS;
  pthread_t other;
  pthread_create(&other, NULL, answer, (void *)(intptr_t)atoi(arguments[2]));
  pin_to(atoi(arguments[1]));
  for (long round = 1; round <= total_rounds;) {
    const double start = seconds();
    for (int i = 0; i < ROUNDS; ++i, ++round) {
      atomic_store(&ping, round);
      while (atomic_load(&pong) != round) {
      }
    }
    printf("%.0f\n", (seconds() - start) / (2 * ROUNDS) * 1e9);
    fflush(stdout);
  }
  return pthread_join(other, NULL);
}
