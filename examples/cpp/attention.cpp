// Attention over a sequence that is sharded over the ranks of your own MPI program, in C++17. The
// program compares the output with the output of one rank alone: they are bitwise equal.
//
//   mpicxx -std=c++17 attention.cpp -lulysses && mpirun -n 4 ./a.out
//   mpirun -n 4 ./a.out 3            on a communicator of the first three ranks
#include <mpi.h>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "ulysses.hpp"

constexpr std::int64_t seq = 100, heads = 8, dim = 16;

// attend returns out [rows, heads, dim] of this rank, whose first token is lo.
static std::vector<float> attend(const ulysses::context &context, std::int64_t &lo) {
  auto desc = ulysses::init<ulysses_attention_desc>();
  desc.dtype = ULYSSES_F32, desc.flags = ULYSSES_CAUSAL, desc.heads = heads, desc.kv_heads = heads / 4,
  desc.head_dim = dim;
  auto plan = ulysses::attention(context, desc);
  auto lengths = ulysses::init<ulysses_batch_desc>();
  lengths.batch = 1, lengths.seq = seq;
  auto batch = ulysses::lengths(context, lengths);
  auto info = ulysses::query(batch);
  lo = info.lo[0];

  ulysses::floats q({1, info.rows, heads, dim}), k({1, info.rows, heads / 4, dim}), v({1, info.rows, heads / 4, dim}),
      out({1, info.rows, heads, dim});
  auto fill = [&](ulysses::floats &x, std::int64_t width, int seed) {
    for (std::int64_t i = 0; i < x.size(); i++)
      x[i] = static_cast<float>((seed + 13 * (lo * width * dim + i)) % 101) / 101 - 0.5f;
  };
  fill(q, heads, 1), fill(k, heads / 4, 2), fill(v, heads / 4, 3);
  auto args = ulysses::init<ulysses_attention_args>();
  // saved is NULL: no backward pass follows
  args.q = q.view(), args.k = k.view(), args.v = v.view(), args.out = out.view();
  ulysses::check(ulysses_attention_forward(plan.get(), batch.get(), &args));
  return {out.data(), out.data() + out.size()};
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, size, any = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int used = argc < 2 ? INT_MAX : std::atoi(argv[1]);
  if (used < 1) {
    if (rank == 0) std::fprintf(stderr, "usage: %s [N]    N: use the first N ranks, 1 or more\n", argv[0]);
    MPI_Finalize();
    return 1;
  }
  MPI_Comm group; // your communicator, of any ranks
  MPI_Comm_split(MPI_COMM_WORLD, rank < used ? 0 : MPI_UNDEFINED, rank, &group);
  if (group == MPI_COMM_NULL) {
    MPI_Finalize();
    return 0;
  }
  MPI_Comm_size(group, &size);
  try {
    auto ranks = ulysses::mpi(MPI_Comm_c2f(group));
    auto alone = ulysses::local();
    std::int64_t lo, zero;
    auto shard = attend(ranks, lo), whole = attend(alone, zero);
    int differ = std::memcmp(shard.data(), whole.data() + lo * heads * dim, shard.size() * sizeof(float)) != 0;
    MPI_Allreduce(&differ, &any, 1, MPI_INT, MPI_MAX, group);
    if (rank == 0) std::printf("%d ranks: out is %s the output of one rank\n", size, any ? "NOT" : "equal to");
  } catch (const ulysses::error &e) {
    std::fprintf(stderr, "%s: %s\n", ulysses_status_string(e.code), e.what());
    MPI_Abort(MPI_COMM_WORLD, e.code);
  }
  MPI_Comm_free(&group);
  MPI_Finalize();
  return any;
}
