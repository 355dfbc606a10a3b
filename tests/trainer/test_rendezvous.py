"""Ranks of several machines: they meet by a store that strangers cannot use; here both machines are this one."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from pipelinerl.transport.keys import make_keys
from tests import processes
from tests.listeners import listeners_of, tree_of

pytestmark = pytest.mark.process

STARTS = """
    import os, pathlib
    os.environ["PYTHONPATH"] = folder
    from trainer.parallel.ranks import run_ranks
    from trainer.parallel.rendezvous import _meeting_on_network
    with _meeting_on_network(pathlib.Path(folder), is_host=rank == "0", deadline_s=60) as (where, files):
        raise SystemExit(run_ranks(("job", folder), ranks=range(int(rank), int(rank) + 1), world_size=2, meeting=where, inherited=files))
"""
JOB = """
import os, pathlib, sys, time
import torch
from trainer.parallel.replicas import Replicas
replicas = Replicas(ranks=2, deadline_s=60)
total = torch.ones(1)
replicas.sum(total, what="to meet")
pathlib.Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(str(float(total)) + "\\n")
time.sleep(100)
"""


def test_ranks_of_two_machines_meet_by_a_store_that_answers_no_stranger(tmp_path: Path):
    run_folder = tmp_path / "a run # of 100 %"
    (run_folder / "endpoints").mkdir(parents=True)
    make_keys(run_folder, ("trainer-0",))
    orchestrator = {"address": "tcp://127.0.0.1:9", "server_key": "k" * 40}
    (run_folder / "endpoints" / "trainer.json").write_text(json.dumps(orchestrator))
    (run_folder / "job.py").write_text(JOB)
    root = Path(__file__).parents[2]
    machines = [subprocess.Popen(processes.program(STARTS, folder=run_folder, rank=str(rank)), cwd=root) for rank in (0, 1)]
    try:
        assert [processes.read_when_written(run_folder / f"rank-{rank}") for rank in (0, 1)] == ["2.0", "2.0"]
        told = json.loads((run_folder / "endpoints" / "rendezvous.json").read_text())
        found = listeners_of([one for machine in machines for one in tree_of(machine.pid)])
        store = f"{told['host']}:{told['port']}"
        assert [one.process_id for one in found if one.where == store] == [machines[0].pid], "the first machine's parent serves the store"
        assert {one.process_id for one in found if one.where != store}.isdisjoint(machine.pid for machine in machines), "the rest is gloo's"
        with pytest.raises(RuntimeError):
            dist.TCPStore(
                told["host"], told["port"], is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=1)
            ).list_keys()
    finally:
        for machine in machines:
            machine.terminate()
        for machine in machines:
            machine.wait()
