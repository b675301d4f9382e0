// Threads that run a kernel together: meeting, sharing work, and memory.
#include "team.h"

#include <algorithm>
#include <limits>
#include <thread>

namespace hybridtrt {

void team_wait(Team& team) {
  Shared& s = *team.shared;
  if (team.size == 1) return;
  const uint64_t round = s.round.load(std::memory_order_relaxed);
  if (s.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team.size) {
    s.arrived.store(0, std::memory_order_relaxed);
    s.round.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; s.round.load(std::memory_order_acquire) == round; ++spins) {
    if (spins < SPINS)
      pause();
    else
      std::this_thread::yield();
  }
}

void fill_nan(char* data, size_t bytes) {
  std::fill_n(reinterpret_cast<float*>(data), bytes / 4, std::numeric_limits<float>::quiet_NaN());
}

void* team_scratch(Team& team, size_t bytes) {
  Buffer& buffer = team.shared->scratch[size_t(team.rank)];
  buffer.at_least(bytes);
  if (team.shared->poison) fill_nan(buffer.data, buffer.bytes);
  return buffer.data;
}

void* team_workspace(Team& team, size_t bytes) {
  Shared& s = *team.shared;
  if (bytes > team.workspace_bytes || s.poison) {
    team_wait(team);
    if (team.rank == 0) {
      s.workspace.at_least(bytes);
      if (s.poison) fill_nan(s.workspace.data, s.workspace.bytes);
    }
    team.workspace_bytes = std::max(team.workspace_bytes, bytes);
    team_wait(team);
  }
  return s.workspace.data;
}

int64_t team_take(Team& team) { return team.shared->counters[team.turns % 3].fetch_add(1, std::memory_order_relaxed); }

void team_finish(Team& team) {
  team_wait(team);
  // Nobody counts here again before the threads have met twice more.
  if (team.rank == 0) team.shared->counters[team.turns % 3].store(0, std::memory_order_relaxed);
  ++team.turns;
}

}  // namespace hybridtrt
