/* Lower bound of all_gather on one machine: every rank copies its whole output out of shared
 * memory, without synchronization.
 *
 * usage: memcpy_bench RANKS plain|stream ARGUMENTS...   (arguments of measure.c)
 * plain: the C library's memcpy; stream: non-temporal stores, which bypass the caches.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "measure.h"
#include "ranks.h"

static int argument_count;
static char **argument_values;
static const char *shards;
static int all_ranks, stream;

static void copy(char *to, const char *from, size_t bytes) {
#ifdef __SSE2__
  if (stream) {
    const size_t lines = bytes / 64;
    for (size_t i = 0; i < lines; i++, from += 64, to += 64) {
      const __m128i *source = (const __m128i *)from;
      __m128i *target = (__m128i *)to;
      const __m128i a = _mm_load_si128(source), b = _mm_load_si128(source + 1);
      const __m128i c = _mm_load_si128(source + 2), d = _mm_load_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
    bytes %= 64;
  }
#endif
  memcpy(to, from, bytes);
}

static void run(const struct collective *call) {
  copy((char *)call->output, shards, call->count * sizeof(float) * all_ranks);
}

static size_t largest(const char *sizes) {
  size_t found = 0;
  while (*sizes) {
    char *rest;
    const size_t bytes = strtoull(sizes, &rest, 10);
    if (bytes > found) found = bytes;
    sizes = *rest ? rest + 1 : rest;
  }
  return found;
}

static int rank_main(int rank, int ranks, void *shared) {
  shards = shared;
  all_ranks = ranks;
  stream = !strcmp(argument_values[2], "stream");
  const struct contender contender = {.rank = rank,
                                      .ranks = ranks,
                                      .moves_data = 0,
                                      .barrier = ranks_barrier,
                                      .maximum = ranks_maximum,
                                      .run = run};
  return measure(&contender, argument_count - 2, argument_values + 2);
}

int main(int argc, char **argv) {
  if (argc < 5 || strcmp(argv[3], "all_gather")) {
    fprintf(stderr, "usage: memcpy_bench RANKS plain|stream all_gather BYTES ...\n");
    return 2;
  }
  argument_count = argc;
  argument_values = argv;
  return run_ranks(atoi(argv[1]), largest(argv[4]), rank_main);
}
