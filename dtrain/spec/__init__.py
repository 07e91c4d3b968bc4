"""job.yaml and cluster.yaml as frozen, validated objects; every mistake has a position in its file."""

from dtrain.spec.cluster import ClusterSpec, Instance, SshOptions, this_machine
from dtrain.spec.dump import dump_job
from dtrain.spec.job import Command, JobSpec, Module, Run, Script
from dtrain.spec.load import benchmark_job, is_cluster_file, load_cluster, load_job
from dtrain.spec.override import Overrides

__all__ = [
    "ClusterSpec",
    "Command",
    "Instance",
    "JobSpec",
    "Module",
    "Overrides",
    "Run",
    "Script",
    "SshOptions",
    "benchmark_job",
    "dump_job",
    "is_cluster_file",
    "load_cluster",
    "load_job",
    "this_machine",
]
