// Reads the structs of attention.h from Python: tensors, and named tuples of tensors and numbers.
// Every tensor is checked, so that a mistake in Python becomes a code and reads no foreign memory.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <vector>

#include "tensors.h"

namespace clearhead {

// The members of the named tuples, in the order in which they are read below. Python compares them
// with its own when it loads the core.
struct Fields { const char *tuple, *members; };
constexpr Fields FIELDS[] = {
    {"KernelArgs", "scale softcap before after lo hi bits bias slopes shift sinks dropout seed"},
    {"RowStats", "max sum moment largest lse entropy"},  // of the rows that the core returns
    {"Computed", "code out rows top_scores top_keys group_sums"},  // what it returns
    {"Groups", "masks factors of_weights"},
    {"GroupMask", "before after lo hi bits query_ids key_ids"},
    {"Sums", "received map_rows map_cols map map_factors exact_row exact"},
    {"LargestParts", "directions parts keys"},
    {"Gradients",
     "dout dlse dw_log_w dreceived delta dq key_splits dq_split_stride head_dk head_dv dk dv dbias "
     "of_these_keys"},
};

constexpr int64_t ANY = -1;  // any size of a dimension

inline bool is_contiguous(const MatrixView& x, int64_t columns) {
  return !x.data || columns <= 1 || x.x == 1;
}

// The members of a tuple, one after the other. Throws a Code. None is a view without data.
class Members {
 public:
  Members(nanobind::handle tuple, const Problem& p) : tuple_(tuple.ptr()), p_(p) {
    if (!PyTuple_Check(tuple_)) throw BAD_TENSOR;
  }
  nanobind::handle next() {
    if (at_ >= PyTuple_Size(tuple_)) throw BAD_TENSOR;
    return PyTuple_GetItem(tuple_, at_++);
  }
  double number() { return nanobind::cast<double>(next()); }
  int64_t integer() { return nanobind::cast<int64_t>(next()); }
  bool flag() { return nanobind::cast<bool>(next()); }

  // A number for every query or every key: (b, h, t).
  TensorView queries() { return numbers(next(), FLOAT32, p_.Tq); }
  TensorView keys() { return numbers(next(), FLOAT32, p_.Tk); }
  TensorView numbers(nanobind::handle from, int64_t element, int64_t length) {
    Tensor x;
    if (!read(from, element, &x)) return {};
    fit(x, {p_.B, p_.H, length});
    return {x.data, x.strides[0], x.strides[1], x.strides[2]};
  }
  // A vector for every query or every key: (b, h, t, size).
  TensorView vectors(int64_t element, int64_t length, int64_t size) {
    return vectors(next(), element, p_.H, length, size);
  }
  TensorView vectors(nanobind::handle from, int64_t element, int64_t h, int64_t t, int64_t size) {
    Tensor x;
    if (!read(from, element, &x)) return {};
    x = x.as_4d();
    fit(x, {p_.B, h, t, size});
    if (x.sizes[3] != size || (size > 1 && x.strides[3] != 1)) throw BAD_TENSOR;
    return {x.data, x.strides[0], x.strides[1], x.strides[2]};
  }
  // Numbers (b, h, rows, columns) with any strides. Returns in `count` the one of any size.
  MatrixView matrix(int64_t element, int64_t rows, int64_t columns, int64_t* count = nullptr) {
    Tensor x;
    if (!read(next(), element, &x)) return {};
    if (count && x.dims == 4) *count = x.sizes[rows == ANY ? 2 : 3];
    fit(x, {p_.B, p_.H, rows, columns});
    return {x.data, x.strides[0], x.strides[1], x.strides[2], x.strides[3]};
  }
  MatrixView per_head() {
    Tensor x;
    if (!read(next(), FLOAT32, &x)) return {};
    fit(x, {p_.H});
    return {x.data, 0, x.strides[0], 0, 0};
  }
  // The bias, in any element type of q.
  MatrixView bias(int64_t* dtype) {
    Tensor x;
    nanobind::handle from = next();
    if (!read(from, ELEMENTS, &x)) return {};
    if ((*dtype = x.element) >= DTYPES) throw BAD_TENSOR;
    at_--;
    return matrix(x.element, p_.Tq, p_.Tk);
  }
  // An int64 for every query.
  const int64_t* indices() {
    Tensor x;
    if (!read(next(), INT64, &x)) return nullptr;
    fit(x, {p_.Tq});
    if (x.sizes[0] != p_.Tq || (p_.Tq > 1 && x.strides[0] != 1)) throw BAD_TENSOR;
    return (const int64_t*)x.data;
  }
  void read_ranges(Mask* mask) {
    mask->lo = matrix(INT64, p_.Tq, ANY, &mask->ranges);
    int64_t ranges = 0;
    mask->hi = matrix(INT64, p_.Tq, ANY, &ranges);
    if (ranges != mask->ranges) throw BAD_RANGES;
    mask->bits = matrix(BYTE, p_.Tq, p_.Tk);
  }

 private:
  // Reads a tensor; returns false for None. ELEMENTS allows every element type.
  static bool read(nanobind::handle from, int64_t element, Tensor* x) {
    if (from.is_none()) return false;
    if (!read_tensor(from.ptr(), x) || !x->on_cpu) throw BAD_TENSOR;
    if (element != ELEMENTS && x->element != element) throw BAD_TENSOR;
    if (!x->data && x->count()) throw NO_DATA;
    return true;
  }
  // Checks the sizes; a dimension of size 1 broadcasts.
  static void fit(Tensor& x, std::initializer_list<int64_t> sizes) {
    if (x.dims != int64_t(sizes.size())) throw BAD_TENSOR;
    int i = 0;
    for (int64_t size : sizes) {
      if (x.sizes[i] == 1) x.strides[i] = 0;
      else if (x.sizes[i] != size && size != ANY) throw BAD_TENSOR;
      i++;
    }
  }

  PyObject* tuple_;
  const Problem& p_;
  Py_ssize_t at_ = 0;
};

// The tensors of a call besides `KernelArgs`, as Python passes them.
struct Tensors { nanobind::handle q, k, v, out, lse, rounding; };

// Reads a problem. q, k, v and out may lack leading dimensions, and a batch of 1 broadcasts.
inline Problem read_problem(const Tensors& of, nanobind::handle kernel_args,
                            Stored stored = STORED_AS_QUERIES) {
  Problem p{};
  Tensor q, k, v;
  for (auto [from, into] : {std::pair(of.q, &q), std::pair(of.k, &k), std::pair(of.v, &v)}) {
    if (!read_tensor(from.ptr(), into) || into->dims < 2) throw BAD_TENSOR;
    *into = into->as_4d();
  }
  if (q.element >= DTYPES) throw BAD_DTYPE;
  p.B = q.sizes[0] != 1 ? q.sizes[0] : k.sizes[0] != 1 ? k.sizes[0] : v.sizes[0];
  p.H = q.sizes[1], p.G = k.sizes[1], p.Tq = q.sizes[2], p.Tk = k.sizes[2];
  p.D = q.sizes[3], p.Dv = v.sizes[3], p.dtype = q.element, p.stored = stored;
  int64_t element = p.dtype, k_size = p.D, v_size = p.Dv;
  if (stored) {
    element = BYTE, v_size = p.Dv, p.Dv = v_size / BLOCK_BYTES[stored] * BLOCK_NUMBERS;
    k_size = p.D / BLOCK_NUMBERS * BLOCK_BYTES[stored];
    if (p.D % BLOCK_NUMBERS || v_size % BLOCK_BYTES[stored]) throw BAD_SIZES;
  }
  Members args(kernel_args, p);
  p.q = args.vectors(of.q, p.dtype, p.H, p.Tq, p.D);
  p.k = args.vectors(of.k, element, p.G, p.Tk, k_size);
  p.v = args.vectors(of.v, element, p.G, p.Tk, v_size);
  p.out = args.vectors(of.out, p.dtype, p.H, p.Tq, p.Dv);
  p.rounding = args.vectors(of.rounding, p.dtype, p.H, p.Tq, p.Dv);
  p.lse = args.numbers(of.lse, FLOAT64, p.Tq);
  p.scale = args.number(), p.softcap = args.number();
  p.mask.before = args.integer(), p.mask.after = args.integer();
  args.read_ranges(&p.mask);
  p.bias = args.bias(&p.bias_dtype);
  p.slopes = args.per_head(), p.slopes_shift = args.integer();
  p.sinks = args.per_head();
  p.dropout = args.number();
  nanobind::handle seed = args.next();
  p.seed = seed.is_none() ? 0 : nanobind::cast<int64_t>(seed);
  return p;
}

// Reads the groups of all statistics, a list of `Groups`.
inline std::vector<Group> read_groups(nanobind::handle from, const Problem& p) {
  std::vector<Group> groups;
  for (nanobind::handle of_statistic : nanobind::cast<nanobind::list>(from)) {
    Members x(of_statistic, p);
    nanobind::handle masks = x.next();
    const TensorView factors = x.keys();
    const bool of_weights = x.flag();
    for (nanobind::handle mask : nanobind::cast<nanobind::list>(masks)) {
      Group group{};
      Members members(mask, p);
      group.mask.before = members.integer(), group.mask.after = members.integer();
      members.read_ranges(&group.mask);
      group.query_ids = members.queries(), group.key_ids = members.keys();
      group.factors = factors, group.of_weights = of_weights;
      groups.push_back(group);
    }
  }
  return groups;
}

inline WeightSums read_weight_sums(nanobind::handle from, const Problem& p) {
  WeightSums s{};
  Members x(from, p);
  s.received = x.keys();
  s.map_rows = x.integer(), s.map_cols = x.integer();
  s.map = x.matrix(FLOAT32, s.map_rows, s.map_cols);
  s.map_factors = x.keys();
  s.exact_row = x.indices();
  int64_t exact_rows = 0;
  s.exact = x.matrix(FLOAT32, ANY, p.Tk, &exact_rows);
  if (!is_contiguous(s.map, s.map_cols) || !is_contiguous(s.exact, p.Tk)) throw BAD_TENSOR;
  if (exact_rows && !s.exact_row) throw BAD_TENSOR;
  for (int64_t q = 0; s.exact_row && q < p.Tq; q++)
    if (s.exact_row[q] >= exact_rows) throw BAD_TENSOR;
  return s;
}

inline LargestParts read_largest_parts(nanobind::handle from, const Problem& p) {
  LargestParts l{};
  Members x(from, p);
  l.directions = x.vectors(FLOAT32, p.Tq, p.Dv);
  l.parts = x.matrix(FLOAT32, p.Tq, ANY, &l.n);
  int64_t n_keys = 0;
  l.keys = x.matrix(INT64, p.Tq, ANY, &n_keys);
  if (n_keys != l.n || !is_contiguous(l.parts, l.n) || !is_contiguous(l.keys, l.n))
    throw BAD_TENSOR;
  return l;
}

// Reads the two masks, tuples as in `KernelArgs`, and the tensors that receive the numbers.
inline Divergence read_divergence(nanobind::handle other, nanobind::handle exact,
                                  nanobind::handle numbers, const Problem& p) {
  Divergence d{};
  for (auto [from, mask] : {std::pair(other, &d.other), std::pair(exact, &d.exact)}) {
    Members x(from, p);
    mask->before = x.integer(), mask->after = x.integer();
    x.read_ranges(mask);
  }
  Members x(numbers, p);
  for (TensorView* to : {&d.kl, &d.reverse_kl, &d.mass, &d.lost, &d.largest}) *to = x.queries();
  return d;
}

inline Gradients read_gradients(nanobind::handle from, const Problem& p) {
  Gradients g{};
  Members x(from, p);
  g.dout = x.vectors(p.dtype, p.Tq, p.Dv);
  g.dlse = x.queries(), g.dw_log_w = x.queries(), g.dreceived = x.keys(), g.delta = x.queries();
  nanobind::handle dq = x.next();
  g.key_splits = x.integer(), g.dq_split_stride = x.integer();
  g.dq = x.vectors(dq, g.key_splits == 1 ? p.dtype : int64_t(FLOAT32), p.H, p.Tq, p.D);
  g.head_dk = x.vectors(FLOAT32, p.Tk, p.D), g.head_dv = x.vectors(FLOAT32, p.Tk, p.Dv);
  const auto has_gaps = [&](const TensorView& of_keys, int64_t size) {
    return p.Tk > 1 && size && of_keys.t != size;
  };
  if (has_gaps(g.head_dk, p.D) || has_gaps(g.head_dv, p.Dv)) throw BAD_TENSOR;
  g.dk = x.vectors(x.next(), p.dtype, p.G, p.Tk, p.D);
  g.dv = x.vectors(x.next(), p.dtype, p.G, p.Tk, p.Dv);
  g.dbias = x.matrix(FLOAT32, p.Tq, p.Tk);
  if (g.dbias.x && !is_contiguous(g.dbias, p.Tk)) throw BAD_TENSOR;  // 0: summed over the keys
  g.of_these_keys = x.flag();
  return g;
}

}  // namespace clearhead
