/* MKL calls these two functions to find out whether the processor is made by Intel, and uses slow
 * code on other processors, even if they have AVX-512. Preloaded, the functions let PyTorch use
 * AVX-512 on all processors that have it. They are for measurements only: the peer should be as
 * fast as possible. */
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
