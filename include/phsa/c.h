/* phsa: sparse attention for large language models. The C ABI.
 *
 * Every struct starts with `struct_size`: set it with PHSA_INIT, so that a program compiled against an older header
 * keeps working with a newer library. Every function returns a phsa_status; phsa_last_error() says what was wrong.
 * Nothing here throws, aborts or prints.
 *
 * The order of calls: fill phsa_plan_desc, phsa_plan_create, give phsa_plan_workspace_size bytes, then, once per layer,
 * phsa_forward (or phsa_represent, phsa_select and phsa_attend apart). A plan validates everything that depends on
 * shapes once; the per-layer calls neither allocate nor check more than null pointers. A plan is immutable and may be
 * used by several threads at a time, each with its own workspace.
 *
 * A plan for CUDA (phsa_plan_desc.device) runs on the calling thread's current CUDA device: every pointer in phsa_kv,
 * phsa_forward_params and phsa_backward_params is then one of device memory, the workspace too, and the calls queue
 * their work on `stream` and return. Lengths and starts in phsa_plan_desc stay in host memory, and the plan must live
 * until the work has ended. docs/support-matrix.md says what the CUDA kernels can do; phsa_plan_create refuses the
 * rest.
 */
#ifndef PHSA_C_H_
#define PHSA_C_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PHSA_API __attribute__((visibility("default")))
#else
#define PHSA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PHSA_ABI_VERSION 1

/* Zeroes a struct of this header and sets its struct_size; in C++ phsa::Init<type>() does. */
#define PHSA_INIT(type) \
  { .struct_size = sizeof(type) }

typedef enum phsa_status {
  PHSA_OK = 0,
  PHSA_INVALID_ARGUMENT = 2, /* a setting or a shape is wrong: the message names the allowed values */
  PHSA_UNSUPPORTED = 3,      /* valid, but this build or backend cannot do it */
  PHSA_OUT_OF_MEMORY = 4,
  PHSA_INTERNAL = 5, /* a bug in phsa */
  PHSA_IO = 6        /* the system failed to do it: a disk, a pipe, the network, another program */
} phsa_status;

typedef enum phsa_dtype {
  PHSA_F32 = 0,
  PHSA_F16 = 1,
  PHSA_BF16 = 2,
  PHSA_INT8 = 3 /* of keys and values alone: int8_t codes with a scale a row (phsa_kv_scales) */
} phsa_dtype;

typedef enum phsa_device { PHSA_DEVICE_CPU = 0, PHSA_DEVICE_CUDA = 1 } phsa_device;

typedef enum phsa_policy {
  PHSA_POLICY_DENSE = 0,
  PHSA_POLICY_PHSA = 1,
  PHSA_POLICY_INFLLM2 = 2,
  PHSA_POLICY_INFLLM2_64 = 3,
  PHSA_POLICY_STREAMING = 4,
  PHSA_POLICY_QUEST = 5,
  PHSA_POLICY_SEPLLM = 6 /* reference only: phsa_plan_create refuses it */
} phsa_policy;

/* How the query heads of one KV head agree on the blocks to read. */
typedef enum phsa_group_reduce {
  PHSA_GROUP_SUM = 0, /* sum of the heads' softmax values */
  PHSA_GROUP_MAX = 1, /* their maximum */
  PHSA_GROUP_NONE = 2 /* each head chooses for itself */
} phsa_group_reduce;

typedef struct phsa_settings {
  uint32_t struct_size;
  int32_t policy;       /* phsa_policy */
  int32_t block_size;   /* tokens per block: 16, 32 or 64 */
  int32_t init_tokens;  /* always read, at the start: a multiple of block_size, or 0 */
  int32_t local_tokens; /* always read, before the query's own block: a multiple of block_size, or 0 */
  int32_t top_k;        /* chosen blocks per query and KV head, 0 and up */
  float lambda;         /* weight of the plain mean in a representative, 0 to 1 */
  int32_t group_reduce; /* phsa_group_reduce */
  int32_t dense_below;  /* query positions below this read everything: a multiple of block_size, or 0 */
  /* NULL, or one lambda per KV head in place of `lambda`. Copied by phsa_plan_create. */
  const float* head_lambda; /* [num_kv_heads] */
  /* Newer than what is above; a caller with an older header says so by its struct_size. Of phsa and infllm2: */
  int32_t parts;     /* representatives per block: 1, 2, 4 or 8; 0: 1 */
  int32_t survivors; /* with parts: blocks that the coarse level leaves for them, or top_k if that is more; 0: all */
} phsa_settings;

/* What a policy is, for those who show or check settings: 1 where a statement holds, else 0. */
typedef struct phsa_policy_info {
  uint32_t struct_size;
  int32_t plans;       /* phsa_plan_create takes it; else only the reference computes it */
  int32_t cuda;        /* plans for CUDA take it, too, where there are kernels (phsa_has_device) */
  int32_t dense;       /* queries read everything; the other settings say nothing */
  int32_t chooses;     /* queries choose blocks, by top_k and group_reduce */
  int32_t parts;       /* parts and survivors say something */
  int32_t weighs;      /* lambda and the set of punctuation say something */
  int32_t plain_means; /* representatives are plain means: lambda is 1 */
  int32_t block_size;  /* its only one; 0: 16, 32 or 64 */
  const char* name;    /* in settings; both last as long as the library is loaded */
  const char* label;   /* as reports write it */
} phsa_policy_info;
/* Of a phsa_policy; numbers from 0 up to the first that is refused are all there are. */
PHSA_API phsa_status phsa_policy_describe(int32_t policy, phsa_policy_info* out);

/* The settings of the paper for a context of that many tokens: `4k` up to 4096, `32k` above. Writes as much as
 * out->struct_size says, or all of this header's struct. */
PHSA_API phsa_status phsa_settings_preset(int64_t context_tokens, phsa_settings* out);
/* Settings of one layer from a JSON text as docs/settings.md describes; `layer` picks the per-layer override. */
PHSA_API phsa_status phsa_settings_from_json(const char* json, int32_t layer, phsa_settings* out);
/* Writes at most `size` bytes, always terminated; `*needed` (may be NULL) is the full size with the terminator. */
PHSA_API phsa_status phsa_settings_to_json(const phsa_settings* settings, char* out, size_t size, size_t* needed);

/* Work that can run on the caller's threads. `run` calls fn(arg, task, worker) once for each task in [0, tasks), with
 * worker in [0, num_threads) and never the same worker at the same time, and returns when all have ended.
 * NULL for `run`: everything on the calling thread. Results never depend on it. */
typedef struct phsa_executor {
  uint32_t struct_size;
  int32_t num_threads;
  void* context;
  void (*run)(void* context, int32_t tasks, void (*fn)(void* arg, int32_t task, int32_t worker), void* arg);
} phsa_executor;

/* A thread pool for those who have none. It must outlive every call it is used in. */
typedef struct phsa_threads phsa_threads;
PHSA_API phsa_status phsa_threads_create(int32_t num_threads, phsa_threads** out); /* 0: one per core */
PHSA_API void phsa_threads_destroy(phsa_threads* threads);
PHSA_API phsa_executor phsa_threads_executor(phsa_threads* threads);

/* One batch: `num_seqs` sequences. The queries of a sequence are its last q_len positions, so that prefill
 * (q_len = kv_len), a chunk (q_len < kv_len) and decode (q_len = 1) are one thing. Queries are packed: sequence s
 * starts at row q_lens[0] + … + q_lens[s-1] of q, out, lse and selection.
 *
 * Keys lie in one of two ways:
 *  - contiguous (page_size = 0): the tokens of sequence s start at row kv_starts[s] of k, v and flags, and its
 *    representatives at row rep_starts[s] of reps. NULL: packed one after the other.
 *  - paged (page_size > 0, a multiple of block_size): token i of sequence s is row i % page_size of page
 *    page_table[s][i / page_size].
 */
typedef struct phsa_plan_desc {
  uint32_t struct_size;
  const phsa_settings* settings;
  int32_t dtype; /* phsa_dtype of q, out, representatives, and of k and v unless kv_dtype says otherwise */
  int32_t num_q_heads;
  int32_t num_kv_heads; /* divides num_q_heads */
  int32_t head_dim;     /* 64, 80, 96, 128 or 256 */
  int32_t num_seqs;
  const int32_t* q_lens;     /* [num_seqs] */
  const int32_t* kv_lens;    /* [num_seqs], kv_lens[s] >= q_lens[s] */
  const int64_t* kv_starts;  /* [num_seqs] or NULL */
  const int64_t* rep_starts; /* [num_seqs] or NULL */
  int32_t page_size;
  float scale;         /* of the dot products; 0: 1/sqrt(head_dim) */
  int32_t max_threads; /* the largest num_threads of any executor used with this plan; 0: 1 */
  int32_t reserved;    /* not read */
  /* Newer than what is above; a caller with an older header says so by its struct_size. */
  int32_t device;    /* phsa_device */
  int32_t reserved2; /* not read, as all that are called so */
  /* PHSA_INT8: k and v are codes, and stand for code · scale of their row, rounded to dtype; nothing else differs, to
   * the last bit, from k and v that hold these numbers. 0, or the same as dtype: they have that type. Forward on the
   * CPU only. */
  int32_t kv_dtype;
  int32_t reserved3;
} phsa_plan_desc;

typedef struct phsa_plan phsa_plan;
PHSA_API phsa_status phsa_plan_create(const phsa_plan_desc* desc, phsa_plan** out);
PHSA_API void phsa_plan_destroy(phsa_plan* plan);

/* Bytes that phsa_represent, phsa_select, phsa_attend and phsa_forward need, aligned to 64. */
PHSA_API size_t phsa_plan_workspace_size(const phsa_plan* plan);
PHSA_API size_t phsa_plan_backward_workspace_size(const phsa_plan* plan);
/* Rows of `reps` that the batch has when packed; elements per row and KV head (head_dim, or twice that for quest). */
PHSA_API int64_t phsa_plan_num_reps(const phsa_plan* plan);
PHSA_API int32_t phsa_plan_rep_width(const phsa_plan* plan);
/* Tokens that one row of `reps` advances: block_size, 16 for infllm2-64, block_size / parts where parts are chosen by
 * without survivors. */
PHSA_API int32_t phsa_plan_rep_stride(const phsa_plan* plan);
/* Heads that choose apart: num_kv_heads, or num_q_heads with PHSA_GROUP_NONE. */
PHSA_API int32_t phsa_plan_selection_heads(const phsa_plan* plan);
/* Slots per query and choosing head of `selection`: top_k, or 0 where nothing is chosen (dense, streaming). */
PHSA_API int32_t phsa_plan_selection_slots(const phsa_plan* plan);

/* Keys, values and what hangs on them. Strides count elements; the head_dim elements of a row are contiguous.
 * Page strides are read in the paged layout only. */
typedef struct phsa_kv {
  uint32_t struct_size;
  const void* k; /* [token][kv_head][head_dim], or [page][token][kv_head][head_dim] */
  int64_t k_token_stride, k_head_stride, k_page_stride;
  const void* v;
  int64_t v_token_stride, v_head_stride, v_page_stride;
  const uint8_t* flags; /* 1 where the token is punctuation; NULL: none is. [token], or [page][token] */
  int64_t flags_page_stride;
  /* Representatives. NULL: phsa_forward and phsa_select compute those of the whole batch in the workspace. Given:
   * phsa_forward and phsa_represent write the rows of the blocks that the batch's queries complete and rely on the
   * earlier ones. [row][kv_head][rep_width], or [page][row][kv_head][rep_width]. */
  void* reps;
  int64_t rep_row_stride, rep_head_stride, rep_page_stride;
  const int32_t* page_table; /* [num_seqs][page_table_stride] */
  int64_t page_table_stride;
} phsa_kv;

/* The scales of keys and values that are codes (phsa_plan_desc.kv_dtype), as the bits of bf16: one for each token and
 * KV head, of k and of v. Strides count scales and serve both. Elements are best divided by their row's largest / 127,
 * rounded up to bf16, and rounded to the nearest integer. */
typedef struct phsa_kv_scales {
  const uint16_t* k; /* [token][kv_head], or [page][token][kv_head] */
  const uint16_t* v;
  int64_t token_stride, head_stride, page_stride;
} phsa_kv_scales;

/* The blocks chosen between init and local: [query][selection_heads][selection_slots], ascending, -1 beyond the last. A
 * list holds as many blocks as it can: top_k, or all candidates where there are fewer; attend and backward refuse
 * others on the CPU, and do not look at them on a CUDA device, where a wrong list gives wrong results. A query below
 * `dense_below` reads everything and has no list: it is -1 throughout. */
typedef struct phsa_forward_params {
  uint32_t struct_size;
  const void* q; /* [query][q_head][head_dim] */
  int64_t q_token_stride, q_head_stride;
  phsa_kv kv;
  void* out; /* [query][q_head][head_dim] */
  int64_t out_token_stride, out_head_stride;
  float* lse;              /* [query][q_head], natural logarithm of what out was divided by; NULL: not wanted */
  int32_t* selection;      /* written by forward and select, read by attend and backward; NULL: not wanted (forward) */
  float* selection_scores; /* [query][selection_heads][selection_slots], 0 beyond the last; NULL: not wanted */
  void* workspace;
  size_t workspace_size;
  phsa_executor executor; /* not used by plans for CUDA */
  /* Newer than what is above; a caller with an older header says so by its struct_size. */
  void* stream; /* cudaStream_t, in plans for CUDA; NULL: the default stream */
  /* Attention sinks: for each head the score of one more key, whose value is zero. They weaken what is read and are
   * part of lse; blocks are chosen without them. phsa_backward does not take what was made with them. */
  const float* sinks; /* [q_head], of a plan for CUDA in device memory; NULL: none */
  /* For CUDA graphs, in which lengths grow from replay to replay: the lengths in device memory, read when the kernels
   * run, of a plan for CUDA with one query a sequence and pages, whose own kv_lens are upper limits. A length of 0 is
   * no sequence: its output is zero. phsa_forward only; group_reduce none, selection_scores, and top_k above 0 without
   * reps are refused. NULL: the plan's. */
  const int32_t* kv_lens;   /* [num_seqs] */
  phsa_kv_scales kv_scales; /* where kv.k and kv.v are codes */
} phsa_forward_params;

typedef struct phsa_backward_params {
  uint32_t struct_size;
  const void* q;
  int64_t q_token_stride, q_head_stride;
  phsa_kv kv; /* contiguous; every sequence with q_len = kv_len; reps are not read */
  const void* out;
  int64_t out_token_stride, out_head_stride;
  const float* lse;
  const int32_t* selection; /* as the forward wrote it; NULL only where selection_slots is 0 */
  const void* d_out;
  int64_t d_out_token_stride, d_out_head_stride;
  void* d_q; /* overwritten, as d_k and d_v are */
  int64_t d_q_token_stride, d_q_head_stride;
  void* d_k;
  int64_t d_k_token_stride, d_k_head_stride;
  void* d_v;
  int64_t d_v_token_stride, d_v_head_stride;
  void* workspace;
  size_t workspace_size;
  phsa_executor executor;
  /* Newer than what is above; a caller with an older header says so by its struct_size. */
  void* stream; /* as in phsa_forward_params */
} phsa_backward_params;

/* represent: writes the representatives of the blocks that the batch's queries complete. Reads kv.k and kv.flags. */
PHSA_API phsa_status phsa_represent(const phsa_plan* plan, const phsa_kv* kv, const phsa_executor* executor);
/* The same with what params.kv, kv_scales, executor, workspace and stream say; plans for CUDA need the last two, and
 * keys that are codes their scales. */
PHSA_API phsa_status phsa_represent_with(const phsa_plan* plan, const phsa_forward_params* params);
/* score and select: reads q and kv.reps (or kv.k and kv.flags where reps is NULL, and always with survivors),
 * writes selection. */
PHSA_API phsa_status phsa_select(const phsa_plan* plan, const phsa_forward_params* params);
/* attend: reads q, kv.k, kv.v and selection, writes out and lse. */
PHSA_API phsa_status phsa_attend(const phsa_plan* plan, const phsa_forward_params* params);
/* All of them, fused. */
PHSA_API phsa_status phsa_forward(const phsa_plan* plan, const phsa_forward_params* params);
/* Gradients of attend for the saved selection. */
PHSA_API phsa_status phsa_backward(const phsa_plan* plan, const phsa_backward_params* params);

/* Tokens that the batch's queries read with this selection, summed over queries and query heads, and what dense
 * attention would read. selection is in host memory for any device; NULL: any one, as all lists are full. */
PHSA_API phsa_status phsa_tokens_read(const phsa_plan* plan, const int32_t* selection, int64_t* read, int64_t* dense);

/* Flags for the tokens of a vocabulary. `set` is en, zh, en+zh, sentence, pure, none, or the path of a file of ids or
 * strings. tokens[i] are the raw bytes of token i (sizes[i] of them); special[i] != 0 marks special tokens (may be
 * NULL). table[i] becomes 1 where token i is punctuation, else 0. */
PHSA_API phsa_status phsa_punctuation_table(const char* set, const char* const* tokens, const size_t* sizes,
                                            const uint8_t* special, int64_t vocabulary, uint8_t* table);

/* What was wrong with the calling thread's last failed call; "" before any. Valid until its next call. */
PHSA_API const char* phsa_last_error(void);
PHSA_API const char* phsa_version(void);
PHSA_API int32_t phsa_abi_version(void);
/* Whether this build has kernels for a phsa_device; there may still be no such device. */
PHSA_API int32_t phsa_has_device(int32_t device);

/* The backends and SIMD targets that this machine can run, best first, separated by spaces ("avx3_bf16 avx3_vnni
 * avx3 avx2 … reference"), and the one in use. The environment's PHSA_BACKEND (reference or cpu) and PHSA_TARGET, or
 * phsa_set_target, choose another: for tests and bug reports. Not to be called while attention runs. */
PHSA_API const char* phsa_targets(void);
PHSA_API const char* phsa_target(void);
PHSA_API phsa_status phsa_set_target(const char* name);

#ifdef __cplusplus
}
#endif
#endif /* PHSA_C_H_ */
