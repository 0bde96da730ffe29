// The second sweep: sums of finished weights over the queries, once a first sweep left every row's
// maximum and share. Passes 0 to 2 of bands.h, and then no output.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class Tallying : Bands<A> {
  using Base = Bands<A>;
  using Base::BLOCK, Base::S_STRIDE;
  using Base::p_, Base::task_, Base::logits_, Base::n_, Base::bands_, Base::row_;
  using Base::q_, Base::k_, Base::s_, Base::hull_, Base::block_, Base::lo_, Base::hi_;
  using Base::begin_, Base::end_;
  using Base::meets, Base::scores;
  using typename Base::Row;
  using Base::any_band_meets, Base::look, Base::pack_groups, Base::pack_panels;
  static constexpr int ROWS = 16 * BAND;                // queries that are packed at once

 public:
  static size_t scratch(const Problem& p) {
    Cutter c(nullptr);
    Tallying(p, {}, c, least<int64_t>(p.Tq, ROWS));
    return c.used();
  }

  static void run(const Problem& p, const Tally& wanted, const TallyTask& task, char* scratch) {
    for (int64_t query = 0; query < p.Tq; query += ROWS) {
      int64_t queries = least<int64_t>(p.Tq - query, ROWS);
      Cutter c(scratch);
      Tallying t(p, {task.b, task.head, 1, query, queries}, c, queries);
      t.add_up(wanted, {task.key, task.key_end});
    }
  }

 private:
  Tallying(const Problem& p, const TileTask& task, Cutter& c, int64_t rows) : Base(p, task, c, rows) {}

  void add_up(const Tally& wanted, Run keys) {
    if (!wanted.received.data && !wanted.map.data && !any_exact(wanted)) return;
    look(keys);
    pack_groups(p_.q, p_.D, q_);
    for (int64_t key = keys.lo; key < hull_.hi; key += BLOCK) {
      block_ = {key, least(key + BLOCK, hull_.hi)};
      if (block_.hi <= hull_.lo || !any_band_meets()) continue;
      pack_panels(p_.k, p_.D, k_);
      for (int k = 0; k < BLOCK; k += W) store(received_ + k, zero());
      for (int64_t i = 0; i < bands_; i++) {
        if (!meets(i)) continue;
        scores(i);
        pool(wanted, i);
      }
      if (wanted.received.data) receive(wanted.received);
    }
  }

  bool any_exact(const Tally& t) const {
    for (int64_t q = task_.query; t.exact.data && q < task_.query + task_.queries; q++)
      if (t.slot[q] >= 0) return true;
    return false;
  }

  // The bin of a position, and where a bin begins.
  static int64_t bin(int64_t at, int64_t size, int64_t bins) { return ((at + 1) * bins - 1) / size; }
  static int64_t bin_start(int64_t bin, int64_t size, int64_t bins) { return bin * size / bins; }

  // Pass 3: weights, summed over the queries of a band that share a bin.
  void pool(const Tally& t, int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    F factor = all(logits_.factor());
    float from[BAND], share[BAND], *exact[BAND];
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * BAND + r];
      float m = *place(t.max, task_.b, x.h, x.q);
      from[r] = m == NOTHING ? 0 : m;
      share[r] = *place(t.share, task_.b, x.h, x.q);
      bool kept = t.exact.data && t.slot[x.q] >= 0;
      exact[r] = kept ? place<float>(t.exact, task_.b, x.h, t.slot[x.q]) + block_.lo : nullptr;
    }
    for (int r = 0, end; r < rows; r = end) {
      int64_t q = row_[i * BAND + r].q, into = t.map.data ? bin(q, p_.Tq, t.rows) : 0;
      int64_t next = t.map.data ? bin_start(into + 1, p_.Tq, t.rows) : p_.Tq;
      end = int(least<int64_t>(rows, r + next - q));
      for (int k = begin_; k < end_; k += W) {
        F sum = zero();
        for (int x = r; x < end; x++) {
          F y = load(s_ + x * S_STRIDE + k);
          F w = mul(exp2<5>(mul(sub(y, all(from[x])), factor)), all(share[x]));
          w = pick(same(y, all(NOTHING)), zero(), w);  // in a row of NaN too
          sum = add(sum, w);
          if (exact[x]) store_part(exact[x] + k, w, int(least<int64_t>(W, block_.hi - block_.lo - k)));
        }
        store(bin_sums_ + k, sum);
        store(received_ + k, add(load(received_ + k), sum));
      }
      if (t.map.data) fold_into_map(t, place<float>(t.map, task_.b, task_.head, into));
    }
  }

  // Sums of columns, added up bin by bin.
  void fold_into_map(const Tally& t, float* row) const {
    int64_t key = block_.lo + lo_, end = block_.lo + hi_;
    for (int64_t j = bin(key, p_.Tk, t.cols), next; key < end; j++, key = next) {
      next = least(end, bin_start(j + 1, p_.Tk, t.cols));
      F sum = zero();
      for (int64_t k = key; k < next; k += W)
        sum = add(sum, load_part(bin_sums_ + (k - block_.lo), int(least<int64_t>(W, next - k))));
      row[j] += total(sum);
    }
  }

  void receive(const Place& x) const {
    float* to = place(x, task_.b, task_.head, block_.lo);
    for (int64_t k = 0; k < block_.hi - block_.lo; k += W) {
      int n = int(least<int64_t>(W, block_.hi - block_.lo - k));
      store_part(to + k, add(load_part(to + k, n), load(received_ + k)), n);
    }
  }

  alignas(64) float bin_sums_[BLOCK + W], received_[BLOCK + W];  // of one bin of queries; of all of them
};

}  // namespace clearhead::CLEARHEAD_LEVEL
