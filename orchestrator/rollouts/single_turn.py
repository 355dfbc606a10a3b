"""A rollout of one turn: the trajectory is prompt and completion, end to end, in the engine's own token ids."""

from __future__ import annotations

import numpy as np

from pipelinerl.messages import UNSAMPLED, Completion, Prompt, Trajectory


def trajectory_of(
    completion: Completion,
    *,
    prompt: Prompt,
    group_id: int,
    sibling: int,
    engine_id: int,
    admitted_at: float,
    finished_at: float,
    is_greedy: bool = False,
) -> Trajectory:
    """Lay prompt and completion end to end; times are seconds on the run's clock."""
    num_prompt, num_sampled = len(prompt.token_ids), len(completion.token_ids)
    loss_mask = np.zeros(num_prompt + num_sampled, np.bool_)
    loss_mask[num_prompt:] = True
    return Trajectory(
        rollout_id=completion.rollout_id,
        group_id=group_id,
        sibling=sibling,
        attempt=completion.attempt,
        prompt=prompt,
        token_ids=np.concatenate((prompt.token_ids, completion.token_ids)),
        loss_mask=loss_mask,
        logprobs=np.concatenate((np.zeros(num_prompt, np.float32), completion.logprobs)),
        versions=np.concatenate((np.full(num_prompt, UNSAMPLED, np.int32), completion.versions)),
        finish=completion.finish,
        error=completion.error,
        routes=completion.routes,
        recomputed=completion.recomputed,
        is_greedy=is_greedy,
        engine_id=engine_id,
        admitted_at=admitted_at,
        finished_at=finished_at,
    )
