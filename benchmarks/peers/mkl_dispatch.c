/* MKL asks these two functions whether the processor is Intel's, and takes its slow paths on any other, whatever its instruction set.
 * Preloaded, they let PyTorch use AVX-512 where the processor has it. For measuring alone: it makes the peer as fast as it can be. */
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
