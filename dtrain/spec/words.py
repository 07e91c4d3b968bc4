"""What people type for something else, and what is planned and not carried out yet: for the hints of mistakes."""

from __future__ import annotations

from collections.abc import Collection

from dtrain.spec.mistake import Place, nearest_word

# Where a word's spelling is not near enough to what it means.
_MEANT = {
    "mpiexec": "mpirun",
    "mpi": "mpirun",
    "openmpi": "mpirun",
    "horovod": "mpirun",
    "horovodrun": "mpirun",
    "elastic": "torchrun",
    "torchelastic": "torchrun",
    "accelerate": "none",
    "deepspeed": "none",
    "gpu": "cuda",
    "all": "auto",
    "lr": "learning_rate",
    "batch_size": "batch",
    "global_batch_size": "global",
    "per_replica_batch_size": "per_replica",
    "dataset": "data",
    "hosts": "instances",
    "nodes": "instances",
    "num_nodes": "instances",
    "nnodes": "instances",
    "gpus": "gpus_per_instance",
    "nproc_per_node": "gpus_per_instance",
    "arguments": "args",
    "environment": "env",
    "cwd": "workdir",
    "working_dir": "workdir",
    "key": "identity_file",
    "bastion": "proxy_jump",
}

_OWN_SCRIPT = "or train with a script of your own"
_DDP = "leave data_parallel out: the replicas add up their gradients (ddp)"

# Keys and values of the design that a later release carries out: said so, for nothing that is typed is passed over in silence.
_NOT_YET: dict[Place, str] = {
    ("mpi",): "put that mpirun first on the nodes' PATH; settings of Open MPI go into env, as OMPI_MCA_pml: ob1",
    ("preflight", "min_fraction"): "leave it out: all nodes are wanted",
    **{
        ("trainer", key): f"leave it out, for {today}, {_OWN_SCRIPT}"
        for key, today in (
            ("loss", "cross entropy"),
            ("metrics", "loss and accuracy"),
            ("lr_schedule", "one learning_rate throughout"),
            ("precision", "the precision of the model's parameters"),
            ("clip_grad_norm", "gradients as they are"),
            ("evaluate", "an evaluation after every epoch and at the end"),
            ("checkpoint", "a training in one go"),
            ("resume", "a training in one go"),
            ("profile", "samples/s in the log"),
        )
    },
    ("trainer", "model", "a mapping"): "name a function that takes no arguments: `model: my_models:build`; let it call yours with them",
    ("trainer", "data", "a mapping"): "name a function that takes no arguments: `data: my_data:load`; let it call yours with them",
    ("trainer", "data_parallel", "a mapping"): "write `data_parallel: ddp`, or leave it out: that is the default",
    ("trainer", "data_parallel", "fsdp"): _DDP,
    ("trainer", "data_parallel", "parameter_server"): _DDP,
    ("trainer", "pipeline", "partition", "measured"): "write parameters or uniform",
}


def meant(word: str, words: Collection[str]) -> str | None:
    """The one of the words that a person means: the nearest, or one that is spelt quite differently."""
    return synonym(word, words) or nearest_word(word, words)


def one_letter_off(word: str, words: Collection[str]) -> str | None:
    """The one of the words that is nearer than any word that is spelt differently: `hosts` for `host`."""
    return nearest_word(word, words, at_least=0.85)


def synonym(word: str, words: Collection[str]) -> str | None:
    found = _MEANT.get(word.lower())
    return found if found in words else None


def not_yet(at: Place) -> str | None:
    """What to do instead of a key, or of a value below it, that is not supported yet; None where it never will be."""
    keys = tuple(part for part in at if isinstance(part, str))
    return _NOT_YET.get(keys[1:] if keys[:1] == ("cluster",) else keys)
