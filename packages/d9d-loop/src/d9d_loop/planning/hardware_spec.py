"""Hardware of a cluster: data-sheet values, and a few constants fitted to measurements.

A description is a TOML file, such as `hardware/h100-dgx.toml` in this package. `d9d-plan --calibrate` writes one for
the machine that it runs on.
"""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d9d_dist import UserError

_FOLDER = files("d9d_loop.planning").joinpath("hardware")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Device(_Part):
    """Data sheet of one device."""

    memory_bytes: float = Field(gt=0, description="Bytes of device memory that a process can allocate.")
    memory_bandwidth: float = Field(gt=0, description="Bytes/s of device memory.")
    peak_flops: dict[str, float] = Field(description="FLOP/s of dense matrix products by dtype: bf16, fp8, fp32.")
    num_multiprocessors: int = Field(gt=0, description="Number of multiprocessors, for wave quantization.")
    kernel_seconds: float = Field(default=2e-6, ge=0, description="Seconds from one kernel to the next on the device.")
    shard_seconds: float = Field(
        default=0.0, ge=0, description="Seconds of FSDP's hooks and copies for each gather or scatter (CPU)."
    )
    overlaps: bool = Field(default=True, description="False if communication uses the cores that compute (CPU).")
    host_bandwidth: float = Field(default=25e9, gt=0, description="Bytes/s between device and host memory.")


class Links(_Part):
    """A tier of the network, as seen by one device."""

    bandwidth: float = Field(gt=0, description="Bytes/s of one device in each direction.")
    latency: float = Field(gt=0, description="Seconds of one step of a collective.")


class NodeLinks(Links):
    """The links within a node."""

    switched: bool = Field(
        default=True,
        description="False if each pair of devices has links of its own: to use all of its links, a device must send "
        "to all others of the node.",
    )


class Network(Links):
    """The network between nodes."""

    oversubscription: float = Field(
        default=1.0, ge=1, description="Ratio of the bandwidth below the spine to the bandwidth through it."
    )
    rail_nodes: int = Field(
        default=10**9, gt=0, description="Number of nodes below one leaf or rail; groups of more nodes use the spine."
    )


class Fitted(_Part):
    """Six constants fitted to measurements of a cluster: four of a device, then two of its links."""

    matmul_efficiency: float = Field(
        gt=0, le=1, description="Fraction of the peak that a large matrix product reaches."
    )
    attention_efficiency: float = Field(
        gt=0, le=1, description="Fraction of the bf16 peak that fused attention reaches on long sequences."
    )
    memory_efficiency: float = Field(gt=0, le=1, description="Fraction of the memory bandwidth of pointwise kernels.")
    host_seconds: float = Field(ge=0, description="Seconds that the host needs to launch one operator.")
    link_efficiency: float = Field(gt=0, le=1, description="Fraction of the bandwidth within a node.")
    network_efficiency: float = Field(gt=0, le=1, description="Fraction of the bandwidth between nodes.")


class Hardware(_Part):
    """Cluster of identical nodes."""

    name: str
    device: Device
    devices_per_node: int = Field(gt=0)
    links: NodeLinks
    network: Network
    fitted: Fitted
    fitted_rows: int = Field(
        default=0,
        ge=0,
        description="Number of measured steps to which the constants were fitted; 0 if they were not fitted to steps.",
    )
    dense_error: float = Field(
        default=0.15,
        gt=0,
        lt=1,
        description="Half width of the 90 % interval of a dense decoder's step time, as a fraction: the error on "
        "held-out rows.",
    )
    sparse_error: float = Field(
        default=0.5, gt=0, lt=1, description="The same for a decoder with experts; 0.5 without measured rows."
    )
    memory_error: float = Field(
        default=0.17,
        gt=0,
        lt=1,
        description="Half width of the 90 % interval of memory, as a fraction. It covers the measured rows of four "
        "sources, to which nothing was fitted.",
    )
    failures_per_device_day: float = Field(
        default=1.4e-4,
        gt=0,
        description="Failures that end a job, per device and day. Llama 3 (arXiv 2407.21783): 419 / 16384 / 54.",
    )

    def relative_error(self, *, sparse: bool) -> float:
        """Return the half width of the 90 % interval of a step time, of a decoder with or without experts."""
        return self.sparse_error if sparse else self.dense_error

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the hardware from a TOML file, or from a built-in description such as "h100-dgx".

        Raises:
            UserError: If there is no such file or name, or the file has an invalid value.
        """
        path = Path(name)
        if path.suffix != ".toml":
            if name not in hardware_names():
                raise UserError(
                    f"got the hardware {name!r}; expected one of {', '.join(hardware_names())}, or the path of a TOML "
                    "file, which `d9d-plan --calibrate` writes for this machine."
                )
            text = _FOLDER.joinpath(f"{name}.toml").read_text()
        elif not path.is_file():
            raise UserError(f"the hardware file {path} does not exist. Check --hardware.")
        else:
            text = path.read_text()
        try:
            return cls.model_validate(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            raise UserError(f"the hardware file {name} is invalid: {error}") from None


def hardware_names() -> list[str]:
    """Return the names of the built-in hardware descriptions."""
    return sorted(each.name.removesuffix(".toml") for each in _FOLDER.iterdir() if each.name.endswith(".toml"))
