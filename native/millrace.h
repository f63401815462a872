/* The C interface of the native core: plain data in, plain data out, no exceptions across it.
 * Every function that can fail returns 0 on success and otherwise writes a message into `error`. */
#ifndef MILLRACE_H
#define MILLRACE_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)
typedef struct mr_engine mr_engine;

/* Keys and values of the attention layers of one kind; layers are numbered within it. */
typedef struct {
  int32_t format, layers, heads, key_dim, value_dim;
  int64_t place; /* of its pages in the activations, for one run; -1: kept between runs, in an arena of its own */
  int32_t table; /* of its pages, if it is kept; 0: the step's own; n: of window n - 1 */
} mr_cache;

/* Layers for which each sequence has a state of `floats` floats, in slots that the step names. */
typedef struct {
  int32_t layers, floats;
} mr_state;

/* A sliding-window cache group: its window size in tokens, and its pages per cache. */
typedef struct {
  int32_t tokens;
  int64_t pages;
} mr_window;

/* A derived size: kind 0: the constant `left`; 1: left * right; 2: left / right, exact; 3: (left + add) / right rounded
 * down, `right` a constant. `left` and `right` are sizes before it, the symbols first. Its value is from 1 to `most`. */
typedef struct {
  int32_t kind, left, right, add, most;
} mr_size;

/* A language model's own: its third symbol is R (rows of logits), and what a step says is written into its inputs. */
typedef struct {
  int32_t max_context, vocab_size;
  int64_t tokens_offset, positions_offset; /* of int32 (T) in the activations; -1: not read */
  int64_t rows_offset;                     /* of int32 (R) */
  int64_t adapters_offset;                 /* of int32 (T): the adapter of each token's sequence */
  int64_t logits_offset;                   /* of float (R, V); -1: nothing is sampled */
} mr_language_model;

typedef struct {
  const uint8_t* program; /* calls as kernels/encode.py writes them */
  int64_t program_bytes;
  const uint8_t* weights; /* packed weights to be copied into the arena; null: take weights_path */
  int64_t weights_bytes;
  const char* weights_path; /* file of weights_bytes */
  int64_t activation_bytes;
  const int32_t* symbols; /* the bounds of the dimensions that only a run knows */
  int32_t n_symbols;
  const mr_cache* caches;
  int32_t n_caches;
  int64_t kv_pages; /* of each cache of table 0 that is kept */
  int32_t threads; /* at least 1, with the caller's */
  const char* isa; /* null: the best that this CPU has */
  const mr_window* windows;
  int32_t n_windows;
  const mr_state* states;
  int32_t n_states;
  int64_t state_slots;
  /* Of programs that work on sequences: their first two symbols are T (tokens) and S (sequences). */
  int64_t lengths_offset; /* of int32 (S) in the activations; -1: not read */
  const mr_language_model* language; /* null: not a language model */
  const mr_size* sizes; /* numbered behind the symbols */
  int32_t n_sizes;
} mr_create_args;

/* The pages of one window: of sequence s pages[page_starts[s]] .. pages[page_starts[s + 1] - 1], of which the first holds
 * its positions from 64 * first[s] on. */
typedef struct {
  const int32_t *pages, *page_starts, *first;
  int64_t n_pages;
  const int32_t* copies; /* (n_copies, 2) as a step's */
  int32_t n_copies;
} mr_window_pages;

typedef struct {
  int32_t n_tokens, n_sequences, n_rows;
  const int32_t *tokens, *positions, *starts, *pages, *page_starts;
  const void* sampling; /* n_rows of SAMPLING */
  const int32_t* history;
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t n_pages, n_history, n_bias;
  /* outputs: (R), (R), (R), (R, max_top), (R, max_top) */
  int32_t* out_tokens;
  float* out_logprobs;
  int32_t* out_ranks;
  int32_t max_top;
  int32_t* out_top_ids;
  float* out_top_logprobs;
  const uint32_t* masks; /* (n_masks, ceil(V / 32)): bit t % 32 of word t / 32 says whether token t may be drawn */
  int32_t n_masks;
  const int32_t* masks_ready; /* null: they are; otherwise nonzero once another thread has filled them */
  const int32_t* copies; /* (n_copies, 2): KV pages, from and to, that are copied before anything is stored */
  int32_t n_copies;
  const mr_window_pages* windows; /* as many as the engine has */
  /* (n_sequences) state slots before and after this step; the former is ignored at position 0. No other sequence of the
   * step may use a slot that is written. */
  const int32_t *states_from, *states_to;
  /* (n_embeddings, embedding_width): the token -1 - e has row e instead of one of the table's. */
  const float* embeddings;
  int32_t n_embeddings, embedding_width;
  const int32_t* rotary_positions; /* (n_tokens) by which queries and keys are rotated; null: their own positions */
  const int32_t* adapters; /* (n_sequences); null: 0, the model as it is, for all */
} mr_step;

/* Knobs of a call for up to `rows` rows (knobs as kernels/declare.py gives them; 0: the kernel's default). The entry with
 * the fewest sufficient rows applies; above all entries, the last one. */
typedef struct {
  int32_t call, rows;
  int32_t knobs[4];
} mr_tactic;

/* Digests of this file and of the kernels' declarations, as the library was built from them. */
const char* mr_build(void);
/* Names of the instruction sets that this build has and this CPU runs, best first, separated by spaces. */
const char* mr_isas(void);
int mr_create(const mr_create_args* args, mr_engine** engine, char* error, int64_t error_bytes);
/* Starts a step of a language model; the engine's threads compute it. Inputs and outputs must stay valid until mr_wait
 * returns. One step at a time. */
int mr_launch(mr_engine* engine, const mr_step* step, char* error, int64_t error_bytes);
/* Joins the running step and returns when it is finished, or at once if there is none. All functions that inspect or
 * change runs do this first. */
void mr_wait(mr_engine* engine);
/* Any other program, its inputs written into the activations, `sizes` of its symbols. */
int mr_compute(mr_engine* engine, const int32_t* sizes, char* error, int64_t error_bytes);
/* Replaces all tactics; entries are in order of call, then rows. No result ever depends on them. */
int mr_set_tactics(mr_engine* engine, const mr_tactic* tactics, int64_t n, char* error, int64_t error_bytes);
void mr_destroy(mr_engine* engine);

/* For tests, the inspector and measurements. */
/* The knobs that each call of the program worked with in the last run, 4 a step. */
void mr_chosen_tactics(mr_engine* engine, int32_t* knobs, int32_t n_calls);
uint8_t* mr_activations(mr_engine* engine);
const char* mr_isa(const mr_engine* engine);
int32_t mr_embedding_width(const mr_engine* engine); /* of the rows that a step may bring; 0: it takes none */
int32_t mr_adapters(const mr_engine* engine); /* how many a sequence may choose from, 0 among them */
/* The pages of cache number `cache` of those that are kept: (layers, pages, bytes of a page in a layer). No run may be
 * in progress while they are read or written. */
uint8_t* mr_kept(mr_engine* engine, int32_t cache);
int64_t mr_weights_checksum(const mr_engine* engine); /* of the bytes in the arena, see mr_checksum */
/* Seconds that each call of the program took since the last call; then they start again from 0. */
void mr_profile(mr_engine* engine, int32_t enabled, double* seconds, int32_t n_calls);
uint64_t mr_checksum(const uint8_t* data, int64_t bytes);

/* What the machine can do at most, one figure per round (probe.hpp). `isa` is one of mr_isas().
 * Bytes a second that all threads together read, each from bytes_per_thread (a multiple of 1024) of its own: */
int mr_probe_read(const char* isa, int32_t threads, int64_t bytes_per_thread, double round_s, int32_t rounds,
                  double* rates, char* error, int64_t error_bytes);
/* Operations a second from registers; precision 0: FP32, 1: BF16, 2: INT8. 0 where there is no such instruction: */
int mr_probe_rate(const char* isa, int32_t threads, int32_t precision, double round_s, int32_t rounds, double* rates,
                  char* error, int64_t error_bytes);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
