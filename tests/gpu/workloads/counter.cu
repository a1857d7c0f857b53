// The contract of contract.py in plain CUDA C: runtime API, one stream, no framework.
//
//     counter LOG [--gib G] [--managed]
//
// --managed: the words lie in managed memory (cudaMallocManaged), which the driver's checkpoint does not support.

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>
#include <vector>

#include <cuda_runtime.h>

static const int64_t A = 1664525, C = 1013904223, MASK = 0xFFFFFFFF;
static const int WORDS = 1 << 20, THREADS = 256;

static volatile sig_atomic_t ended = 0;
static void end(int) { ended = 1; }

static void check(cudaError_t code, const char *what)
{
    if (code != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}

static void append(const std::string &path, const std::string &line)
{
    FILE *file = fopen(path.c_str(), "a");
    if (file == nullptr) {
        perror(path.c_str());
        exit(1);
    }
    fputs((line + "\n").c_str(), file);
    fclose(file);
}

__global__ void fill(uint64_t *memory, size_t count)
{
    for (size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x; at < count; at += size_t(gridDim.x) * blockDim.x)
        memory[at] = (at + 1) * 0x9E3779B97F4A7C15ull;
}

__global__ void begin(int64_t *words)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    words[at] = at;
}

__global__ void advance(int64_t *words, int64_t a, int64_t c, int64_t mask)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    words[at] = (words[at] * a + c) & mask;
}

// FNV-1a over 64-bit words of all constant memory.
static std::string digest(const uint64_t *memory, size_t count)
{
    std::vector<uint64_t> copy(count);
    check(cudaMemcpy(copy.data(), memory, count * sizeof(uint64_t), cudaMemcpyDeviceToHost), "cudaMemcpy of all memory");
    uint64_t hash = 0xCBF29CE484222325ull;
    for (uint64_t word : copy)
        hash = (hash ^ word) * 0x100000001B3ull;
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    return text;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    const std::string log = argv[1], ask = log + ".ask";
    double gib = 0.5;
    bool managed = false;
    for (int at = 2; at < argc; at++) {
        if (strcmp(argv[at], "--managed") == 0)
            managed = true;
        else if (strcmp(argv[at], "--gib") == 0 && at + 1 < argc)
            gib = atof(argv[++at]);
    }
    signal(SIGTERM, end);

    const size_t count = size_t(gib * (1 << 27));
    uint64_t *constant = nullptr;
    int64_t *words = nullptr;
    cudaStream_t stream;
    check(cudaMalloc(&constant, count * sizeof(uint64_t)), "cudaMalloc");
    check(managed ? cudaMallocManaged(&words, WORDS * sizeof(int64_t)) : cudaMalloc(&words, WORDS * sizeof(int64_t)), "state");
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    fill<<<1024, THREADS, 0, stream>>>(constant, count);
    begin<<<WORDS / THREADS, THREADS, 0, stream>>>(words);
    check(cudaStreamSynchronize(stream), "first kernels");

    append(log, "RULE " + std::to_string(WORDS));
    std::vector<int64_t> copy(WORDS);
    for (int64_t step = 1; !ended; step++) {
        advance<<<WORDS / THREADS, THREADS, 0, stream>>>(words, A, C, MASK);
        check(cudaStreamSynchronize(stream), "step");
        const int64_t *seen = words; // managed memory is read where it is
        if (!managed) {
            check(cudaMemcpy(copy.data(), words, WORDS * sizeof(int64_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
            seen = copy.data();
        }
        int64_t sum = 0;
        for (int at = 0; at < WORDS; at++)
            sum += seen[at];
        append(log, "STEP " + std::to_string(step) + " " + std::to_string(sum & MASK));
        if (access(ask.c_str(), F_OK) == 0) {
            unlink(ask.c_str());
            append(log, "DIGEST " + digest(constant, count));
        }
        usleep(50000);
    }
    return 0;
}
