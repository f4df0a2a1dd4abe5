"""Compiles a run without running it: for this machine (`--dry-run`) or a TPU slice (`--plan`).

The TPU compiler (libtpu) works ahead of time on a CPU host, so `--plan v5e:2x2` says whether a
configuration fits a slice nobody has booked yet. It is a compiler's answer, not a measurement.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jhybrid.config import Experiment, MeshConfig
from jhybrid.errors import UserError, first_line
from jhybrid.model import flops_per_token, parameter_count
from jhybrid.sharding import make_mesh
from jhybrid.training.step import Program
from pallas_kernels.tpu_compiler import no_compilation_cache, topology_devices

GIB = 2**30

# HBM of one JAX device, from Google Cloud's TPU documentation. v7x has two devices per chip.
HBM_BYTES: Mapping[str, int] = {
    "TPU v4": 32 * GIB,
    "TPU v5 lite": 16 * GIB,
    "TPU v5": 95 * GIB,
    "TPU v5p": 95 * GIB,
    "TPU v6 lite": 32 * GIB,
    "TPU7x": 96 * GIB,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on each device, as the compiler assigns them."""

    state: int  # parameters, optimizer state and batch
    temporary: int  # gradients, activations, everything inside the step
    output: int  # results that do not reuse the state's memory
    code: int

    @property
    def total(self) -> int:
        return self.state + self.temporary + self.output + self.code


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    device_kind: str
    devices: int
    mesh: MeshConfig
    parameters: int
    trainable: int
    model_flops_per_step: float  # by the formula of jhybrid.model.flops_per_token
    compiled_flops_per_device: float | None  # XLA counts the body of a loop once
    memory: Memory | None  # None: the compiler ran out of memory
    failure: str | None = None  # its words, then
    available: int | None = None  # bytes per device; None when unknown

    @property
    def fits(self) -> bool | None:
        if self.memory is None:
            return False
        return None if self.available is None else self.memory.total <= self.available

    def lines(self) -> list[str]:
        axes = ", ".join(f"{f.name}={getattr(self.mesh, f.name)}" for f in _axes(self.mesh))
        lines = [
            f"devices: {self.devices} x {self.device_kind} ({axes})",
            f"parameters: {self.parameters} ({self.trainable} trainable)",
            f"model FLOPs per step: {self.model_flops_per_step:.4e}",
        ]
        if self.compiled_flops_per_device is not None:
            lines.append(
                f"compiled FLOPs per step and device: {self.compiled_flops_per_device:.4e} "
                f"(bodies of loops counted once)"
            )
        if self.memory is not None:
            parts = dataclasses.asdict(self.memory)
            shown = ", ".join(f"{name} {size / GIB:.3f}" for name, size in parts.items())
            lines.append(f"memory per device: {self.memory.total / GIB:.3f} GiB ({shown})")
        else:
            lines.append(f"memory per device: more than there is: {self.failure}")
        if self.fits is not None:
            available = "" if self.available is None else f" {self.available / GIB:.0f} GiB"
            lines.append(f"fits{available}: {'yes' if self.fits else 'no'}")
        return lines


def _axes(mesh: MeshConfig) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(mesh)


def plan_here(experiment: Experiment) -> Plan:
    """Compiles the step for this machine's own devices."""
    return _compile(experiment, jax.devices(), _memory_of(jax.devices()[0]))


def plan_tpu(experiment: Experiment, topology: str) -> Plan:
    """Compiles the step for a TPU slice named as libtpu does, "v5e:2x2", on a host without one.

    A mesh of one device is widened to the whole slice along `fsdp`; any other must match it.
    """
    devices = _topology_devices(topology)
    mesh = experiment.mesh
    used = mesh.data * mesh.fsdp * mesh.tensor * mesh.context
    if used == 1:
        mesh = dataclasses.replace(mesh, fsdp=len(devices))
        experiment = dataclasses.replace(experiment, mesh=mesh)
    elif used != len(devices):
        raise UserError(
            f"--plan {topology}: it has {len(devices)} devices, the mesh asks for {used}"
        )
    with no_compilation_cache():
        return _compile(experiment, devices, HBM_BYTES.get(devices[0].device_kind))


def _topology_devices(topology: str) -> list[jax.Device]:
    try:
        return topology_devices(topology)
    except RuntimeError as error:
        missing = "not installed" in str(error)
        hint = "pip install 'jhybrid[tpu]'" if missing else "names look like v5e:2x2"
        raise UserError(f"--plan {topology}: {first_line(error)}; {hint}") from None


def _compile(experiment: Experiment, devices: list[jax.Device], available: int | None) -> Plan:
    mesh = make_mesh(experiment.mesh, devices)
    with jax.set_mesh(mesh):
        program = Program(experiment, mesh)
        lowered = program.train_step.lower(program.state, program.batch)
        memory = flops = failure = None
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failure = first_line(error)
        else:
            memory = _memory(compiled.memory_analysis())
            flops = (compiled.cost_analysis() or {}).get("flops")
    tokens = experiment.data.batch_size * experiment.data.sequence_length
    sizes = {path: x.size for path, x in program.state.params.items()}
    return Plan(
        device_kind=devices[0].device_kind,
        devices=mesh.size,
        mesh=experiment.mesh,
        parameters=parameter_count(experiment.model),
        trainable=sum(sizes.values()),
        model_flops_per_step=tokens
        * flops_per_token(experiment.model, experiment.data.sequence_length),
        compiled_flops_per_device=flops,
        memory=memory,
        failure=failure,
        available=available,
    )


def _memory(analysis: Any) -> Memory:
    return Memory(
        state=analysis.argument_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        output=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def _memory_of(device: jax.Device) -> int | None:
    """Bytes this process may use on a present device; None where the runtime does not say."""
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")
