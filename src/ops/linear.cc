// Who multiplies what: the rows of x are converted, then panels of the weights are shared out over the threads.
#include "ops/linear.h"

#include <algorithm>

#include "base/carver.h"
#include "base/errors.h"
#include "ops/cpu/kernels.h"

namespace phsa {
namespace {

using ops::Product;
using ops::RoundUp;

// Up to this many elements of x every thread converts for itself: cheaper than a second round of handing out work.
constexpr int64_t kConvertAlone = 16384;
// Rows of x that pass by a block of panels: enough to pay for widening its codes, and few enough that a block of x
// stays in the second cache (1 MB here). Where x is used as it is, a block's rows are not contiguous, and whole rows
// must fit: with 384 rows of 8960 columns f32 drops from 109 to 80 GFLOP/s.
constexpr int32_t kMaxRows = 384;
constexpr int32_t kMinRows = 48;
constexpr int64_t kRowsCache = 640 * 1024;
constexpr int32_t kTasksPerThread = 6;
// Bytes of weights times rows of x of the smallest task: some microseconds of work. Handing a task over costs a tenth
// of one for each of the other threads, so small products have one task a thread.
constexpr int64_t kLeastWork = 64 * 1024;
// Panels of a matrix of a file that are interleaved at a time: as many as a tile takes of one row of x.
constexpr int32_t kInterleaved = 4;

const Product& ProductOf(WeightType weights, ActivationType activations) {
  const Product& product = ops::ActiveKernels().products[static_cast<int>(weights)][static_cast<int>(activations)];
  PHSA_CHECK(product.multiply != nullptr);
  return product;
}

// Blocks of nearly equal size: a short one at the end would cost as much as a long one to begin and to end.
struct Blocks {
  int32_t count, groups;  // groups of each; the last may have fewer
};
Blocks BlocksOf(const Product& product, int32_t cols) {
  const int32_t groups = std::max(ops::NumGroups(cols), 1);
  const int32_t count = (groups + product.max_block_groups - 1) / product.max_block_groups;
  const int32_t each = (groups + count - 1) / count;
  return {(groups + each - 1) / each, each};
}

int64_t BlockBytes(const Product& product, int32_t groups) {
  return RoundUp(int64_t{groups} * product.group_bytes, product.row_align);
}

int64_t RowBytes(const Product& product, int32_t cols) {
  const Blocks blocks = BlocksOf(product, cols);
  return blocks.count * BlockBytes(product, blocks.groups);
}

bool ConvertsAlone(int32_t m, int32_t cols) { return int64_t{m} * cols <= kConvertAlone; }

int64_t ConvertedBytes(const Product& product, int32_t m, int32_t cols) {
  return product.convert == nullptr ? 0 : RoundUp(RowBytes(product, cols) * m, 64);
}

int64_t InterleavedBytes(WeightType weights, int32_t cols) {
  return RoundUp(kInterleaved * ops::LayoutOf(weights, cols).bytes, 64);
}

struct Call {
  const float* x;
  int64_t x_stride;
  int32_t m, cols;
  std::span<const LinearOutput> outputs;
  const Product* product;
  int32_t block_groups;
  int64_t block_bytes;  // of one row of x
  ops::PanelLayout layout;
  uint8_t* converted;  // alone: one copy per worker
  uint8_t* scratch;
  uint8_t* interleaved;  // InterleavedBytes of each worker; null: no matrix is of a file
  bool alone;
  bool* done;  // alone: [worker], whether its copy is there

  int32_t rows_per_task, panels_per_task;  // a task: so many panels of one output by so many rows of x
  int32_t panel_tasks;                     // for one strip of rows
};

void ConvertRows(const Call& call, int32_t begin, int32_t end, uint8_t* out) {
  for (int32_t r = begin; r < end; ++r) {
    call.product->convert(call.x + r * call.x_stride, call.cols, call.block_groups, out + r * call.block_bytes,
                          call.block_bytes * call.m);
  }
}

int32_t NumPanels(const LinearOutput& output) { return (output.weights->rows() + kPanelRows - 1) / kPanelRows; }

void Multiply(const Call& call, int32_t task, int32_t worker) {
  const Product& product = *call.product;
  int32_t index = task % call.panel_tasks;
  const int32_t row = task / call.panel_tasks * call.rows_per_task;
  const LinearOutput* output = call.outputs.data();
  for (;; ++output) {
    const int32_t tasks = (NumPanels(*output) + call.panels_per_task - 1) / call.panels_per_task;
    if (index < tasks) break;
    index -= tasks;
  }
  const int32_t first = index * call.panels_per_task * kPanelRows;

  ops::Share share = {};
  share.layout = call.layout;
  share.factors = output->weights->factors() != nullptr ? output->weights->factors() + first : nullptr;
  share.bias = output->bias != nullptr ? output->bias + first : nullptr;
  share.outputs = std::min(call.panels_per_task * kPanelRows, output->weights->rows() - first);
  share.cols = call.cols;
  share.groups = ops::NumGroups(call.cols);
  share.block_groups = call.block_groups;
  share.m = std::min(call.rows_per_task, call.m - row);
  share.y = output->y + row * output->y_stride + first;
  share.y_stride = output->y_stride;
  share.scratch = call.scratch + RoundUp(static_cast<int64_t>(product.scratch_bytes), 64) * worker;
  if (product.convert == nullptr) {
    share.x_row_stride = call.x_stride * 4;
    share.x_block_stride = call.block_bytes;
    share.x = reinterpret_cast<const uint8_t*>(call.x + row * call.x_stride);
  } else {
    uint8_t* x = call.converted;
    if (call.alone) {
      x += ConvertedBytes(product, call.m, call.cols) * worker;
      if (!call.done[worker]) {
        ConvertRows(call, 0, call.m, x);
        call.done[worker] = true;
      }
    }
    share.x_row_stride = call.block_bytes;
    share.x_block_stride = call.block_bytes * call.m;
    share.x = x + row * share.x_row_stride;
  }
  const int32_t first_panel = index * call.panels_per_task;
  if (!output->weights->of_file()) {
    share.panels = output->weights->panels() + int64_t{first_panel} * call.layout.bytes;
    return product.multiply(share);
  }
  const ops::Share all = share;
  uint8_t* const panels = call.interleaved + InterleavedBytes(output->weights->type(), call.cols) * worker;
  share.panels = panels;
  for (int32_t done = 0; done < all.outputs; done += kInterleaved * kPanelRows) {
    share.outputs = std::min(kInterleaved * kPanelRows, all.outputs - done);
    share.bias = all.bias != nullptr ? all.bias + done : nullptr;
    share.y = all.y + done;
    output->weights->Interleave(first_panel + done / kPanelRows, (share.outputs + kPanelRows - 1) / kPanelRows, panels);
    product.multiply(share);
  }
}

void Run(const phsa_executor& executor, int32_t tasks, void (*fn)(void*, int32_t, int32_t), void* arg) {
  if (executor.run == nullptr || tasks == 1) {
    for (int32_t task = 0; task < tasks; ++task) fn(arg, task, 0);
  } else {
    executor.run(executor.context, tasks, fn, arg);
  }
}

// A call's workspace. With a null memory only the size is counted.
struct Workspace {
  Workspace(const Product& product, int64_t threads, int64_t interleaved_bytes, int64_t converted_bytes, void* memory) {
    Carver carver(memory);
    done = carver.Take<bool>(threads);
    scratch = carver.Take<uint8_t>(RoundUp(static_cast<int64_t>(product.scratch_bytes), 64) * threads);
    interleaved = carver.Take<uint8_t>(interleaved_bytes);
    converted = carver.Take<uint8_t>(converted_bytes);
    size = carver.size();
  }
  bool* done;
  uint8_t *scratch, *interleaved, *converted;
  size_t size;
};

}  // namespace

size_t LinearWorkspaceSize(WeightType weights, ActivationType activations, int32_t m, int32_t cols, int32_t num_threads,
                           bool of_file) {
  const Product& product = ProductOf(weights, activations);
  const int64_t threads = std::max(num_threads, 1);
  // A call with fewer rows than m may need a copy per thread.
  const int64_t alone = std::min<int64_t>(m, cols > 0 ? kConvertAlone / cols : m);
  const int64_t converted =
      std::max(ConvertedBytes(product, m, cols), ConvertedBytes(product, static_cast<int32_t>(alone), cols) * threads);
  const int64_t interleaved = of_file ? InterleavedBytes(weights, cols) * threads : 0;
  return Workspace(product, threads, interleaved, converted, nullptr).size;
}

void Linear(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
            std::span<const LinearOutput> outputs, void* workspace, size_t workspace_size,
            const phsa_executor& executor) {
  if (outputs.empty() || m <= 0) return;
  const Matrix& weights = *outputs[0].weights;
  const int32_t threads = executor.run == nullptr ? 1 : std::max(executor.num_threads, 1);
  for (const LinearOutput& output : outputs) {
    PHSA_CHECK(output.weights->type() == weights.type() && output.weights->cols() == weights.cols());
  }
  const bool of_file =
      std::any_of(outputs.begin(), outputs.end(), [](const LinearOutput& output) { return output.weights->of_file(); });
  PHSA_CHECK(workspace_size >= LinearWorkspaceSize(weights.type(), activations, m, weights.cols(), threads, of_file));
  PHSA_CHECK(reinterpret_cast<uintptr_t>(workspace) % 64 == 0);

  Call call = {};
  call.x = x;
  call.x_stride = x_stride;
  call.m = m;
  call.cols = weights.cols();
  call.outputs = outputs;
  call.product = &ProductOf(weights.type(), activations);
  call.block_groups = BlocksOf(*call.product, call.cols).groups;
  call.block_bytes = BlockBytes(*call.product, call.block_groups);
  call.layout = ops::LayoutOf(weights.type(), weights.cols());
  call.alone = ConvertsAlone(m, call.cols);
  const int64_t interleaved = of_file ? InterleavedBytes(weights.type(), call.cols) * threads : 0;
  const Workspace own(*call.product, threads, interleaved, 0, workspace);
  call.done = own.done;
  call.scratch = own.scratch;
  if (of_file) call.interleaved = own.interleaved;
  call.converted = own.converted;
  std::fill_n(call.done, threads, false);

  if (call.product->convert != nullptr && !call.alone) {
    constexpr int32_t kRows = 8;
    Run(
        executor, (m + kRows - 1) / kRows,
        [](void* arg, int32_t task, int32_t) {
          const Call& c = *static_cast<const Call*>(arg);
          ConvertRows(c, task * kRows, std::min(c.m, (task + 1) * kRows), c.converted);
        },
        &call);
  }

  const int64_t row_bytes = call.product->convert == nullptr ? int64_t{4} * std::max(call.cols, 1) : call.block_bytes;
  const int64_t rows = std::clamp<int64_t>(kRowsCache / row_bytes, kMinRows, kMaxRows);
  const int64_t strips = (m + rows - 1) / rows;
  call.rows_per_task = static_cast<int32_t>(RoundUp((m + strips - 1) / strips, call.product->tile_rows));
  const int32_t row_tasks = (m + call.rows_per_task - 1) / call.rows_per_task;
  int64_t panels = 0;
  for (const LinearOutput& output : outputs) panels += NumPanels(output);
  if (panels == 0) return;
  // Tiles take 4 panels of a row at a time, where there are enough for all threads.
  const int32_t step = panels >= 8 * threads ? 4 : panels >= 4 * threads ? 2 : 1;
  const int64_t work = panels * call.layout.bytes * std::min(m, call.rows_per_task);
  const int64_t per_thread = std::clamp<int64_t>(work / (kLeastWork * threads), 1, kTasksPerThread);
  const int64_t wanted = std::max<int64_t>(1, (threads == 1 ? 1 : per_thread * threads) / row_tasks);
  const int64_t each = per_thread == 1 ? (panels + wanted - 1) / wanted : panels / wanted / step * step;
  call.panels_per_task = static_cast<int32_t>(std::max<int64_t>(per_thread == 1 ? 1 : step, each));
  for (const LinearOutput& output : outputs) {
    call.panel_tasks += (NumPanels(output) + call.panels_per_task - 1) / call.panels_per_task;
  }
  Run(
      executor, call.panel_tasks * row_tasks,
      [](void* arg, int32_t task, int32_t worker) { Multiply(*static_cast<const Call*>(arg), task, worker); }, &call);
}

bool HasProduct(WeightType weights, ActivationType activations) {
  const auto& products = ops::ActiveKernels().products;
  return products[static_cast<int>(weights)][static_cast<int>(activations)].multiply != nullptr;
}

ProductSupport FastProducts() { return ops::ActiveKernels().fast; }

}  // namespace phsa
