"""`python -m sbnet_runtime`: the library's path, what it was built with, what the machine lacks."""

import sys

import sbnet_runtime
from sbnet_runtime import needs

print(f"sbnet-runtime {sbnet_runtime.__version__}")
print(f"library       {sbnet_runtime.library_path()}")
print(f"needs         {needs.summary(sbnet_runtime.library_path())}")
if sbnet_runtime.lacking():
    sys.exit(1)
built = sbnet_runtime.build_info()
print(f"built with    {built['compiler']}, CUDA {built['cuda'] or 'none'} {built['archs']}")
