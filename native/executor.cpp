#include "executor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
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

// Calls field(pointer, elements) for each array of the scratch; all elements have four bytes.
template <class Field>
void each_array(SamplingScratch& s, int64_t vocab, Field field) {
  const int64_t blocks = vocab / kSampleBlock + 1;
  field(s.ids, vocab + 16);
  field(s.x, vocab);
  field(s.p, std::max(vocab, kSampleBlock));
  field(s.order, vocab + 16);
  field(s.counts, vocab);
  field(s.touched, 2 * vocab);
  field(s.before, 2 * vocab);
  field(s.most, vocab / kLookBlock + 1);
  for (float** sums : {&s.references, &s.all_sums, &s.sums, &s.cut_sums}) field(*sums, blocks);
}

int64_t sampling_bytes(int64_t vocab) {
  SamplingScratch s;
  int64_t elements = 0;
  each_array(s, vocab, [&](auto&, int64_t n) { elements += n; });
  return elements * 4;
}

SamplingScratch carve(uint8_t* memory, int64_t vocab) {
  SamplingScratch s;
  each_array(s, vocab, [&](auto& array, int64_t n) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
    memory += n * 4;
  });
  return s;
}

// rms_norm normalises a whole row in scratch before it is packed; rescore keeps candidates there.
int64_t scratch_floats(const std::vector<Step>& program) {
  int64_t most = 0;
  for (const Step& s : program) {
    if (s.id == KernelId::rms_norm) most = std::max(most, static_cast<int64_t>(s.rms_norm.runs) * s.rms_norm.n);
    if (s.id == KernelId::rescore) most = std::max(most, int64_t{s.rescore.n} * 2 + s.rescore.n / 64 + 64);
  }
  return most;
}

std::vector<Step> decode_program(const mr_create_args& args, const Bounds& bounds) {
  std::vector<Step> program;
  Reader in(args.program, static_cast<size_t>(args.program_bytes));
  while (!in.done()) {
    Step step;
    std::memset(&step, 0, sizeof step);
    const uint32_t id = in.u32();
    if (id >= kKernels) throw ProgramError("unknown kernel " + std::to_string(id));
    step.id = static_cast<KernelId>(id);
    decode_step(in, bounds, step);
    program.push_back(step);
  }
  return program;
}

// The KV pages that a step touches are this executor's, of its layers, heads and sizes.
void check_kv(const std::vector<Step>& program, const KvLayout& kv, int32_t max_context) {
  for (const Step& s : program) {
    const bool attends = s.id == KernelId::attention, writes = s.id == KernelId::rope && s.rope.layer >= 0;
    const int32_t heads = attends ? s.attention.kv_heads : s.rope.kv_heads;
    const int32_t dim = attends ? s.attention.head_dim : s.rope.head_dim;
    const int32_t layer = attends ? s.attention.layer : s.rope.layer;
    if ((attends || writes) && (heads != kv.heads || dim != kv.head_dim || layer >= kv.layers))
      throw ProgramError("a step's keys and values do not fit the KV pages");
    if (writes && (!s.rope.k || !s.rope.v)) throw ProgramError("rope.layer without k and v");
    if (s.id == KernelId::rope && s.rope.table && s.rope.context < max_context)
      throw ProgramError("rope.table is shorter than the context");
  }
}

// Bounds what a caller may ask for, before anything is made of it: every size below stays far from overflow.
const mr_create_args& checked(const mr_create_args& a) {
  const auto within = [](int64_t value, int64_t low, int64_t high, const char* what) {
    if (value < low || value > high)
      throw ProgramError(std::string(what) + " is " + std::to_string(value) + ", not " + std::to_string(low) + " to " +
                         std::to_string(high));
  };
  constexpr int64_t kMaxBytes = int64_t{1} << 55;
  within(a.max_tokens, 1, kMaxParam, "max_tokens");
  within(a.max_sequences, 1, kMaxParam, "max_sequences");
  within(a.max_context, 1, kMaxParam, "max_context");
  within(a.vocab_size, 1, kMaxParam, "vocab_size");
  within(a.threads, 1, kMaxThreads, "threads");
  within(a.program_bytes, 0, kMaxBytes, "program_bytes");
  within(a.weights_bytes, 0, kMaxBytes, "weights_bytes");
  within(a.activation_bytes, 0, kMaxBytes, "activation_bytes");
  within(a.logits_offset, -1, kMaxBytes, "logits_offset");
  within(a.kv_format, 0, 2, "kv_format");
  within(a.kv_layers, 0, 1 << 16, "kv_layers");
  within(a.kv_heads, 1, 1 << 16, "kv_heads");
  within(a.kv_head_dim, 1, kMaxHeadDim, "kv_head_dim");
  const KvLayout page{nullptr, static_cast<KvFormat>(a.kv_format), a.kv_layers, 1, a.kv_heads, a.kv_head_dim};
  within(a.kv_pages, 0, kMaxBytes / std::max(page.layer_bytes() * a.kv_layers, int64_t{1 << 24}), "kv_pages");
  return a;
}

constexpr int64_t kSharedBytes = 4 << 20;  // a worker; only of address space: what is not needed is never touched

}  // namespace

Executor::Executor(const mr_create_args& a)
    : isa_(choose_isa(checked(a).isa)),
      max_tokens_(a.max_tokens),
      max_sequences_(a.max_sequences),
      max_context_(a.max_context),
      vocab_size_(a.vocab_size),
      logits_offset_(a.logits_offset),
      weights_(a.weights_bytes, "the weights"),
      activations_(a.activation_bytes, "the activations"),
      kv_arena_(KvLayout{nullptr, static_cast<KvFormat>(a.kv_format), a.kv_layers, a.kv_pages, a.kv_heads, a.kv_head_dim}
                        .layer_bytes() *
                    a.kv_layers,
                "the KV pages"),
      kv_{kv_arena_.data(), static_cast<KvFormat>(a.kv_format), a.kv_layers, a.kv_pages, a.kv_heads, a.kv_head_dim},
      sequence_of_(a.max_tokens),
      row_tokens_(a.max_sequences),
      pool_(a.threads),
      shared_(a.kv_layers > 0 ? pool_.workers() * kSharedBytes : 64, "what workers share") {
  load_weights(a);
  const Bounds bounds{weights_.data(),      weights_.bytes(), activations_.data(),
                      activations_.bytes(), a.max_tokens,     a.max_sequences};
  program_ = decode_program(a, bounds);
  check_kv(program_, kv_, a.max_context);
  for (const Step& s : program_)
    if (s.id == KernelId::embed && s.embed.vocab < a.vocab_size) throw ProgramError("embed.vocab is below the vocabulary");
  if (logits_offset_ >= 0)
    bounds.resolve(2ull << 56 | static_cast<uint64_t>(logits_offset_), int64_t{4} * a.max_sequences * a.vocab_size, true,
                   false, "the logits");
  set_tactics(nullptr, 0);
  next_task_.resize(program_.size() + 1);
  seconds_.resize(program_.size() + 1);
  const int64_t kernel_bytes = std::max(isa_.scratch_floats, scratch_floats(program_)) * 4 + 64;
  for (int w = 0; w < pool_.workers(); ++w) {
    scratch_.push_back(std::make_unique<Arena>(kernel_bytes, "scratch"));
    sampling_.push_back(std::make_unique<Arena>(sampling_bytes(a.vocab_size), "sampling"));
  }
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
  pool_.run([&](int) {  // several readers: the copy out of the page cache is what takes the time
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
  });
  close(file);
  if (failed) throw std::runtime_error(std::string(a.weights_path) + " is shorter than the engine says");
}

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("an illegal step: ") + what);
}

void check_ids(const int32_t* ids, int64_t n, int64_t limit, const char* what) {
  require(n >= 0 && (n == 0 || ids), what);
  for (int64_t i = 0; i < n; ++i) require(ids[i] >= 0 && ids[i] < limit, what);
}

}  // namespace

// Nothing is read before the index by which it is read was bounded: counts, then where sequences begin, then their tokens.
void Executor::check(const mr_step& s) const {
  require(s.n_tokens >= 1 && s.n_tokens <= max_tokens_, "the number of tokens");
  require(s.n_sequences >= 1 && s.n_sequences <= max_sequences_, "the number of sequences");
  require(s.n_rows >= 0 && s.n_rows <= max_sequences_, "the number of rows");
  require(s.tokens && s.positions && s.starts && s.page_starts, "an array is missing");
  require(s.starts[0] == 0 && s.starts[s.n_sequences] == s.n_tokens, "starts do not span the tokens");
  require(s.page_starts[0] == 0 && s.page_starts[s.n_sequences] <= s.n_pages, "page_starts do not fit the pages");
  for (int q = 0; q < s.n_sequences; ++q) {
    require(s.starts[q] < s.starts[q + 1], "a sequence without tokens");
    require(s.page_starts[q] <= s.page_starts[q + 1], "page_starts do not ascend");
  }
  check_ids(s.pages, s.n_pages, kv_.pages, "a page that does not exist");
  check_ids(s.tokens, s.n_tokens, vocab_size_, "a token beyond the vocabulary");
  for (int q = 0; q < s.n_sequences; ++q) {
    const int64_t room = int64_t{kPageTokens} * (s.page_starts[q + 1] - s.page_starts[q]);
    for (int t = s.starts[q]; t < s.starts[q + 1]; ++t) {
      require(s.positions[t] >= 0 && s.positions[t] < max_context_ && (kv_.layers == 0 || s.positions[t] < room),
              "a position beyond the context or the pages");
      require(t == s.starts[q] || s.positions[t] == s.positions[t - 1] + 1, "positions are not consecutive");
    }
  }
  check_rows(s);
}

void Executor::check_rows(const mr_step& s) const {
  check_ids(s.history, s.n_history, vocab_size_, "a history token beyond the vocabulary");
  check_ids(s.bias_ids, s.n_bias, vocab_size_, "a bias beyond the vocabulary");
  require(s.n_bias == 0 || s.bias_values, "an array is missing");
  require(s.n_rows == 0 || (s.sampling && s.out_tokens && s.out_logprobs && s.out_ranks), "an array is missing");
  require(s.max_top >= 0 && (s.max_top == 0 || (s.out_top_ids && s.out_top_logprobs)), "max_top");
  const auto* rows = static_cast<const SamplingRow*>(s.sampling);
  for (int r = 0; r < s.n_rows; ++r) {
    const SamplingRow& row = rows[r];
    require(row.sequence >= 0 && row.sequence < s.n_sequences, "a row of no sequence");
    require(row.n_top >= -1 && row.n_top <= s.max_top && row.n_top <= vocab_size_, "n_top");
    require(row.history_start >= 0 && row.history_prompt >= 0 && row.history_output >= 0 &&
                int64_t{row.history_start} + row.history_prompt + row.history_output <= s.n_history,
            "a row's history");
    require(row.bias_start >= 0 && row.bias_count >= 0 && row.bias_count <= vocab_size_ &&
                int64_t{row.bias_start} + row.bias_count <= s.n_bias,
            "a row's biases");
    require(row.temperature >= 0 && std::isfinite(row.temperature) && row.top_p > 0 && row.min_p >= 0 &&
                row.min_p <= 1 && row.repetition_penalty > 0,
            "a row's sampling parameters");
  }
}

void Executor::prepare(const mr_step& s) {
  std::fill(next_task_.begin(), next_task_.end(), 0);
  for (int q = 0; q < s.n_sequences; ++q)
    std::fill(sequence_of_.begin() + s.starts[q], sequence_of_.begin() + s.starts[q + 1], q);
  const auto* rows = static_cast<const SamplingRow*>(s.sampling);
  if (!tactics_.empty()) choose_tactics(s);
  for (int r = 0; r < s.n_rows; ++r) row_tokens_[r] = s.starts[rows[r].sequence + 1] - 1;
}

void Executor::set_tactics(const mr_tactic* tactics, int64_t n) {
  const auto n_steps = static_cast<int32_t>(program_.size());
  for (int64_t i = 0; i < n; ++i) {
    const mr_tactic& t = tactics[i];
    if (t.step < 0 || t.step >= n_steps) throw ProgramError("a tactic for no step of the program");
    const bool ordered = i == 0 || tactics[i - 1].step < t.step || (tactics[i - 1].step == t.step && tactics[i - 1].rows < t.rows);
    if (!ordered) throw ProgramError("tactics out of order");
    const int32_t* highest = kHighestKnobs[static_cast<uint32_t>(program_[static_cast<size_t>(t.step)].id)];
    for (int k = 0; k < kKnobs; ++k)
      if (t.knobs[k] < 0 || t.knobs[k] > highest[k]) throw ProgramError("a knob beyond what its kernel takes");
  }
  tactics_.assign(tactics, tactics + n);
  tactics_of_.assign(program_.size() + 1, tactics_.size());
  for (size_t i = tactics_.size(); i-- > 0;) tactics_of_[static_cast<size_t>(tactics_[i].step)] = i;
  for (size_t s = program_.size(); s-- > 0;) tactics_of_[s] = std::min(tactics_of_[s], tactics_of_[s + 1]);
  chosen_.assign(program_.size(), Tactic{});
}

// A step's tactic is that for the fewest rows that suffice, beyond all the last.
void Executor::choose_tactics(const mr_step& s) {
  for (size_t i = 0; i < program_.size(); ++i) {
    const size_t begin = tactics_of_[i], end = tactics_of_[i + 1];
    if (begin == end) continue;
    const bool sampled = program_[i].id == KernelId::matmul && program_[i].matmul.rows;
    size_t at = begin;
    while (at + 1 < end && tactics_[at].rows < (sampled ? s.n_rows : s.n_tokens)) ++at;
    std::memcpy(chosen_[i].knob, tactics_[at].knobs, sizeof chosen_[i].knob);
  }
}

void Executor::run(const mr_step& step) {
  check(step);
  prepare(step);
  pool_.run([&](int worker) { work(step, worker); });
}

void Executor::work(const mr_step& s, int worker) {
  using Clock = std::chrono::steady_clock;
  StepContext c{s.n_tokens, s.n_sequences, s.n_rows,       s.tokens,           s.positions, sequence_of_.data(),
                s.starts,   s.pages,       s.page_starts,  row_tokens_.data(), kv_,         pool_.workers(),
                nullptr,    reinterpret_cast<float*>(scratch_[worker]->data()), scratch_[worker]->bytes() / 4,
                shared_.data(), shared_.bytes(), nullptr};
  const bool timed = profiling_ && worker == 0;
  auto before = timed ? Clock::now() : Clock::time_point();
  const auto lap = [&](size_t i) {
    if (!timed) return;
    const auto now = Clock::now();
    seconds_[i] += std::chrono::duration<double>(now - before).count();
    before = now;
  };
  for (size_t i = 0; i < program_.size(); ++i) {
    c.next_task = &next_task_[i];
    c.tactic = &chosen_[i];
    call(isa_.kernels, program_[i], c);
    pool_.barrier(worker);
    lap(i);
  }
  c.next_task = &next_task_[program_.size()];
  if (logits_offset_ >= 0) sample_rows(s, c, worker);
  lap(program_.size());
}

void Executor::sample_rows(const mr_step& s, StepContext& c, int worker) {
  auto* logits = reinterpret_cast<float*>(activations_.data() + logits_offset_);
  const auto* rows = static_cast<const SamplingRow*>(s.sampling);
  const SamplingInputs inputs{s.history, s.bias_ids, s.bias_values};
  SamplingScratch scratch = carve(sampling_[worker]->data(), vocab_size_);
  for (Chunk chunk(c, s.n_rows, 1); chunk.next();) {
    const int64_t r = chunk.begin, top = r * s.max_top;
    const Sampled got = sample(isa_.sample, logits + r * vocab_size_, vocab_size_, rows[r], inputs, scratch,
                               s.out_top_ids + top, s.out_top_logprobs + top);
    s.out_tokens[r] = got.token;
    s.out_logprobs[r] = got.logprob;
    s.out_ranks[r] = got.rank;
  }
}

void Executor::profile(bool enabled, double* seconds, int n_steps) {
  for (int i = 0; i < n_steps && i < static_cast<int>(seconds_.size()); ++i) seconds[i] = seconds_[i];
  std::fill(seconds_.begin(), seconds_.end(), 0.0);
  profiling_ = enabled;
}

}  // namespace millrace
