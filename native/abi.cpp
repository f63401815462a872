// The C interface over Executor: exceptions become messages.
#include <cstring>
#include <string>

#include "executor.hpp"
#include "isa.hpp"
#include "language_model.hpp"
#include "probe.hpp"

struct mr_engine {
  explicit mr_engine(const mr_create_args& args) : executor(args) {
    if (args.language) model = std::make_unique<millrace::LanguageModel>(args, executor);
  }
  ~mr_engine() { executor.wait(); }  // a step that nobody waited for works on what goes now
  millrace::Executor executor;
  std::unique_ptr<millrace::LanguageModel> model;  // null for any other network
};

namespace {

template <class Work>
int guarded(char* error, int64_t error_bytes, Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& e) {
    if (error && error_bytes > 0) {
      std::strncpy(error, e.what(), static_cast<size_t>(error_bytes - 1));
      error[error_bytes - 1] = 0;
    }
    return 1;
  }
}

}  // namespace

extern "C" {

const char* mr_build(void) { return millrace::kBuild; }

const char* mr_isas(void) {
  static const std::string names = [] {
    std::string all;
    for (const millrace::Isa* const* isa = millrace::usable_isas(); *isa; ++isa) {
      if (!all.empty()) all += ' ';
      all += (*isa)->name;
    }
    return all;
  }();
  return names.c_str();
}

int mr_create(const mr_create_args* args, mr_engine** engine, char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, [&] { *engine = new mr_engine(*args); });
}

int mr_launch(mr_engine* engine, const mr_step* step, char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    if (!engine->model) throw std::runtime_error("this program is no language model: it has no steps");
    engine->model->launch(*step);
  });
}

void mr_wait(mr_engine* engine) { engine->executor.wait(); }

int mr_compute(mr_engine* engine, const int32_t* sizes, char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    if (engine->model) throw std::runtime_error("a language model runs in steps");
    engine->executor.compute(sizes);
  });
}

int mr_set_tactics(mr_engine* engine, const mr_tactic* tactics, int64_t n, char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    engine->executor.wait();
    engine->executor.set_tactics(tactics, n);
  });
}

void mr_destroy(mr_engine* engine) { delete engine; }

void mr_chosen_tactics(mr_engine* engine, int32_t* knobs, int32_t n_calls) {
  engine->executor.wait();
  const auto& chosen = engine->executor.chosen_tactics();
  for (size_t i = 0; i < chosen.size() && i < static_cast<size_t>(n_calls); ++i)
    std::memcpy(knobs + i * millrace::kKnobs, chosen[i].knob, sizeof chosen[i].knob);
}

uint8_t* mr_activations(mr_engine* engine) {
  engine->executor.wait();
  return engine->executor.activations();
}
uint8_t* mr_kept(mr_engine* engine, int32_t cache) {
  engine->executor.wait();
  return cache < 0 ? nullptr : engine->executor.kept(static_cast<size_t>(cache));
}
int32_t mr_embedding_width(const mr_engine* engine) { return engine->model ? engine->model->embedding_width() : 0; }
int32_t mr_adapters(const mr_engine* engine) { return engine->model ? engine->model->adapters() : 1; }
const char* mr_isa(const mr_engine* engine) { return engine->executor.isa().name; }
int64_t mr_weights_checksum(const mr_engine* engine) {
  const auto& weights = engine->executor.weights();
  return static_cast<int64_t>(millrace::checksum(weights.data(), weights.bytes()));
}
void mr_profile(mr_engine* engine, int32_t enabled, double* seconds, int32_t n_calls) {
  engine->executor.wait();
  engine->executor.profile(enabled != 0, seconds, n_calls);
}
uint64_t mr_checksum(const uint8_t* data, int64_t bytes) { return millrace::checksum(data, bytes); }

int mr_probe_read(const char* isa, int32_t threads, int64_t bytes_per_thread, double round_s, int32_t rounds,
                  double* rates, char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    millrace::probe_read(millrace::probe_loops(isa), threads, bytes_per_thread, round_s, rounds, rates);
  });
}

int mr_probe_rate(const char* isa, int32_t threads, int32_t precision, double round_s, int32_t rounds, double* rates,
                  char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    const auto chosen = static_cast<millrace::Precision>(precision);
    millrace::probe_rate(millrace::probe_loops(isa), threads, chosen, round_s, rounds, rates);
  });
}

}  // extern "C"
