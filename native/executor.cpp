#include "executor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "platform.hpp"

namespace millrace {

Arena::Arena(int64_t bytes, const char* what) : data_(nullptr), bytes_(bytes) {
  if (bytes < 0) throw std::runtime_error(std::string(what) + ": a negative size");
  if (bytes == 0) return;
  data_ = static_cast<uint8_t*>(platform::allocate(bytes));
  if (!data_) throw std::runtime_error("no memory for " + std::string(what) + ": " + std::to_string(bytes) + " bytes");
}

Arena::~Arena() { platform::release(data_, bytes_); }

// Four independent lanes of multiply and rotate over 32-byte blocks: fast, and any changed bit shows. Not for secrets.
uint64_t checksum(const uint8_t* data, int64_t bytes) {
  constexpr uint64_t kMix = 0x9E3779B97F4A7C15ull;
  uint64_t lane[4] = {1, 2, 3, 4};
  const auto step = [&](int i, uint64_t word) {
    const uint64_t mixed = (lane[i] ^ word) * kMix;
    lane[i] = mixed << 29 | mixed >> 35;
  };
  int64_t at = 0;
  for (; at + 32 <= bytes; at += 32)
    for (int i = 0; i < 4; ++i) {
      uint64_t word;
      std::memcpy(&word, data + at + 8 * i, 8);
      step(i, word);
    }
  for (; at < bytes; ++at) step(at & 3, data[at]);
  uint64_t all = static_cast<uint64_t>(bytes);
  for (const uint64_t l : lane) {
    all = (all ^ l) * kMix;
    all ^= all >> 32;
  }
  return all;
}

namespace {

const Isa& choose_isa(const char* name) {
  const Isa* const* usable = usable_isas();
  if (!name) return *usable[0];
  for (; *usable; ++usable)
    if (std::strcmp((*usable)->name, name) == 0) return **usable;
  throw std::runtime_error("instruction set \"" + std::string(name) + "\" cannot run here: " + isa_lacking(name));
}

int64_t scratch_floats(const std::vector<Call>& program) {
  int64_t most = 0;
  for (const Call& s : program) most = std::max(most, scratch_floats(s));
  return most;
}

std::vector<Call> decode_program(const mr_create_args& args, const Bounds& bounds) {
  std::vector<Call> program;
  Reader in(args.program, static_cast<size_t>(args.program_bytes));
  while (!in.done()) {
    Call call;
    std::memset(&call, 0, sizeof call);
    const uint32_t id = in.u32();
    if (id >= kKernels) throw ProgramError("unknown kernel " + std::to_string(id));
    call.id = static_cast<KernelId>(id);
    decode_call(in, bounds, call);
    program.push_back(call);
  }
  return program;
}

constexpr int64_t kMaxBytes = int64_t{1} << 55;

void within(int64_t value, int64_t low, int64_t high, const char* what) {
  if (value < low || value > high)
    throw ProgramError(std::string(what) + " is " + std::to_string(value) + ", not " + std::to_string(low) + " to " +
                       std::to_string(high));
}

// Bounds what a caller may ask for, before anything is made of it: every size below stays far from overflow.
const mr_create_args& checked(const mr_create_args& a) {
  within(a.n_symbols, 0, kSymbols, "n_symbols");
  within(a.n_sizes, 0, kSizes, "n_sizes");
  for (int i = 0; i < a.n_symbols; ++i) within(a.symbols[i], 1, kMaxParam, "a symbol's bound");
  within(a.threads, 1, kMaxThreads, "threads");
  within(a.program_bytes, 0, kMaxBytes, "program_bytes");
  within(a.weights_bytes, 0, kMaxBytes, "weights_bytes");
  within(a.activation_bytes, 0, kMaxBytes, "activation_bytes");
  within(a.lengths_offset, -1, kMaxBytes, "the place of the lengths");
  within(a.n_caches, 0, kCaches, "n_caches");
  within(a.n_caches, 0, a.n_symbols > 1 ? kCaches : 0, "n_caches of a program without sequences");
  within(a.kv_pages, 0, kMaxParam, "kv_pages");
  within(a.n_windows, 0, a.n_caches, "n_windows");
  for (int i = 0; i < a.n_windows; ++i) {
    within(a.windows[i].tokens, 1, kMaxParam, "a window's tokens");
    within(a.windows[i].pages, 0, kMaxParam, "a window's pages");
  }
  within(a.n_states, 0, a.language ? kCaches : 0, "n_states");
  within(a.state_slots, a.n_states > 0, kMaxParam, "state_slots");
  for (int i = 0; i < a.n_states; ++i) {
    within(a.states[i].layers, 1, 1 << 16, "a state's layers");
    within(a.states[i].floats, 1, kMaxParam, "a state's floats");
  }
  for (int i = 0; i < a.n_caches; ++i) {
    const mr_cache& c = a.caches[i];
    within(c.format, 0, kKvFormats - 1, "a cache's format");
    within(c.layers, 1, 1 << 16, "a cache's layers");
    within(c.heads, 1, 1 << 16, "a cache's heads");
    within(c.key_dim, 1, kMaxHeadDim, "a cache's key_dim");
    within(c.value_dim, 1, kMaxHeadDim, "a cache's value_dim");
    within(c.place, -1, kMaxBytes, "a cache's place");
    within(c.table, 0, c.place < 0 ? a.n_windows : 0, "a cache's table");
  }
  return a;
}

constexpr int32_t kTransient = -1;       // in place of a page table's number
constexpr int64_t kSharedBytes = 4 << 20;  // a worker; only of address space: what is not needed is never touched

}  // namespace

Executor::Executor(const mr_create_args& a)
    : isa_(choose_isa(checked(a).isa)),
      n_symbols_(a.n_symbols),
      sizes_(a),
      symbols_(sizes_.bounds()),
      windows_(a.windows, a.windows + a.n_windows),
      lengths_offset_(a.lengths_offset),
      kept_pages_(a.kv_pages),
      weights_(a.weights_bytes, "the weights"),
      activations_(a.activation_bytes, "the activations"),
      bounds_{.weights = weights_.data(), .weights_bytes = weights_.bytes(), .activations = activations_.data(),
              .activations_bytes = activations_.bytes(), .symbols = symbols_.data(), .n_symbols = a.n_symbols + a.n_sizes},
      pool_(a.threads),
      shared_(a.n_caches > 0 ? pool_.workers() * kSharedBytes : 64, "what workers share") {
  load_weights(a);
  program_ = decode_program(a, bounds_);
  make_caches(a);
  make_states(a);
  check_caches();
  set_tactics(nullptr, 0);
  next_task_.resize(program_.size() + 1);
  seconds_.resize(program_.size() + 1);
  const int64_t kernel_bytes = std::max(isa_.scratch_bytes, scratch_floats(program_) * 4) + 64;
  for (int w = 0; w < pool_.workers(); ++w) scratch_.push_back(std::make_unique<Arena>(kernel_bytes, "scratch"));
}

void Executor::load_weights(const mr_create_args& a) {
  if (a.weights) {
    std::memcpy(weights_.data(), a.weights, static_cast<size_t>(a.weights_bytes));
    return;
  }
  if (!a.weights_path || a.weights_bytes == 0) return;
  const int file = open(a.weights_path, O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error(std::string("cannot open ") + a.weights_path + ": " + std::strerror(errno));
  constexpr int64_t kPiece = 8 << 20;
  const int64_t pieces = (weights_.bytes() + kPiece - 1) / kPiece;
  int32_t next = 0, failed = 0;
  pool_.run({.work = [&](int, int) {  // several readers: the copy out of the page cache is what takes the time
    for (int64_t p; (p = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < pieces;) {
      const int64_t end = std::min((p + 1) * kPiece, weights_.bytes());
      for (int64_t at = p * kPiece; at < end;) {
        const ssize_t got = pread(file, weights_.data() + at, static_cast<size_t>(end - at), at);
        if (got <= 0) {
          __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
          break;
        }
        at += got;
      }
    }
  }});
  close(file);
  if (failed) throw std::runtime_error(std::string(a.weights_path) + " is shorter than the engine says");
}

// A cache of one run has pages enough for the longest: every sequence begins one of its own.
void Executor::make_caches(const mr_create_args& a) {
  const int64_t own = a.n_symbols > 1 ? symbols_[0] / kPageTokens + symbols_[1] : 0;
  for (int i = 0; i < a.n_caches; ++i) {
    const mr_cache& c = a.caches[i];
    const bool passing = c.place >= 0;
    KvLayout layout{.base = nullptr, .format = static_cast<KvFormat>(c.format), .layers = c.layers,
                    .pages = passing ? own : c.table ? windows_[static_cast<size_t>(c.table) - 1].pages : kept_pages_,
                    .heads = c.heads, .key_dim = c.key_dim, .value_dim = c.value_dim};
    within(layout.pages, 0, kMaxBytes / std::max(layout.heads * layout.block_bytes() * layout.layers, int64_t{1 << 24}),
           "a cache's pages");
    const int64_t bytes = layout.layer_bytes() * layout.layers;
    if (passing) {
      if (c.place % kLine) throw ProgramError("a cache's place is not at a line's begin");
      layout.base = bounds_.resolve(2ull << 56 | static_cast<uint64_t>(c.place), bytes, true, false, "a cache");
    } else {
      kept_.push_back(std::make_unique<Arena>(bytes, "the KV pages"));
      layout.base = kept_.back()->data();
    }
    caches_.push_back({layout, nullptr, nullptr});
    tables_.push_back(passing ? kTransient : c.table);
  }
  if (lengths_offset_ >= 0) {
    within(a.n_symbols, 2, kSymbols, "n_symbols of a program with sequences");
    bounds_.resolve(2ull << 56 | static_cast<uint64_t>(lengths_offset_), int64_t{4} * symbols_[1], true, false, "lengths");
    starts_.resize(symbols_[1] + 1);
    own_offsets_.resize(symbols_[1]);
    positions_.resize(symbols_[0]);
    sequence_of_.resize(symbols_[0]);
    own_pages_.resize(static_cast<size_t>(own));
    for (int64_t i = 0; i < own; ++i) own_pages_[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  }
}

void Executor::make_states(const mr_create_args& a) {
  for (int i = 0; i < a.n_states; ++i) {
    const mr_state& s = a.states[i];
    const int64_t floats = up(s.floats, kLine / 4);  // of several workers none writes into another's line
    within(a.state_slots, 0, kMaxBytes / 4 / (floats * s.layers), "state_slots");
    state_arenas_.push_back(std::make_unique<Arena>(4 * floats * s.layers * a.state_slots, "the states"));
    states_.push_back({reinterpret_cast<float*>(state_arenas_.back()->data()), a.state_slots, floats, nullptr, nullptr});
    state_layers_.push_back(s.layers);
  }
}

// The pages that a step touches are this executor's, of its caches' layers, heads and sizes.
void Executor::check_caches() const {
  const auto check = [&](int32_t rows, int32_t cache, int32_t layer, int32_t heads, int32_t key_dim, int32_t value_dim,
                         int32_t window) {
    if (rows != 0) throw ProgramError("a call's keys and values are not of the program's tokens");
    if (cache >= static_cast<int32_t>(caches_.size())) throw ProgramError("a call's cache is not the program's");
    const int32_t table = tables_[static_cast<size_t>(cache)];
    if (table == kTransient && lengths_offset_ < 0)
      throw ProgramError("a call works on sequences, and no input says how long they are");
    if (table > 0 && window > windows_[static_cast<size_t>(table) - 1].tokens)
      throw ProgramError("a call attends to more than its cache's window");
    const KvLayout& kv = caches_[static_cast<size_t>(cache)].layout;
    if (heads != kv.heads || key_dim != kv.key_dim || value_dim != kv.value_dim || layer >= kv.layers)
      throw ProgramError("a call's keys and values do not fit the KV pages");
  };
  for (const Call& s : program_) {
    if (s.id == KernelId::attention)
      check(s.attention.rows, s.attention.cache, s.attention.layer, s.attention.kv_heads, s.attention.head_dim,
            s.attention.value_dim, s.attention.window ? s.attention.window : kMaxParam + 1);
    if (s.id == KernelId::short_conv) {
      const ShortConvArgs& conv = s.short_conv;
      const auto kind = static_cast<size_t>(conv.state);
      if (conv.rows != 0) throw ProgramError("a call's rows are not of the program's tokens");
      if (kind >= states_.size() || conv.layer >= state_layers_[kind] ||
          int64_t{conv.taps - 1} * conv.n > states_[kind].floats)
        throw ProgramError("a call's state is not the program's");
    }
    if (s.id != KernelId::rope) continue;
    if (s.rope.table && !s.rope.positions) throw ProgramError("rope.table without positions");
    if (s.rope.layer < 0) continue;
    check(s.rope.rows, s.rope.cache, s.rope.layer, s.rope.kv_heads, s.rope.head_dim, s.rope.value_dim, 0);
    if (!s.rope.k || !s.rope.v) throw ProgramError("rope.layer without k and v");
  }
}

void Executor::set_tactics(const mr_tactic* tactics, int64_t n) {
  const auto n_calls = static_cast<int32_t>(program_.size());
  for (int64_t i = 0; i < n; ++i) {
    const mr_tactic& t = tactics[i];
    if (t.call < 0 || t.call >= n_calls) throw ProgramError("a tactic for no call of the program");
    const bool ordered = i == 0 || tactics[i - 1].call < t.call || (tactics[i - 1].call == t.call && tactics[i - 1].rows < t.rows);
    if (!ordered) throw ProgramError("tactics out of order");
    const int32_t* highest = kHighestKnobs[static_cast<uint32_t>(program_[static_cast<size_t>(t.call)].id)];
    for (int k = 0; k < kKnobs; ++k)
      if (t.knobs[k] < 0 || t.knobs[k] > highest[k]) throw ProgramError("a knob beyond what its kernel takes");
  }
  tactics_.assign(tactics, tactics + n);
  tactics_of_.assign(program_.size() + 1, tactics_.size());
  for (size_t i = tactics_.size(); i-- > 0;) tactics_of_[static_cast<size_t>(tactics_[i].call)] = i;
  for (size_t s = program_.size(); s-- > 0;) tactics_of_[s] = std::min(tactics_of_[s], tactics_of_[s + 1]);
  chosen_.assign(program_.size(), Tactic{});
}

// A call's tactic is that for the fewest rows that suffice, beyond all the last.
void Executor::choose_tactics(const int32_t* sizes) {
  for (size_t i = 0; i < program_.size(); ++i) {
    const size_t begin = tactics_of_[i], end = tactics_of_[i + 1];
    if (begin == end) continue;
    const int32_t rows = sizes[program_[i].id == KernelId::matmul ? program_[i].matmul.rows : 0];
    size_t at = begin;
    while (at + 1 < end && tactics_[at].rows < rows) ++at;
    std::memcpy(chosen_[i].knob, tactics_[at].knobs, sizeof chosen_[i].knob);
  }
}

void Executor::compute(const int32_t* sizes) {
  for (int i = 0; i < n_symbols_; ++i) within(sizes[i], 1, symbols_[static_cast<size_t>(i)], "a symbol");
  if (keeps()) throw ProgramError("this program keeps what it has seen: it runs in steps of a language model");
  if (lengths_offset_ >= 0) find_sequences(sizes);
  const Sequences sequences{.count = lengths_offset_ < 0 ? 0 : sizes[1], .positions = positions_.data(),
                            .sequence_of = sequence_of_.data(), .starts = starts_.data()};
  launch({.sizes = sizes, .sequences = sequences, .tables = nullptr, .states_from = nullptr,
          .states_to = nullptr, .embeddings = {}}, {});
  wait();
}

// From the lengths among the inputs; whole sequences, each from position 0.
void Executor::find_sequences(const int32_t* sizes) {
  const auto* lengths = reinterpret_cast<const int32_t*>(activations_.data() + lengths_offset_);
  int64_t at = 0, page = 0;
  for (int s = 0; s < sizes[1]; ++s) {
    const int32_t length = __atomic_load_n(lengths + s, __ATOMIC_RELAXED);  // once: what was checked is what counts
    within(length, 1, sizes[0] - at, "a sequence's length");
    starts_[s] = static_cast<int32_t>(at);
    own_offsets_[s] = static_cast<int32_t>(page);
    for (int t = 0; t < length; ++t) {
      positions_[at + t] = t;
      sequence_of_[at + t] = s;
    }
    at += length;
    page += up(length, kPageTokens) / kPageTokens;
  }
  within(at, sizes[0], sizes[0], "the sum of the lengths");
  starts_[sizes[1]] = static_cast<int32_t>(at);
}

bool Executor::has_table(int32_t table) const { return std::find(tables_.begin(), tables_.end(), table) != tables_.end(); }

void Executor::copy_page(int32_t table, int32_t from, int32_t to) {
  for (size_t i = 0; i < caches_.size(); ++i) {
    const KvLayout& kv = caches_[i].layout;
    if (tables_[i] != table) continue;
    const auto bytes = static_cast<size_t>(kv.heads * kv.block_bytes());  // the heads of a page lie side by side
    for (int layer = 0; layer < kv.layers; ++layer) std::memcpy(kv.keys(layer, to, 0), kv.keys(layer, from, 0), bytes);
  }
}

void Executor::launch(const RunInputs& inputs, Last last) {
  if (running_) throw std::runtime_error("a run was launched, and nobody has waited for it");
  std::fill(next_task_.begin(), next_task_.end(), 0);
  const int32_t* sizes = sizes_.find(inputs.sizes);
  if (!tactics_.empty()) choose_tactics(sizes);
  for (size_t i = 0; i < caches_.size(); ++i) {
    const PageTable own{own_pages_.data(), own_offsets_.data()}, table = tables_[i] == kTransient ? own : inputs.tables[tables_[i]];
    caches_[i].pages = table.pages;
    caches_[i].offsets = table.offsets;
  }
  for (States& s : states_) {
    s.from = inputs.states_from;
    s.to = inputs.states_to;
  }
  run_ = {.sizes = sizes, .sequences = inputs.sequences, .caches = caches_.data(), .states = states_.data(),
          .embeddings = inputs.embeddings, .n_workers = pool_.workers(),
          .next_task = nullptr, .scratch = nullptr, .scratch_floats = 0, .shared = shared_.data(),
          .shared_bytes = shared_.bytes(), .tactic = nullptr};
  last_ = std::move(last);
  Pool::Job job{.work = [this](int worker, int phase) { work(worker, phase); },
                .phases = static_cast<int>(program_.size()) + (last_ ? 1 : 0), .ended = {}};
  using Clock = std::chrono::steady_clock;
  if (profiling_)
    job.ended = [this, before = Clock::now()](int phase) mutable {
      const auto now = Clock::now();
      seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - before).count();
      before = now;
    };
  running_ = true;
  if (job.phases) pool_.begin(std::move(job));  // a network may be nothing but its inputs
}

void Executor::wait() {
  if (!running_) return;
  pool_.join();
  running_ = false;
}

void Executor::work(int worker, int phase) {
  const auto i = static_cast<size_t>(phase);
  const Arena& scratch = *scratch_[static_cast<size_t>(worker)];
  StepContext c = run_;
  c.scratch = reinterpret_cast<float*>(scratch.data());
  c.scratch_floats = scratch.bytes() / 4;
  c.next_task = &next_task_[i];
  if (i == program_.size()) return last_(c, worker);
  c.tactic = &chosen_[i];
  run_call(isa_.kernels, program_[i], c);
}

void Executor::profile(bool enabled, double* seconds, int n_calls) {
  for (int i = 0; i < n_calls && i < static_cast<int>(seconds_.size()); ++i) seconds[i] = seconds_[i];
  std::fill(seconds_.begin(), seconds_.end(), 0.0);
  profiling_ = enabled;
}

}  // namespace millrace
