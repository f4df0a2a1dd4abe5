"""Fixtures and set-up of the whole suite: eight simulated CPU devices, keys, float64, GPU skips."""

import importlib.metadata
import os
import pathlib

# Before JAX is imported: the sharding tests need several devices on a machine without any, and with
# XLA's YNNPACK fusions about one compilation in thirty of a float64 mixer returns zeros, on the
# same program (seen with JAX 0.10.2, 0.11.2 and 0.12.0.1; in float32 not once in a hundred).
# Compiling is most of the suite's time: one part per program is less work than 32 beside each
# other, and JAX 0.10.2 still has the emitters of loops that compile several times faster.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_experimental_ynn_fusion_type=",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false"
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else "",
    ]
).strip()

import sys

import hypothesis
import jax
import pytest
import record_status

from jhybrid import commandline

# Commands run inside this process turn the compilation cache on, for every later test too. Unless
# the developer asked for one, programs are compiled: JAX 0.10.2 crashed reading one for 8 devices.
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_enable_compilation_cache", False)

# Same examples on every run; no deadline, because the first example compiles.
hypothesis.settings.register_profile(
    "suite", max_examples=25, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Forgets compiled programs before they are too many for the kernel.

    Each takes several memory maps of its process, and at 65,530 of them (Linux's vm.max_map_count)
    the next compilation crashes. Between files, because tests of one file share programs.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


@pytest.fixture
def key():
    """A PRNG key, the same in every test."""
    return jax.random.key(0)


@pytest.fixture
def float64():
    """Enables 64-bit types for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def run_command(monkeypatch, capfd):
    """Runs the main() of a module in this process: (exit status, stdout, stderr)."""

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            commandline.run(module.main)
        return stopped.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def quick_compile():
    """Halves compile time, for tests that run each program once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def quick_default_tier(request):
    """Tests that are not slow compile quickly on a CPU, whatever else they ask for."""
    if jax.default_backend() == "cpu" and not request.node.get_closest_marker("slow"):
        request.getfixturevalue("quick_compile")


def pytest_addoption(parser):
    parser.addoption(
        "--record-status",
        action="store_true",
        help="write what the kernel tests show here into pallas_kernels/status.json",
    )


def pytest_configure(config):
    if config.getoption("--record-status") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(record_status.Recorder())


def pytest_collection_modifyitems(items):
    record_status.add_properties(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        reason = f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()} here"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
