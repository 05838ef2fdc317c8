// How far apart two cores are: a cache line goes to and fro between them.
//
//   distance FIRST SECOND MEASUREMENTS     prints nanoseconds one way, one line per measurement
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
static long rounds_in_all;

static void stay_on(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (pthread_setaffinity_np(pthread_self(), sizeof cores, &cores) != 0) {
    fprintf(stderr, "core %d cannot be used\n", core);
    exit(1);
  }
}

static void *answer(void *core) {
  stay_on((int)(intptr_t)core);
  for (long i = 1; i <= rounds_in_all; ++i) {
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
  rounds_in_all = (long)measurements * ROUNDS;
  pthread_t other;
  pthread_create(&other, NULL, answer, (void *)(intptr_t)atoi(arguments[2]));
  stay_on(atoi(arguments[1]));
  for (long round = 1; round <= rounds_in_all;) {
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
