// The argument structs of all kernels: the contract between the host (unweight-codegen/src/abi.rs, field for field) and
// the device. Each kernel takes exactly one of them, by value, as a __grid_constant__ parameter.
//
// Layouts: docs/format.md part A. `n` output features (rows), `k` input features (columns), tile = 64x64,
// t = tile_row * tile_cols + tile_col. All pointers are device pointers, 16-byte aligned at least (128 for TMA
// sources).
#pragma once

// clang-format off: the comments of a struct are in one column

namespace uw {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2, "LP64 model expected");

// A CUtensorMap: opaque to the device, 64-byte aligned, 128 bytes.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// The uint4 of the CUDA headers under a name that also exists in a CPU build.
struct alignas(16) TileMetadata {
    u32 start_word;           // first 32-bit word of the tile in encoded_exp
    u32 verbatim_row_offset;  // first row of the tile in verbatim_exponents
    u32 verbatim_low;         // bitmask of verbatim rows 0..31
    u32 verbatim_high;        // bitmask of verbatim rows 32..63
};

// Family `decode_huffman`: decode_full, decode_exponent, decode_palette. The input is a Huffman tensor, read-only; for
// decode_full also a tensor of encoding `exponents` (docs/format.md A.12).
struct DecodeHuffmanArgs {
    const u8* sign_mantissa;          // [n, k], full only; of other dtypes: fraction_bytes, then fraction_bits
    const u32* encoded_exp;           // [encoded_words]
    const u8* row_lengths;            // [tiles, 64], bits - 64
    const TileMetadata* tile_metadata;// [tiles]
    const u8* verbatim_exponents;     // [verbatim_rows, 64]
    const u8* palette;                // [16]
    const u8* code_lengths;           // [16]
    void* output;                     // full: [n, k] row-major; exponent: u8 [tiles, 64, 64]; palette: [tiles, 64, 32]
    u32* fault;                       // set to 1 + tile where a tile's metadata is out of bounds (the tile is skipped)
    u64 encoded_words;
    u32 verbatim_rows;
    u32 n;
    u32 k;
    u32 tile_rows;
    u32 tile_cols;
    u32 reserved;
};

// Report family: reconstructive matmul Y[m, n] = X[m, k] * W[n, k]^T (+ Y when the epilogue is store_add).
// n is a multiple of 64 * N tiles, k a multiple of 64; m is any. Also of family `gemm_join`, whose boxes have as many
// rows as the batch tile (x) and a task (sign_mantissa), and whose n is a multiple of 64.
struct GemmReconArgs {
    TensorMap x;                      // bf16 [m, k], box 64 (k) x 64 (m), 128-byte swizzle, zero fill
    TensorMap sign_mantissa;          // u8 [n, k], box 64 x 64, no swizzle
    const u8* exponents;              // exponent source: u8 [tiles, 64, 64]; palette source: u8 [tiles, 64, 32]
    const TileMetadata* tile_metadata;// palette source only
    const u8* verbatim_exponents;     // palette source only: [verbatim_rows, 64]
    const u8* palette;                // palette source only: [16]
    void* y;                          // bf16 [m, n] row-major
    u32 verbatim_rows;
    u32 m;
    u32 n;
    u32 k;
    u32 tile_cols;                    // k / 64
    u32 reserved;
};

// Packed products (docs/format.md A.9): Y[m, n] = X[m, k] * W[n, k]^T, W packed to 12 bits. n and k are
// multiples of 64, m is any.
struct GemmPackedArgs {
    TensorMap x;                      // bf16 [m, k], box 64 (k) x the variant's batch tile, 128-byte swizzle, zero fill
    TensorMap y_map;                  // bf16 [m, n], for variants that store by TMA
    const u8* packed;                 // [tiles, 6144]
    const u32* escape_heads;          // [tiles, 4]: one per block of 16 rows
    const u32* escapes;               // [escape_words]: lists of row blocks with more than one escape
    void* y;                          // bf16 [m, n] row-major
    float* workspace;                 // partial sums of split-K or stream-K; the plan gives its size
    u32* counters;                    // zeroed once; every launch leaves them zero
    float scale;                      // 2^(base - 112): the factor between the operands and the weights
    u32 escape_words;
    u32 m;
    u32 n;
    u32 k;
    u32 tile_cols;                    // k / 64
    const u8* x_data;                 // bf16 [m, k] again, for variants whose threads copy it themselves
    u64 x_row_bytes;
    const u16* bias;                  // bf16 [n]: what a store_add variant adds to each row instead of y; may be null
    u32 reserved[8];
};

// The same for mixture of experts: row `pairs[p]` of Y is the row of X that a list names times the weights of an
// expert. The experts' matrices [n, k] are stacked along n in one packed tensor. n and k are multiples of 64.
struct GemmGroupedArgs {
    const u8* packed;                 // [experts * tiles, 6144]
    const u32* escape_heads;          // [experts * tiles, 4]
    const u32* escapes;               // [escape_words]
    void* y;                          // bf16 [pairs, n], of a silu_mul variant [pairs, n / 2]
    const u8* x_data;                 // bf16 [pairs / pairs_per_row, k]
    u64 x_row_bytes;
    const u32* pairs;                 // [pairs], sorted by expert: rows of Y, and pairs_per_row times rows of X
    const u32* items;                 // [items, 4]: expert, first entry of `pairs`, entries (0: none, at the end), 0
    float scale;                      // 2^(base - 112): the factor between the operands and the weights
    u32 escape_words;
    u32 n;                            // of an expert
    u32 k;
    u32 tile_cols;                    // k / 64
    u32 pairs_per_row;                // pairs that share a row of X, at least 1
    u32 is_pairs;                     // items are [items], the expert of each pair, or not below `experts`; no `pairs`
    u32 experts;
};

// Routing of a mixture of experts: all stages share one struct. A pair is a token and a place among its top_k experts;
// pair = token * top_k + place. Of topk, `experts` and `top_k` are without shared experts; places of these follow.
struct RouteArgs {
    const u16* logits;                // bf16 [tokens, experts], and the gate's if `gated`; topk
    u32* ids;                         // [tokens, top_k]: written by topk, otherwise read; other ids are skipped
    float* weights;                   // [tokens, top_k]: written by topk, read by combine
    u32* pairs;                       // [tokens * top_k]: written by sort
    u32* items;                       // [items_max, 4]: written by sort, laid out as in GemmGroupedArgs
    const u16* products;              // bf16 [tokens * top_k, columns]; combine. topk_sigmoid: f32 correction [experts]
    u16* y;                           // bf16 [tokens, columns]; combine
    u64 logits_pitch;
    u64 y_pitch;
    u32 tokens;
    u32 experts;                      // 1..512
    u32 top_k;                        // 1..32, at most `experts` of topk
    u32 item_rows;                    // entries of an item: the batch tile of the products
    u32 items_max;
    u32 columns;                      // a multiple of 8
    u32 row_blocks;                   // blocks of a row of combine
    u32 normalized;                   // topk: the weights of a token add up to 1
    u32 rounded;                      // topk: weights are rounded to bf16
    u32 adds;                         // combine: y += instead of y =
    u32 shared;                       // topk: experts that every token has in addition; top_k + shared is at most 32
    u32 gated;                        // topk: their weight is the sigmoid of logit `experts` instead of 1
    float scale;                      // topk: the factor of all weights
    float routed_scale;               // topk_sigmoid: the factor of chosen experts; topk_sparse_mixer: the cutoff
};

// Encoding family (report section 4): the stages share one struct.
struct EncodeHuffmanArgs {
    const u16* weights;               // bf16 [n, k] row-major
    u8* sign_mantissa;                // [n, k]; null: `stats` only counts
    u32* histogram;                   // [256], zeroed before `stats`
    u8* palette;                      // [16]
    u8* code_lengths;                 // [16]
    u32* encode_table;                // [256]: code (LSB-first) | length << 16 | palette index << 24; length 0: none
    u64 reserved;                     // 0
    u8* row_lengths;                  // [tiles, 64]
    TileMetadata* tile_metadata;      // [tiles]; `rows` writes counts of words and rows, `scan` makes offsets
    u32* encoded_exp;                 // [capacity_words]
    u8* verbatim_exponents;           // [capacity_rows, 64]
    u8* palette_index;                // [tiles, 64, 32], stage `palette` only
    u64* totals;                      // [4]: words (before padding to 4), verbatim rows, their maximum in a tile, fault
    u64* scan_state;                  // scratch of `scan`, zeroed; [scan blocks * 4]
    u64 capacity_words;
    u32 capacity_rows;
    u32 code_limit;
    u32 n;
    u32 k;
    u32 tile_rows;
    u32 tile_cols;
};

// Families pack and unpack (docs/format.md A.9): all kernels share one struct. n and k are multiples of 64.
// unpack uses neither group_words nor inexact.
struct PackArgs {
    u16* weights;                     // bf16 [n, k] row-major: read by pack, written by unpack
    u8* packed;                       // [tiles, 6144]
    u32* escape_heads;                // [tiles, 4]
    u32* escapes;                     // [escape_words]; unused by stage tiles of pack
    u32* group_words;                 // [ceil(tiles / 16)], zeroed before tiles: words of the lists of 64 row blocks
    u64* inexact;                     // zeroed before tiles: ~(row * k + column) of the first element without operand
    u32 escape_words;
    u32 base;                         // lowest exponent of the window, 1..239
    u32 n;
    u32 k;
    u32 tile_rows;
    u32 tile_cols;
};

// Family update: replaces elements of a packed tensor (docs/format.md A.9). n and k are multiples of 64. old_heads and
// old_escapes are from before the update: the live ones for count, copies for tiles and lists.
struct UpdateArgs {
    u8* packed;                       // [tiles, 6144]: read, and written by tiles
    u32* escape_heads;                // [tiles, 4]: written by tiles and lists
    u32* escapes;                     // [escape_words]: written by lists
    const u32* old_heads;             // [tiles, 4]
    const u32* old_escapes;           // [old_escape_words]
    const u64* index;                 // [updates]: row * k + column, ascending
    const u16* values;                // bf16 [updates]
    u32* first;                       // [n * k / 64 + 1]: updates before each 64 places; written by places
    u32* histogram;                   // [256], zeroed before count: how often each exponent occurs; null: only digest
    u32* list_words;                  // zeroed before count: words of all lists
    u32* group_words;                 // [ceil(tiles / 16)], zeroed before tiles: words of the lists of 64 row blocks
    u64* inexact;                     // zeroed before count: ~(row * k + column) of the first element without operand
    u64* digest;                      // zeroed before count: a digest of the weights
    u32* faults;                      // [2], zeroed before places: 1 if a place is outside; if places do not ascend
    u32 updates;
    u32 escape_words;
    u32 old_escape_words;
    u32 base;                         // lowest exponent of the window, 1..239
    u32 n;
    u32 k;
    u32 tile_rows;
    u32 tile_cols;
};

// Conversions of the compact encoding (docs/format.md A.11): all stages share one struct.
struct DecodeCompactArgs {
    const u8* dense;                  // [tiles, 5120]
    const u32* tiles;                 // [tiles + 1, 2]: first word of the streams, head
    const u32* streams;               // [stream_words]
    const u32* records;               // [record_words]: lists of escapes
    const u32* table;                 // [512], encoding/compact.cuh
    u16* weights;                     // bf16 [n, k] row-major: written by full
    u8* packed;                       // [tiles, 6144]: written by packed
    u32* escape_heads;                // [tiles, 4]: written by packed and lists
    u32* escapes;                     // [escape_words]: written by lists
    u32* group_words;                 // [ceil(tiles / 16)], zeroed before packed: words of the lists of 64 row blocks
    u64* inexact;                     // zeroed before packed: ~(row * k + column) of the first element without operand
    u32 stream_words;                 // a multiple of 4
    u32 record_words;
    u32 class_base;                   // lowest exponent of the window of 32, 1..223
    u32 base;                         // lowest exponent of the packed encoding's window, 1..239
    u32 escape_words;
    u32 n;
    u32 k;
    u32 tile_rows;
    u32 tile_cols;
    u32 reserved;
};

// BF16 to the compact encoding (docs/format.md A.11): all stages share one struct. n and k are multiples of 64.
struct EncodeCompactArgs {
    u16* weights;                     // bf16 [n, k] row-major; only read
    u32* quads;                       // [4096], zeroed before quads: how often each quad of classes occurs
    const u32* table;                 // [4096]: the code of each quad, kernels/encode_compact.cuh; not read by quads
    u32* sizes;                       // [tiles, 2]: words of a tile's streams, and its escapes; written by sizes
    u64* inexact;                     // zeroed before sizes: ~(row * k + column) of the first element without operand
    u32* tiles;                       // [tiles + 1, 2]: first word of the streams, head; write completes the heads
    u8* dense;                        // [tiles, 5120]; written by write
    u32* streams;                     // as many words as `tiles` ends with; written by write
    u32* records;                     // [record_words]: lists of escapes; written by write
    u32 record_words;
    u32 base;                         // lowest exponent of the window of 32, 1..223
    u32 filler;                       // the class that elements outside the window are coded as
    u32 n;
    u32 k;
    u32 tile_rows;
    u32 tile_cols;
    u32 reserved;
};

// GEMM for small batches from the compact encoding (docs/format.md A.11).
struct GemmCompactArgs {
    TensorMap x;                      // bf16 [m, k], box 64 (k) x the variant's batch tile, 128-byte swizzle, zero fill
    const u8* dense;                  // [tiles, 5120]
    const u32* tiles;                 // [tiles + 1, 2]: first word of the streams, head
    const u32* streams;               // [stream_words]
    const u32* records;               // [record_words]: lists of escapes
    const u32* table;                 // [512], encoding/compact.cuh
    u16* y;                           // bf16 [m, n] row-major, of a silu_mul variant [m, n / 2]
    float scale;                      // 2^(base - 96): the factor between the operands and the weights
    u32 stream_words;                 // a multiple of 4
    u32 record_words;
    u32 m;
    u32 n;
    u32 k;
    u32 tile_cols;                    // k / 64
    u32 reserved[13];
};

// Activations of a model: m rows of bf16; kernels treat rows independently. Every row is 16-byte aligned.

// RMSNorm of all rows, or of those that a list names.
struct NormArgs {
    const u16* x;                     // bf16 [source_rows, d]
    const u16* gamma;                 // bf16 [d]
    const u32* rows;                  // [m]: rows of x; null: all, in order
    u16* y;                           // bf16 [m, d]
    u32* fault;                       // set to 1 + row of y if `rows` names no row of x (its output is zeros)
    u64 x_pitch;
    u64 y_pitch;
    float eps;
    u32 source_rows;
    u32 d;                            // a multiple of 8
    u32 reserved;
};

// Embedding lookup.
struct EmbedArgs {
    const u32* ids;                   // [m]
    const u16* table;                 // bf16 [vocabulary, d]; source bf16 only
    const u8* packed;                 // [tiles, 6144]; source packed only, as are the next two
    const u32* escape_heads;          // [tiles, 4]
    const u32* escapes;               // [escape_words]
    u16* y;                           // bf16 [m, d]
    u32* fault;                       // set to 1 + row if an id is not a row of the table (its output is zeros)
    u64 table_pitch;
    u64 y_pitch;
    u32 vocabulary;
    u32 d;                            // a multiple of 8
    u32 tile_cols;
    u32 escape_words;
    u32 base;                         // lowest exponent of the window, 1..239
    u32 reserved;
};

// silu(gate) * up.
struct SiluMulArgs {
    const u16* gate;                  // bf16 [m, columns]
    const u16* up;                    // bf16 [m, columns]
    u16* y;                           // bf16 [m, columns]
    u64 x_pitch;                      // of gate and up
    u64 y_pitch;
    u32 columns;                      // a multiple of 8
    u32 row_blocks;                   // blocks of a row
    u32 spread;                       // from 8 columns of gate and up to the next 8: 8 times this
    u32 reserved;                     // 0
};

// Scales or soft-caps activations.
struct ScaleArgs {
    const u16* x;                     // bf16 [m, columns]
    u16* y;                           // bf16 [m, columns], may be x
    u64 x_pitch;
    u64 y_pitch;
    u32 columns;                      // a multiple of 8
    u32 row_blocks;                   // blocks of a row
    float factor;
    u32 reserved;                     // 0
};

// Attention over the pages of a KV cache; h = kv_heads * group. `decode`: row r is the newest token of its own
// sequence. `prefill`: the rows are the tokens of one sequence from `start` on, and their K and V are in its pages.
struct AttentionArgs {
    const u16* qkv;                   // bf16 [m, (h + 2 * kv_heads) * head_dim]: q heads, k heads, v heads
    u16* out;                         // bf16 [m, h * head_dim]
    u16* layer;                       // the pages of one layer (encoding/kv_page.cuh)
    const u32* positions;             // decode: [m] position of each row's token; 0xffffffff: no token
    const u32* page_table;            // decode: [m, table_pages]; prefill: [table_pages]
    const u16* cosines;               // this and the next four, decode: bf16 [max_positions, rope_dim / 2]
    const u16* sines;                 // the same
    const u16* bias;                  // bf16 [(h + 2 * kv_heads) * head_dim], or null
    const u16* q_norm;                // bf16 [head_dim], or null
    const u16* k_norm;                // the same
    u32* fault;                       // set to 1 + row if the row leaves the tables or the cache
    u8* partials;                     // decode, split: partial results of the parts; null if parts is 1
    u32* counters;                    // the same: u32 [m * kv_heads], zero before and after
    u64 qkv_pitch;                    // elements from row to row
    u64 out_pitch;
    u32 m;
    u32 kv_heads;
    u32 group;                        // q heads of a KV head, 1..16
    u32 pages;                        // of the layer
    u32 table_pages;                  // entries of a row's page table, at least 1
    u32 max_positions;                // positions of tokens are below this
    u32 window;                       // tokens that a token attends to, including itself; 0: all before it
    u32 rope_dim;                     // elements of a head that are rotated: a multiple of 4, at most head_dim
    u32 start;                        // prefill: position of the first row's token
    float scale;                      // of scores, times log2(e); with a soft cap: the cap, times log2(e)
    float eps;                        // of the norms; with a soft cap: the factor of the scores
    u32 parts;                        // decode, split: blocks that share the tokens of a row and KV head, at least 1
    const u8* records;                // this and the rest, decode of packed pages (encoding/kv_packed.cuh): of a layer
    const u8* unit_pages;             // bf16 operands of units with too many escapes for their records
    u16* hot;                         // bf16 pages of the layer that sequences are writing
    const u32* hot_table;             // [m] the hot page of each row
    u32 hot_pages;                    // of the layer
    u32 units;                        // in unit_pages
};

// Packs pages of the KV cache, or frees the units of pages that are free again (encoding/kv_packed.cuh).
struct KvPackArgs {
    const u16* source;                // bf16 pages; step: hot pages [layers][source_pages]; chunk: of one layer
    u8* packed;                       // [layers][pages]
    u8* records;                      // [layers][pages]
    u8* unit_pages;                   // [units]
    u32* free_units;                  // [1 + units]: the number of free units, and their indices
    const u32* positions;             // step: [m] position of each row's newest token; 0xffffffff: no token
    const u32* page_table;            // step: [m, table_pages]; chunk, release: [m]; 0xffffffff: do not pack
    const u32* hot_table;             // step: [m]
    u32* lost;                        // step: [m], chunk: [1]; set to 1 if no unit was free
    u32* fault;                       // set to 1 + row (step) or place in the table if a page does not exist
    u64 source_pitch;                 // elements from layer to layer
    u64 packed_pitch;                 // bytes from layer to layer
    u64 record_pitch;
    u32 m;                            // step: rows; chunk, release: pages
    u32 layers;
    u32 kv_heads;
    u32 pages;                        // of a layer
    u32 source_pages;                 // of a layer of the source
    u32 table_pages;                  // step: entries of a row's page table
    u32 units;
    u32 first;                        // chunk: page m of the table comes from source page first + m
};

// Unpacks pages of one layer and sequence to bf16 pages.
struct KvUnpackArgs {
    const u8* packed;                 // [pages]
    const u8* records;                // [pages]
    const u8* unit_pages;             // [units]
    const u32* page_table;            // [m]
    u16* out;                         // bf16 pages [m]
    u32* fault;                       // set to 1 + place in the table if a page does not exist or cannot be read
    u32 m;                            // pages
    u32 kv_heads;
    u32 pages;                        // of the layer
    u32 units;
};

// Bias, QK-norm and rotation of the heads of a chunk of one sequence; stores K and V in their pages.
struct RopeArgs {
    u16* qkv;                         // bf16 [m, (heads + 2 * kv_heads) * head_dim]; q heads are rewritten
    const u16* bias;                  // bf16 [(heads + 2 * kv_heads) * head_dim]; null: none
    const u16* q_norm;                // bf16 [head_dim]; null: none
    const u16* k_norm;                // bf16 [head_dim]; null: none
    const u16* cosines;               // bf16 [positions, rope_dim / 2]
    const u16* sines;                 // bf16 [positions, rope_dim / 2]
    u16* cache;                       // bf16, the pages of a layer (encoding/kv_page.cuh)
    const u32* pages;                 // pages of the sequence, up to the page of position start + m - 1
    u32* fault;                       // set to 1 + row if the cache does not have the page of a token
    u64 pitch;
    float eps;
    u32 start;                        // position of the first row
    u32 heads;
    u32 kv_heads;
    u32 rope_dim;                     // elements of a head that are rotated, a multiple of 4
    u32 cache_pages;
};

// Sampling parameters of one row. Filters apply in this order: temperature, top_k, top_p, min_p.
struct SampleRow {
    u64 seed;                         // of the random numbers
    float temperature;                // divides the logits; 0: the largest logit, among equal ones the lowest token
    u32 top_k;                        // 0: all
    float top_p;                      // 1: all
    float min_p;                      // 0: all
};

// Adjustments of the logits of one row.
struct AdjustRow {
    u32 slot;                         // row of the token states, or 0xffffffff: no adjustments
    float repetition;                 // divides positive logits of tokens in prompt or answer, multiplies others
    float frequency;                  // subtracted once per occurrence of the token in the answer
    float presence;                   // subtracted for each token that is in the answer
    u32 end_from;                     // first position at which an end token may be sampled
    u32 mask;                         // 1 + row of the masks, or 0: any token may be sampled
};

// State of one token of the vocabulary that adjustments depend on.
struct TokenState {
    float bias;                       // added to the logit
    u32 marks;                        // bit 31: in the prompt; bit 30: ends the sequence; below: count in the answer
};

// Samples a token for each row of logits. Adjusted variants read positions to which 1 was already added.
struct SampleArgs {
    const u16* logits;                // bf16 [m, vocabulary]
    const SampleRow* rows;            // [m]
    u32* positions;                   // [m] position of the token whose logits these are, or 0xffffffff; 1 is added
    u32* ids;                         // [m]
    u32* fault;                       // set to 1 + row if all logits of a row are NaN
    const AdjustRow* adjusts;         // [m]; adjusted variants
    TokenState* tokens;               // [slots, token_pitch]; adjusted variants count the sampled token
    const u32* masks;                 // [masks, (vocabulary + 31) / 32], a bit per token; adjusted variants
    u64 pitch;                        // elements from row to row, a multiple of 8
    u32 vocabulary;                   // 1..2^20
    u32 token_pitch;                  // entries of `tokens` from slot to slot, a multiple of 2
};

// Log probabilities of the sampled token and of the most likely tokens of each row.
struct LogprobsArgs {
    const u16* logits;                // bf16 [m, vocabulary]
    const u32* wanted;                // [m]: 0: no log probabilities, else 1 + the number of most likely tokens
    const u32* ids;                   // [m]: sampled tokens
    u32* out;                         // [m, 21, 2]: token and f32; the sampled token, then the most likely ones
    u64 pitch;                        // elements from row to row, a multiple of 8
    u32 vocabulary;                   // 1..2^20
    u32 reserved;
};

}  // namespace uw
