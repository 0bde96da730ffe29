// Sums of the weights of rows over groups of keys (RowStats::groups), block by block.
//
// For most pairs of a query block and a key block, a group has all of the keys or none of them.
// Then its sums take one multiply-add for W rows. The keys are added one by one at the edges of a
// group, and in a group by ids: there two vectors of W ids are compared and their weights added.
#pragma once

#include "block_scores.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class GroupSums : protected BlockScores<A> {
 protected:
  using Base = BlockScores<A>;
  using typename Base::Row, typename Base::Unit;
  using Base::PER_UNIT, Base::PADDED_ROWS, Base::SCORE_STRIDE, Base::WEIGHT_STRIDE, Base::p_,
      Base::task_, Base::logits_, Base::n_rows_, Base::n_blocks_, Base::row_, Base::s_,
      Base::key_block_, Base::begin_, Base::end_, Base::rows_of;

  GroupSums(const Problem& p, const PrefillTask& task, Arena& arena, int64_t rows)
      : Base(p, task, arena, rows), n_groups_(p.row_stats ? p.row_stats->n_groups : 0),
        groups_(n_groups_ ? p.row_stats->groups : nullptr) {
    parts_ = arena.allocate<Part>(n_blocks_ * n_groups_);
    group_sums_ = arena.allocate<float>(n_blocks_ * n_groups_ * PADDED_ROWS);
    share_ = arena.allocate<float>(n_groups_ || p.sums ? n_blocks_ * PADDED_ROWS : 0);
    weights_ = PER_UNIT == 1 ? (Unit*)s_ : arena.allocate<Unit>(QUERY_BLOCK * Base::PAIR_STRIDE);
  }

  // Sets the sums to 0, and finds the keys that each query block has in each group.
  void start_groups() {
    clear(group_sums_, n_blocks_ * n_groups_ * PADDED_ROWS);
    for (int64_t i = 0; i < n_blocks_; i++)
      for (int64_t g = 0; g < n_groups_; g++) parts_[i * n_groups_ + g] = find_part(i, g);
  }

  // Adds the weights of a query block on a key block, exp2((s - base) * log2_scale). Earlier sums
  // are multiplied by `rescale` first. `row_total` has the sums of the new weights of each row.
  void add_to_groups(int64_t i, const float* base, const float* rescale, const float* row_total) {
    const int rows = rows_of(i);
    const KeyRange keys = {key_block_.lo + begin_, min(key_block_.lo + end_, p_.Tk)};
    alignas(64) float sum[PADDED_ROWS], factor_total[PADDED_ROWS];
    const void* total_of = nullptr;  // the factors of `factor_total`
    for (int64_t g = 0; g < n_groups_; g++) {
      const Group& group = groups_[g];
      const Part& part = parts_[i * n_groups_ + g];
      const bool all = part.core.lo <= keys.lo && part.core.hi >= keys.hi,
                 by_id = group.key_ids.data;
      const float* add_this = sum;
      if (part.hull.intersect(keys).empty()) {
        clear(sum, PADDED_ROWS);
      } else if (!all || by_id) {
        sum_rows(i, group, keys, all, base, sum);
      } else if (!group.factors.data) {
        add_this = row_total;
      } else {
        if (total_of != group.factors.data) sum_rows(i, group, keys, true, base, factor_total);
        total_of = group.factors.data;
        add_this = factor_total;
      }
      float* to = group_sums_ + (i * n_groups_ + g) * PADDED_ROWS;
      for (int r = 0; r < rows; r += W)
        store(to + r, fma(load(to + r), load(rescale + r), load(add_this + r)));
    }
  }

  // Writes the sums of a query block.
  void write_group_sums(int64_t i) const {
    const int rows = rows_of(i);
    const Row *row = row_ + i * QUERY_BLOCK, *last = row + rows - 1;
    const float* share = share_ + i * PADDED_ROWS;
    for (int64_t g = 0; g < n_groups_; g++) {
      const Group& group = groups_[g];
      const float* sum = group_sums_ + (i * n_groups_ + g) * PADDED_ROWS;
      if (row->h == last->h) {
        float* to = row_at(group.sums, task_.b, row->h, row->q);
        for (int r = 0; r < rows; r += W) {
          F x = load(sum + r);
          if (group.of_weights) x = mul(x, load(share + r));
          store_part(to + r, x, in_vector(rows - r));
        }
      } else {
        for (int r = 0; r < rows; r++)
          *row_at(group.sums, task_.b, row[r].h, row[r].q) =
              sum[r] * (group.of_weights ? share[r] : 1);
      }
    }
  }

  // Returns the weights of row r of the block on W keys. Pairs store them rounded, so they are
  // computed again.
  F weights(int r, int k, float base) const {
    if constexpr (PER_UNIT == 1) return load((const float*)weights_ + r * WEIGHT_STRIDE + k);
    F y = mul(sub(load(s_ + r * SCORE_STRIDE + k), splat(base)), splat(logits_.log2_scale()));
    return exp2<A::EXP_DEGREE>(y);
  }

 private:
  // The keys of a group that some row of a query block has (hull), and that no row lacks (core),
  // except keys that it does not see, whose weights are 0.
  struct Part { KeyRange hull, core; };

  Part find_part(int64_t i, int64_t g) const {
    const MaskView group(groups_[g].mask, p_.Tk);
    const Row *row = row_ + i * QUERY_BLOCK, *last = row + rows_of(i) - 1;
    Part part = {NO_KEYS, {0, p_.Tk}};
    if (group.is_band() && row->h == last->h) {
      group.band_hull_and_core(row->q, last->q, &part.hull, &part.core);
      const bool sees_band = MaskView(p_).is_band();
      if (sees_band && p_.mask.before <= groups_[g].mask.before) part.core.lo = 0;
      if (sees_band && p_.mask.after <= groups_[g].mask.after) part.core.hi = p_.Tk;
      return part;
    }
    for (; row <= last; row++) {
      if (row->hull.empty()) continue;
      KeyRange hull, core;
      group.hull_and_core(task_.b, row->h, row->q, row->hull, &hull, &core);
      if (core.lo <= row->hull.lo) core.lo = 0;
      if (core.hi >= row->hull.hi) core.hi = p_.Tk;
      part.hull.include(hull);
      part.core = part.core.intersect(core);
    }
    return part;
  }

  // Sums the weights of each row over the keys of a group, which has `all` of these keys or some.
  void sum_rows(int64_t i, const Group& group, const KeyRange& keys, bool all, const float* base,
                float* sum) const {
    auto with_ids = [&]<bool ALL, bool FACTORS>() {
      group.key_ids.data ? sum_rows_of<ALL, FACTORS, true>(i, group, keys, base, sum)
                         : sum_rows_of<ALL, FACTORS, false>(i, group, keys, base, sum);
    };
    auto with_factors = [&]<bool ALL>() {
      group.factors.data ? with_ids.template operator()<ALL, true>()
                         : with_ids.template operator()<ALL, false>();
    };
    all ? with_factors.template operator()<true>() : with_factors.template operator()<false>();
  }
  template <bool ALL, bool FACTORS, bool BY_ID>
  void sum_rows_of(int64_t i, const Group& group, const KeyRange& keys, const float* base,
                   float* sum) const {
    const MaskView mask(group.mask, p_.Tk);
    const bool is_band = mask.is_band(), shares_bits = mask.shares_bits();
    const int64_t before = group.mask.before, after = group.mask.after;
    const int rows = rows_of(i);
    uint64_t shared[Base::KEY_BLOCK / W];  // with `shares_bits`, the bits of W keys each
    for (int k = 0; !ALL && shares_bits && key_block_.lo + k < keys.hi; k += W) {
      const int64_t key = key_block_.lo + k;
      shared[k / W] = mask.allowed_bits(task_.b, 0, 0, key, in_vector(p_.Tk - key));
    }
    F sums[PADDED_ROWS];
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * QUERY_BLOCK + r];
      bool contiguous = true;
      const KeyRange seen =
          ALL           ? keys
          : is_band     ? KeyRange{x.q - before, x.q + after + 1}.intersect(keys)
          : shares_bits ? mask.range(task_.b, x.h, x.q, 0).intersect(keys)
                        : mask.visible_hull(task_.b, x.h, x.q, keys.intersect(x.hull), &contiguous);
      const float* factors = FACTORS ? row_at(group.factors, task_.b, x.h, 0) : nullptr;
      const float* ids = BY_ID ? row_at(group.key_ids, task_.b, x.h, 0) : nullptr;
      const F id = BY_ID ? splat(*row_at(group.query_ids, task_.b, x.h, x.q)) : zero();
      F of_row = zero();
      for (int k = int(seen.lo - key_block_.lo) / W * W; key_block_.lo + k < seen.hi; k += W) {
        const int64_t key = key_block_.lo + k;
        const int n = in_vector(p_.Tk - key);
        F e = weights(r, k, base[r]);
        if (FACTORS) {  // a key of weight 0 adds 0, even if its factor is NaN
          F y = mul(e, n == W ? load(factors + key) : load_part(factors + key, n));
          e = select(equal(e, zero()), zero(), y);
        }
        if (BY_ID) {
          F of_keys = n == W ? load(ids + key) : load_part(ids + key, n);
          e = select(equal(of_keys, id), e, zero());
        }
        if (!ALL) {
          const bool inside = contiguous && seen.lo <= key && key + W <= seen.hi;
          if (shares_bits || !inside) {
            uint64_t in_group = inside       ? ~uint64_t(0)
                                : contiguous ? MaskView::visible_bits(seen, key, n)
                                             : mask.visible_bits(task_.b, x.h, x.q, key, n);
            if (shares_bits) in_group &= shared[k / W];
            e = select(lanes(in_group, 0), e, zero());
          }
        }
        of_row = add(of_row, e);
      }
      sums[r] = of_row;
    }
    for (int r = 0; r < rows; r += W) store(sum + r, totals(sums + r));
  }

 protected:
  int64_t n_groups_;
  Unit* weights_;  // in float32 they overwrite the scores
  float* share_;   // of each row, the weight at the maximum (RowStats)

 private:
  const Group* groups_;
  Part* parts_;        // (n_blocks_, n_groups_)
  float* group_sums_;  // (n_blocks_, n_groups_, PADDED_ROWS)
};

}  // namespace clearhead::CLEARHEAD_LEVEL
