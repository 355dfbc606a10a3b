"""Static fabrics and one that reconfigures, for a step's traffic of 48 to 2,048 GPUs: seconds, throughput and throughput per cost.

Of OrchestrRL (arXiv 2601.01209) public abstracts say that its fabric's throughput for its cost is superior to static fat trees; a number
they do not give. What it is worth here hangs on what a step computes beside, and on prices, which are guesses: so rows show both.
"""

from __future__ import annotations

import dataclasses

from orchestrator.simulate.fabric import Fabric, Prices, Traffic, cost_of, phases_of
from orchestrator.simulate.network import Cluster
from scripts.bench import harness

SIZES = (48, 256, 1024, 2048)
PRICES = Prices(gpu=20.0, packet_port=1.0, transceiver=1.0, optical_port=0.5)
"""Guesses: a port of an optical switch at half of a packet switch's, a transceiver as dear as a port, a GPU as dear as 20 of them."""
WORKLOADS = {
    "dense, 32 B": Traffic(policy_bytes=65e9, gradient_bytes=65e9, trajectory_bytes=1e9),
    "experts, 235 B": Traffic(policy_bytes=470e9, gradient_bytes=470e9, expert_bytes=60e9, expert_nodes=8, trajectory_bytes=1e9),
}
COMPUTE_S = 20.0
"""Seconds of a step in which nothing is sent: before each phase a part of them, in which circuits change unseen."""
USUAL, CIRCUITS = "fat tree 1:1", "tree 8:1 and circuits"
TREES = (USUAL, "fat tree 2:1", "fat tree 4:1", "fat tree 8:1")


def fabrics(num_gpus: int) -> dict[str, Cluster]:
    """Return the fabrics that are compared. Leaves have 32 cards; with circuits, an eighth of them to the spine and 28 optical ports."""
    tree = Cluster(num_gpus=num_gpus, has_rails=False)
    rails = Cluster(num_gpus=num_gpus, has_rails=True)
    return {
        USUAL: tree,
        "fat tree 2:1": dataclasses.replace(tree, oversubscription=2.0),
        "fat tree 4:1": dataclasses.replace(tree, oversubscription=4.0),
        "fat tree 8:1": dataclasses.replace(tree, oversubscription=8.0),
        "rails 1:1": rails,
        "rails 8:1": dataclasses.replace(rails, oversubscription=8.0),
        CIRCUITS: dataclasses.replace(tree, oversubscription=8.0, optical_ports=28),
        "rails 8:1 and circuits": dataclasses.replace(rails, oversubscription=8.0, optical_ports=28 if rails.spine_ports else 0),
    }


def measure(*, quick: bool) -> harness.Measured:
    """Return the table."""
    found = harness.Measured()
    worth: dict[tuple[str, int, str], float] = {}
    speeds: dict[tuple[str, int, str], float] = {}
    sizes = SIZES[:2] if quick else SIZES
    for workload, traffic in WORKLOADS.items():
        for num_gpus in sizes:
            usual: tuple[float, float] | None = None
            for name, cluster in fabrics(num_gpus).items():
                row, step_s, network = _measured(cluster, traffic)
                cost = network + num_gpus * PRICES.gpu
                usual = usual or (step_s, cost)
                key = workload, num_gpus, name
                speeds[key] = usual[0] / step_s
                worth[key] = speeds[key] * usual[1] / cost
                told = {"speed": speeds[key], "network": network / num_gpus, "cluster": cost / usual[1], "speed per cost": worth[key]}
                found.rows.append({"traffic": workload, "GPUs": num_gpus, "fabric": name} | row | told)
    found.notes.append(
        "costs hang on guessed prices: a port 1, a transceiver 1, an optical port 0.5, a GPU 20; network: of one GPU; cluster: with GPUs"
    )
    found.notes.append(f"a step computes {COMPUTE_S:g} s beside its traffic, a part of it before each phase, in which circuits change")
    largest, experts = sizes[-1], "experts, 235 B"
    found.goals.append(harness.at_least(f"circuits, {experts}, {largest} GPUs: speed over 1:1", speeds[experts, largest, CIRCUITS], 0.95))
    best = max(worth[experts, largest, name] for name in TREES)
    found.goals.append(
        harness.at_least(
            f"circuits, {experts}, {largest} GPUs: speed per cost over the best fat tree", worth[experts, largest, CIRCUITS] / best, 1.0
        )
    )
    return found


def _measured(cluster: Cluster, traffic: Traffic) -> tuple[harness.Row, float, float]:
    fabric = Fabric(cluster=cluster)
    phases = phases_of(cluster, traffic, slack_s=COMPUTE_S / 3)
    fabric.run(phases)
    fabric.num_switches = 0
    seconds = fabric.run(phases)  # of a later step: the first finds no circuits
    row: harness.Row = {f"{name} s": seconds.get(name, 0.0) for name in ("gradients", "experts", "weights")}
    return row | {"switches": fabric.num_switches}, COMPUTE_S + sum(seconds.values()), cost_of(cluster, PRICES)
