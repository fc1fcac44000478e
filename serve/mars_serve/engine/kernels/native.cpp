// A decoder's products with few rows, and what it computes between them, for numbers of one type.
//
// Compiled by `native.py` with NUMBER_BFLOAT16 or NUMBER_FLOAT32 defined. All sums are in float32,
// and a result depends on its own row alone: not on the number of threads or of other rows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "threads.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

// Compilers split wider vectors than a processor has into code that is many times as slow.
#if defined(__AVX512F__)
constexpr int kLanes = 16;  // numbers that are computed with at once
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kMostGroups = 256 / kLanes;  // groups of kLanes keys in a block
constexpr int kMostQueries = 8;  // queries that meet a block at once, by what registers hold
constexpr int kManyQueries = 6;  // the same where there are more, by what is fastest

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));

#ifdef NUMBER_BFLOAT16

typedef uint16_t Number;

inline float from_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
inline float load_one(const Number* from) { return from_bits(uint32_t(*from) << 16); }
inline void store_one(Number* to, float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  *to = number == number ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}
inline Words widen(const Number* from) {
#if defined(__AVX512F__)  // compilers take four instructions for the last line
  return (Words)_mm512_cvtepu16_epi32((__m256i)*reinterpret_cast<const Halves*>(from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)*reinterpret_cast<const Halves*>(from));
#else
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words);
#endif
}
inline Floats load(const Number* from) { return (Floats)(widen(from) << 16); }
inline void store(Number* to, Floats numbers) {
#ifdef __AVX512BF16__
  *reinterpret_cast<Halves*>(to) = (Halves)_mm512_cvtneps_pbh((__m512)numbers);
#else
  const Words bits = (Words)numbers, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words kept = (Words)(numbers == numbers) ? rounded : rounded - rounded + 0x7fc0;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(kept, Halves);
#endif
}

#else

typedef float Number;

inline float load_one(const float* from) { return *from; }
inline void store_one(float* to, float number) { *to = number; }

#endif

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline void store(float* to, Floats numbers) { *reinterpret_cast<Floats*>(to) = numbers; }
inline Floats all(float number) { return number - Floats{}; }

// one * other + sum. Compilers decide by the code around it whether to round once or twice, and for
// some processors prefer two slower instructions, so it is spelt out where they have one.
inline Floats multiply_add(Floats one, Floats other, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#else
  return one * other + sum;
#endif
}

inline float sum(Floats numbers) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)numbers);
#else
  float lanes[kLanes];
  store(lanes, numbers);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// The larger of two numbers each, the second one where one of them is NaN.
inline Floats larger(Floats one, Floats other) {
#ifdef __AVX512F__  // compilers take two instructions for the other line
  return (Floats)_mm512_max_ps((__m512)one, (__m512)other);
#else
  return one > other ? one : other;
#endif
}

// The largest number, where none is NaN.
inline float largest(Floats numbers) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)numbers);
#else
  float lanes[kLanes];
  store(lanes, numbers);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i)
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

constexpr float kLog2E = 1.44269504f;

// The polynomial of least relative error for powers of two from -.5 to .5.
#ifdef NUMBER_BFLOAT16
constexpr int kPowerDegree = 3;  // within 8e-5, and bfloat16 rounds by up to 4e-3
constexpr float kPowerSeries[] = {0.0551716685f, 0.242611125f, 0.693260968f, 0.999928057f};
#else
constexpr int kPowerDegree = 5;  // within 3e-7
constexpr float kPowerSeries[] = {0.00132764725f, 0.00967554189f, 0.0555071309f,
                                  0.240221202f,   0.693146944f,   1.0f};
#endif

// 2^x for x up to 127; NaN for NaN, and 0 below -126.5.
inline Floats power_of_two(Floats x) {
  x = larger(all(-127), x);
  // Adding 1.5 * 2^23 leaves whole numbers in the last bits, where 127 makes them exponents.
  const Floats biased = x + (12582912.0f + 127), rest = x - (biased - (12582912.0f + 127));
  Floats series = all(kPowerSeries[0]);
  for (int i = 1; i <= kPowerDegree; ++i) series = multiply_add(series, rest, all(kPowerSeries[i]));
  return series * (Floats)((Words)biased << 23);
}

// e^x; infinity above 88.4.
inline Floats exponential(Floats x) { return power_of_two((x > 89 ? all(89) : x) * kLog2E); }

#if defined(NUMBER_BFLOAT16) && defined(__AVX512BF16__)

// Two numbers a lane, which meet two factors in one instruction.
typedef Words Pairs;
typedef uint32_t Factors;

constexpr int kParts = 1;  // vectors in which the pairs of kLanes outputs are packed

inline Pairs load_pairs(const Number* first) { return widen(first); }
inline Pairs load_pairs(const Number* first, const Number* second) {
  return widen(first) | widen(second) << 16;
}
inline Pairs load_part(const Number* from, int) { return *reinterpret_cast<const Pairs*>(from); }
// Sets count / 2 + 1 factors, the last of them to 0 or to one number and 0.
inline void set_factors(Factors* to, const Number* from, int64_t count) {
  to[count / 2] = 0;
  std::memcpy(to, from, count * sizeof(Number));
}
inline void store_factors(Factors* to, Floats numbers) {
  const Halves halves = (Halves)_mm512_cvtneps_pbh((__m512)numbers);
  std::memcpy(to, &halves, sizeof halves);  // compilers may forget what a cast pointer stored
}
inline void add_products(Floats& sums, Factors factors, Pairs pairs) {
  const Words repeated = factors - Words{};
  sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)repeated, (__m512bh)pairs);
}
inline void add_part(Floats& sums, Factors factors, int, Pairs pairs) {
  add_products(sums, factors, pairs);
}

#else

struct Pairs {
  Floats first, second;
};
struct Factors {
  float first, second;
};

constexpr int kParts = 2;

inline Floats load_part(const Number* from, int part) { return load(from + part * kLanes); }
inline Pairs load_pairs(const Number* first) { return {load(first), Floats{}}; }
inline Pairs load_pairs(const Number* first, const Number* second) {
  return {load(first), load(second)};
}
inline void set_factors(Factors* to, const Number* from, int64_t count) {
  to[count / 2] = {};
  for (int64_t i = 0; i < count; ++i)
    (i % 2 ? to[i / 2].second : to[i / 2].first) = load_one(from + i);
}
inline void store_factors(Factors* to, Floats numbers) { store(&to->first, numbers); }
inline void add_products(Floats& sums, Factors factors, const Pairs& pairs) {
  sums = multiply_add(all(factors.first), pairs.first, sums);
  sums = multiply_add(all(factors.second), pairs.second, sums);
}
inline void add_part(Floats& sums, Factors factors, int part, Floats numbers) {
  sums = multiply_add(all(part ? factors.second : factors.first), numbers, sums);
}

#endif

}  // namespace

extern "C" {

// Arguments of one layer's attention; `native.py` has the same fields in the same order.
struct AttentionArguments {
  const Number* query;  // [positions, heads, key_dim], by the strides below, as key and value are
  const Number* key;    // [positions, kv_heads, key_dim]
  const Number* value;  // [positions, kv_heads, value_dim]
  Number* output;       // [positions, heads, value_dim]
  Number* key_pages;    // [pages, kv_heads, key_dim, page_width]
  Number* value_pages;  // [pages, kv_heads, page_size, value_width]
  const int64_t* page_table;  // [rows, table_width]
  const int64_t* slots;       // [positions], page * page_size + place, or -1 for none
  const int64_t* rows;        // [positions]
  const int64_t* oldest;      // [positions], the first token that is seen
  const int64_t* seen;        // [positions], the first token behind it that is not
  const int64_t* masks;       // [positions], the first mask that is seen, up to the position itself
  const int64_t* tiles;       // [tiles, 2], positions of a row: the first and the end
  const float* sinks;         // [heads], or null
  int64_t query_stride, query_head_stride;
  int64_t key_stride, key_head_stride;
  int64_t value_stride, value_head_stride;
  int64_t num_positions, num_tiles, table_width;
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t page_size, page_width, value_width;  // the widths are multiples of 16
  int64_t writes_pages, num_threads;
  float scaling;
  float softcap;  // 0 for none
};

}  // extern "C"

namespace {

typedef AttentionArguments Arguments;

void write_page(const Arguments& a, int64_t position) {
  const int64_t slot = a.slots[position];
  if (slot < 0) return;
  const int64_t page = slot / a.page_size, place = slot % a.page_size;
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    const int64_t block = page * a.kv_heads + head;
    const Number* key = a.key + position * a.key_stride + head * a.key_head_stride;
    Number* keys = a.key_pages + block * a.key_dim * a.page_width + place;
    for (int64_t d = 0; d < a.key_dim; ++d) keys[d * a.page_width] = key[d];
    const Number* value = a.value + position * a.value_stride + head * a.value_head_stride;
    Number* values = a.value_pages + (block * a.page_size + place) * a.value_width;
    std::memcpy(values, value, a.value_dim * sizeof(Number));
  }
}

struct Range {
  int64_t begin, end;
};

// Groups of up to kLanes keys that lie side by side, with their values.
struct Block {
  int num_groups = 0;
  int64_t key_stride;
  const Number* keys[kMostGroups];    // [key_dim, kLanes] by key_stride
  const Number* values[kMostGroups];  // [keys, value_width]
  int64_t first[kMostGroups];         // the number of the first key, as in ranges that are seen
  int num_keys[kMostGroups];
};

// The queries of a tile for one key/value head, and what they have attended to so far.
struct Tile {
  std::vector<Factors> queries;  // [queries, key_dim / 2 + 1]
  std::vector<float> attended;  // [queries, value_width], sums weighted by e^(score - top)
  std::vector<float> totals;    // [queries, kLanes], whose sum is that of the weights
  std::vector<float> tops;      // [queries], largest scores
  std::vector<Range> tokens, masks;  // [queries], what each sees
  std::vector<Number> keys, values;  // of a group of masks
};

// Makes a query's products with a group's keys its scores, -inf for keys that it does not see.
inline void finish_scores(const Arguments& a, const Block& block, int group, Range seen,
                          float* scores) {
  if (a.softcap > 0) {
    const float most = a.softcap * kLog2E;
    store(scores, most - 2 * most / (exponential(load(scores) * (2 / most)) + 1));
  }
  const int64_t begin = seen.begin - block.first[group];
  int64_t end = seen.end - block.first[group];
  if (end > block.num_keys[group]) end = block.num_keys[group];
  if (begin <= 0 && end == kLanes) return;
  Integers lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int least = begin < kLanes ? begin : kLanes, most = end > 0 ? end : 0;
  store(scores, (lane >= least) & (lane < most) ? load(scores) : all(-INFINITY));
}

// What NUM queries of a tile find in a block.
template <int NUM>
struct Finding {
  float scores[NUM][kMostGroups * kLanes];  // logarithms to base 2
  Factors weights[NUM][kMostGroups * kLanes / 2];
  float scales[16];  // of what each has attended to before, in whole vectors
};

template <int NUM>
inline void find_products(const Arguments& a, const Block& block, const Factors* queries,
                          Finding<NUM>& found) {
  const int64_t pairs = a.key_dim / 2, size = pairs + 1;
  for (int group = 0; group < block.num_groups; ++group) {
    Floats sums[NUM] = {};
    const Number* keys = block.keys[group];
    for (int64_t d = 0; d < pairs; ++d, keys += 2 * block.key_stride) {
      const Pairs key = load_pairs(keys, keys + block.key_stride);
      for (int q = 0; q < NUM; ++q) add_products(sums[q], queries[q * size + d], key);
    }
    if (a.key_dim % 2)
      for (int q = 0; q < NUM; ++q)
        add_products(sums[q], queries[q * size + pairs], load_pairs(keys));
    for (int q = 0; q < NUM; ++q)
      store(&found.scores[q][group * kLanes], sums[q] * (a.scaling * kLog2E));
  }
}

template <int NUM>
inline void find_weights(const Block& block, Tile& tile, int64_t first, Finding<NUM>& found) {
  float bases[16] = {};
  std::memset(found.scales, 0, sizeof found.scales);
  for (int q = 0; q < NUM; ++q) {
    float& top = tile.tops[first + q];
    Floats tops = all(top);
    for (int group = 0; group < block.num_groups; ++group)
      tops = larger(load(&found.scores[q][group * kLanes]), tops);
    found.scales[q] = top;
    top = largest(tops);
    bases[q] = top == -INFINITY ? 0 : top;
  }
  for (int q = 0; q < NUM; q += kLanes)
    store(&found.scales[q], power_of_two(load(&found.scales[q]) - load(&bases[q])));
  for (int q = 0; q < NUM; ++q) {
    float* totals = &tile.totals[(first + q) * kLanes];
    Floats total = {};
    for (int group = 0; group < block.num_groups; ++group) {
      const Floats weight = power_of_two(load(&found.scores[q][group * kLanes]) - bases[q]);
      total += weight;
      store_factors(&found.weights[q][group * kLanes / 2], weight);
    }
    store(totals, multiply_add(load(totals), all(found.scales[q]), total));
  }
}

// Adds two vectors of the block's weighted values, or the same one twice if next is 0.
template <int NUM>
inline void add_values(const Block& block, int64_t width, int64_t d, int64_t next,
                       const Finding<NUM>& found, float* attended) {
  Floats sums[NUM][2];
  for (int q = 0; q < NUM; ++q) {
    sums[q][0] = load(attended + q * width) * found.scales[q];
    sums[q][1] = load(attended + q * width + next) * found.scales[q];
  }
  for (int group = 0; group < block.num_groups; ++group) {
    const Number* values = block.values[group] + d;
    const auto add = [&](int pair, const Pairs& one, const Pairs& other) {
      for (int q = 0; q < NUM; ++q) {
        add_products(sums[q][0], found.weights[q][group * kLanes / 2 + pair], one);
        add_products(sums[q][1], found.weights[q][group * kLanes / 2 + pair], other);
      }
    };
    const int num_pairs = block.num_keys[group] / 2;
    for (int pair = 0; pair < num_pairs; ++pair, values += 2 * width)
      add(pair, load_pairs(values, values + width),
          load_pairs(values + next, values + width + next));
    if (block.num_keys[group] % 2) add(num_pairs, load_pairs(values), load_pairs(values + next));
  }
  for (int q = 0; q < NUM; ++q) {
    store(attended + q * width, sums[q][0]);
    if (next) store(attended + q * width + next, sums[q][1]);
  }
}

// Lets NUM queries of a tile, from `first` on, attend to a block.
template <int NUM>
void attend_queries(const Arguments& a, const Block& block, Tile& tile, int64_t first,
                    const Range* ranges, bool see_all) {
  Finding<NUM> found;
  find_products(a, block, &tile.queries[first * (a.key_dim / 2 + 1)], found);
  if (!see_all || a.softcap > 0)
    for (int q = 0; q < NUM; ++q)
      for (int group = 0; group < block.num_groups; ++group)
        finish_scores(a, block, group, ranges[first + q], &found.scores[q][group * kLanes]);
  find_weights(block, tile, first, found);
  for (int64_t d = 0; d < a.value_width; d += 2 * kLanes)
    add_values(block, a.value_width, d, d + kLanes < a.value_width ? kLanes : 0, found,
               &tile.attended[first * a.value_width + d]);
}

typedef void (*AttendQueries)(const Arguments&, const Block&, Tile&, int64_t, const Range*, bool);
constexpr AttendQueries kAttendQueries[kMostQueries] = {
    attend_queries<1>, attend_queries<2>, attend_queries<3>, attend_queries<4>,
    attend_queries<5>, attend_queries<6>, attend_queries<7>, attend_queries<8>};

// Lets the queries of a tile that see any of a block's keys attend to it.
void attend_block(const Arguments& a, const Block& block, Tile& tile,
                  const std::vector<Range>& ranges, Range keys) {
  const int64_t num_queries = ranges.size();
  const bool is_full = keys.end - keys.begin == block.num_groups * kLanes;
  const int64_t at_once = num_queries > kMostQueries ? kManyQueries : kMostQueries;
  for (int64_t first = 0; first < num_queries; first += at_once) {
    const int count = num_queries - first < at_once ? num_queries - first : at_once;
    bool see_any = false, see_all = is_full;
    for (int64_t q = first; q < first + count; ++q) {
      see_any |= ranges[q].begin < keys.end && ranges[q].end > keys.begin;
      see_all &= ranges[q].begin <= keys.begin && ranges[q].end >= keys.end;
    }
    if (see_any) kAttendQueries[count - 1](a, block, tile, first, ranges.data(), see_all);
  }
}

void attend_tokens(const Arguments& a, int64_t row, int64_t head, Tile& tile, Range seen) {
  const int64_t* pages = a.page_table + row * a.table_width;
  Block block;
  block.key_stride = a.page_width;
  int64_t key = seen.begin / a.page_size * a.page_size, first = key;
  while (key < seen.end) {
    const int64_t place = key % a.page_size;
    const int64_t own = pages[key / a.page_size] * a.kv_heads + head;
    int64_t count = a.page_size - place < kLanes ? a.page_size - place : kLanes;
    if (count > seen.end - key) count = seen.end - key;
    block.keys[block.num_groups] = a.key_pages + own * a.key_dim * a.page_width + place;
    block.values[block.num_groups] = a.value_pages + (own * a.page_size + place) * a.value_width;
    block.first[block.num_groups] = key;
    block.num_keys[block.num_groups] = count;
    key += count;
    if (++block.num_groups == kMostGroups || key == seen.end) {
      attend_block(a, block, tile, tile.tokens, {first, key});
      block.num_groups = 0;
      first = key;
    }
  }
}

void attend_masks(const Arguments& a, int64_t head, Tile& tile, Range seen) {
  Block block;
  block.num_groups = 1;
  block.key_stride = kLanes;
  for (int64_t first = seen.begin; first < seen.end; first += kLanes) {
    const int count = seen.end - first < kLanes ? seen.end - first : kLanes;
    tile.keys.assign(a.key_dim * kLanes, 0);
    tile.values.assign(kLanes * a.value_width, 0);
    for (int place = 0; place < count; ++place) {
      const int64_t mask = first + place;
      const Number* key = a.key + mask * a.key_stride + head * a.key_head_stride;
      for (int64_t d = 0; d < a.key_dim; ++d) tile.keys[d * kLanes + place] = key[d];
      const Number* value = a.value + mask * a.value_stride + head * a.value_head_stride;
      std::memcpy(&tile.values[place * a.value_width], value, a.value_dim * sizeof(Number));
    }
    block.keys[0] = tile.keys.data();
    block.values[0] = tile.values.data();
    block.first[0] = first;
    block.num_keys[0] = count;
    attend_block(a, block, tile, tile.masks, {first, first + count});
  }
}

// Lets the positions of a tile attend with some query heads of one key/value head.
void attend_tile(const Arguments& a, Range positions, int64_t head, Range query_heads, Tile& tile) {
  const int64_t num_heads = query_heads.end - query_heads.begin;
  const int64_t num_queries = (positions.end - positions.begin) * num_heads;
  const int64_t size = a.key_dim / 2 + 1;
  tile.queries.resize(num_queries * size);
  tile.attended.assign(num_queries * a.value_width, 0);
  tile.totals.assign(num_queries * kLanes, 0);
  tile.tops.assign(num_queries, -INFINITY);
  tile.tokens.resize(num_queries);
  tile.masks.resize(num_queries);
  Range tokens = {INT64_MAX, 0}, masks = {positions.end, positions.end};
  for (int64_t q = 0; q < num_queries; ++q) {
    const int64_t position = positions.begin + q / num_heads;
    const int64_t own = query_heads.begin + q % num_heads;
    const Number* query = a.query + position * a.query_stride + own * a.query_head_stride;
    set_factors(&tile.queries[q * size], query, a.key_dim);
    tile.tokens[q] = {a.oldest[position], a.seen[position]};
    tile.masks[q] = {a.masks[position], position + 1};
    if (a.sinks) {
      tile.tops[q] = a.sinks[own] * kLog2E;
      tile.totals[q * kLanes] = 1;
    }
    if (a.oldest[position] < tokens.begin) tokens.begin = a.oldest[position];
    if (a.seen[position] > tokens.end) tokens.end = a.seen[position];
    if (a.masks[position] < masks.begin) masks.begin = a.masks[position];
  }
  attend_tokens(a, a.rows[positions.begin], head, tile, tokens);
  attend_masks(a, head, tile, masks);
  for (int64_t q = 0; q < num_queries; ++q) {
    const int64_t position = positions.begin + q / num_heads;
    const int64_t own = query_heads.begin + q % num_heads;
    Number* output = a.output + (position * a.heads + own) * a.value_dim;
    const float total = sum(load(&tile.totals[q * kLanes]));
    const float* attended = &tile.attended[q * a.value_width];
    int64_t d = 0;
    for (; d + kLanes <= a.value_dim; d += kLanes) store(output + d, load(attended + d) / total);
    for (; d < a.value_dim; ++d) store_one(output + d, attended[d] / total);
  }
}

inline float root_mean_square(const Number* row, int64_t size, float epsilon) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    squares = multiply_add(load(row + i), load(row + i), squares);
  float total = sum(squares);
  for (; i < size; ++i) total += load_one(row + i) * load_one(row + i);
  return std::sqrt(total / size + epsilon);
}

inline void norm_row(const Number* row, const float* weight, Number* output, int64_t size,
                     float epsilon) {
  const float scale = 1 / root_mean_square(row, size, epsilon);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(output + i, load(row + i) * scale * load(weight + i));
  for (; i < size; ++i) store_one(output + i, load_one(row + i) * scale * weight[i]);
}

inline void add_row(const Number* row, const Number* other, Number* output, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(output + i, load(row + i) + load(other + i));
  for (; i < size; ++i) store_one(output + i, load_one(row + i) + load_one(other + i));
}

inline void rotate_head(Number* head, const Number* cosine, const Number* sine, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats first = load(head + i), second = load(head + half + i);
    store(head + i, first * load(cosine + i) - second * load(sine + i));
    store(head + half + i,
          second * load(cosine + half + i) + first * load(sine + half + i));
  }
  for (; i < half; ++i) {
    const float first = load_one(head + i), second = load_one(head + half + i);
    store_one(head + i, first * load_one(cosine + i) - second * load_one(sine + i));
    store_one(head + half + i,
              second * load_one(cosine + half + i) + first * load_one(sine + half + i));
  }
}

inline void gate_row(const Number* gate, const Number* up, Number* output, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats number = load(gate + i);
    store(output + i, number / (1 + exponential(-number)) * load(up + i));
  }
  for (; i < size; ++i) {
    const float number = load_one(gate + i);
    store_one(output + i, number / (1 + exponential(all(-number))[0]) * load_one(up + i));
  }
}

constexpr int kVectors = 4;  // vectors of a block of outputs, whose weights lie side by side
constexpr int kBlock = kVectors * kLanes;
constexpr int kMostRows = 6;  // rows multiplied at once
constexpr int kRegisters = kLanes == 16 ? 32 : 16;
constexpr int kLine = 64;  // bytes of a line of the cache

struct Product {
  const Factors* inputs;  // [rows, pairs]
  const Number* weights;  // [outputs / kBlock, pairs, kVectors, 2 * kLanes]
  const float* bias;      // [outputs], or null
  Number* outputs;        // [rows, outputs]
  int64_t rows, pairs, num_outputs;
};

// Multiplies NUM rows with the weights of VECTORS vectors of a block, and meanwhile fetches those of
// the next one into the cache from `next` on, `bytes` for each pair.
template <int NUM, int VECTORS>
void multiply_vectors(const Product& p, int64_t block, int vector, int64_t row, const char* next,
                      int64_t bytes) {
  constexpr int size = VECTORS * kLanes;
  const int64_t begin = block * kBlock + vector * kLanes, left = p.num_outputs - begin;
  if (left <= 0) return;
  float biases[size] = {};
  if (p.bias) std::memcpy(biases, p.bias + begin, (left < size ? left : size) * sizeof(float));
  Floats sums[NUM][VECTORS];
  for (int r = 0; r < NUM; ++r)
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = load(biases + v * kLanes);
  const Number* weights = p.weights + (block * p.pairs * kVectors + vector) * 2 * kLanes;
  const Factors* inputs = p.inputs + row * p.pairs;
  for (int64_t pair = 0; pair < p.pairs; ++pair, weights += 2 * kBlock, next += bytes) {
    for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(next + line, 0, 2);
    for (int part = 0; part < kParts; ++part) {
      decltype(load_part(weights, part)) numbers[VECTORS];
      for (int v = 0; v < VECTORS; ++v) numbers[v] = load_part(weights + v * 2 * kLanes, part);
      for (int r = 0; r < NUM; ++r)
        for (int v = 0; v < VECTORS; ++v)
          add_part(sums[r][v], inputs[r * p.pairs + pair], part, numbers[v]);
    }
  }
  for (int r = 0; r < NUM; ++r) {
    Number outputs[size], *to = p.outputs + (row + r) * p.num_outputs + begin;
    for (int v = 0; v < VECTORS; ++v)
      store(left < size ? outputs + v * kLanes : to + v * kLanes, sums[r][v]);
    if (left < size) std::memcpy(to, outputs, left * sizeof(Number));
  }
}

// Multiplies NUM rows with a block, as many vectors at once as registers hold the sums of.
template <int NUM>
void multiply_rows(const Product& p, int64_t block, int64_t row, const char* next, int64_t bytes) {
  constexpr int at_once = NUM * kVectors < kRegisters ? kVectors : kVectors / 2;
  for (int vector = 0; vector < kVectors; vector += at_once, bytes = 0)
    multiply_vectors<NUM, at_once>(p, block, vector, row, next, bytes);
}

typedef void (*MultiplyRows)(const Product&, int64_t, int64_t, const char*, int64_t);
constexpr MultiplyRows kMultiplyRows[] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                          multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};

// Multiplies all rows, in groups, with the weights of a block, which are read from memory once.
void multiply_block(const Product& p, int64_t block) {
  const int64_t groups = (p.rows + kMostRows - 1) / kMostRows, per_pair = 2 * kBlock * sizeof(Number);
  const int64_t share = (per_pair / groups + kLine - 1) / kLine * kLine;
  const char* next = reinterpret_cast<const char*>(p.weights) + (block + 1) * p.pairs * per_pair;
  for (int64_t group = 0, row = 0; group < groups; ++group, next += share * p.pairs) {
    const int64_t count = (p.rows - row + groups - group - 1) / (groups - group);
    // The processor itself fetches what one group reads in turn; more of them leave it time.
    const bool fetches = groups > 1 && group * share < per_pair;
    kMultiplyRows[count - 1](p, block, row, next, fetches ? share : 0);
    row += count;
  }
}

struct Proposal {
  int32_t token;
  float confidence;
};

// Returns the probability of a number among those of a row, which is padded with -inf, all divided by
// `divisor`; NaN if one of them is NaN or inf, or all are -inf.
float probability_of(float number, const std::vector<float>& row, float divisor) {
  Floats tops = all(-INFINITY), totals = {};
  for (size_t at = 0; at < row.size(); at += kLanes) tops = larger(load(&row[at]), tops);
  const float top = largest(tops), factor = 1 / divisor;
  for (size_t at = 0; at < row.size(); at += kLanes)
    totals += exponential((load(&row[at]) - top) * factor);
  return exponential(all((number - top) * factor))[0] / sum(totals);
}

// Returns the place of the largest number of a row, of the first among equals, or of the first NaN.
int64_t place_of_largest(const std::vector<float>& row) {
  Floats tops = all(-INFINITY);
  Integers places = {}, nans = {}, place = {};
  for (int i = 0; i < kLanes; ++i) places[i] = place[i] = i;
  for (size_t at = 0; at < row.size(); at += kLanes, place += kLanes) {
    const Floats numbers = load(&row[at]);
    nans |= numbers != numbers;
    places = numbers > tops ? place : places;
    tops = larger(numbers, tops);
  }
  int first = 0;
  for (int i = 1; i < kLanes; ++i)
    if (tops[i] > tops[first] || (tops[i] == tops[first] && places[i] < places[first])) first = i;
  bool has_nan = false;
  for (int i = 0; i < kLanes; ++i) has_nan |= nans[i] != 0;
  int64_t found = places[first];
  if (has_nan)
    for (found = 0; row[found] == row[found];) ++found;
  return found;
}

struct Likely {
  float logit;
  int64_t token;
};

// Consecutive reads whose tokens are chosen one behind the other; `native.py` has the same fields.
struct Chain {
  int64_t read, num_reads;
  int64_t token;  // before the first read's own, by which a draft head acts; -1 without a head
  int64_t gates;  // the first read's row of `Walk::gates`
  int64_t seed, position, top_k;  // of the noise, of the first token, and tokens to choose from
  float temperature;              // 0 for the likeliest token
  float top_p, least;             // top_p above 1 keeps all tokens, `least` those of such a score
};

struct Walk {
  const Number* logits;    // [reads, size]
  const int64_t* banned;   // [num_banned], tokens that are never chosen
  const float* divisors;   // [reads], of the logits for confidences, 0 where those do not matter
  const float* gates;      // [reads of all chains, rank], of a draft head; null without one
  const float* previous;   // [size, rank], its weights by the token before
  const float* following;  // [size, rank], its weights by the drafted token
  Proposal* proposals;     // [reads], the likeliest tokens without the head
  int64_t num_banned, size, rank, most;
};

constexpr float kLowest = std::numeric_limits<float>::lowest();

bool is_likelier(const Likely& one, const Likely& other) {
  return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

// Finds the tokens of the largest logits of a row, which is padded with -inf, at most `most` and the
// first among equals; none of them is at -inf.
void find_likely(const std::vector<float>& row, int64_t most, std::vector<Likely>& likely) {
  static thread_local std::vector<float> tops, ordered;
  constexpr int64_t kPart = 64;
  const int64_t size = row.size(), num_parts = (size + kPart - 1) / kPart;
  float least = kLowest;
  tops.resize(num_parts);
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t end = std::min(part * kPart + kPart, size);
    Floats top = all(-INFINITY);
    for (int64_t at = part * kPart; at < end; at += kLanes) top = larger(load(&row[at]), top);
    tops[part] = largest(top);
  }
  if (most <= num_parts) {  // as many parts hold a number as large as the least one to find
    ordered = tops;
    std::nth_element(ordered.begin(), ordered.begin() + most - 1, ordered.end(), std::greater<>());
    least = std::max(least, ordered[most - 1]);
  }
  likely.clear();
  for (int64_t at = 0; at < size; ++at)
    if (at % kPart == 0 && tops[at / kPart] < least)
      at += kPart - 1;
    else if (row[at] >= least)
      likely.push_back({row[at], at});
  if (int64_t(likely.size()) > most) {
    std::nth_element(likely.begin(), likely.begin() + most, likely.end(), is_likelier);
    likely.resize(most);
  }
}

// Lets a draft head share out the probability of the likeliest tokens anew, in both copies of a
// read's logits.
void share_out(const Walk& walk, int64_t before, const float* gates, std::vector<float>& row,
               std::vector<float>& allowed) {
  static thread_local std::vector<Likely> likely;
  static thread_local std::vector<float> features;
  find_likely(allowed, walk.most, likely);
  features.resize(walk.rank);
  for (int64_t i = 0; i < walk.rank; ++i)
    features[i] = walk.previous[before * walk.rank + i] * gates[i];
  const auto largest_of = [&] {
    float found = -INFINITY;
    for (const Likely& one : likely) found = std::max(found, one.logit);
    return found;
  };
  const float old_top = largest_of();
  float old = 0, now = 0;
  for (Likely& one : likely) {
    old += std::exp(one.logit - old_top);
    Floats sums = {};
    const float* weights = walk.following + one.token * walk.rank;
    for (int64_t i = 0; i < walk.rank; i += kLanes) sums += load(&features[i]) * load(weights + i);
    one.logit += sum(sums);
  }
  const float top = largest_of();
  for (const Likely& one : likely) now += std::exp(one.logit - top);
  const float change = old_top + std::log(old) - top - std::log(now);
  if (!std::isfinite(change)) return;  // the head's weights are too large
  for (const Likely& one : likely) row[one.token] = allowed[one.token] = one.logit + change;
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// The output function of SplitMix64; see `noise.py`.
inline uint64_t mixed(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
  return state ^ (state >> 31);
}

// Samples a token from scores, [size] and padded with -inf, of which that of `peak` is the first of
// the largest; see `_sample` in `sampler.py`. Overwrites them.
int64_t sample(std::vector<float>& scores, int64_t peak, int64_t size, const Chain& chain,
               int64_t position) {
  static thread_local std::vector<Likely> likely;
  static thread_local std::vector<float> weights;
  const float top = scores[peak], least = std::max(chain.least, kLowest);
  for (size_t at = 0; at < scores.size(); at += kLanes)
    store(&scores[at], (load(&scores[at]) - top) / chain.temperature);
  if (chain.top_k < size) {
    find_likely(scores, chain.top_k, likely);
    float cut = 0;
    for (const Likely& one : likely) cut = std::min(cut, one.logit);
    for (float& score : scores) score = score < cut ? -INFINITY : score;
  }
  weights.resize(scores.size());
  for (size_t at = 0; at < scores.size(); at += kLanes)
    store(&weights[at], exponential(load(&scores[at])));
  const uint64_t key = mixed(mixed(uint64_t(chain.seed) + kGolden) + uint64_t(position));
  const auto bits_of = [&](int64_t token) {
    return int64_t(mixed(uint64_t(token) * kGolden + key) >> 12);
  };
  const auto noisy = [&](int64_t token, int64_t bits) {
    return scores[token] + float(-std::log(-std::log((double(bits) + 0.5) * 0x1p-52)));
  };
  const auto is_before = [&](int64_t token, int64_t other) {
    return scores[token] > scores[other] || (scores[token] == scores[other] && token < other);
  };
  const auto share_before = [&](int64_t other, auto weight_of) {
    double before = 0, total = 0;
    for (int64_t token = 0; token < size; ++token) {
      const double weight = weight_of(token);
      total += weight;
      before += is_before(token, other) ? weight : 0;
    }
    return before / total;
  };
  for (int64_t last = -1;;) {
    int64_t best = peak;
    float most = noisy(peak, bits_of(peak));
    // The noise of u is at most -log(1 - u), so that few tokens' logarithms have to be taken.
    double bound = 1.001 * 0x1p52 * std::exp(-double(most));
    for (int64_t token = 0; token < size; ++token) {
      if (scores[token] < least || (last >= 0 && !is_before(token, last))) continue;
      const int64_t bits = bits_of(token);
      if (double((int64_t(1) << 52) - bits) - 0.5 > weights[token] * bound) continue;
      const float own = noisy(token, bits);
      if (own < most || (own == most && token >= best)) continue;
      best = token, most = own;
      bound = 1.001 * 0x1p52 * std::exp(-double(most));
    }
    if (best == peak || chain.top_p > 1) return best;
    double share = share_before(best, [&](int64_t token) { return weights[token]; });
    if (std::abs(share - chain.top_p) < 1e-3)  // more than the weights' error
      share = share_before(best, [&](int64_t token) { return std::exp(double(scores[token])); });
    if (float(share) < chain.top_p) return best;
    last = best;
  }
}

// Sets `row` to a read's logits, padded with -inf, and `allowed` to those of tokens not banned.
void load_row(const Number* own, int64_t size, const int64_t* banned, int64_t num_banned,
              std::vector<float>& row, std::vector<float>& allowed) {
  row.assign((size + kLanes - 1) / kLanes * kLanes, -INFINITY);
  for (int64_t at = 0; at < size; ++at) row[at] = load_one(own + at);
  allowed = row;
  for (int64_t b = 0; b < num_banned; ++b) allowed[banned[b]] = -INFINITY;
}

// Chooses the tokens of reads one behind the other, by a draft head that shares out the probability
// of the likeliest ones anew, and by sampling.
void walk_chain(const Walk& walk, const Chain& chain) {
  static thread_local std::vector<float> row, allowed;
  int64_t token = chain.token;
  for (int64_t i = 0; i < chain.num_reads; ++i) {
    const int64_t read = chain.read + i;
    Proposal& proposal = walk.proposals[read];
    if (proposal.confidence != proposal.confidence) return;  // some logit is not finite
    load_row(walk.logits + read * walk.size, walk.size, walk.banned, walk.num_banned, row, allowed);
    int64_t chosen = proposal.token;
    if (token >= 0) {
      share_out(walk, token, walk.gates + (chain.gates + i) * walk.rank, row, allowed);
      chosen = place_of_largest(allowed);
    }
    if (chain.temperature > 0 && std::isfinite(allowed[chosen]))
      chosen = sample(allowed, chosen, walk.size, chain, chain.position + i);
    if (token >= 0) token = chosen;
    const float divisor = walk.divisors[read];
    proposal = {int32_t(chosen), divisor > 0 ? probability_of(row[chosen], row, divisor) : 1};
  }
}

constexpr int64_t kPiece = 1 << 13;  // numbers of a piece that takes longer than sharing it out
constexpr int64_t kBlocks = 4;       // blocks of a piece, which fetches each next one

// Calls body(row) for all rows, in up to num_threads threads if the rows' numbers are worth it.
template <typename Body>
void run_rows(int64_t num_threads, int64_t rows, int64_t size, const Body& body) {
  const int64_t per_piece = size < kPiece ? kPiece / (size ? size : 1) : 1;
  threads->run(num_threads, (rows + per_piece - 1) / per_piece, [&](int64_t piece) {
    const int64_t end = (piece + 1) * per_piece;
    for (int64_t row = piece * per_piece; row < end && row < rows; ++row) body(row);
  });
}

// Runs an action; returns 1 if memory is short for it, and else 0. No exception may leave a thread.
template <typename Action>
int is_short(const Action& action) {
  try {
    action();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

// Functions that return a number return 0, or 1 if memory is short.

int marsray_attend(const AttentionArguments* arguments) {
  const Arguments& a = *arguments;
  if (a.writes_pages)
    run_rows(a.num_threads, a.num_positions, a.kv_heads * (a.key_dim + a.value_dim),
             [&](int64_t position) { write_page(a, position); });
  // Each query is computed alike however few tiles are cut, so that all threads have some.
  const int64_t whole = a.num_tiles * a.kv_heads, per_kv = a.heads / a.kv_heads;
  const int64_t wanted = whole ? (a.num_threads + whole - 1) / whole : 1;
  const int64_t cuts = wanted < per_kv ? wanted : per_kv;
  std::atomic<int> failed{0};
  threads->run(a.num_threads, whole * cuts, [&](int64_t i) {
    const int64_t* positions = a.tiles + i / cuts / a.kv_heads * 2;
    const int64_t head = i / cuts % a.kv_heads, cut = i % cuts;
    const Range query_heads = {head * per_kv + cut * per_kv / cuts,
                               head * per_kv + (cut + 1) * per_kv / cuts};
    static thread_local Tile tile;
    failed |= is_short(
        [&] { attend_tile(a, {positions[0], positions[1]}, head, query_heads, tile); });
  });
  return failed;
}

// Packs the weights of a linear layer, [outputs, inputs], as `Product` has them, in which outputs are
// padded with zeros to a multiple of kBlock.
void marsray_pack(const Number* weights, Number* packed, int64_t num_outputs, int64_t num_inputs,
                  int num_threads) {
  const int64_t size = (num_outputs + kBlock - 1) / kBlock * kBlock * num_inputs;
  run_rows(num_threads, size / kBlock, kBlock, [&](int64_t line) {
    for (int64_t i = line * kBlock; i < (line + 1) * kBlock; ++i) {
      const int64_t block = i / (num_inputs * kBlock), vector = i / (2 * kLanes) % kVectors;
      const int64_t lane = kParts == 1 ? i / 2 % kLanes : i % kLanes;
      const int64_t input = i / (2 * kBlock) % (num_inputs / 2) * 2 +
                            (kParts == 1 ? i % 2 : i / kLanes % 2);
      const int64_t output = block * kBlock + vector * kLanes + lane;
      packed[i] = output < num_outputs ? weights[output * num_inputs + input] : 0;
    }
  });
}

// Multiplies rows, [rows, inputs], of which there are an even number, with packed weights, and adds
// the bias, [outputs], unless it is null: [rows, outputs].
int marsray_multiply(const Number* inputs, const Number* packed, const float* bias,
                     Number* outputs, int64_t rows, int64_t num_inputs, int64_t num_outputs,
                     int num_threads) {
  const int64_t pairs = num_inputs / 2;
  const bool are_factors = sizeof(Factors) == 2 * sizeof(Number);
  std::vector<Factors> factors;
  if (is_short([&] { factors.resize(are_factors ? 0 : rows * pairs + 1); })) return 1;
  if (!are_factors) set_factors(factors.data(), inputs, rows * num_inputs);
  const Factors* own = are_factors ? reinterpret_cast<const Factors*>(inputs) : factors.data();
  const Product product = {own, packed, bias, outputs, rows, pairs, num_outputs};
  const int64_t blocks = rows ? (num_outputs + kBlock - 1) / kBlock : 0;
  const int64_t pieces = (blocks + kBlocks - 1) / kBlocks;
  threads->run(num_threads, pieces, [&](int64_t piece) {
    const int64_t end = (piece + 1) * kBlocks;
    for (int64_t block = piece * kBlocks; block < end && block < blocks; ++block)
      multiply_block(product, block);
  });
  return 0;
}

// Proposes the likeliest token that is not banned behind each row of logits, [rows, size], with its
// probability among all if they are divided by `divisors`, [rows]. Where that is 0, it is 1, or NaN
// if the token's logit is not finite.
int marsray_propose(const Number* logits, const int64_t* banned, const float* divisors,
                    Proposal* proposals, int64_t num_banned, int64_t rows, int64_t size,
                    int num_threads) {
  std::atomic<int> failed{0};
  const auto propose = [&](int64_t i) {
    static thread_local std::vector<float> row, allowed;
    load_row(logits + i * size, size, banned, num_banned, row, allowed);
    const int64_t token = place_of_largest(allowed);
    const float one = allowed[token] - allowed[token] + 1, divisor = divisors[i];
    proposals[i] = {int32_t(token), divisor > 0 ? probability_of(row[token], row, divisor) : one};
  };
  threads->run(num_threads, rows, [&](int64_t i) { failed |= is_short([&] { propose(i); }); });
  return failed;
}

// Chooses the tokens of chains anew.
int marsray_walk(const Walk* walk, const Chain* chains, int64_t num_chains, int num_threads) {
  std::atomic<int> failed{0};
  threads->run(num_threads, num_chains, [&](int64_t i) {
    failed |= is_short([&] { walk_chain(*walk, chains[i]); });
  });
  return failed;
}

// Norms rows by their root mean square, [rows, size]; with `added`, their sums with its rows, which
// are written to `sums`.
void marsray_norm(const Number* inputs, const Number* added, const float* weight, Number* sums,
                  Number* outputs, int64_t rows, int64_t size, float epsilon, int num_threads) {
  run_rows(num_threads, rows, size, [&](int64_t i) {
    const int64_t begin = i * size;
    const Number* row = inputs + begin;
    if (added) {
      add_row(row, added + begin, sums + begin, size);
      row = sums + begin;
    }
    norm_row(row, weight, outputs + begin, size, epsilon);
  });
}

// Rotates the heads of queries and keys, [rows, heads + kv_heads, size] by row_stride, in place, by
// cosines and sines, [rows, size]. If there are weights, heads are normed first.
void marsray_rotate(Number* inputs, const Number* cosines, const Number* sines,
                    const float* query_weight, const float* key_weight, int64_t rows,
                    int64_t row_stride, int64_t heads, int64_t kv_heads, int64_t size,
                    float query_epsilon, float key_epsilon, int num_threads) {
  run_rows(num_threads, rows, (heads + kv_heads) * size, [&](int64_t row) {
    for (int64_t i = 0; i < heads + kv_heads; ++i) {
      Number* head = inputs + row * row_stride + i * size;
      if (query_weight && i < heads) norm_row(head, query_weight, head, size, query_epsilon);
      if (key_weight && i >= heads) norm_row(head, key_weight, head, size, key_epsilon);
      rotate_head(head, cosines + row * size, sines + row * size, size / 2);
    }
  });
}

// Multiplies the second halves of rows, [rows, 2 * size], with SiLU of the first: [rows, size].
void marsray_gate(const Number* inputs, Number* outputs, int64_t rows, int64_t size,
                  int num_threads) {
  run_rows(num_threads, rows, size, [&](int64_t row) {
    const Number* gate = inputs + row * 2 * size;
    gate_row(gate, gate + size, outputs + row * size, size);
  });
}

}  // extern "C"
