// llama_worker MODEL.gguf THREADS: llama.cpp behind protocol.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <chrono>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "llama.h"

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] static void fail(const char* what) {
  std::printf("{\"error\": \"%s\"}\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

static void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

static double peak_mb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::strtod(line.c_str() + 6, nullptr) * 1024 / 1e6;
  return 0;
}

static void add(llama_batch& batch, llama_token token, int position, int sequence, bool logits) {
  const int i = batch.n_tokens++;
  batch.token[i] = token;
  batch.pos[i] = position;
  batch.n_seq_id[i] = 1;
  batch.seq_id[i][0] = sequence;
  batch.logits[i] = logits;
}

static llama_token greedy(llama_context* context, int i, int vocab) {
  const float* logits = llama_get_logits_ith(context, i);
  int best = 0;
  for (int token = 1; token < vocab; ++token)
    if (logits[token] > logits[best]) best = token;
  return best;
}

constexpr int MOST = 2048;  // tokens in one call

int main(int count, char** arguments) {
  if (count != 3) fail("usage: llama_worker MODEL.gguf THREADS");
  const double loading = now();
  const int threads = std::atoi(arguments[2]);
  llama_log_set([](ggml_log_level level, const char* text, void*) {
    if (level >= GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
  }, nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(arguments[1], llama_model_default_params());
  if (!model) fail("the model does not load");
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::map<std::tuple<int, int, int>, llama_context*> contexts;
  llama_batch batch = llama_batch_init(MOST, 0, 1);
  std::printf("{\"ready\": %.3f}\n", now() - loading);
  std::fflush(stdout);

  for (int rows, prompt, wanted; std::scanf("%d %d %d", &rows, &prompt, &wanted) == 3;) {
    llama_context*& context = contexts[{rows, prompt, wanted}];
    if (!context) {
      llama_context_params params = llama_context_default_params();
      params.n_ctx = uint32_t(rows * (prompt + wanted + 8));
      params.n_batch = MOST;
      params.n_ubatch = 512;
      params.n_seq_max = uint32_t(rows);
      params.n_threads = params.n_threads_batch = threads;
      params.kv_unified = false;
      context = llama_init_from_model(model, params);
      if (!context) fail("no context");
    }
    llama_memory_clear(llama_get_memory(context), true);
    reset_peak();
    uint32_t random = 1;
    std::vector<llama_token> last(size_t(rows), 0), first_row;
    std::vector<std::pair<int, int>> ends;  // sequences that end in this call, and where
    batch.n_tokens = 0;
    auto decode = [&] {
      if (llama_decode(context, batch)) fail("a step failed");
      for (auto [row, i] : ends) last[size_t(row)] = greedy(context, i, vocab);
      ends.clear();
      batch.n_tokens = 0;
    };
    const double started = now();
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < prompt; ++i) {
        random = random * 1103515245u + 12345u;
        const bool end = i == prompt - 1;
        if (end) ends.emplace_back(row, batch.n_tokens);
        add(batch, llama_token(3 + (random >> 8) % uint32_t(vocab - 3)), i, row, end);
        if (batch.n_tokens == MOST) decode();
      }
    if (batch.n_tokens) decode();
    const double first = now();
    first_row.push_back(last[0]);
    for (int i = 0; i < wanted - 1; ++i) {
      for (int row = 0; row < rows; ++row) {
        ends.emplace_back(row, row);
        add(batch, last[size_t(row)], prompt + i, row, true);
      }
      decode();
      first_row.push_back(last[0]);
    }
    const double end = now();
    std::printf("{\"prefill_s\": %.6f, \"decode_s\": %.6f, \"decode_tokens\": %d, \"peak_rss_mb\": %.1f, \"tokens\": [",
                first - started, end - first, rows * (wanted - 1), peak_mb());
    for (size_t i = 0; i < first_row.size(); ++i) std::printf(i ? ", %d" : "%d", first_row[i]);
    std::printf("]}\n");
    std::fflush(stdout);
  }
}
