// A lowered model in C++: libtorch only. Build against the torch wheel (the CPU build):
//   T=$(python -c "import torch; print(torch.__path__[0])")
//   g++ -std=c++17 -D_GLIBCXX_USE_CXX11_ABI=1 examples/serve.cpp -o serve -I$T/include -I$T/include/torch/csrc/api/include \
//       -L$T/lib -Wl,-rpath,$T/lib -Wl,--no-as-needed -ltorch_cpu -ltorch -lc10
//   ./serve digits.pt 1 1 8 8        # the file, and the sizes of the one float input
#include <torch/script.h>

#include <chrono>
#include <iostream>

int main(int argc, char** argv) {
  torch::InferenceMode guard;
  torch::jit::Module model = torch::jit::load(argv[1]);  // packs the int8 weights
  if (!model.run_method("self_test").toBool()) {
    std::cerr << argv[1] << ": wrong numbers on this CPU; not serving\n";
    return 1;
  }
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::stoll(argv[i]));
  const torch::Tensor x = torch::zeros(sizes);
  torch::Tensor y;
  for (int i = 0; i < 10; ++i) {
    const auto start = std::chrono::steady_clock::now();
    y = model.forward({x}).toTensor();
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    std::cout << taken.count() << " ms\n";
  }
  std::cout << y << "\n";
}
