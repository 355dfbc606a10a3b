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
PRICES = Prices(packet_port=1.0, transceiver=1.0, optical_port=0.5)
"""Guesses: a port of an optical switch at half of a packet switch's, a transceiver as dear as a port."""
WORKLOADS = {
    "dense, 32 B": Traffic(policy_bytes=65e9, gradient_bytes=65e9, trajectory_bytes=1e9),
    "experts, 235 B": Traffic(policy_bytes=470e9, gradient_bytes=470e9, expert_bytes=60e9, expert_nodes=8, trajectory_bytes=1e9),
}
COMPUTE_S = 20.0
"""Seconds of a step in which nothing is sent: before each phase a part of them, in which circuits change unseen."""
USUAL = "fat tree 1:1"


def fabrics(num_gpus: int) -> dict[str, Cluster]:
    """Return the fabrics that are compared. Leaves have 32 cards; the one that reconfigures has 8 ports to the spine and 8 to circuits."""
    tree = Cluster(num_gpus=num_gpus, has_rails=False)
    rails = Cluster(num_gpus=num_gpus, has_rails=True)
    return {
        USUAL: tree,
        "fat tree 2:1": dataclasses.replace(tree, oversubscription=2.0),
        "fat tree 4:1": dataclasses.replace(tree, oversubscription=4.0),
        "fat tree 8:1": dataclasses.replace(tree, oversubscription=8.0),
        "rails 1:1": rails,
        "rails 4:1": dataclasses.replace(rails, oversubscription=4.0),
        "tree 4:1 and circuits": dataclasses.replace(tree, oversubscription=4.0, optical_ports=16),
        "rails 8:1 and circuits": dataclasses.replace(rails, oversubscription=8.0, optical_ports=16),
    }


def measure(*, quick: bool) -> harness.Measured:
    """Return the table."""
    found = harness.Measured()
    ratios: dict[tuple[str, int, str], float] = {}
    for workload, traffic in WORKLOADS.items():
        for num_gpus in SIZES[:2] if quick else SIZES:
            usual: tuple[float, float] | None = None
            for name, cluster in fabrics(num_gpus).items():
                row, step_s, cost = _measured(cluster, traffic)
                usual = usual or (step_s, cost)
                ratios[workload, num_gpus, name] = usual[0] / step_s / (cost / usual[1])
                found.rows.append(
                    {"traffic": workload, "GPUs": num_gpus, "fabric": name}
                    | row
                    | {"speed": usual[0] / step_s, "cost": cost / usual[1], "speed per cost": ratios[workload, num_gpus, name]}
                )
    found.notes.append(
        "the network's cost alone, by guessed prices (port 1, transceiver 1, optical port 0.5): with the GPUs' own, which are most of a"
        " cluster's, cheaper fabrics gain less and slow ones lose"
    )
    found.notes.append(f"a step computes {COMPUTE_S:g} s beside its traffic, a part of it before each phase, in which circuits change")
    return found


def _measured(cluster: Cluster, traffic: Traffic) -> tuple[harness.Row, float, float]:
    fabric = Fabric(cluster=cluster)
    phases = phases_of(cluster, traffic, slack_s=COMPUTE_S / 3)
    fabric.run(phases)
    fabric.num_switches = 0
    seconds = fabric.run(phases)  # of a later step: the first finds no circuits
    row: harness.Row = {f"{name} s": seconds.get(name, 0.0) for name in ("gradients", "experts", "weights")}
    return row | {"switches": fabric.num_switches}, COMPUTE_S + sum(seconds.values()), cost_of(cluster, PRICES)
