#include "language_model.hpp"

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

namespace millrace {

namespace {

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
  field(s.allowed, vocab);
  field(s.gathered, vocab);
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

constexpr int kT = 0, kS = 1, kR = 2;  // the symbols of a language model's program

}  // namespace

LanguageModel::LanguageModel(const mr_create_args& args, Executor& executor)
    : executor_(executor),
      max_tokens_(static_cast<int32_t>(executor.bounds().symbol(kT))),
      max_sequences_(static_cast<int32_t>(executor.bounds().symbol(kS))),
      max_rows_(static_cast<int32_t>(executor.bounds().symbol(kR))),
      max_context_(args.language->max_context),
      vocab_size_(args.language->vocab_size),
      sequence_of_(static_cast<size_t>(max_tokens_)),
      offsets_(executor.windows().size(), std::vector<int32_t>(static_cast<size_t>(max_sequences_))),
      tables_(executor.windows().size() + 1),
      slot_seen_(static_cast<size_t>(executor.state_slots())) {
  const Bounds& bounds = executor.bounds();
  const mr_language_model& a = *args.language;
  const auto place = [&](int64_t offset, int64_t elements, const char* what) -> uint8_t* {
    bounds.require(offset >= -1 && offset < int64_t{1} << 55, what);
    if (offset < 0) return nullptr;
    return bounds.resolve(2ull << 56 | static_cast<uint64_t>(offset), 4 * elements, true, false, what);
  };
  bounds.require(executor.keeps_all(), "a language model keeps its caches");
  bounds.require(vocab_size_ >= 1 && vocab_size_ <= kMaxParam, "vocab_size");
  bounds.require(max_context_ >= 1 && max_context_ <= kMaxParam, "max_context");
  places_.tokens = reinterpret_cast<int32_t*>(place(a.tokens_offset, max_tokens_, "tokens"));
  places_.positions = reinterpret_cast<int32_t*>(place(a.positions_offset, max_tokens_, "positions"));
  places_.lengths = reinterpret_cast<int32_t*>(place(args.lengths_offset, max_sequences_, "lengths"));
  places_.rows = reinterpret_cast<int32_t*>(place(a.rows_offset, max_rows_, "rows"));
  places_.adapters = reinterpret_cast<int32_t*>(place(a.adapters_offset, max_tokens_, "adapters"));
  has_row_sizes_ = executor.has_size_of(kR);
  int32_t adapters = kMaxParam;
  places_.logits = reinterpret_cast<float*>(place(a.logits_offset, int64_t{max_rows_} * vocab_size_, "the logits"));
  for (const Call& s : executor.program()) {
    if (s.id == KernelId::rope && s.rope.table && s.rope.context < max_context_)
      throw ProgramError("rope.table is shorter than the context");
    if (s.id == KernelId::embed && s.embed.ids == places_.tokens) {
      if (s.embed.vocab < vocab_size_) throw ProgramError("embed.vocab is below the vocabulary");
      embedding_width_ = s.embed.n;
    }
    if (s.id == KernelId::embed && places_.adapters && s.embed.ids == places_.adapters) {
      adapters = std::min(adapters, s.embed.vocab);
      adapters_ = adapters;
    }
  }
  for (int w = 0; w < executor.workers(); ++w)
    sampling_.push_back(std::make_unique<Arena>(sampling_bytes(vocab_size_), "sampling"));
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
void LanguageModel::check(const mr_step& s) const {
  require(s.n_tokens >= 1 && s.n_tokens <= max_tokens_, "the number of tokens");
  require(s.n_sequences >= 1 && s.n_sequences <= max_sequences_, "the number of sequences");
  require(s.n_rows >= 0 && s.n_rows <= max_rows_, "the number of rows");
  require(s.tokens && s.positions && s.starts && s.page_starts, "an array is missing");
  require(s.starts[0] == 0 && s.starts[s.n_sequences] == s.n_tokens, "starts do not span the tokens");
  require(s.page_starts[0] == 0 && s.page_starts[s.n_sequences] <= s.n_pages, "page_starts do not fit the pages");
  for (int q = 0; q < s.n_sequences; ++q) {
    require(s.starts[q] < s.starts[q + 1], "a sequence without tokens");
    require(s.page_starts[q] <= s.page_starts[q + 1], "page_starts do not ascend");
  }
  check_ids(s.pages, s.n_pages, executor_.kept_pages(), "a page that does not exist");
  require(s.n_embeddings >= 0 && (s.n_embeddings == 0 || s.embeddings), "the embedding rows");
  require(s.n_embeddings == 0 || (embedding_width_ && s.embedding_width == embedding_width_), "the width of embedding rows");
  for (int t = 0; t < s.n_tokens; ++t)
    require(s.tokens[t] >= -s.n_embeddings && s.tokens[t] < vocab_size_, "a token beyond the vocabulary");
  const bool by_pages = executor_.has_table(0);
  for (int q = 0; q < s.n_sequences; ++q) {
    const int64_t room = int64_t{kPageTokens} * (s.page_starts[q + 1] - s.page_starts[q]);
    for (int t = s.starts[q]; t < s.starts[q + 1]; ++t) {
      require(s.positions[t] >= 0 && s.positions[t] < max_context_ && (!by_pages || s.positions[t] < room),
              "a position beyond the context or the pages");
      require(t == s.starts[q] || s.positions[t] == s.positions[t - 1] + 1, "positions are not consecutive");
    }
  }
  if (s.adapters) check_ids(s.adapters, s.n_sequences, adapters_, "an adapter that does not exist");
  if (s.rotary_positions) check_ids(s.rotary_positions, s.n_tokens, max_context_, "a rotary position beyond the context");
  check_ids(s.copies, 2 * int64_t{s.n_copies}, executor_.kept_pages(), "a copy of a page that does not exist");
  for (int i = 0; i < s.n_copies; ++i) require(s.copies[2 * i] != s.copies[2 * i + 1], "a page copied to itself");
  require(executor_.windows().empty() || s.windows, "an array is missing");
  for (size_t w = 0; w < executor_.windows().size(); ++w) check_window(s, executor_.windows()[w], s.windows[w]);
  check_rows(s);
}

// Every sequence has pages for the positions of this step, and for the window before the first of them.
void LanguageModel::check_window(const mr_step& s, const mr_window& window, const mr_window_pages& w) const {
  require(w.page_starts && w.first, "an array is missing");
  require(w.page_starts[0] == 0 && w.page_starts[s.n_sequences] <= w.n_pages, "a window's page_starts do not fit its pages");
  for (int q = 0; q < s.n_sequences; ++q)
    require(w.page_starts[q] <= w.page_starts[q + 1], "a window's page_starts do not ascend");
  check_ids(w.pages, w.n_pages, window.pages, "a window's page that does not exist");
  for (int q = 0; q < s.n_sequences; ++q) {
    const int64_t from = s.positions[s.starts[q]], to = s.positions[s.starts[q + 1] - 1];
    const int64_t begin = from >= window.tokens ? from - window.tokens + 1 : 0, first = w.first[q];
    require(first >= 0 && first * kPageTokens <= begin, "a window's first page lies after its begin");
    require(to < kPageTokens * (first + w.page_starts[q + 1] - w.page_starts[q]), "a position beyond the window's pages");
  }
  check_ids(w.copies, 2 * int64_t{w.n_copies}, window.pages, "a copy of a window's page that does not exist");
  for (int i = 0; i < w.n_copies; ++i) require(w.copies[2 * i] != w.copies[2 * i + 1], "a page copied to itself");
}

// What is written is its sequence's own: several workers read and write states at the same time.
void LanguageModel::check_slots(const mr_step& s) {
  if (slot_seen_.empty()) return;
  require(s.states_from && s.states_to, "an array is missing");
  check_ids(s.states_from, s.n_sequences, executor_.state_slots(), "a slot that does not exist");
  check_ids(s.states_to, s.n_sequences, executor_.state_slots(), "a slot that does not exist");
  ++n_steps_;
  for (int q = 0; q < s.n_sequences; ++q) {
    uint32_t& seen = slot_seen_[static_cast<size_t>(s.states_to[q])];
    require(seen != n_steps_, "two sequences write one slot");
    seen = n_steps_;
  }
  for (int q = 0; q < s.n_sequences; ++q)
    require(slot_seen_[static_cast<size_t>(s.states_from[q])] != n_steps_ || s.states_from[q] == s.states_to[q],
            "a sequence reads a slot that another one writes");
}

void LanguageModel::check_rows(const mr_step& s) const {
  check_ids(s.history, s.n_history, vocab_size_, "a history token beyond the vocabulary");
  check_ids(s.bias_ids, s.n_bias, vocab_size_, "a bias beyond the vocabulary");
  require(s.n_bias == 0 || s.bias_values, "an array is missing");
  require(s.n_rows == 0 || (s.sampling && s.out_tokens && s.out_logprobs && s.out_ranks), "an array is missing");
  require(s.n_masks >= 0 && (s.n_masks == 0 || s.masks), "the token masks");
  require(s.max_top >= 0 && (s.max_top == 0 || (s.out_top_ids && s.out_top_logprobs)), "max_top");
  const auto* rows = static_cast<const SamplingRow*>(s.sampling);
  for (int r = 0; r < s.n_rows; ++r) {
    const SamplingRow& row = rows[r];
    require(row.token >= 0 && row.token < s.n_tokens, "a row of no token");
    require(row.target >= -1 && row.target < vocab_size_ && (row.target < 0 || row.n_top >= 0), "a row's target");
    require(row.mask >= 0 && row.mask <= s.n_masks && (row.mask == 0 || row.target < 0), "a row's token mask");
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

void LanguageModel::write_inputs(const mr_step& s) {
  const size_t token_bytes = static_cast<size_t>(s.n_tokens) * 4;
  if (places_.tokens) std::memcpy(places_.tokens, s.tokens, token_bytes);
  if (places_.positions) std::memcpy(places_.positions, s.rotary_positions ? s.rotary_positions : s.positions, token_bytes);
  for (int q = 0; q < s.n_sequences; ++q) {
    std::fill(sequence_of_.begin() + s.starts[q], sequence_of_.begin() + s.starts[q + 1], q);
    if (places_.lengths) places_.lengths[q] = s.starts[q + 1] - s.starts[q];
    if (places_.adapters)
      std::fill(places_.adapters + s.starts[q], places_.adapters + s.starts[q + 1], s.adapters ? s.adapters[q] : 0);
  }
  const auto* rows = static_cast<const SamplingRow*>(s.sampling);
  for (int r = 0; places_.rows && r < s.n_rows; ++r) places_.rows[r] = rows[r].token;
}

void LanguageModel::launch(const mr_step& s) {
  require(!executor_.is_running(), "one was launched, and nobody has waited for it");
  check(s);
  check_slots(s);
  step_ = s;
  write_inputs(s);
  for (int i = 0; i < s.n_copies; ++i) executor_.copy_page(0, s.copies[2 * i], s.copies[2 * i + 1]);
  tables_[0] = {s.pages, s.page_starts};
  for (size_t w = 0; w < offsets_.size(); ++w) {
    const mr_window_pages& pages = s.windows[w];
    for (int i = 0; i < pages.n_copies; ++i)
      executor_.copy_page(static_cast<int32_t>(w) + 1, pages.copies[2 * i], pages.copies[2 * i + 1]);
    for (int q = 0; q < s.n_sequences; ++q) offsets_[w][static_cast<size_t>(q)] = pages.page_starts[q] - pages.first[q];
    tables_[w + 1] = {pages.pages, offsets_[w].data()};
  }
  int32_t sizes[kSymbols] = {};
  sizes[kT] = s.n_tokens;
  sizes[kS] = s.n_sequences;
  sizes[kR] = s.n_rows;
  if (s.n_rows == 0 && has_row_sizes_) {  // a row that nobody draws from: no size may be 0
    sizes[kR] = 1;
    if (places_.rows) places_.rows[0] = 0;
  }
  const Sequences sequences{
      .count = s.n_sequences, .positions = s.positions, .sequence_of = sequence_of_.data(), .starts = s.starts};
  Executor::Last last;
  if (places_.logits) last = [this](StepContext& c, int worker) { sample_rows(c, worker); };
  executor_.launch({.sizes = sizes, .sequences = sequences, .tables = tables_.data(), .states_from = s.states_from,
                    .states_to = s.states_to,
                    .embeddings = {.rows = s.embeddings, .count = s.n_embeddings, .width = s.embedding_width}},
                   std::move(last));
}

namespace {

// Whoever fills the masks wakes nobody. Mostly they have long been filled when the first row is to be drawn.
void wait_for(const int32_t* ready) {
  while (!__atomic_load_n(ready, __ATOMIC_ACQUIRE)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace

void LanguageModel::sample_rows(StepContext& c, int worker) {
  const mr_step& s = step_;
  const auto* rows = static_cast<const SamplingRow*>(s.sampling);
  const SamplingInputs inputs{s.history, s.bias_ids, s.bias_values, s.masks};
  SamplingScratch scratch = carve(sampling_[worker]->data(), vocab_size_);
  for (Chunk chunk(c, s.n_rows, 1); chunk.next();) {
    const int64_t r = chunk.begin, top = r * s.max_top;
    if (rows[r].mask && s.masks_ready) wait_for(s.masks_ready);
    const Sampled got = sample(executor_.isa().sample, places_.logits + r * vocab_size_, vocab_size_, rows[r], inputs,
                               scratch, s.out_top_ids + top, s.out_top_logprobs + top);
    s.out_tokens[r] = got.token;
    s.out_logprobs[r] = got.logprob;
    s.out_ranks[r] = got.rank;
  }
}

}  // namespace millrace
