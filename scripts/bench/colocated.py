"""Measures what it costs that engines and trainer take turns on the same device: the switch, memory, and copies.

A real vLLM engine and the trainer's own model, optimizer and publisher, each a process, alternate as in a colocated run: passes, sleep,
a row forward and backward and an update, publication, wake, passes. `switch` is all that stands between the last forward pass and the
update, and between the update and the next forward pass: sleep (KV cache and weights given back), the digests of every tensor at both
ends, beside the first of which the trainer gives memory back (`rest`), and the commit. The reference is a memcpy of the policy's bytes:
what a handover by copy moves. Here none move.

Memory is the sum of both processes' proportional set sizes (PSS, shared pages once), sampled throughout: the engine alone before a trainer
is there, both in turns, and the trainer alone after the engine has ended. One physical page: the trainer writes a number into a parameter
while it has the device, the engine reads it in its own; root sees the page's frame number, too (/proc/PID/pagemap).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"

from scripts.bench import children, harness

FOLDER = Path("runs/bench-colocated")
MODELS = {
    "44 M": {"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 32000},
    "0.1 B": {"hidden": 768, "layers": 8, "heads": 12, "vocabulary": 32000},
    "0.2 B": {"hidden": 1024, "layers": 9, "heads": 16, "vocabulary": 32000},
}
"""Qwen3 models with tied embeddings in float32, by their number of parameters."""
KV_BYTES = 512 << 20
"""Of the engine: what it gives back beside its weights."""
NUM_WATCHED = 1
"""A switch after those that are timed, for its memory."""
MARK = 0.015625
"""What the trainer writes for the engine to read: a float32 has it exactly."""


def measure(arguments: Any) -> harness.Measured:
    shutil.rmtree(FOLDER, ignore_errors=True)
    names, num_switches = (["0.1 B"], 3) if arguments.quick else (list(MODELS), 10)
    rows: list[harness.Row] = []
    for name in names:
        children.result_of(_make_model, name)
        rows.append(_alternate(name, num_switches=num_switches))
        print(rows[-1], flush=True)
        shutil.rmtree(FOLDER / name.replace(" ", ""))
    largest = rows[-1]
    return harness.Measured(
        rows=rows,
        goals=[
            harness.at_most(
                "switch over a memcpy of the policy, largest", max(row["switch / memcpy"] for row in rows), 1.5, work=harness.Work.MEMORY
            ),
            harness.at_most("bytes copied to hand a policy over", max(row["bytes copied"] for row in rows), 0),
            harness.at_most("peak of both in turns over the larger phase alone", largest["peak / larger alone"], 1.2),
            harness.at_least("parameters that both see in one page", min(row["one page"] for row in rows), 1),
            harness.at_least("sequences that went on, of those asleep", min(row["went on"] for row in rows), 1.0),
        ],
        notes=[
            "float32, one thread each, all cores for digests",
            "the larger phase is the trainer's: weights, gradient, two moments and a row's activations",
            f"{num_switches} switches of each model; KV cache of {KV_BYTES >> 20} MiB; times are medians",
            "peak over the larger phase is judged for the largest model: the interpreter and libraries of two processes weigh less there",
        ],
    )


def _alternate(name: str, *, num_switches: int) -> harness.Row:
    folder = FOLDER / name.replace(" ", "")
    engine, trainer = _Peer("engine", folder), _Peer("trainer", folder)
    with _Peaks() as peaks:
        peaks.watch("engine alone", engine.process)
        tensors = engine.begin()["tensors"]
        engine.do("ask")
        engine.do("passes", count=4)
        peaks.rest()  # each look takes memory and a core from what is timed
        trainer.begin()
        trainer.do("layout", tensors=tensors)
        copied = trainer.do("copy", count=3)
        times: dict[str, list[float]] = {key: [] for key in ("sleep", "rest", "publish", "stage", "commit", "train")}
        num_asleep = num_went_on = is_one_page = 0
        slept: dict[str, Any] = {}
        published: dict[str, Any] = {}
        for number in range(num_switches + 1 + NUM_WATCHED):
            if number > num_switches:
                peaks.watch("in turns", engine.process, trainer.process)
            slept = engine.do("sleep")
            if number:  # the first has only the policy that both have loaded
                times["train"].append(trainer.do("train")["s"])
            is_last = number == num_switches + NUM_WATCHED
            marked = trainer.do("mark", value=MARK) if is_last else {}
            published = trainer.do("publish")
            taken = engine.do("take", order=published["order"])
            if is_last:
                seen = engine.do("look")
                is_one_page = int(seen["value"] == MARK and seen["frame"] == marked["frame"])
            before = engine.do("passes", count=0)["tokens"]
            num_asleep += taken["num_recomputed"]
            num_went_on += min(engine.do("passes", count=1)["tokens"] - before, taken["num_recomputed"])
            engine.do("passes", count=1)
            if 1 < number <= num_switches:  # the first two also move the parameters, and map the buffer
                seconds = (slept["s"], published["rest_s"], published["publish_s"], taken["stage_s"], taken["commit_s"])
                for key, value in zip(("sleep", "rest", "publish", "stage", "commit"), seconds, strict=True):
                    times[key].append(value)
        engine.do("end")
        engine.process.wait()
        peaks.watch("trainer alone", trainer.process)
        for _ in range(2):
            trainer.do("train")
            trainer.do("publish")
        trainer.do("end")
        trainer.process.wait()
    medians = {key: statistics.median(values) for key, values in times.items()}
    switch_s = sum(medians[key] for key in ("sleep", "publish", "stage", "commit"))  # the trainer's rest lies within its publication
    alone = max(peaks.found["engine alone"], peaks.found["trainer alone"])
    moved, others = published["bytes"]
    return {
        "parameters": name,
        "MB": moved / 1e6,
        "bytes copied": others,
        **{f"{key} ms": 1e3 * medians[key] for key in ("sleep", "rest", "publish", "stage", "commit")},
        "switch ms": 1e3 * switch_s,
        "memcpy ms": 1e3 * copied["memcpy_s"],
        "switch / memcpy": switch_s / copied["memcpy_s"],
        "MB given back by sleep": slept["num_bytes"] / 1e6,
        **{f"{what}, peak MB": value / 1e6 for what, value in peaks.found.items()},
        "peak / larger alone": peaks.found["in turns"] / alone,
        "one page": is_one_page,
        "went on": num_went_on / num_asleep,
    }


class _Peer:
    """A process of `colocated_peers`, which does one thing at a time."""

    def __init__(self, role: str, folder: Path) -> None:
        command = [sys.executable, "-m", "scripts.bench.colocated_peers", role, str(folder), "float32", str(KV_BYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def begin(self) -> dict[str, Any]:
        """Wait until it is there; return what it says of itself."""
        return self._answer("starts")

    def do(self, name: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **options}) + "\n")
        self.process.stdin.flush()
        return self._answer(name)

    def _answer(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a process ended as it {name}: {self.process.args}; run that by hand to see why")
        return json.loads(line)


class _Peaks:
    """The largest sum of proportional set sizes of the processes watched, by what they are watched for."""

    EVERY_S = 0.1
    """Each look walks the page tables of both, which takes them from their work."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._watched: tuple[str, tuple[subprocess.Popen[str], ...]] = ("", ())
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def watch(self, what: str, *processes: subprocess.Popen[str]) -> None:
        """Go on with these processes under this name."""
        self._watched = (what, processes)

    def rest(self) -> None:
        """Look at nothing until told to."""
        self._watched = ("", ())

    def _run(self) -> None:
        while not self._is_done.wait(self.EVERY_S):
            what, processes = self._watched
            if total := sum(map(_pss_bytes, processes)):
                self.found[what] = max(self.found.get(what, 0.0), total)


def _pss_bytes(process: subprocess.Popen[str]) -> int:
    """What a process takes of memory, its part of shared pages; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def _make_model(name: str) -> None:
    """Write random weights; values do not matter to what they take."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3ForCausalLM

    from scripts.bench.qwen3 import qwen3_config

    config = qwen3_config(**MODELS[name], positions=4096)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    noise = torch.randn(1 << 22) * 0.02
    tensors = {}
    for key, parameter in model.named_parameters():
        tensors[key] = noise.repeat(-(-parameter.numel() // len(noise)))[: parameter.numel()].view(parameter.shape).clone()
    folder = FOLDER / name.replace(" ", "")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


if __name__ == "__main__":
    harness.run("colocated", measure, works=(harness.Work.MEMORY,))
