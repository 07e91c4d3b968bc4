"""What a node says of itself, recorded from one: a machine that is fit for every job. Tests change what they are about."""

from __future__ import annotations

from dtrain.node.wire import Address, Gpu, Interface, Limits, Machine, NodeFacts

MACHINE = Machine(
    system="Debian GNU/Linux 12 (bookworm)",
    kernel="6.1.0-18-amd64",
    memory_bytes=64 << 30,
    container="",
    name_means=("10.0.0.1",),
    interfaces=(Interface("lo", "unknown", 65536, 0), Interface("eth0", "up", 1500, 10000)),
    has_infiniband=False,
    limits=Limits(8 << 20, 65536, None),
    shm_bytes=32 << 30,
    free_bytes=100 << 30,
    gpu_driver="550.54.15",
    clock_s=0.0,
    time_zone="+0000",
    ends_at_logout=False,
    jobs=(),
)
FACTS = NodeFacts(
    host_name="box",
    cores=8,
    gpus=tuple(Gpu(index, "NVIDIA H100", 80 << 30, 0) for index in range(8)),
    gpu_fault="",
    python="/usr/bin/python3",
    python_version="3.11.2",
    torch_version="2.13.0",
    cuda_version="12.8",
    nccl_version="2.27.3",
    addresses=(Address("lo", "127.0.0.1", 8, 0), Address("eth0", "10.0.0.1", 24, 10000)),
    bundle="/b",
    node_dir="/var/tmp/dtrain-0",
    job_folder="/j",
    output_dir="/o",
    mpirun="/usr/bin/mpirun",
    mpi_daemon="/usr/bin/orted",
    mpi_version="mpirun (Open MPI) 4.1.4",
    missing="",
    machine=MACHINE,
)
