"""What the compiler is told by every test: compiling takes most of their time."""

import importlib.util

# No optimization, LLVM's emitters instead of MLIR's (a quarter of the time, without a
# pipeline), and one LLVM module a program. What is computed stays the same; the
# wheel is tested, and benchmarks are measured, with the compiler's own choices.
FLAGS = "--xla_backend_optimization_level=0"
# The compiler for TPUs ends the process at a flag that it does not know.
if importlib.util.find_spec("libtpu") is None:
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
