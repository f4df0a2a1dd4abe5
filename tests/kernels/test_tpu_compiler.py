"""Reading the schedules of TPU kernels compiled ahead of time."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from pallas_kernels.tpu_compiler import Loop, read_loops, read_utilisation, weights

PROGRAM = """
LB: loop body
     0   :  { %s0 = smov 0 }
   0x1 LB: > { %s1 = sadd.s32 1, %s0 /* spans
two lines */ }
   0x2   :  {} /* an empty bundle carries no nesting */
   0x3 LB: >> { %s2 = sadd.s32 1, %s3 ;; %p1_p0 = scmp.ge.s32.totalorder %s2, 5 /* loop exit test */ }
   0x4   : > { %s8 = smov (%p1_p0), 3 }
   0x5   : >> { %9 = sbr.rel (!%p1_p0) target = $region1 }
   0x6   : >> { %v1 = vadd.f32 %v0, %v0 }
   0x7 LB: >> { %p4_p2 = scmp.ge.s32.totalorder (%p2_p3), %s2, %s9 /* loop exit test */ }
   0x8   : >> { %10 = sbr.rel (!%p4_p2) target = $region2 }
   0x9 PF: > { %p2_p1 = scmp.ge.s32.totalorder %s1, 10 /* loop exit test */ }
   0xa   : > { %11 = sbr.rel (!%p2_p1) target = $region3 }
   0xb   :  { %s4 = smov 1 }
"""  # noqa: E501

SMALL_KERNEL = """
import json, sys, tempfile
from pallas_kernels import tpu_compiler
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl

def kernel(x_ref, o_ref):
    def body(i, _):
        rows = pl.ds(i * 8, 8)
        o_ref[rows] = jnp.exp(x_ref[rows])
    jax.lax.fori_loop(0, 5, body, None)

def call(x):
    block = pl.BlockSpec((40, 128), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(3,), in_specs=[block], out_specs=block, out_shape=x, name="tiny")(x)

with tempfile.TemporaryDirectory() as folder:
    tpu_compiler.dump_to(folder)
    jaxpr, _ = tpu_compiler.compile_for("v6e", call, jax.ShapeDtypeStruct((120, 128), jnp.float32))
    (kernel,) = tpu_compiler.read_kernels(folder, jaxpr)
print(json.dumps([kernel.name, kernel.steps, kernel.bundles, kernel.loops, kernel.spills,
                  kernel.vmem_bytes], default=lambda x: [x.depth, x.trips, x.bundles]))
"""  # noqa: E501


def test_loops_are_read_with_their_trips():
    owners, loops = read_loops(PROGRAM)
    assert loops == [Loop(1, 10, 4), Loop(2, 5, 4), Loop(2, None, 2)]
    assert owners == [-1, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0, -1]


def test_bundles_of_a_step_are_weighted_by_the_trips_of_the_loops_inside():
    owners, loops = read_loops(PROGRAM)
    np.testing.assert_array_equal(weights(owners, loops), [0, 1, 1, 5, 5, 5, 5, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(weights([-1, -1], []), [1, 1])  # a kernel without a grid


def test_utilisation_is_read_by_unit():
    names, capacity, used = read_utilisation("== CAPACITY:\nMXU, VALU\n 2 4\n== USED:\n0 1\n2 3\n")
    assert names == ["MXU", "VALU"]
    np.testing.assert_array_equal(capacity, [2, 4])
    np.testing.assert_array_equal(used, [[0, 1], [2, 3]])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_schedule_of_a_small_kernel():
    run = subprocess.run([sys.executable, "-c", SMALL_KERNEL], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    name, steps, bundles, loops, spills, vmem = json.loads(run.stdout.splitlines()[-1])
    assert name.startswith("tiny") and steps == 3
    (_, _, outer), (depth, trips, inner) = loops
    assert (depth, trips) == (2, 5)
    assert bundles == outer + 5 * inner
    assert spills == 0
    assert vmem >= 4 * 40 * 128 * 4  # two windows of input and output each
