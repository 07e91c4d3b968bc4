"""Files to objects: all mistakes of a job file and its cluster file in one SpecError."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dtrain.bench.config import AllreduceConfig
from dtrain.errors import Problem, SpecError
from dtrain.spec.cluster import ClusterFile, ClusterSpec, cluster_spec, this_machine
from dtrain.spec.document import read_document
from dtrain.spec.job import RUN_KEYS, Around, JobFile, JobSpec, is_text, job_spec
from dtrain.spec.mistake import Mistake, nearest_file, typed
from dtrain.spec.shape import fit, keys_at

_JOB = TypeAdapter(JobFile)
_CLUSTER = TypeAdapter(ClusterFile)
_JOB_EXAMPLE = "script: train.py"
_CLUSTER_EXAMPLE = "instances: [node1, node2]"


def load_job(path: Path, *, cluster: Path | None = None, arguments: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> JobSpec:
    """The job in a file.

    Args:
        cluster: a cluster file that takes the place of the job's own cluster.
        arguments: appended to the job's args.
        environ: where variables without a value, and secrets, are looked up.

    Raises:
        SpecError: all that is wrong with the file, its cluster file and the arguments.
    """
    document = read_document(path, example=_JOB_EXAMPLE)
    if "instances" in document.values and not any(key in document.values for key in RUN_KEYS):
        hint = f"give a job file, and this one with --cluster {document.shown} or in the job file as `cluster: {document.shown}`"
        raise SpecError(document.problems([Mistake(("instances",), "this is a cluster file; a job file is wanted", hint)]))
    file: JobFile | None
    file, mistakes = fit(_JOB, document, elsewhere=_hints(_CLUSTER, "it belongs to the cluster: write it under `cluster:`"))
    others = _argument_problems(arguments)
    where = this_machine()
    spec: JobSpec | None = None
    if file is not None:
        around = Around(_absolute(path), document, frozenset(mistake.at for mistake in mistakes), tuple(arguments), environ)
        where, wrong_cluster, cluster_problems = _cluster_of(file, around, cluster)
        spec, wrong_job = job_spec(file, where, around)
        mistakes += wrong_cluster + wrong_job
        others += cluster_problems
        if arguments and file.trainer is not None:
            others.append(Problem("-- ARG...", "a trainer takes no arguments", "change the keys under trainer instead"))
    problems = document.problems(mistakes) + others
    if problems:
        raise SpecError(problems)
    assert spec is not None, "a job without mistakes is a job"
    return spec


def load_cluster(path: Path) -> ClusterSpec:
    """Raises SpecError: all that is wrong with the file."""
    document = read_document(path, example=_CLUSTER_EXAMPLE)
    run_keys = [key for key in RUN_KEYS if key in document.values]
    if run_keys and "instances" not in document.values:
        mistake = Mistake(
            (run_keys[0],), "this is a job file; a cluster file is wanted", f"a cluster file has instances: `{_CLUSTER_EXAMPLE}`"
        )
        raise SpecError(document.problems([mistake]))
    file: ClusterFile | None
    file, mistakes = fit(_CLUSTER, document, elsewhere=_hints(_JOB, "it belongs into the job file"))
    absolute = _absolute(path)
    if file is None:
        raise SpecError(document.problems(mistakes))
    spec, wrong = cluster_spec(file, (), path=absolute, folder=absolute.parent)
    problems = document.problems(mistakes + wrong)
    if problems:
        raise SpecError(problems)
    return spec


def is_cluster_file(path: Path) -> bool:
    """Whether it has `instances`. Raises SpecError where it cannot be read."""
    return "instances" in read_document(path, example=_JOB_EXAMPLE).values


def benchmark_job(path: Path | None, config: AllreduceConfig) -> JobSpec:
    """A job that measures instead of training.

    Args:
        path: a cluster file, or a job file whose cluster is meant; None: this machine.

    Raises:
        SpecError: all that is wrong with the file.
    """
    return JobSpec(
        path=_absolute(path or Path("benchmark-allreduce")),
        name="allreduce",
        cluster=this_machine() if path is None else _any_cluster(path),
        launcher="torchrun",
        workdir=Path("/"),  # it needs no files
        sync=False,
        outputs="out",
        env={},
        secrets=(),
        run=config,
        grace=5.0,
    )


def _any_cluster(path: Path) -> ClusterSpec:
    return load_cluster(path) if is_cluster_file(path) else load_job(path).cluster


def _absolute(path: Path) -> Path:
    """Without `..`, which pathlib keeps because a link may stand in front of it."""
    absolute = path.absolute()
    return Path(os.path.realpath(absolute.parent)) / absolute.name if ".." in absolute.parts else absolute


def _hints(other: TypeAdapter[Any], hint: str) -> dict[str, str]:
    return dict.fromkeys(keys_at(other, ()), hint)


def _argument_problems(arguments: Sequence[str]) -> list[Problem]:
    wrong = [argument for argument in arguments if not is_text(argument)]
    return [Problem("-- ARG...", f"the argument {typed(argument)} is not UTF-8 text", "write it as UTF-8") for argument in wrong]


def _cluster_of(file: JobFile, around: Around, override: Path | None) -> tuple[ClusterSpec, list[Mistake], list[Problem]]:
    """The cluster, what is wrong in the job file about it, and what is wrong in the cluster's own file."""
    at = ("cluster",)
    if isinstance(file.cluster, ClusterFile):
        spec, mistakes = cluster_spec(file.cluster, at, path=None, folder=around.path.parent)
        return (spec, mistakes, []) if override is None else _cluster_file(override, mistakes)
    if override is not None:
        return _cluster_file(override, [])
    if not file.cluster:
        is_empty = ("cluster" in around.document.values and not around.document.given("cluster")) or file.cluster == ""
        hint = "name a cluster file, or remove the key to train on this machine"
        return this_machine(), [Mistake(at, "cluster is empty", hint)] if is_empty else [], []
    path = Path(around.document.shown).parent / os.path.expanduser(file.cluster)
    if os.path.isdir(path):
        return this_machine(), [Mistake(at, f"the cluster {typed(file.cluster)} is a folder", "name a file in it")], []
    if not os.path.exists(path):
        hint = nearest_file(str(path)) or f"a path relative to {around.path.parent}, or a mapping with instances"
        return this_machine(), [Mistake(at, f"the cluster file {typed(file.cluster)} is not there", hint)], []
    return _cluster_file(path, [])


def _cluster_file(path: Path, mistakes: list[Mistake]) -> tuple[ClusterSpec, list[Mistake], list[Problem]]:
    try:
        return load_cluster(path), mistakes, []
    except SpecError as error:
        return this_machine(), mistakes, list(error.problems)
