// Takes a GPU away from a program that has it, as a fault of its own or another program would: preloaded into the
// program (LD_PRELOAD), it waits for a file, whose path PHSA_TEST_BREAK gives, and does what the file says:
//   lose    runs a kernel that ends in a trap: the GPU answers this process nothing from then on
//   fill    takes all memory that the GPU has left
//   free    gives it back
// Then the file goes. Built by scripts/test-cuda.sh for test_failures.py.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace {

__global__ void Trap() { __trap(); }

void Fill(std::vector<void*>& taken) {
  for (size_t bytes = size_t{1} << 33; bytes >= size_t{1} << 12; bytes /= 2) {
    void* memory = nullptr;
    while (cudaMalloc(&memory, bytes) == cudaSuccess) taken.push_back(memory);
    cudaGetLastError();
  }
}

void Watch(const std::string& path) {
  std::vector<void*> taken;
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::string word;
    if (!(std::ifstream(path) >> word)) continue;
    cudaSetDevice(0);
    if (word == "lose") {
      Trap<<<1, 1>>>();
      std::fprintf(stderr, "break_device: %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    } else if (word == "fill") {
      Fill(taken);
    } else if (word == "free") {
      for (void* const memory : taken) cudaFree(memory);
      taken.clear();
    }
    std::remove(path.c_str());
  }
}

__attribute__((constructor)) void Begin() {
  if (const char* const path = std::getenv("PHSA_TEST_BREAK")) std::thread(Watch, std::string(path)).detach();
}

}  // namespace
