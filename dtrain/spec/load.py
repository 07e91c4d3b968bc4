"""Files to objects: all mistakes of a job file and its cluster file in one SpecError."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dtrain.bench.config import AllreduceConfig
from dtrain.errors import InOption, Problem, SpecError
from dtrain.node.folder import SAFE_NAME
from dtrain.spec.cluster import ClusterFile, ClusterSpec, cluster_spec, this_machine
from dtrain.spec.document import Document, absolute, read_document
from dtrain.spec.job import RUN_KEYS, Around, JobFile, JobSpec, job_spec
from dtrain.spec.mistake import Mistake, nearest_file, not_there, outside, path_mistakes, typed
from dtrain.spec.override import Overrides, Setting, overridden, read_settings, selected
from dtrain.spec.shape import fit, keys_at

_JOB = TypeAdapter(JobFile)
_CLUSTER = TypeAdapter(ClusterFile)
_JOB_EXAMPLE = "script: train.py"
_CLUSTER_EXAMPLE = "instances: [node1, node2]"
_HAS_INSTANCES = f"a cluster file has instances: `{_CLUSTER_EXAMPLE}`"
_AS_IT_STANDS = Overrides()
_THIS_MACHINE = Document("", {"instances": "1"}, {}, frozenset({("instances",)}))  # what is meant where no cluster is named


def load_job(path: Path, overrides: Overrides = _AS_IT_STANDS, *, environ: Mapping[str, str] = os.environ) -> JobSpec:
    """The job in a file.

    Args:
        overrides: what the command line says instead of it.
        environ: where variables without a value, and secrets, are looked up.

    Raises:
        SpecError: all that is wrong with the file, its cluster file and the overrides.
    """
    document = read_document(path, example=_JOB_EXAMPLE)
    if "instances" in document.values and not any(key in document.values for key in RUN_KEYS):
        hint = f"`dtrain launch job.yaml --cluster {document.shown}` runs a job on it, and `dtrain init` writes a job file"
        raise SpecError(document.problems([Mistake(("instances",), "this is a cluster file; a job file is wanted", hint, of_key=True)]))
    document, cluster_settings, others = _with_settings(document, overrides)
    file: JobFile | None
    file, mistakes = fit(
        _JOB, document, elsewhere=_hints(_CLUSTER, f"it belongs to the cluster: write it {_home_of_cluster_keys(document)}")
    )
    where = this_machine()
    spec: JobSpec | None = None
    if file is not None:
        around = Around(absolute(path), document, frozenset(mistake.at for mistake in mistakes), overrides.arguments, environ)
        where, wrong_cluster, cluster_problems = _cluster_of(file, around, overrides.cluster, cluster_settings)
        cluster_size = None
        if not wrong_cluster and not cluster_problems and not any(place[:1] == ("cluster",) for place in around.wrong):
            where, cluster_problems = selected(where, overrides)
            cluster_size = None if cluster_problems else where.size
        spec, wrong_job = job_spec(file, where, cluster_size, around)
        mistakes += outside(wrong_cluster + wrong_job, around.wrong)
        others = cluster_problems + others
        if overrides.arguments and file.trainer is not None:
            others.append(Problem(InOption("-- ARG..."), "a trainer takes no arguments", "change the keys under trainer instead"))
    problems = document.problems(mistakes) + others
    if problems:
        raise SpecError(problems)
    assert spec is not None, "a job without mistakes is a job"
    return replace(spec, overrides=overrides.as_typed(), places=document.places())


def load_cluster(path: Path, settings: Sequence[Setting] = ()) -> ClusterSpec:
    """Raises SpecError: all that is wrong with the file, and with what is set in it."""
    document = read_document(path, example=_CLUSTER_EXAMPLE)
    if (run_key := _job_key(document)) is not None:
        mistake = Mistake((run_key,), "this is a job file; a cluster file is wanted", _HAS_INSTANCES, of_key=True)
        raise SpecError(document.problems([mistake]))
    return _cluster_at(path, document, settings)


def _job_key(document: Document) -> str | None:
    """One that only a job file has, where it is no cluster file."""
    return None if "instances" in document.values else next((key for key in RUN_KEYS if key in document.values), None)


def _cluster_at(path: Path, document: Document, settings: Sequence[Setting]) -> ClusterSpec:
    document, problems = overridden(document, settings)
    path = absolute(path)
    return _cluster_in(document, path, path.parent, problems)


def _cluster_in(document: Document, path: Path | None, folder: Path, others: Sequence[Problem]) -> ClusterSpec:
    file: ClusterFile | None
    file, mistakes = fit(_CLUSTER, document, elsewhere=_hints(_JOB, "it belongs into the job file"))
    if file is None:
        raise SpecError([*document.problems(mistakes), *others])
    spec, wrong = cluster_spec(file, (), path=path, folder=folder)
    problems = [*document.problems(mistakes + outside(wrong, {mistake.at for mistake in mistakes})), *others]
    if problems:
        raise SpecError(problems)
    return spec


def is_cluster_file(path: Path) -> bool:
    """Whether it has `instances`. Raises SpecError where it cannot be read."""
    return "instances" in read_document(path, example=_JOB_EXAMPLE).values


def benchmark_job(path: Path | None, config: AllreduceConfig, overrides: Overrides = _AS_IT_STANDS) -> JobSpec:
    """A job that measures instead of training.

    Args:
        path: a cluster file, or a job file whose cluster is meant; None: this machine.

    Raises:
        SpecError: all that is wrong with the file and the overrides.
    """
    return JobSpec(
        path=absolute(path or Path("benchmark-allreduce")),
        name="allreduce",
        cluster=_any_cluster(path, overrides),
        launcher="torchrun",
        workdir=Path("/"),  # it needs no files
        sync=False,
        outputs="out",
        env={},
        secrets=(),
        run=config,
        grace=5.0,
        overrides=overrides.as_typed(),
    )


def _any_cluster(path: Path | None, overrides: Overrides) -> ClusterSpec:
    if path is not None and not is_cluster_file(path):
        return load_job(path, overrides).cluster
    settings, problems = read_settings(overrides.settings)
    hint = "write the keys of the cluster as --set cluster.KEY=VALUE"
    problems += [Problem(InOption(s.option), "only a cluster is measured", hint) for s in settings if not s.is_for_the_clusters_file]
    problems += overrides.problems()
    if problems:
        raise SpecError(problems)
    below = [setting.below_cluster() for setting in settings]
    if path is not None:
        cluster = load_cluster(path, below)
    else:
        document, problems = overridden(_THIS_MACHINE, below)
        cluster = _cluster_in(document, None, Path.cwd(), problems)
    cluster, problems = selected(cluster, overrides)
    if problems:
        raise SpecError(problems)
    return cluster


def _home_of_cluster_keys(document: Document) -> str:
    named_file = document.values.get("cluster")
    return f"into {named_file}" if isinstance(named_file, str) and named_file.isprintable() else "under `cluster:`"


def _hints(other: TypeAdapter[Any], hint: str) -> dict[str, str]:
    return dict.fromkeys(keys_at(other, ()), hint)


def _with_settings(document: Document, overrides: Overrides) -> tuple[Document, list[Setting], list[Problem]]:
    """The job file with what is set in it, what is to be set in the cluster's own file, and what is wrong with all of it."""
    settings, problems = read_settings(overrides.settings)
    problems += overrides.problems()
    document, wrong = overridden(document, [setting for setting in settings if not setting.is_for_the_clusters_file])
    problems += wrong
    in_cluster = [setting for setting in settings if setting.is_for_the_clusters_file]
    if overrides.cluster is not None:
        doubled = [setting for setting in settings if setting.at == ("cluster",)]
        problems += [Problem(InOption(s.option), "--cluster names another cluster", "keep one of them") for s in doubled]
        return document, [setting.below_cluster() for setting in in_cluster], problems
    if isinstance(document.values.get("cluster"), str) and document.given("cluster"):
        return document, [setting.below_cluster() for setting in in_cluster], problems
    if in_cluster and not document.given("cluster"):
        document = replace(
            document,
            values={**document.values, "cluster": copy.deepcopy(_THIS_MACHINE.values)},
            plain=document.plain | {("cluster", *place) for place in _THIS_MACHINE.plain},
        )
    document, wrong = overridden(document, in_cluster)
    return document, [], problems + wrong


def _cluster_of(
    file: JobFile, around: Around, override: Path | None, settings: Sequence[Setting]
) -> tuple[ClusterSpec, list[Mistake], list[Problem]]:
    """The cluster, what is wrong in the job file about it, and what is wrong in the cluster's own file."""
    at = ("cluster",)
    inline = this_machine()
    mistakes: list[Mistake] = []
    if isinstance(file.cluster, ClusterFile):
        inline, mistakes = cluster_spec(file.cluster, at, path=None, folder=around.path.parent)
    if override is not None:
        cluster, wrong, problems = _cluster_file(override, str(override), around, settings)
        return cluster, mistakes, problems + [Problem(InOption("--cluster"), *each) for each in wrong]
    if isinstance(file.cluster, ClusterFile):
        return inline, mistakes, []
    if not file.cluster:
        is_empty = ("cluster" in around.document.values and not around.document.given(*at)) or file.cluster == ""
        hint = "name a cluster file, or remove the key to train on this machine"
        is_wrong = is_empty and not around.document.emptied(*at)
        return this_machine(), [Mistake(at, "cluster is empty", hint)] if is_wrong else [], []
    if too_long := path_mistakes(file.cluster, at):
        return this_machine(), too_long, []
    path = Path(around.document.shown).parent / os.path.expanduser(file.cluster)
    cluster, wrong, problems = _cluster_file(path, file.cluster, around, settings)
    return cluster, [Mistake(at, *each) for each in wrong], problems


def _cluster_file(
    path: Path, shown: str, around: Around, settings: Sequence[Setting]
) -> tuple[ClusterSpec, list[tuple[str, str]], list[Problem]]:
    """The cluster, why that is no cluster file (message, hint), and what is wrong in it."""
    if os.path.isdir(path):
        return this_machine(), [(f"the cluster {typed(shown)} is a folder", "name a file in it")], []
    if not os.path.exists(path):
        looked_for = f"it is looked for in {absolute(path).parent}, and has instances: `{_CLUSTER_EXAMPLE}`"
        hint = nearest_file(str(path), shown, other_than=around.document.shown) or looked_for
        if SAFE_NAME.fullmatch(shown) and path.suffix not in (".yaml", ".yml"):
            hint = f"for a host of that name write `cluster: {{instances: [{shown}]}}`; for a file, {hint}"
        return this_machine(), [(f"the cluster file {typed(shown)} {not_there(path)}", hint)], []
    try:
        document = read_document(path, example=_CLUSTER_EXAMPLE)
        if _job_key(document) is not None:
            return this_machine(), [(f"the cluster {typed(shown)} is a job file", _HAS_INSTANCES)], []
        return _cluster_at(path, document, settings), [], []
    except SpecError as error:
        return this_machine(), [], list(error.problems)
