"""The whole plan as one value: what `launch --dry-run --json` prints, what the store keeps, and what runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from dtrain.launchers.command import NodeCommand
from dtrain.plan import LaunchPlan
from dtrain.spec import JobSpec
from dtrain.spec.dump import job_file


def plan_json(spec: JobSpec, plan: LaunchPlan, commands: Sequence[NodeCommand]) -> str:
    """With the job as a job file that needs no other file: `job` is null for a benchmark."""
    whole = {"schema_version": 1, "job": job_file(spec), "plan": asdict(plan), "commands": [asdict(each) for each in commands]}
    return json.dumps(whole, indent=1)
