#define _GNU_SOURCE
#include "measure.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const names[OPERATIONS] = {"all_gather", "reduce_scatter", "all_reduce"};

static const char usage[] =
    "usage: OPERATION BYTES[,BYTES...] BLOCKS BLOCK_SECONDS LIMIT_SECONDS\n"
    "  OPERATION      all_gather, reduce_scatter or all_reduce, over float32\n"
    "  BYTES          of all ranks' data: the output of all_gather, the input of the others\n"
    "  BLOCKS         blocks of back-to-back calls for each size, BLOCK_SECONDS each or 2 calls\n"
    "  LIMIT_SECONDS  once a call takes longer, larger sizes are left out\n"
    "Prints per size: operation bytes calls wrong seconds-per-call-of-each-block...\n";

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

/* The input of a rank. Sums over a few thousand ranks stay exact in float32. */
static float value(int rank, size_t i) { return (float)((rank * 7 + i) % 31 + 1); }

static size_t input_count(const struct contender *c, const struct collective *call) {
  switch (call->operation) {
    case ALL_GATHER: return call->count;
    case REDUCE_SCATTER: return call->count * c->ranks;
    default: return 0;
  }
}

static size_t output_count(const struct contender *c, const struct collective *call) {
  return call->operation == ALL_GATHER ? call->count * c->ranks : call->count;
}

static float expected(const struct contender *c, const struct collective *call, size_t i) {
  if (call->operation == ALL_GATHER) return value((int)(i / call->count), i % call->count);
  if (call->operation == REDUCE_SCATTER) i += call->count * c->rank;
  float sum = 0;
  for (int rank = 0; rank < c->ranks; rank++) sum += value(rank, i);
  return sum;
}

/* Make one call on new data and return the number of wrong elements of all ranks' outputs. */
static double wrong_elements(const struct contender *c, const struct collective *call) {
  const size_t count = output_count(c, call);
  if (call->operation == ALL_REDUCE) {
    for (size_t i = 0; i < count; i++) call->output[i] = value(c->rank, i);
  } else {
    memset(call->output, 0xff, count * sizeof(float)); /* detect unwritten elements */
  }
  c->barrier();
  c->run(call);
  double wrong = 0;
  for (size_t i = 0; i < count; i++) wrong += call->output[i] != expected(c, call, i);
  c->maximum(&wrong, 1);
  return wrong;
}

/* Run a block of back-to-back calls and return the seconds per call on this rank. */
static double block(const struct contender *c, const struct collective *call, int calls) {
  c->barrier();
  const double start = now();
  for (int i = 0; i < calls; i++) c->run(call);
  return (now() - start) / calls;
}

static float *memory(const struct contender *c, size_t count) {
  void *found = NULL;
  const size_t bytes = (count * sizeof(float) + 4096) & ~(size_t)4095;
  if (c->allocate) {
    found = c->allocate(bytes);
  } else if (posix_memalign(&found, 4096, bytes)) {
    found = NULL;
  }
  if (!found) {
    fprintf(stderr, "rank %d: no memory for %zu bytes\n", c->rank, bytes);
    exit(1);
  }
  memset(found, 0, bytes);
  return found;
}

/* Measure one size and return the seconds of a call, for the limit. */
static double size(const struct contender *c, enum operation operation, size_t bytes, int blocks,
                   double block_seconds) {
  struct collective call = {.operation = operation, .count = bytes / sizeof(float)};
  if (operation != ALL_REDUCE) call.count /= c->ranks;
  float *input = memory(c, input_count(c, &call)), *output = memory(c, output_count(c, &call));
  call.input = input;
  call.output = output;
  for (size_t i = 0; i < input_count(c, &call); i++) input[i] = value(c->rank, i);

  double wrong = c->moves_data ? wrong_elements(c, &call) : 0;
  if (operation == ALL_REDUCE) memset(output, 0, call.count * sizeof(float)); /* sums stay 0 */
  double call_seconds = block(c, &call, 1);
  c->maximum(&call_seconds, 1);
  if (call_seconds < block_seconds / 4) { /* the first call may be much slower */
    call_seconds = block(c, &call, 3);
    c->maximum(&call_seconds, 1);
  }
  const int calls = (int)fmin(fmax(ceil(block_seconds / call_seconds), 2), 100000);
  double *times = calloc(blocks, sizeof *times);
  for (int i = 0; i < blocks; i++) times[i] = block(c, &call, calls);
  c->maximum(times, blocks);
  if (c->moves_data) wrong += wrong_elements(c, &call);

  if (c->rank == 0) {
    printf("%s %zu %d %.0f", names[operation], bytes, calls, wrong);
    for (int i = 0; i < blocks; i++) printf(" %.9f", times[i]);
    printf("\n");
    fflush(stdout);
  }
  free(times);
  (c->release ? c->release : free)(input);
  (c->release ? c->release : free)(output);
  return call_seconds;
}

int measure(const struct contender *c, int argc, char **argv) {
  int operation = 0;
  while (argc == 6 && operation < OPERATIONS && strcmp(argv[1], names[operation])) operation++;
  if (argc != 6 || operation == OPERATIONS || atoi(argv[3]) < 1) {
    if (c->rank == 0) fputs(usage, stderr);
    return 2;
  }
  char *rest = argv[2];
  double seconds = 0;
  while (*rest && seconds <= atof(argv[5])) {
    const size_t bytes = strtoull(rest, &rest, 10);
    seconds = size(c, (enum operation)operation, bytes, atoi(argv[3]), atof(argv[4]));
    if (*rest) rest++;
  }
  return 0;
}
