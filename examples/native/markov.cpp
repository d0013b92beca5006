// One sample of a Markov chain: token by token, so numpy cannot do it at once.
#include <cstdint>

extern "C" void fill(uint64_t seed, uint64_t index, int64_t vocab_size, int64_t* tokens, int64_t count) {
    uint64_t state = (seed << 32) + index;
    int64_t token = 0;
    for (int64_t n = 0; n < count; ++n) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;  // Knuth's generator, modulo 2**64
        token = (token + 1 + int64_t(state >> 62)) % vocab_size;          // 1 to 4 further
        tokens[n] = token;
    }
}
