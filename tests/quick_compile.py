"""Compiler options for `jax.jit(..., compiler_options=QUICK_COMPILE)` in tests of small shapes.

Most of such a test's time goes to compiling, and at this level that is a third of the default's.
JAX takes them on the outermost jit only.
"""

import jax

QUICK_COMPILE = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
