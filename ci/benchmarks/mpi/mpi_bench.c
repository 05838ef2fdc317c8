/* Any MPI library; its launcher starts the ranks. */
#include <mpi.h>

#include "measure.h"

static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

static void maximum(double *values, int count) {
  MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}

static void run(const struct collective *call) { /* MPI aborts on errors by default */
  const int count = (int)call->count;
  switch (call->operation) {
    case ALL_GATHER:
      MPI_Allgather(call->input, count, MPI_FLOAT, call->output, count, MPI_FLOAT, MPI_COMM_WORLD);
      break;
    case REDUCE_SCATTER:
      MPI_Reduce_scatter_block(call->input, call->output, count, MPI_FLOAT, MPI_SUM,
                               MPI_COMM_WORLD);
      break;
    default: MPI_Allreduce(MPI_IN_PLACE, call->output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  struct contender contender = {
      .moves_data = 1, .barrier = barrier, .maximum = maximum, .run = run};
  MPI_Comm_rank(MPI_COMM_WORLD, &contender.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &contender.ranks);
  const int status = measure(&contender, argc, argv);
  MPI_Finalize();
  return status;
}
