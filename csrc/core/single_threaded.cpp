// glibc 2.32's flag that GCC's shared pointers read, for systems that have none: false is always right, and costs an
// atomic instruction where a thread is alone.
extern "C" {
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}
