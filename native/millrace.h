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
} mr_cache;

/* A language model's own: its third symbol is R (rows of logits), and what a step says is written into its inputs. */
typedef struct {
  int32_t max_context, vocab_size;
  int64_t tokens_offset, positions_offset; /* of int32 (T) in the activations; -1: not read */
  int64_t rows_offset;                     /* of int32 (R) */
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
  int64_t kv_pages; /* of each cache that is kept */
  int32_t threads; /* at least 1, with the caller's */
  const char* isa; /* null: the best that this CPU has */
  /* Of programs that work on sequences: their first two symbols are T (tokens) and S (sequences). */
  int64_t lengths_offset; /* of int32 (S) in the activations; -1: not read */
  const mr_language_model* language; /* null: any other network */
} mr_create_args;

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
  const int32_t* masks_ready; /* null: they are; else another thread fills them, and then makes this not 0 */
  const int32_t* copies; /* (n_copies, 2): KV pages, from and to, that are copied before anything is stored */
  int32_t n_copies;
} mr_step;

/* How a call of the program works when it has at most so many rows (knobs as kernels/declare.py gives them; 0: as the
 * kernel likes). Of several entries for a call that with the fewest rows that suffice counts, beyond all the last. */
typedef struct {
  int32_t call, rows;
  int32_t knobs[4];
} mr_tactic;

/* Digests of this file and of the kernels' declarations, as the library was built from them. */
const char* mr_build(void);
/* Names of the instruction sets that this build has and this CPU runs, best first, separated by spaces. */
const char* mr_isas(void);
int mr_create(const mr_create_args* args, mr_engine** engine, char* error, int64_t error_bytes);
/* Begins a step of a language model; the engine's own threads work on it. What it points at, outputs among it, is the
 * step's until mr_wait has returned. One at a time. */
int mr_launch(mr_engine* engine, const mr_step* step, char* error, int64_t error_bytes);
/* Takes part in the step that was launched, and returns when it is through; at once where there is none. Whatever else
 * looks at a run, or changes how runs go, does the same first. */
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
/* The pages of cache number `cache` of those that are kept: (layers, kv_pages, bytes of a page in a layer). No run may
 * be on its way while they are read or written. */
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
