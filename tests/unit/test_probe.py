from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dtrain.node import probe
from dtrain.node.folder import NodeDir
from dtrain.node.preparation import Refused
from dtrain.node.wire import NodeFacts, Probe


def said(tmp_path: Path, python: str = sys.executable) -> NodeFacts:
    """By a Python that finds first what lies in tmp_path."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    return probe.facts(Probe(python, mpi=False), environ, NodeDir(str(tmp_path)), (), bundle="", job_folder="", output_dir="")


@pytest.mark.parametrize(
    ("version_py", "folders", "versions"),
    [
        (
            "from typing import Optional\n__version__ = '2.8.0+cu129'\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n",
            ("nvidia_nccl_cu11-2.19.0.dist-info", "nvidia_nccl_cu12-2.27.3.dist-info"),
            ("2.8.0+cu129", "12.9", "2.27.3"),
        ),
        ('__version__ = "2.1.0a0+nv"\ncuda = "12.1"\n', (), ("2.1.0a0+nv", "12.1", "")),  # built with an NCCL of the system's
        ("__version__ = '2.8.0'\ncuda: Optional[str] = None\n", ("nvidia_nccl_cu12-2.27.3.dist-info",), ("2.8.0", "", "")),
        ("", (), ("unknown", "", "")),
    ],
)
def test_torch_says_its_versions_without_being_imported(
    version_py: str, folders: tuple[str, ...], versions: tuple[str, str, str], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError\n")
    (tmp_path / "torch/version.py").write_text(version_py)
    for folder in folders:
        (tmp_path / folder).mkdir()
    facts = said(tmp_path)
    assert (facts.torch_version, facts.cuda_version, facts.nccl_version) == versions


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 0o600, "may not be executed"),
        ("#!/nowhere/python\n", 0o700, "does not run as a Python: No such file or directory"),
        ("#!/bin/sh\nsleep 1000\n", 0o700, "does not run as a Python: no answer within 0.3 s"),
    ],
)
def test_a_python_that_does_not_run_is_told(text: str, mode: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_PYTHON_TIMEOUT_S", 0.3)
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(mode)
    with pytest.raises(Refused) as refused:
        said(tmp_path, str(python))
    assert (refused.value.failed.finding, refused.value.failed.text) == ("python-missing", f"{python} {why}")
