"""What the compiler is told by every test: compiling takes most of their time."""

# No optimization, LLVM's emitters instead of MLIR's (a quarter of the time, without a
# pipeline), and one LLVM module a program. What is computed stays the same; the
# wheel is tested, and benchmarks are measured, with the compiler's own choices.
FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
