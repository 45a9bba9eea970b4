#include "ops/cuda/linear.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <compare>
#include <map>

#include "base/errors.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {
namespace {

// The functions of cuBLASLt that are used here, by their own names.
struct Library {
  decltype(&cublasLtCreate) Create;
  decltype(&cublasLtDestroy) Destroy;
  decltype(&cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&cublasLtMatmulDescDestroy) MatmulDescDestroy;
  decltype(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;
  decltype(&cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  decltype(&cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&cublasLtMatmul) Matmul;

  std::string unavailable;  // why none of them is there
};

// Opened once and never closed: CUDA's libraries do not like to be.
const Library& TheLibrary() {
  static const Library library = [] {
    Library lib{};
    void* handle = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == nullptr) {
      lib.unavailable =
          "libcublasLt.so.13, a part of CUDA, is not found; install it, or put its folder into LD_LIBRARY_PATH";
      return lib;
    }
    const auto get = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) lib.unavailable = fmt::format("libcublasLt has no {}; install that of CUDA 13", name);
    };
    get(lib.Create, "cublasLtCreate");
    get(lib.Destroy, "cublasLtDestroy");
    get(lib.MatmulDescCreate, "cublasLtMatmulDescCreate");
    get(lib.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
    get(lib.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    get(lib.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    get(lib.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    get(lib.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    get(lib.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    get(lib.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    get(lib.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    get(lib.Matmul, "cublasLtMatmul");
    return lib;
  }();
  return library;
}

void CheckBlas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) Check(cudaErrorMemoryAllocation, what);
  Check(cudaFree(nullptr), what);  // a call that does nothing says more where the device failed
  Throw(PHSA_INTERNAL, "{}: cuBLASLt answered {}", what, static_cast<int>(status));
}

// Something of cuBLASLt's that is given back.
template <class T, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (value_ != nullptr) (TheLibrary().*kDestroy)(value_);
  }
  Owned(Owned&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  T* out() { return &value_; }
  T get() const { return value_; }

 private:
  T value_ = nullptr;
};
using Handle = Owned<cublasLtHandle_t, &Library::Destroy>;
using Description = Owned<cublasLtMatmulDesc_t, &Library::MatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, &Library::MatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, &Library::MatmulPreferenceDestroy>;

struct Shape {
  int32_t m, n, k;
  int64_t y_stride;
  LinearParams::Result result;
  bool bias;
  auto operator<=>(const Shape&) const = default;
};

// What is known of a shape.
struct Product {
  Description description;
  Layout weights, x, y;
  cublasLtMatmulAlgo_t algorithm{};
};

constexpr size_t kMaxProducts = 4096;  // prompts of many lengths would add shapes for ever

}  // namespace

struct Linear::Impl {
  cudaStream_t stream = nullptr;
  Handle handle;
  DeviceBuffer workspace;
  std::map<Shape, Product> products;

  Product& Get(const Shape& shape, const void* bias);
};

// cuBLASLt counts matrices by columns: our y[m][n] is its n × m. So weights are its first operand, transposed, and x is
// its second: both have k contiguous elements, the layout that tensor cores like best.
Product& Linear::Impl::Get(const Shape& shape, const void* bias) {
  if (const auto found = products.find(shape); found != products.end()) return found->second;
  if (products.size() >= kMaxProducts) products.clear();
  const Library& lib = TheLibrary();
  const cudaDataType_t result = shape.result == LinearParams::Result::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
  Product product;
  constexpr const char* kWhat = "a matrix product";
  const auto check = [](cublasStatus_t status) { CheckBlas(status, kWhat); };
  check(lib.MatmulDescCreate(product.description.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check(lib.MatmulDescSetAttribute(product.description.get(), attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  if (shape.bias) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, result);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  const auto m = static_cast<uint64_t>(shape.m), n = static_cast<uint64_t>(shape.n), k = static_cast<uint64_t>(shape.k);
  check(lib.MatrixLayoutCreate(product.weights.out(), CUDA_R_16BF, k, n, shape.k));
  check(lib.MatrixLayoutCreate(product.x.out(), CUDA_R_16BF, k, m, shape.k));
  check(lib.MatrixLayoutCreate(product.y.out(), result, n, m, shape.y_stride));

  Preference preference;
  check(lib.MatmulPreferenceCreate(preference.out()));
  const size_t limit = kWorkspace;
  check(lib.MatmulPreferenceSetAttribute(preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit,
                                         sizeof(limit)));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  check(lib.MatmulAlgoGetHeuristic(handle.get(), product.description.get(), product.weights.get(), product.x.get(),
                                   product.y.get(), product.y.get(), preference.get(), 1, &best, &found));
  if (found == 0) {
    Throw(PHSA_UNSUPPORTED, "{} of {} × {} by {}: cuBLASLt has no way to do it on this GPU; use {}", kWhat, shape.m,
          shape.k, shape.n, Option{"device", "cpu"});
  }
  product.algorithm = best.algo;
  return products.emplace(shape, std::move(product)).first->second;
}

std::string LinearUnavailable() { return TheLibrary().unavailable; }

Linear::Linear(cudaStream_t stream) : impl_(std::make_unique<Impl>()) {
  if (const std::string why = LinearUnavailable(); !why.empty()) Throw(PHSA_UNSUPPORTED, "{}", why);
  impl_->stream = stream;
  CheckBlas(TheLibrary().Create(impl_->handle.out()), "cuBLASLt");
  impl_->workspace = DeviceBuffer(kWorkspace, "room for matrix products");
}

Linear::~Linear() = default;

void Linear::Multiply(const LinearParams& p) {
  const Library& lib = TheLibrary();
  Product& product = impl_->Get({p.m, p.n, p.k, p.y_stride, p.result, p.bias != nullptr}, p.bias);
  if (p.bias != nullptr) {
    CheckBlas(lib.MatmulDescSetAttribute(product.description.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias,
                                         sizeof(p.bias)),
              "a matrix product");
  }
  const float alpha = p.scale, beta = p.result == LinearParams::Result::kAddToF32 ? 1 : 0;
  CheckBlas(lib.Matmul(impl_->handle.get(), product.description.get(), &alpha, p.weights, product.weights.get(), p.x,
                       product.x.get(), &beta, p.y, product.y.get(), p.y, product.y.get(), &product.algorithm,
                       impl_->workspace.data(), impl_->workspace.size(), impl_->stream),
            "a matrix product");
}

}  // namespace phsa::cuda
