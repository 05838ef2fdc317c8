/* The engine through its C interface, with ranks as forked processes.
 *
 * usage: engine_bench RANKS private|pool ARGUMENTS...   (arguments of measure.c)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "nearlinear_collectives.h"
#include "ranks.h"

static int argument_count;
static char **argument_values;
static nlc_group *group;

static void must(int32_t status, const char *what) {
  if (status == NLC_OK) return;
  fprintf(stderr, "%s: %s\n", what, nlc_error());
  exit(1);
}

static void barrier(void) {
  const nlc_call call = {.kind = NLC_BARRIER, .scale = 1.0, .timeout_ms = NLC_ANY_TIMEOUT};
  must(nlc_run(group, &call), "barrier");
}

static void run(const struct collective *c) {
  static const int32_t kinds[OPERATIONS] = {NLC_ALL_GATHER, NLC_REDUCE_SCATTER, NLC_ALL_REDUCE};
  const nlc_call call = {.kind = kinds[c->operation],
                         .dtype = NLC_FLOAT32,
                         .reduce = NLC_SUM,
                         .count = c->count,
                         .scale = 1.0,
                         .input = c->operation == ALL_REDUCE ? c->output : c->input,
                         .output = c->output,
                         .timeout_ms = NLC_ANY_TIMEOUT};
  must(nlc_run(group, &call), "run");
}

static int rank_main(int rank, int ranks, void *peer_infos) {
  const nlc_options options = {
      .rank = rank, .size = ranks, .timeout_ms = 60000, .name = "engine_bench"};
  must(nlc_group_open(&options, (unsigned char *)peer_infos + rank * NLC_PEER_INFO_BYTES, &group),
       "open");
  ranks_barrier(); /* all ranks have written their peer infos */
  must(nlc_group_connect(group, peer_infos, 60000), "connect");
  struct contender contender = {.rank = rank,
                                .ranks = ranks,
                                .moves_data = 1,
                                .barrier = barrier,
                                .maximum = ranks_maximum,
                                .run = run};
  if (!strcmp(argument_values[2], "pool")) {
    contender.allocate = nlc_pool_allocate;
    contender.release = nlc_pool_free;
  }
  const int status = measure(&contender, argument_count - 2, argument_values + 2);
  barrier();
  nlc_group_close(group);
  return status;
}

int main(int argc, char **argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: engine_bench RANKS private|pool OPERATION ...\n");
    return 2;
  }
  argument_count = argc;
  argument_values = argv;
  const int ranks = atoi(argv[1]);
  return run_ranks(ranks, (size_t)(ranks > 0 ? ranks : 0) * NLC_PEER_INFO_BYTES, rank_main);
}
