// Runs a program: one call a step, its nodes one after another, each by all threads together.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "isa.h"
#include "team.h"

namespace hybridtrt {

#define KERNEL(name) #name,
static const char* const NAMES[] = {
#include "kernels.def"
};
#undef KERNEL
constexpr int NUM_KERNELS = sizeof(NAMES) / sizeof(NAMES[0]);

HT_IN_EACH_ISA(extern const Kernel TABLE[];)

// In the order of SPACES in library.py.
enum Space : int64_t {
  TOKENS,
  LOGIT_ROWS,
  ONE_ROW,
  INPUT_IDS,
  POSITIONS,
  OUTPUT,
  EXTERNAL_TOKENS,
  EXTERNAL_LOGIT_ROWS,
  EXTERNAL_ONE_ROW
};

extern "C" {

// A value as a window of the arena: `offset` and `column` are numbers; a buffer of n rows begins at n * offset. Where
// it lies outside the arena, `offset` is its address.
struct HtOperand {
  int64_t space, offset, column, row_stride, rank, dims[3];
};

struct HtNode {
  const char* op;
  int64_t num_inputs, num_outputs, num_weights, num_caches, num_attributes;
  const HtOperand *inputs, *outputs;
  const Weight* weights;
  const Cache* caches;
  const double* attributes;
};

struct HtOptions {
  // widths: numbers of the arena for each row of either kind, and for any step
  int64_t threads, isa, poison, token_width, logits_width, step_width;
};
}

struct Node {
  Kernel kernel;
  std::vector<Weight> weights;
  std::vector<Cache> caches;
  std::vector<double> attributes;
  Call call;
  int64_t nanoseconds = 0;
};

struct Program {
  explicit Program(const HtOptions& options)
      : options(options), shared(int(options.threads)), teams(size_t(options.threads)) {
    shared.poison = options.poison != 0;
    for (int i = 0; i < shared.threads; ++i) teams[size_t(i)] = Team{i, shared.threads, &shared, 0, nullptr, 0, 0};
    for (int i = 1; i < shared.threads; ++i) workers.emplace_back([this, i] { work(i); });
  }

  ~Program() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
      job.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }

  void work(int rank) {
    uint64_t done = 0;
    for (;;) {
      for (int spins = 0; spins < SPINS && job.load(std::memory_order_acquire) == done; ++spins) pause();
      if (job.load(std::memory_order_acquire) == done) {
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait(lock, [&] { return job.load(std::memory_order_acquire) != done; });
      }
      ++done;
      if (stopping) return;
      run_nodes(rank);
    }
  }

  void run_nodes(int rank) {
#if defined(__x86_64__)
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);  // states that fade away would crawl through denormal numbers
#endif
    Team& team = teams[size_t(rank)];
    auto before = std::chrono::steady_clock::now();
    for (auto& node : nodes) {
      node.kernel(step, node.call, team);
      team_wait(team);
      if (profiling && rank == 0) {
        const auto after = std::chrono::steady_clock::now();
        node.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count();
        before = after;
      }
    }
#if defined(__x86_64__)
    _mm_setcsr(control);
#endif
  }

  void bind(const HtOperand& o, Tensor& t) {
    const bool of_logits = o.space == LOGIT_ROWS || o.space == OUTPUT || o.space == EXTERNAL_LOGIT_ROWS;
    const bool single = o.space == ONE_ROW || o.space == EXTERNAL_ONE_ROW;
    t.rows = single ? 1 : of_logits ? step.num_logits : step.num_tokens;
    t.row_stride = o.row_stride;
    t.rank = o.rank;
    std::copy(o.dims, o.dims + 3, t.dims);
    float* single_rows = reinterpret_cast<float*>(arena.data);
    float* tokens = single_rows + options.step_width;
    switch (o.space) {
      case ONE_ROW: t.data = single_rows + o.offset + o.column; break;
      case TOKENS: t.data = tokens + o.offset * step.num_tokens + o.column; break;
      case LOGIT_ROWS:
        t.data = tokens + options.token_width * step.num_tokens + o.offset * step.num_logits + o.column;
        break;
      case INPUT_IDS: t.data = const_cast<int32_t*>(step.input_ids); break;
      case POSITIONS: t.data = const_cast<int32_t*>(step.positions); break;
      case OUTPUT: t.data = output + o.column; break;
      default: t.data = reinterpret_cast<float*>(o.offset) + o.column;
    }
  }

  // A step of the size of the last one moves only what lies outside the arena.
  void bind_all() {
    const Bound now = {arena.data, step.num_tokens, step.num_logits};
    const bool same = now.arena == bound.arena && now.tokens == bound.tokens && now.logits == bound.logits;
    if (same)
      for (size_t i : outside) bind(operands[i], tensors[i]);
    else
      for (size_t i = 0; i < operands.size(); ++i) bind(operands[i], tensors[i]);
    bound = now;
  }

  void run(const Step& batch, float* logits) {
    step = batch;
    output = logits;
    const int64_t numbers =
        options.step_width + options.token_width * step.num_tokens + options.logits_width * step.num_logits;
    arena.at_least(size_t(std::max<int64_t>(numbers, 1)) * 4);
    if (shared.poison) fill_nan(arena.data, arena.bytes);
    token_rows.resize(size_t(step.num_tokens));
    for (int64_t row = 0; row < step.num_sequences; ++row)
      std::fill(token_rows.begin() + step.cu_seqlens[row], token_rows.begin() + step.cu_seqlens[row + 1], int32_t(row));
    step.token_rows = token_rows.data();
    bind_all();
    if (shared.threads > 1) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        job.fetch_add(1, std::memory_order_release);
      }
      wake.notify_all();
    }
    run_nodes(0);
  }

  struct Bound {
    const char* arena;
    int64_t tokens, logits;
  };

  const HtOptions options;
  std::vector<Node> nodes;
  std::vector<HtOperand> operands;  // of all nodes: of each its inputs, then its outputs
  std::vector<Tensor> tensors;      // the same in this step
  std::vector<size_t> outside;      // those that do not lie in the arena
  Bound bound{};
  Shared shared;
  std::vector<Team> teams;
  Buffer arena;
  std::vector<int32_t> token_rows;
  Step step{};
  float* output = nullptr;
  bool profiling = false;

  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> job{0};
  bool stopping = false;
};

extern "C" {

// A program of copies of the nodes; weights and caches stay the caller's. Null, with a message, where that fails.
HT_API Program* ht_create(const HtOptions* options, const HtNode* nodes, int64_t count, char* message,
                          int64_t message_bytes) {
  auto fail = [&](const std::string& text) -> Program* {
    std::strncpy(message, text.c_str(), size_t(message_bytes) - 1);
    message[message_bytes - 1] = 0;
    return nullptr;
  };
  if (!ht_supported(options->isa))
    return fail("this machine does not run instruction set " + std::to_string(options->isa));
  const Kernel* table = HT_OF_ISA(options->isa, TABLE);
  try {
    std::vector<Node> built;
    for (int64_t i = 0; i < count; ++i) {
      const HtNode& n = nodes[i];
      const auto* name = std::find_if(NAMES, NAMES + NUM_KERNELS, [&](const char* x) { return !std::strcmp(x, n.op); });
      if (name == NAMES + NUM_KERNELS) return fail(std::string("there is no kernel of op ") + n.op);
      Node node{};
      node.kernel = table[name - NAMES];
      node.weights.assign(n.weights, n.weights + n.num_weights);
      node.caches.assign(n.caches, n.caches + n.num_caches);
      node.attributes.assign(n.attributes, n.attributes + n.num_attributes);
      built.push_back(std::move(node));
    }
    auto program = std::make_unique<Program>(*options);
    for (int64_t i = 0; i < count; ++i) {
      auto& all = program->operands;
      all.insert(all.end(), nodes[i].inputs, nodes[i].inputs + nodes[i].num_inputs);
      all.insert(all.end(), nodes[i].outputs, nodes[i].outputs + nodes[i].num_outputs);
    }
    for (size_t i = 0; i < program->operands.size(); ++i)
      if (program->operands[i].space > ONE_ROW) program->outside.push_back(i);
    program->tensors.resize(program->operands.size());
    program->nodes = std::move(built);
    const Tensor* next = program->tensors.data();
    for (int64_t i = 0; i < count; ++i) {
      Node& node = program->nodes[size_t(i)];
      node.call = Call{next, nodes[i].num_inputs, next + nodes[i].num_inputs, node.weights.data(), node.caches.data(),
                       node.attributes.data()};
      next += nodes[i].num_inputs + nodes[i].num_outputs;
    }
    return program.release();
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

// Run one step; logits [num_logits, vocab]. 0, or -1 where memory for the arena is missing.
HT_API int ht_step(Program* program, const Step* step, float* logits) {
  try {
    program->run(*step, logits);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Where the arena is after a step; the next one may move it.
HT_API const float* ht_arena(const Program* program) { return reinterpret_cast<const float*>(program->arena.data); }

// Bytes of the arena and of all scratch memory.
HT_API int64_t ht_working_bytes(const Program* program) {
  size_t bytes = program->arena.bytes + program->shared.workspace.bytes;
  for (const auto& buffer : program->shared.scratch) bytes += buffer.bytes;
  return int64_t(bytes);
}

// Begin to time nodes, or stop; either sets the times back.
HT_API void ht_profile(Program* program, int64_t on) {
  program->profiling = on != 0;
  for (auto& node : program->nodes) node.nanoseconds = 0;
}

// The nanoseconds of each node since then.
HT_API void ht_times(const Program* program, int64_t* nanoseconds) {
  for (size_t i = 0; i < program->nodes.size(); ++i) nanoseconds[i] = program->nodes[i].nanoseconds;
}

HT_API void ht_free(Program* program) { delete program; }
}

}  // namespace hybridtrt
