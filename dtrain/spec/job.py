"""The job: the keys of job.yaml, and what becomes of them."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from dtrain.bench.config import AllreduceConfig
from dtrain.errors import MOST_MISTAKES, InFile, InOption
from dtrain.findings import KINDS, WARNABLE
from dtrain.node.folder import SAFE_NAME
from dtrain.spec.cluster import STRICT, ClusterFile, ClusterSpec, lines_mistakes
from dtrain.spec.document import Document
from dtrain.spec.environment import argument_mistakes, env_of, secrets_mistakes
from dtrain.spec.mistake import MOST_PATH_BYTES, Mistake, Place, is_text, misspelt, nearest_file, not_there, path_mistakes, typed
from dtrain.spec.modules import missing_main
from dtrain.spec.trainer import trainer_mistakes
from dtrain.trainers.config import TrainerConfig

Launcher: TypeAlias = Literal["torchrun", "mpirun", "none"]  # none: the job starts its own workers

RUN_KEYS = ("script", "module", "command", "trainer")

_MAX_NAME_BYTES = 255  # of a file, on every file system of Linux
_MAX_GRACE_S = 86400  # a day: longer waits overflow somewhere, and nobody means them


@dataclass(frozen=True, slots=True)
class Script:
    path: str  # relative to the job's workdir
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]


Run: TypeAlias = Script | Module | Command | TrainerConfig | AllreduceConfig


@dataclass(frozen=True, slots=True)
class Preflight:
    """How the check before a launch is to judge."""

    ignore: tuple[str, ...] = ()  # findings that count for nothing


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the user wants to run, and on what."""

    path: Path  # of the job file; absolute
    name: str  # safe as a folder's name
    cluster: ClusterSpec
    launcher: Launcher
    workdir: Path  # absolute; on the nodes where sync is false
    sync: bool
    outputs: str  # relative to workdir, or an absolute path on the nodes
    env: dict[str, str]
    secrets: tuple[str, ...]  # names alone: their values go straight from the environment to the nodes
    run: Run
    grace: float  # seconds from TERM to KILL
    setup: str | None = None  # lines for bash, once on each node before the workers
    preflight: Preflight = Preflight()
    overrides: tuple[str, ...] = field(default=(), compare=False)  # "--set trainer.epochs=3": how it came to be, not what it is
    places: Mapping[str, InFile | InOption] = field(default_factory=dict, repr=False, compare=False)  # by "trainer.batch"


@dataclass(frozen=True)
class PreflightFile:
    """The keys under `preflight`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    ignore: Annotated[
        list[str] | None, Field(description="Names of findings that neither stop a launch nor are shown; docs/preflight.md lists them.")
    ] = None


@dataclass(frozen=True)
class JobFile:
    """The keys of job.yaml. What stands in a folder of the launching machine is only looked at in JobSpec."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: Annotated[
        str | None, Field(description="What the job is called in status, logs and its outputs. Default: the name of this file's folder.")
    ] = None
    cluster: Annotated[
        str | ClusterFile | None,
        Field(description="Where to run: a cluster file, as a path relative to this file, or its keys. Absent: this machine."),
    ] = None
    launcher: Annotated[
        Launcher, Field(description="What starts the workers. none: the command runs once on each node and starts its own.")
    ] = "torchrun"
    workdir: Annotated[
        str,
        Field(
            description="The folder that goes to every node, 500 MB at most, without what .gitignore and .dtrainignore name. "
            "Relative to this file."
        ),
    ] = "."
    sync: Annotated[
        bool, Field(description="false: workdir is an absolute path that every node has, as on a shared file system, and nothing is sent.")
    ] = True
    outputs: Annotated[
        str,
        Field(
            description="A folder in workdir that persists on the nodes per job name, or an absolute path there, used as it is. "
            "Workers find it in $DTRAIN_OUTPUT_DIR."
        ),
    ] = "out"
    setup: Annotated[
        str | None,
        Field(
            description="Lines for bash, such as pip install -r requirements.txt, run once on each node in its workdir before any worker, "
            "with the workers' variables. A line that fails ends it, and the launch. What it leaves running is ended. "
            "Of several jobs on one machine, one at a time."
        ),
    ] = None
    preflight: Annotated[PreflightFile | None, Field(description="What the check before every launch passes over.")] = None
    env: Annotated[
        dict[str, str | None] | None,
        Field(description="Variables of the workers, as text exactly as it is typed. Empty: taken from your environment."),
    ] = None
    secrets: Annotated[
        list[str] | None,
        Field(description="Names of variables that are taken from your environment; dtrain writes their values nowhere."),
    ] = None
    script: Annotated[str | None, Field(description="A Python file in workdir, which every worker runs.")] = None
    module: Annotated[str | None, Field(description="A Python module, which every worker runs as python -m does.")] = None
    command: Annotated[
        str | list[str] | None, Field(description="What every worker runs: a list is the argv itself, a text is a line for bash.")
    ] = None
    trainer: Annotated[TrainerConfig | None, Field(description="A built-in trainer in place of a script.")] = None
    args: Annotated[
        str | list[str] | None,
        Field(description="Arguments of the script, module or command: a list, or a text, split as a shell would, nothing expanded."),
    ] = None
    grace: Annotated[
        float,
        Field(
            description="Seconds between TERM and KILL when the job is ended.", json_schema_extra={"minimum": 0, "maximum": _MAX_GRACE_S}
        ),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class Around:
    """What surrounds a job file when it is read."""

    path: Path  # absolute
    document: Document
    wrong: frozenset[Place]  # of the file, already known
    arguments: tuple[str, ...]
    environ: Mapping[str, str]


def job_spec(file: JobFile, cluster: ClusterSpec, cluster_size: int | None, around: Around) -> tuple[JobSpec | None, list[Mistake]]:
    """The job, and what is wrong with it; None only where something is. `cluster_size` is None where it is not known, too."""
    name = _safe_name(around.path.parent.name) if file.name is None else file.name
    workdir, wrong_workdir = _workdir(file, around)
    env, wrong_env = env_of(file.env or {}, file.launcher, around.environ)
    args, wrong_args = _args(file)
    run, wrong_run = _run(file, args, workdir, cluster_size, around)
    preflight = Preflight(tuple(file.preflight.ignore or ()) if file.preflight is not None else ())
    mistakes = [
        *_name_mistakes(name),
        *wrong_workdir,
        *_outputs_mistakes(file, around.document, workdir),
        *lines_mistakes(file.setup, ("setup",), "pip install -r requirements.txt"),
        *wrong_env,
        *secrets_mistakes(file.secrets or [], env, file.launcher, around.environ),
        *_ignored_mistakes(preflight.ignore),
        *wrong_args,
        *wrong_run,
    ]
    if not 0 <= file.grace <= _MAX_GRACE_S:
        mistakes.append(Mistake(("grace",), f"grace must be from 0 to {_MAX_GRACE_S} seconds, not {file.grace:g}", "30 is usual"))
    if isinstance(run, TrainerConfig) and file.launcher == "none":
        mistakes.append(Mistake(("launcher",), "launcher: none starts no workers, and a trainer needs them", "use torchrun or mpirun"))
    if file.launcher == "mpirun" and (wrong_one := next((one for one in cluster.instances if ":" in (one.address or "")), None)):
        problem = f"launcher: mpirun needs IPv4 addresses, and that of {wrong_one.name} is {wrong_one.address}"
        mistakes.append(Mistake(("launcher",), problem, "give it an IPv4 address, or use torchrun"))
    if run is None:
        return None, mistakes
    outputs, secrets = str(PurePosixPath(file.outputs)), tuple(file.secrets or ())
    return JobSpec(
        around.path,
        name,
        cluster,
        file.launcher,
        workdir,
        file.sync,
        outputs,
        env,
        secrets,
        run,
        file.grace,
        file.setup,
        preflight,
    ), mistakes


def _ignored_mistakes(names: Sequence[str]) -> list[Mistake]:
    mistakes = []
    for index, name in enumerate(names):
        at = ("preflight", "ignore", index)
        if name not in WARNABLE and name in KINDS:
            mistakes.append(Mistake(at, f"{name} cannot be passed over: with it no job can run", KINDS[name].cure))
        elif name not in WARNABLE:
            close = difflib.get_close_matches(name, WARNABLE, n=1) if len(mistakes) < MOST_MISTAKES else []
            hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(sorted(WARNABLE))}"
            mistakes.append(Mistake(at, f"no finding {typed(name)} can be passed over", hint))
    return mistakes


def _safe_name(folder: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip(".-")[:100] or "job"


def _name_mistakes(name: str) -> list[Mistake]:
    if SAFE_NAME.fullmatch(name):
        return []
    hint = "a name is at most 100 letters, digits, '.', '_' and '-', and starts with no '.' or '-'"
    return [Mistake(("name",), f"the name {typed(name)} cannot be a folder's name", f"such as '{_safe_name(name)}': {hint}")]


def _workdir(file: JobFile, around: Around) -> tuple[Path, list[Mistake]]:
    at = ("workdir",)
    if too_long := path_mistakes(file.workdir, at):
        return Path(file.workdir[: MOST_PATH_BYTES + 1]), too_long  # nothing is there either
    if not file.sync:
        workdir = Path(file.workdir)
        if workdir.is_absolute():
            return workdir, []
        at = ("workdir",) if around.document.given("workdir") else ("sync",)
        hint = "write workdir as its absolute path on the nodes, or leave sync out to bring it there"
        return workdir, [] if ("workdir",) in around.wrong else [Mistake(at, "sync: false wants a workdir that all nodes have", hint)]
    workdir = around.path.parent / os.path.expanduser(file.workdir)
    if not is_text(str(workdir)):
        return workdir, [Mistake(at, f"the path {typed(str(workdir))} of workdir is not UTF-8", "rename the folder")]
    if ".." in workdir.parts:
        workdir = Path(os.path.realpath(workdir))
    if os.path.isdir(workdir):
        return workdir, []
    if os.path.exists(workdir):
        return workdir, [Mistake(at, f"workdir {typed(file.workdir)} is not a folder", "name the folder that holds the job's files")]
    hint = nearest_file(str(workdir), file.workdir) or f"it is looked for in {workdir.parent}"
    return workdir, [Mistake(at, f"workdir {typed(file.workdir)} {not_there(workdir)}", hint)]


def _outputs_mistakes(file: JobFile, document: Document, workdir: Path) -> list[Mistake]:
    text = file.outputs
    if too_long := path_mistakes(text, ("outputs",)):
        return too_long
    path = PurePosixPath(text)
    if not file.sync and document.given("outputs") and not path.is_absolute():
        hint = "write an absolute path, or leave it out; workers find the folder in $DTRAIN_OUTPUT_DIR"
        message = "outputs is a folder of the workdir that is sent, and with sync: false none is"
        return [Mistake(("outputs",), message, hint)]
    if file.sync and str(path) == str(workdir):
        return [Mistake(("outputs",), f"outputs {typed(text)} is workdir itself", "name a folder of its own, such as out")]
    if path.name and ".." not in path.parts and not text.startswith("~"):
        if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in path.parts):
            return [Mistake(("outputs",), f"outputs {typed(text)} is longer than a file's name may be", "such as out")]
        if path.is_absolute():
            return []  # on the nodes, which say what is wrong with it
        if _is_behind_a_file(path, workdir):
            return [
                Mistake(("outputs",), f"outputs {typed(text)} is or lies behind a file or a link in workdir", "name a folder of its own")
            ]
        return []
    problem = f"outputs {typed(text)} is neither a folder inside workdir nor an absolute path"
    return [Mistake(("outputs",), problem, "write a path without '..', such as out, or /scratch/runs on the nodes")]


def _is_behind_a_file(path: PurePosixPath, workdir: Path) -> bool:
    """Whether a folder of workdir cannot be made, or would lie elsewhere."""
    here = str(workdir)
    for part in path.parts[:-1]:
        here = os.path.join(here, part)
        if os.path.islink(here) or os.path.isfile(here):
            return True
        if not os.path.exists(here):
            return False
    return os.path.isfile(os.path.join(here, path.name))


def _args(file: JobFile) -> tuple[tuple[str, ...], list[Mistake]]:
    if not isinstance(file.args, str):
        listed = tuple(file.args or ())
        return listed, [each for index, text in enumerate(listed) for each in argument_mistakes(text, ("args", index))]
    try:
        split = tuple(shlex.split(file.args))
        return split, [each for text in split for each in argument_mistakes(text, ("args",))]
    except ValueError as error:
        message = "args has a quote without its partner" if "quotation" in str(error) else f"args cannot be split: {error}"
        return (), [Mistake(("args",), message, "write args as a list, one argument a line")]


def _run(file: JobFile, args: tuple[str, ...], workdir: Path, cluster_size: int | None, around: Around) -> tuple[Run | None, list[Mistake]]:
    document = around.document
    is_seen = file.sync and not {("workdir",), ("sync",)} & around.wrong and os.path.isdir(workdir)  # else only the nodes have it
    there = [key for key in RUN_KEYS if key in document.values and not document.emptied(key)]
    if len(there) > 1:
        at = document.last([(key,) for key in there])
        return None, [Mistake(at, f"a job runs one thing, and {' and '.join(there)} stand here", "keep one of them", of_key=True)]
    if not there:
        if misspelt(RUN_KEYS, (), around.wrong):
            return None, []
        hint = "add one of script, module, command, trainer, such as `script: train.py`"
        return None, [Mistake(document.lacking((), RUN_KEYS), "nothing says what to run", hint)]
    if not document.given(*there):
        return None, [Mistake((there[0],), f"{there[0]} is empty", f"such as `{there[0]}: {_EXAMPLES[there[0]]}`")]
    if there == ["trainer"]:
        mistakes = trainer_mistakes(file.trainer, document, around.wrong, cluster_size, workdir if is_seen else None)
        if file.args is not None:
            message = "args are for a script, a module or a command, not for a trainer"
            mistakes.append(Mistake(("args",), message, "write the trainer's keys instead", of_key=True))
        return file.trainer, mistakes
    args += around.arguments
    if file.script is not None:
        path, mistakes = _script(file, file.script, workdir, around, is_seen=is_seen)
        return Script(path, args), mistakes
    if file.module is not None:
        return Module(file.module, args), _module_mistakes(file.module, workdir if is_seen else None)
    if file.command is not None:
        return _command(file.command, args, workdir if is_seen else None)
    return None, []  # of a wrong type


_EXAMPLES = {
    "trainer": "{model: digits_cnn, data: digits, epochs: 3}",
    "script": "train.py",
    "module": "my_package.train",
    "command": "[accelerate, launch, train.py]",
}


def _script(file: JobFile, text: str, workdir: Path, around: Around, *, is_seen: bool) -> tuple[str, list[Mistake]]:
    """The script as the nodes find it, and what is wrong; a workdir that is only on the nodes cannot be looked into."""
    at = ("script",)
    if too_long := path_mistakes(text, at):
        return text, too_long
    relative = _below(Path(text), workdir) if file.sync else Path(text)
    path = f"./{relative}" if str(relative).startswith("-") else str(relative)  # Python would take it for an option
    if not text.strip():
        return path, [Mistake(at, "script is empty", "such as `script: train.py`")]
    if not is_seen:
        return path, []
    if relative.is_absolute() or ".." in relative.parts:
        hint = "only workdir is brought to the nodes: let workdir name a folder that holds the script"
        return path, [Mistake(at, f"script {typed(text)} lies outside of workdir", hint)]
    found = workdir / relative
    if os.path.isfile(found):
        is_this = os.path.exists(around.path) and os.path.samefile(found, around.path)
        return path, [Mistake(at, f"script {typed(text)} is this job file", "name a Python file")] if is_this else []
    if os.path.exists(found):
        return path, [Mistake(at, f"script {typed(text)} is not a file", "name a Python file")]
    first, *rest = text.split()
    if os.path.basename(first) in ("python", "python3") and rest:
        first, *rest = rest
    if os.path.isfile(workdir / first):
        hint = f"write `script: {first}`" + (" and what follows it under args" if rest else "")
        return path, [Mistake(at, f"script {typed(text)} is not there", hint)]
    hint = nearest_file(str(found), text, other_than=str(around.path)) or f"it is looked for in {found.parent}"
    return path, [Mistake(at, f"script {typed(text)} {not_there(found)}", hint)]


def _below(path: Path, workdir: Path) -> Path:
    """An absolute path as one from workdir, be that named through a link or not; any other as it is."""
    if not path.is_absolute():
        return path  # nor is the current folder looked at, which may have been removed
    for whole, top in ((path, workdir), (Path(os.path.realpath(path.parent), path.name), Path(os.path.realpath(workdir)))):
        if whole.is_relative_to(top):
            return whole.relative_to(top)
    return path


def _module_mistakes(name: str, workdir: Path | None) -> list[Mistake]:
    if all(part.isidentifier() for part in name.split(".")) and not name.endswith(".py"):
        missing = None if workdir is None else missing_main(name, workdir)
        return [] if missing is None else [Mistake(("module",), f"module: {missing[0]}", missing[1])]
    hint = f"write `script: {name}` for a file" if name.endswith(".py") else "such as my_package.train, as after python -m"
    return [Mistake(("module",), f"{typed(name)} is no module's name", hint)]


def _command(command: str | list[str], args: tuple[str, ...], workdir: Path | None) -> tuple[Command, list[Mistake]]:
    """A list is the argv itself; a text is a bash script whose arguments are "$@". `workdir` is None where it cannot be looked into."""
    at = ("command",)
    argv = ("bash", "-c", command, "bash", *args) if isinstance(command, str) else (*command, *args)
    if isinstance(command, list):
        too_long = [each for index, text in enumerate(command) for each in argument_mistakes(text, ("command", index))]
    else:
        too_long = argument_mistakes(command, at)
    if too_long:
        return Command(argv), too_long
    if not command or not (command if isinstance(command, str) else command[0]).strip():
        first = (*at, 0) if isinstance(command, list) and command else at
        return Command(argv), [Mistake(first, "command names no program", f"such as `command: {_EXAMPLES['command']}`")]
    if isinstance(command, list) and (split := _words_of_a_line(command[0], workdir)):
        whole = f", or `command: {command[0].strip()}` as a line for bash" if len(command) == 1 else ""
        hint = f"write `command: [{', '.join(map(json.dumps, [*split, *command[1:]]))}]`{whole}"
        return Command(argv), [Mistake((*at, 0), f"no program is called {typed(command[0])}: each argument is an item of its own", hint)]
    if args and isinstance(command, str) and not re.search(r"\$\{?[@*#0-9]", command):
        hint = 'put "$@" where they belong, or write command as a list'
        return Command(argv), [Mistake(at, 'the arguments reach a command\'s text as "$@", and it does not use that', hint)]
    return Command(argv), []


def _words_of_a_line(program: str, workdir: Path | None) -> list[str]:
    """The words, where a program with its arguments stands in place of the program alone; none where only the nodes can tell."""
    words = program.split()
    if len(words) < 2:
        return []
    if "/" not in words[0]:  # a name is looked for on PATH, where none has spaces
        return words
    is_there = workdir is not None and os.path.isfile(workdir / words[0]) and not os.path.isfile(workdir / program)
    return words if is_there else []
